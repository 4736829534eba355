"""Optimisation: the optimizer, learning rate, the training step, evaluation.

A step on one rank, for each of its passes: post receives, run torch's schedule, wait for sends; then divide, sum what
is shared, clip (gradients.py) and update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from thinpipe.harness import data_parallel
from thinpipe.harness.channel import Channel
from thinpipe.harness.channel import Traffic as Frames
from thinpipe.harness.data_traffic import Traffic, ring
from thinpipe.harness.errors import DivergedError
from thinpipe.harness.gradients import Gradients
from thinpipe.harness.links import Links
from thinpipe.harness.pipeline import schedules
from thinpipe.harness.pipeline.stage import CompressedStage
from thinpipe.harness.quantized_adam import QuantizedAdam
from thinpipe.harness.rate_control import Meter, RateControl, Seen
from thinpipe.harness.recorder import Recorder, now
from thinpipe.harness.regimes import Regime
from thinpipe.harness.spec import RunSpec, TrainSpec
from thinpipe.harness.tasks.base import Batch

Named = Sequence[tuple[str, torch.nn.Parameter]]


def make_optimizer(named: Named, spec: RunSpec, group: dist.ProcessGroup | None = None) -> torch.optim.Optimizer:
    """The optimizer of these trainable parameters. group: the data group, for an optimizer that exchanges itself.

    AdamW's weight decay is on matrices only, as usual for transformers (biases and norms are vectors).
    """
    train = spec.train
    if train.optimizer == "sgd":
        return torch.optim.SGD(
            [p for _, p in named], lr=train.lr, momentum=train.momentum, weight_decay=train.weight_decay
        )
    quantized = spec.data_parallel.exchange == "quantized-adam"
    matrices = [(name, p) for name, p in named if p.ndim >= 2]
    vectors = [(name, p) for name, p in named if p.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": pairs if quantized else [p for _, p in pairs], "weight_decay": decay}
        for pairs, decay in ((matrices, train.weight_decay), (vectors, 0.0))
        if pairs
    ]
    betas = (train.beta1, train.beta2)
    if quantized:
        assert group is not None
        return QuantizedAdam(groups, group=group, bits=spec.data_parallel.bits, lr=train.lr, betas=betas, eps=train.eps)
    return torch.optim.AdamW(groups, lr=train.lr, betas=betas, eps=train.eps, fused=True)


def learning_rate(step: int, total: int, spec: TrainSpec, steps_per_epoch: int | None = None) -> float:
    """Linear from 0 over `warmup_steps`, then by `lr_schedule` to 0 at `total` (or at lr_epochs x steps_per_epoch).

    >>> [round(learning_rate(s, 10, TrainSpec(lr=1.0, warmup_steps=2)), 3) for s in (0, 1, 2, 6, 9)]
    [0.5, 1.0, 1.0, 0.5, 0.125]
    >>> quirk = TrainSpec(lr=1.0, warmup_steps=0, lr_schedule="cosine", lr_epochs=200, lr_update="epoch")
    >>> [round(learning_rate(390 * epoch + 5, 39_000, quirk, 390), 4) for epoch in (0, 50, 99)]
    [1.0, 0.8536, 0.5079]
    """
    horizon = total
    if steps_per_epoch is not None:
        horizon = total if spec.lr_epochs is None else spec.lr_epochs * steps_per_epoch
    warmup = min(spec.warmup_steps, total - 1)
    if step < warmup:
        return spec.lr * (step + 1) / warmup
    if spec.lr_update == "epoch" and steps_per_epoch is not None:
        step = max(warmup, step - step % steps_per_epoch)
    left, whole = max(0, horizon - step), max(1, horizon - warmup)
    if spec.lr_schedule == "constant":
        return spec.lr
    if spec.lr_schedule == "cosine":
        return spec.lr * 0.5 * (1 + math.cos(math.pi * (1 - left / whole)))
    return spec.lr * left / whole


class Trainer:
    """Runs the training steps and evaluations of one rank.

    loss(output, targets) is a micro-batch's mean; loss(output, targets, weights) the weighted sum over its samples.
    predict(output): what of the output an evaluation is scored by, None where it is not.
    """

    def __init__(
        self,
        spec: RunSpec,
        stages: Sequence[CompressedStage],
        gradients: Gradients,
        *,
        loss: Callable[..., torch.Tensor],
        recorder: Recorder,
        total_steps: int,
        steps_per_epoch: int,
        links: Links | None = None,
        predict: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ):
        self.spec, self.stages, self.gradients, self.recorder, self.links = spec, stages, gradients, recorder, links
        self.total_steps = total_steps
        self.steps_per_epoch = None if spec.measure == "timing" else steps_per_epoch
        named = [pair for stage in gradients.stages for pair in stage.named]
        self.optimizer = make_optimizer(named, spec, links.data if links else None)
        self.training_time_s = 0.0
        self.rate = self._rate_control()
        #: What the exchange between data groups was to send so far.
        self.data_traffic = Traffic()
        self.is_first = any(stage.is_first for stage in stages)
        self.is_last = any(stage.is_last for stage in stages)
        self._weights: Sequence[torch.Tensor] = ()
        self._scored: list[tuple[torch.Tensor, torch.Tensor]] = []
        last = stages[-1]

        def timed_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            start = now()
            value = loss(output, target)
            recorder.span("forward_compute", start, now(), last._offset + last._chunk, stage=last.stage_index)
            return value

        def weighted_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            weights = self._weights[last._chunk]
            if predict is not None:
                self._scored.append((predict(output)[weights > 0], target[weights > 0]))
            return loss(output, target, weights)

        pipe = spec.pipeline
        self.schedule = schedules.training(pipe.schedule, stages, pipe.microbatches, timed_loss)
        self.evaluation = schedules.evaluation(pipe.schedule, stages, pipe.microbatches, weighted_loss)

    # --- training ------------------------------------------------------------------------------------------------

    def step(self, step: int, epoch: int, batches: Sequence[Batch], *, measured: bool, regime: Regime) -> float | None:
        """One optimizer step on this rank, over `batches` (one a pass); the mean loss on the last stage, else None."""
        self.recorder.step = step
        start = now()
        losses: list[torch.Tensor] = []
        sent: dict[Channel, Frames] = {}
        # Before the step: PowerSGD counts its own.
        self.data_traffic += sum((data_parallel.traffic(stage.submod) for stage in self.stages), Traffic())
        for turn, batch in enumerate(batches):
            losses += self._pass(step, turn, batch, regime=regime, sent=sent, last=turn == len(batches) - 1)
        # A timing run has its last compressors in force throughout; its unmeasured pass stands for the warm-up.
        timing = self.spec.measure == "timing"
        self._average(warming_up=not measured if timing else epoch < self.spec.compression.warmup_epochs)
        norm = self.gradients.finish(len(batches) * self.spec.pipeline.microbatches)
        lr = learning_rate(step, self.total_steps, self.spec.train, self.steps_per_epoch)
        self._update(lr)
        if self.rate is not None:
            started = now()
            self.rate.after_step()
            self.recorder.span("sync", started, now())
        elapsed = now() - start
        self.training_time_s += elapsed
        loss = self._mean_loss(losses, step, epoch) if self.is_last else None
        self.recorder.row(
            "steps", rank=self.recorder.rank, step=step, epoch=epoch, measured=measured, t_s=self.training_time_s,
            step_time_s=elapsed, train_loss=loss, lr=lr, grad_norm=norm, **self.recorder.take_sums(),
        )  # fmt: skip
        for channel, traffic in sent.items():
            self.recorder.row(
                "transfers", rank=self.recorder.rank, step=step, epoch=epoch, boundary=channel.boundary,
                direction=channel.direction, compressor=traffic.compressor, messages=traffic.messages,
                raw_bytes=traffic.raw_bytes, payload_bytes=traffic.payload_bytes, frame_bytes=traffic.frame_bytes,
                **{k: traffic.samples.get(k) for k in ("rel_error", "mean_abs", "mean_abs_change", "clip_fraction")},
            )  # fmt: skip
        return loss

    def _pass(
        self, step: int, turn: int, batch: Batch, *, regime: Regime, sent: dict[Channel, Frames], last: bool
    ) -> list[torch.Tensor]:
        """All micro-batches of one batch forward and backward; gradients add up. Returns their losses; what was sent
        is added to `sent`."""
        accumulate, pieces = self.spec.train.accumulate, self.spec.pipeline.microbatches
        for stage in self.stages:
            stage.synchronise = last
            stage.begin_step(
                step * accumulate + turn, self._pieces(batch.ids), training=True, use=regime.use, watch=regime.watch,
                side=self._side(batch), offset=turn * pieces,
            )  # fmt: skip
        losses: list[torch.Tensor] = []
        self._run(self.schedule.step, batch, losses)
        for stage in self.stages:
            for channel, traffic in stage.finish_step(training=True):
                if channel in sent:
                    sent[channel].add(traffic)
                else:
                    sent[channel] = traffic
        return losses

    def _rate_control(self) -> RateControl | None:
        """Meters at this rank's sending ends, where a budget is to be kept."""
        if self.spec.compression.budget_bits is None:
            return None
        meters = []
        for stage in self.stages:
            for (direction, side), channel in stage.channels.items():
                if side == "out":
                    channel.meter = Meter(f"{direction}/{channel.boundary}")
                    meters.append(channel.meter)
            if self.spec.compression.budget_by == "sensitivity" and ("forward", "out") in stage.channels:
                stage.channels["backward", "in"].informs = stage.channels["forward", "out"].meter

        def gather(mine: Seen) -> list[Seen]:
            if self.links is None or self.links.ranks == 1:
                return [mine]
            everyone: list[Any] = [None] * self.links.ranks
            dist.all_gather_object(everyone, mine, group=self.links.pipe)
            return everyone

        return RateControl(self.spec.compression, meters, gather)

    def _mean_loss(self, losses: Sequence[torch.Tensor], step: int, epoch: int) -> float | None:
        """The loss of the whole batch, on the last stage of the first data group."""
        mean = torch.tensor(float(sum(value.detach() for value in losses)) / len(losses), dtype=torch.float64)
        first = True
        if self.links is not None and self.links.data is not None:
            place, size = dist.get_rank(self.links.data), dist.get_world_size(self.links.data)
            dist.all_reduce(mean, group=self.links.data)
            self.data_traffic += ring(1, mean.itemsize, place, size)
            mean /= self.spec.data_parallel.groups
            first = place == 0
        loss = float(mean)
        if not math.isfinite(loss):
            raise DivergedError(f"the training loss became {loss} at step {step} (epoch {epoch})")
        return loss if first else None

    def _run(self, step: Callable[..., Any], batch: Batch, losses: list[torch.Tensor]) -> None:
        args = (batch.inputs,) if self.is_first else ()
        kwargs: dict[str, Any] = {"target": batch.targets, "losses": losses} if self.is_last else {}
        step(*args, return_outputs=False, **kwargs)

    def _pieces(self, ids: tuple[int, ...]) -> list[tuple[int, ...]]:
        size = len(ids) // self.spec.pipeline.microbatches
        return [ids[i : i + size] for i in range(0, len(ids), size)]

    def _side(self, batch: Batch) -> list[dict[str, torch.Tensor]]:
        pieces = self.spec.pipeline.microbatches
        cut = {name: value.chunk(pieces) for name, value in batch.side.items()}
        return [{name: parts[i] for name, parts in cut.items()} for i in range(pieces)]

    def _average(self, *, warming_up: bool) -> None:
        """Finish the average between data groups, which DDP has begun in the last backward pass; where the optimizer
        exchanges momenta for itself, average gradients in its warm-up epochs."""
        if self.links is None or self.links.data is None:
            return
        start = now()
        if isinstance(self.optimizer, QuantizedAdam):
            self.optimizer.set_warmup(warming_up)
            self.optimizer.average_gradients()
            self.data_traffic += self.optimizer.traffic()
        for stage in self.stages:
            data_parallel.finish(stage.submod)
        self.recorder.span("sync", start, now())

    def _update(self, lr: float) -> None:
        start = now()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.recorder.span("optimizer", start, now())

    # --- evaluation ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(
        self, step: int, batches: Iterable[Batch], regime: Regime
    ) -> tuple[float, list[tuple[torch.Tensor, torch.Tensor]]] | None:
        """Mean loss of the held-out set and its (predictions, targets), on the last stage, else None.

        Gradients, memories and running statistics are untouched; rows of weight 0 are padding and do not count.
        """
        total = weights = 0.0
        self._scored = []
        keep, self.recorder.keep_spans = self.recorder.keep_spans, False
        for stage in self.stages:
            stage.submod.eval()
        for batch in batches:
            losses: list[torch.Tensor] = []
            self._weights = batch.weights.chunk(self.spec.pipeline.microbatches)
            for stage in self.stages:
                stage.begin_step(
                    step, self._pieces(batch.ids), training=False, use=regime.use, watch={}, side=self._side(batch)
                )
            self._run(self.evaluation.eval, batch, losses)
            for stage in self.stages:
                stage.finish_step(training=False)
            total += sum(float(loss) for loss in losses)
            weights += float(batch.weights.sum())
        for stage in self.stages:
            stage.submod.train()
        self.recorder.keep_spans = keep
        self.recorder.take_sums()
        return (total / weights, self._scored) if self.is_last and weights else None

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def modules_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Parameters and buffers, by stage."""
        return {str(s.stage_index): data_parallel.unwrap(s.submod).state_dict() for s in self.stages}

    def load_modules_state(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        for stage in self.stages:
            data_parallel.unwrap(stage.submod).load_state_dict(state[str(stage.stage_index)])

    def state_dict(self) -> dict[str, Any]:
        """What training goes on from beside the modules and the memories in the channels."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "hooks": {str(s.stage_index): data_parallel.hook_state(s.submod) for s in self.stages},
            "training_time_s": self.training_time_s,
            "rate": self.rate.state_dict() if self.rate else {},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        for stage in self.stages:
            data_parallel.load_hook_state(stage.submod, state["hooks"][str(stage.stage_index)])
        self.optimizer.load_state_dict(state["optimizer"])
        self.training_time_s = state["training_time_s"]
        if self.rate is not None:
            ends = [c for stage in self.stages for c in stage.channels.values() if c.meter is not None]
            held = {f"{c.direction}/{c.boundary}": list(c.compressors.values()) for c in ends}
            self.rate.load_state_dict(state["rate"], held)
