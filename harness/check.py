"""Refuse, before anything starts, a run that cannot work; prepare what the ranks of a run share.

Called in the fork server (it has torch), so that what is loaded and compiled here is there in every rank it forks.
"""

from __future__ import annotations

import psutil

from thinpipe.harness import plugins, regimes, steps, worker
from thinpipe.harness.compression import grammar
from thinpipe.harness.compression.base import Memory
from thinpipe.harness.compression.kernels import cpu
from thinpipe.harness.errors import UserError
from thinpipe.harness.models import base as models
from thinpipe.harness.pipeline import partition
from thinpipe.harness.spec import RunSpec

# A run keeps this share of the free memory for everything that is not a cache.
RESERVE = 0.2


def check(spec: RunSpec, *, available_bytes: int | None = None) -> None:
    """Raise UserError if model, partition, data, steps or memory cannot be had as asked."""
    shape = models.resolve(spec.model, spec.task)
    partition.split(shape, spec.pipeline.stages)
    data = worker.prepare(spec)
    num_samples = len(data.dataset.train)
    steps.plan(spec, num_samples, data.task.epoch_batches)
    plugins.get("models", spec.model.name).load()
    piece = spec.train.batch_size // spec.pipeline.microbatches
    tensor_shape = (piece, spec.task.sequence_length, shape.width)
    if spec.measure == "timing":
        num_samples = min(num_samples, spec.timing.batches * spec.train.batch_size)
    _fits(spec, cache_bytes(spec, num_samples, tensor_shape), available_bytes)
    if spec.pipeline.stages > 1:
        cpu.warm_up()


def cache_bytes(spec: RunSpec, num_samples: int, shape: tuple[int, ...]) -> int:
    """Bytes of all memories of a run on this machine: both ends of every boundary, both directions."""
    total = 0
    for direction in regimes.DIRECTIONS:
        for boundary in range(spec.pipeline.stages - 1):
            for text in regimes.texts(spec, direction, boundary):
                compressor = grammar.build(text)
                if isinstance(compressor, Memory):
                    ends = 2 if compressor.state == "shared" else 1
                    total += ends * compressor.state_bytes(num_samples, shape)
    return total


def _fits(spec: RunSpec, needed: int, available: int | None) -> None:
    if needed == 0:
        return
    free = psutil.virtual_memory().available if available is None else available
    allowed = int(free * (1 - RESERVE))
    if needed > allowed:
        raise UserError(
            f"the delta caches of this run need {needed / 2**30:.2f} GiB, but only {allowed / 2**30:.2f} GiB of the "
            f"free {free / 2**30:.2f} GiB may be used; lower task.num_sequences ({spec.task.num_sequences}), the "
            "sequence length or the width, or choose a smaller cache, e.g. delta(..., cache=fixpoint:4)"
        )
