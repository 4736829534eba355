"""What each rank executes: build its stage, train, measure, hold its counters against the kernel's, write its shards.

It knows the run from `run.json` and its place from RANK and WORLD_SIZE. It talks to whoever started it through
`control`: ready -> (go) -> progress ... done -> (finish) -> closed, or error at any point.

     1 join     process group over the shaped interface, a second one for everything but frames
     2 build    data, stage, compressors, channels, trainer; settings read back
     3 probe    what gloo adds to a message
     4 go       counters are read from here
     5 train    steps and evaluations
     6 settle   wait until nothing is on its way, compare bytes, report
"""

from __future__ import annotations

import os
import random
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from thinpipe.harness import links, plugins, regimes, steps, store, train
from thinpipe.harness.channel import Channel, Policy
from thinpipe.harness.compression import grammar
from thinpipe.harness.compression.base import Direction
from thinpipe.harness.errors import PeerError, RunError, UserError
from thinpipe.harness.models import base as models
from thinpipe.harness.pipeline import partition
from thinpipe.harness.pipeline.stage import CompressedStage
from thinpipe.harness.recorder import Recorder
from thinpipe.harness.spec import RunSpec
from thinpipe.harness.tasks.base import Batch

# Longest time from a rank's start to its first step: another rank may still read a large checkpoint.
SETUP_LIMIT_S = 180.0


class Control(Protocol):
    """The pipe to whoever started this rank."""

    def send(self, data: Any) -> None: ...

    def receive(self, timeout_s: float) -> Any: ...


def main(control: Control, run_dir: str, rendezvous: str, interface: str = "eth0", limit_s: float = 300.0) -> None:
    """Run one rank to its end. An error is reported through `control` and ends the process with status 1."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        job = Rank(control, Path(run_dir), rank, world_size, limit_s)
        job.join(rendezvous, interface)
        job.build()
        job.go()
        job.train()
        job.settle()
        job.close()
    except Exception as error:
        # Reported before anything is taken down: a peer that notices first would be blamed instead.
        known = isinstance(error, (RunError, UserError))
        control.send(
            {
                "type": "error",
                "state": getattr(error, "state", "failed"),
                "error": str(error) if known else f"rank {rank}: {type(error).__name__}: {error}",
                "detail": traceback.format_exc(),
                "cause": not isinstance(error, PeerError),
            }
        )
        raise SystemExit(1) from error


@dataclass
class Data:
    """The task's data and the functions that order it."""

    dataset: Any
    task: Any


_prepared: dict[str, Data] = {}


def prepare(spec: RunSpec) -> Data:
    """Load the run's data, once a process: a fork server calls this before it forks the ranks."""
    key = spec.task.model_dump_json()
    if key not in _prepared:
        task = plugins.get("tasks", spec.task.name).load()
        _prepared[key] = Data(task.prepare(spec.task, train.cache_folder()), task)
    return _prepared[key]


