"""A stage that waits as long as a profile says instead of computing, and hands on tensors of the real shape.

    forward    ─▸ boundary tensor in ─▸ sleep until start + forward_s  ─▸ boundary tensor out (made once, not computed)
    backward   ─▸ gradient in        ─▸ sleep until start + backward_s ─▸ gradient out
    optimizer  ─▸ sleep until start + optimizer_s

torch's schedules, CompressedStage, channels, codecs, frames and the links are those of a real run. A model is never
built: GPT2-XL costs a rank its buffers, its memories and the few tensors of `Values`.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from thinpipe.harness import profile
from thinpipe.harness.models.base import ModelShape, StagePart, resolve
from thinpipe.harness.pipeline import partition
from thinpipe.harness.profile import StageTimes
from thinpipe.harness.recorder import now
from thinpipe.harness.regimes import DIRECTIONS
from thinpipe.harness.spec import RunSpec
from thinpipe.harness.tasks import base as tasks
from thinpipe.harness.tasks.base import Batch, Dataset

#: Tensors a direction has: a sample's values alternate between them from visit to visit.
VARIANTS = 2
#: Micro-batches that differ: one begins as many rows into the same storage as its first sample's id says, modulo this.
SHIFTS = 4
# |change| / |values| between two visits, both 2-norm, about: what delta methods meet in the middle of a fine-tuning
# (captured of short trainings here: 0.08 and 0.16 of activations, 0.6 and 0.7 of gradients).
CHANGE = {"forward": 0.1, "backward": 0.6}
# Spread of the channels' scales (log-normal) and freedom of the tails (Student's t); channels in a thousand that are
# OUTLIER times as large: what activations of trained transformers look like, and their gradients, which are heavier.
SPREAD, FREEDOM, OUTLIERS, OUTLIER = 0.5, {"forward": 5.0, "backward": 3.0}, 3, 12.0
SIZE = {"forward": 1.0, "backward": 1e-4}


class Values:
    """Boundary tensors of one direction, made once: float32, `shape` a micro-batch."""

    def __init__(self, shape: Sequence[int], direction: str):
        self.shape = tuple(shape)
        self._count, row = math.prod(shape), shape[-1]
        generator = np.random.default_rng(direction == "backward")
        size = self._count + SHIFTS * row
        scales = np.exp(SPREAD * generator.standard_normal(row)).astype(np.float32)
        scales[generator.permutation(row)[: OUTLIERS * row // 1000]] *= OUTLIER
        drawn = [_tailed(generator, size, FREEDOM[direction]).reshape(-1, row) * scales for _ in range(1 + VARIANTS)]
        # Both variants lie so far from a common middle that they are CHANGE from each other.
        apart = CHANGE[direction] / math.sqrt(2)
        self._flat = [SIZE[direction] * (drawn[0] + apart * own).ravel() for own in drawn[1:]]
        self._row = row

    def of(self, variant: int, first_id: int) -> torch.Tensor:
        """The tensor of the micro-batch that begins with this sample, on storage that all share: to be read only."""
        start = first_id % SHIFTS * self._row
        # Not a torch view: autograd would tie it to its base.
        return torch.from_numpy(self._flat[variant % VARIANTS][start : start + self._count].reshape(self.shape))


def _tailed(generator: np.random.Generator, size: int, freedom: float) -> np.ndarray:
    """Student's t, in float32 throughout."""
    drawn = generator.standard_normal(size, dtype=np.float32)
    drawn /= np.sqrt(2 / freedom * generator.standard_gamma(freedom / 2, size, dtype=np.float32))
    return drawn


@functools.lru_cache(maxsize=8)
def values(shape: tuple[int, ...], direction: str) -> Values:
    """The same for every boundary and rank: made in the process that ranks are forked from, they share its memory."""
    return Values(shape, direction)


def prepare(spec: RunSpec) -> None:
    """Make what the ranks of a run share. Raises UserError where the profile does not fit the run."""
    shape = resolve(spec.model, spec.task)
    parts = partition.split(shape, spec.pipeline.stages, spec.pipeline.cuts)
    _times(spec)
    for part in parts[:-1]:
        for direction in DIRECTIONS:
            values((spec.microbatch_size, *shape.boundaries[part.blocks[-1]]), direction)


