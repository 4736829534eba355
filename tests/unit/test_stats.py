"""Statistics over seeds, against published t values and sums done by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinpipe.harness import stats

# Two-sided quantiles of Student's t as every statistics book prints them.
PUBLISHED = [
    (0.90, 1, 6.3138),
    (0.95, 1, 12.7062),
    (0.95, 2, 4.3027),
    (0.90, 4, 2.1318),
    (0.95, 4, 2.7764),
    (0.99, 5, 4.0321),
    (0.95, 9, 2.2622),
    (0.95, 30, 2.0423),
    (0.95, 120, 1.9799),
]


@pytest.mark.parametrize(("level", "dof", "expected"), PUBLISHED)
def test_t_quantiles_are_the_published_ones(level, dof, expected):
    assert stats.t_quantile(level, dof) == pytest.approx(expected, abs=6e-5)


@given(st.floats(0.01, 0.999), st.integers(1, 40))
def test_quantile_inverts_probability(level, dof):
    assert stats.t_probability(stats.t_quantile(level, dof), dof) == pytest.approx(level, abs=1e-9)


def test_an_interval_by_hand():
    # 1, 2, 3: s = 1, so the half-width is t(0.95, 2) / sqrt(3).
    found = stats.interval([1.0, 2.0, 3.0], level=0.95)
    assert (found.mean, found.n, found.level) == (2.0, 3, 0.95)
    assert found.high - 2.0 == pytest.approx(4.30265 / math.sqrt(3), rel=1e-5)
    assert 2.0 - found.low == pytest.approx(found.high - 2.0)
    assert stats.interval([1.0, 2.0, 3.0], level=0.90).high < found.high


def test_one_seed_has_no_interval():
    assert stats.interval([4.0]) == (4.0, None, None, 1, 0.95)


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_an_interval_refuses_what_has_no_mean(values):
    with pytest.raises(ValueError, match="finite values"):
        stats.interval(values)


def test_a_paired_ratio_removes_what_the_seeds_share():
    # The seeds differ 10-fold, the ratio hardly: pairing must see the second.
    ours = {0: 1.0, 1: 10.0, 2: 100.0}
    fp32 = {0: 2.0, 1: 20.2, 2: 198.0, 7: 5.0}
    found = stats.paired_ratio(fp32, ours)
    assert found.n == 3
    assert found.mean == pytest.approx((2.0 * 2.02 * 1.98) ** (1 / 3))
    assert 1.9 < found.low < 2.0 < found.high < 2.1
    inverse = stats.paired_ratio(ours, fp32)
    assert inverse.mean == pytest.approx(1 / found.mean)
    assert inverse.low == pytest.approx(1 / found.high)


@pytest.mark.parametrize(("a", "b"), [({0: 1.0}, {1: 1.0}), ({0: 0.0}, {0: 1.0}), ({0: math.nan}, {0: 1.0})])
def test_a_paired_ratio_refuses_what_it_cannot_compare(a, b):
    with pytest.raises(ValueError, match=r"pair|positive"):
        stats.paired_ratio(a, b)


def test_median_and_spread():
    assert stats.median([5.0, 1.0, 2.0]) == 2.0
    assert stats.median([4.0, 1.0]) == 2.5
    assert stats.spread([2.34, 2.14]) == pytest.approx(0.2 / 2.24)
    assert stats.spread([3.0]) == 0.0
    for refused in (stats.median, stats.spread):
        with pytest.raises(ValueError):
            refused([])


def test_time_to_target_is_the_first_time_or_censored():
    times, losses = [1.0, 2.0, 3.0, 4.0], [5.0, 3.0, 3.5, 2.0]
    assert stats.time_to_target(times, losses, 3.0) == 2.0
    assert stats.time_to_target(times, losses, 2.9) == 4.0
    assert stats.time_to_target(times, losses, 1.0) is None
    assert stats.time_to_target(times, [math.nan] * 4, 9.0) is None
