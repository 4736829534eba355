"""A discrete-event model of one training step of a pipeline: how long it takes, and what it waits for. Pure, no torch.

    rank 0   F0 e F1 e F2 e                  d B0 d B1 d B2      F, B: compute      e, d: encode, decode
    link         [===0===][===1===]...                          one message after the other, both directions at once
    rank 1                d F0 B0 e ...

A rank does what its schedule lists, one thing after the other: it waits for the message an action needs, decodes it,
computes, encodes what it gives and hands it over. Encoding and decoding are on the thread that computes, receives are
posted at the start of a step (harness/channel.py). A link serves what it is handed first in, first out. Every message
has one sender and one place in its sender's order, so nothing has to be sorted by time: ranks are carried on in any
order, each as far as its messages allow.

After the last backward: the exchange between data groups, then what synchronises the ranks (a global gradient norm),
then the optimizer. Seconds and bytes throughout.

>>> from thinpipe.harness.simulation.model import Times, orders
>>> quick = Pipeline((Times(1.0, 2.0),) * 4, orders("gpipe", 4, 4), microbatches=4)
>>> simulate(quick).step_time_s == (4 + 4 - 1) * (1.0 + 2.0), round(simulate(quick).bubble_fraction, 4)
(True, 0.4286)
"""

from __future__ import annotations

import math
from array import array
from collections import deque

from thinpipe.harness.simulation.model import (
    BACKWARD,
    FORWARD,
    INPUT,
    PARTS,
    WEIGHT,
    Action,
    Bucket,
    Link,
    LinkUse,
    Message,
    Pipeline,
    Prediction,
)

# In place of a message's predecessor on its link: it did not queue.
AT_ONCE = -2


def simulate(pipe: Pipeline, start_s: float = 0.0) -> Prediction:
    """The step that begins at `start_s`, which matters where links change with time. AssertionError for orders that
    wait for each other in a circle."""
    run = _Run(pipe, start_s)
    run.execute()
    return run.result()


def steps(pipe: Pipeline, count: int) -> list[Prediction]:
    """`count` steps, one after the other, from second 0 of the links' time."""
    found: list[Prediction] = []
    now = 0.0
    for _ in range(count):
        found.append(simulate(pipe, now))
        now += found[-1].step_time_s
    return found


def transfer_s(link: Link, size: float) -> float:
    """Seconds until the last byte of one message has left an idle link, its delay not counted."""
    handed = link.delay_s
    return _Line(link, 0.0, 0.0).carry(handed, size)[0] - handed


class _Line:
    """A link in use: when it is free, and the message that was on it last (-1: none)."""

    def __init__(self, link: Link, start_s: float, latency: float) -> None:
        """latency: seconds from a message's last byte leaving the link until its receiver can go on with it."""
        self.link, self.latency, self.last, self.count, self.total, self.busy = link, latency, -1, 0, 0.0, 0.0
        self.constant = link.rates[0][1] if len(link.rates) == 1 and link.bucket is None else None
        # A message leaves once the receiver has said that it waits for it, at the start of the step.
        self.free = start_s + link.delay_s
        self.debt = self.peak_debt = -math.inf

    def carry(self, handed: float, size: float) -> tuple[float, bool]:
        """(when the last byte of a message has left the link's far end but for its delay, whether it had to queue)."""
        self.count += 1
        self.total += size
        if self.constant is not None:
            start = handed if handed > self.free else self.free
            seconds = size / self.constant
            self.busy += seconds
            self.free = end = start + seconds
        elif self.link.bucket is None:
            start = max(handed, self.free)
            end = self._finish(start, size)
            self.free = end
        else:
            start, end = self._through(self.link.bucket, handed, size)
        return end, start > handed

    def _finish(self, start: float, size: float) -> float:
        """When `size` bytes that begin to leave at `start` have left, through the rates in between."""
        rates = self.link.rates
        left, now = size, start
        for (_, rate), (until, _) in zip(rates, [*rates[1:], (math.inf, 0.0)], strict=True):
            if until <= now:
                continue
            if left <= rate * (until - now):
                self.busy += now + left / rate - start
                return now + left / rate
            left, now = left - rate * (until - now), until
        raise AssertionError("the last rate has no end")

    def _through(self, bucket: Bucket, handed: float, size: float) -> tuple[float, float]:
        """By two buckets; a debt is when what was sent so far is paid for. A chunk leaves when both are paid, whatever
        its own size, so a message's last chunk is not waited for."""
        ((_, rate),) = self.link.rates
        top = bucket.peak * rate
        start = max(handed, self.free, self.debt, self.peak_debt)
        usual, peak = (
            max(self.debt, start - bucket.burst_bytes / rate),
            max(self.peak_debt, start - bucket.peak_bytes / top),
        )
        waited = size - (size % bucket.chunk_bytes or min(size, bucket.chunk_bytes))
        end = max(start, usual + waited / rate, peak + waited / top) if waited else start
        self.debt, self.peak_debt, self.free = usual + size / rate, peak + size / top, end
        self.busy += size / rate
        return start, end


