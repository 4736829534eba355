"""Schedules, passes, shared weights, data groups, recomputation: other ways to the same numbers.

Where only the order of work changes, losses are equal bit for bit; where the order of a sum does, within its error.
"""

import pytest
import torch

import reference
from runs import small
from thinpipe.harness.data_traffic import step_traffic
from thinpipe.harness.spec import DataParallelSpec

pytestmark = [pytest.mark.lab, pytest.mark.e2e]

PLAIN = small()
SEVERAL = [
    "interleaved-1f1b", "looped-bfs", pytest.param("interleaved-zb", marks=pytest.mark.slow), "zbv-zb", "dualpipev",
]  # fmt: skip
STATEFUL = {"forward": "delta(fixpoint:3)", "backward": "fixpoint:6(rounding=stochastic)", "warmup_epochs": 1}
# Sums of 20 steps in another order; what was seen is 2e-6.
SUMMATION = 2e-5


@pytest.fixture(scope="module")
def expected():
    return reference.plain_loop(PLAIN)


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_1f1b_equals_a_plain_loop(trained, expected, stages):
    assert trained.losses(small(pipeline={"stages": stages, "schedule": "1f1b"})) == expected


@pytest.mark.parametrize("schedule", SEVERAL)
def test_several_stages_a_rank_equal_a_plain_loop(trained, expected, schedule):
    losses = trained.losses(small(pipeline={"stages": 4, "stages_per_rank": 2, "schedule": schedule}))
    if schedule == "looped-bfs":
        assert losses == pytest.approx(expected, rel=SUMMATION), "it takes the micro-batches' gradients last one first"
    else:
        assert losses == expected


def test_a_memory_follows_the_samples_not_the_schedule(trained):
    gpipe = trained.losses(small(compression=STATEFUL, pipeline={"stages": 2}))
    assert trained.losses(small(compression=STATEFUL, pipeline={"stages": 2, "schedule": "1f1b"})) == gpipe


def test_passes_add_up_like_micro_batches(trained, expected):
    spec = small(train={"accumulate": 2}, pipeline={"microbatches": 2})
    assert trained.losses(spec) == expected
    steps = trained.rows(spec, "transfers").groupby(["step", "rank"])["messages"].sum()
    assert set(steps) == {4}, "two passes of two micro-batches each"


def test_explicit_cuts_change_no_number(trained, expected):
    assert trained.losses(small(pipeline={"stages": 2, "cuts": [1]})) == expected


def test_recomputation_changes_no_number(trained, expected):
    assert trained.losses(small(train={"recompute": True})) == expected


@pytest.mark.parametrize("schedule", ["interleaved-zb", pytest.param("zbv-zb", marks=pytest.mark.slow)])
def test_a_backward_pass_in_two_parts_recomputes_twice(trained, schedule):
    pipeline = {"stages": 4, "stages_per_rank": 2, "schedule": schedule}
    once = trained.losses(small(model={"dropout": 0.2}))
    assert trained.losses(small(model={"dropout": 0.2}, train={"recompute": True}, pipeline=pipeline)) == once


@pytest.mark.slow
def test_recomputed_blocks_meet_their_dropout_masks_again(trained):
    model = {"dropout": 0.2}
    once = trained.losses(small(model=model))
    assert trained.losses(small(model=model, train={"recompute": True}, pipeline={"stages": 4})) == once
    assert trained.losses(small(model={**model, "dropout_masks": "step"})) != once


@pytest.mark.slow
def test_bf16_autocast_is_the_same_for_any_cut_and_near_float32(trained, expected):
    one = trained.losses(small(train={"autocast": "bf16"}, pipeline={"stages": 1}))
    assert trained.losses(small(train={"autocast": "bf16"}, pipeline={"stages": 4})) == one
    assert one != expected
    assert one == pytest.approx(expected, rel=1e-3)


def test_sgd_with_a_cosine_equals_a_plain_loop(trained):
    spec = small(train={"optimizer": "sgd", "lr": 0.3, "lr_schedule": "cosine", "weight_decay": 1e-4})
    assert trained.losses(spec) == reference.plain_loop(spec)


# --- shared weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_tied_head_is_the_same_for_any_cut(trained, stages):
    one = trained.losses(small(model={"shared": "summed"}, pipeline={"stages": 1}))
    several = small(model={"shared": "summed"}, pipeline={"stages": stages})
    assert trained.losses(several) == one
    exchanged = trained.status(several)["totals"]["shared_bytes"]
    assert exchanged > 20 * 2 * 4 * 1024 * 32, "each step, both ways, the whole embedding at least once"


def test_a_tied_head_trains_as_hugging_face_ties_it(trained):
    spec = small(model={"shared": "summed"}, pipeline={"stages": 2})
    assert trained.losses(spec) == pytest.approx(reference.plain_loop(spec, tied=True), rel=SUMMATION)
    assert trained.losses(spec) != trained.losses(small())


# --- data groups ------------------------------------------------------------------------------------------------------


def test_two_by_two_is_one_process_on_the_joint_batch(trained):
    spec = small(pipeline={"stages": 2}, data_parallel={"groups": 2})
    assert trained.losses(spec) == pytest.approx(reference.plain_loop(spec), rel=SUMMATION)


@pytest.mark.parametrize(
    ("exchange", "within"),
    [("fp16", 1e-3), pytest.param("bf16", 5e-3, marks=pytest.mark.slow), ("powersgd", 0.02), ("quantized-adam", 0.05)],
)
def test_compressed_exchanges_stay_near_and_replicas_equal(trained, exchange, within):
    warm = {"compression": {"warmup_epochs": 1}} if exchange == "quantized-adam" else {}
    spec = small(pipeline={"stages": 2}, data_parallel={"groups": 2, "exchange": exchange}, **warm)
    status = trained.status(spec)
    full = trained.losses(small(pipeline={"stages": 2}, data_parallel={"groups": 2}))
    losses = trained.losses(spec)
    assert losses != full
    assert losses == pytest.approx(full, rel=within)
    by_rank = status["parameters"]
    assert by_rank[:2] == by_rank[2:], "the groups hold the same model, bit for bit"
    assert by_rank[0] != by_rank[1]


def test_data_bytes_are_what_the_formula_says(trained):
    """Of every rank and step the run itself has compared them; here the sum, from parameter shapes alone."""
    spec = small(pipeline={"stages": 1}, data_parallel={"groups": 2})
    status = trained.status(spec)
    shapes = [tuple(p.shape) for p in reference.whole(spec).parameters() if p.requires_grad]
    a_step = [step_traffic(shapes, DataParallelSpec(groups=2), rank).num_bytes for rank in range(2)]
    elements = sum(torch.Size(shape).numel() for shape in shapes)
    assert sum(a_step) == pytest.approx(2 * 4 * elements, rel=1e-3)
    assert status["totals"]["data_bytes"] == pytest.approx(20 * sum(a_step), rel=0.01)


def test_memories_of_two_groups_and_boundaries_agree(trained):
    spec = small(pipeline={"stages": 2}, data_parallel={"groups": 2}, compression=STATEFUL)
    losses = trained.losses(spec)
    assert losses[-1] < losses[0] - 0.1
