"""Measures how long each block of a model takes on this machine: profiles (profile.py).

    each repeat is a step of GPipe without a network, all blocks in one process, on one thread:
    all micro-batches forward ▸ all backward ▸ gradients divided and clipped, optimizer, block by block

So a block meets what it meets in a run: activations of all micro-batches kept, gradients that add up, caches that other
blocks have used meanwhile. Times are of the thread's processor clock, which on a machine that does nothing else is the
wall clock, and on a busy one does not count what others took; medians over micro-batches and repeats.
"""

from __future__ import annotations

import datetime
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from thinpipe.harness import manifest, memory, plugins, steps, train, worker
from thinpipe.harness.errors import UserError
from thinpipe.harness.experiment import Experiment
from thinpipe.harness.gradients import Gradients, StageGradients
from thinpipe.harness.models import _dropout
from thinpipe.harness.models import base as models
from thinpipe.harness.pipeline import partition
from thinpipe.harness.profile import TIMES, Profile, model_text
from thinpipe.harness.recorder import Recorder
from thinpipe.harness.rho import profile_key
from thinpipe.harness.spec import RunSpec

#: Measured steps, after one that warms up.
REPEATS = 5

clock = time.thread_time


def profile_run(spec: RunSpec, *, repeats: int = REPEATS) -> Profile:
    """A profile of a run's model, measured here, now. Raises UserError where the model cannot be had, or held."""
    memory.fits(_alone(spec))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        blocks = _Blocks(spec)
        blocks.step(0)
        found = [blocks.step(1 + turn) for turn in range(repeats)]
    finally:
        torch.set_num_threads(before)
    times = {name: [_median(one[name][i] for one in found) for i in range(blocks.count)] for name in TIMES}
    pieces, model, machine = spec.pipeline.microbatches, model_text(spec.model), manifest.machine()
    return Profile(
        name=f"{model}-{profile_key(spec)}",
        source=f"measured by thinpipe: one thread, median of {repeats} steps of {pieces} micro-batches",
        measured=True,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        machine=f"{machine['cpu']}, {machine['cores']} cores",
        model=model,
        sequence_length=spec.task.sequence_length,
        microbatch_size=spec.microbatch_size,
        recompute=spec.train.recompute,
        **{name: tuple(values) for name, values in times.items()},
    )


def of_experiment(experiment: Experiment) -> RunSpec:
    """The run whose model an experiment's profile is of. Raises UserError where its runs differ in what matters."""
    found = {profile_key(spec): spec for cell in experiment.cells() for _, spec in cell.runs}
    if len(found) > 1:
        shown = ", ".join(sorted({_described(spec) for spec in found.values()}))
        raise UserError(
            f"{experiment.name} has runs of {len(found)} models or sizes of micro-batches ({shown}), and a profile is "
            "of one: choose with --set."
        )
    (spec,) = found.values()
    return spec


def render(profile: Profile) -> str:
    """A profile for people."""
    milliseconds = {name: [1e3 * seconds for seconds in getattr(profile, name)] for name in TIMES}
    head = (
        f"{profile.model}, {profile.microbatch_size} samples of {profile.sequence_length} tokens a micro-batch"
        f"{', recomputed' if profile.recompute else ''}: {profile.source}"
    )
    rows = ["block  forward  backward  optimizer   (ms)"]
    rows += [
        f"{i:5d}  {forward:7.2f}  {backward:8.2f}  {optimizer:9.2f}"
        for i, (forward, backward, optimizer) in enumerate(zip(*milliseconds.values(), strict=True))
    ]
    total = [sum(values) for values in milliseconds.values()]
    return "\n".join([head, *rows, f"  all  {total[0]:7.2f}  {total[1]:8.2f}  {total[2]:9.2f}"])


def _described(spec: RunSpec) -> str:
    again = ", recomputed" if spec.train.recompute else ""
    return f"{model_text(spec.model)} x {spec.microbatch_size} samples{again}"


