"""Claims: sentences of an experiment that its runs can contradict, and whether they do. Tables in, plain data out.

    check(claim, parts)             what is wrong with a claim as it is written, at load time (check.py)
    evaluate(experiment, tables)    holds, fails or undecided, with the numbers behind it

docs/claims.md has the rules. What is compared with what: scope.py; numbers of runs: metrics.py, read by
reader.py; when seeds are enough: verdict.py. No pandas is imported before something is evaluated.

>>> outcome_table([{"state": "holds"}, {"state": "undecided"}]), outcome_table([{"state": "fails"}])
(0, 1)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from thinpipe.harness.claims import scope as claim_scope
from thinpipe.harness.claims.check import check
from thinpipe.harness.claims.metrics import REGISTRY
from thinpipe.harness.claims.scope import Hypothesis, Unit
from thinpipe.harness.claims.subject import Metric

if TYPE_CHECKING:
    import pandas as pd

    from thinpipe.harness.claims.reader import Reader, Reading
    from thinpipe.harness.claims.verdict import Verdict
    from thinpipe.harness.declared import Claim
    from thinpipe.harness.experiment import Experiment

__all__ = ["check", "evaluate", "outcome_table"]


def evaluate(experiment: Experiment, tables: Mapping[str, pd.DataFrame]) -> list[dict[str, Any]]:
    """The state of each claim, in the order written.

    experiment: with every rate resolved; tables: of its runs, by name. Keys: experiment, claim, state, value, bound,
    interval, n, source, sentence, metric, part, relation, arm, other, needs, why, pairs (what it is made of, where that
    is more than one thing). value: arm / other (geometric mean over seeds), or the difference of means, or what bound
    is about; where a claim is made of several pairs, of the one nearest to failing, or failing most.
    """
    from thinpipe.harness.claims.reader import Reader

    reader = Reader(experiment, tables)
    return [_evaluate(claim, experiment, reader) for claim in experiment.claims]


class _Judged(NamedTuple):
    label: str
    state: str
    value: float | None
    bound: float | list[float]
    interval: list[float] | None
    n: int
    needs: int | None
    why: str
    violation: float


def _evaluate(claim: Claim, experiment: Experiment, reader: Reader) -> dict[str, Any]:
    metric = REGISTRY[claim.metric]
    if metric.needs_run:
        found = claim_scope.hypotheses(claim, reader.parts, curves=metric.of_curves)
        judged = [_judge(claim, metric, hypothesis, reader, len(found)) for hypothesis in found]
    else:
        judged = [_computed(claim, metric, reader)]
    state, shown = _together(judged)
    why = f"{shown.label}: {shown.why}" if shown.why and len(judged) > 1 else shown.why
    return {
        "experiment": experiment.name,
        "claim": claim.name,
        "state": state,
        "value": shown.value,
        "bound": shown.bound,
        "interval": shown.interval,
        "n": shown.n,
        "source": claim.source,
        "sentence": claim.sentence,
        "metric": claim.metric,
        "part": claim.part,
        "relation": claim.relation,
        "arm": claim.arm or ", ".join(claim.arms) or None,
        "other": claim.other,
        "needs": shown.needs,
        "why": why,
        "pairs": [] if len(judged) == 1 else [{"pair": one.label, **_numbers(one)} for one in judged],
    }


def _numbers(one: _Judged) -> dict[str, Any]:
    return {key: getattr(one, key) for key in ("state", "value", "interval", "n", "needs", "why")}


def _together(judged: Sequence[_Judged]) -> tuple[str, _Judged]:
    """One failing pair fails the claim, all holding hold it; with the pair to show: the worst of those that decide."""
    from thinpipe.harness.claims.verdict import FAILS, HOLDS, UNDECIDED

    for state in (FAILS, UNDECIDED):
        if some := [one for one in judged if one.state == state]:
            return state, max(some, key=lambda one: one.violation)
    return HOLDS, max(judged, key=lambda one: one.violation)


def _judge(claim: Claim, metric: Metric, hypothesis: Hypothesis, reader: Reader, tests: int) -> _Judged:
    """One hypothesis: the values of its runs, by seed, and what they say."""
    reading = reader.read(claim, metric, hypothesis, metric.reference_arm(claim))
    if claim.relation == "==":
        return _equal(claim, hypothesis, reading)
    measure = _Measure(claim, metric)
    try:
        distances = {seed: measure.distance(hypothesis, values) for seed, values in reading.values.items()}
    except ValueError:
        why = 'a value of 0 or below has no ratio: write args.scale = "difference"'
        return _Judged(hypothesis.label, "undecided", None, measure.bound, None, 0, None, why, math.inf)
    verdict = measure.verdict(distances, tests, independent=reading.timing_runs)
    return _said(claim, hypothesis.label, reading, measure, verdict)


def _computed(claim: Claim, metric: Metric, reader: Reader) -> _Judged:
    """A metric of its arguments alone: exact, and no run has a part in it."""
    value = reader.of_arguments(claim, metric)
    measure = _Measure(claim, metric)
    if claim.relation == "==":
        state = "holds" if value == claim.bound else "fails"
        return _Judged("", state, value, measure.bound, None, 0, None, "", 0.0)
    found = measure.verdict({0: measure.between(measure.position(value), 0.0)}, 1, exact=True)
    return _Judged("", found.state, value, measure.bound, None, 0, None, "", 0.0)


#: Distances that are apart by less are equal: what logs and products of doubles lose, and a thousand times more.
ROUNDING = 1e-12


class _Measure:
    """Between values of runs and distances (verdict.py), on the claim's scale. target: what the value is held against;
    shift: its position; margin: half the width of "~"."""

    def __init__(self, claim: Claim, metric: Metric) -> None:
        self.claim = claim
        self.ratio = metric.scale_in(claim) == "ratio" and claim.relation != "=="
        self.margin = (math.log1p(claim.margin) if self.ratio else claim.margin) if claim.margin else 0.0
        other = claim.factor if self.ratio else float(claim.args.get("offset", 0.0))
        self.target = other if claim.bound is None else claim.bound
        self.shift = math.log(self.target) if self.ratio else self.target

    def position(self, value: float) -> float:
        """Raises ValueError where a ratio is asked of a value that has none."""
        if not self.ratio or math.isinf(value):
            return value
        return math.log(value)

    def distance(self, hypothesis: Hypothesis, values: Mapping[Unit, Any]) -> float:
        """NaN where both sides are worse than any number."""
        left, right = (
            None
            if term is None
            else self.position(values[term.unit]) - (self.position(values[term.over]) if term.over else 0.0)
            for term in (hypothesis.left, hypothesis.right)
        )
        assert left is not None
        if right is None:
            return self.between(left, 0.0)
        return self.between(left, right if self.ratio else self.claim.factor * right)

    def between(self, left: float, right: float) -> float:
        """left - right - shift, of positions: exactly 0, or the margin, where it is that but for rounding. Else 2.2
        would not be <= 1.1 x 2.0."""
        distance = left - right - self.shift
        if not math.isfinite(distance):
            return distance
        # Of logs, an absolute difference is the relative one of the values.
        slack = ROUNDING * (1.0 if self.ratio else max(abs(left), abs(right), abs(self.shift)))
        near = (exact for exact in (0.0, self.margin, -self.margin) if abs(distance - exact) <= slack)
        return next(near, distance)

    def verdict(
        self, distances: Mapping[int, float], tests: int, *, exact: bool = False, independent: int | None = None
    ) -> Verdict:
        from thinpipe.harness.claims.verdict import decide

        options: dict[str, Any] = {"margin": self.margin, "exact": exact or self.claim.exact}
        return decide(distances, self.claim.relation, tests=tests, independent=independent, **options)

    def value(self, distance: float) -> float:
        """A mean distance as what the claim is about: a ratio, a difference, or a value beside its bound."""
        return math.exp(distance) * self.target if self.ratio else distance + self.target

    @property
    def bound(self) -> float | list[float]:
        return [self.value(-self.margin), self.value(self.margin)] if self.margin else self.value(0.0)


def _said(claim: Claim, label: str, reading: Reading, measure: _Measure, found: Verdict) -> _Judged:
    """A verdict as people read it; undecided where runs are missing, but for a counterexample that needs no seeds."""
    from thinpipe.harness.claims.verdict import FAILS, UNDECIDED, violation

    state, needs, because = found.state, found.needs, found.why
    if reading.missing and not (claim.exact and state == FAILS):
        state, needs, because = UNDECIDED, None, ""
    shared = ""
    if found.n < len(reading.values):
        timed = f"{found.n} timing run{'s' * (found.n != 1)}"
        shared = f"the times of {len(reading.values)} trainings are composed of those of {timed}"
    why = "; ".join(filter(None, [reading.missing, because, shared, reading.left_out]))
    value = None if found.mean is None else measure.value(found.mean)
    bounds = None
    if found.low is not None and found.high is not None:
        bounds = [measure.value(found.low), measure.value(found.high)]
    worst = violation(found.mean, claim.relation, measure.margin)
    return _Judged(label, state, value, measure.bound, bounds, found.n, needs, why, worst)


def _equal(claim: Claim, hypothesis: Hypothesis, reading: Reading) -> _Judged:
    """`==`: bit-equal for every seed. One that differs is a counterexample, however few there are.

    value: of a bound, the value farthest from it; of two sides, their largest difference."""
    from thinpipe.harness.claims.verdict import FAILS, HOLDS, LEAST, UNDECIDED

    left, right, n = hypothesis.left.unit, hypothesis.right, len(reading.values)
    sides = {
        seed: (values[left], claim.bound if right is None else values[right.unit])
        for seed, values in reading.values.items()
    }
    wrong = [seed for seed, (a, b) in sides.items() if a != b]
    # Two runs that both diverged are worse than any number, not equal.
    neither = [seed for seed, (a, b) in sides.items() if a == b and isinstance(a, float) and math.isinf(a)]
    enough = n >= (1 if claim.exact else LEAST)
    state = FAILS if wrong else HOLDS if enough and not reading.missing and not neither else UNDECIDED
    few = not enough and not wrong and not reading.missing
    notes = [
        f"not equal: seed {', '.join(map(str, wrong))}" if wrong else "",
        f"both sides diverged: seed {', '.join(map(str, neither))}" if neither else "",
        reading.missing,
        f"{n} seed(s): it takes at least {LEAST}, or exact = true where nothing is random" if few else "",
        reading.left_out,
    ]
    apart = max((_apart(a, b) for a, b in sides.values()), default=None)
    value = apart
    if right is None and sides:
        value = max((a for a, _ in sides.values() if isinstance(a, float)), key=lambda a: _apart(a, claim.bound))
    return _Judged(
        label=hypothesis.label,
        state=state,
        value=value if value is not None and math.isfinite(value) else None,
        bound=0.0 if claim.bound is None else claim.bound,
        interval=None,
        n=n,
        needs=LEAST if few else None,
        why="; ".join(filter(None, notes)),
        violation=apart or 0.0,
    )


def _apart(a: Any, b: Any) -> float:
    """The largest difference of two numbers, or of two sequences; infinite where they are not as long."""
    if isinstance(a, tuple):
        return max((abs(x - y) for x, y in zip(a, b, strict=True)), default=0.0) if len(a) == len(b) else math.inf
    return 0.0 if a == b else abs(a - b)


def outcome_table(results: Iterable[Mapping[str, Any]]) -> int:
    """The exit code for evaluated claims: 1 where one fails, else 0."""
    return int(any(result["state"] == "fails" for result in results))
