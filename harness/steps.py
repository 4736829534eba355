"""Which samples each step of a run trains on: pure, the same on every rank.

A convergence run goes through seeded epochs. A timing run cycles a few fixed batches: one unmeasured pass, in which
delta methods see every sample for the first time, then the measured ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from thinpipe.harness.errors import UserError
from thinpipe.harness.regimes import last_change
from thinpipe.harness.spec import RunSpec

Batches = Callable[..., Sequence[tuple[int, ...]]]


class Step(NamedTuple):
    """One step: the epoch whose compressors are in force, its samples, whether it counts, whether an epoch ends.

    batches[pass][data group]: the samples of one pass of one pipeline.
    """

    epoch: int
    batches: tuple[tuple[tuple[int, ...], ...], ...]
    measured: bool
    ends_epoch: bool

    @property
    def ids(self) -> tuple[int, ...]:
        """All samples, pass by pass, group by group: a single process that takes them in this order does the same."""
        return tuple(i for groups in self.batches for ids in groups for i in ids)


def plan(spec: RunSpec, num_samples: int, epoch_batches: Batches) -> list[Step]:
    """All steps of a run. epoch_batches(num_samples, batch_size, seed=, epoch=) gives one epoch's batches.

    Measured steps of a convergence run: past the last change of compressors, and past the first epoch, which a delta
    method sends in full (a run of one epoch measures that one).
    """
    first = epoch_of(spec, num_samples, epoch_batches, 0)
    if not first:
        raise UserError(
            f"{num_samples} training samples do not fill one batch of {spec.train.batch_size}; "
            "lower train.batch_size or raise task.num_sequences"
        )
    change = last_change(spec)
    if spec.measure == "timing":
        fixed = first[: spec.timing.batches]
        steps = [
            Step(change, batch, turn > 0, batch is fixed[-1])
            for turn in range(1 + spec.timing.passes)
            for batch in fixed
        ]
    else:
        steps = []
        alone = spec.train.epochs == 1 or (spec.train.max_steps or math.inf) <= len(first)
        for epoch in range(spec.train.epochs):
            batches = epoch_of(spec, num_samples, epoch_batches, epoch) if epoch else first
            measured = alone or epoch >= max(1, change)
            steps += [Step(epoch, batch, measured, batch is batches[-1]) for batch in batches]
            if spec.train.max_steps is not None and len(steps) >= spec.train.max_steps:
                break
    return _cut(steps, spec)


def epoch_of(
    spec: RunSpec, num_samples: int, epoch_batches: Batches, epoch: int
) -> list[tuple[tuple[tuple[int, ...], ...], ...]]:
    """The batches of one epoch, as Step.batches.

    Each data group has samples of its own for the whole run (every groups-th one): a memory keyed by sample would
    meet them as new ones in another pipeline.
    """
    groups, passes = spec.data_parallel.groups, spec.train.accumulate
    own, each = num_samples // groups, spec.train.batch_size // groups
    by_group = [
        [
            tuple(groups * i + group for i in ids)
            for ids in epoch_batches(own, each, seed=spec.seed + (group << 32), epoch=epoch)
        ]
        for group in range(groups)
    ]
    size = each // passes
    steps = [
        tuple(tuple(ids[p * size : (p + 1) * size] for ids in together) for p in range(passes))
        for together in zip(*by_group, strict=True)
    ]
    return steps[: spec.train.max_steps_per_epoch]


def _cut(steps: list[Step], spec: RunSpec) -> list[Step]:
    """The first `train.max_steps` steps; the last one kept ends its epoch, so that the state it leaves is evaluated."""
    limit = spec.train.max_steps
    if limit is None or limit >= len(steps):
        return steps
    kept = [*steps[: limit - 1], steps[limit - 1]._replace(ends_epoch=True)]
    if spec.measure == "timing" and not any(step.measured for step in kept):
        raise UserError(
            f"train.max_steps {limit} ends this timing run in its unmeasured pass of {spec.timing.batches} batches; "
            "raise it, or leave it out"
        )
    return kept
