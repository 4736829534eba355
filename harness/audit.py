"""Pair assertions of a run: requested = effective, bytes counted twice, links as asked, cores enough. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from thinpipe.harness import regimes
from thinpipe.harness.dotted import flat
from thinpipe.harness.errors import RunError
from thinpipe.harness.models.base import resolve
from thinpipe.harness.pipeline import partition, placement
from thinpipe.harness.spec import RunSpec
from thinpipe.netem.link import SEGMENT_HEADER_BYTES

WIRE_TOLERANCE = 0.002
# A few acknowledgements may leave between reading TCP's counters and the queue's.
LATE_SEGMENTS = 30
RUN_QUEUE_LIMIT_PCT = 5.0
# As much as a link may be off: a replay's passes are given, like its links.
OVERRUN_LIMIT_PCT = 2.0
# What a rank reads back of each schedule and optimizer.
SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "interleaved-zb": "ScheduleInterleavedZeroBubble",
    "zbv-zb": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD"}
COMPARED = ("threads", "dtype", "compute", "autocast", "seed", "schedule", "optimizer", "exchange")


def requested(spec: RunSpec) -> dict[str, Any]:
    """The settings every rank must read back."""
    compressors = {
        f"{group}/{direction}/{boundary}": sorted(regimes.texts(spec, direction, boundary))
        for group in range(spec.data_parallel.groups)
        for direction in regimes.DIRECTIONS
        for boundary in placement.boundaries(spec.pipeline)
    }
    parts = partition.split(resolve(spec.model, spec.task), spec.pipeline.stages, spec.pipeline.cuts)
    return {
        "threads": 1,
        "dtype": "float32",
        "compute": spec.compute,
        "autocast": {"none": "None", "bf16": "bfloat16"}[spec.train.autocast],
        "seed": spec.seed,
        "schedule": SCHEDULES[spec.pipeline.schedule],
        "optimizer": "QuantizedAdam"
        if spec.data_parallel.exchange == "quantized-adam"
        else OPTIMIZERS[spec.train.optimizer],
        "exchange": spec.data_parallel.exchange,
        "compressors": compressors,
        "stages": {str(part.index): [part.blocks[0], part.blocks[-1]] for part in parts},
    }


def compare_settings(asked: Mapping[str, Any], effective: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise RunError naming the first setting that a rank reads back otherwise."""
    for rank, found in effective.items():
        if found["spec"] != effective[0]["spec"]:
            raise RunError(f"rank {rank} was started with other settings than rank 0: {_differences(effective, rank)}")
        for name in COMPARED:
            if found[name] != asked[name]:
                raise RunError(f"rank {rank}: {name} was to be {asked[name]!r}, but is {found[name]!r}")
        for channel, names in found["compressors"].items():
            if names != asked["compressors"].get(channel):
                raise RunError(
                    f"rank {rank}, {channel}: the compressors were to be {asked['compressors'].get(channel)}, "
                    f"but are {names}"
                )
        for stage, blocks in found["stages"].items():
            if blocks != asked["stages"][stage]:
                raise RunError(
                    f"rank {rank}: stage {stage} was to hold blocks {asked['stages'][stage]}, but has {blocks}"
                )
    for what, name in (("a channel for", "compressors"), ("stage", "stages")):
        there = {key for found in effective.values() for key in found[name]}
        if missing := sorted(set(asked[name]) - there):
            raise RunError(f"no rank has {what} {', '.join(missing)}")
    for name in ("steps", "data", "resumed_from"):
        values = {rank: found[name] for rank, found in effective.items()}
        if any(value != values[0] for value in values.values()):
            raise RunError(f"the ranks disagree about their {name}: {values}")


def _differences(effective: Mapping[int, Mapping[str, Any]], rank: int) -> str:
    """The settings in which a rank's spec is not rank 0's."""
    first, other = (flat(effective[r]["spec"]) for r in (0, rank))
    keys = sorted(key for key in {*first, *other} if first.get(key) != other.get(key))
    shown = [f"{key} {other.get(key, 'its default')!r} instead of {first.get(key, 'its default')!r}" for key in keys]
    return "; ".join(shown)


