"""Optimisation: AdamW, learning rate, clipping by the global norm, the training step, evaluation.

A step on one rank: post receives, run torch's schedule, wait for sends, exchange gradient norms, clip, update.
The mean loss of each micro-batch is taken, gradients are summed over micro-batches and divided by their number.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import ScheduleGPipe

from thinpipe.harness.errors import DivergedError
from thinpipe.harness.pipeline.stage import CompressedStage
from thinpipe.harness.recorder import Recorder, now
from thinpipe.harness.regimes import Regime
from thinpipe.harness.spec import RunSpec, TrainSpec
from thinpipe.harness.tasks.base import Batch


def make_optimizer(named: Sequence[tuple[str, torch.nn.Parameter]], spec: TrainSpec) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only, as usual for transformers (biases and norms are vectors)."""
    matrices = [p for _, p in named if p.ndim >= 2]
    vectors = [p for _, p in named if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": spec.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=spec.eps, fused=True
    )


def learning_rate(step: int, total: int, spec: TrainSpec) -> float:
    """Linear from 0 over `warmup_steps`, then linear to 0 at `total`.

    >>> [round(learning_rate(s, 10, TrainSpec(lr=1.0, warmup_steps=2)), 3) for s in (0, 1, 2, 6, 9)]
    [0.5, 1.0, 1.0, 0.5, 0.125]
    """
    warmup = min(spec.warmup_steps, total - 1)
    if step < warmup:
        return spec.lr * (step + 1) / warmup
    return spec.lr * (total - step) / max(1, total - warmup)


def clip_coefficient(norms: torch.Tensor, clip: float) -> tuple[float, torch.Tensor]:
    """(global norm, factor <= 1) from per-parameter norms in model order; as torch.nn.utils.clip_grad_norm_."""
    total = torch.linalg.vector_norm(norms)
    return float(total), torch.clamp(clip / (total + 1e-6), max=1.0)


class NormExchange:
    """Gathers per-parameter gradient norms of all stages in model order: clipping is then bit-equal to one process."""

    def __init__(self, num_parameters: int, group: dist.ProcessGroup | None, world_size: int):
        self.group, self.world_size = group, world_size
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
        if world_size > 1:
            dist.all_gather(counts, torch.tensor([num_parameters]), group=group)
        else:
            counts[0][0] = num_parameters
        self.counts = [int(c) for c in counts]
        self._mine = torch.zeros(max(self.counts))
        self._all = [torch.zeros(max(self.counts)) for _ in range(world_size)]

    def gather(self, norms: torch.Tensor) -> torch.Tensor:
        if self.world_size == 1:
            return norms
        self._mine[: len(norms)] = norms
        dist.all_gather(self._all, self._mine, group=self.group)
        return torch.cat([part[:count] for part, count in zip(self._all, self.counts, strict=True)])


