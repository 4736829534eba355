"""The numbers of an experiment's runs as its claims ask for them: by unit and seed, and why one is missing."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from thinpipe.harness.claims import scope as claim_scope
from thinpipe.harness.claims.scope import Hypothesis, Unit
from thinpipe.harness.claims.subject import Flagged, Metric, NoValue, Subject, Value
from thinpipe.harness.claims.times import at_network
from thinpipe.harness.errors import UserError

if TYPE_CHECKING:
    from thinpipe.harness.declared import Claim
    from thinpipe.harness.experiment import Experiment
    from thinpipe.harness.spec import RunSpec

#: What a run is worth that diverged, or never got there: worse than any number.
WORST = {"lower": math.inf, "higher": -math.inf}


@dataclass(frozen=True)
class Reading:
    """values: seed -> unit -> value, of seeds for which every unit has one. missing, left_out: a clause each that says
    how many runs gave none and why, "" where there is nothing to say; what is left out does not keep a claim open.
    timing_runs: how many runs the times of curves rest on, of the unit where they are fewest: one that was measured
    whole rests on itself, composed ones on timing runs, shared or not; None of what is no time of curves."""

    values: Mapping[int, Mapping[Unit, Value]]
    missing: str
    left_out: str
    timing_runs: int | None


class _Lost(Exception):
    """A run without a value. `out`: it is left out, as a flagged one is of what is about time."""

    def __init__(self, reason: str, *, out: bool = False) -> None:
        super().__init__(reason)
        self.out = out


class Reader:
    """Reads values of runs from an experiment's tables. A run is found by its id: what the file declares now counts,
    not what an older version of it left in the tables."""

    def __init__(self, experiment: Experiment, tables: Mapping[str, pd.DataFrame]) -> None:
        self.parts = {part.name: part for part in experiment.parts}
        self._rows = {row["run_id"]: row for row in tables["runs"].to_dict("records")}
        self._groups = {
            name: {str(run_id): rows for run_id, rows in frame.groupby("run_id")}
            for name, frame in tables.items()
            if name != "runs"
        }

    def read(self, claim: Claim, metric: Metric, hypothesis: Hypothesis, reference: str | None) -> Reading:
        """The values of one hypothesis; reference: the arm its metric is worked out against."""
        units = list(dict.fromkeys(hypothesis.units()))
        declared = dict.fromkeys(seed for unit in units for seed, _ in unit.cell.runs)
        seeds = [seed for seed in declared if all(seed in dict(unit.cell.runs) for unit in units)]
        alone = [str(seed) for seed in declared if seed not in seeds]
        values: dict[int, dict[Unit, Value]] = {}
        missing: Counter[str] = Counter()
        left_out: Counter[str] = Counter()
        for seed in seeds:
            found: dict[Unit, Value] = {}
            for unit in units:
                try:
                    found[unit] = self._value(claim, metric, unit, seed, reference)
                except _Lost as lost:
                    (left_out if lost.out else missing)[str(lost)] += 1
            if len(found) == len(units):
                values[seed] = found
        notes = [_counted(left_out, "left out ")]
        notes += [f"only one side has seed{'s' * (len(alone) > 1)} {', '.join(alone)}"] if alone else []
        timing_runs = None
        if metric.of_curves and metric.is_time and values:
            timed = [self._timed(claim, metric, unit, values) for unit in units]
            timing_runs = min(count for count, _ in timed)
            flagged = max(flagged for _, flagged in timed)
            notes += [f"left out {flagged} timing run{'s' * (flagged > 1)}: flagged"] if flagged else []
        return Reading(values, _counted(missing), "; ".join(filter(None, notes)), timing_runs)

    def of_arguments(self, claim: Claim, metric: Metric) -> float:
        """A metric that needs no run."""
        value = metric.function(Subject(None, {}, lambda _: None, {**metric.args, **claim.args}))  # type: ignore[arg-type]
        assert isinstance(value, float)
        return value

    def _value(self, claim: Claim, metric: Metric, unit: Unit, seed: int, reference: str | None) -> Value:
        """Raises _Lost."""
        spec = dict(unit.cell.runs)[seed]
        row = self._rows.get(spec.run_id)
        if row is None:
            raise _Lost("not run yet")
        self._usable(metric, row)
        if row["state"] == "diverged" and not metric.of_start:
            if metric.better is None:
                raise _Lost("diverged")
            return WORST[metric.better]
        beside = None
        if reference is not None:
            beside = self._reference(claim, metric, unit, seed, reference)
        try:
            value = metric.function(self._subject(claim, metric, spec, unit, beside))
        except NoValue as error:
            raise _Lost(str(error), out=isinstance(error, Flagged)) from None
        except UserError as error:
            # What one metric lacks (a profile, say) keeps no other claim from its answer.
            raise _Lost(str(error)) from None
        if isinstance(value, float) and math.isnan(value):
            raise _Lost(f"{metric.name} is not a number")
        return value

    def _timed(self, claim: Claim, metric: Metric, unit: Unit, seeds: Iterable[int]) -> tuple[int, int]:
        """How many runs the times of a unit rest on, in the table where they are fewest, and how many flagged ones were
        left out of them."""
        runs, flagged = dict(unit.cell.runs), 0
        ids: dict[str, set[str]] = {table: set() for table in ("curves", "composition") if table in metric.tables}
        for seed, table in itertools.product(seeds, ids):
            subject = self._subject(claim, metric, runs[seed], unit, None)
            found = subject.frame(table)
            rows = None if found is None else at_network(subject, found)
            if rows is None or rows.empty:
                # One that diverged without a curve is worse than any number by itself.
                ids[table].add(runs[seed].run_id)
                continue
            texts = rows["timing_run_id"].where(rows["timing_run_id"].notna(), runs[seed].run_id)
            ids[table] |= {name for text in texts for name in text.split("+")}
            flagged = max(flagged, int(rows["flagged_runs"].max()))
        return min(map(len, ids.values())), flagged

    def _usable(self, metric: Metric, row: Mapping[str, Any]) -> None:
        if row["state"] == "failed":
            raise _Lost("failed")
        if metric.is_time and not metric.of_curves:
            if row["state"] == "foreign":
                raise _Lost("of another machine", out=True)
            if row["fidelity"] != "ok":
                raise _Lost("flagged", out=True)

    def _reference(self, claim: Claim, metric: Metric, unit: Unit, seed: int, arm: str) -> Subject | None:
        found = claim_scope.reference(unit, arm, claim, self.parts, curves=metric.of_curves)
        spec = dict(found.cell.runs).get(seed)
        if spec is None or spec.run_id not in self._rows or self._rows[spec.run_id]["state"] == "failed":
            return None
        return self._subject(claim, metric, spec, found, None)

    def _subject(self, claim: Claim, metric: Metric, spec: RunSpec, unit: Unit, reference: Subject | None) -> Subject:
        args = {**metric.args, **claim.args}
        run_id = spec.run_id

        def rows(table: str) -> pd.DataFrame | None:
            return self._groups.get(table, {}).get(run_id)

        return Subject(spec, self._rows[run_id], rows, args, unit.network, reference)


def _counted(reasons: Counter[str], beginning: str = "") -> str:
    """`2 runs: not run yet; 1 run: failed`"""
    return "; ".join(f"{beginning}{n} run{'s' * (n != 1)}: {reason}" for reason, n in reasons.items())
