"""Cells x store -> an ordered list of runs, each with its state and the seconds it is predicted to take.

States: done, diverged, failed, pending; `stale`: finished, but a plug-in's source has changed since (its
VERSION has not); `foreign`: finished on another machine. Stale and foreign runs are shown, and repeated only
when forced. Order: every cell for the first seed, then for the next; shuffled within a seed, by a fixed seed
that is recorded, so that a partial sweep can be plotted and drift of the machine hits all cells alike."""

from __future__ import annotations

import fnmatch
import random
import statistics
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from thinpipe.harness import manifest
from thinpipe.harness.errors import UserError, near_miss
from thinpipe.harness.experiment import Cell, Experiment
from thinpipe.harness.predict import predict
from thinpipe.harness.settings import setting_keys
from thinpipe.harness.spec import RunSpec
from thinpipe.harness.store import Store

STATES = ("done", "diverged", "failed", "pending", "stale", "foreign")
SHUFFLE_SEED = 20240229
ENTRY_KEYS = ("part", "arm", "seed", "state", "cell", "run_id")


@dataclass(frozen=True)
class Entry:
    """One run of the plan. `uses`: every (part, arm) that names it; part and arm are the first of them.

    status: what status.json said when the plan was made; note: what a reader should know about the state.
    """

    run_id: str
    spec: RunSpec
    part: str
    arm: str
    cell: str
    seed: int
    state: str
    predicted_s: float
    uses: tuple[tuple[str, str], ...]
    status: Mapping[str, Any] | None = None
    note: str | None = None

    @property
    def name(self) -> str:
        """For people: `timing / FP32 / 10 Mbit/s / seed 0`."""
        rate = self.spec.network.rate_mbit
        link = "unlimited" if rate is None else f"{rate:g} Mbit/s"
        return f"{self.part} / {self.arm} / {link} / seed {self.seed}"


@dataclass(frozen=True)
class Plan:
    """Runs in the order they are executed. `limit`: the most that one sweep may start."""

    experiment: str
    entries: tuple[Entry, ...]
    limit: int | None = None
    shuffle_seed: int = SHUFFLE_SEED

    def counts(self) -> dict[str, int]:
        """Number of runs by state, in the order of STATES; states without runs left out."""
        found = [entry.state for entry in self.entries]
        return {state: found.count(state) for state in STATES if state in found}

    def todo(self, *, retry_failed: bool = False, force: bool = False) -> list[Entry]:
        """The runs a sweep would execute now, in order."""
        chosen = [
            entry
            for entry in self.entries
            if force or entry.state == "pending" or (retry_failed and entry.state == "failed")
        ]
        return chosen[: self.limit]

    def refreshed(self, store: Store) -> Plan:
        """The same runs with their states read again."""
        times = _Times(store, self.entries)
        return replace(self, entries=tuple(_with_state(entry, store, times) for entry in self.entries))


def make(experiment: Experiment, store: Store, *, only: str | None = None, limit: int | None = None) -> Plan:
    """Plan an experiment against what `store` holds; each run once, however many arms name it.

    only: `key=value,...`, all of which must hold; value may have wildcards and alternatives (`arm=FP32|AQ*`).
    Raises UserError on an unknown key or when nothing matches.
    """
    if limit is not None and limit < 1:
        raise UserError(f"--limit {limit}: must be at least 1.")
    entries = _unique_runs(experiment.cells())
    times = _Times(store, entries)
    entries = [_with_state(entry, store, times) for entry in _ordered(entries, experiment.seeds)]
    if only is not None:
        entries = _select(entries, only)
    return Plan(experiment.name, tuple(entries), limit)


def join(
    experiments: Sequence[Experiment], store: Store, name: str, *, only: str | None = None, limit: int | None = None
) -> Plan:
    """One plan of several experiments, one after the other, a run that they share once. Parts are named
    `EXPERIMENT: PART`. Raises UserError as `make` does."""
    if limit is not None and limit < 1:
        raise UserError(f"--limit {limit}: must be at least 1.")
    cells = [
        (experiment, replace(cell, part=f"{experiment.name}: {cell.part}"))
        for experiment in experiments
        for cell in experiment.cells()
    ]
    entries = _unique_runs(cell for _, cell in cells)
    first = {entry.run_id: entry.part.partition(":")[0] for entry in entries}
    times = _Times(store, entries)
    ordered = [
        entry
        for experiment in experiments
        for entry in _ordered([e for e in entries if first[e.run_id] == experiment.name], experiment.seeds)
    ]
    planned = [_with_state(entry, store, times) for entry in ordered]
    return Plan(name, tuple(planned if only is None else _select(planned, only)), limit)