def compare_digests(reports: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise RunError unless the two ends of every channel hold the same shared memory at the end of the run."""
    ends: dict[str, dict[int, str]] = defaultdict(dict)
    for rank, report in reports.items():
        for memory, digest in report["digests"].items():
            ends[memory][rank] = digest
    for memory, held in ends.items():
        if len(held) != 2 or len(set(held.values())) != 1:
            raise RunError(f"{memory}: the two ends' memories differ at the end of the run: {held}")


def wire_bytes(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Bytes through the leaf queues of each host between two readings. Raises RunError when a queue was replaced."""
    at = {(row["host"], row["destination"]): row["bytes"] for row in before}
    total: dict[int, int] = defaultdict(int)
    for row in after:
        key = row["host"], row["destination"]
        if key not in at or row["bytes"] < at[key]:
            raise RunError(f"the queue of host {key[0]} towards {key[1]} was replaced while the run was measured")
        total[row["host"]] += row["bytes"] - at[key]
    return dict(total)


def compare_bytes(per_host: Mapping[int, int], reports: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Leaf-queue bytes = TCP bytes + header x segments, within 0.2 %, host by host; RunError if not."""
    rows = []
    for rank, report in sorted(reports.items()):
        expected = report["tcp_bytes"] + SEGMENT_HEADER_BYTES * report["segments"]
        found = per_host[rank]
        slack = WIRE_TOLERANCE * expected + LATE_SEGMENTS * SEGMENT_HEADER_BYTES
        rows.append(
            {
                "host": rank,
                "wire_bytes": found,
                "tcp_bytes": report["tcp_bytes"],
                "segments": report["segments"],
                "expected_wire_bytes": expected,
                "retransmitted_bytes": report["retransmitted_bytes"],
                "sync_bytes": report["sync_bytes"],
                "gloo_added_bytes": report["gloo_added_bytes"],
            }
        )
        if abs(found - expected) > slack:
            raise RunError(
                f"host {rank}: its queue sent {found} B, but TCP's counters say {expected} B "
                f"({report['tcp_bytes']} B in {report['segments']} segments): traffic went another way"
            )
    return rows


def fidelity(
    spec: RunSpec,
    run_queue_pct: float | None,
    calibration: Sequence[Mapping[str, Any]],
    overrun_pct: float | None = None,
) -> dict[str, list[str]]:
    """Why a run's times must not be trusted: cpu-bound, link-off; empty lists when they may. overrun_pct: of a
    replay."""
    reasons = []
    if run_queue_pct is not None and run_queue_pct > RUN_QUEUE_LIMIT_PCT:
        reasons.append(f"a rank waited {run_queue_pct:.1f} % of its steps for a core (limit {RUN_QUEUE_LIMIT_PCT:g} %)")
    if overrun_pct is not None and overrun_pct > OVERRUN_LIMIT_PCT:
        reasons.append(
            f"a rank's replay waits were overrun by {overrun_pct:.1f} %: what it does beside them takes longer than "
            f"the profile's passes (limit {OVERRUN_LIMIT_PCT:g} %)"
        )
    flags = ["cpu-bound"] if reasons else []
    off = [link for link in calibration if not link["ok"]]
    if off:
        flags.append("link-off")
        reasons += [f"link {link['source']} to {link['destination']}: {link['reason']}" for link in off]
    elif not calibration and spec.world_size > 1:
        flags.append("link-off")
        reasons.append("the links were not calibrated")
    return {"flags": flags, "reasons": reasons}


def worst_link(calibration: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """The slowest measured rate and the longest round trip of all links."""
    if not calibration:
        return {"measured_rate_mbit": None, "measured_rtt_ms": None}
    return {
        "measured_rate_mbit": min(link["measured_rate_mbit"] for link in calibration),
        "measured_rtt_ms": max(link["rtt_ms"] for link in calibration),
    }
