"""What CompressedStage relies on in torch.distributed.pipelining, name by name.

When a torch release changes one of these, the message says which override to look at again; the release is supported
once this file and tests/golden pass there.
"""

import inspect
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining import stage as torch_stage

from thinpipe.harness.errors import UserError
from thinpipe.harness.pipeline import placement, schedules
from thinpipe.harness.pipeline.stage import CompressedStage
from thinpipe.harness.spec import PipelineSpec, parse

# method -> the parameters it is called with by torch's schedules
OVERRIDES = {
    "get_fwd_recv_ops": ["self", "fwd_chunk_id"],
    "get_bwd_recv_ops": ["self", "bwd_chunk_id"],
    "get_fwd_send_ops": ["self", "fwd_chunk_id"],
    "get_bwd_send_ops": ["self", "bwd_chunk_id"],
    "_retrieve_recv_activations": ["self", "fwd_chunk_id"],
    "_retrieve_recv_grads": ["self", "bwd_chunk_id"],
    "forward_one_chunk": ["self", "fwd_chunk_id", "args", "kwargs", "save_forward_output"],
    "backward_one_chunk": ["self", "bwd_chunk_id", "loss", "full_backward", "last_backward"],
    "backward_weight_one_chunk": ["self", "bwd_chunk_id", "last_backward"],
    "set_local_fwd_input": ["self", "prev_stage_outputs", "mb_index"],
    "get_local_bwd_output": ["self", "mb_index"],
    "set_local_bwd_input": ["self", "next_stage_bwd_outputs", "mb_index"],
    "forward_maybe_with_nosync": ["self", "args", "kwargs"],
    "backward_maybe_with_nosync": ["self", "backward_type", "bwd_kwargs", "last_backward"],
    "_warmup_forward_vote": ["self", "has_backward", "received_acc"],
    "_warmup_backward_result": ["self", "received_result"],
    "_prepare_forward_infra": ["self", "num_microbatches", "args", "kwargs", "has_backward"],
    "_prepare_backward_infra": [
        "self", "num_microbatches", "loss_fn", "target", "received_grad_meta", "loss_kwargs",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", OVERRIDES)
def test_overridden_methods_are_as_they_were(name):
    stock = getattr(PipelineStage, name, None)
    assert stock is not None, (
        f"torch {torch.__version__} has no PipelineStage.{name}: CompressedStage.{name} is never called"
    )
    found = list(inspect.signature(stock).parameters)
    assert found == OVERRIDES[name], (
        f"torch {torch.__version__} changed PipelineStage.{name} from {OVERRIDES[name]} to {found}: "
        f"look at CompressedStage.{name} again"
    )


def test_the_list_above_is_all_we_override():
    ours = {name for name, value in vars(CompressedStage).items() if inspect.isfunction(value)}
    stock = {name for name in ours if hasattr(PipelineStage, name)} - {"__init__"}
    assert stock == set(OVERRIDES)


CALLS = {
    ScheduleGPipe._step_microbatches: [
        "get_fwd_recv_ops(i)", "forward_one_chunk(", "get_fwd_send_ops(i)", "get_bwd_recv_ops(i)",
        "backward_one_chunk(", "get_bwd_send_ops(i)", "perform_reduce_grad(",
    ],
    # One micro-batch forward and one backward, again and again: what is sent lies between.
    Schedule1F1B._step_microbatches: [
        "get_fwd_recv_ops(fwd", "forward_one_chunk(", "get_fwd_send_ops(fwd", "get_bwd_recv_ops(bwd",
        "backward_one_chunk(", "get_bwd_send_ops(bwd", "perform_reduce_grad(",
    ],
    # Several stages a rank: neighbours on one rank hand tensors over, and a backward may come in two parts.
    torch_schedules._PipelineScheduleRuntime._step_microbatches: [
        "get_fwd_send_ops(", "get_bwd_send_ops(", "get_fwd_recv_ops(", "get_bwd_recv_ops(",
        "forward_one_chunk(", "is_next_stage_on_this_rank:", "set_local_fwd_input(", "backward_one_chunk(",
        "full_backward=True", "is_prev_stage_on_this_rank:", "set_local_bwd_input(", "get_local_bwd_output(mb_index)",
        "full_backward=False", "backward_weight_one_chunk(",
    ],
    torch_schedules._PipelineSchedule._warmup_p2p: ["_warmup_forward_vote(", "_warmup_backward_result("],
    torch_schedules._PipelineSchedule._initialize_pp_stages: ["_prepare_forward_infra(", "_prepare_backward_infra("],
    torch_schedules._PipelineSchedule.eval: ["self._has_backward = False"],
    PipelineStage.forward_one_chunk: [
        "self._retrieve_recv_activations(", "self.forward_maybe_with_nosync(", "fwd_cache[",
    ],
    PipelineStage.backward_one_chunk: [
        "self._retrieve_recv_grads(", "self.backward_maybe_with_nosync(", "len(self._stage_meta.inputs)",
        "self.bwd_cache[bwd_chunk_id]",
    ],
    PipelineStage.backward_weight_one_chunk: ["self.backward_maybe_with_nosync(", "last_backward=last_backward"],
}  # fmt: skip


@pytest.mark.parametrize("function", CALLS, ids=lambda f: f.__qualname__)
def test_torch_still_calls_them_in_this_order(function):
    source = inspect.getsource(function)
    position = -1
    for call in CALLS[function]:
        found = source.find(call, position + 1)
        assert found > position, (
            f"torch {torch.__version__}: {function.__qualname__} no longer has {call!r} where it was"
        )
        position = found


def test_stage_metadata_still_has_inputs():
    assert "inputs" in inspect.signature(torch_stage._StageMeta).parameters


# --- schedules of several stages a rank ---


def stand_in(index, pipe, rank):
    """A stage as far as a schedule looks at it while it is made."""
    return SimpleNamespace(
        stage_index=index, num_stages=pipe.stages, is_first=index == 0, is_last=index == pipe.stages - 1,
        group=None, group_rank=rank, group_size=pipe.ranks, stage_index_to_group_rank={}, has_backward=False,
        submod=torch.nn.Identity(),
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", schedules.SEVERAL)
def test_stages_are_on_the_ranks_on_which_torch_looks_for_them(name, ranks):
    each = 2 if name in placement.V_SHAPED else 3
    pipe = PipelineSpec(stages=each * ranks, stages_per_rank=each, schedule=name)
    for rank in range(ranks):
        stages = [stand_in(index, pipe, rank) for index in placement.stages_of(rank, pipe)]
        made = schedules.training(name, stages, 2 * pipe.stages, lambda output, target: output)
        found = {stage: made.stage_index_to_group_rank[stage] for stage in range(pipe.stages)}
        assert found == {stage: placement.rank_of(stage, pipe) for stage in range(pipe.stages)}
        assert made.rank == rank


@pytest.mark.parametrize("name", schedules.SINGLE | schedules.SEVERAL)
def test_sizes_are_refused_before_the_start_that_torch_would_refuse_in_a_rank(name):
    for each, ranks, pieces in itertools.product((1, 2, 3), (1, 2, 3), (1, 2, 3, 4, 5, 6, 8)):
        pipe = PipelineSpec(stages=each * ranks, stages_per_rank=each, schedule=name, microbatches=pieces)
        if (each > 1) != (name in schedules.SEVERAL):
            continue
        stages = [stand_in(index, pipe, 0) for index in placement.stages_of(0, pipe)]
        try:
            schedules.training(name, stages, pieces, lambda output, target: output)
        except ValueError:
            with pytest.raises(UserError, match=r"pipeline\.schedule"):
                parse({"pipeline": pipe.model_dump(), "train": {"batch_size": pieces}})
        else:
            parse({"pipeline": pipe.model_dump(), "train": {"batch_size": pieces}})


def test_a_schedule_may_be_told_that_nothing_comes_from_anywhere():
    """It checks where inputs come from and outputs go by what a stage says of them, which is nothing."""
    source = inspect.getsource(torch_schedules._PipelineScheduleRuntime._validate_adjacent_stage_communication)
    assert "actual_stage_indices - expected_stage_indices" in source
    assert source.count("stage.args_recv_info[0]") == source.count("stage.act_send_info.values()") == 1