class Trainer:
    """Runs the training steps and evaluations of one rank.

    loss(output, targets) is a micro-batch's mean; loss(output, targets, weights) the weighted sum over its samples.
    """

    def __init__(
        self,
        spec: RunSpec,
        stage: CompressedStage,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        *,
        loss: Callable[..., torch.Tensor],
        recorder: Recorder,
        norms: NormExchange,
        total_steps: int,
    ):
        self.spec, self.stage, self.named, self.recorder, self.norms = spec, stage, named, recorder, norms
        self.total_steps = total_steps
        self.optimizer = make_optimizer(named, spec.train)
        self.training_time_s = 0.0
        self._weights: Sequence[torch.Tensor] = ()

        def timed_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            start = now()
            value = loss(output, target)
            recorder.span("forward_compute", start, now(), stage._chunk)
            return value

        def weighted_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return loss(output, target, self._weights[stage._chunk])

        pieces = spec.pipeline.microbatches
        self.schedule = ScheduleGPipe(stage, pieces, loss_fn=timed_loss)
        self.evaluation = ScheduleGPipe(stage, pieces, loss_fn=weighted_loss, scale_grads=False)

    def step(self, step: int, epoch: int, batch: Batch, *, measured: bool, regime: Regime) -> float | None:
        """One optimizer step on this rank; the batch's loss on the last stage, else None."""
        self.recorder.step = step
        start = now()
        losses = self._forward_backward(step, batch, regime)
        sent = self.stage.finish_step(training=True)
        norm = self._clip()
        lr = learning_rate(step, self.total_steps, self.spec.train)
        self._update(lr)
        elapsed = now() - start
        self.training_time_s += elapsed
        loss = None
        if self.stage.is_last:
            loss = float(sum(value.detach() for value in losses)) / len(losses)
            if not math.isfinite(loss):
                raise DivergedError(f"the training loss became {loss} at step {step} (epoch {epoch})")
        self.recorder.row(
            "steps", rank=self.recorder.rank, step=step, epoch=epoch, measured=measured, t_s=self.training_time_s,
            step_time_s=elapsed, train_loss=loss, lr=lr, grad_norm=norm, **self.recorder.take_sums(),
        )  # fmt: skip
        for channel, traffic in sent:
            self.recorder.row(
                "transfers", rank=self.recorder.rank, step=step, epoch=epoch, boundary=channel.boundary,
                direction=channel.direction, compressor=traffic.compressor, messages=traffic.messages,
                raw_bytes=traffic.raw_bytes, payload_bytes=traffic.payload_bytes, frame_bytes=traffic.frame_bytes,
                **{k: traffic.samples.get(k) for k in ("rel_error", "mean_abs", "mean_abs_change", "clip_fraction")},
            )  # fmt: skip
        return loss

    def _forward_backward(self, step: int, batch: Batch, regime: Regime) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        self.stage.begin_step(step, self._pieces(batch.ids), training=True, use=regime.use, watch=regime.watch)
        self._run(self.schedule.step, batch, losses)
        return losses

    def _run(self, step: Callable[..., Any], batch: Batch, losses: list[torch.Tensor]) -> None:
        args = (batch.inputs,) if self.stage.is_first else ()
        kwargs: dict[str, Any] = {"target": batch.targets, "losses": losses} if self.stage.is_last else {}
        step(*args, return_outputs=False, **kwargs)

    def _pieces(self, ids: tuple[int, ...]) -> list[tuple[int, ...]]:
        size = len(ids) // self.spec.pipeline.microbatches
        return [ids[i : i + size] for i in range(0, len(ids), size)]

    def _clip(self) -> float | None:
        clip = self.spec.train.clip_norm
        if clip is None:
            return None
        start = now()
        gradients = [p.grad for _, p in self.named if p.grad is not None]
        assert len(gradients) == len(self.named), "every parameter of a stage gets a gradient"
        mine = torch.stack([torch.linalg.vector_norm(g) for g in gradients])
        exchange = now()
        norms = self.norms.gather(mine)
        end = now()
        norm, factor = clip_coefficient(norms, clip)
        if not math.isfinite(norm):
            raise DivergedError(f"the gradient norm became {norm} at step {self.recorder.step}")
        for gradient in gradients:
            gradient.mul_(factor)
        self.recorder.span("optimizer", start, exchange)
        self.recorder.span("sync", exchange, end)
        self.recorder.span("optimizer", end, now())
        return norm

    def _update(self, lr: float) -> None:
        start = now()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.recorder.span("optimizer", start, now())

    @torch.no_grad()
    def evaluate(self, step: int, batches: Iterable[Batch], regime: Regime) -> float | None:
        """Mean loss of the held-out set on the last stage, else None. Gradients are untouched; rows of weight 0 are
        padding and do not count."""
        total = weights = 0.0
        keep, self.recorder.keep_spans = self.recorder.keep_spans, False
        for batch in batches:
            losses: list[torch.Tensor] = []
            self._weights = batch.weights.chunk(self.spec.pipeline.microbatches)
            self.stage.begin_step(step, self._pieces(batch.ids), training=False, use=regime.use, watch={})
            self._run(self.evaluation.eval, batch, losses)
            self.stage.finish_step(training=False)
            total += sum(float(loss) for loss in losses)
            weights += float(batch.weights.sum())
        self.recorder.keep_spans = keep
        self.recorder.take_sums()
        return total / weights if self.stage.is_last and weights else None


def cache_folder() -> Path:
    """Where tokenizers are kept: $THINPIPE_CACHE, else $XDG_CACHE_HOME/thinpipe, else ~/.cache/thinpipe."""
    named = os.environ.get("THINPIPE_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "thinpipe"
