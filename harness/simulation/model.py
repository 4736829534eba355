"""What steps.py takes and gives: stages, messages, links, orders, a step predicted. Seconds, bytes. No torch.

>>> [list(order) for order in orders("1f1b", 2, 2)][1]
[(0, 1, 0), (1, 1, 0), (0, 1, 1), (1, 1, 1)]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# Kinds of action. A full backward, or its two halves: the gradient of the input, which goes on, and of the weights.
FORWARD, BACKWARD, INPUT, WEIGHT = range(4)
#: What a step's critical path is made of.
PARTS = ("compute", "codec", "overhead", "transfer", "delay", "exchange", "sync", "optimizer")

Action = tuple[int, int, int]  # kind, stage, micro-batch
Direction = str  # "forward" or "backward"


class Times(NamedTuple):
    """Seconds of one stage: forward and backward of a micro-batch, the optimizer of a step."""

    forward_s: float
    backward_s: float
    optimizer_s: float = 0.0


@dataclass(frozen=True)
class Message:
    """What crosses a boundary in one direction, for one micro-batch: bytes on the wire, seconds to code it."""

    wire_bytes: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True)
class Bucket:
    """What a token bucket lets through at once: `burst_bytes` at the link's rate and `peak_bytes` at `peak` x the rate,
    both full after a pause, and always the last chunk of a message. A shaped link is that much faster than a real one
    for a short message."""

    burst_bytes: float
    peak_bytes: float
    peak: float
    chunk_bytes: float


@dataclass(frozen=True)
class Link:
    """One direction between two ranks. rates: (from second, bytes a second), the first from 0.0, in order: constant in
    between; inf = no limit. bucket: of a link that a token bucket shapes (its rate is one)."""

    rates: tuple[tuple[float, float], ...] = ((0.0, math.inf),)
    delay_s: float = 0.0
    bucket: Bucket | None = None

    def __post_init__(self) -> None:
        times = [since for since, _ in self.rates]
        assert times[:1] == [0.0], "rates begin at 0.0"
        assert times == sorted(set(times)), "rates follow each other"
        assert all(rate > 0 for _, rate in self.rates), "a rate is above 0"
        assert self.bucket is None or len(self.rates) == 1, "a bucket has one rate"


@dataclass(frozen=True)
class Overheads:
    """Seconds that no other number has: a rank's work around each action, from a message's arrival until its receiver
    goes on, and a rank's work around a step."""

    action_s: float = 0.0
    message_s: float = 0.0
    step_s: float = 0.0


@dataclass(frozen=True)
class Pipeline:
    """One step of one pipeline.

    stages: seconds of each; orders: what each rank does, in order; microbatches: of the whole step, all passes;
    rank_of: the rank of each stage (None: stage k on rank k); forward, backward: boundary k's message, one for all or
    one each; links: (sending rank, receiving rank) -> Link, `link` where there is none; exchange_s: seconds of the
    exchange between data groups, one for all ranks or one each; sync_s: seconds that it takes all ranks to hear of each
    other before the optimizer, None where they do not.
    """

    stages: Sequence[Times]
    orders: Sequence[Iterable[Action]]
    microbatches: int
    rank_of: Sequence[int] | None = None
    forward: Message | Sequence[Message] = Message()
    backward: Message | Sequence[Message] = Message()
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    link: Link = Link()
    exchange_s: float | Sequence[float] = 0.0
    sync_s: float | None = 0.0
    overheads: Overheads = Overheads()


@dataclass(frozen=True)
class LinkUse:
    """What one direction between two ranks carried in the step. busy_s: seconds it takes at the link's rate."""

    source: int
    destination: int
    messages: int
    wire_bytes: float
    busy_s: float


@dataclass(frozen=True)
class Prediction:
    """A step. compute_s (with the optimizer), codec_s, idle_s: by rank; bubble_fraction, as docs/numbers.md has it:
    1 - compute and codec / (ranks x makespan), the optimizer left out; critical_s: where the seconds of the longest
    chain of events go, by PARTS; they add up to step_time_s."""

    step_time_s: float
    makespan_s: float
    compute_s: tuple[float, ...]
    codec_s: tuple[float, ...]
    idle_s: tuple[float, ...]
    bubble_fraction: float
    links: tuple[LinkUse, ...]
    critical_s: Mapping[str, float]

    @property
    def busiest(self) -> LinkUse | None:
        """The link that is busy for longest; None where nothing crossed one."""
        return max(self.links, key=lambda use: use.busy_s, default=None)


def orders(schedule: str, stages: int, microbatches: int, passes: int = 1) -> list[Iterable[Action]]:
    """What each rank does, one stage a rank, by torch's `gpipe` or `1f1b`; `microbatches` of each pass."""
    made = {"gpipe": _gpipe, "1f1b": _1f1b}[schedule]
    return [_Order(made, stage, stages, microbatches, passes) for stage in range(stages)]


def ring_s(num_bytes: float, groups: int, link: Link, message_s: float = 0.0) -> float:
    """Seconds of a ring all-reduce in which a rank sends `num_bytes` in 2 (groups - 1) rounds."""
    rounds = 2 * (groups - 1)
    return num_bytes / link.rates[0][1] + rounds * (link.delay_s + message_s)


@dataclass(frozen=True)
class _Order:
    """An order that is made when it is read: of thousands of stages a list would take gigabytes."""

    made: Callable[[int, int], Iterator[tuple[int, int]]]
    stage: int
    stages: int
    microbatches: int
    passes: int

    def __iter__(self) -> Iterator[Action]:
        for turn in range(self.passes):
            for kind, i in self.made(self.stages - self.stage, self.microbatches):
                yield kind, self.stage, turn * self.microbatches + i


def _gpipe(left: int, microbatches: int) -> Iterator[tuple[int, int]]:
    for kind in (FORWARD, BACKWARD):
        for i in range(microbatches):
            yield kind, i


def _1f1b(left: int, microbatches: int) -> Iterator[tuple[int, int]]:
    """left: stages from this one to the last. As many forwards as these, then in turn, then the rest."""
    ahead = min(left, microbatches)
    for i in range(ahead):
        yield FORWARD, i
    for i in range(microbatches):
        yield BACKWARD, i
        if i + ahead < microbatches:
            yield FORWARD, i + ahead
