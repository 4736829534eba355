"""QuantizedAdam: AdamW while warming up, then momenta exchanged in a few bits that lose nothing over time."""

import data_groups_adam as ranks
import pytest
import torch
from data_groups import run

from thinpipe.harness import data_traffic
from thinpipe.harness.compression.kernels import reference
from thinpipe.harness.compression.kernels.layout import Grid, layout
from thinpipe.harness.errors import DivergedError


def test_the_warm_up_is_adamw_on_averaged_gradients_bit_for_bit():
    for quantised, plain in run(ranks.compared, 2, 5):
        for name, value in plain.items():
            assert torch.equal(quantised[name], value), name


@pytest.mark.parametrize(("bits", "size"), [(2, 2), (3, 3), (4, 2), (5, 4), (8, 3)])
def test_replicas_stay_bit_equal_and_differ_from_full_precision(bits, size):
    results = run(ranks.trained, size, bits, 3, 9)
    for at in range(2):
        for values, momentum in (result[at] for result in results):
            assert torch.equal(momentum, results[0][at][1])
            assert all(torch.equal(value, results[0][at][0][name]) for name, value in values.items())
    (warm, _), (done, _) = results[0]
    assert not torch.equal(warm["middle.weight"], done["middle.weight"])
    assert torch.equal(warm["unused"], done["unused"]), "a parameter without a gradient is left alone"
    assert torch.equal(warm["frozen"], done["frozen"])


def quantised(values, bits):
    """Q by the reference kernels: 512 neighbours a scale."""
    rows = values.view(-1, 512)
    where, grid = layout(tuple(rows.shape), "token"), Grid(bits, symmetric=True)
    payload = torch.empty(grid.num_bytes(where), dtype=torch.uint8)
    reference.encode(rows, where, grid, 0, payload)
    return reference.decode(payload, where, grid, torch.empty_like(rows)).view(-1)


@pytest.mark.parametrize(("bits", "size"), [(2, 2), (7, 2), (4, 3)])
def test_an_exchange_is_the_algorithm_s(bits, size):
    results = run(ranks.one_exchange, size, bits)
    for at in range(2):
        told, errors, owner_errors = [], [], []
        for gradient, (momentum, error, owner_error), _ in (result[at] for result in results):
            momentum = momentum.clone()
            here = momentum[: gradient.numel()]
            # The parameter without a gradient keeps its momentum, which is 0.
            here.lerp_(gradient, 1 - 0.9)
            said = momentum + error
            told.append(quantised(said, bits))
            errors.append(said - told[-1])
            owner_errors.append(owner_error)
        mean = sum(told) / size + torch.cat(owner_errors)
        expected = quantised(mean, bits)
        for rank, (_, _, (momentum, error, owner_error)) in enumerate(result[at] for result in results):
            torch.testing.assert_close(momentum, expected, rtol=1e-5, atol=1e-8)
            torch.testing.assert_close(error, errors[rank], rtol=1e-4, atol=1e-8)
            mine = (mean - expected).view(size, -1)[rank]
            torch.testing.assert_close(owner_error, mine, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("bits", [2, 4])
def test_nothing_is_lost_over_time(bits):
    """All that was exchanged, and what is still held back, is all that should have been."""
    results = run(ranks.kept, 2, bits, 12)
    own = sum(result[0] for result in results) / 2
    exchanged, count = results[0][1], own.numel()
    held = sum(result[2].double() for result in results) / 2 + torch.cat([result[3].double() for result in results])
    torch.testing.assert_close(exchanged + held[:count], own, rtol=0, atol=1e-6)
    assert held[:count].norm() > 1e-3 * own.norm(), "nothing was rounded"


@pytest.mark.parametrize(("bits", "factor"), [(2, 1.1), (4, 1.01), (8, 1.001)])
def test_a_quadratic_is_solved_as_without_rounding(bits, factor):
    found = run(ranks.quadratic, 2, bits, 400)
    assert found[0] == found[1]
    distance, exact, plain = found[0]
    assert plain < 0.1
    assert exact < 1.5 * plain, "freezing the second moment costs something, but not this much"
    assert abs(distance / exact - 1) < factor - 1


@pytest.mark.parametrize(("bits", "size", "width"), [(2, 2, 37), (4, 3, 37), (5, 4, 101), (8, 2, 300)])
def test_bytes_are_the_formula_s_to_the_byte(bits, size, width):
    for steps, count in run(ranks.counted, size, bits, width):
        assert [sent for sent, _ in steps] == [expected for _, expected in steps]
        padded = -(-count // (512 * size)) * 512 * size
        published = 2 * (size - 1) / size * padded * (bits / 8 + 2 / 512)
        assert data_traffic.quantized(count, bits, size).num_bytes == published


@pytest.mark.parametrize("saved_at", [2, 3, 5])
def test_a_resumed_run_is_bit_identical(saved_at):
    for straight, again in run(ranks.resumed, 2, saved_at):
        for name, value in straight.items():
            assert torch.equal(value, again[name]), name


@pytest.mark.parametrize("warming_up", [True, False])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_named(warming_up, value):
    _, error = run(ranks.non_finite, 2, warming_up, value, expect_errors=True)
    assert isinstance(error, DivergedError)
    assert "middle.weight" in str(error)


def test_an_element_without_a_second_moment_is_not_updated():
    for weight in run(ranks.unseen, 2):
        assert torch.equal(weight[2:], torch.ones(2, 8))
        assert (weight[:2] < 1).all()
        assert (weight[1] < weight[0]).all()


def test_what_must_come_first_is_held():
    for function, words in ((ranks.at_once, "warm-up"), (ranks.unaveraged, "average_gradients")):
        for error in run(function, 2, expect_errors=True):
            assert isinstance(error, AssertionError)
            assert words in str(error)
