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

from thinpipe.harness.stats import interval, t_quantile

HOLDS, FAILS, UNDECIDED = "holds", "fails", "undecided"
#: Two-sided, so that each side is tested at 5 %: also of "~", as two one-sided tests.
LEVEL = 0.90
#: Fewer seeds have no interval worth the name.
LEAST = 3
# From here on Student's t is the normal distribution to three digits, and its exact sum takes long.
MANY = 300
NORMAL_90 = 1.6448536


class Verdict(NamedTuple):
    """mean, low, high: of the distances, None where a seed has no finite one or there are too few; n: seeds; needs: the
    seeds it would take, None where more of the same would not decide; why: what a reader should know, may be empty."""

    state: str
    mean: float | None
    low: float | None
    high: float | None
    n: int
    needs: int | None
    why: str


def decide(
    distances: Mapping[int, float], relation: str, *, margin: float = 0.0, tests: int = 1, exact: bool = False
) -> Verdict:
    """The verdict on `distances` by seed. relation: < <= > >= or ~ (|distance| <= margin).

    tests: how many pairs the claim is made of. It holds if each pair does, which needs no correction (an
    intersection-union test); it fails if one does, so failing takes an interval of level 1 - (1 - LEVEL) / tests.
    exact: nothing in the values is random, so each seed decides alone and one is enough.
    """
    assert relation in ("<", "<=", ">", ">=", "~"), relation
    n = len(distances)
    finite = all(math.isfinite(value) for value in distances.values())
    mean, low, high = _interval(list(distances.values())) if finite and n else (None, None, None)
    answers = {seed: obeys(value, relation, margin) for seed, value in distances.items()}
    if exact and n:
        state, why = _each(answers, any_fails=True)
        return Verdict(state, mean, low, high, n, None, why)
    if n < LEAST:
        why = f"{n} seed{'s' * (n != 1)}: an interval takes at least {LEAST}"
        return Verdict(UNDECIDED, mean, low, high, n, LEAST, why)
    if not finite:
        state, why = _each(answers, any_fails=False)
        return Verdict(state, None, None, None, n, None, why)
    assert mean is not None
    values = list(distances.values())
    state = _by_interval(values, relation, margin, tests)
    needs, why = _needed(values, mean, relation, margin) if state == UNDECIDED else (None, "")
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


def _interval(values: list[float]) -> tuple[float, float | None, float | None]:
    found = interval(values, LEVEL)
    return found.mean, found.low, found.high


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


def _by_interval(values: list[float], relation: str, margin: float, tests: int) -> str:
    sign = -1.0 if relation in (">", ">=") else 1.0
    near = interval([sign * value for value in values], LEVEL)
    wide = interval([sign * value for value in values], 1 - (1 - LEVEL) / tests)
    assert near.low is not None
    assert near.high is not None
    assert wide.low is not None
    assert wide.high is not None
    if relation == "~":
        if -margin <= near.low and near.high <= margin:
            return HOLDS
        return FAILS if wide.low > margin or wide.high < -margin else UNDECIDED
    strict = relation in ("<", ">")
    if near.high < 0 or (near.high == 0 and not strict):
        return HOLDS
    return FAILS if wide.low > 0 or (wide.low == 0 and strict) else UNDECIDED


def _needed(values: list[float], mean: float, relation: str, margin: float) -> tuple[int | None, str]:
    """The least number of seeds whose interval would lie on the right side, at the mean and spread seen."""
    distance = -violation(mean, relation, margin)
    spread = interval(values, LEVEL)
    assert spread.high is not None
    deviation = (spread.high - spread.mean) * math.sqrt(len(values)) / t_quantile(LEVEL, len(values) - 1)
    if distance <= 0 or not math.isfinite(deviation / distance):
        return None, "the mean is on the wrong side, by less than the seeds' spread: more seeds may go either way"
    n = max(LEAST, math.ceil((NORMAL_90 * deviation / distance) ** 2))
    while n < MANY and t_quantile(LEVEL, n - 1) * deviation / math.sqrt(n) >= distance:
        n += 1
    return n, f"the interval reaches across the bound; about {n} seeds would decide at this spread"
