"""An experiment file declares what to measure; this turns it into cells and runs. It starts nothing.

    name = "quickstart"            [base]  settings every run shares (a partial RunSpec)
    seeds = [0, 1]                 [[arm]] the methods compared: a label and the settings that make it
    [[part]]                       its own base, seeds and arms win; axes are crossed with the arms
    name = "timing"
    axes.network.rate_mbit = [10, 30, 100]

Settings are RunSpec's keys, nested or dotted. Precedence: base < part's base < axes < arm; `--set` replaces
what the base or an axis says, and is refused where an arm says it, since the arm's label would then be
untrue. TOML has no null: "none" stands for it where a setting may be empty.

>>> load("smoke").name
'smoke'
"""

from __future__ import annotations

import itertools
import json
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from thinpipe.harness.errors import UserError, near_miss

TOP_KEYS = ("name", "title", "question", "base", "seeds", "arm", "part")
PART_KEYS = ("name", "base", "axes", "seeds", "arm")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Folders of results/ that are not an experiment's.
RESERVED = ("runs",)

if typing.TYPE_CHECKING:
    from thinpipe.harness.spec import RunSpec

Settings = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """All seeds of one setting. `settings`: what the axes and the arm set, by dotted key."""

    part: str
    arm: str
    settings: Mapping[str, Any]
    cell_id: str
    runs: tuple[tuple[int, RunSpec], ...]


@dataclass(frozen=True)
class ExperimentPart:
    """One grid of an experiment: arms x axes."""

    name: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Experiment:
    """A declared grid, expanded. `seeds` in the order they are to be run."""

    name: str
    title: str
    question: str
    parts: tuple[ExperimentPart, ...]

    def cells(self) -> Iterator[Cell]:
        for part in self.parts:
            yield from part.cells

    @property
    def seeds(self) -> list[int]:
        return list(dict.fromkeys(seed for cell in self.cells() for seed, _ in cell.runs))


def builtin() -> dict[str, str]:
    """Text of each experiment that comes with the package, by name."""
    files = resources.files("thinpipe.experiments").iterdir()
    return {f.name[:-5]: f.read_text(encoding="utf-8") for f in files if f.name.endswith(".toml")}


def load(source: str | Path, overrides: Sequence[str] = ()) -> Experiment:
    """Read an experiment by path, by the name of one that comes with the package, or a stored run.json.

    overrides: "a.b=v" texts, v a TOML value or a bare word. Raises UserError naming the file and what is
    wrong."""
    where, text = _read(str(source))
    if where.endswith(".json"):
        data = _from_run(where, text)
    else:
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise UserError(f"{where} is not valid TOML: {error}") from None
    return expand(data, overrides, where=where)


def expand(data: Mapping[str, Any], overrides: Sequence[str] = (), *, where: str = "experiment") -> Experiment:
    """Expand declared data (as TOML gives it) into an Experiment. Pure but for reading plug-ins' literals."""
    _known(data, TOP_KEYS, where)
    changes = dict(parse_override(text) for text in overrides)
    name = changes.pop("name", data.get("name"))
    seeds = changes.pop("seeds", None)
    if not isinstance(name, str) or not NAME.fullmatch(name) or name in RESERVED:
        raise UserError(f"{where}: `name` must be a word of letters, digits, . _ - (and not `runs`), got {name!r}.")
    declared = _tables(data, "part", where)
    if not declared:
        raise UserError(f"{where}: there is no [[part]], so there is nothing to run. Add one with name, base and arm.")
    changes = {key: _value(key, value, "--set") for key, value in changes.items()}
    parts = []
    for item in declared:
        merged = {"seeds": data.get("seeds", [0]), "arm": data.get("arm", []), **item}
        if seeds is not None:
            merged["seeds"] = seeds
        parts.append(_expand_part(merged, data.get("base", {}), changes, where))
    _unique([part.name for part in parts], f"{where}: part name")
    return Experiment(name, str(data.get("title", name)), str(data.get("question", "")), tuple(parts))


