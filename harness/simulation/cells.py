"""Cells of an experiment, simulated: a RunSpec, a profile and what messages cost -> model.Pipeline -> a prediction.

Without a `Wan`, links are those of the run's network as tc shapes them, here and on a cluster: buckets included. With
one they are its links, without any bucket.

What a prediction leaves out: retransmissions and what TCP needs to find a link's rate; the few bytes by which a
receiver announces itself; gradients of shared weights; what gradients' exchange between data groups overlaps with the
last backward pass (it is added after it).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from thinpipe.harness import profile as profiles
from thinpipe.harness import regimes
from thinpipe.harness.data_traffic import step_traffic
from thinpipe.harness.errors import UserError
from thinpipe.harness.experiment import Cell
from thinpipe.harness.frame import HEADER_BYTES
from thinpipe.harness.models.base import resolve
from thinpipe.harness.pipeline import partition, placement
from thinpipe.harness.profile import Profile
from thinpipe.harness.simulation import model, steps, wan
from thinpipe.harness.simulation.cluster import beyond
from thinpipe.harness.simulation.costs import Codecs, Constants, message_shapes
from thinpipe.harness.simulation.model import Bucket, Link, Message, Pipeline, Times
from thinpipe.harness.spec import RunSpec
from thinpipe.netem import qdisc
from thinpipe.netem.link import ETHERNET_BYTES, TCP_IP_BYTES, LinkSpec, bytes_per_s, gso_bytes, segmented_bytes
from thinpipe.netem.topology import Topology

#: What gloo adds to a message at its sender and its receiver (Links.probe reads it at the start of each run).
GLOO_BYTES = (96, 48)
SINGLE = ("gpipe", "1f1b")


@dataclass(frozen=True)
class Setting:
    """How cells are simulated otherwise than they are declared.

    profile: instead of the cell's own; stages: the pipeline deepened to so many, each as the cell's own; wan: links
    between regions instead of the network's; order: of its regions, "given" or "best".
    """

    profile: str | None = None
    stages: int | None = None
    wan: wan.Wan | None = None
    order: str = "given"
    constants: Constants = field(default_factory=Constants)


def cells(found: Iterable[Cell], setting: Setting, codecs: Codecs) -> list[dict[str, Any]]:
    """A row a cell, see `row`. Cells without a network between stages are left out."""
    return [row(cell, setting, codecs) for cell in found if cell.runs[0][1].pipeline.ranks > 1]


def row(cell: Cell, setting: Setting, codecs: Codecs) -> dict[str, Any]:
    """What is predicted of one cell, as plain data: seconds, bytes, shares."""
    spec = cell.runs[0][1]
    found = profile_of(spec, setting)
    regions = _regions(spec, setting)
    pipe = pipeline(spec, found, setting, codecs, regions)
    predicted = steps.simulate(pipe)
    busiest = predicted.busiest
    assert busiest is not None, "two ranks at least"
    last = regimes.final_epoch(spec)
    critical = {part: seconds / predicted.step_time_s for part, seconds in predicted.critical_s.items()}
    return {
        "part": cell.part,
        "arm": cell.arm,
        "cell": cell.cell_id,
        "profile": found.name,
        "schedule": spec.pipeline.schedule,
        "stages": len(pipe.stages),
        "microbatches": pipe.microbatches,
        "rate_mbit": None if setting.wan else spec.network.rate_mbit,
        "network": setting.wan.name if setting.wan else None,
        "forward": spec.compression.compressor("forward", 0, last),
        "backward": spec.compression.compressor("backward", 0, last),
        "predicted_step_time_s": predicted.step_time_s,
        "predicted_samples_per_s": spec.train.batch_size / predicted.step_time_s,
        "bubble_fraction": predicted.bubble_fraction,
        "link_use": busiest.busy_s / predicted.step_time_s,
        "wire_bytes": round(sum(use.wire_bytes for use in predicted.links)),
        "compute_s": _mean(predicted.compute_s),
        "codec_s": _mean(predicted.codec_s),
        **{f"{part}_share": share for part, share in critical.items()},
        "regions": regions,
        "beyond": beyond(spec, setting),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def profile_of(spec: RunSpec, setting: Setting) -> Profile:
    """The profile a cell is simulated by. UserError where there is none."""
    name = setting.profile or spec.profile
    if name is None:
        raise UserError(
            "a cell that computes needs a profile to be simulated by: measure one with `thinpipe profile EXPERIMENT "
            "--out FILE` and give it, --profile FILE, or name a stated one."
        )
    return profiles.load(name)


def pipeline(
    spec: RunSpec, found: Profile, setting: Setting, codecs: Codecs, regions: Sequence[str] | None = None
) -> Pipeline:
    """One step of a run's pipeline, by its last compressors, on samples that memories have met. regions: of each rank,
    where a Wan is set. UserError where the run is not resolved or the profile does not fit."""
    if not spec.network.is_resolved:
        raise UserError(f"network.rate {spec.network.rate!r} is not worked out: set network.rate_mbit, or `run` first.")
    times = [Times(*stage) for stage in profiles.of_spec(found, spec)]
    forward, backward = (messages(spec, direction, codecs) for direction in regimes.DIRECTIONS)
    pieces, passes = spec.pipeline.microbatches, spec.train.accumulate
    if setting.stages is not None:
        times, forward, backward = _deepened(spec, setting.stages, times, forward, backward)
    ranks, rank_of = len(times), None
    if spec.pipeline.schedule in SINGLE:
        orders: Sequence[Iterable[model.Action]] = model.orders(spec.pipeline.schedule, ranks, pieces, passes)
    else:
        orders = orders_of_several(spec)
        ranks, rank_of = len(orders), [placement.rank_of(stage, spec.pipeline) for stage in range(len(times))]
    link = lab_link(LinkSpec(**spec.network.link()))
    links = {} if setting.wan is None else _between(setting.wan, regions or (), set(_pairs(ranks, rank_of)))
    delay = max([each.delay_s for each in links.values()] or [link.delay_s])
    synchronised = spec.train.clip_norm is not None and spec.train.clip_scope == "global"
    return Pipeline(
        times,
        orders,
        pieces * passes,
        rank_of=rank_of,
        forward=forward,
        backward=backward,
        links=links,
        link=link,
        exchange_s=exchange_s(spec, setting),
        sync_s=(ranks - 1) * (delay + setting.constants.sync_round_s) if synchronised else None,
        overheads=setting.constants.overheads,
    )


def messages(spec: RunSpec, direction: str, codecs: Codecs) -> list[Message]:
    """The message over each boundary in one direction."""
    made = []
    for boundary, shape in enumerate(message_shapes(spec)):
        text = spec.compression.compressor(direction, boundary, regimes.final_epoch(spec))  # type: ignore[arg-type]
        coded = codecs.of(text, direction, shape)
        size = segmented_bytes(coded.payload_bytes + HEADER_BYTES + GLOO_BYTES[0], spec.network.mtu)
        made.append(Message(size, coded.encode_s, coded.decode_s))
    return made


def idle_transfers(spec: RunSpec, codecs: Codecs) -> dict[tuple[str, int], float]:
    """Seconds of one message over an idle link of the run's network, by direction and boundary."""
    link = lab_link(LinkSpec(**spec.network.link()))
    made = {direction: messages(spec, direction, codecs) for direction in regimes.DIRECTIONS}
    return {
        (direction, boundary): steps.transfer_s(link, message.wire_bytes)
        for direction, own in made.items()
        for boundary, message in enumerate(own)
    }


