"""An experiment file declares what to measure; this turns it into cells and runs. It starts nothing.

    name = "quickstart"            [base]  settings every run shares (a partial RunSpec)
    seeds = [0, 1]                 [[arm]] the methods compared: a label and the settings that make it
    [[part]]                       its own base, seeds and arms win; axes are crossed with the arms
    name = "timing"
    axes.network.rate_mbit = [10, 30, 100]

Settings are RunSpec's keys, nested or dotted. Precedence: base < part's base < axes < arm; `--set` replaces
what the base or an axis says, and is refused where an arm says it, since the arm's label would then be
untrue. TOML has no null: "none" stands for it where a setting may be empty. Sizes and workloads: sizes.py;
[[claim]], [compose] and needs: declared.py.

>>> load("smoke").name
'smoke'
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from thinpipe.harness import declared, sizes
from thinpipe.harness.declared import Claim, Compose
from thinpipe.harness.errors import UserError, near_miss
from thinpipe.harness.settings import Settings, empty, flatten, nest, parse_override

TOP_KEYS = (
    "name", "title", "question", "base", "seeds", "arm", "part", "workload", "size", "claim", "compose", "needs",
    "figures",
)  # fmt: skip
PART_KEYS = ("name", "base", "axes", "seeds", "arm")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# Folders of results/ that are not an experiment's.
RESERVED = ("runs", "reference")
# Folders of experiments/ that hold something else.
NO_EXPERIMENTS = ("workloads", "profiles", "wan")
#: The part of the runs that composed curves are held against.
COMPOSITION_CHECK = "composition-check"

if typing.TYPE_CHECKING:
    from thinpipe.harness.spec import RunSpec


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
    """A declared grid, expanded. `seeds` in the order they are to be run; claims: those of this size; unasked: name of
    each claim that the changes leave nothing of to compare -> why; figures: the ones it is drawn in, all that fit when
    empty."""

    name: str
    title: str
    question: str
    parts: tuple[ExperimentPart, ...]
    size: str | None = None
    claims: tuple[Claim, ...] = ()
    compose: Compose | None = None
    needs: tuple[tuple[str, str], ...] = ()
    figures: tuple[str, ...] = ()
    #: How it was asked for: name or path, and the changes.
    source: str = ""
    overrides: tuple[str, ...] = ()
    unasked: Mapping[str, str] = field(default_factory=dict)

    def cells(self) -> Iterator[Cell]:
        for part in self.parts:
            yield from part.cells

    @property
    def seeds(self) -> list[int]:
        return list(dict.fromkeys(seed for cell in self.cells() for seed, _ in cell.runs))


def builtin() -> dict[str, str]:
    """Text of each experiment that comes with the package, by name; of one in a folder: `acsgd/F3a`."""
    root = resources.files("thinpipe.experiments")
    folders = [("", root)] + [
        (f"{f.name}/", f) for f in root.iterdir() if f.is_dir() and f.name not in NO_EXPERIMENTS and f.name[0].isalpha()
    ]
    return {
        f"{prefix}{f.name[:-5]}": f.read_text(encoding="utf-8")
        for prefix, folder in folders
        for f in folder.iterdir()
        if f.name.endswith(".toml")
    }


def group(name: str) -> list[str]:
    """The experiments that come with the package in one folder, e.g. `acsgd`, in the order of their names."""
    return sorted((n for n in builtin() if n.startswith(f"{name}/")), key=_natural)


def _natural(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", name)]


def load(source: str | Path, overrides: Sequence[str] = (), size: str | None = None) -> Experiment:
    """Read an experiment by path, by the name of one that comes with the package, or a stored run.json.

    overrides: "a.b=v" texts, v a TOML value or a bare word; size: of one that has sizes. Raises UserError naming the
    file and what is wrong."""
    where, text = _read(str(source))
    if where.endswith(".json"):
        data = _from_run(where, text)
    else:
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise UserError(f"{where} is not valid TOML: {error}") from None
    made = expand(data, overrides, where=where, size=size)
    return replace(made, source=str(source), overrides=tuple(overrides))


def expand(
    data: Mapping[str, Any], overrides: Sequence[str] = (), *, where: str = "experiment", size: str | None = None
) -> Experiment:
    """Expand declared data (as TOML gives it) into an Experiment. Pure but for reading plug-ins' literals."""
    _known(data, TOP_KEYS, where)
    changes = dict(parse_override(text) for text in overrides)
    name = changes.pop("name", data.get("name"))
    seeds = changes.pop("seeds", None)
    if not isinstance(name, str) or not NAME.fullmatch(name) or name in RESERVED:
        raise UserError(
            f"{where}: `name` must be a word of letters, digits, . _ - (100 at most; and not {', '.join(RESERVED)}), "
            f"got {name!r}."
        )
    items = _tables(data, "part", where)
    if not items:
        raise UserError(f"{where}: there is no [[part]], so there is nothing to run. Add one with name, base and arm.")
    layer = sizes.choose(data, size, where)
    changes = {key: empty(key, value) for key, value in changes.items()}
    parts = []
    for item in items:
        merged = {"seeds": data.get("seeds", [0]), "arm": data.get("arm", []), **item}
        if layer.seeds is not None and "seeds" not in item:
            merged["seeds"] = layer.seeds
        merged |= {key: value for key, value in layer.parts.get(str(item.get("name")), {}).items() if key == "seeds"}
        if seeds is not None:
            merged["seeds"] = seeds
        if item.get("name") not in layer.skip:
            parts.append(_expand_part(merged, layer, changes, where))
    _unique([part.name for part in parts], f"{where}: part name")
    if not parts:
        raise UserError(f"{where}: size {layer.name!r} skips every part, so there is nothing to run.")
    layer.check_arms([cell.arm for part in parts for cell in part.cells], where)
    composed = None
    if "compose" in data:
        composed = declared.compose(data["compose"], where)
    if composed is not None and {composed.timing, composed.convergence} & set(layer.skip):
        composed = None  # a size without one of the two has no curves
    if composed is not None:
        parts += _composition_check(composed, parts, str(name), where)
    asked, unasked = _claims(data, layer.name, parts, where, changed=bool(changes))
    return Experiment(
        name if layer.name is None else f"{name}.{layer.name}",
        str(data.get("title", name)),
        str(data.get("question", "")),
        tuple(parts),
        layer.name,
        asked,
        composed,
        declared.needs(data.get("needs", []), where),
        declared.figures(data.get("figures", []), where),
        unasked=unasked,
    )


