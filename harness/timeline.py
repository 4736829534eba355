"""What a step's spans say of the pipeline: frames on their way, bubble, overlap. Formulas: docs/numbers.md.

Pure. Spans are rows of metrics.SPANS, of all ranks of a run or of one; a DataFrame will do.

    sender     encode|send   encode|send
    link             [== frame 0 ==][== frame 1 ==]
    receiver   -- waits ----------->|decode ...    -->|decode        (not seen: it came while it computed)

No one sees a frame arrive but the receiver, and only while it waits for it. So a frame is taken to be on its way from
when it was handed over, or when the frame before it had arrived (a link carries one after the other), until the
receiver's wait for it ended; where the receiver did not have to wait, for as long as the frames took that were seen,
and not past the time at which it was taken.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

COMPUTE = ("forward_compute", "backward_compute")
BUSY = (*COMPUTE, "encode", "decode", "optimizer")
PIPELINE = (*COMPUTE, "encode", "decode")
# A receive that took less than this found its frame there already.
SEEN_S = 1e-4

Spans = Iterable[Mapping[str, Any]] | Any
Interval = tuple[float, float]


@dataclass(frozen=True)
class Frame:
    """One frame on its way. sender, receiver: global ranks; sent_s: handed over; start_s: the link was free for it;
    arrived_s: see the top; waited_s, taken_s: start and end of the receiver's wait; seen: whether it was there when
    the frame arrived."""

    step: int
    microbatch: int
    direction: str
    boundary: int
    sender: int
    receiver: int
    sent_s: float
    start_s: float
    arrived_s: float
    waited_s: float
    taken_s: float
    seen: bool


class Fractions(NamedTuple):
    """bubble: share of the ranks' time in a step's pipeline in which they neither computed nor coded; overlap: share of
    the time with a frame on its way to or from a rank in which that rank computed or coded (None: no frames)."""

    step: int
    bubble: float
    overlap: float | None


# --- spans, in steps ---


def by_step(
    spans: Spans, steps: range | None = None, offsets: Mapping[int, float] | None = None
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """(step, its spans by start), steps ascending; only those in `steps`. offsets: seconds by which a rank's clock is
    ahead of the others' (ranks of one machine share theirs)."""
    for step, own in _grouped(spans):
        if steps is None or step in steps:
            aligned = []
            for row in own:
                ahead = 0.0 if offsets is None else offsets.get(row["rank"], 0.0)
                aligned.append({**row, "start_s": row["start_s"] - ahead, "end_s": row["end_s"] - ahead})
            yield step, sorted(aligned, key=lambda row: row["start_s"])


def _grouped(spans: Spans) -> Iterable[tuple[int, Iterable[Mapping[str, Any]]]]:
    if hasattr(spans, "groupby"):
        # A step at a time: as mappings all of a long run's spans would take many times their room.
        return ((int(step), _records(frame)) for step, frame in spans.groupby("step"))
    found: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for row in spans:
        found[row["step"]].append(row)
    return sorted(found.items())


def _records(frame: Any) -> list[dict[str, Any]]:
    """The rows of a DataFrame; an empty value, which makes a column of numbers one of floats, is None."""
    rows = frame.to_dict("records")
    for row in rows:
        for name in ("direction", "boundary", "stage"):
            value = row[name]
            if value is None or (isinstance(value, float) and math.isnan(value)):
                row[name] = None
            elif name != "direction":
                row[name] = int(value)
    return rows


