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

import functools
import os
import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from thinpipe.harness import (
    data_parallel,
    folders,
    links,
    memory,
    metrics,
    plugins,
    rank_state,
    regimes,
    replay,
    rss,
    steps,
    store,
    train,
)
from thinpipe.harness.cache import cache_folder
from thinpipe.harness.channel import Channel, Policy
from thinpipe.harness.compression import grammar
from thinpipe.harness.compression.base import Direction, Memory
from thinpipe.harness.compression.row_memory import RowMemory
from thinpipe.harness.compression.warm_up import warm_up
from thinpipe.harness.errors import PeerError, RunError, UserError
from thinpipe.harness.gradients import Gradients, StageGradients
from thinpipe.harness.models import _dropout
from thinpipe.harness.models import base as models
from thinpipe.harness.models.base import StagePart
from thinpipe.harness.pipeline import partition, placement
from thinpipe.harness.pipeline.stage import CompressedStage
from thinpipe.harness.quantized_adam import QuantizedAdam
from thinpipe.harness.recorder import Recorder
from thinpipe.harness.spec import RunSpec, TaskSpec
from thinpipe.harness.tasks import base as tasks
from thinpipe.harness.tasks.base import Batch

# Longest time from a rank's start to its first step: another rank may still read a large checkpoint.
SETUP_LIMIT_S = 180.0
GLOO_SAYS = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "gloo/transport")


class Control(Protocol):
    """The pipe to whoever started this rank."""

    def send(self, data: Any) -> None: ...

    def receive(self, timeout_s: float) -> Any: ...


def main(control: Control, run_dir: str, rendezvous: str, interface: str = "eth0", limit_s: float = 300.0) -> None:
    """Run one rank to its end. An error is reported through `control` and ends the process with status 1."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    job: Rank | None = None
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
        gone = not known and _is_of_a_peer(error)
        text = str(error) if known else f"rank {rank}: {type(error).__name__}: {error}"
        if gone:
            at = f", step {job.recorder.step}" if job else ""
            text = f"rank {rank}{at}: another rank did not answer or is gone, in an exchange of gradients or norms"
        control.send(
            {
                "type": "error",
                "state": getattr(error, "state", "failed"),
                "error": text,
                "detail": traceback.format_exc(),
                "cause": not (gone or isinstance(error, PeerError)),
            }
        )
        raise SystemExit(1) from error


def _is_of_a_peer(error: BaseException | None) -> bool:
    """Whether gloo said it: a connection that was closed, or a wait that had no end."""
    while error is not None:
        if isinstance(error, RuntimeError) and any(word in str(error) for word in GLOO_SAYS):
            return True
        error = error.__cause__ or error.__context__
    return False


@dataclass
class Data:
    """The task's data and the functions that order it."""

    dataset: Any
    task: Any


_prepared: dict[str, Data] = {}


def prepare(spec: RunSpec) -> Data:
    """Load the run's data, once a process: a fork server calls this before it forks the ranks. A replay has none."""
    if spec.compute == "replay":
        return Data(replay.dataset(spec), replay.Samples())
    wanted = resolved_task(spec)
    key = wanted.model_dump_json()
    if key not in _prepared:
        task = plugins.get("tasks", spec.task.name).load()
        _prepared[key] = Data(task.prepare(wanted, cache_folder()), task)
    return _prepared[key]


def resolved_task(spec: RunSpec) -> TaskSpec:
    """The task with the folder of its tokenizer, where that is named: `checkpoint`, `pretrained:`, `fetched:`."""
    named = spec.task.tokenizer
    if named is None:
        return spec.task
    if named != "checkpoint":
        folder = folders.resolve(named) if named.startswith((folders.PRETRAINED, folders.FETCHED)) else named
    elif spec.model.checkpoint is None:
        raise UserError('task.tokenizer "checkpoint" means the one beside model.checkpoint, which is not set')
    else:
        folder = models.checkpoint_folder(spec.model.checkpoint)
    return spec.task.model_copy(update={"tokenizer": str(folder)})


