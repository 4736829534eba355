"""A run's numbers without its network: all stages in one process, every boundary crossed by the real compressors.

Training numbers do not depend on the network, so losses, scores and payload bytes are those of the run itself, bit for
bit (tests/e2e/test_emulate.py holds the two against each other), at the cost of one process. Nothing is timed. For
searches over many settings; what a table shows comes from runs.

    forward    stage 0 ─encode▸decode─▸ stage 1 ─▸ ...        a micro-batch at a time, in order
    backward   the other way, each micro-batch as soon as it has its loss: gradients add up in the same order
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from thinpipe.harness import frame, plugins, regimes, steps, train, worker
from thinpipe.harness.compression import grammar
from thinpipe.harness.compression.base import Compressor, Context, Direction, Memory
from thinpipe.harness.errors import DivergedError, UserError
from thinpipe.harness.gradients import Gradients, StageGradients
from thinpipe.harness.models import _dropout
from thinpipe.harness.models import base as models
from thinpipe.harness.pipeline import partition
from thinpipe.harness.rate_control import Meter, RateControl
from thinpipe.harness.recorder import Recorder
from thinpipe.harness.regimes import Regime
from thinpipe.harness.spec import RunSpec
from thinpipe.harness.tasks import base as tasks
from thinpipe.harness.tasks.base import Batch

Place = tuple[Direction, int]
#: Called with each tensor that crosses, before it does, and its context.
Watch = Callable[[torch.Tensor, Context], None]


@dataclass
class Result:
    """losses: of each step; evals: (epochs, loss, scores); frame_bytes: what training sent, headers included, by
    (direction, boundary); elements: what it sent these bytes for."""

    losses: list[float] = field(default_factory=list)
    evals: list[tuple[int, float, dict[str, float]]] = field(default_factory=list)
    frame_bytes: dict[Place, int] = field(default_factory=lambda: defaultdict(int))
    elements: dict[Place, int] = field(default_factory=lambda: defaultdict(int))

    def total_bytes(self) -> int:
        """Both directions, all boundaries."""
        return sum(self.frame_bytes.values())

    def bits(self, direction: Direction) -> float:
        """Bits an element of one direction, headers, first visits and warm-up included."""
        sent = sum(count for (d, _), count in self.frame_bytes.items() if d == direction)
        return 8 * sent / max(1, sum(count for (d, _), count in self.elements.items() if d == direction))


def run(spec: RunSpec, *, watch: Watch | None = None, max_steps: int | None = None) -> Result:
    """Train as the run would and return its numbers. watch: sees what crosses in training; max_steps: end early,
    without changing the schedule. Raises UserError for what one process does not stand for, DivergedError where
    training becomes non-finite."""
    pipeline = _Pipeline(spec, watch)
    pipeline.train(max_steps)
    return pipeline.result


class _Boundary:
    """Both directions of one boundary: one end stands for both, since shared memories are equal at both."""

    def __init__(self, spec: RunSpec, index: int, shape: tuple[int, ...], num_samples: int) -> None:
        self.index, self.shape, self.seed = index, shape, spec.seed
        directions: tuple[Direction, ...] = regimes.DIRECTIONS
        self.compressors: dict[Direction, dict[str, Compressor]] = {
            direction: {
                text: grammar.build(text, num_samples) for text in sorted(regimes.texts(spec, direction, index))
            }
            for direction in directions
        }
        self.meters = {direction: Meter(f"{direction}/{index}") for direction in directions}
        size = max(c.max_bytes(shape) for by_text in self.compressors.values() for c in by_text.values())
        self.buffer = torch.zeros(size, dtype=torch.uint8)

    def cross(self, x: torch.Tensor, regime: Regime, ctx: Context) -> tuple[torch.Tensor, int]:
        """What the other end holds, and the payload's length."""
        by_text, key = self.compressors[ctx.direction], (ctx.direction, self.index)
        active = by_text[regime.use[key]]
        if not active.uses_peer:
            ctx = replace(ctx, peer=None)
        decoded = torch.empty(self.shape)
        length = active.encode_decoded(x, ctx, self.buffer, decoded)
        if ctx.training:
            self.meters[ctx.direction].sent(active, x.numel(), length)
            if ctx.direction == "backward":
                self.meters["forward"].matters(float(decoded.square().mean()))
        for text in regime.watch.get(key, ()):
            if ctx.training and isinstance(memory := by_text[text], Memory):
                memory.observe(decoded, ctx)
        return decoded, length


