"""Runs of a result set as cells: all seeds of one part, arm and setting, and what tells a cell from its neighbours.

Shared by export.py and compare.py. Pure.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thinpipe.harness.claims.metrics import REGISTRY
from thinpipe.harness.claims.subject import Metric
from thinpipe.harness.dotted import flat
from thinpipe.harness.errors import UserError, near_miss
from thinpipe.harness.metrics import RUNS
from thinpipe.harness.resultset import ResultSet

#: States of runs whose numbers count; of a foreign one not its times.
ENDED = ("done", "foreign")


@dataclass(frozen=True)
class CellRuns:
    """The runs of one cell. settings: those that differ among the cells of its part and arm. runs: seed -> its row."""

    part: str
    arm: str
    settings: Mapping[str, Any]
    runs: Mapping[int, Mapping[str, Any]]

    @property
    def label(self) -> str:
        """What sets this cell apart, as people read it."""
        return ", ".join(f"{key.rpartition('.')[2]} {_word(value)}" for key, value in self.settings.items())

    def values(self, metric: Metric, *, flagged: bool = False) -> dict[int, float]:
        """Seed -> finite value of the runs that have one; times of no run of another machine, nor, unless `flagged` are
        wanted, of a flagged one."""
        found = {}
        for seed, row in self.runs.items():
            value = row[metric.name]
            left_out = metric.is_time and (not timed(row) or (row["fidelity"] != "ok" and not flagged))
            if row["state"] in ENDED and known(value) and not left_out:
                found[seed] = float(value)
        return found

    def count(self, state: str) -> int:
        return sum(row["state"] == state for row in self.runs.values())

    @property
    def has_flags(self) -> bool:
        return any(row["fidelity"] != "ok" for row in self.runs.values())


@functools.cache
def _defaults() -> Mapping[str, Any]:
    """Dotted key -> its default: a run's settings leave it out, and its neighbours' may not."""
    from thinpipe.harness.spec import parse

    return flat(parse({}).model_dump(mode="json"))


def _word(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def known(value: Any) -> bool:
    """Whether a table's value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def timed(row: Mapping[str, Any]) -> bool:
    """Whether a run was run for its times, here: a convergence run samples errors within its steps."""
    return row["state"] == "done" and row["measure"] != "convergence"


def cells(found: ResultSet, differing: Mapping[tuple[str, str], Sequence[str]] | None = None) -> list[CellRuns]:
    """The cells of a set in the order of its runs. differing: settings that set cells of a part and arm apart."""
    differing = differing or {pair: sorted(values) for pair, values in varying(found).items()}
    groups: dict[tuple[str, str, str], tuple[dict[str, Any], dict[int, Any]]] = {}
    for row in found.tables["runs"].to_dict("records"):
        own = found.settings.get(row["run_id"], {})
        settings = {key: own.get(key, _defaults().get(key)) for key in differing.get((row["part"], row["arm"]), ())}
        key = (row["part"], row["arm"], json.dumps(settings, sort_keys=True))
        _, runs = groups.setdefault(key, (settings, {}))
        if row["seed"] in runs:
            raise UserError(
                f"{found.name}: part {row['part']!r} has two runs of arm {row['arm']!r} with seed {row['seed']} and "
                "the same settings: the set is damaged."
            )
        runs[row["seed"]] = row
    return [CellRuns(part, arm, settings, runs) for (part, arm, _), (settings, runs) in groups.items()]


def varying(found: ResultSet) -> dict[tuple[str, str], set[str]]:
    """(part, arm) -> settings, besides the seed, in which its runs differ. What one leaves at its default differs
    from any value another gives it."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in found.tables["runs"].to_dict("records"):
        groups.setdefault((row["part"], row["arm"]), []).append(found.settings.get(row["run_id"], {}))
    return {
        pair: {
            key
            for key in {key for one in group for key in one} - {"seed"}
            if len({json.dumps(one.get(key), sort_keys=True) for one in group}) > 1
        }
        for pair, group in groups.items()
    }


def metric_of(name: str) -> Metric:
    """A number of the runs table with its unit and direction. UserError with a near miss for another name."""
    numbers = {column: REGISTRY[column] for column in RUNS if column in REGISTRY}
    if name not in numbers:
        raise UserError(f"there is no number {name!r} of a run.{near_miss(name, numbers)}")
    return numbers[name]
