"""Compiled fixed-point loops for one CPU thread; cpu.py is their interface.

A message is worked through in blocks that stay in the first-level cache. One pass over the tensor finds the scales
(the largest |x| as an integer: of two floats' bit patterns the larger is the larger magnitude, and NaN and infinity
are larger than any number, so the same pass finds these). A second one rounds a block to bytes, packs these, and
moves a memory's rows along, while the block is at hand. The scale of each element of a block is written out as a
pattern, made once where it repeats, so that every inner loop is flat and vectorises.

No fastmath: each float operation is rounded as the reference rounds it. One file, because the compiled code is kept
on disk by this file's time stamp: with a part elsewhere, a change there would leave stale code behind.
"""

# ruff: noqa: PLR0917 - compiled functions take no keywords

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from thinpipe.harness.compression.kernels.layout import BF16_MAX, SAFE, TINY

BLOCK = 2048
OK, NONFINITE, SCALE_OVERFLOW, WIDE, MALFORMED = 0, 1, 2, 3, 4

_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)
_U64 = np.uint64
_BYTES, _PLACES = ir.VectorType(ir.IntType(8), 16), ir.VectorType(ir.IntType(32), 16)
_TINY = np.float32(2.0**-118)
_SAFE = np.float32(2.0**125)
_SAFE_FP16 = np.float32(2.0**13)
_BF16_MAX_BITS = np.int32(0x7F7F0000)
_MAGIC = np.float32(1.5 * 2**23)
_MAGIC_BITS = np.int32(0x4B400000)
# Written out: a change in layout.py must not leave compiled code with the old values.
assert np.float32(BF16_MAX).view(np.int32) == _BF16_MAX_BITS
assert TINY == _TINY
assert SAFE == {"bf16": _SAFE, "fp16": _SAFE_FP16, "fp32": _SAFE}


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


def _instruction(function: Callable[..., Any]) -> Any:
    """Generated as LLVM's own instructions; a constant argument is known to it."""
    return intrinsic(prefer_literal=True)(function)


# ---- a memory's rows: None, or uint16 = bf16, the upper halves of float32, int16 = patterns of fp16, or float32 ---
#
# What is kept is finite and, by the limit below, far from overflow.
#
# The functions that only raise are names for the compiler, which takes what @overload gives for them by the rows'
# type; called from Python they have no meaning.


def _value(rows: Any, i: int) -> Any:
    raise NotImplementedError


@overload(_value, inline="always")
def _value_of(rows, i):
    if isinstance(rows, types.NoneType):
        return lambda rows, i: np.float32(0.0)
    if rows.dtype == types.float32:
        return lambda rows, i: rows[i]
    if rows.dtype == types.int16:
        return lambda rows, i: _from_fp16(rows[i])
    return lambda rows, i: np.uint32(np.uint32(rows[i]) << np.uint32(16)).view(np.float32)


def _kept(rows: Any, value: Any) -> Any:
    raise NotImplementedError


@overload(_kept, inline="always")
def _kept_of(rows, value):
    if rows.dtype == types.float32:
        return lambda rows, value: value
    if rows.dtype == types.int16:
        return lambda rows, value: _fp16(value)
    return lambda rows, value: _bf16(value)


def _limit(rows: Any) -> Any:
    raise NotImplementedError


@overload(_limit, inline="always")
def _limit_of(rows):
    if not isinstance(rows, types.NoneType) and rows.dtype == types.int16:
        return lambda rows: _SAFE_FP16
    return lambda rows: _SAFE


def _cut(rows: Any, row: int, start: int, stop: int) -> Any:
    raise NotImplementedError


@overload(_cut)
def _cut_of(rows, row, start, stop):
    if isinstance(rows, types.NoneType):
        return lambda rows, row, start, stop: None
    return lambda rows, row, start, stop: rows[row, start:stop]