class _Pipeline:
    def __init__(self, spec: RunSpec, watch: Watch | None) -> None:
        if spec.data_parallel.groups > 1 or spec.train.autocast != "none" or spec.measure == "timing":
            raise UserError("one process stands for one pipeline in float32 that is not timed")
        torch.set_num_threads(1)
        self.spec, self.watch, self.result = spec, watch, Result()
        self.data = worker.prepare(spec)
        self.plan = steps.plan(spec, len(self.data.dataset.train), self.data.task.epoch_batches)
        shape = models.resolve(spec.model, spec.task)
        parts = partition.split(shape, spec.pipeline.stages, spec.pipeline.cuts)
        self.model = plugins.get("models", spec.model.name).load()
        self.stages = [self.model.build(spec.model, shape, part, seed=spec.seed).train() for part in parts]
        own = [
            StageGradients(
                i, [(n, p) for n, p in stage.named_parameters() if p.requires_grad], getattr(stage, "shared", {})
            )
            for i, stage in enumerate(self.stages)
        ]
        self.gradients = Gradients(own, spec.train, None, Recorder("0" * 12, 0))
        self.optimizer = train.make_optimizer([pair for stage in own for pair in stage.named], spec)
        rows = len({i for step in self.plan for groups in step.batches for i in groups[0]})
        num_samples = tasks.num_identities(spec.task, rows)
        self.boundaries = [
            _Boundary(spec, i, (spec.microbatch_size, *shape.boundaries[part.blocks[-1]]), num_samples)
            for i, part in enumerate(parts[:-1])
        ]
        meters = [meter for boundary in self.boundaries for meter in boundary.meters.values()]
        budget = spec.compression.budget_bits is not None
        self.rate = RateControl(spec.compression, meters, lambda mine: [mine]) if budget else None

    def train(self, max_steps: int | None) -> None:
        per_epoch = sum(step.epoch == 0 for step in self.plan)
        for number, step in enumerate(self.plan[:max_steps]):
            regime = regimes.regime(self.spec, step.epoch)
            batches = [
                self.data.task.batch(self.data.dataset.train, groups[0], epoch=step.epoch) for groups in step.batches
            ]
            losses = [loss for turn, batch in enumerate(batches) for loss in self._pass(number, turn, batch, regime)]
            mean = float(sum(losses)) / len(losses)
            if not math.isfinite(mean):
                raise DivergedError(f"the training loss became {mean} at step {number} (epoch {step.epoch})")
            self.result.losses.append(mean)
            self.gradients.recorder.step = number
            self.gradients.finish(len(losses))
            for group in self.optimizer.param_groups:
                group["lr"] = train.learning_rate(number, len(self.plan), self.spec.train, per_epoch)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.gradients.recorder.rows["spans"].clear()
            if self.rate is not None:
                self.rate.after_step()
            if step.ends_epoch:
                self._evaluate(number, step.epoch)

    def _pass(self, number: int, turn: int, batch: Batch, regime: Regime) -> list[torch.Tensor]:
        step, losses = number * self.spec.train.accumulate + turn, []
        for i, ids, inputs, targets, side in self._pieces(batch):
            _dropout.visit(ids, step)
            crossing: list[tuple[torch.Tensor, torch.Tensor]] = []
            x = inputs
            for boundary, stage in zip([*self.boundaries, None], self.stages, strict=True):
                output = stage(x, **side)
                if boundary is not None:
                    x = self._cross(boundary, output.detach(), regime, (step, i, ids, "forward"), None)
                    crossing.append((output, x.requires_grad_()))
            loss = self.model.loss(output, targets)
            losses.append(loss.detach())
            loss.backward()
            for boundary, (output, decoded) in zip(reversed(self.boundaries), reversed(crossing), strict=True):
                assert decoded.grad is not None
                gradient = self._cross(boundary, decoded.grad, regime, (step, i, ids, "backward"), decoded.detach())
                output.backward(gradient)
        return losses

    def _cross(
        self,
        boundary: _Boundary,
        x: torch.Tensor,
        regime: Regime,
        at: tuple[int, int, tuple[int, ...], Direction],
        peer: torch.Tensor | None,
    ) -> torch.Tensor:
        step, microbatch, ids, direction = at
        ctx = Context(
            boundary.shape, step=step, microbatch=microbatch, boundary=boundary.index, direction=direction,
            sample_ids=ids, seed=self.spec.seed, peer=peer,
        )  # fmt: skip
        if self.watch is not None:
            self.watch(x, ctx)
        decoded, length = boundary.cross(x, regime, ctx)
        self.result.frame_bytes[direction, boundary.index] += frame.HEADER_BYTES + length
        self.result.elements[direction, boundary.index] += x.numel()
        return decoded

    def _pieces(self, batch: Batch):
        """(number, ids, inputs, targets, side) of each micro-batch."""
        count = self.spec.pipeline.microbatches
        size = len(batch.ids) // count
        for i in range(count):
            cut = slice(i * size, (i + 1) * size)
            side = {name: value[cut] for name, value in batch.side.items()}
            yield i, batch.ids[cut], batch.inputs[cut], batch.targets[cut], side

    @torch.no_grad()
    def _evaluate(self, number: int, epoch: int) -> None:
        every, held_out, task = self.spec.train.evaluate_every, self.data.dataset.held_out, self.data.task
        if not every or not len(held_out) or ((epoch + 1) % every and epoch != self.plan[-1].epoch):
            return
        regime = regimes.evaluation_regime(self.spec, epoch)
        for stage in self.stages:
            stage.eval()
        total = weights = 0.0
        scored: list[Sequence[torch.Tensor]] = []
        predict = getattr(task, "predict", None)
        size = self.spec.microbatch_size * self.spec.pipeline.microbatches
        for ids, weight in task.evaluation_batches(len(held_out), size):
            batch = task.batch(held_out, ids, weight)
            pieces = batch.weights.chunk(self.spec.pipeline.microbatches)
            for (i, part, x, targets, side), w in zip(self._pieces(batch), pieces, strict=True):
                for boundary, stage in zip([*self.boundaries, None], self.stages, strict=True):
                    x = stage(x, **side)
                    if boundary is not None:
                        ctx = Context(
                            boundary.shape, step=number, microbatch=i, boundary=boundary.index, sample_ids=part,
                            training=False, seed=self.spec.seed,
                        )  # fmt: skip
                        x, _ = boundary.cross(x, regime, ctx)
                total += float(self.model.loss(x, targets, w))
                if predict is not None:
                    scored.append((predict(x)[w > 0], targets[w > 0]))
            weights += float(batch.weights.sum())
        for stage in self.stages:
            stage.train()
        scores = task.score(*(torch.cat(part) for part in zip(*scored, strict=True))) if scored else {}
        self.result.evals.append((epoch + 1, total / weights, scores))