def lab_link(asked: LinkSpec) -> Link:
    """A link as tc shapes it (netem/qdisc.py)."""
    delay = asked.delay_ms / 1e3
    if not asked.limited:
        return Link(delay_s=delay)
    shaped = qdisc.plan(Topology.mesh(2, asked), 0).classes[0]
    segments = (gso_bytes(asked) - TCP_IP_BYTES) // (asked.mtu - TCP_IP_BYTES)
    bucket = Bucket(
        burst_bytes=shaped.burst_bytes,
        peak_bytes=shaped.cburst_bytes,
        peak=shaped.ceil_bit / shaped.rate_bit,
        chunk_bytes=segments * (asked.mtu + ETHERNET_BYTES),
    )
    return Link(((0.0, bytes_per_s(asked)),), delay, bucket)


def exchange_s(spec: RunSpec, setting: Setting) -> list[float] | float:
    """Seconds in which each rank averages its gradients with the other data groups, after its last backward pass."""
    parallel = spec.data_parallel
    if parallel.groups == 1:
        return 0.0
    if setting.stages is not None or setting.wan is not None:
        raise UserError("--stages and --wan are of one pipeline: set data_parallel.groups to 1.")
    if parallel.exchange == "powersgd":
        raise UserError("the bytes of powersgd depend on the parameters' shapes, which a simulation does not know.")
    shape = resolve(spec.model, spec.task)
    link = lab_link(LinkSpec(**{**spec.network.link(), "rate_mbit": parallel.rate_mbit or spec.network.rate_mbit}))
    seconds = [0.0] * spec.pipeline.ranks
    for part in partition.split(shape, spec.pipeline.stages, spec.pipeline.cuts):
        counts = [shape.parameters_per_block[i] for i in part.blocks]
        counts += [shape.parameters_embedding] * part.first + [shape.parameters_head] * part.last
        sent = step_traffic([(count,) for count in counts], parallel, 0)
        wire = segmented_bytes(sent.on_the_wire(GLOO_BYTES), spec.network.mtu)
        rank = placement.rank_of(part.index, spec.pipeline)
        seconds[rank] += model.ring_s(wire, parallel.groups, link, setting.constants.overheads.message_s)
    return seconds


