"""Gradients between data groups: the right mean, in every group the same, at the bytes the formulas say."""

import data_groups
import pytest
import torch
from data_groups import Net, backward, batch, gradients, parameters, run

from thinpipe.harness import data_parallel, data_traffic
from thinpipe.harness.data_traffic import Traffic, buckets, low_rank_parts, ring, step_traffic
from thinpipe.harness.errors import CodecError, PeerError, RunError, UserError
from thinpipe.harness.spec import DataParallelSpec


def local(step, rank):
    """A group's own gradients, computed without any exchange."""
    module = Net()
    backward(module, *batch(step, rank))
    return gradients(module)


# Relative to the largest gradient of any group, and at least: rounding of each addend and of each partial sum.
ROUNDING = {"none": (1e-6, 0.0), "fp16": (2.0**-11, 2.0**-25), "bf16": (2.0**-8, 0.0)}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("exchange", ["none", "fp16", "bf16"])
def test_gradients_become_the_mean(exchange, size):
    results = run(data_groups.averaged, size, exchange)
    for step in range(4):
        own = [local(step, rank) for rank in range(size)]
        for name in own[0]:
            found = [steps[step][name] for steps, _ in results]
            if own[0][name] is None:
                assert all(gradient is None for gradient in found), name
                continue
            stacked = torch.stack([gradient[name] for gradient in own])
            assert all(torch.equal(gradient, found[0]) for gradient in found), name
            error = (found[0] - stacked.mean(0)).abs().max()
            relative, least = ROUNDING[exchange]
            assert error <= max(relative * (size + 1) / 2 * stacked.abs().max(), least * size), name
            assert exchange == "none" or error > 0 or name == "last.bias", name


def test_frozen_and_unused_parameters_have_no_gradient_and_statistics_stay_apart():
    results = run(data_groups.averaged, 2, "none")
    for steps, _ in results:
        assert {name for name, gradient in steps[0].items() if gradient is None} == {"frozen", "unused"}
    assert not torch.equal(results[0][1], results[1][1])


def test_passes_before_the_last_are_summed_without_an_exchange():
    results = run(data_groups.averaged, 2, "none", 3)
    mean = sum(local(turn, rank)["middle.weight"] for turn in range(3) for rank in range(2)) / 2
    torch.testing.assert_close(results[0][0][0]["middle.weight"], mean, rtol=1e-5, atol=1e-6)


def test_two_groups_train_as_one_process_on_the_joint_batch():
    steps = 10
    found = run(data_groups.trained, 2, "none", steps)
    module = Net(norm=False)
    optimizer = data_groups.optimizer_of(module)
    for step in range(steps):
        for rank in range(2):
            backward(module, *batch(step, rank))
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
    for name, expected in parameters(module).items():
        assert torch.equal(found[0][name], found[1][name])
        torch.testing.assert_close(found[0][name], expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("matrix_rank", [1, 2, 4])
def test_powersgd_keeps_what_it_leaves_out(matrix_rank):
    results = run(data_groups.low_rank, 2, 8, matrix_rank)
    true = sum(result[0] for result in results) / 2
    error = sum(result[2].double() for result in results) / 2
    applied = results[0][1]
    assert torch.equal(applied, results[1][1])
    torch.testing.assert_close(applied + error, true, rtol=0, atol=1e-5)
    left_out = error.norm() / true.norm()
    assert 0.01 < left_out < 1.0, "nothing was compressed, or nothing came through"


def test_powersgd_with_many_parameters_and_groups_ends():
    results = run(data_groups.low_rank, 4, 12, 2)
    assert all(torch.equal(result[1], results[0][1]) for result in results)


@pytest.mark.parametrize(("exchange", "size"), [("none", 3), ("fp16", 3), ("powersgd", 3)])
def test_a_resumed_run_is_bit_identical(exchange, size):
    for straight, again, num_buckets in run(data_groups.resumed, size, exchange):
        assert num_buckets == (1 if exchange == "powersgd" else 2)
        for name, value in straight.items():
            assert torch.equal(value, again[name]), name


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    ("exchange", "width"), [("none", 37), ("none", 700), ("fp16", 700), ("bf16", 37), ("powersgd", 37)]
)
def test_bytes_are_the_formula_s_to_the_byte(exchange, width, size):
    for steps in run(data_groups.counted, size, exchange, width):
        for sent, expected, used, worked_out in steps:
            assert sent == expected
            assert exchange == "powersgd" or used == worked_out
    assert len(used) == (2 if width == 700 else 1)


