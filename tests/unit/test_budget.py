"""A step's byte budget is met within a few steps and shared by what errors matter."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinpipe.harness.compression import grammar
from thinpipe.harness.compression.base import Context
from thinpipe.harness.compression.budget import COARSEST, FINEST, Budget, Observation, predicted
from thinpipe.harness.errors import UserError

SHAPE = (4, 32, 128)
ELEMENTS = 4 * 32 * 128
#: Kind of data and its size.
CHANNELS = {"normal": 1.0, "small normal": 1e-6, "laplace": 40.0, "relu": 3.0, "heavy": 1e-3}


def draw(name: str, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(SHAPE, generator=generator)
    if name == "laplace":
        x = x.sign() * -torch.rand(SHAPE, generator=generator).clamp(min=1e-6).log()
    if name == "relu":
        x = (x - 0.3).relu()
    if name == "heavy":
        x = x * torch.randn(SHAPE, generator=generator).exp().clamp(max=8.0)
    return x * CHANNELS[name]


def train(budget: Budget, start: float, steps: int) -> tuple[list[float], dict[str, Observation], dict[str, float]]:
    """(bytes sent of the budget each step, the last step's observations, mean squared errors) with the real codec."""
    codecs = {name: grammar.build("grid:0.5") for name in CHANNELS}
    for codec in codecs.values():
        codec.multiplier = start
    generator, out, history, seen, errors = torch.Generator().manual_seed(0), None, [], {}, {}
    for _ in range(steps):
        for name, codec in codecs.items():
            x = draw(name, generator)
            out = torch.empty(codec.max_bytes(SHAPE), dtype=torch.uint8) if out is None else out
            sent = codec.encode(x, Context(SHAPE), out)
            seen[name] = Observation(ELEMENTS, codec.mean_square, sent, codec.value * codec.multiplier)
            errors[name] = (codec.decode(out[:sent], Context(SHAPE), torch.empty(SHAPE)) - x).square().mean().item()
        history.append(sum(one.bytes for one in seen.values()) / budget.bytes_per_step)
        for name, step in budget.share(seen).items():
            codecs[name].multiplier = step / codecs[name].value
    return history, seen, errors


@pytest.mark.parametrize(("bits", "start"), [(0.4, 1.0), (1.0, 16.0), (2.0, 2.0), (5.0, 1.0)])
def test_the_bytes_of_a_step_come_to_the_budget_and_stay(bits: float, start: float) -> None:
    history, _, _ = train(Budget(len(CHANNELS) * ELEMENTS * bits / 8), start, 11)
    assert max(abs(part - 1) for part in history[6:]) < 0.02, history
    assert sum(history[6:]) / 5 == pytest.approx(1.0, abs=0.01)


def test_by_default_relative_errors_count_alike() -> None:
    _, seen, errors = train(Budget(len(CHANNELS) * ELEMENTS * 3 / 8), 1.0, 7)
    relative = [errors[name] / one.mean_square for name, one in seen.items() if name != "relu"]
    assert max(relative) < 1.3 * min(relative)
    assert max(one.step for one in seen.values()) < 1.0001 * min(one.step for one in seen.values())
    assert seen["relu"].bytes < 0.8 * seen["normal"].bytes, "the same error costs less where most is zero"


def test_sensitive_channels_get_smaller_absolute_errors() -> None:
    weights = {"normal": 4.0, "small normal": 4e12, "laplace": 1 / 1600, "relu": 1.0, "heavy": 0.0}
    history, seen, errors = train(Budget(len(CHANNELS) * ELEMENTS * 2 / 8, weights), 1.0, 9)
    assert history[-1] == pytest.approx(1.0, abs=0.02)
    cost = [weights[name] * errors[name] for name in CHANNELS if name not in ("heavy", "relu")]
    assert max(cost) < 1.3 * min(cost), "reverse water-filling: weight x error is one level"
    assert weights["relu"] * errors["relu"] < min(cost), "its zeros have no error, and cost next to nothing"
    assert seen["heavy"].step == COARSEST
    assert seen["heavy"].bytes == min(one.bytes for one in seen.values())


numbers = st.floats(1e-12, 1e12)
observations = st.builds(
    Observation,
    elements=st.integers(0, 10**9),
    mean_square=st.just(0.0) | numbers,
    bytes=st.floats(0, 1e10),
    step=st.floats(FINEST, COARSEST),
)
channels = st.dictionaries(st.sampled_from("abcdef"), observations, min_size=1)


@given(channels, st.floats(1.0, 1e10), st.dictionaries(st.sampled_from("abcdef"), st.just(0.0) | numbers))
def test_steps_are_bounded_and_more_bytes_make_none_coarser(
    seen: dict[str, Observation], bytes_per_step: float, weights: dict[str, float]
) -> None:
    tight, loose = Budget(bytes_per_step, weights).share(seen), Budget(2 * bytes_per_step, weights).share(seen)
    assert Budget(bytes_per_step, weights).share(dict(reversed(seen.items()))).keys() == tight.keys() == seen.keys()
    for name, one in seen.items():
        assert FINEST <= loose[name] <= tight[name] * (1 + 1e-9) <= COARSEST * (1 + 1e-9)
        assert one.step / 4.001 <= tight[name] <= one.step * 4.001
        assert predicted(one, tight[name]) >= 0 if one.elements else True


@given(channels, st.floats(0.3, 3.0))
def test_where_the_budget_can_be_met_what_is_foreseen_comes_nearer_to_it(
    seen: dict[str, Observation], part: float
) -> None:
    seen = {name: one for name, one in seen.items() if one.elements and one.mean_square}
    before = sum(predicted(one, one.step) for one in seen.values())
    if not seen:
        return
    chosen = Budget(part * before).share(seen)
    after = sum(predicted(one, chosen[name]) for name, one in seen.items())
    fine = sum(predicted(one, max(FINEST, one.step / 4)) for one in seen.values())
    coarse = sum(predicted(one, min(COARSEST, one.step * 4)) for one in seen.values())
    wanted = before * part**0.75
    assert after == pytest.approx(min(max(wanted, coarse), fine), rel=1e-6)


def test_channels_that_sent_only_zeros_or_nothing_keep_their_step() -> None:
    zeros, nothing, one = Observation(100, 0.0, 40, 2.0), Observation(0, 0.0, 0, 3.0), Observation(1000, 1.0, 500, 1.0)
    found = Budget(240).share({"zeros": zeros, "nothing": nothing, "one": one})
    assert found["zeros"] == 2.0
    assert found["nothing"] == 3.0
    assert found["one"] > 1.5, "its bytes still count"
    assert Budget(100).share({}) == {}


@pytest.mark.parametrize(
    ("bytes_per_step", "weights"),
    [
        (0, {}),
        (-1, {}),
        (math.inf, {}),
        (math.nan, {}),
        (10, {"a": -1.0}),
        (10, {"a": math.nan}),
        (10, {"a": math.inf}),
    ],
)
def test_what_is_no_budget_is_refused(bytes_per_step: float, weights: dict[str, float]) -> None:
    with pytest.raises(UserError, match=r"budget|weight"):
        Budget(bytes_per_step, weights)
