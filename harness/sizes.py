"""Sizes of an experiment, and the workload it shares with others: layers of settings below its own.

    workload = "gpt2"               experiments/workloads/gpt2.toml: [base] and [size.*] that several experiments share
    [size.check]                    the same question asked small: seeds, base, skip (parts), arms (label patterns),
    seeds = [0]                     and for one part `part.NAME` with seeds, base, axes
    base.train.epochs = 2

Settings, the later winning: workload base < workload size base < base < size base < part base < size part base < axes
< arm. One size is chosen when the experiment is loaded, `cpu` unless another is named.
"""

from __future__ import annotations

import fnmatch
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from thinpipe.harness.errors import UserError, near_miss

SIZES = ("check", "cpu", "paper")
DEFAULT = "cpu"
SIZE_KEYS = ("seeds", "base", "skip", "arms", "part")
SIZE_PART_KEYS = ("seeds", "base", "axes")
WORKLOAD_KEYS = ("base", "size")


@dataclass(frozen=True)
class Layer:
    """What a size changes: `base` of every part; `parts` by name. seeds None: as declared."""

    name: str | None = None
    base: tuple[Mapping[str, Any], ...] = ()
    seeds: Any = None
    skip: tuple[str, ...] = ()
    arms: tuple[str, ...] = ("*",)
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def check_arms(self, labels: Sequence[str], where: str) -> None:
        """Raise UserError for a pattern of `arms` that keeps nothing."""
        for pattern in self.arms:
            if pattern != "*" and not any(replace(self, arms=(pattern,)).keeps(label) for label in labels):
                raise UserError(f"{where} size {self.name!r}: no arm is like {pattern!r}.")

    def keeps(self, label: str) -> bool:
        """Whether an arm of this label belongs to the size."""
        # Brackets are no wildcard: compressors and labels are full of them.
        return any(fnmatch.fnmatchcase(label, pattern.replace("[", "[[]")) for pattern in self.arms)


def choose(data: Mapping[str, Any], size: str | None, where: str) -> Layer:
    """The layers of one size of an experiment: `base` in order of precedence, the experiment's own base among them."""
    shared = _workload(data, where)
    own, below = _sizes(data, where), _sizes(shared, f"workload {data.get('workload')!r}")
    there = [name for name in SIZES if name in own or name in below]
    if not there:
        if size is not None:
            raise UserError(f"{where} has no sizes, so not {size!r} either: leave the size out.")
        return Layer(base=(shared.get("base", {}), data.get("base", {})))
    chosen = size or DEFAULT
    if chosen not in there:
        raise UserError(f"{where} has no size {chosen!r}.{near_miss(chosen, there)}")
    mine, under = own.get(chosen, {}), below.get(chosen, {})
    layer = Layer(
        chosen,
        (shared.get("base", {}), under.get("base", {}), data.get("base", {}), mine.get("base", {})),
        mine.get("seeds", under.get("seeds")),
        _texts(mine, "skip", where),
        _texts(mine, "arms", where) if "arms" in mine else ("*",),
        mine.get("part", {}),
    )
    _check_parts(layer, data, f"{where} size {chosen!r}")
    return layer


def _check_parts(layer: Layer, data: Mapping[str, Any], where: str) -> None:
    parts = data.get("part", [])
    names = [part.get("name") for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
    for name in (*layer.skip, *layer.parts):
        if name not in names:
            raise UserError(f"{where}: there is no part {name!r}.{near_miss(name, [n for n in names if n])}")
    if both := sorted(set(layer.skip) & set(layer.parts)):
        raise UserError(f"{where}: part {both[0]!r} is skipped, and also changed: leave one out.")
    for name, changes in layer.parts.items():
        _known(changes, SIZE_PART_KEYS, f"{where} part {name!r}")


def _workload(data: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    name = data.get("workload")
    if name is None:
        return {}
    known = workloads()
    if not isinstance(name, str) or name not in known:
        raise UserError(f"{where}: unknown workload {name!r}.{near_miss(str(name), known)}")
    found = tomllib.loads(known[name])
    _known(found, WORKLOAD_KEYS, f"workload {name!r}")
    for size, content in _sizes(found, f"workload {name!r}").items():
        _known(content, ("seeds", "base"), f"workload {name!r} size {size!r}")
    return found


def workloads() -> dict[str, str]:
    """Text of each workload that comes with the package, by name."""
    folder = resources.files("thinpipe.experiments") / "workloads"
    if not folder.is_dir():
        return {}
    return {Path(f.name).stem: f.read_text(encoding="utf-8") for f in folder.iterdir() if f.name.endswith(".toml")}


def _sizes(data: Mapping[str, Any], where: str) -> Mapping[str, Mapping[str, Any]]:
    sizes = data.get("size", {})
    _known(sizes, SIZES, f"{where} size")
    for name, content in sizes.items():
        _known(content, SIZE_KEYS, f"{where} size {name!r}")
        _known(content.get("part", {}), None, f"{where} size {name!r} part")
    return sizes


def _texts(data: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    values = data.get(key, [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise UserError(f"{where}: {key} of a size must be a list of texts, got {values!r}.")
    return tuple(values)


def _known(data: Any, valid: tuple[str, ...] | None, where: str) -> None:
    if not isinstance(data, Mapping):
        raise UserError(f"{where}: must be a table, got {data!r}.")
    for key in data:
        if valid is not None and key not in valid:
            raise UserError(f"{where}: unknown key {key!r}.{near_miss(str(key), valid)}")
