"""What averaging gradients between data groups costs on the wire: bytes and messages of one rank, worked out.

torch-free, so that a plan can be made from parameter shapes alone; tests/unit/test_data_parallel.py holds every
formula against the kernel's counters.

    none, fp16, bf16    gloo's ring all-reduce of each DDP bucket        2 (D-1)/D x elements x itemsize
    powersgd            as none in the first POWERSGD_START steps; then the same ring for what is not compressed,
                        for all P together, and for all Q together
    quantized-adam      as none (one bucket) while warming up; then      2 (D-1)/D x elements x (bits/8 + 2/512)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from thinpipe.harness.spec import DataParallelSpec

MIB = 2**20
#: DDP's own sizes: a small first bucket, so that the exchange begins early, then large ones.
BUCKET_BYTES = (MIB, 25 * MIB)
#: gloo never sends a longer piece of a ring all-reduce.
SEGMENT_BYTES = MIB
#: The least torch allows: bucket layouts are settled by then. Error feedback needs no longer warm-up.
POWERSGD_START = 2
#: A matrix is approximated where that takes less than 1/2 of its elements (torch's default).
POWERSGD_GAIN = 2
#: Elements that share a scale in a quantised exchange (AC-SGD's bucket), and a scale's bytes.
GROUP = 512
SCALE_BYTES = 2

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Traffic:
    """What one rank sends, and the messages it takes (gloo answers each)."""

    num_bytes: int = 0
    sent: int = 0
    received: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.num_bytes + other.num_bytes, self.sent + other.sent, self.received + other.received)

    def on_the_wire(self, added: tuple[int, int]) -> int:
        """TCP payload bytes; added: what gloo adds to a message at its sender and at its receiver (Links.added)."""
        return self.num_bytes + added[0] * self.sent + added[1] * self.received


def step_traffic(shapes: Sequence[Shape], parallel: DataParallelSpec, rank: int, *, compressed: bool = True) -> Traffic:
    """Of one optimizer step, for the trainable parameters of one stage, in the module's order.

    rank: within the data group. compressed: False in the first POWERSGD_START steps of powersgd and in the warm-up of
    quantized-adam. quantized-adam exchanges all stages of a rank as one: give it their shapes together.
    """
    size = parallel.groups
    if size == 1:
        return Traffic()
    count = sum(math.prod(shape) for shape in shapes)
    if parallel.exchange == "quantized-adam":
        return quantized(count, parallel.bits, size) if compressed else ring(count, 4, rank, size)
    if parallel.exchange == "powersgd":
        parts = low_rank_parts(shapes, parallel.matrix_rank) if compressed else (count,)
        return sum((ring(part, 4, rank, size) for part in parts), Traffic())
    itemsize = 4 if parallel.exchange == "none" else 2
    return sum((ring(part, itemsize, rank, size) for part in buckets(shapes)), Traffic())


def buckets(shapes: Sequence[Shape]) -> list[int]:
    """Elements of DDP's buckets in the order they leave: filled from the last parameter back, closed when full."""
    done: list[int] = []
    now = 0
    for shape in reversed(shapes):
        now += math.prod(shape)
        if 4 * now >= BUCKET_BYTES[min(len(done), 1)]:
            done.append(now)
            now = 0
    return [*done, now] if now else done


def low_rank_parts(shapes: Sequence[Shape], matrix_rank: int) -> tuple[int, int, int]:
    """Elements of PowerSGD's three all-reduces: what stays whole, all P, all Q."""
    whole = ps = qs = 0
    for shape in shapes:
        rows, columns = shape[0], math.prod(shape[1:])
        rank = min(rows, columns, matrix_rank)
        if (rows + columns) * rank * POWERSGD_GAIN < rows * columns:
            ps += rows * rank
            qs += columns * rank
        else:
            whole += rows * columns
    return whole, ps, qs


def ring(elements: int, itemsize: int, rank: int, size: int) -> Traffic:
    """gloo's ring all-reduce: every rank passes size - 1 chunks to its neighbour, twice, each in 2 or more segments.

    Segments are of equal length, so that the last chunks may be shorter, or empty and then not sent: that makes the
    few bytes by which ranks differ from 2 (size - 1) / size x elements x itemsize.
    """
    if elements == 0 or size == 1:
        return Traffic()
    total = elements * itemsize
    segments = _up(max(-(-total // SEGMENT_BYTES), 2 * size), size)
    length = _up(_up(total, segments) // segments, itemsize)
    each = segments // size

    def lengths(first_chunk: int) -> list[int]:
        places = [(first_chunk * each + i) % segments for i in range(segments - each)]
        return [left for place in places if (left := min(length, total - place * length)) > 0]

    out = lengths(rank + 1) + lengths(rank)
    into = lengths(rank + 2) + lengths(rank + 1)
    return Traffic(sum(out), len(out), len(into))


def quantized(elements: int, bits: int, size: int) -> Traffic:
    """Codes and scales of a chunk to each peer, and the averaged chunk back: one message each."""
    peers = 2 * (size - 1)
    return Traffic(peers * chunk_bytes(elements, bits, size), peers, peers)


def chunk_elements(elements: int, size: int) -> int:
    """Elements of the chunk a rank averages: whole scale groups, the last ones padding."""
    return _up(elements, size * GROUP) // size


def chunk_bytes(elements: int, bits: int, size: int) -> int:
    """A chunk as sent."""
    chunk = chunk_elements(elements, size)
    return chunk // GROUP * SCALE_BYTES + chunk * bits // 8


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
