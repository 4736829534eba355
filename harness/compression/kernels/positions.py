"""Compiled loops that write ascending positions as bits and read them back, for one CPU thread; see indices.py.

The first bit is the lowest of the first byte. A position's gap is the number of positions left out before it, back to
the one before. Readers take any bytes: they stop at the end of what they are given, write no more positions than there
is room for, and say so where these cannot be ascending and below the count.

One file, because the compiled code is kept on disk by this file's time stamp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

#: Gaps that share a bit width in a packed list.
BLOCK = 64
#: How positions are written: as a bitmap, as packed gaps, or, from here on, as Rice codes of parameter mode - RICE.
BITMAP, PACKED, RICE = 0, 1, 2
RICE_MAX = 30

_U64 = np.uint64


def _jit(function: Callable[..., Any], **options: Any) -> Any:
    """Compiled, and kept on disk where some folder for it can be written (else compiled again by each process)."""
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, **options}
    try:
        return numba.njit(cache=True, nogil=True, error_model="numpy", **options)(function)
    except RuntimeError:
        return numba.njit(nogil=True, error_model="numpy", **options)(function)


def _entry(function: Callable[..., Any]) -> Any:
    """As _jit, and callable from Python."""
    return _jit(function, no_cpython_wrapper=False)


def _build_trailing_zeros(_typing: Any, word: Any) -> Any:
    """Zero bits below the lowest set one of a uint64 that is not 0."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        from llvmlite import ir

        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), build


_trailing_zeros: Any = intrinsic(_build_trailing_zeros)


@_jit
def _rice_bits(positions, parameter):
    shift, total, before = np.int32(parameter), np.int64(0), np.int32(-1)
    for j in range(positions.size):
        total += np.int32(np.int32(positions[j] - before) - 1) >> shift
        before = positions[j]
    return total + positions.size * np.int64(1 + parameter)


@_jit
def _width(number):
    """Bits of a non-negative number."""
    bits = 0
    while number:
        number >>= 1
        bits += 1
    return bits


@_jit
def _block_width(positions, first, stop):
    """Bits that each gap of positions[first:stop] fits in."""
    every, before = np.int32(0), positions[first - 1] if first else np.int32(-1)
    for j in range(first, stop):
        every |= np.int32(np.int32(positions[j] - before) - 1)
        before = positions[j]
    return _width(every)


@_jit
def _packed_bytes(positions):
    total = 0
    for first in range(0, positions.size, BLOCK):
        stop = min(positions.size, first + BLOCK)
        total += 1 + ((stop - first) * _block_width(positions, first, stop) + 7) // 8
    return total