def test_a_gradient_too_large_for_fp16_is_named_where_it_is():
    first, second = run(data_groups.too_large, 2, expect_errors=True)
    assert isinstance(second, CodecError)
    assert "too large for fp16" in str(second)
    assert "bf16" in str(second)
    assert isinstance(first, PeerError)


def test_groups_that_begin_apart_are_refused():
    for error in run(data_groups.unequal, 2, expect_errors=True):
        assert isinstance(error, RunError)
        assert "data groups 0 and 1" in str(error)


def test_powersgd_refuses_a_scalar_by_name():
    for error in run(data_groups.scalar, 2, expect_errors=True):
        assert isinstance(error, UserError)
        assert "scale" in str(error)


def test_split_backward_passes_are_averaged_too():
    """Zero-bubble schedules compute weight gradients past DDP's hooks."""
    split = run(data_groups.scheduled, 2, "interleaved-zb")
    whole = run(data_groups.scheduled, 2, "interleaved-1f1b")
    for result in (*split, *whole):
        assert result.keys() == split[0].keys()
        for name, gradient in result.items():
            torch.testing.assert_close(gradient, whole[0][name], rtol=1e-5, atol=1e-7)
    assert not any(torch.equal(g, torch.zeros_like(g)) for g in split[0].values())


# --- formulas ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("elements", [1, 5, 1000, 1_234_567, 9_000_001])
def test_a_ring_carries_twice_all_but_one_chunk(size, elements):
    ranks = [ring(elements, 4, rank, size) for rank in range(size)]
    assert sum(t.num_bytes for t in ranks) == 2 * (size - 1) * elements * 4
    assert sum(t.sent for t in ranks) == sum(t.received for t in ranks)
    assert ring(elements, 4, 0, 1) == Traffic()


def test_buckets_are_filled_from_the_last_parameter_back():
    mib = 2**18
    assert buckets([(mib, 3), (10,), (mib // 2, 1), (mib // 2, 1), (7,)]) == [7 + mib, 10 + 3 * mib]
    assert buckets([(30 * mib,), (mib,)]) == [mib, 30 * mib]
    assert buckets([(5,), (0, 4)]) == [5]


def test_low_rank_parts():
    # 100 x 50 at rank 2: 300 of 5000 elements; 6 x 4 would not become half; vectors stay.
    assert low_rank_parts([(100, 50), (6, 4), (9,)], 2) == (33, 200, 100)
    assert low_rank_parts([(8, 3, 5, 5)], 1) == (0, 8, 75)


def test_step_traffic_of_each_exchange():
    shapes = [(600, 600), (600,)]
    count = 600 * 601
    made = {e: DataParallelSpec(groups=2, exchange=e, bits=4) for e in ("none", "fp16", "powersgd", "quantized-adam")}
    found = {e: step_traffic(shapes, p, 0) for e, p in made.items()}
    assert found["none"].num_bytes == 4 * count
    assert found["fp16"].num_bytes == 2 * count
    assert found["powersgd"].num_bytes == 4 * (600 + 2 * 1200)
    padded = -(-count // 1024) * 1024
    assert found["quantized-adam"] == Traffic(padded // 512 * (2 + 256), 2, 2)
    assert step_traffic(shapes, made["powersgd"], 0, compressed=False).num_bytes == 4 * count
    assert step_traffic(shapes, DataParallelSpec(), 0) == Traffic()


def test_an_unwrapped_module_needs_nothing():
    module = torch.nn.Linear(3, 2)
    data_parallel.finish(module)
    assert data_parallel.unwrap(module) is module
    assert data_parallel.hook_state(module) == {}
    assert data_parallel.traffic(module) == data_traffic.Traffic()