def frames(step: Sequence[Mapping[str, Any]], ranks: int, pace: dict[Any, float] | None = None) -> list[Frame]:
    """The frames of one step, by hand-over. ranks: of one pipeline, so that data groups are told apart.

    pace: seconds a frame takes by (sender, boundary, direction), kept from step to step for those in which none was
    seen to arrive. A frame whose other end is not among the spans is left out.
    """
    pace = {} if pace is None else pace
    sends: dict[Any, Any] = {}
    receives: dict[Any, Any] = {}
    for row in step:
        if row["phase"] in ("send", "wait_receive"):
            side = sends if row["phase"] == "send" else receives
            key = (row["rank"] // ranks, row["boundary"], row["direction"], row["microbatch"])
            assert key not in side, f"two spans {row['phase']} of (group, boundary, direction, micro-batch) {key}"
            side[key] = row
    links: dict[Any, list[Frame]] = defaultdict(list)
    for key in sorted(sends.keys() & receives.keys(), key=lambda key: sends[key]["start_s"]):
        sent, taken = sends[key], receives[key]
        seen = taken["end_s"] - max(taken["start_s"], sent["start_s"]) >= SEEN_S
        links[sent["rank"], key[1], key[2]].append(
            Frame(
                step=sent["step"],
                microbatch=sent["microbatch"],
                direction=sent["direction"],
                boundary=sent["boundary"],
                sender=sent["rank"],
                receiver=taken["rank"],
                sent_s=sent["start_s"],
                start_s=sent["start_s"],
                arrived_s=max(sent["start_s"], taken["end_s"]),
                waited_s=taken["start_s"],
                taken_s=taken["end_s"],
                seen=seen,
            )
        )
    return [frame for link, on_it in links.items() for frame in _in_turn(on_it, link, pace)]


def _in_turn(on_link: Sequence[Frame], link: Any, pace: dict[Any, float]) -> Iterator[Frame]:
    """One link's frames, each with when it had the link to itself."""
    known = [
        frame.arrived_s - max(frame.sent_s, before.arrived_s if before else frame.sent_s)
        for before, frame in zip([None, *on_link], on_link, strict=False)
        # A frame that left while an unseen one may have been on the link tells nothing.
        if frame.seen and (before is None or before.seen or frame.sent_s >= before.taken_s)
    ]
    if known:
        pace[link] = statistics.median(known)
    free = -math.inf
    for frame in on_link:
        start = min(max(frame.sent_s, free), frame.arrived_s)
        free = frame.arrived_s if frame.seen else min(frame.arrived_s, start + pace.get(link, 0.0))
        yield replace(frame, start_s=start, arrived_s=free)


# --- fractions ---


def fractions(
    spans: Spans, ranks: int, steps: range | None = None, offsets: Mapping[int, float] | None = None
) -> list[Fractions]:
    """Bubble and overlap of each step. ranks: of one pipeline."""
    pace: dict[Any, float] = {}
    found = []
    for step, own in by_step(spans, steps, offsets):
        bubble = _bubble(own, ranks)
        if bubble is not None:
            found.append(Fractions(step, bubble, _overlap(own, frames(own, ranks, pace))))
    return found


def medians(found: Iterable[Fractions], steps: Iterable[int]) -> dict[str, float | None]:
    """bubble_fraction and overlap_fraction of a run: medians over `steps` (the measured ones); None without any."""
    wanted = set(steps)
    mine = [one for one in found if one.step in wanted]
    overlaps = [one.overlap for one in mine if one.overlap is not None]
    return {
        "bubble_fraction": statistics.median(one.bubble for one in mine) if mine else None,
        "overlap_fraction": statistics.median(overlaps) if overlaps else None,
    }


def ideal_bubble(ranks: int, microbatches: int) -> float:
    """GPipe's bubble (Huang et al. 2019, section 2.3): equal stages, free transfers, no synchronisation.

    >>> ideal_bubble(4, 4)
    0.42857142857142855
    """
    return (ranks - 1) / (microbatches + ranks - 1)


def _bubble(step: Sequence[Mapping[str, Any]], ranks: int) -> float | None:
    """1 - busy time / (ranks x makespan), data groups added up; the makespan is a group's first to last work."""
    groups: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for row in step:
        if row["phase"] in PIPELINE:
            groups[row["rank"] // ranks].append(row)
    total = busy = 0.0
    for own in groups.values():
        total += ranks * (max(row["end_s"] for row in own) - min(row["start_s"] for row in own))
        by_rank = _intervals((row["rank"], row) for row in own)
        busy += sum(length(union(intervals)) for intervals in by_rank.values())
    return 1 - busy / total if total else None


def _overlap(step: Sequence[Mapping[str, Any]], sent: Sequence[Frame]) -> float | None:
    busy = _intervals((row["rank"], row) for row in step if row["phase"] in BUSY)
    moving: dict[int, list[Interval]] = defaultdict(list)
    for frame in sent:
        for rank in (frame.sender, frame.receiver):
            moving[rank].append((frame.start_s, frame.arrived_s))
    on_way = {rank: union(intervals) for rank, intervals in moving.items()}
    total = sum(length(intervals) for intervals in on_way.values())
    hidden = sum(length(common(intervals, union(busy[rank]))) for rank, intervals in on_way.items())
    return hidden / total if total else None


def _intervals(pairs: Iterable[tuple[int, Mapping[str, Any]]]) -> dict[int, list[Interval]]:
    found: dict[int, list[Interval]] = defaultdict(list)
    for rank, row in pairs:
        found[rank].append((row["start_s"], row["end_s"]))
    return found


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """What the intervals cover, in disjoint ones, ascending.

    >>> union([(2, 3), (0, 1), (1, 2), (5, 6)])
    [(0, 3), (5, 6)]
    """
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def common(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """What two lists of disjoint ascending intervals share.

    >>> common([(0, 4), (6, 9)], [(1, 2), (3, 7)])
    [(1, 2), (3, 4), (6, 7)]
    """
    shared, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            shared.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return shared


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
