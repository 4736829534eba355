"""Compiled loops of the block quantisers for one CPU thread; cpu_blocks.py is their interface.

A message is worked through in chunks of whole blocks that stay in the first-level cache: scales from a chunk, then its
codes, then these packed, so that the tensor is read from memory once. A chunk is a matrix with a row a block, so that
every inner loop runs under one scale and vectorises. What is left at the end is filled up with zeros, which change no
block's range, and goes the same way.

No fastmath: each float operation is rounded as the reference rounds it. One file, because the compiled code is kept
on disk by this file's time stamp: with a part elsewhere, a change there would leave stale code behind. So packing is
written here again as it is in fused.py.
"""

# ruff: noqa: PLR0917 - compiled functions take no keywords

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from thinpipe.harness.compression.kernels.layout import BF16_MAX, TINY

CHUNK, LEAST = 8192, 32
OK, NONFINITE, SCALE_OVERFLOW, MALFORMED = 0, 1, 2, 3
UNIFORM, NF4, E2M1, E4M3 = 0, 1, 2, 3
FP32, BF16, FP16, E8M0 = 0, 1, 2, 3

_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)
_U64 = np.uint64
_BYTES, _PLACES = ir.VectorType(ir.IntType(8), 16), ir.VectorType(ir.IntType(32), 16)
_TINY_BITS = np.int32(0x04800000)
_BF16_MAX_BITS = np.int32(0x7F7F0000)
_MAGIC = np.float32(1.5 * 2**23)
_MAGIC_BITS = np.int32(0x4B400000)
_FLOAT_MAX = np.float32(float.fromhex("0x1.fffffep127"))
# Written out: a change in layout.py must not leave compiled code with the old values.
assert np.float32(BF16_MAX).view(np.int32) == _BF16_MAX_BITS
assert np.float32(TINY).view(np.int32) == _TINY_BITS


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
def _pack(codes, bits, out):
    """Codes of whole groups, worked in, into `out`, cut off at its end."""
    groups = codes.size // 8
    if bits == 8:
        for i in range(min(codes.size, out.size)):
            out[i] = codes[i]
    elif bits == 4:
        pairs = codes.view(np.uint16)
        for i in range(min(pairs.size, out.size)):
            out[i] = np.uint8((pairs[i] << np.uint16(4)) | (pairs[i] >> np.uint16(8)))
    elif bits == 2:
        quads = codes.view(np.uint32)
        for i in range(min(quads.size, out.size)):
            w = quads[i]
            top = (w << np.uint32(6)) | ((w >> np.uint32(4)) & np.uint32(0x30))
            out[i] = np.uint8(top | ((w >> np.uint32(14)) & np.uint32(0x0C)) | (w >> np.uint32(24)))
    elif bits == 1:
        words = codes.view(np.uint64)
        for i in range(min(groups, out.size)):
            out[i] = np.uint8(_squeeze(words[i], 1))
    else:
        words = codes.view(np.uint64)
        for i in range(groups):
            words[i] = _squeeze(words[i], bits)
        # Sixteen bytes at once; those past two groups are overwritten by the next ones.
        pairs = min(groups // 2, max(0, (out.size - 16) // (2 * bits) + 1))
        _close_all(words, pairs, bits, out)
        for i in range(2 * pairs, groups):
            for j in range(min(bits, out.size - i * bits)):
                out[i * bits + j] = np.uint8(words[i] >> _U64(8 * (bits - 1 - j)))


@_jit
def _unpack(source, bits, codes):
    """The inverse of _pack: as many whole groups of codes as `codes` holds, zeros where `source` ends before."""
    groups = codes.size // 8
    if bits == 8:
        for i in range(min(codes.size, source.size)):
            codes[i] = source[i]
    elif bits == 4:
        pairs = codes.view(np.uint16)
        for i in range(min(pairs.size, source.size)):
            v = np.uint16(source[i])
            pairs[i] = (v >> np.uint16(4)) | ((v & np.uint16(15)) << np.uint16(8))
    elif bits == 2:
        quads = codes.view(np.uint32)
        for i in range(min(quads.size, source.size)):
            w = np.uint32(source[i])
            low = (w >> np.uint32(6)) | ((w & np.uint32(0x30)) << np.uint32(4))
            quads[i] = low | ((w & np.uint32(0x0C)) << np.uint32(14)) | ((w & np.uint32(3)) << np.uint32(24))
    elif bits == 1:
        words = codes.view(np.uint64)
        for i in range(min(groups, source.size)):
            words[i] = _spread(_U64(source[i]), 1)
    else:
        words = codes.view(np.uint64)
        pairs = min(groups // 2, max(0, (source.size - 16) // (2 * bits) + 1))
        _part_all(source, pairs, bits, words)
        for i in range(2 * pairs, groups):
            words[i] = 0
            for j in range(min(bits, source.size - i * bits)):
                words[i] |= _U64(source[i * bits + j]) << _U64(8 * (bits - 1 - j))
        for i in range(groups):
            words[i] = _spread(words[i], bits)


# ---- scales -----------------------------------------------------------------------------------------------------


@_jit
def _half_value(bits):
    """The float32 of a non-negative fp16's bit pattern."""
    shifted = np.int32(np.int32(bits) << np.int32(13)).view(np.float32)
    return np.float32(shifted * np.float32(2.0**112))


@_jit
def _half_up(pattern):
    """The least fp16 bit pattern not below a float32's, given as a pattern too; 0x7c00 where there is none."""
    value = np.int32(pattern).view(np.float32)
    # Subnormal: adding 0.5 leaves the value, in steps of 2^-24, in the low bits, to the nearest.
    near = np.int32(np.float32(value + np.float32(0.5)).view(np.int32) - np.int32(0x3F000000))
    near += np.int32(_half_value(near) < value)
    normal = np.int32((pattern - np.int32(0x38000000) + np.int32(0x1FFF)) >> np.int32(13))
    up = near if pattern < np.int32(0x38800000) else normal
    return up if pattern <= np.int32(0x477FE000) else np.int32(0x7C00)


@_jit
def _stored(pattern, kind, element):
    """What is kept of a scale, given as a bit pattern, as an integer; -1 where it cannot be held."""
    kept = pattern
    if kind == BF16:
        kept = np.int32((min(pattern, _BF16_MAX_BITS) + np.int32(0xFFFF)) >> np.int32(16))
    elif kind == FP16:
        half = _half_up(pattern)
        kept = half if half < np.int32(0x7C00) else np.int32(-1)
    elif kind == E8M0 and element == E2M1:
        kept = np.int32(pattern >> np.int32(23)) - np.int32(2)
    elif kind == E8M0:
        up = np.int32((pattern + np.int32(0x7FFFFF)) >> np.int32(23))
        kept = up if up < np.int32(255) else np.int32(-1)
    return np.int32(0) if pattern < _TINY_BITS else np.int32(kept)


@_jit
def _scale(stored, kind):
    """The float32 scale of what is kept."""
    if kind == FP32:
        return np.int32(stored).view(np.float32)
    if kind == BF16:
        return np.int32(np.int32(stored) << np.int32(16)).view(np.float32)
    if kind == FP16:
        return _half_value(np.int32(stored))
    return np.int32(np.int32(stored) << np.int32(23)).view(np.float32)


@_jit
def _width(kind):
    return 4 if kind == FP32 else (1 if kind == E8M0 else 2)


@_jit
def _write(stored, width, out):
    out[0] = np.uint8(stored)
    if width > 1:
        out[1] = np.uint8(stored >> 8)
    if width > 2:
        out[2] = np.uint8(stored >> 16)
        out[3] = np.uint8(stored >> 24)


@_jit
def _read(source, width):
    stored = np.int64(source[0])
    if width > 1:
        stored |= np.int64(source[1]) << 8
    if width > 2:
        stored |= (np.int64(source[2]) << 16) | (np.int64(source[3]) << 24)
    return stored


@_jit
def _spans(x, affine, high, low):
    """By block, a row of `x`: max|x|, or affine the largest value and the lowest one's size (0 where there is none),
    as bit patterns. NaN and infinity are larger than any number."""
    for b in range(x.shape[0]):
        above, below = np.int32(0), np.uint32(0)
        if affine:
            for j in range(x.shape[1]):
                bits = np.float32(x[b, j]).view(np.int32)
                above = bits if bits > above else above
                below = np.uint32(bits) if np.uint32(bits) > below else below
            low[b] = np.int32(below & np.uint32(0x7FFFFFFF)) if below >= np.uint32(0x80000000) else np.int32(0)
        else:
            for j in range(x.shape[1]):
                bits = np.int32(np.float32(x[b, j]).view(np.int32) & _MAGNITUDE)
                above = bits if bits > above else above
        high[b] = above


@_jit
def _settle(high, low, how, top, first, head, factor, zero):
    """From spans, bit patterns that it overwrites, to what is stored, and each block's factor and zero point. Returns a
    status. Several loops, most of which vectorise."""
    element, bits, _, kind, affine, stochastic, blocks = how
    width, last = _width(kind), np.float32((1 << bits) - 1)
    worst, least = np.int32(0), np.int32(0)
    for b in range(high.size):
        worst = high[b] if high[b] > worst else worst
        zero[b] = 1 << (bits - 1)
    if affine:
        for b in range(high.size):
            worst = low[b] if low[b] > worst else worst
            above, below = np.int32(high[b]).view(np.float32), np.int32(low[b]).view(np.float32)
            span = np.float32(above * np.float32(0.5)) + np.float32(below * np.float32(0.5))
            high[b] = np.float32(span).view(np.int32)
    if worst >= _INFINITY:
        return NONFINITE
    for b in range(high.size):
        kept = _stored(high[b], kind, element)
        least = kept if kept < least else least
        high[b] = kept
    if least < 0:
        return SCALE_OVERFLOW
    for b in range(high.size):
        by = top / _scale(high[b], kind)
        factor[b] = by if high[b] else np.float32(0.0)
    if width == 2:
        halves = head[2 * first : 2 * (first + high.size)].view(np.uint16)
        for b in range(high.size):
            halves[b] = np.uint16(high[b])
    else:
        for b in range(high.size):
            _write(high[b], width, head[(first + b) * width :])
    if affine:
        for b in range(high.size):
            place = np.float32(np.int32(low[b]).view(np.float32) * factor[b])
            place = np.ceil(place) if stochastic else np.rint(place)
            zero[b] = np.int32(place if place < last else last)
            head[blocks * width + first + b] = np.uint8(zero[b])
    return OK


# ---- codes of a chunk -------------------------------------------------------------------------------------------


@_jit
def _round(x, factor, zero, codes):
    """Nearest, ties to even, within 0 .. 255: no code of an absmax block leaves its levels, since its scale is not
    below its span, but where bf16 ends, and there by too little to matter."""
    for b in range(x.shape[0]):
        by, place = factor[b], np.int32(zero[b] - _MAGIC_BITS)
        for j in range(x.shape[1]):
            # The sum has no place for a fraction, so it is rounded, and its low bits are the integer.
            level = np.int32(np.float32(np.float32(x[b, j] * by) + _MAGIC).view(np.int32) + place)
            level = np.int32(0) if level < np.int32(0) else level
            codes[b, j] = np.uint8(np.int32(255) if level > np.int32(255) else level)


@_jit
def _mix(h):
    h = np.uint32((h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    h = np.uint32((h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(h ^ (h >> np.uint32(16)))


@_jit
def _dither(x, factor, zero, first, key, low, high, codes):
    """As _round, stochastic; `first` is the place of x[0, 0] in the message."""
    key0, key1 = np.uint32(key), np.uint32(key >> _U64(32))
    for b in range(x.shape[0]):
        by, place, at = factor[b], zero[b], np.uint32(first + b * x.shape[1])
        for j in range(x.shape[1]):
            scaled = np.float32(x[b, j] * by)
            down = np.floor(scaled)
            h = _mix(np.uint32(_mix(np.uint32(np.uint32(at + np.uint32(j)) ^ key0)) ^ key1))
            uniform = np.float32(np.int32(h >> np.uint32(8))) * np.float32(2.0**-24)
            level = np.int32(np.int32(down) + np.int32(uniform < np.float32(scaled - down)) + place)
            level = low if level < low else level
            codes[b, j] = np.uint8(high if level > high else level)


@_jit
def _nearest(x, factor, midpoints, codes):
    """How many of the 15 midpoints lie below."""
    for b in range(x.shape[0]):
        by = factor[b]
        for j in range(x.shape[1]):
            scaled, code = np.float32(x[b, j] * by), np.int32(0)
            for k in range(15):
                code += np.int32(scaled > midpoints[k])
            codes[b, j] = np.uint8(code)


@_jit
def _small_float(x, factor, mantissas, bias, most, codes):
    """To a float of `mantissas` bits after the point, nearest even, not beyond `most`; the sign is the top bit."""
    drop = np.int32(23 - mantissas)
    half, least = np.int32((1 << (22 - mantissas)) - 1), np.float32(2.0 ** (1 - bias))
    # Added to a number below `least` it leaves that in steps of the smallest subnormal, in the low bits.
    magic = np.float32(2.0 ** (24 - bias - mantissas))
    base, sign = np.int32((127 - bias) << mantissas), np.int32(3 if mantissas == 1 else 7)
    for b in range(x.shape[0]):
        by = factor[b]
        for j in range(x.shape[1]):
            pattern = np.float32(x[b, j] * by).view(np.int32)
            size = min(np.int32(pattern & _MAGNITUDE).view(np.float32), most)
            bits = np.float32(size).view(np.int32)
            normal = np.int32((bits + half + ((bits >> drop) & np.int32(1))) >> drop) - base
            subnormal = np.float32(size + magic).view(np.int32) - np.float32(magic).view(np.int32)
            code = subnormal if size < least else normal
            codes[b, j] = np.uint8(np.int32(code) | np.int32(np.int32(pattern < 0) << sign))


@_entry
def encode(x, how, top, midpoints, key, out):
    """x: float32 [n >= 1]; out: uint8, of the payload's length. Returns a status.

    how: (element, bits, block, kind of scale, affine, stochastic, number of blocks), integers.
    """
    element, bits, block, kind, affine, stochastic, blocks = how
    side = (_width(kind) + affine) * blocks
    head, packed = out[:side], out[side:]
    high, low = np.empty(CHUNK // LEAST, np.int32), np.empty(CHUNK // LEAST, np.int32)
    factor, zero = np.empty(CHUNK // LEAST, np.float32), np.empty(CHUNK // LEAST, np.int32)
    codes = np.empty(CHUNK, np.uint8)
    least, most = np.int32(0 if affine else 1), np.int32((1 << bits) - 1)
    for start in range(0, x.size, CHUNK):
        size = min(CHUNK, x.size - start)
        count = (size + block - 1) // block
        part = x[start : start + size]
        if count * block > size:
            part = np.zeros(count * block, np.float32)
            for i in range(size):
                part[i] = x[start + i]
        rows, now = part.reshape(count, block), codes[: count * block].reshape(count, block)
        _spans(rows, affine, high, low)
        status = _settle(high[:count], low, how, top, start // block, head, factor, zero)
        if status != OK:
            return status
        if element == NF4:
            _nearest(rows, factor, midpoints, now)
        elif element == E2M1:
            _small_float(rows, factor, 1, 1, np.float32(6.0), now)
        elif element == E4M3:
            _small_float(rows, factor, 3, 7, np.float32(448.0), now)
        elif stochastic:
            _dither(rows, factor, zero, start, key, least, most, now)
        else:
            _round(rows, factor, zero, now)
            if affine:
                for i in range(count * block):
                    codes[i] = np.uint8(most) if codes[i] > np.uint8(most) else codes[i]
        for i in range(size, count * block):
            codes[i] = 0
        _pack(codes[: count * block], bits, packed[start // 8 * bits :])
    return OK


# ---- back -------------------------------------------------------------------------------------------------------


@_jit
def _open(head, how, top, step):
    """Fill `step`, a block's scale / top. Returns (status, whether a value could overflow)."""
    element, bits, _, kind, affine, _, blocks = how
    width = _width(kind)
    limit = 0x7F800000 if kind == FP32 else (0x7F80 if kind == BF16 else (0x7C00 if kind == FP16 else 0xFF))
    if element == E2M1:
        limit = 253
    worst, largest, kept = np.int64(0), np.float32(0.0), step.view(np.int32)
    if width == 2:
        halves = head[: 2 * blocks].view(np.uint16)
        for b in range(blocks):
            kept[b] = np.int32(halves[b])
    else:
        for b in range(blocks):
            kept[b] = np.int32(_read(head[b * width :], width))
    for b in range(blocks):
        # As unsigned: a negative scale is larger than any.
        stored = np.int64(np.uint32(kept[b]))
        worst = stored if stored > worst else worst
    if worst >= limit:
        return MALFORMED, False
    for b in range(blocks):
        scale = _scale(kept[b], kind)
        largest = scale if scale > largest else largest
        step[b] = scale / top
    wide = largest >= np.float32(2.0**125)
    if affine:
        last = (1 << bits) - 1
        for b in range(blocks):
            if head[blocks * width + b] > last:
                return MALFORMED, wide
    return OK, wide


@_jit
def _values(codes, step, zero, out):
    """Integer levels."""
    for b in range(out.shape[0]):
        by, place = step[b], np.int32(zero[b])
        for j in range(out.shape[1]):
            out[b, j] = np.float32(np.int32(np.int32(codes[b, j]) - place)) * by


@_jit
def _least(codes):
    least = np.uint8(255)
    for i in range(codes.size):
        least = codes[i] if codes[i] < least else least
    return least


@_jit
def _look_up(codes, step, levels, out):
    """Levels from a table."""
    for b in range(out.shape[0]):
        by = step[b]
        for j in range(out.shape[1]):
            out[b, j] = levels[codes[b, j]] * by


@_entry
def decode(payload, how, top, levels, out):
    """out: float32 [n >= 1]; payload: uint8, of the length due; levels: float32, one a code. Returns a status."""
    element, bits, block, kind, affine, _, blocks = how
    side = (_width(kind) + affine) * blocks
    head, packed = payload[:side], payload[side:]
    step = np.empty(blocks, np.float32)
    status, wide = _open(head, how, top, step)
    unused = 8 * packed.size - out.size * bits
    if status != OK or packed[packed.size - 1] & ((1 << unused) - 1):
        return MALFORMED
    zeros = head[_width(kind) * blocks :] if affine else np.empty(CHUNK // LEAST, np.uint8)
    if not affine:
        for i in range(zeros.size):
            zeros[i] = 1 << (bits - 1)
    codes = np.empty(CHUNK, np.uint8)
    for start in range(0, out.size, CHUNK):
        size, first = min(CHUNK, out.size - start), start // block
        count = (size + block - 1) // block
        part = out[start : start + size]
        if count * block > size:
            part = np.empty(count * block, np.float32)
        rows, now = part.reshape(count, block), codes[: count * block].reshape(count, block)
        _unpack(packed[start // 8 * bits :], bits, codes[: count * block])
        # Past the message's end there may be anything, and a table is looked up by it.
        for i in range(size, count * block):
            codes[i] = 0
        if element == E4M3:
            for i in range(size):
                if codes[i] & np.uint8(0x7F) == 0x7F:
                    return MALFORMED
        if element == UNIFORM:
            if not affine and _least(codes[:size]) == 0:
                return MALFORMED
            _values(now, step[first:], zeros[first:] if affine else zeros, rows)
        else:
            _look_up(now, step[first:], levels, rows)
        if count * block > size:
            for i in range(size):
                out[start + i] = part[i]
    if wide:
        for i in range(out.size):
            out[i] = min(max(out[i], -_FLOAT_MAX), _FLOAT_MAX)
    return OK


# ---- min-max ----------------------------------------------------------------------------------------------------


@_jit
def _ends(x):
    """(lowest, highest, largest magnitude as a bit pattern)."""
    best, low, high = np.int32(0), x[0], x[0]
    for i in range(x.size):
        best = max(best, np.int32(np.float32(x[i]).view(np.int32) & _MAGNITUDE))
        low = x[i] if x[i] < low else low
        high = x[i] if x[i] > high else high
    # Adding zero: of -0 and 0 either may have been met first.
    return low + np.float32(0.0), high + np.float32(0.0), best


@_entry
def encode_minmax(x, block, bits, out):
    """x: float32 [n >= 1]; out: uint8, of the payload's length. Returns a status."""
    side = 8 * ((x.size + block - 1) // block)
    head, packed = out[:side], out[side:]
    codes = np.empty(CHUNK, np.uint8)
    last, half = np.float32((1 << bits) - 1), np.float32(0.5)
    low, width = np.float32(0.0), np.float32(0.0)
    for start in range(0, x.size, CHUNK):
        stop = min(x.size, start + CHUNK)
        at = start
        while at < stop:
            b = at // block
            end = min(stop, (b + 1) * block)
            if at == b * block:
                lowest, highest, best = _ends(x[at : min(x.size, (b + 1) * block)])
                if best >= _INFINITY:
                    return NONFINITE
                _write(np.int64(np.float32(lowest).view(np.int32)), 4, head[8 * b :])
                _write(np.int64(np.float32(highest).view(np.int32)), 4, head[8 * b + 4 :])
                low = lowest * half
                width = highest * half - low
            part, now = x[at:end], codes[at - start : end - start]
            if width > np.float32(0.0):
                for i in range(part.size):
                    now[i] = np.uint8(np.int32(np.rint((part[i] * half - low) / width * last)))
            else:
                for i in range(now.size):
                    now[i] = 0
            at = end
        filled = (stop - start + 7) // 8 * 8
        for i in range(stop - start, filled):
            codes[i] = 0
        _pack(codes[:filled], bits, packed[start // 8 * bits :])
    return OK


@_entry
def decode_minmax(payload, block, bits, out):
    """out: float32 [n >= 1]; payload: uint8, of the length due. Returns a status."""
    blocks = (out.size + block - 1) // block
    head, packed = payload[: 8 * blocks], payload[8 * blocks :]
    unused = 8 * packed.size - out.size * bits
    if packed[packed.size - 1] & ((1 << unused) - 1):
        return MALFORMED
    codes = np.empty(CHUNK, np.uint8)
    last, half, two = np.float32((1 << bits) - 1), np.float32(0.5), np.float32(2.0)
    for start in range(0, out.size, CHUNK):
        stop = min(out.size, start + CHUNK)
        _unpack(packed[start // 8 * bits :], bits, codes[: (stop - start + 7) // 8 * 8])
        at = start
        while at < stop:
            b = at // block
            end = min(stop, (b + 1) * block)
            lowest = np.int32(_read(head[8 * b :], 4)).view(np.float32)
            highest = np.int32(_read(head[8 * b + 4 :], 4)).view(np.float32)
            if not (-_FLOAT_MAX <= lowest <= highest <= _FLOAT_MAX):
                return MALFORMED
            low = lowest * half
            width = highest * half - low
            part, now = out[at:end], codes[at - start : end - start]
            for i in range(part.size):
                value = (np.float32(np.int32(now[i])) / last * width + low) * two
                part[i] = min(max(value, lowest), highest)
            at = end
    return OK
