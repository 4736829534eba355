"""The spans of a run as a Chrome trace: chrome://tracing and ui.perfetto.dev open it. Pure but for `write`.

A process is a rank, its threads are ROWS, in this order. Times are us from the first span's start. A frame is drawn in
its sender's row as what it took on the link (timeline.py), not as the moment it was handed over; an arrow leads from
there to the receive that took it. One rank's spans alone have no arrows, and its sends are what they took to hand over.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from thinpipe.harness.timeline import Frame, Spans, by_step, frames

ROWS = (
    "forward receive",
    "forward compute",
    "forward send",
    "backward receive",
    "backward compute",
    "backward send",
    "codec",
    "optimizer",
)
# Phase, or phase and direction -> the row it is drawn in. A frame's `send` is drawn as what it takes on the link.
PLACES = {
    "forward_compute": "forward compute",
    "backward_compute": "backward compute",
    "encode": "codec",
    "decode": "codec",
    "optimizer": "optimizer",
    "sync": "optimizer",
    "wait_receive": "{} receive",
    "wait_send": "{} send",
    "send": "{} send",
}
# Names of colours that Chrome's viewer knows; others choose their own.
COLOURS = {
    "forward_compute": "thread_state_running",
    "backward_compute": "thread_state_iowait",
    "encode": "rail_animation",
    "decode": "rail_load",
    "optimizer": "startup",
    "sync": "rail_idle",
    "wait_receive": "grey",
    "wait_send": "grey",
    "send": "rail_response",
}


def chrome_trace(
    spans: Spans, ranks: int, *, steps: range | None = None, offsets: Mapping[int, float] | None = None
) -> dict[str, Any]:
    """The trace as one object (JSON Object Format of the Trace Event Format). See `write` for long runs."""
    return {"displayTimeUnit": "ms", "traceEvents": list(events(spans, ranks, steps=steps, offsets=offsets))}


def write(
    path: Path, spans: Spans, ranks: int, *, steps: range | None = None, offsets: Mapping[int, float] | None = None
) -> int:
    """Write the trace, an event a line, by atomic rename; returns the number of events. Raises OSError."""
    part = path.with_name(f".{path.name}.part")
    count = 0
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [')
            for count, event in enumerate(events(spans, ranks, steps=steps, offsets=offsets), 1):
                file.write(",\n" if count > 1 else "\n")
                file.write(json.dumps(event, separators=(",", ":")))
            file.write("\n]}\n")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return count


def events(
    spans: Spans, ranks: int, *, steps: range | None = None, offsets: Mapping[int, float] | None = None
) -> Iterator[dict[str, Any]]:
    """Events of the trace. ranks: of one pipeline; steps: None = all. Times in us from the first span's start."""
    origin: float | None = None
    pace: dict[Any, float] = {}
    flows = itertools.count(1)
    for _, own in by_step(spans, steps, offsets):
        if origin is None:
            origin = own[0]["start_s"]
            yield from _metadata(own, origin)
        sent = frames(own, ranks, pace)
        whole = {(frame.sender, frame.boundary, frame.direction, frame.microbatch) for frame in sent}
        last = {(frame.sender, frame.direction): frame.arrived_s for frame in sorted(sent, key=_arrival)}
        for row in own:
            if row["phase"] == "send" and _key(row) in whole:
                continue
            start = row["start_s"]
            if row["phase"] == "wait_send":
                # What of it a frame on the link does not show; bars of one row must not overlap.
                start = max(start, last.get((row["rank"], row["direction"]), start))
                if start >= row["end_s"]:
                    continue
            yield _complete(row, start, row["end_s"], origin)
        for frame in sent:
            yield from _transfer(frame, next(flows), origin)


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["rank"], row["boundary"], row["direction"], row["microbatch"]


def _arrival(frame: Frame) -> float:
    return frame.arrived_s