def _alone(spec: RunSpec) -> RunSpec:
    """The run as one rank that holds all blocks."""
    pipeline = {"stages": 1, "microbatches": spec.pipeline.microbatches}
    settings = {**spec.canonical(), "pipeline": pipeline, "compute": "real", "profile": None, "compression": {}}
    batch = spec.microbatch_size * spec.pipeline.microbatches
    train = {**settings.get("train", {}), "batch_size": batch, "accumulate": 1}
    return RunSpec.model_validate({**settings, "train": train, "network": {}, "data_parallel": {}})


class _Blocks:
    """Every block of a model as a stage of its own, and a step over them."""

    def __init__(self, spec: RunSpec):
        self.spec = spec = _alone(spec)
        shape = models.resolve(spec.model, spec.task)
        self.count = shape.layers
        self.model = plugins.get("models", spec.model.name).load()
        parts = partition.split(shape, shape.layers)
        build = self.model.build
        again = spec.train.recompute
        self.modules = [build(spec.model, shape, part, seed=spec.seed, recompute=again).train() for part in parts]
        self.updates = [_Update(spec, i, module) for i, module in enumerate(self.modules)]
        data = worker.prepare(spec)
        plan = steps.plan(spec, len(data.dataset.train), data.task.epoch_batches)
        self.batches = [data.task.batch(data.dataset.train, step.ids) for step in plan[: spec.timing.batches]]

    def step(self, number: int) -> dict[str, list[float]]:
        """One step: seconds of each block, medians over its micro-batches."""
        forward: list[list[float]] = [[] for _ in self.modules]
        backward: list[list[float]] = [[] for _ in self.modules]
        kept = [
            self._forward(piece, number, forward) for piece in self._pieces(self.batches[number % len(self.batches)])
        ]
        for ids, crossing in kept:
            _dropout.visit(ids, number)
            gradient = None
            for i, (x, output) in reversed(list(enumerate(crossing))):
                backward[i].append(_seconds(functools.partial(torch.autograd.backward, output, gradient)))
                gradient = x.grad
        return {
            "forward_s": [_median(one) for one in forward],
            "backward_s": [_median(one) for one in backward],
            "optimizer_s": [_seconds(update.step) for update in self.updates],
        }

    def _forward(self, piece: Any, number: int, times: list[list[float]]) -> tuple[tuple[int, ...], list[Any]]:
        """(ids, [(input, output)] of each block); the last output is the loss."""
        ids, x, targets, side = piece
        _dropout.visit(ids, number)
        autocast = self.spec.train.autocast == "bf16"
        crossing = []
        for i, module in enumerate(self.modules):
            last = i == self.count - 1
            start = clock()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                output = module(x, **side)
            output = output.float()
            if last:
                output = self.model.loss(output, targets)
            times[i].append(clock() - start)
            crossing.append((x, output))
            if not last:
                x = output.detach().requires_grad_()
        return ids, crossing

    def _pieces(self, batch: Any) -> list[Any]:
        """(ids, inputs, targets, side) of each micro-batch."""
        size = self.spec.microbatch_size
        cuts = [slice(at, at + size) for at in range(0, len(batch.ids), size)]
        return [
            (batch.ids[cut], batch.inputs[cut], batch.targets[cut], {k: v[cut] for k, v in batch.side.items()})
            for cut in cuts
        ]


class _Update:
    """What comes between a block's backward passes and its next step."""

    def __init__(self, spec: RunSpec, index: int, module: torch.nn.Module):
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        stage = StageGradients(index, named, getattr(module, "shared", {}))
        self.gradients = Gradients([stage], spec.train, None, Recorder("0" * 12, 0))
        self.optimizer = train.make_optimizer(named, spec)
        self.pieces = spec.pipeline.microbatches

    def step(self) -> None:
        self.gradients.finish(self.pieces)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def _seconds(work: Callable[[], Any]) -> float:
    start = clock()
    work()
    return clock() - start


def _median(values: Any) -> float:
    return statistics.median(values)