def _expand_part(item: Mapping[str, Any], layer: sizes.Layer, changes: Settings, where: str) -> ExperimentPart:
    _known(item, PART_KEYS, f"{where} part")
    name = item.get("name")
    if not isinstance(name, str) or not name:
        raise UserError(f"{where}: a [[part]] needs a name.")
    where = f"{where} part {name!r}"
    own = layer.parts.get(name, {})
    base: Settings = {}
    for settings in (*layer.base, item.get("base", {}), own.get("base", {})):
        base |= flatten(settings, f"{where} base")
    axes = _axes(item.get("axes", {}), own.get("axes", {}), changes, where)
    seeds = _seeds(item["seeds"], where)
    arms = [(label, arm) for label, arm in _arms(item["arm"], axes, changes, where) if layer.keeps(label)]
    if not arms:
        raise UserError(f"{where}: size {layer.name!r} keeps none of its arms.")
    fixed = {key: value for key, value in changes.items() if key not in axes}
    cells = []
    # A stored run has both: the ratio as asked for, and what it came to.
    stored = where.partition(" part ")[0].endswith(".json")
    both = {"network.rate", "network.rate_mbit"}
    for label, arm in arms:
        asked = {key for key, value in {**base, **fixed, **axes, **arm}.items() if key in both and value is not None}
        if asked == both and not stored:
            raise UserError(
                f"{where} arm {label!r}: network.rate and network.rate_mbit both say the rate of links: leave one out."
            )
        for point in itertools.product(*axes.values()):
            settings = {**dict(zip(axes, point, strict=True)), **arm}
            runs = _runs({**base, **fixed, **settings}, seeds, f"{where} arm {label!r}")
            cells.append(Cell(name, label, settings, runs[0][1].cell_id, runs))
    return ExperimentPart(name, tuple(cells))


def _claims(
    data: Mapping[str, Any], size: str | None, parts: Sequence[ExperimentPart], where: str, *, changed: bool
) -> tuple[tuple[Claim, ...], dict[str, str]]:
    """The claims of one size, each checked against the parts and arms that there are, and those left out.

    One that does not fit them is an error of the file, unless they were changed from outside: a single rate instead of
    an axis leaves a claim about that axis without sense, and the runs no worse.
    """
    found = declared.claims(_tables(data, "claim", where), where)
    for claim in found:
        for name in claim.sizes:
            if name not in sizes.SIZES:
                raise UserError(f"{where} claim {claim.name!r}: unknown size {name!r}.{near_miss(name, sizes.SIZES)}")
        if claim.sizes and size is None:
            raise UserError(
                f"{where} claim {claim.name!r}: it is of size {', '.join(claim.sizes)}, but the file has no sizes, so "
                "it would never be asked. Leave `sizes` out."
            )
    found = tuple(claim for claim in found if not claim.sizes or size in claim.sizes)
    unasked: dict[str, str] = {}
    if found:
        from thinpipe.harness import claims

        by_name = {part.name: part for part in parts}
        for claim in found:
            try:
                claims.check(claim, by_name, where)
            except UserError as error:
                if not changed:
                    raise
                unasked[claim.name] = str(error)
    return tuple(claim for claim in found if claim.name not in unasked), unasked