class Rank:
    """One rank of one run."""

    def __init__(self, control: Control, run_dir: Path, rank: int, world_size: int, limit_s: float):
        self.control, self.run_dir, self.rank, self.world_size = control, run_dir, rank, world_size
        self.limit_s = limit_s
        self.spec = store.read_spec(run_dir)
        if world_size != self.spec.pipeline.stages:
            raise RunError(f"WORLD_SIZE is {world_size}, but the run has {self.spec.pipeline.stages} stages")
        measure = self.spec.measure
        self.recorder = Recorder(self.spec.run_id, rank, run_dir / f"rank{rank}.jsonl")
        self.policy = Policy(sample_every=0 if measure == "timing" else 4, limit_s=limit_s)
        self.links: links.Links | None = None

    def close(self) -> None:
        self.recorder.flush()
        if dist.is_initialized():
            dist.destroy_process_group()

    # --- 1 join --------------------------------------------------------------------------------------------------

    def join(self, rendezvous: str, interface: str) -> None:
        """One thread, the seeds, and the process groups: frames have sockets of their own, so they can be counted."""
        torch.set_num_threads(1)
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(self.spec.seed)
        if self.world_size > 1:
            # The runner watches for silence; gloo's own limit is the last resort, also while another rank builds.
            limit_s = max(self.limit_s, SETUP_LIMIT_S)
            self.links = links.join(rendezvous, interface, self.rank, self.world_size, limit_s)
        else:
            # torch's stage wants a process group even when there is nobody to talk to.
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    # --- 2 build -------------------------------------------------------------------------------------------------

    def build(self) -> None:
        spec = self.spec
        self.data = prepare(spec)
        dataset = self.data.dataset
        self.plan = steps.plan(spec, len(dataset.train), self.data.task.epoch_batches)
        self.num_samples = len({i for step in self.plan for i in step.ids})
        model = plugins.get("models", spec.model.name).load()
        shape = models.resolve(spec.model, spec.task)
        part = partition.split(shape, spec.pipeline.stages)[self.rank]
        module = model.build(spec.model, shape, part, seed=spec.seed)
        module.train()
        self.named = list(module.named_parameters())
        piece = spec.train.batch_size // spec.pipeline.microbatches
        boundary_shape = (piece, spec.task.sequence_length, shape.width)
        stage = CompressedStage(
            module,
            self.rank,
            self.world_size,
            channels=self._channels(boundary_shape),
            recorder=self.recorder,
            group=self.links.frames if self.links else None,
        )
        sync = self.links.sync if self.links else None
        norms = train.NormExchange(len(self.named), sync, self.world_size)
        self.trainer = train.Trainer(
            spec, stage, self.named, loss=model.loss, recorder=self.recorder, norms=norms, total_steps=len(self.plan)
        )

    def _channels(self, shape: tuple[int, ...]) -> dict[tuple[Direction, str], Channel]:
        if self.links is None:
            return {}
        ends: list[tuple[Direction, str, int, int]] = []
        if self.rank > 0:
            ends += [("forward", "in", self.rank - 1, self.rank - 1), ("backward", "out", self.rank - 1, self.rank - 1)]
        if self.rank < self.world_size - 1:
            ends += [("forward", "out", self.rank, self.rank + 1), ("backward", "in", self.rank, self.rank + 1)]
        return {
            (direction, side): Channel(
                boundary=boundary,
                direction=direction,
                sends=side == "out",
                rank=self.rank,
                peer=peer,
                group=self.links.frames,
                compressors={
                    text: grammar.build(text, self.num_samples)
                    for text in regimes.texts(self.spec, direction, boundary)
                },
                shape=shape,
                microbatches=self.spec.pipeline.microbatches,
                seed=self.spec.seed,
                recorder=self.recorder,
                policy=self.policy,
            )
            for direction, side, boundary, peer in ends
        }

    def effective(self) -> dict[str, Any]:
        """Settings as they are in force, read back from where they act."""
        stage = self.trainer.stage
        used = {
            f"{direction}/{channel.boundary}": sorted(c.name for c in channel.compressors.values())
            for (direction, _), channel in stage.channels.items()
        }
        return {
            "threads": torch.get_num_threads(),
            "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
            "seed": torch.initial_seed(),
            "compressors": used,
            "schedule": type(self.trainer.schedule).__name__,
            "parameters": sum(p.numel() for _, p in self.named),
            "steps": len(self.plan),
            "addresses": self.links.addresses if self.links else [],
            "data": self.data.dataset.provenance,
        }

    # --- 3, 4 probe and go ---------------------------------------------------------------------------------------

    def go(self) -> None:
        if self.links:
            self.links.probe()
            self.links.barrier()
        self.control.send({"type": "ready", "effective": self.effective()})
        self.control.receive(SETUP_LIMIT_S)
        if self.links:
            self.links.start()

    # --- 5 train -------------------------------------------------------------------------------------------------

    def train(self) -> None:
        dataset, spec = self.data.dataset, self.spec
        self.queue_s = self.measured_s = 0.0
        for number, step in enumerate(self.plan):
            batch = self.data.task.batch(dataset.train, step.ids)
            waited = _run_queue_s()
            before = self.trainer.training_time_s
            self.trainer.step(
                number, step.epoch, batch, measured=step.measured, regime=regimes.regime(spec, step.epoch)
            )
            if step.measured:
                self.queue_s += _run_queue_s() - waited
                self.measured_s += self.trainer.training_time_s - before
            if spec.measure != "timing" and step.ends_epoch:
                self._evaluate(number, step.epoch)
            self.recorder.flush()
            self.control.send({"type": "progress", "step": number + 1, "steps": len(self.plan)})

    def _evaluate(self, number: int, epoch: int) -> None:
        every, last = self.spec.train.evaluate_every, self.plan[-1].epoch
        held_out = self.data.dataset.held_out
        if not every or not len(held_out) or ((epoch + 1) % every and epoch != last):
            return
        regime = regimes.evaluation_regime(self.spec, epoch)
        loss = self.trainer.evaluate(number, self._evaluation_batches(), regime)
        if loss is not None:
            self.recorder.row(
                "evals", epoch=epoch + 1, step=number + 1, t_s=self.trainer.training_time_s,
                evaluation=self.spec.compression.evaluation, eval_loss=loss,
                perplexity=float(np.exp(min(loss, 700.0))), sequences=len(held_out),
            )  # fmt: skip

    def _evaluation_batches(self) -> Iterator[Batch]:
        held_out = self.data.dataset.held_out
        for ids, weights in self.data.task.evaluation_batches(len(held_out), self.spec.train.batch_size):
            yield self.data.task.batch(held_out, ids, weights)
            self.control.send({"type": "alive"})

    # --- 6 settle ------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Compare bytes with the kernel's, report, and once everybody has been counted, write the shards."""
        report: dict[str, Any] = {"type": "done", "steps": len(self.plan), "digests": {}}
        report["run_queue_pct"] = 100 * self.queue_s / self.measured_s if self.measured_s else None
        if self.links:
            channels = list(self.trainer.stage.channels.values())
            report |= self.links.settle(channels, self.limit_s)
            for channel in channels:
                report["digests"] |= channel.digests()
        for name in ("raw_bytes", "payload_bytes", "frame_bytes"):
            report[name] = sum(row[name] for row in self.recorder.rows["transfers"])
        self.control.send(report)
        self.control.receive(self.limit_s)
        self.recorder.write_shards(self.run_dir)
        self.control.send({"type": "closed"})


def _run_queue_s() -> float:
    """Seconds the main thread, which computes, was runnable but not running (proc(5), schedstat, second field)."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