class Rank:
    """One rank of one run. rank: of all; place: within its pipeline; group: its data group."""

    def __init__(self, control: Control, run_dir: Path, rank: int, world_size: int, limit_s: float):
        self.control, self.run_dir, self.rank, self.world_size = control, run_dir, rank, world_size
        self.limit_s = limit_s
        self.spec = store.read_spec(run_dir)
        if world_size != self.spec.world_size:
            raise RunError(f"WORLD_SIZE is {world_size}, but the run has {self.spec.world_size} ranks")
        self.group, self.place = divmod(rank, self.spec.pipeline.ranks)
        measure = self.spec.measure
        self.recorder = Recorder(self.spec.run_id, rank, run_dir / f"rank{rank}.jsonl")
        self.policy = Policy(sample_every=0 if measure == "timing" else 4, limit_s=limit_s)
        self.links: links.Links | None = None
        self.memory_before = rss.start()

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
            groups = self.spec.data_parallel.groups
            self.links = links.join(rendezvous, interface, self.rank, self.world_size, limit_s, groups=groups)
        else:
            # torch's stage wants a process group even when there is nobody to talk to.
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    # --- 2 build -------------------------------------------------------------------------------------------------

    def build(self) -> None:
        spec = self.spec
        if self.world_size > 1:
            # Else a process that no fork server prepared would load kernels, a second's work, in its first step.
            warm_up(regimes.every_text(spec))
        self.data = prepare(spec)
        dataset, task = self.data.dataset, self.data.task
        self.plan = steps.plan(spec, len(dataset.train), task.epoch_batches)
        # Identities that this pipeline's memories may meet.
        rows = len({i for step in self.plan for groups in step.batches for i in groups[self.group]})
        self.num_samples = tasks.num_identities(spec.task, rows)
        self.shape = models.resolve(spec.model, spec.task)
        parts = partition.split(self.shape, spec.pipeline.stages, spec.pipeline.cuts)
        build, loss = self._family(parts)
        local = placement.stages_of(self.place, spec.pipeline)
        stages, own = [], []
        for index in local:
            module = build(index)
            module.train()
            named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
            own.append(StageGradients(index, named, getattr(module, "shared", {})))
            stages.append(
                CompressedStage(
                    self._wrapped(module),
                    index,
                    spec.pipeline.stages,
                    channels=self._channels(index, parts),
                    recorder=self.recorder,
                    group=self.links.frames if self.links else None,
                    local=local,
                    visit=getattr(module, "visit", _dropout.visit),
                    autocast=torch.bfloat16 if spec.train.autocast == "bf16" else None,
                )
            )
        self.stages = stages
        self.trainer = train.Trainer(
            spec, stages, Gradients(own, spec.train, self.links, self.recorder), loss=loss,
            recorder=self.recorder, total_steps=len(self.plan), links=self.links,
            steps_per_epoch=sum(step.epoch == 0 for step in self.plan), predict=getattr(task, "predict", None),
        )  # fmt: skip
        replay.slow_down(self.trainer.optimizer, self._replayed())

    def _replayed(self) -> list[replay.ReplayStage]:
        return [stage.submod for stage in self.stages if isinstance(stage.submod, replay.ReplayStage)]

    def _family(
        self, parts: Sequence[StagePart]
    ) -> tuple[Callable[[int], torch.nn.Module], Callable[..., torch.Tensor]]:
        """(what makes the module of a stage, by its index; the loss)."""
        spec = self.spec
        if spec.compute == "replay":
            return functools.partial(replay.build, spec, self.shape, parts), replay.loss
        model = plugins.get("models", spec.model.name).load()

        def build(index: int) -> torch.nn.Module:
            return model.build(spec.model, self.shape, parts[index], seed=spec.seed, recompute=spec.train.recompute)

        return build, model.loss

    def _wrapped(self, module: torch.nn.Module) -> torch.nn.Module:
        group = self.links.data if self.links else None
        return module if group is None else data_parallel.wrap(module, group, self.spec)

    def _channels(self, index: int, parts: Sequence[StagePart]) -> dict[tuple[Direction, str], Channel]:
        """The channel ends of stage `index`; none towards a stage on this rank."""
        pipe = self.spec.pipeline
        between = placement.boundaries(pipe)
        ends: list[tuple[Direction, str, int, int]] = []
        if index - 1 in between:
            peer = placement.rank_of(index - 1, pipe)
            ends += [("forward", "in", index - 1, peer), ("backward", "out", index - 1, peer)]
        if index in between:
            peer = placement.rank_of(index + 1, pipe)
            ends += [("forward", "out", index, peer), ("backward", "in", index, peer)]
        return {
            (direction, side): Channel(
                boundary=boundary,
                direction=direction,
                sends=side == "out",
                rank=self.rank,
                peer=peer,
                group=self.links.frames if self.links else None,
                compressors={
                    text: grammar.build(text, self.num_samples, self.run_dir)
                    for text in regimes.texts(self.spec, direction, boundary)
                },
                shape=(self.spec.microbatch_size, *self.shape.boundaries[parts[boundary].blocks[-1]]),
                microbatches=pipe.microbatches,
                seed=self.spec.seed,
                recorder=self.recorder,
                policy=self.policy,
            )
            for direction, side, boundary, peer in ends
        }

    @property
    def channels(self) -> list[Channel]:
        return [channel for stage in self.stages for channel in stage.channels.values()]

    def effective(self) -> dict[str, Any]:
        """Settings as they are in force, read back from where they act."""
        used = {
            f"{self.group}/{channel.direction}/{channel.boundary}": sorted(c.name for c in channel.compressors.values())
            for channel in self.channels
        }
        modules = [data_parallel.unwrap(stage.submod) for stage in self.stages]
        return {
            "threads": torch.get_num_threads(),
            "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
            "compute": "replay" if len(self._replayed()) == len(self.stages) else "real",
            "autocast": str(self.stages[0]._autocast).removeprefix("torch."),
            "seed": torch.initial_seed(),
            "compressors": used,
            "schedule": type(self.trainer.schedule).__name__,
            "optimizer": type(self.trainer.optimizer).__name__,
            "exchange": self._exchange(),
            "stages": {str(stage.stage_index): self.shape_of(stage) for stage in self.stages},
            "parameters": sum(p.numel() for module in modules for p in module.parameters()),
            "spec": self.spec.canonical(),
            "steps": len(self.plan),
            "resumed_from": self.first,
            "addresses": self.links.addresses if self.links else [],
            "data": self.data.dataset.provenance,
        }

    def _exchange(self) -> str:
        if isinstance(self.trainer.optimizer, QuantizedAdam):
            return "quantized-adam"
        found = getattr(self.stages[0].submod, "exchange", None)
        return "none" if found is None else found.parallel.exchange

    def shape_of(self, stage: CompressedStage) -> list[int]:
        """First and last block that a stage holds."""
        module: Any = data_parallel.unwrap(stage.submod)
        blocks = module.part.blocks
        return [blocks[0], blocks[-1]]

    # --- 3, 4 probe and go ---------------------------------------------------------------------------------------

    def go(self) -> None:
        if self.links:
            self.links.probe(placement.neighbours(self.spec.pipeline))
            self.links.barrier()
        self.first = rank_state.resume(self)
        self.control.send({"type": "ready", "effective": self.effective()})
        self.control.receive(SETUP_LIMIT_S)
        if self.links:
            self.links.start()

    # --- 5 train -------------------------------------------------------------------------------------------------

    def train(self) -> None:
        spec = self.spec
        self.queue_s = self.measured_s = 0.0
        for number, step in enumerate(self.plan[self.first :], start=self.first):
            waited = _run_queue_s()
            before = self.trainer.training_time_s
            batches = [
                self.data.task.batch(self.data.dataset.train, groups[self.group], epoch=step.epoch)
                for groups in step.batches
            ]
            self.trainer.step(
                number, step.epoch, batches, measured=step.measured, regime=regimes.regime(spec, step.epoch)
            )
            if step.measured:
                self.queue_s += _run_queue_s() - waited
                self.measured_s += self.trainer.training_time_s - before
            else:
                for stage in self._replayed():
                    stage.waits = replay.Waits()
            if spec.measure != "timing" and step.ends_epoch:
                self._evaluate(number, step.epoch)
            self.recorder.flush()
            rank_state.save(self, number + 1)
            self.control.send({"type": "progress", "step": number + 1, "steps": len(self.plan)})

    def _evaluate(self, number: int, epoch: int) -> None:
        every, last = self.spec.train.evaluate_every, self.plan[-1].epoch
        held_out, task = self.data.dataset.held_out, self.data.task
        if not every or not len(held_out) or ((epoch + 1) % every and epoch != last):
            return
        regime = regimes.evaluation_regime(self.spec, epoch)
        found = self.trainer.evaluate(number, self._evaluation_batches(), regime)
        if found is None or self.group:
            return
        loss, scored = found
        scores: dict[str, float] = {}
        if scored:
            predictions, targets = (torch.cat(part) for part in zip(*scored, strict=True))
            scores = task.score(predictions, targets)
        self.recorder.row(
            "evals", epoch=epoch + 1, step=number + 1, t_s=self.trainer.training_time_s,
            evaluation=self.spec.compression.evaluation, eval_loss=loss,
            perplexity=float(np.exp(min(loss, 700.0))) if self.shape.kind == "lm" else None,
            **{name: scores.get(name) for name in metrics.SCORES}, sequences=len(held_out),
        )  # fmt: skip

    def _evaluation_batches(self) -> Iterator[Batch]:
        held_out = self.data.dataset.held_out
        size = self.spec.microbatch_size * self.spec.pipeline.microbatches
        for ids, weights in self.data.task.evaluation_batches(len(held_out), size):
            yield self.data.task.batch(held_out, ids, weights)
            self.control.send({"type": "alive"})

    # --- 6 settle ------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Compare bytes with the kernel's, report, and once everybody has been counted, write the shards."""
        report: dict[str, Any] = {"type": "done", "steps": len(self.plan), "digests": {}}
        report["run_queue_pct"] = 100 * self.queue_s / self.measured_s if self.measured_s else None
        report["overrun_pct"] = replay.overrun_pct(self._replayed())
        report["peak_memory_bytes"] = rss.peak(self.memory_before)
        report["predicted_memory_bytes"] = memory.predict(self.spec, len(self.data.dataset.train))[self.rank].total
        report["memory_state_bytes"] = self._state_bytes()
        report["parameters_digest"] = self._parameters_digest()
        if self.links:
            report |= self.links.settle(self.channels, self.trainer.data_traffic, self.limit_s)
            for channel in self.channels:
                report["digests"] |= {f"{self.group}/{key}": value for key, value in channel.digests().items()}
        for name in ("raw_bytes", "payload_bytes", "frame_bytes"):
            report[name] = sum(row[name] for row in self.recorder.rows["transfers"])
        self.control.send(report)
        self.control.receive(self.limit_s)
        self.recorder.write_shards(self.run_dir)
        self.control.send({"type": "closed"})

    def _state_bytes(self) -> int:
        """What the memories of this rank keep: rows as they lie, those that were never met left out."""
        total = 0
        for channel in self.channels:
            for kept in (c for c in channel.compressors.values() if isinstance(c, Memory)):
                if not isinstance(kept, RowMemory):
                    total += kept.state_bytes(self.num_samples, channel.shape, self.spec.pipeline.microbatches)
                elif kept.rows.shape is not None:
                    total += len(kept.rows) * kept.rows.row_bytes(kept.rows.shape)
        return total

    def _parameters_digest(self) -> str:
        """Of all parameters and buffers at the end: two runs that agree in it trained the same, bit for bit."""
        digest = xxhash.xxh3_64()
        for stage in self.stages:
            for value in data_parallel.unwrap(stage.submod).state_dict().values():
                digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


def _run_queue_s() -> float:
    """Seconds the main thread, which computes, was runnable but not running (proc(5), schedstat, second field)."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