def _composition_check(
    composed: Compose, parts: Sequence[ExperimentPart], name: str, where: str
) -> list[ExperimentPart]:
    """The runs in full that composed curves are held against: a share of (arm, network, seed), drawn by the name."""
    by_name = {part.name: part for part in parts}
    for part in (composed.timing, composed.convergence):
        if part not in by_name:
            raise UserError(f"{where} compose: there is no part {part!r}.{near_miss(part, by_name)}")
    for part, measures in ((composed.timing, ("timing",)), (composed.convergence, ("convergence", "full"))):
        if others := {s.measure for c in by_name[part].cells for _, s in c.runs} - set(measures):
            raise UserError(
                f"{where} compose: part {part!r} has measure = {others.pop()!r}, where {' or '.join(measures)} is "
                "meant."
            )
    if not composed.check:
        return []
    trained = {
        (cell.arm, cell.cell_id, seed): (cell, spec)
        for cell in by_name[composed.convergence].cells
        for seed, spec in cell.runs
    }
    networks: dict[str, tuple[Cell, RunSpec]] = {}
    for cell in by_name[composed.timing].cells:
        spec = cell.runs[0][1]
        if spec.compute == "replay":
            raise UserError(
                f"{where} compose: a replayed part ({composed.timing}) trains nothing, so no curve of it can be run in "
                "full: set check = 0"
            )
        networks.setdefault(f"{spec.network.model_dump_json()} {spec.data_parallel.rate_mbit}", (cell, spec))
    every = [(key, place) for key in trained for place in networks]
    drawn = random.Random(f"{COMPOSITION_CHECK}/{name}").sample(every, max(1, math.ceil(composed.check * len(every))))
    cells: dict[tuple[str, str, str], list[tuple[int, RunSpec]]] = {}
    for key, place in sorted(drawn):
        arm, cell_id, seed = key
        cells.setdefault((arm, cell_id, place), []).append((seed, _in_full(trained[key][1], networks[place][1])))
    made = [
        Cell(
            COMPOSITION_CHECK,
            arm,
            _settings_in_full(trained[arm, cell_id, runs[0][0]][0].settings, networks[place][0].settings),
            runs[0][1].cell_id,
            tuple(runs),
        )
        for (arm, cell_id, place), runs in cells.items()
    ]
    return [ExperimentPart(COMPOSITION_CHECK, tuple(made))]


def _in_full(trained: RunSpec, timed: RunSpec) -> RunSpec:
    """A training at the network of a timing run, that of its data groups too."""
    exchange = trained.data_parallel.model_copy(update={"rate_mbit": timed.data_parallel.rate_mbit})
    return trained.model_copy(update={"network": timed.network, "data_parallel": exchange, "measure": "full"})


def _settings_in_full(trained: Mapping[str, Any], timed: Mapping[str, Any]) -> Settings:
    return {k: v for k, v in trained.items() if not _of_network(k)} | {k: v for k, v in timed.items() if _of_network(k)}


def _of_network(key: str) -> bool:
    return key.startswith("network.") or key == "data_parallel.rate_mbit"


def _runs(merged: Settings, seeds: list[int], where: str) -> tuple[tuple[int, RunSpec], ...]:
    from thinpipe.harness.spec import parse

    return tuple((seed, parse({**nest(merged), "seed": seed}, where=where)) for seed in seeds)


def _axes(data: Any, of_size: Any, changes: Settings, where: str) -> dict[str, list[Any]]:
    axes = {}
    declared_axes = flatten(data, f"{where} axes", convert=False) | flatten(of_size, f"{where} axes", convert=False)
    for key, values in declared_axes.items():
        if key in changes:
            values = changes[key] if isinstance(changes[key], list) else [changes[key]]
        if not isinstance(values, list) or not values:
            raise UserError(f"{where}: axis {key} must be a list of at least one value, got {values!r}.")
        _unique(values, f"{where}: axis {key} value")
        axes[key] = [empty(key, value) for value in values]
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


def _read(source: str) -> tuple[str, str]:
    """(where it came from, text) of an experiment given by path or by name."""
    path = Path(source)
    known = builtin()
    if source not in known and (path.suffix in (".toml", ".json") or "/" in source):
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