def orders_of_several(spec: RunSpec) -> list[list[model.Action]]:
    """What each rank does where it holds several stages: the order that torch's own schedule object has worked out.

    Its two halves of a backward pass (zero-bubble) are taken to last half of it each."""
    from types import SimpleNamespace

    from thinpipe.harness.pipeline import schedules

    pipe = spec.pipeline
    # What torch's constructors look at; nothing is run.
    stages: Any = [
        SimpleNamespace(
            group_size=pipe.ranks,
            group_rank=0,
            num_stages=pipe.stages,
            stage_index=stage,
            stage_index_to_group_rank={k: placement.rank_of(k, pipe) for k in range(pipe.stages)},
            has_backward=True,
            is_first=stage == 0,
            is_last=stage == pipe.stages - 1,
            group=None,
            device="cpu",
            submod=None,
        )
        for stage in placement.stages_of(0, pipe)
    ]
    planned = schedules.training(pipe.schedule, stages, pipe.microbatches, lambda output, target: output)
    passes = range(spec.train.accumulate)
    return [
        [
            (kind, stage, turn * pipe.microbatches + i)
            for turn in passes
            for action in planned.pipeline_order[rank]
            for kind, stage, i in _actions(action)
        ]
        for rank in range(pipe.ranks)
    ]


# What torch calls its computations; the rest moves or gathers, which costs nothing here.
KINDS = {
    "F": model.FORWARD,
    "B": model.BACKWARD,
    "I": model.INPUT,
    "W": model.WEIGHT,
}


def _actions(action: Any) -> Iterable[model.Action]:
    """torch's action, or the two it does at once, one after the other; None and what is no computation: none."""
    if action is None:
        return ()
    if action.sub_actions:
        return [one for part in action.sub_actions for one in _actions(part)]
    kind = KINDS.get(action.computation_type.value)
    return () if kind is None else ((kind, action.stage_index, action.microbatch_index),)


# --- other networks, other depths -----------------------------------------------------------------------------------


def _deepened(
    spec: RunSpec, stages: int, times: list[Times], forward: list[Message], backward: list[Message]
) -> tuple[list[Times], list[Message], list[Message]]:
    """A pipeline of `stages`: first and last stage as they are, between them the mean of those there are between (of
    the two, where there is none); every boundary as the one with the longest message."""
    if spec.pipeline.schedule not in SINGLE:
        raise UserError(f"--stages goes with one stage a rank, not with pipeline.schedule {spec.pipeline.schedule!r}.")
    if stages < 2:
        raise UserError(f"--stages {stages}: a pipeline has 2 or more.")
    if spec.pipeline.schedule == "1f1b" and spec.pipeline.microbatches < stages:
        raise UserError(
            f"pipeline.schedule '1f1b' needs a micro-batch a stage: --set pipeline.microbatches={stages} or more, and "
            "train.batch_size to a multiple of it."
        )
    between = times[1:-1] or times
    inner = Times(*(_mean(column) for column in zip(*between, strict=True)))
    widest = [max(own, key=lambda message: message.wire_bytes) for own in (forward, backward)]
    ahead, back = ([one] * (stages - 1) for one in widest)
    return [times[0], *[inner] * (stages - 2), times[-1]], ahead, back


def _regions(spec: RunSpec, setting: Setting) -> list[str] | None:
    """The region of each rank."""
    if setting.wan is None:
        return None
    ranks = setting.stages or spec.pipeline.ranks
    order: Sequence[str] = setting.wan.regions
    if setting.order == "best":
        size = 4 * max(math.prod(shape) for shape in message_shapes(spec))
        order = wan.best_order(setting.wan, ranks, size, spec.pipeline.microbatches * spec.train.accumulate)
    return wan.spread(order, ranks)


def _pairs(ranks: int, rank_of: Sequence[int] | None) -> Iterable[tuple[int, int]]:
    """The ordered pairs of ranks between which frames cross."""
    places = list(range(ranks)) if rank_of is None else list(rank_of)
    for one, other in itertools.pairwise(places):
        yield from ((one, other), (other, one))


def _between(found: wan.Wan, regions: Sequence[str], pairs: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Link]:
    return {(a, b): found.link(regions[a], regions[b]) for a, b in pairs if a != b}