def _metadata(step: Sequence[Mapping[str, Any]], origin: float) -> Iterator[dict[str, Any]]:
    """Names and order of processes and rows, as the first step has them."""
    stages: dict[int, set[int]] = defaultdict(set)
    for row in step:
        stages[row["rank"]] |= {row["stage"]} - {None}
    yield {"ph": "M", "name": "trace_origin", "pid": 0, "args": {"CLOCK_MONOTONIC_s": origin}}
    for rank, own in sorted(stages.items()):
        listed = ", ".join(map(str, sorted(own)))
        name = f"rank {rank} (stage{'s' if len(own) > 1 else ''} {listed})" if own else f"rank {rank}"
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        for tid, title in enumerate(ROWS, 1):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": f"{tid} {title}"}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": tid, "args": {"sort_index": tid}}


def _us(time_s: float, origin: float) -> float:
    return round((time_s - origin) * 1e6, 3)


def _complete(row: Mapping[str, Any], start_s: float, end_s: float, origin: float, **more: Any) -> dict[str, Any]:
    """A bar. Both ends are rounded, not its length: bars that touch must not overlap by a rounding."""
    start = _us(start_s, origin)
    there = {name: row[name] for name in ("step", "microbatch", "stage", "boundary") if row.get(name) not in (None, -1)}
    phase, number = row["phase"], row["microbatch"]
    return {
        "ph": "X",
        "name": phase if number < 0 else f"{phase} {number}",
        "cat": phase,
        "pid": row["rank"],
        "tid": 1 + ROWS.index(PLACES[phase].format(row["direction"])),
        "ts": start,
        "dur": round(_us(end_s, origin) - start, 3),
        "cname": COLOURS[phase],
        "args": there | more,
    }


def _transfer(frame: Frame, number: int, origin: float) -> Iterator[dict[str, Any]]:
    """A frame as a bar of its sender, and the arrow to the receive that took it."""
    row = {
        "rank": frame.sender,
        "step": frame.step,
        "microbatch": frame.microbatch,
        "phase": "send",
        "direction": frame.direction,
        "boundary": frame.boundary,
    }
    queued = round((frame.start_s - frame.sent_s) * 1e6, 3)
    arrival = "seen" if frame.seen else "estimated"
    yield _complete(row, frame.start_s, frame.arrived_s, origin, queued_us=queued, arrival=arrival)
    flow = {"name": f"{frame.direction} frame", "cat": "frame", "id": number}
    sender, receiver = (1 + ROWS.index(f"{frame.direction} {end}") for end in ("send", "receive"))
    yield flow | {"ph": "s", "pid": frame.sender, "tid": sender, "ts": _us(frame.start_s, origin)}
    # An arrow ends inside the wait, and never before it began.
    end = min(max(frame.waited_s, frame.start_s), frame.taken_s)
    yield flow | {"ph": "f", "bp": "e", "pid": frame.receiver, "tid": receiver, "ts": _us(end, origin)}


def faults(trace: Mapping[str, Any]) -> list[str]:
    """What is wrong with a trace as read back from its JSON: bars without length or that overlap in a row, and arrows
    without two ends, that start or end outside a bar, or run back in time. [] = it is whole."""
    wrong: list[str] = []
    bars: dict[tuple[int, int], list[tuple[float, float, str]]] = defaultdict(list)
    ends: dict[Any, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            bars[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
            if not (math.isfinite(event["ts"]) and event["dur"] >= 0):
                wrong.append(f"bar {event['name']} has no length: {event}")
        elif event["ph"] in "sf":
            if event["ph"] in ends[event["id"]]:
                wrong.append(f"arrow {event['id']} has two ends {event['ph']}")
            ends[event["id"]][event["ph"]] = event
    tolerance = 2e-3  # of sums of rounded times
    for row, own in bars.items():
        for (_, end, one), (start, _, other) in itertools.pairwise(sorted(own)):
            if start < end - tolerance:
                wrong.append(f"bars {one} and {other} overlap in row {row}")
    for number, both in ends.items():
        if set(both) != {"s", "f"}:
            wrong.append(f"arrow {number} has one end only")
            continue
        if both["f"]["ts"] < both["s"]["ts"]:
            wrong.append(f"arrow {number} runs back in time")
        for event in both.values():
            own = bars[event["pid"], event["tid"]]
            if not any(start - tolerance <= event["ts"] <= end + tolerance for start, end, _ in own):
                wrong.append(f"arrow {number} ends outside a bar")
    return wrong
