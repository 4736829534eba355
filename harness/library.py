"""The compressed pipeline stage in somebody's own script: in place of torch's PipelineStage, under torch's schedules.

    stage = CompressedPipelineStage(module, rank, 2, torch.device("cpu"), num_microbatches=4, output_shape=(8, 64))
    schedule = ScheduleGPipe(stage, 4, loss_fn=loss)
    with stage.step(ids):                  # the samples of this batch, the same on every stage
        schedule.step(...)

docs/library.md says what differs from torch's stage, docs/examples/compressed_stage.py is a whole script.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from thinpipe.harness.channel import Channel, Policy, Traffic
from thinpipe.harness.compression import grammar
from thinpipe.harness.compression.base import Direction
from thinpipe.harness.errors import UserError
from thinpipe.harness.pipeline.stage import CompressedStage
from thinpipe.harness.recorder import Recorder


class CompressedPipelineStage(CompressedStage):
    """Stage `stage_index` of `num_stages`, on the rank of that number in `group` (None: the default group) of gloo.

    submodule: its first argument and its output are one float tensor each where they cross a boundary, a sample a row.
    input_shape, output_shape: of these tensors, of one micro-batch: (samples, ...); the first stage needs no
    input_shape, the last no output_shape. forward, backward: compressors of activations and of their gradients, the
    same on every stage (`thinpipe codecs`). evaluation: whether forward passes inside `evaluate` cross uncompressed or
    by the codec inside any memory. seed: of stochastic rounding; capacity: samples a memory will meet, so that its room
    is taken once (None: as they come); limit_s: no wait for a frame lasts longer.

    Raises UserError for what cannot work. Where the ends disagree (samples, shape, compressor), the first frame is
    refused with harness.errors.FrameError.
    """

    def __init__(
        self,
        submodule: torch.nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *,
        num_microbatches: int,
        input_shape: Sequence[int] | None = None,
        output_shape: Sequence[int] | None = None,
        forward: str = "none",
        backward: str = "none",
        evaluation: Literal["off", "codec"] = "off",
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
        capacity: int | None = None,
        limit_s: float = 300.0,
    ) -> None:
        _require(stage_index, num_stages, device, group)
        if num_microbatches < 1 or evaluation not in ("off", "codec"):
            raise UserError('num_microbatches must be 1 or more, and evaluation "off" or "codec".')
        self.num_microbatches = num_microbatches
        self._use: dict[Direction, str] = {
            "forward": grammar.canonical(forward),
            "backward": grammar.canonical(backward),
        }
        if "peer" in grammar.uses(forward):
            raise UserError(f"forward={forward!r} codes gradients by the help of activations: it is for backward=.")
        inside = {way: "none" if evaluation == "off" else grammar.inner(text) for way, text in self._use.items()}
        self._evaluation = inside
        #: What this stage has sent in training, by direction.
        self.sent: dict[Direction, Traffic] = {}
        self._steps = 0
        self._around_step = False
        recorder = Recorder("", stage_index)
        recorder.keep_spans = False
        channels: dict[tuple[Direction, str], Channel] = {}
        for direction, side, boundary, peer in _ends(stage_index):
            if 0 <= boundary < num_stages - 1:
                name, shape = ("input_shape", input_shape) if peer < stage_index else ("output_shape", output_shape)
                if not shape:
                    raise UserError(
                        f"stage {stage_index} of {num_stages} needs {name}=(samples, ...), a micro-batch's."
                    )
                channels[direction, side] = Channel(
                    boundary=boundary,
                    direction=direction,
                    sends=side == "out",
                    rank=stage_index,
                    peer=peer,
                    group=group,
                    compressors={t: grammar.build(t, capacity) for t in {self._use[direction], inside[direction]}},
                    shape=tuple(shape),
                    microbatches=num_microbatches,
                    seed=seed,
                    recorder=recorder,
                    policy=Policy(sample_every=0, limit_s=limit_s),
                )
        _agree(
            {
                "in": input_shape and list(input_shape), "out": output_shape and list(output_shape),
                "compressors": [grammar.canonical(text) for text in (forward, backward)], "seed": seed,
                "micro-batches": num_microbatches, "evaluation": evaluation,
            },
            group,
        )  # fmt: skip
        super().__init__(submodule, stage_index, num_stages, channels=channels, recorder=recorder, group=group)

    @contextlib.contextmanager
    def step(self, ids: Sequence[int]) -> Iterator[None]:
        """Around `schedule.step(...)`: one forward and backward of a batch. ids: its samples' identities, in the order
        of its rows, the same on every stage; a memory knows a sample by them."""
        with self._around(ids, self._use, training=True):
            yield
        self._steps += 1

    @contextlib.contextmanager
    def evaluate(self, ids: Sequence[int]) -> Iterator[None]:
        """Around `schedule.eval(...)`: memories are neither used nor changed."""
        with self._around(ids, self._evaluation, training=False):
            yield

    @contextlib.contextmanager
    def _around(self, ids: Sequence[int], use: dict[Direction, str], *, training: bool) -> Iterator[None]:
        if self._around_step:
            raise UserError("one step or evaluation is under way, or has raised: end it first, or make the stage anew.")
        ids = _whole_numbers(ids)
        rows, left = divmod(len(ids), self.num_microbatches)
        if left or any(channel.shape[0] != rows for channel in self.channels.values()):
            due = " and ".join(sorted({f"{channel.shape[0]}" for channel in self.channels.values()}))
            raise UserError(
                f"{len(ids)} ids are not {self.num_microbatches} micro-batches of {due or 'equal'} samples."
            )
        pieces = [tuple(ids[i : i + rows]) for i in range(0, len(ids), rows)]
        by_boundary = {(way, c.boundary): use[way] for (way, _), c in self.channels.items()}
        self.begin_step(self._steps, pieces, training=training, use=by_boundary, watch={})
        # A step that raised leaves nothing to wait for: its schedule and this stage are to be thrown away.
        self._around_step = True
        yield
        self._around_step = False
        for channel, traffic in self.finish_step(training=training):
            if training:
                self.sent.setdefault(channel.direction, Traffic(traffic.compressor)).add(traffic)

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> None:
        if num_microbatches != self.num_microbatches:
            raise UserError(
                f"the schedule has {num_microbatches} micro-batches, the stage was made for {self.num_microbatches}."
            )
        super()._prepare_forward_infra(num_microbatches, *args, **kwargs)


def _ends(stage: int) -> list[tuple[Direction, str, int, int]]:
    """(direction, side, boundary, peer) of the channel ends of a stage in the middle."""
    return [
        ("forward", "in", stage - 1, stage - 1),
        ("backward", "out", stage - 1, stage - 1),
        ("forward", "out", stage, stage + 1),
        ("backward", "in", stage, stage + 1),
    ]


def _agree(mine: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    """Raise UserError on every stage where two of them were made for different frames: a longer one than its receiver
    expects would end that process."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    for stage, (here, after) in enumerate(itertools.pairwise(everyone)):
        if here["out"] != after["in"]:
            raise UserError(
                f"stage {stage} has output_shape={here['out']}, stage {stage + 1} input_shape={after['in']}: give both "
                "the same."
            )
        for what in ("compressors", "seed", "micro-batches", "evaluation"):
            if here[what] != after[what]:
                raise UserError(f"stages {stage} and {stage + 1} have other {what}: {here[what]}, {after[what]}.")


def _whole_numbers(ids: Sequence[int]) -> list[int]:
    """Ids as ints: a tensor's elements would be another key at every visit."""
    try:
        found = [operator.index(one) for one in ids]
    except TypeError:
        raise UserError(f"ids must be whole numbers, a sample's each; got {type(next(iter(ids))).__name__}.") from None
    if any(not -(2**63) <= one < 2**63 for one in found):
        raise UserError("ids must fit 64 bits.")
    return found


def _require(stage_index: int, num_stages: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
    if torch.device(device).type != "cpu":
        raise UserError(f"device {device}: frames are sent from the CPU's memory, by gloo. Give torch.device('cpu').")
    if dist.get_backend(group) != "gloo":
        raise UserError(
            f"the group's backend is {dist.get_backend(group)}, and frames are sent by gloo: give such a group."
        )
    if (dist.get_rank(group), dist.get_world_size(group)) != (stage_index, num_stages):
        raise UserError(
            f"stage {stage_index} of {num_stages} is on rank {dist.get_rank(group)} of {dist.get_world_size(group)}: "
            "give a group that has a rank a stage, in the order of the stages."
        )
