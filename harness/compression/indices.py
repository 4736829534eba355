"""Ascending positions as bytes, by whichever of three ways is shortest for them.

    payload = mode (1 B), how many (4 B, little-endian), then
    bitmap   one bit a position of the tensor, first in the lowest bit
    packed   gaps in blocks of 64: a byte that says how many bits a gap takes, then these bits
    Rice     each gap as gap >> p zeros, a one, and its p lowest bits; mode = 2 + p

A gap is the number of positions left out before a position. Positions chosen at random with probability R take
entropy(R) bits an element of the tensor in theory; Rice codes take 0 to 4 % more. No positions at all: no mode, and
nothing after the five bytes.
"""

from __future__ import annotations

import struct

import numpy as np

from thinpipe.harness.compression.kernels import positions as kernel
from thinpipe.harness.errors import CodecError

HEADER = struct.Struct("<BI")


def max_bytes(count: int, most: int) -> int:
    """The most bytes that up to `most` positions of 0..count-1 take."""
    assert count < 2**31, "positions are int32"
    by_rice = (most * (1 + p) + (count >> p) for p in range(kernel.RICE_MAX + 1))
    return HEADER.size + min((count + 7) // 8, (min(by_rice) + 7) // 8)


def encode(positions: np.ndarray, count: int, out: np.ndarray) -> int:
    """Write `positions` (int32, ascending, of 0..count-1) into `out` (uint8); return how many bytes they take."""
    if positions.size == 0:
        out[: HEADER.size] = 0
        return HEADER.size
    mode, size = kernel.plan(positions, count)
    total = HEADER.size + size
    out[: HEADER.size] = np.frombuffer(HEADER.pack(mode, positions.size), np.uint8)
    kernel.write(positions, mode, out[HEADER.size : total])
    return total


def decode(payload: np.ndarray, count: int, most: int) -> tuple[np.ndarray, int]:
    """(positions as int32, bytes they took) from the first bytes of `payload` (uint8).

    Raises CodecError where these cannot be at most `most` ascending positions of 0..count-1.
    """
    if payload.size < HEADER.size:
        raise CodecError(f"the payload is malformed: {payload.size} B, too short for a list of positions")
    mode, size = HEADER.unpack(payload[: HEADER.size].tobytes())
    if size > most or mode > kernel.RICE + kernel.RICE_MAX or (size == 0 and mode != 0):
        raise CodecError(f"the payload is malformed: {size} positions in mode {mode}, where {most} are the most")
    positions = np.empty(size, np.int32)
    if size == 0:
        return positions, HEADER.size
    used = kernel.read(payload[HEADER.size :], mode, count, positions)
    if used < 0:
        raise CodecError(f"the payload is malformed: it holds no {size} ascending positions below {count}")
    return positions, HEADER.size + used
