"""What a replay sends and how it waits: pure parts of replay.py, and profiles measured on a model of two blocks."""

import time

import numpy as np
import pytest
import torch

from thinpipe.harness import profile, profiling, replay
from thinpipe.harness.errors import UserError
from thinpipe.harness.experiment import expand
from thinpipe.harness.models.base import resolve
from thinpipe.harness.pipeline import partition
from thinpipe.harness.profile import StageTimes
from thinpipe.harness.spec import parse

SHAPE = (2, 32, 64)
MICRO = {
    "model": {"preset": "micro"},
    "task": {"sequence_length": 16, "num_sequences": 16, "num_eval_sequences": 0},
    "train": {"batch_size": 8},
    "pipeline": {"microbatches": 2},
}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_values_have_the_shape_and_change_as_much_as_they_should(direction):
    values = replay.values(SHAPE, direction)
    first, second = values.of(0, 0), values.of(1, 0)
    assert tuple(first.shape) == SHAPE
    assert first.dtype == torch.float32
    assert first.is_contiguous()
    change = float((first - second).norm() / first.norm())
    assert change == pytest.approx(replay.CHANGE[direction], rel=0.2)
    assert torch.equal(first, values.of(2, 0)), "visits alternate"
    assert not torch.equal(first, values.of(0, 1)), "micro-batches differ"
    assert bool(torch.isfinite(first).all())


def test_values_share_their_storage():
    values = replay.values(SHAPE, "forward")
    assert replay.values(SHAPE, "forward") is values
    assert values.of(0, 0).data_ptr() == values.of(0, replay.SHIFTS).data_ptr()
    assert values.of(0, 1).data_ptr() - values.of(0, 0).data_ptr() == 4 * SHAPE[-1]


WAITS = StageTimes(0.02, 0.03, 0.0)


def stage_of(index, times=WAITS):
    spec = parse({**MICRO, "measure": "timing", "compute": "replay", "profile": "v100-gpt2-xl"})
    shape = resolve(spec.model, spec.task)
    parts = partition.split(shape, 2)
    return replay.ReplayStage(spec, shape, parts[index], times)


def test_a_stage_waits_without_computing():
    stage = stage_of(1)
    stage.visit((3, 4, 5, 6), step=5)
    x = torch.zeros(4, 16, 32, requires_grad=True)
    processor, start = time.thread_time(), time.monotonic()
    output = stage(x)
    forward = time.monotonic() - start
    replay.loss(output, torch.zeros(4)).backward()
    total = time.monotonic() - start
    assert forward >= 0.02
    assert total - forward >= 0.03
    assert time.thread_time() - processor < 0.02, "sleep, not work"
    assert x.grad is not None
    assert torch.equal(x.grad, replay.values((4, 16, 32), "backward").of(5 // 2, 3))
    assert [p.grad.tolist() for p in stage.parameters()] == [[0.0]]


def test_the_first_stage_hands_on_activations_and_the_optimizer_waits():
    stage = stage_of(0, StageTimes(0.0, 0.0, 0.02))
    stage.visit((1, 2, 3, 4), step=0)
    output = stage(torch.zeros(4))
    assert torch.equal(output, replay.values((4, 16, 32), "forward").of(0, 1))
    output.backward(torch.zeros_like(output))
    optimizer = torch.optim.SGD(stage.parameters())
    replay.slow_down(optimizer, [stage])
    start = time.monotonic()
    optimizer.step()
    assert time.monotonic() - start >= 0.02


def test_work_that_outlasts_the_profile_is_counted():
    stage, other = stage_of(0), stage_of(1)
    assert replay.overrun_pct([]) is None
    assert replay.overrun_pct([stage]) is None, "it has not waited"
    stage.waits.wait(time.monotonic(), 0.05)
    assert replay.overrun_pct([stage]) == 0
    start = time.monotonic()
    other.waits.wait(start - 0.06, 0.05)
    assert time.monotonic() - start < 0.04, "what is over needs no wait"
    assert replay.overrun_pct([stage, other]) == pytest.approx(100 * 0.01 / 0.1, rel=0.5)
    quick = stage_of(1, StageTimes(1e-6, 1e-6, 0.0))
    quick(torch.zeros(4, 16, 32, requires_grad=True)).mean().backward()
    assert replay.overrun_pct([quick]) > 100, "a pass cannot be that short"


def test_samples_are_those_a_timing_run_cycles():
    spec = parse({**MICRO, "measure": "timing", "compute": "replay", "profile": "v100-gpt2-xl"})
    assert len(replay.dataset(spec).train) == 16
    assert replay.cycle(spec) == 2
    one = parse({**spec.canonical(), "timing": {"batches": 1}})
    assert len(replay.dataset(one).train) == 8


def test_a_profile_is_measured_block_by_block():
    spec = parse(MICRO)
    threads = torch.get_num_threads()
    found = profiling.profile_run(spec, repeats=1)
    assert torch.get_num_threads() == threads
    assert (found.model, found.blocks, found.microbatch_size) == ("gpt2:micro", 2, 4)
    assert found.measured
    assert all(seconds > 0 for name in profile.TIMES for seconds in getattr(found, name))
    assert len(profile.of_spec(found, spec)) == 2
    assert np.isclose(sum(one.forward_s for one in profile.of_spec(found, spec)), sum(found.forward_s))
    assert "gpt2:micro" in profiling.render(found)


def test_a_profile_is_of_one_model():
    def experiment(sizes):
        return expand(
            {
                "name": "sizes",
                "base": MICRO,
                "part": [{"name": "one", "axes": {"pipeline.microbatches": sizes}}],
                "arm": [{"label": "FP32"}, {"label": "BF16", "compression": {"forward": "bf16"}}],
            }
        )

    assert profiling.of_experiment(experiment([2])).microbatch_size == 4
    with pytest.raises(UserError, match="choose with --set"):
        profiling.of_experiment(experiment([2, 4]))