def _expand_part(item: Mapping[str, Any], shared: Any, changes: Settings, where: str) -> ExperimentPart:
    _known(item, PART_KEYS, f"{where} part")
    name = item.get("name")
    if not isinstance(name, str) or not name:
        raise UserError(f"{where}: a [[part]] needs a name.")
    where = f"{where} part {name!r}"
    base = {**flatten(shared, f"{where} base"), **flatten(item.get("base", {}), f"{where} base")}
    axes = _axes(item.get("axes", {}), changes, where)
    seeds = _seeds(item["seeds"], where)
    arms = _arms(item["arm"], axes, changes, where)
    fixed = {key: value for key, value in changes.items() if key not in axes}
    cells = []
    for label, own in arms:
        for point in itertools.product(*axes.values()):
            settings = {**dict(zip(axes, point, strict=True)), **own}
            runs = _runs({**base, **fixed, **settings}, seeds, f"{where} arm {label!r}")
            cells.append(Cell(name, label, settings, runs[0][1].cell_id, runs))
    return ExperimentPart(name, tuple(cells))


def _runs(merged: Settings, seeds: list[int], where: str) -> tuple[tuple[int, RunSpec], ...]:
    from thinpipe.harness.spec import parse

    return tuple((seed, parse({**nest(merged), "seed": seed}, where=where)) for seed in seeds)


def _axes(data: Any, changes: Settings, where: str) -> dict[str, list[Any]]:
    axes = {}
    for key, values in flatten(data, f"{where} axes", convert=False).items():
        if key in changes:
            values = changes[key] if isinstance(changes[key], list) else [changes[key]]
        if not isinstance(values, list) or not values:
            raise UserError(f"{where}: axis {key} must be a list of at least one value, got {values!r}.")
        _unique(values, f"{where}: axis {key} value")
        axes[key] = [_value(key, value, f"{where} axes") for value in values]
    return axes


def _arms(data: Any, axes: Mapping[str, Any], changes: Settings, where: str) -> list[tuple[str, Settings]]:
    arms = []
    for item in _tables({"arm": data}, "arm", where):
        label = item.get("label")
        if not isinstance(label, str) or not label:
            raise UserError(f"{where}: each arm needs a label (its name in figures and tables).")
        if not label.isprintable():
            raise UserError(f"{where}: the arm label {label!r} holds characters that cannot be printed.")
        own = flatten({key: value for key, value in item.items() if key != "label"}, f"{where} arm {label!r}")
        for key in own:
            if key in axes:
                raise UserError(f"{where}: {key} is an axis and is also set by arm {label!r}. Keep one of them.")
            if key in changes:
                raise UserError(
                    f"--set {key}: arm {label!r} of {where} sets it, so its label would be untrue. "
                    "Choose arms with --only arm=..., or edit the experiment."
                )
        arms.append((label, own))
    if not arms:
        raise UserError(f"{where}: there is no arm. Add [[arm]] or [[part.arm]] with a label and its settings.")
    _unique([label for label, _ in arms], f"{where}: arm label")
    return arms


def _seeds(values: Any, where: str) -> list[int]:
    values = values if isinstance(values, list) else [values]
    if not values or not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
        raise UserError(f"{where}: seeds must be a list of whole numbers from 0, got {values!r}.")
    _unique(values, f"{where}: seed")
    return values


def parse_override(text: str) -> tuple[str, Any]:
    """("a.b", value) of "a.b=v"; UserError on an unknown key.

    >>> parse_override("network.rate_mbit=[10, 30]")
    ('network.rate_mbit', [10, 30])
    """
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UserError(f"--set {text!r}: write it as key=value, e.g. --set train.epochs=3")
    valid = {**setting_keys(), "seeds": False, "name": False}
    if key not in valid:
        hint = " Seeds are set as a list: --set seeds=[0,1]" if key == "seed" else _near_key(key, valid)
        raise UserError(f"--set {key}: unknown key.{hint}")
    try:
        parsed = tomllib.loads(f"v = {value.strip()}")
    except tomllib.TOMLDecodeError:
        return key, value.strip()
    return (key, parsed["v"]) if set(parsed) == {"v"} else (key, value.strip())


