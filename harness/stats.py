"""Statistics over seeds: intervals, paired comparison, time to target. Pure; numpy only.

The unit of replication is a run: values go in one a seed, never one a step. Every function says what it does
with too few values, and none drops a value silently.

>>> interval([2.0, 3.0, 4.0], level=0.95).mean
3.0
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

#: Bisection halves [0, LARGEST] until it is below the last bit: 1 ulp of 1e6 needs fewer than 80 steps.
LARGEST_T = 1e6
HALVINGS = 80
#: Of a loss to reach, for figures and claims alike; arXiv 2206.01299 shows curves that end together, without a number.
TOLERANCE = 1.1


class Interval(NamedTuple):
    """A mean over `n` seeds with its two-sided `level` interval; low and high are None for one seed."""

    mean: float
    low: float | None
    high: float | None
    n: int
    level: float


def t_probability(t: float, dof: int) -> float:
    """P(|T| <= t) of Student's t with `dof` degrees of freedom, a whole number: exact, no approximation.

    The finite sums in cos(theta), theta = atan(t / sqrt(dof)), of Abramowitz & Stegun 26.7.3 (odd dof) and
    26.7.4 (even dof).
    """
    assert dof >= 1, dof
    assert t >= 0, t
    theta = math.atan2(t, math.sqrt(dof))
    cos, sin = math.cos(theta), math.sin(theta)
    odd = dof % 2
    term, total = (cos if odd else 1.0), 0.0
    for k in range(1 + odd, dof, 2):
        total += term
        term *= cos * cos * k / (k + 1)
    return (theta + sin * total) * 2 / math.pi if odd else sin * total


@functools.cache
def t_quantile(level: float, dof: int) -> float:
    """The t with P(|T| <= t) = level, by bisection: half the width of an interval in standard errors."""
    assert 0 < level < 1, level
    low, high = 0.0, LARGEST_T
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, dof) < level else (low, middle)
    return high


def interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Mean of one value a seed with its Student t interval: mean +- t(level, n-1) * s / sqrt(n), s with n-1.

    Raises ValueError without values or with a non-finite one: a diverged seed has no place in a mean.
    """
    data = np.asarray(values, dtype=np.float64)
    if data.size == 0 or not np.isfinite(data).all():
        raise ValueError(f"an interval needs finite values, got {list(values)}")
    mean, n = float(data.mean()), int(data.size)
    if n == 1:
        return Interval(mean, None, None, 1, level)
    half = t_quantile(level, n - 1) * float(data.std(ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n, level)


def paired_ratio(a: Mapping[int, float], b: Mapping[int, float], level: float = 0.95) -> Interval:
    """a / b, paired by seed: geometric mean of the ratios, its interval from that of their logs.

    a, b: positive values by seed. Seeds that only one of them has are left out, `n` says how many were used.
    Raises ValueError when they share no seed, or a value is not positive and finite.
    """
    seeds = sorted(a.keys() & b.keys())
    if not seeds:
        raise ValueError(f"nothing to pair: seeds {sorted(a)} against {sorted(b)}")
    if not all(math.isfinite(v) and v > 0 for s in seeds for v in (a[s], b[s])):
        raise ValueError("a ratio of logs needs positive finite values")
    logs = interval([math.log(a[s] / b[s]) for s in seeds], level)
    low = None if logs.low is None else math.exp(logs.low)
    high = None if logs.high is None else math.exp(logs.high)
    return Interval(math.exp(logs.mean), low, high, logs.n, level)


def median(values: Sequence[float]) -> float:
    """The middle value, the mean of the two middle ones for an even count; ValueError without values."""
    if len(values) == 0:
        raise ValueError("the median of nothing")
    return float(np.median(np.asarray(values, dtype=np.float64)))


def spread(values: Sequence[float]) -> float:
    """(largest - smallest) / mean, over seeds; 0 for one value."""
    data = np.asarray(values, dtype=np.float64)
    if data.size == 0 or not np.isfinite(data).all():
        raise ValueError(f"a spread needs finite values, got {list(values)}")
    return float((data.max() - data.min()) / data.mean())


def time_to_target(times: Sequence[float], losses: Sequence[float], target: float) -> float | None:
    """The first of `times` (increasing) at which the loss is at or below `target`.

    None: not reached, i.e. censored at the last time. Not interpolated: what was not measured is not reached.

    Of a training, in claims and in figures alike: `times` are training seconds at the ends of its epochs (or bytes sent
    by then), `losses` the mean training loss of each epoch, and `target` is a tolerance (TOLERANCE unless said) times
    the mean training loss of the last epoch of the run that it is held against, of the same seed. A training that
    diverged has not reached it, whenever it was below.
    """
    assert len(times) == len(losses), (len(times), len(losses))
    for time, loss in zip(times, losses, strict=True):
        if loss <= target:
            return float(time)
    return None
