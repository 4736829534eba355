"""Numbers of seeds -> holds, fails or undecided. Pure; knows nothing of runs.

A claim is brought to one form before it comes here: a *distance* a seed, below 0 where the seed obeys "<". Of ratios
it is log(left) - log(factor x right), of differences left - factor x right. An infinite distance is a run that
diverged or never reached its target: worse than any number; NaN is a seed where both sides did.

>>> decide({0: -0.3, 1: -0.2, 2: -0.25}, "<").state
'holds'
>>> decide({0: -0.3, 1: 0.2, 2: -0.1}, "<").state
'undecided'
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from thinpipe.harness.stats import Interval, interval, t_quantile

HOLDS, FAILS, UNDECIDED = "holds", "fails", "undecided"
#: Two-sided, so that each side is tested at 5 %: also of "~", as two one-sided tests.
LEVEL = 0.90
#: Fewer seeds have no interval worth the name.
LEAST = 3
# From here on Student's t is the normal distribution to three digits, and its exact sum takes long.
MANY = 300
NORMAL_90 = 1.6448536


class Verdict(NamedTuple):
    """mean, low, high: of the distances, None where a seed has no finite one or there are too few; n: seeds, or what is
    independent of them; needs: the n it would take, None where more of the same would not decide; why: what a reader
    should know, may be empty."""

    state: str
    mean: float | None
    low: float | None
    high: float | None
    n: int
    needs: int | None
    why: str


def decide(
    distances: Mapping[int, float],
    relation: str,
    *,
    margin: float = 0.0,
    tests: int = 1,
    exact: bool = False,
    independent: int | None = None,
) -> Verdict:
    """The verdict on `distances` by seed. relation: < <= > >= or ~ (|distance| <= margin).

    tests: how many pairs the claim is made of. It holds if each pair does, which needs no correction (an
    intersection-union test); it fails if one does, so failing takes an interval of level 1 - (1 - LEVEL) / tests.
    exact: nothing in the values is random, so each seed decides alone and one is enough. independent: of seeds that
    share something random, how many there are of that: the interval is that of so many values.
    """
    assert relation in ("<", "<=", ">", ">=", "~"), relation
    n = len(distances) if independent is None else min(len(distances), independent)
    values = list(distances.values())
    finite = all(math.isfinite(value) for value in values)
    mean, low, high = _interval(values, LEVEL, n)[:3] if finite and n else (None, None, None)
    answers = {seed: obeys(value, relation, margin) for seed, value in distances.items()}
    if exact and n:
        state, why = _each(answers, any_fails=True)
        return Verdict(state, mean, low, high, n, None, why)
    if n < LEAST:
        counted = "seed" if n == len(distances) else "independent value"
        why = f"{n} {counted}{'s' * (n != 1)}: an interval takes at least {LEAST}"
        return Verdict(UNDECIDED, mean, low, high, n, LEAST, why)
    if not finite:
        state, why = _each(answers, any_fails=False)
        return Verdict(state, None, None, None, n, None, why)
    near, wide = (_interval(values, level, n) for level in (LEVEL, 1 - (1 - LEVEL) / tests))
    state = _by_interval(near, wide, relation, margin)
    needs, why = _needed(near, relation, margin, tests) if state == UNDECIDED else (None, "")
    return Verdict(state, mean, low, high, n, needs, why)


def obeys(distance: float, relation: str, margin: float = 0.0) -> bool | None:
    """Whether one seed alone obeys the relation; None where both sides are without a number."""
    if math.isnan(distance):
        return None
    tests: dict[str, Callable[[float], bool]] = {
        "<": lambda d: d < 0,
        "<=": lambda d: d <= 0,
        ">": lambda d: d > 0,
        ">=": lambda d: d >= 0,
        "~": lambda d: abs(d) <= margin,
    }
    return tests[relation](distance)


def violation(mean: float | None, relation: str, margin: float = 0.0) -> float:
    """How far on the wrong side a mean distance is; negative on the right one. Without a mean: infinite."""
    if mean is None:
        return math.inf
    if relation == "~":
        return abs(mean) - margin
    return mean if relation in ("<", "<=") else -mean


def _interval(values: list[float], level: float, n: int) -> Interval:
    """Their interval as if they were n, at most as many as they are: the same mean and spread, fewer of them."""
    found = interval(values, level)
    if found.high is None or n == found.n:
        return found
    if n == 1:
        return Interval(found.mean, None, None, 1, level)
    half = _deviation(found) * t_quantile(level, n - 1) / math.sqrt(n)
    return Interval(found.mean, found.mean - half, found.mean + half, n, level)


def _deviation(found: Interval) -> float:
    """The sample standard deviation that an interval was made of."""
    assert found.high is not None
    return (found.high - found.mean) * math.sqrt(found.n) / t_quantile(found.level, found.n - 1)


def _each(answers: Mapping[int, bool | None], *, any_fails: bool) -> tuple[str, str]:
    """By the seeds' own answers: all yes holds, all no fails; any_fails: one no does."""
    wrong = [seed for seed, answer in answers.items() if answer is False]
    open_ones = [seed for seed, answer in answers.items() if answer is None]
    if any_fails and wrong:
        return FAILS, f"against it: {_seeds(wrong)}"
    if not wrong and not open_ones:
        return HOLDS, "" if any_fails else "judged by each seed's sign: a run diverged, or never reached its target"
    if len(wrong) == len(answers):
        return FAILS, "every seed is against it; a run diverged, or never reached its target"
    if open_ones:
        return UNDECIDED, f"both sides diverged, or never reached the target: {_seeds(open_ones)}"
    return UNDECIDED, f"a run diverged, or never reached its target, and the seeds disagree: {_seeds(wrong)} against it"


