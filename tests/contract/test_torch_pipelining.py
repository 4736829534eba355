"""What CompressedStage relies on in torch.distributed.pipelining, name by name.

When a torch release changes one of these, the message says which override to look at again; the release is supported
once this file and tests/golden pass there.
"""

import inspect

import pytest
import torch
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining import stage as torch_stage

from thinpipe.harness.pipeline.stage import CompressedStage

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
