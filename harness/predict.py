"""How long a run will take, from its spec alone: for the plan's column, the progress bar and the stall limit. Pure.

A step of GPipe with M micro-batches on S stages fills the pipeline and then goes at the pace of the slowest
thing, forward and backward in turn:

    step_s     = overhead + sum over both directions of
                 (M + S - 1) * max(compute_s, transfer_s) + (S - 1) * delay_s
    compute_s  = (2 forward, 4 backward) * multiply-adds of the largest stage * samples a micro-batch / FLOPS
                 * (ranks / cores where there are fewer cores than ranks), one forward more with recomputation
    transfer_s = elements of the widest boundary * bits / rate

of a replay, whose waits are known (as _phase_s has it):

    step_s     = sum over both directions of compute_s + (S - 1) * (compute_s + transfer_s)
                 + (M - 1) * max(compute_s, transfer_s)

An estimate, good to a factor of about two; measured times of the same cell replace it as soon as there are
any.

>>> round(elements(RunSpec()))
32768
"""

from __future__ import annotations

import functools
import math
import os

from thinpipe.harness import profile
from thinpipe.harness.compression import grammar
from thinpipe.harness.models.base import resolve
from thinpipe.harness.pipeline import partition
from thinpipe.harness.regimes import DIRECTIONS, Direction, final_epoch, last_change
from thinpipe.harness.spec import RunSpec, TaskSpec

# fp32 multiply-adds one core does in a small model's layers, each counted as two.
FLOPS = 3e10
# Launch, tokenizer, data, collection.
RUN_OVERHEAD_S = 4.0
# Optimizer, Python and kernel launches of a step that the parameters do not show.
STEP_OVERHEAD_S = 0.02
# Sent over every link to calibrate it.
CALIBRATION_BYTES = 2e6
FULL_BITS = 32.0


def predict(spec: RunSpec) -> float:
    """Seconds the whole run is predicted to take."""
    rate = spec.network.rate_mbit
    calibration = 0.0 if rate is None else CALIBRATION_BYTES * 8 / (rate * 1e6)
    return RUN_OVERHEAD_S + calibration + _training_s(spec) + _evaluation_s(spec)


def steps(spec: RunSpec) -> int:
    """Training steps of the run, unmeasured ones included."""
    if spec.measure == "timing":
        total = spec.timing.batches * (1 + spec.timing.passes)
    else:
        total = spec.train.epochs * _steps_per_epoch(spec)
    return total if spec.train.max_steps is None else min(total, spec.train.max_steps)


def elements(spec: RunSpec) -> int:
    """Elements that cross the widest boundary, one way, for one micro-batch."""
    shape = resolve(spec.model, spec.task)
    parts = partition.split(shape, spec.pipeline.stages, spec.pipeline.cuts)
    return spec.microbatch_size * max((math.prod(shape.boundaries[part.blocks[-1]]) for part in parts[:-1]), default=0)


def step_s(spec: RunSpec, epoch: int, *, first_visit: bool) -> float:
    """Seconds of one training step in `epoch`; first_visit: of samples that no memory has seen."""
    forward, backward = (_bits(spec, direction, epoch, first_visit) for direction in DIRECTIONS)
    passes = _phase_s(spec, "forward", forward) + _phase_s(spec, "backward", backward)
    update = max(stage.optimizer_s for stage in _replayed(spec)) if spec.compute == "replay" else 0.0
    return STEP_OVERHEAD_S + update + spec.train.accumulate * passes


def longest_silence_s(spec: RunSpec) -> float:
    """Seconds of the slowest thing a rank does in one piece: a training step, whichever compressors are in force, or
    the evaluation of one batch. An estimate as the others: a limit made of it needs a factor."""
    changes = {rule.from_epoch for direction in DIRECTIONS for rule in spec.compression.rules(direction)}
    last = final_epoch(spec)
    epochs = {last} if spec.measure == "timing" else {min(epoch, last) for epoch in {0} | changes}
    training = [step_s(spec, epoch, first_visit=first) for epoch in epochs for first in (False, True)]
    return max(*training, *(_evaluation_batch_s(spec, epoch) for epoch in _evaluated(spec)))


