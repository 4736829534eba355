"""Refuse, before anything starts, a run that cannot work; prepare what the ranks of a run share.

Called in the fork server (it has torch), so that what is loaded and compiled here is there in every rank it forks.
"""

from __future__ import annotations

from thinpipe.harness import memory, plugins, regimes, replay, steps, worker
from thinpipe.harness.compression.warm_up import warm_up
from thinpipe.harness.errors import UserError
from thinpipe.harness.models import _weights
from thinpipe.harness.models import base as models
from thinpipe.harness.pipeline import partition
from thinpipe.harness.spec import RunSpec


def check(spec: RunSpec, *, available_bytes: int | None = None) -> None:
    """Raise UserError if model, partition, data, steps or memory cannot be had as asked."""
    shape = models.resolve(spec.model, spec.task)
    partition.split(shape, spec.pipeline.stages, spec.pipeline.cuts)
    if spec.compute == "replay":
        replay.prepare(spec)
    elif spec.model.checkpoint is not None:
        _weights.verify(models.checkpoint_folder(spec.model.checkpoint))
    data = worker.prepare(spec)
    num_samples = len(data.dataset.train)
    if spec.compute == "real" and spec.task.tokenizer is not None and data.dataset.vocab_size > shape.vocab_size:
        raise UserError(
            f"the tokenizer has {data.dataset.vocab_size} tokens, the model only {shape.vocab_size} embeddings; set "
            f"task.vocab_size to {data.dataset.vocab_size} or take the tokenizer of the checkpoint"
        )
    steps.plan(spec, num_samples, data.task.epoch_batches)
    if spec.compute == "real":
        plugins.get("models", spec.model.name).load()
    if spec.measure == "timing":
        num_samples = min(num_samples, spec.timing.batches * spec.train.batch_size)
    memory.fits(spec, num_samples, available_bytes)
    if spec.world_size > 1:
        warm_up(regimes.every_text(spec))