def _seeds(seeds: list[int]) -> str:
    return f"seed{'s' * (len(seeds) != 1)} {', '.join(map(str, sorted(seeds)))}"


def _by_interval(near: Interval, wide: Interval, relation: str, margin: float) -> str:
    if _lies(near, relation, margin):
        return HOLDS
    return FAILS if _lies(wide, relation, margin, against=True) else UNDECIDED


def _lies(found: Interval, relation: str, margin: float, *, against: bool = False) -> bool:
    """Whether an interval lies wholly on the right side; against: wholly on the wrong one."""
    assert found.low is not None
    assert found.high is not None
    if relation == "~":
        outside = found.low > margin or found.high < -margin
        return outside if against else -margin <= found.low and found.high <= margin
    low, high = (found.low, found.high) if relation in ("<", "<=") else (-found.high, -found.low)
    strict = relation in ("<", ">")
    if against:
        return low > 0 or (low == 0 and strict)
    return high < 0 or (high == 0 and not strict)


def _needed(near: Interval, relation: str, margin: float, tests: int) -> tuple[int | None, str]:
    """The least number of seeds whose interval would lie on one side, at the mean and spread seen."""
    distance, deviation = -violation(near.mean, relation, margin), _deviation(near)
    if _lies(near, relation, margin, against=True):
        n = near.n + 1
        while t_quantile(1 - (1 - LEVEL) / tests, n - 1) * deviation / math.sqrt(n) >= -distance:
            n += 1
        return n, f"against it, but not at the level for {tests} pairs; about {n} seeds would decide at this spread"
    if distance <= 0 or not math.isfinite(deviation / distance):
        return None, "the mean is on the wrong side, by less than the seeds' spread: more seeds may go either way"
    n = max(LEAST, math.ceil((NORMAL_90 * deviation / distance) ** 2))
    while n < MANY and t_quantile(LEVEL, n - 1) * deviation / math.sqrt(n) >= distance:
        n += 1
    return n, f"the interval reaches across the bound; about {n} seeds would decide at this spread"