def _training_s(spec: RunSpec) -> float:
    count = steps(spec)
    if spec.measure == "timing":
        cold, last = min(count, spec.timing.batches), last_change(spec)
        return cold * step_s(spec, last, first_visit=True) + (count - cold) * step_s(spec, last, first_visit=False)
    per_epoch = _steps_per_epoch(spec)
    return sum(
        step_s(spec, epoch, first_visit=epoch == 0) * min(per_epoch, count - epoch * per_epoch)
        for epoch in range(-(-count // per_epoch))
    )


def _steps_per_epoch(spec: RunSpec) -> int:
    # The corpus decides where num_sequences is open; its default stands in.
    count = spec.task.num_sequences or TaskSpec().num_sequences or 1
    return max(1, min(count // spec.train.batch_size, spec.train.max_steps_per_epoch or count))


def _evaluation_s(spec: RunSpec) -> float:
    batches = -(-spec.task.num_eval_sequences // (spec.microbatch_size * spec.pipeline.microbatches))
    return batches * sum(_evaluation_batch_s(spec, epoch) for epoch in _evaluated(spec))


def _evaluated(spec: RunSpec) -> list[int]:
    """The epochs after which the run evaluates: every `evaluate_every`-th one and the last that it begins."""
    every = spec.train.evaluate_every
    if spec.measure == "timing" or not every or not spec.task.num_eval_sequences:
        return []
    epochs = -(-steps(spec) // _steps_per_epoch(spec))
    return [epoch for epoch in range(epochs) if (epoch + 1) % every == 0 or epoch == epochs - 1]


def _evaluation_batch_s(spec: RunSpec, epoch: int) -> float:
    off = spec.compression.evaluation == "off"
    return _phase_s(spec, "forward", FULL_BITS if off else _bits(spec, "forward", epoch, first_visit=False))


def _phase_s(spec: RunSpec, direction: Direction, bits: float) -> float:
    """Seconds for all micro-batches to pass all stages in one direction."""
    stages, pieces = spec.pipeline.stages, spec.pipeline.microbatches
    compute = _compute_s(spec, direction)
    if stages == 1:
        return pieces * compute
    transfer, delay = _transfer_s(spec, bits), (stages - 1) * spec.network.delay_ms / 1e3
    if spec.compute == "replay":
        # The waits are known, so it pays to be exact.
        return compute + (stages - 1) * (compute + transfer) + (pieces - 1) * max(compute, transfer) + delay
    return (pieces + stages - 1) * max(compute, transfer) + delay


# Asked for at each of a run's epochs, and a plan of a hundred epochs and forty runs would take half a minute.
@functools.lru_cache(maxsize=64)
def _compute_s(spec: RunSpec, direction: Direction) -> float:
    """Seconds of one micro-batch on the slowest stage."""
    if spec.compute == "replay":
        return max(getattr(stage, f"{direction}_s") for stage in _replayed(spec))
    shape = resolve(spec.model, spec.task)
    parts = partition.split(shape, spec.pipeline.stages, spec.pipeline.cuts)
    costs = [sum(shape.flops_per_block[i] for i in part.blocks) + part.last * shape.flops_head for part in parts]
    crowding = max(1.0, spec.world_size / (os.cpu_count() or 1))
    operations = 2 if direction == "forward" else 6 if spec.train.recompute else 4
    return operations * max(costs) * spec.microbatch_size / FLOPS * crowding


def _replayed(spec: RunSpec) -> list[profile.StageTimes]:
    assert spec.profile is not None
    return profile.of_spec(profile.load(spec.profile), spec)


def _transfer_s(spec: RunSpec, bits: float) -> float:
    """Seconds of one micro-batch on the widest boundary's link."""
    rate, rho = spec.network.rate_mbit, spec.network.rho
    if rate is not None:
        return elements(spec) * bits / (rate * 1e6)
    if rho is None:
        return 0.0
    # Not worked out yet: rho is of both directions, uncompressed.
    both = sum(_compute_s(spec, direction) for direction in DIRECTIONS)
    return rho * both / 2 * bits / FULL_BITS


def _bits(spec: RunSpec, direction: Direction, epoch: int, first_visit: bool) -> float:
    """Bits an element of the widest boundary; first_visit: of samples that no memory has seen before."""
    measure = grammar.first_visit_bits if first_visit else grammar.estimate
    texts = (spec.compression.compressor(direction, k, epoch) for k in range(max(1, spec.pipeline.stages - 1)))
    return max(measure(text) for text in texts)