@_entry
def plan(positions, count):
    """(mode, bytes) of the shortest way to write `positions`, at least one of them, of 0..count-1."""
    mode, best = BITMAP, (count + 7) // 8
    parameter = min(RICE_MAX, max(0, _width(count // positions.size) - 1))
    bits = _rice_bits(positions, parameter)
    # Convex in the parameter: downhill from a good guess ends at the least of all.
    for step in (1, -1):
        while 0 <= parameter + step <= RICE_MAX:
            other = _rice_bits(positions, parameter + step)
            if other >= bits:
                break
            parameter, bits = parameter + step, other
    if (bits + 7) // 8 < best:
        mode, best = RICE + parameter, (bits + 7) // 8
    packed = _packed_bytes(positions)
    return (PACKED, packed) if packed < best else (mode, best)


@_jit
def _flush(word, held, out, at):
    """Four whole bytes of `word`, once it has them."""
    if held >= 32:
        for j in range(4):
            out[at + j] = np.uint8(word >> _U64(8 * j))
        return word >> _U64(32), held - 32, at + 4
    return word, held, at


@_jit
def _finish(word, held, out, at):
    while held > 0:
        out[at] = np.uint8(word)
        word >>= _U64(8)
        held -= 8
        at += 1
    return at


@_jit
def _write_rice(positions, parameter, out):
    word, held, at, before = _U64(0), 0, 0, np.int32(-1)
    for j in range(positions.size):
        gap = np.int64(np.int32(positions[j] - before) - 1)
        before = positions[j]
        high = gap >> parameter
        while high >= 31:
            held, high = held + 31, high - 31
            word, held, at = _flush(word, held, out, at)
        word |= _U64(1) << _U64(held + high)
        word, held, at = _flush(word, held + high + 1, out, at)
        word |= _U64(gap & ((1 << parameter) - 1)) << _U64(held)
        word, held, at = _flush(word, held + parameter, out, at)
    return _finish(word, held, out, at)


@_jit
def _write_packed(positions, out):
    at, before = 0, np.int32(-1)
    for first in range(0, positions.size, BLOCK):
        stop = min(positions.size, first + BLOCK)
        width = _block_width(positions, first, stop)
        out[at] = width
        word, held, at = _U64(0), 0, at + 1
        for j in range(first, stop):
            gap = np.int32(np.int32(positions[j] - before) - 1)
            before = positions[j]
            word |= _U64(gap) << _U64(held)
            word, held, at = _flush(word, held + width, out, at)
        at = _finish(word, held, out, at)
    return at


@_entry
def write(positions, mode, out):
    """Write `positions` in a `mode` of plan's; `out` (uint8) has the length that plan said."""
    if mode == BITMAP:
        for i in range(out.size):
            out[i] = 0
        for j in range(positions.size):
            out[positions[j] >> 3] |= np.uint8(1 << (positions[j] & 7))
    elif mode == PACKED:
        _write_packed(positions, out)
    else:
        _write_rice(positions, mode - RICE, out)


@_jit
def _refill(word, held, source, at):
    while held <= 56 and at < source.size:
        word |= _U64(source[at]) << _U64(held)
        held += 8
        at += 1
    return word, held, at


@_jit
def _read_bitmap(source, count, positions):
    size = (count + 7) // 8
    if source.size < size or (count % 8 and source[size - 1] >> (count % 8)):
        return -1
    found = 0
    for first in range(0, size, 8):
        word = _U64(0)
        for j in range(min(8, size - first)):
            word |= _U64(source[first + j]) << _U64(8 * j)
        while word:
            if found == positions.size:
                return -1
            positions[found] = 8 * first + np.int64(_trailing_zeros(word))
            word &= word - _U64(1)
            found += 1
    return size if found == positions.size else -1


@_jit
def _read_rice(source, parameter, count, positions):
    word, held, at, place = _U64(0), 0, 0, np.int64(-1)
    mask = (_U64(1) << _U64(parameter)) - _U64(1)
    for j in range(positions.size):
        high = np.int64(0)
        word, held, at = _refill(word, held, source, at)
        while word == _U64(0):
            high += held
            word, held, at = _refill(_U64(0), 0, source, at)
            if held == 0:
                return -1
        zeros = np.int64(_trailing_zeros(word))
        high += zeros
        # Also keeps the shift below from running over.
        if high > count:
            return -1
        # In two steps: a shift by 64 is no shift at all.
        word = (word >> _U64(zeros)) >> _U64(1)
        held -= zeros + 1
        if held < parameter:
            word, held, at = _refill(word, held, source, at)
            if held < parameter:
                return -1
        place += 1 + (high << parameter) + np.int64(word & mask)
        word >>= _U64(parameter)
        held -= parameter
        if place >= count:
            return -1
        positions[j] = place
    used = at - held // 8
    return -1 if word & ((_U64(1) << _U64(held % 8)) - _U64(1)) else used


@_jit
def _read_packed(source, count, positions):
    at, place = 0, np.int64(-1)
    for first in range(0, positions.size, BLOCK):
        stop = min(positions.size, first + BLOCK)
        if at >= source.size or source[at] > 31:
            return -1
        width = np.int64(source[at])
        end = at + 1 + ((stop - first) * width + 7) // 8
        if end > source.size:
            return -1
        part = source[at + 1 : end]
        word, held, next_byte = _U64(0), 0, 0
        mask = (_U64(1) << _U64(width)) - _U64(1)
        for j in range(first, stop):
            word, held, next_byte = _refill(word, held, part, next_byte)
            place += 1 + np.int64(word & mask)
            word >>= _U64(width)
            held -= width
            if place >= count:
                return -1
            positions[j] = place
        if word:
            return -1
        at = end
    return at


@_entry
def read(source, mode, count, positions):
    """Fill `positions` (int32) from the first bytes of `source`; returns how many bytes these are, -1 where they
    cannot be `positions.size` ascending positions of 0..count-1."""
    if mode == BITMAP:
        return _read_bitmap(source, count, positions)
    if mode == PACKED:
        return _read_packed(source, count, positions)
    return _read_rice(source, mode - RICE, count, positions)