@cache
def setting_keys() -> Mapping[str, bool]:
    """Every dotted key of a RunSpec but the seed -> whether it may be empty (None)."""
    from thinpipe.harness.spec import RunSpec

    def walk(model: Any, prefix: str) -> Iterator[tuple[str, bool]]:
        for name, field in model.model_fields.items():
            if hasattr(field.annotation, "model_fields"):
                yield from walk(field.annotation, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", type(None) in typing.get_args(field.annotation)

    return {key: empty for key, empty in walk(RunSpec, "") if key != "seed"}


def flatten(data: Any, where: str, *, convert: bool = True) -> Settings:
    """Nested or dotted settings -> {dotted key: value}; UserError on a key that RunSpec does not have."""
    keys = setting_keys()
    flat: Settings = {}

    def walk(node: Any, prefix: str) -> None:
        for name, value in node.items():
            key = f"{prefix}{name}"
            if key in keys:
                if key in flat:
                    raise UserError(f"{where}: {key} is set twice.")
                flat[key] = _value(key, value, where) if convert else value
            elif isinstance(value, Mapping) and any(k.startswith(f"{key}.") for k in keys):
                walk(value, f"{key}.")
            elif any(k.startswith(f"{key}.") for k in keys):
                raise UserError(f"{where}: {key} is a group of settings, it cannot be {value!r}.")
            else:
                hint = " Seeds are listed in `seeds`." if key == "seed" else _near_key(key, keys)
                raise UserError(f"{where}: unknown key {key!r}.{hint}")

    if not isinstance(data, Mapping):
        raise UserError(f"{where}: must be a table of settings, got {data!r}.")
    walk(data, "")
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{dotted key: value} -> nested dicts.

    >>> nest({"a.b": 1, "a.c": 2})
    {'a': {'b': 1, 'c': 2}}
    """
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *groups, leaf = key.split(".")
        node = nested
        for group in groups:
            node = node.setdefault(group, {})
        node[leaf] = value
    return nested


def _value(key: str, value: Any, where: str) -> Any:
    if key in setting_keys() and setting_keys()[key] and value == "none":
        return None
    return value


def _near_key(key: str, valid: Mapping[str, bool]) -> str:
    """The near miss of a dotted key: among its own group where that exists, so that the list stays
    readable."""
    group = key.rpartition(".")[0]
    same = [k for k in valid if k.rpartition(".")[0] == group]
    if group and same:
        return near_miss(key, same)
    import difflib

    leaf = key.rpartition(".")[2]
    close = difflib.get_close_matches(key, valid, n=1) or [k for k in valid if k.rpartition(".")[2] == leaf]
    hint = f" Did you mean {close[0]!r}?" if close else ""
    groups = sorted({k.partition(".")[0] for k in valid})
    return f"{hint} Valid groups: {', '.join(groups)}."


def _read(source: str) -> tuple[str, str]:
    """(where it came from, text) of an experiment given by path or by name."""
    path = Path(source)
    known = builtin()
    if path.suffix in (".toml", ".json") or "/" in source:
        try:
            return source, path.read_text(encoding="utf-8")
        except FileNotFoundError:
            hint = f" The one that comes with thinpipe is called {path.stem!r}." if path.stem in known else ""
            raise UserError(f"there is no experiment file {source}.{hint}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read the experiment file {source}: {error}") from None
    if source not in known:
        raise UserError(f"unknown experiment {source!r}.{near_miss(source, known)} Or give the path of a TOML file.")
    return source, known[source]


def _from_run(where: str, text: str) -> dict[str, Any]:
    """The experiment that repeats one stored run."""
    try:
        stored = json.loads(text)
        spec = dict(stored["spec"])
        run_id = str(stored["run_id"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{where} is not a stored run: it needs `run_id` and `spec`, as run.json has them.") from None
    seed = spec.pop("seed", 0)
    name = f"run-{run_id}"
    part = {"name": "run", "seeds": [seed], "base": spec, "arm": [{"label": run_id}]}
    return {"name": name, "title": f"run {run_id} again", "part": [part]}


def _known(data: Any, valid: Sequence[str], where: str) -> None:
    if not isinstance(data, Mapping):
        raise UserError(f"{where}: must be a table, got {data!r}.")
    for key in data:
        if key not in valid:
            raise UserError(f"{where}: unknown key {key!r}.{near_miss(str(key), valid)}")


def _tables(data: Mapping[str, Any], key: str, where: str) -> list[Mapping[str, Any]]:
    items = data.get(key, [])
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise UserError(f"{where}: write {key} as [[{key}]], one table each.")
    return items


def _unique(values: Sequence[Any], what: str) -> None:
    seen: list[Any] = []
    for value in values:
        if value in seen:
            raise UserError(f"{what} {value!r} is given twice.")
        seen.append(value)