class _Run:
    """State of one simulated step. An action has a number: (slot x stages + stage) x micro-batches + micro-batch."""

    def __init__(self, pipe: Pipeline, start_s: float) -> None:
        self.pipe, self.start_s = pipe, start_s
        self.num, self.m = len(pipe.stages), pipe.microbatches
        self.rank_of = list(pipe.rank_of) if pipe.rank_of is not None else list(range(self.num))
        size = 3 * self.num * self.m
        nothing = array("d", [math.inf])
        self.end = nothing * size  # of the action, its encoding included
        self.left = nothing * size  # its message has left the link
        self.arrived = nothing * size  # its message can be taken
        # What an action or a message came after: the number of an action, -1 = nothing.
        self.before = array("q", [-1]) * size  # the action before, on its rank
        self.queued = array("q", [-1]) * size  # the message before, on its link, where it had to queue for that
        self.halved = bytearray(size)  # whether it is the half backward that goes on
        self.waited = bytearray(size)  # whether the action began when its message came, not when its rank was free
        ranks = len(pipe.orders)
        self.clock, self.first = [start_s] * ranks, [start_s] * ranks
        self.latest = [-1] * ranks
        self.lines: dict[tuple[int, int], _Line] = {}
        boundaries = self.num - 1
        self.messages = [[m] * boundaries if isinstance(m, Message) else list(m) for m in (pipe.forward, pipe.backward)]
        assert all(len(own) == boundaries for own in self.messages), "a message a boundary"
        self._tables()

    # --- forward in time ---------------------------------------------------------------------------------------------

    def execute(self) -> None:
        """Carry every rank through its order."""
        orders = [iter(order) for order in self.pipe.orders]
        held: list[Action | None] = [next(order, None) for order in orders]
        waiting: dict[int, int] = {}
        ready = deque(range(len(orders)))
        arrived = self.arrived
        while ready:
            rank = ready.popleft()
            action = held[rank]
            while action is not None:
                kind, stage, i = action
                source = self.needs[kind][stage]
                if source >= 0:
                    source += i
                    if arrived[source] == math.inf:
                        waiting[source] = rank
                        break
                number = self.base[kind][stage] + i
                self._do(rank, kind, stage, number, source)
                if number in waiting:
                    ready.append(waiting.pop(number))
                action = next(orders[rank], None)
            held[rank] = action
        stuck = [f"rank {rank} at {action}" for rank, action in enumerate(held) if action is not None]
        assert not stuck, f"the orders wait for each other in a circle: {', '.join(stuck[:4])}"
        assert math.inf not in self.end[: 2 * self.num * self.m], (
            "every micro-batch goes forward and back, on every stage"
        )

    def _do(self, rank: int, kind: int, stage: int, number: int, source: int) -> None:
        """Execute one action whose message is there, and hand over what it gives."""
        start = self.clock[rank]
        if source >= 0 and self.arrived[source] > start:
            start = self.arrived[source]
            self.waited[number] = 1
        if self.latest[rank] < 0:
            self.first[rank] = start
        self.before[number], self.latest[rank] = self.latest[rank], number
        if kind == INPUT:
            self.halved[number] = 1
        end = start + self.takes[kind][stage]
        self.clock[rank] = self.end[number] = end
        to = self.sends[kind][stage]
        if to is not None:
            line, size = to
            left, queued = line.carry(end, size)
            self.left[number] = left
            self.queued[number] = line.last if queued else AT_ONCE
            self.arrived[number] = left + line.latency
            line.last = number
        elif kind != WEIGHT:
            # Nobody, or a stage on the same rank.
            self.arrived[number] = end

    def _tables(self) -> None:
        """What an action of a kind and stage takes, needs and sends: worked out once, not at each micro-batch."""
        stages = range(self.num)
        self.base = [[(slot * self.num + k) * self.m for k in stages] for slot in (0, 1, 1, 2)]
        before, after = (
            [self.base[slot][k] if 0 <= k < self.num else -1 for k in range(shift, self.num + shift)]
            for slot, shift in ((FORWARD, -1), (BACKWARD, 1))
        )
        self.needs = [before, after, after, [-1] * self.num]
        self.pieces = [[self._pieces(kind, k) for k in stages] for kind in range(4)]
        own = self.pipe.overheads.action_s
        self.takes = [[own + sum(pieces) for pieces in row] for row in self.pieces]
        forward, backward = self.messages
        onward = [self._sends(k, k + 1, forward[k].wire_bytes if k < len(forward) else 0.0) for k in stages]
        back = [self._sends(k, k - 1, backward[k - 1].wire_bytes if k else 0.0) for k in stages]
        self.sends: list[list[tuple[_Line, float] | None]] = [onward, back, back, [None] * self.num]

    def _pieces(self, kind: int, stage: int) -> tuple[float, float, float]:
        """(decode, compute, encode) seconds of an action."""
        times, rank = self.pipe.stages[stage], self.rank_of[stage]
        if kind == WEIGHT:
            return 0.0, times.backward_s / 2, 0.0
        forward, backward = self.messages
        before = stage > 0 and self.rank_of[stage - 1] != rank
        after = stage < self.num - 1 and self.rank_of[stage + 1] != rank
        if kind == FORWARD:
            decode = forward[stage - 1].decode_s if before else 0.0
            return decode, times.forward_s, forward[stage].encode_s if after else 0.0
        decode = backward[stage].decode_s if after else 0.0
        compute = times.backward_s / (2 if kind == INPUT else 1)
        return decode, compute, backward[stage - 1].encode_s if before else 0.0

    def _sends(self, stage: int, to: int, size: float) -> tuple[_Line, float] | None:
        """The line to the rank of stage `to`, and a message's bytes; None where there is none, or it is this one's."""
        if not 0 <= to < self.num or self.rank_of[to] == self.rank_of[stage]:
            return None
        pair = self.rank_of[stage], self.rank_of[to]
        if pair not in self.lines:
            link = self.pipe.links.get(pair, self.pipe.link)
            self.lines[pair] = _Line(link, self.start_s, link.delay_s + self.pipe.overheads.message_s)
        return self.lines[pair], size

    # --- what it came to ---------------------------------------------------------------------------------------------

    def result(self) -> Prediction:
        """The end of the step, and sums."""
        pipe, ranks = self.pipe, len(self.clock)
        exchange = [pipe.exchange_s] * ranks if isinstance(pipe.exchange_s, float | int) else list(pipe.exchange_s)
        updates = [0.0] * ranks
        for stage, rank in enumerate(self.rank_of):
            updates[rank] += pipe.stages[stage].optimizer_s
        gathered = [clock + more for clock, more in zip(self.clock, exchange, strict=True)]
        slowest = max(range(ranks), key=gathered.__getitem__)
        tail = [update + pipe.overheads.step_s for update in updates]
        if pipe.sync_s is not None:
            gathered = [gathered[slowest] + pipe.sync_s] * ranks
        ends = [ready + more for ready, more in zip(gathered, tail, strict=True)]
        final = max(range(ranks), key=ends.__getitem__)
        begins = slowest if pipe.sync_s is not None else final
        critical = self._critical(begins)
        critical["exchange"] += exchange[begins]
        critical["sync"] += pipe.sync_s or 0.0
        critical["optimizer"] += updates[final]
        critical["overhead"] += pipe.overheads.step_s
        step = ends[final] - self.start_s
        compute, codec = self._work()
        busy = [one + other for one, other in zip(compute, codec, strict=True)]
        makespan = max(self.clock) - min(self.first)
        return Prediction(
            step_time_s=step,
            makespan_s=makespan,
            compute_s=tuple(a + b for a, b in zip(compute, updates, strict=True)),
            codec_s=tuple(codec),
            idle_s=tuple(step - used - update for used, update in zip(busy, updates, strict=True)),
            bubble_fraction=1 - sum(busy) / (ranks * makespan) if makespan else 0.0,
            links=tuple(LinkUse(*pair, line.count, line.total, line.busy) for pair, line in sorted(self.lines.items())),
            critical_s=critical,
        )

    def _work(self) -> tuple[list[float], list[float]]:
        """(forward and backward, codec) seconds of each rank: every stage does both for every micro-batch."""
        compute, codec = [0.0] * len(self.clock), [0.0] * len(self.clock)
        for stage, rank in enumerate(self.rank_of):
            for kind in (FORWARD, BACKWARD):
                decode, own, encode = self.pieces[kind][stage]
                compute[rank] += self.m * own
                codec[rank] += self.m * (decode + encode)
        return compute, codec

    def _critical(self, rank: int) -> dict[str, float]:
        """Seconds by PARTS of the chain of events that ends with the last action of `rank`, followed back to the
        start of the step."""
        found = dict.fromkeys(PARTS, 0.0)
        number = self.latest[rank]
        while number >= 0:
            kind, stage, i = self._action(number)
            decode, compute, encode = self.pieces[kind][stage]
            found["compute"] += compute
            found["codec"] += decode + encode
            found["overhead"] += self.pipe.overheads.action_s
            number = (
                self._over_the_link(self.needs[kind][stage] + i, found) if self.waited[number] else self.before[number]
            )
        return found

    def _over_the_link(self, sender: int, found: dict[str, float]) -> int:
        """Follow the message of `sender` back to the action that the wait for it began with."""
        kind, stage, _ = self._action(sender)
        to = self.sends[kind][stage]
        if to is None:
            return sender
        found["overhead"] += self.pipe.overheads.message_s
        delay = to[0].link.delay_s
        found["delay"] += delay
        while True:
            before = self.queued[sender]
            if before == AT_ONCE:
                found["transfer"] += self.left[sender] - self.end[sender]
                return sender
            if before < 0:
                # It waited for the receiver's word that it may come, from the start of the step.
                found["transfer"] += self.left[sender] - self.start_s - delay
                found["delay"] += delay
                return -1
            found["transfer"] += self.left[sender] - self.left[before]
            sender = before

    def _action(self, number: int) -> Action:
        """Kind, stage and micro-batch of an action's number."""
        rest, i = divmod(number, self.m)
        slot, stage = divmod(rest, self.num)
        return (FORWARD, INPUT if self.halved[number] else BACKWARD, WEIGHT)[slot], stage, i