class ReplayStage(torch.nn.Module):
    """One stage, standing for `part`. forward: whatever the stage before handed on; returns a boundary tensor, of the
    last stage a zero a sample, whose mean is the loss.

    Each block has one parameter of one element, so that gradients are divided, gathered and clipped as ever.
    """

    def __init__(self, spec: RunSpec, shape: ModelShape, part: StagePart, times: StageTimes):
        super().__init__()
        self.part, self.times = part, times
        self.shared: dict[str, list[torch.nn.Parameter]] = {}
        self.blocks = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(1)) for _ in part.blocks)
        self.waits = Waits()
        size = self._samples = spec.microbatch_size
        self._cycle = cycle(spec)
        self._variant, self._first_id = 0, 0
        self._out = None if part.last else values((size, *shape.boundaries[part.blocks[-1]]), "forward")
        self._back = None if part.first else values((size, *shape.boundaries[part.blocks[0] - 1]), "backward")

    def visit(self, ids: tuple[int, ...], step: int) -> None:
        """Called before each micro-batch's forward and backward."""
        self._variant, self._first_id = step // self._cycle, ids[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Wait.apply(x, self, *self.blocks)

    def output(self) -> torch.Tensor:
        return torch.zeros(self._samples) if self._out is None else self._out.of(self._variant, self._first_id)

    def gradient(self) -> torch.Tensor | None:
        return None if self._back is None else self._back.of(self._variant, self._first_id)


class _Wait(torch.autograd.Function):
    """(input, stage, *parameters) -> output, forward_s after it was called; its gradient, backward_s after."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stage: ReplayStage, *parameters: torch.Tensor) -> torch.Tensor:
        start = now()
        ctx.stage = stage
        output = stage.output()
        stage.waits.wait(start, stage.times.forward_s)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        start = now()
        stage: ReplayStage = ctx.stage
        found = stage.gradient()
        zeros = [torch.zeros(1) for _ in stage.blocks]
        stage.waits.wait(start, stage.times.backward_s)
        return found, None, *zeros


class Waits:
    """The seconds that a stage was to wait, and those by which its work had already outlasted them."""

    def __init__(self) -> None:
        self.asked_s = self.over_s = 0.0

    def wait(self, start: float, seconds: float) -> None:
        """Sleep until `seconds` after `start`."""
        self.asked_s += seconds
        self.over_s += max(0.0, now() - (start + seconds))
        wait_until(start + seconds)


def overrun_pct(stages: Sequence[ReplayStage]) -> float | None:
    """100 x seconds by which passes outlasted the profile / seconds they were to last; None of no or a timeless stage.
    Whoever measures clears `waits` before."""
    asked = sum(stage.waits.asked_s for stage in stages)
    return 100 * sum(stage.waits.over_s for stage in stages) / asked if asked else None


def wait_until(deadline: float) -> None:
    """Sleep, without using the processor, until CLOCK_MONOTONIC says `deadline`."""
    while (left := deadline - now()) > 0:
        time.sleep(left)


def build(spec: RunSpec, shape: ModelShape, parts: Sequence[StagePart], index: int) -> ReplayStage:
    """Stage `index` of a replay. Raises UserError where the profile does not fit the run."""
    return ReplayStage(spec, shape, parts[index], _times(spec)[index])


def _times(spec: RunSpec) -> list[StageTimes]:
    assert spec.profile is not None
    return profile.of_spec(profile.load(spec.profile), spec)


def loss(output: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """0, so that there is something to go backward from."""
    return output.mean()


def slow_down(optimizer: torch.optim.Optimizer, stages: Iterable[ReplayStage]) -> None:
    """Make each step of a rank's optimizer take as long as the profile says."""
    seconds, started = sum(stage.times.optimizer_s for stage in stages), 0.0

    def before(*_: Any) -> None:
        nonlocal started
        started = now()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda *_: wait_until(started + seconds))


class Samples:
    """A task of a replay: samples have identities, which memories need, and nothing else."""

    epoch_batches = staticmethod(tasks.epoch_batches)
    evaluation_batches = staticmethod(tasks.evaluation_batches)

    @staticmethod
    def batch(samples: Any, ids: tuple[int, ...], weights: Any = None, *, epoch: int | None = None) -> Batch:
        nothing = torch.zeros(len(ids))
        return Batch(ids, nothing, nothing, torch.ones(len(ids)))


def dataset(spec: RunSpec) -> Dataset:
    """As many samples as a timing run cycles; of no corpus."""
    count = cycle(spec) // spec.train.accumulate * spec.train.batch_size
    return Dataset(range(count), range(0), 0, {"replay": spec.profile, "samples": count})


def cycle(spec: RunSpec) -> int:
    """Passes through the pipeline from one visit of a sample to the next."""
    return min(spec.timing.batches, spec.steps_per_epoch or spec.timing.batches) * spec.train.accumulate