@_jit
def _bf16(value):
    """To nearest even."""
    pattern = np.float32(value).view(np.uint32)
    odd = np.uint32((pattern >> np.uint32(16)) & np.uint32(1))
    return np.uint16(np.uint32(pattern + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@_jit
def _from_fp16(stored):
    """Exact. Below 2^-14 the pattern counts steps of 2^-24, as the last places of 0.5 do; both ways are computed and
    one chosen, without a branch or a subnormal float32, which some processors multiply slowly."""
    pattern = np.int32(stored)
    size = np.int32(pattern & np.int32(0x7FFF))
    normal = np.int32((size << np.int32(13)) + np.int32(0x38000000))
    small = np.float32(np.int32(size | np.int32(0x3F000000)).view(np.float32) - np.float32(0.5)).view(np.int32)
    found = small if size < np.int32(0x400) else normal
    return np.int32(found | (pattern & np.int32(-0x80000000))).view(np.float32)


@_jit
def _fp16(value):
    """To nearest even; |value| < 65520."""
    pattern = np.float32(value).view(np.int32)
    size = np.int32(pattern & _MAGNITUDE)
    odd = np.int32((size >> np.int32(13)) & np.int32(1))
    normal = np.int32((size - np.int32(0x38000000) + np.int32(0xFFF) + odd) >> np.int32(13))
    small = np.int32(np.float32(size.view(np.float32) + np.float32(0.5)).view(np.int32) - np.int32(0x3F000000))
    found = small if size < np.int32(0x38800000) else normal
    return np.int16(found | ((pattern >> np.int32(16)) & np.int32(-0x8000)))


# ---- packing: a group is 8 codes in a 64-bit word, first code in its lowest byte --------------------------------


@_instruction
def _turn(typing: Any, word: Any) -> Any:
    """The bytes of a word in the opposite order."""
    return types.uint64(types.uint64), lambda context, builder, signature, values: builder.bswap(values[0])


def _sixteen(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    """A pointer to 16 bytes of an array."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), _BYTES.as_pointer())


@_instruction
def _close(typing: Any, words: Any, i: Any, out: Any, at: Any, bits: Any) -> Any:
    """The lowest `bits` bytes of words[i] and of words[i + 1], highest first and without a gap, to out[at:]; what
    follows these, of 16 bytes, is spoilt. Not checked, of any alignment. bits: a constant."""
    order = [*range(bits.literal_value - 1, -1, -1), *range(bits.literal_value + 7, 7, -1)]
    mask = ir.Constant(_PLACES, order + [0] * (16 - len(order)))

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        found = builder.load(_sixteen(context, builder, signature.args[0], values[0], values[1]), align=1)
        turned = builder.shuffle_vector(found, found, mask)
        builder.store(turned, _sixteen(context, builder, signature.args[2], values[2], values[3]), align=1)
        return context.get_dummy_value()

    return types.void(words, types.intp, out, types.intp, bits), generate


@_instruction
def _part(typing: Any, source: Any, at: Any, words: Any, i: Any, bits: Any) -> Any:
    """The inverse of _close; reads 16 bytes."""
    size = bits.literal_value
    halves = [[*range(start + size - 1, start - 1, -1)] + [16] * (8 - size) for start in (0, size)]
    mask = ir.Constant(_PLACES, halves[0] + halves[1])

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        found = builder.load(_sixteen(context, builder, signature.args[0], values[0], values[1]), align=1)
        turned = builder.shuffle_vector(found, ir.Constant(_BYTES, [0] * 16), mask)
        builder.store(turned, _sixteen(context, builder, signature.args[2], values[2], values[3]), align=1)
        return context.get_dummy_value()

    return types.void(source, types.intp, words, types.intp, bits), generate


@_jit
def _close_all(words, pairs, bits, out):
    if bits == 3:
        for i in range(pairs):
            _close(words, 2 * i, out, 6 * i, 3)
    elif bits == 5:
        for i in range(pairs):
            _close(words, 2 * i, out, 10 * i, 5)
    elif bits == 6:
        for i in range(pairs):
            _close(words, 2 * i, out, 12 * i, 6)
    elif bits == 7:
        for i in range(pairs):
            _close(words, 2 * i, out, 14 * i, 7)


@_jit
def _part_all(source, pairs, bits, words):
    if bits == 3:
        for i in range(pairs):
            _part(source, 6 * i, words, 2 * i, 3)
    elif bits == 5:
        for i in range(pairs):
            _part(source, 10 * i, words, 2 * i, 5)
    elif bits == 6:
        for i in range(pairs):
            _part(source, 12 * i, words, 2 * i, 6)
    elif bits == 7:
        for i in range(pairs):
            _part(source, 14 * i, words, 2 * i, 7)


@_jit
def _squeeze(word, bits):
    """The low `bits` of a group's 8 bytes as one number of 8 bits*bits, first code on top."""
    b = _U64(bits)
    word = ((word & _U64(0x00FF00FF00FF00FF)) << b) | ((word >> _U64(8)) & _U64(0x00FF00FF00FF00FF))
    word = ((word & _U64(0x0000FFFF0000FFFF)) << (b + b)) | ((word >> _U64(16)) & _U64(0x0000FFFF0000FFFF))
    return ((word & _U64(0x00000000FFFFFFFF)) << _U64(4 * b)) | (word >> _U64(32))


@_jit
def _spread(number, bits):
    """The inverse of _squeeze."""
    b, one = _U64(bits), _U64(1)
    quads = (one << _U64(4 * b)) - one
    pairs = ((one << (b + b)) - one) * _U64(0x0000000100000001)
    singles = ((one << b) - one) * _U64(0x0001000100010001)
    # First code on top until the end: the upper half of each part moves up, the lower one stays.
    word = ((number & (quads << _U64(4 * b))) << _U64(32 - 4 * b)) | (number & quads)
    word = ((word & (pairs << (b + b))) << _U64(16 - 2 * b)) | (word & pairs)
    word = ((word & (singles << b)) << _U64(8 - b)) | (word & singles)
    return _turn(word)


@_jit
def _put(number, count, out):
    """The `count` highest bytes of a 64-bit number, highest first."""
    for j in range(count):
        out[j] = np.uint8(number >> _U64(56 - 8 * j))


@_jit
def _get(count, source):
    """`count` bytes as the highest of a 64-bit number, the rest 0."""
    number = _U64(0)
    for j in range(count):
        number |= _U64(source[j]) << _U64(56 - 8 * j)
    return number


@_jit
def _pack(codes, groups, bits, out):
    """`groups` full groups of `codes`, worked in, into groups*bits bytes; `out` may be longer."""
    if bits == 8:
        for i in range(8 * groups):
            out[i] = codes[i]
    elif bits == 4:
        pairs = codes.view(np.uint16)
        for i in range(4 * groups):
            out[i] = np.uint8((pairs[i] << np.uint16(4)) | (pairs[i] >> np.uint16(8)))
    elif bits == 2:
        quads = codes.view(np.uint32)
        for i in range(2 * groups):
            w = quads[i]
            top = (w << np.uint32(6)) | ((w >> np.uint32(4)) & np.uint32(0x30))
            out[i] = np.uint8(top | ((w >> np.uint32(14)) & np.uint32(0x0C)) | (w >> np.uint32(24)))
    elif bits == 1:
        words = codes.view(np.uint64)
        for i in range(groups):
            out[i] = np.uint8(_squeeze(words[i], 1))
    else:
        words = codes.view(np.uint64)
        for i in range(groups):
            words[i] = _squeeze(words[i], bits)
        # Sixteen bytes at once; those past two groups are overwritten by the next ones.
        pairs = min(groups // 2, max(0, (out.size - 16) // (2 * bits) + 1))
        _close_all(words, pairs, bits, out)
        for i in range(2 * pairs, groups):
            _put(words[i] << _U64(64 - 8 * bits), bits, out[i * bits :])


@_jit
def _unpack(source, groups, bits, codes):
    """The inverse of _pack."""
    if bits == 8:
        for i in range(8 * groups):
            codes[i] = source[i]
    elif bits == 4:
        pairs = codes.view(np.uint16)
        for i in range(4 * groups):
            v = np.uint16(source[i])
            pairs[i] = (v >> np.uint16(4)) | ((v & np.uint16(15)) << np.uint16(8))
    elif bits == 2:
        quads = codes.view(np.uint32)
        for i in range(2 * groups):
            w = np.uint32(source[i])
            low = (w >> np.uint32(6)) | ((w & np.uint32(0x30)) << np.uint32(4))
            quads[i] = low | ((w & np.uint32(0x0C)) << np.uint32(14)) | ((w & np.uint32(3)) << np.uint32(24))
    elif bits == 1:
        words = codes.view(np.uint64)
        for i in range(groups):
            words[i] = _spread(_U64(source[i]), 1)
    else:
        words = codes.view(np.uint64)
        pairs = min(groups // 2, max(0, (source.size - 16) // (2 * bits) + 1))
        _part_all(source, pairs, bits, words)
        for i in range(2 * pairs, groups):
            words[i] = _get(bits, source[i * bits :]) >> _U64(64 - 8 * bits)
        for i in range(groups):
            words[i] = _spread(words[i], bits)


# ---- flat loops over a block ------------------------------------------------------------------------------------


@_jit
def _largest(x, m):
    """The largest |x - m| as a bit pattern."""
    best = np.int32(0)
    for i in range(x.size):
        size = np.int32(np.float32(x[i] - _value(m, i)).view(np.int32) & _MAGNITUDE)
        best = size if size > best else best
    return best


@_jit
def _largest_each(x, m, best):
    for i in range(x.size):
        size = np.int32(np.float32(x[i] - _value(m, i)).view(np.int32) & _MAGNITUDE)
        best[i] = size if size > best[i] else best[i]


@_jit
def _round(x, m, factor, divide, high, offset, codes):
    """codes[i] = clip(round(x - m, scaled)) + offset; scaled by a product, or in the published form a quotient.

    Bytes end at 0 and 255, which narrowing does in passing; the lower end of a grid is either that 0 or, symmetric,
    never passed, as no scale is below its span by as much as half a step. So only the upper end is left to clip at.
    """
    place, top = np.int32(offset - _MAGIC_BITS), np.uint8(high + offset)
    for i in range(x.size):
        value = np.float32(x[i] - _value(m, i))
        scaled = np.float32(value / factor[i]) if divide else np.float32(value * factor[i])
        # The sum has no place for a fraction, so it is rounded, and its low bits are the integer.
        level = np.int32(np.float32(scaled + _MAGIC).view(np.int32) + place)
        level = np.int32(0) if level < np.int32(0) else level
        codes[i] = np.uint8(np.int32(255) if level > np.int32(255) else level)
    for i in range(x.size):
        codes[i] = top if codes[i] > top else codes[i]


@_jit
def _mix(h):
    h = np.uint32((h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    h = np.uint32((h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(h ^ (h >> np.uint32(16)))


@_jit
def _dither(x, m, factor, first, key, low, high, offset, codes):
    """As _round, stochastic; `first` is the index of the block's first element in the message."""
    key0, key1 = np.uint32(key), np.uint32(key >> _U64(32))
    for i in range(x.size):
        scaled = np.float32(np.float32(x[i] - _value(m, i)) * factor[i])
        down = np.floor(scaled)
        h = _mix(np.uint32(_mix(np.uint32(np.uint32(first + i) ^ key0)) ^ key1))
        uniform = np.float32(np.int32(h >> np.uint32(8))) * np.float32(2.0**-24)
        level = np.int32(np.int32(down) + np.int32(uniform < np.float32(scaled - down)))
        level = low if level < low else level
        level = high if level > high else level
        codes[i] = np.uint8(np.int32(level + offset))


@_jit
def _levels(codes, step, offset, out):
    for i in range(out.size):
        out[i] = np.float32(np.int32(np.int32(codes[i]) - offset)) * step[i]


@_jit
def _advance(codes, step, offset, m):
    """m[i] += the change decoded from codes[i], in place; returns the largest magnitude as a bit pattern."""
    best = np.int32(0)
    for i in range(m.size):
        value = np.float32(_value(m, i) + np.float32(np.float32(np.int32(np.int32(codes[i]) - offset)) * step[i]))
        m[i] = _kept(m, value)
        size = np.int32(value.view(np.int32) & _MAGNITUDE)
        best = size if size > best else best
    return best


@_jit
def _advance_out(codes, step, offset, m, out):
    """As _advance; out[i] is the sum before it is rounded to what m keeps."""
    best = np.int32(0)
    for i in range(m.size):
        value = np.float32(_value(m, i) + np.float32(np.float32(np.int32(np.int32(codes[i]) - offset)) * step[i]))
        m[i] = _kept(m, value)
        out[i] = value
        size = np.int32(value.view(np.int32) & _MAGNITUDE)
        best = size if size > best else best
    return best


# ---- whole messages ---------------------------------------------------------------------------------------------
#
# x: float32 (outer, row), of which `rows` are sent; m: (slots, row) or None, row o of the message belongs to
# m[slots[o]]. where: (middle, inner, so, sm, si) of a Layout.


@_jit
def _block(where):
    """Elements of a block: whole runs of the inner axis where the pattern of scales repeats along it."""
    middle, inner, si = where[0], where[1], where[4]
    if si:
        return inner * min(middle, max(1, BLOCK // inner))
    return min(middle * inner, BLOCK)


@_jit
def _pattern(values, where, o, start, size, fresh, pattern):
    """Write the value of each of a block's elements into `pattern`, unless what is there still holds."""
    inner, so, sm, si = where[1], where[2], where[3], where[4]
    base = o * so
    if si:
        if fresh or (so and start == 0):
            for first in range(0, pattern.size, inner):
                for i in range(inner):
                    pattern[first + i] = values[base + i]
    elif sm == 0:
        if fresh:
            value = values[base]
            for i in range(pattern.size):
                pattern[i] = value
    else:
        at = 0
        while at < size:
            segment = (start + at) // inner
            stop = min(size, (segment + 1) * inner - start)
            value = values[base + segment]
            for i in range(at, stop):
                pattern[i] = value
            at = stop


@_jit
def _scan(x, rows, m, slots, where, peaks):
    """The largest |x - m| of each scale, as bit patterns, into `peaks` (int32, zeros)."""
    middle, inner, so, sm, si = where
    row, block = middle * inner, _block(where)
    best = np.zeros(block if si else 1, np.int32)
    for r in range(rows.size):
        for start in range(0, row, block):
            stop = min(row, start + block)
            part, kept = x[rows[r], start:stop], _cut(m, slots[r], start, stop)
            if si:
                _largest_each(part, kept, best)
            elif sm == 0:
                peaks[r * so] = max(peaks[r * so], _largest(part, kept))
            else:
                while start < stop:
                    segment = start // inner
                    end = min(stop, (segment + 1) * inner)
                    found = _largest(x[rows[r], start:end], _cut(m, slots[r], start, end))
                    at = r * so + segment
                    peaks[at] = max(peaks[at], found)
                    start = end
        if si and (so or r == rows.size - 1):
            for first in range(0, block, inner):
                for i in range(inner):
                    peaks[r * so + i] = max(peaks[r * so + i], best[first + i])
                    best[first + i] = 0


@_jit
def _half_bits(pattern):
    """The fp16 bit pattern of a non-negative float32's, to nearest even; 0x7c00 where it overflows."""
    if pattern >= np.int32(0x477FF000):
        return np.int32(0x7C00)
    if pattern < np.int32(0x38800000):
        # Subnormal: adding 0.5 leaves the value, in steps of 2^-24, in the low bits.
        return np.int32(
            np.float32(np.int32(pattern).view(np.float32) + np.float32(0.5)).view(np.int32) - np.int32(0x3F000000)
        )
    odd = (pattern >> np.int32(13)) & np.int32(1)
    return np.int32((pattern - np.int32(0x38000000) + np.int32(0xFFF) + odd) >> np.int32(13))


@_jit
def _half_value(bits):
    """The float32 of a non-negative fp16's bit pattern."""
    shifted = np.int32(np.int32(bits) << np.int32(13)).view(np.float32)
    return np.float32(shifted * np.float32(2.0**112))


@_jit
def _scales(peaks, steps, eps, published, head, factor, step):
    """From peaks to the stored 2-byte scales (`head`, uint16), and what encoding and decoding multiply by.

    Returns (status, largest scale). In the published form `factor` is what x is divided by.
    """
    largest, count = np.float32(0.0), np.float32(steps)
    for i in range(peaks.size):
        pattern = peaks[i]
        if pattern >= _INFINITY:
            return NONFINITE, largest
        if published:
            stored = _half_bits(pattern)
            if stored >= 0x7C00:
                return SCALE_OVERFLOW, largest
            scale = _half_value(stored)
            factor[i] = np.float32(scale + eps) / count
        else:
            up = (min(np.int64(pattern), np.int64(_BF16_MAX_BITS)) + 0xFFFF) >> 16
            stored = np.int32(0 if np.int32(pattern).view(np.float32) < _TINY else up)
            scale = np.int32(stored << np.int32(16)).view(np.float32)
            factor[i] = count / np.float32(scale + eps) if stored else np.float32(0.0)
        head[i] = np.uint16(stored)
        step[i] = scale / count
        largest = max(largest, scale)
    return OK, largest


@_entry
def encode(x, rows, m, slots, where, grid, eps, published, stochastic, key, out):
    """Scan, then round and pack (and move m along). Returns (status, largest |m| stored as a bit pattern)."""
    bits, steps, scales = grid[0], grid[4], grid[5]
    low, high, offset = np.int32(grid[1]), np.int32(grid[2]), np.int32(grid[3])
    row, block = where[0] * where[1], _block(where)
    peaks = np.zeros(scales, np.int32)
    _scan(x, rows, m, slots, where, peaks)
    factor, step = np.empty(scales, np.float32), np.empty(scales, np.float32)
    status, largest = _scales(peaks, steps, eps, published, out[: 2 * scales].view(np.uint16), factor, step)
    best = np.int32(0)
    if status == OK and m is not None and largest >= _limit(m):
        status = WIDE
    if status != OK:
        return status, best
    packed = out[2 * scales :]
    factors, levels = np.empty(block, np.float32), np.empty(block, np.float32)
    codes = np.empty((block + 23) // 8 * 8, np.uint8)
    have, fresh = 0, True
    for r in range(rows.size):
        for start in range(0, row, block):
            size = min(row, start + block) - start
            part, kept = x[rows[r], start : start + size], _cut(m, slots[r], start, start + size)
            _pattern(factor, where, r, start, size, fresh, factors)
            now = codes[have : have + size]
            if stochastic:
                _dither(part, kept, factors, r * row + start, key, low, high, offset, now)
            else:
                _round(part, kept, factors, published, high, offset, now)
            if m is not None:
                _pattern(step, where, r, start, size, fresh, levels)
                best = max(best, _advance(now, levels, offset, kept))
            fresh = False
            have += size
            groups = have // 8
            _pack(codes, groups, bits, packed)
            packed = packed[groups * bits :]
            have -= 8 * groups
            for i in range(have):
                codes[i] = codes[8 * groups + i]
    if have:
        for i in range(have, 8):
            codes[i] = 0
        number = _squeeze(codes[:8].view(np.uint64)[0], bits) << _U64(64 - 8 * bits)
        _put(number, (have * bits + 7) // 8, packed)
    return OK, best


@_jit
def _open(head, packed, count, bits, steps, published, symmetric, step):
    """Check what no encoder can have written, and fill `step`. Returns OK or MALFORMED."""
    for i in range(head.size):
        stored = np.int32(head[i])
        if stored >= (0x7C00 if published else 0x7F80):
            return MALFORMED
        scale = _half_value(stored) if published else np.int32(stored << np.int32(16)).view(np.float32)
        step[i] = scale / np.float32(steps)
    unused = 8 * packed.size - count * bits
    if packed[packed.size - 1] & ((1 << unused) - 1):
        return MALFORMED
    if symmetric:
        codes = np.empty(BLOCK, np.uint8)
        for first in range(0, count, BLOCK):
            size = min(BLOCK, count - first)
            _take(packed[first // 8 * bits :], (size + 7) // 8, bits, codes, 0)
            for i in range(size):
                if codes[i] == 0:
                    return MALFORMED
    return OK


@_jit
def _take(packed, groups, bits, codes, have):
    """Unpack `groups` groups into codes[have:], the last one perhaps cut short; returns what is left of `packed`."""
    whole = min(groups, packed.size // bits)
    _unpack(packed, whole, bits, codes[have : have + 8 * whole])
    if whole < groups:
        rest = packed[whole * bits :]
        number = _get(rest.size, rest) >> _U64(64 - 8 * bits)
        codes[have + 8 * whole : have + 8 * groups].view(np.uint64)[0] = _spread(number, bits)
    return packed[min(packed.size, groups * bits) :]


@_entry
def decode(payload, m, slots, where, count, grid, published, symmetric, out):
    """Unpack; out = level, or m += level and out = m. Returns (status, largest |m| stored as a bit pattern)."""
    bits, offset, steps, scales = grid[0], np.int32(grid[3]), grid[4], grid[5]
    row, block = where[0] * where[1], _block(where)
    best, step = np.int32(0), np.empty(scales, np.float32)
    head, packed = payload[: 2 * scales].view(np.uint16), payload[2 * scales :]
    status = _open(head, packed, count * row, bits, steps, published, symmetric, step)
    if status == OK and m is not None:
        for i in range(scales):
            if step[i] * np.float32(steps) >= _limit(m):
                status = WIDE
    if status != OK:
        return status, best
    levels = np.empty(block, np.float32)
    codes = np.empty((block + 23) // 8 * 8, np.uint8)
    have, fresh = 0, True
    for r in range(count):
        for start in range(0, row, block):
            size = min(row, start + block) - start
            short = max(0, size - have + 7) // 8
            packed = _take(packed, short, bits, codes, have)
            _pattern(step, where, r, start, size, fresh, levels)
            fresh = False
            part = out[r, start : start + size]
            if m is None:
                _levels(codes, levels, offset, part)
            else:
                best = max(best, _advance_out(codes, levels, offset, m[slots[r], start : start + size], part))
            have += 8 * short - size
            for i in range(have):
                codes[i] = codes[size + i]
    return OK, best


@_entry
def copy(source, target):
    """target = source, both int32 patterns of floats; returns the largest magnitude."""
    best = np.int32(0)
    for i in range(source.size):
        target[i] = source[i]
        size = np.int32(source[i] & _MAGNITUDE)
        best = size if size > best else best
    return best


@_entry
def peak(source):
    """The largest magnitude of int32 patterns of floats."""
    best = np.int32(0)
    for i in range(source.size):
        size = np.int32(source[i] & _MAGNITUDE)
        best = size if size > best else best
    return best