def _unique_runs(cells: Iterable[Cell]) -> list[Entry]:
    found: dict[str, Entry] = {}
    for cell in cells:
        for seed, spec in cell.runs:
            run_id, use = spec.run_id, (cell.part, cell.arm)
            if run_id in found:
                found[run_id] = replace(found[run_id], uses=(*found[run_id].uses, use))
            else:
                found[run_id] = Entry(
                    run_id, spec, cell.part, cell.arm, cell.cell_id, seed, "pending", 0.0, uses=(use,)
                )
    return list(found.values())


def _ordered(entries: list[Entry], seeds: list[int]) -> list[Entry]:
    ordered = []
    for seed in seeds:
        block = [entry for entry in entries if entry.seed == seed]
        random.Random(f"{SHUFFLE_SEED}/{seed}").shuffle(block)
        ordered += block
    return ordered


def _with_state(entry: Entry, store: Store, times: _Times) -> Entry:
    status, problem = store.read_status(entry.run_id)
    state, note = ("pending", problem) if status is None else _finished_state(entry, status, store)
    return replace(entry, state=state, note=note, status=status, predicted_s=times.of(entry))


def _finished_state(entry: Entry, status: Mapping[str, Any], store: Store) -> tuple[str, str | None]:
    state = status["state"]
    if state == "failed":
        return state, (status.get("error") or "").partition("\n")[0] or None
    if status.get("machine") != manifest.machine_id():
        return "foreign", f"{state} on another machine ({status.get('machine')})"
    try:
        kept = store.manifest(entry.run_id)
    except UserError as error:
        return "stale", str(error)
    then = kept.get("plugins", {})
    before = kept.get("inputs", {})
    other = [path for path, now in manifest.input_hashes(entry.spec).items() if before.get(path, now) != now]
    if other:
        return "stale", f"content changed since: {', '.join(other)}"
    changed = [
        key
        for key, now in manifest.plugin_hashes(entry.spec).items()
        if then.get(key, now)["source_hash"] != now["source_hash"]
    ]
    if changed:
        return "stale", f"source changed since: {', '.join(changed)}"
    return state, None


class _Times:
    """Predicted seconds of a run: the median wall time of finished runs of its cell, else the formula's."""

    def __init__(self, store: Store, entries: Iterable[Entry]) -> None:
        walls: dict[str, list[float]] = {}
        for entry in entries:
            status = store.status(entry.run_id)
            if status is not None and status["state"] == "done" and status.get("machine") == manifest.machine_id():
                walls.setdefault(entry.cell, []).append(status["wall_s"])
        self.measured = {cell: statistics.median(values) for cell, values in walls.items()}

    def of(self, entry: Entry) -> float:
        return self.measured.get(entry.cell) or predict(entry.spec)


def _select(entries: list[Entry], text: str) -> list[Entry]:
    tests = [_condition(item) for item in _split(text)]
    chosen = [entry for entry in entries if all(test(entry) for test in tests)]
    if not chosen:
        parts = sorted({part for entry in entries for part, _ in entry.uses})
        arms = sorted({arm for entry in entries for _, arm in entry.uses})
        raise UserError(f"--only {text!r} matches no run. Parts: {', '.join(parts)}. Arms: {', '.join(arms)}.")
    return chosen


def _condition(item: str) -> Callable[[Entry], bool]:
    key, equals, wanted = item.partition("=")
    key = key.strip()
    valid = {*ENTRY_KEYS, *setting_keys()}
    if not equals:
        raise UserError(f"--only {item!r}: write it as key=value, e.g. --only arm=FP32,network.rate_mbit=10")
    if key not in valid:
        raise UserError(f"--only: unknown key {key!r}.{near_miss(key, valid)}")
    choices = [choice.strip() for choice in wanted.split("|")]
    if key in ("part", "arm"):
        index = 0 if key == "part" else 1
        return lambda entry: any(_matches(use[index], choice) for use in entry.uses for choice in choices)
    if key in ENTRY_KEYS:
        return lambda entry: any(_matches(getattr(entry, key), choice) for choice in choices)
    return lambda entry: any(_matches(_setting(entry.spec, key), choice) for choice in choices)


def _setting(spec: RunSpec, key: str) -> Any:
    value: Any = spec
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _matches(value: Any, wanted: str) -> bool:
    if isinstance(value, str):
        # Brackets are no wildcard here: compressors and labels are full of them.
        return fnmatch.fnmatchcase(value, wanted.replace("[", "[[]"))
    if value is None:
        return wanted == "none"
    try:
        return bool(tomllib.loads(f"v = {wanted}")["v"] == value)
    except tomllib.TOMLDecodeError:
        return False


def _split(text: str) -> list[str]:
    """Split at commas outside brackets: `delta(fixpoint:2, cache=fixpoint:8)` is one value."""
    items, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            items.append(text[start:index])
            start = index + 1
    return [item for item in [*items, text[start:]] if item.strip()]
