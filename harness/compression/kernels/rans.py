"""Compiled loops of the entropy-coded grid for one CPU thread; entropy.py and codecs/grid.py are their interface.

reference_grid.py is the definition, and gives the same bytes: measure (size of each scale's elements), quantise to
int8 symbols, count them, code them by rANS, and back.

A stream of symbols is

    lo, hi                  int8: symbols outside lo..hi go as an escape
    frequencies             of the escape and of lo..hi, in 4096ths, a variable-length number each
    count, escapes          how many, then each one's symbol as int8
    words                   uint16, read from the last one back
    states                  uint32, one a lane

Element i is coded in lane i % 8, the last one first, so that the decoder goes forward: eight independent chains of
multiplications keep one core busy where one would wait for itself.

One file, because compiled code is kept on disk by this file's time stamp; no fastmath, and sums over elements are of
integers, so that they do not depend on their order.
"""

# ruff: noqa: PLR0917 - compiled functions take no keywords

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

LANES, PRECISION, TOTAL = 8, 12, 4096
MALFORMED = -1
#: The symbol of what is beyond +-127; never inside a table.
WIDE = -128
#: A symbol at the end of the table's range that makes up less than 1 in so many elements goes as an escape.
RARE = 16384
#: log2 of the steps, in RMS, among which one is sought for a rate.
FINEST, COARSEST = -12.0, 8.0

_U32, _U64 = np.uint32, np.uint64
_MAGNITUDE, _INFINITY = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
_BF16_MAX = float.fromhex("0x1.fep127")
_LARGEST = np.float32(float.fromhex("0x1.fffffep127"))
_TINY = 2.0**-126
_BLOCK = 512
_DROP = 44  # bits below the point of a reciprocal; exact for frequencies up to 4095 and states below 2^32


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


# ---- sizes and steps --------------------------------------------------------------------------------------------
#
# view: (runs, inner, middle, so, sm, si). Run r of `inner` elements uses the scale (r // middle) so + (r % middle) sm,
# or, where si is 1, as many scales as elements from there on.


@_jit
def _first_scale(view, r):
    return (r // view[2]) * view[3] + (r % view[2]) * view[4]


@_jit
def _largest(x):
    best = np.int32(0)
    for i in range(x.size):
        size = np.int32(np.float32(x[i]).view(np.int32) & _MAGNITUDE)
        best = size if size > best else best
    return best


@_jit
def _largest_each(x, best):
    for i in range(x.size):
        size = np.int32(np.float32(x[i]).view(np.int32) & _MAGNITUDE)
        best[i] = size if size > best[i] else best[i]


@_jit
def _squares(x, factor):
    total = np.int64(0)
    for i in range(x.size):
        level = np.int32(np.rint(np.float32(x[i] * factor)))
        total += np.int64(np.int32(level * level))
    return total


@_jit
def _squares_each(x, factor, total):
    for i in range(x.size):
        level = np.int32(np.rint(np.float32(x[i] * factor[i])))
        total[i] += np.int64(np.int32(level * level))


@_entry
def measure(x, view, count, rms):
    """Fill `rms` (float64) with the root mean square of each scale's `count` elements; False where x is not finite.

    Magnitudes are taken as integers of at most 2^15, relative to the power of two at or below the largest.
    """
    runs, inner, si = view[0], view[1], view[5]
    best = np.zeros(rms.size, np.int32)
    for r in range(runs):
        part, s = x[r * inner : (r + 1) * inner], _first_scale(view, r)
        if si:
            _largest_each(part, best[s : s + inner])
        else:
            best[s] = max(best[s], _largest(part))
    factor, total = np.empty(rms.size, np.float32), np.zeros(rms.size, np.int64)
    for s in range(rms.size):
        if best[s] >= _INFINITY:
            return False
        exponent = max(np.int32(best[s] >> np.int32(23)) - np.int32(127), np.int32(-112))
        factor[s] = np.int32((np.int32(14) - exponent + np.int32(127)) << np.int32(23)).view(np.float32)
    for r in range(runs):
        part, s = x[r * inner : (r + 1) * inner], _first_scale(view, r)
        if si:
            _squares_each(part, factor[s : s + inner], total[s : s + inner])
        else:
            total[s] += _squares(part, factor[s])
    for s in range(rms.size):
        rms[s] = np.sqrt(np.float64(total[s]) / np.float64(count)) / np.float64(factor[s])
    return True


@_entry
def scales(rms, value, head, step):
    """step = value x rms as bf16, its upper half in `head` (bytes); where that is too small, infinity and 0."""
    stored = head.view(np.uint16)
    for s in range(rms.size):
        wanted = min(value * rms[s], _BF16_MAX)
        if wanted < _TINY:
            stored[s], step[s] = np.uint16(0), np.float32(np.inf)
        else:
            pattern = _U32(np.float32(wanted).view(np.uint32))
            odd = _U32((pattern >> _U32(16)) & _U32(1))
            pattern = _U32(_U32(pattern + _U32(0x7FFF) + odd) >> _U32(16))
            stored[s] = np.uint16(pattern)
            step[s] = _U32(pattern << _U32(16)).view(np.float32)


@_entry
def read_scales(head, step):
    """The steps that `scales` stored, 0 for none; False where no encoder writes such."""
    stored = head.view(np.uint16)
    for s in range(step.size):
        pattern = np.int32(stored[s])
        if pattern >= np.int32(0x7F80) or (pattern != 0 and pattern < np.int32(0x80)):
            return False
        step[s] = np.int32(pattern << np.int32(16)).view(np.float32)
    return True


# ---- levels -----------------------------------------------------------------------------------------------------


@_jit
def _round(x, step, bias, symbols):
    top = np.float32(128.0)
    for i in range(x.size):
        y = np.float32(np.float32(abs(x[i]) / step) + bias)
        level = np.int32(y if y < top else top)
        symbols[i] = np.int8(-level if x[i] < 0 else level)


@_jit
def _round_each(x, step, bias, symbols):
    top = np.float32(128.0)
    for i in range(x.size):
        y = np.float32(np.float32(abs(x[i]) / step[i]) + bias)
        level = np.int32(y if y < top else top)
        symbols[i] = np.int8(-level if x[i] < 0 else level)


@_entry
def count(symbols, counts):
    """Fill `counts` (int64 [256]) with how often each symbol occurs, a negative one at its value + 256."""
    # Four tables: one would wait for its own last store wherever a symbol repeats.
    part = np.zeros((4, 256), np.uint32)
    quarter = symbols.size // 4
    for i in range(quarter):
        part[0, np.uint8(symbols[4 * i])] += _U32(1)
        part[1, np.uint8(symbols[4 * i + 1])] += _U32(1)
        part[2, np.uint8(symbols[4 * i + 2])] += _U32(1)
        part[3, np.uint8(symbols[4 * i + 3])] += _U32(1)
    for i in range(4 * quarter, symbols.size):
        part[0, np.uint8(symbols[i])] += _U32(1)
    for s in range(256):
        counts[s] = np.int64(part[0, s]) + np.int64(part[1, s]) + np.int64(part[2, s]) + np.int64(part[3, s])


@_entry
def quantise(x, step, view, bias, symbols, counts):
    """symbols = sign(x) floor(|x| / step + bias), WIDE beyond +-127; and their counts."""
    runs, inner, si = view[0], view[1], view[5]
    for r in range(runs):
        s, start, stop = _first_scale(view, r), r * inner, (r + 1) * inner
        if si:
            _round_each(x[start:stop], step[s : s + inner], bias, symbols[start:stop])
        else:
            _round(x[start:stop], step[s], bias, symbols[start:stop])
    count(symbols, counts)


@_jit
def _inside(value):
    value = value if value < _LARGEST else _LARGEST
    return value if value > -_LARGEST else -_LARGEST


@_entry
def dequantise(symbols, step, view, out):
    """out = symbol x step, at most the largest float32."""
    runs, inner, si = view[0], view[1], view[5]
    for r in range(runs):
        s, start = _first_scale(view, r), r * inner
        from_, to = symbols[start : start + inner], out[start : start + inner]
        if si:
            steps = step[s : s + inner]
            for i in range(inner):
                to[i] = _inside(np.float32(from_[i]) * steps[i])
        else:
            one = step[s]
            for i in range(inner):
                to[i] = _inside(np.float32(from_[i]) * one)


@_jit
def _outside(symbols, lo, hi):
    """Whether any symbol is."""
    found = np.int32(0)
    for i in range(symbols.size):
        found |= np.int32(symbols[i] < lo) | np.int32(symbols[i] > hi)
    return found != 0


@_entry
def take_wide(symbols, x, values):
    """Write the elements of x (float32) whose symbol is WIDE to `values` (bytes), in order."""
    at, floats = 0, values.view(np.float32)
    for first in range(0, symbols.size, _BLOCK):
        stop = min(symbols.size, first + _BLOCK)
        if _outside(symbols[first:stop], np.int8(-127), np.int8(127)):
            for i in range(first, stop):
                if symbols[i] == WIDE:
                    floats[at] = x[i]
                    at += 1


@_entry
def put_wide(symbols, values, out):
    """The inverse; as many are due as `values` holds. False where one is not finite."""
    at, floats = 0, values.view(np.float32)
    for i in range(floats.size):
        if np.int32(np.float32(floats[i]).view(np.int32) & _MAGNITUDE) >= _INFINITY:
            return False
    for first in range(0, symbols.size, _BLOCK):
        stop = min(symbols.size, first + _BLOCK)
        if _outside(symbols[first:stop], np.int8(-127), np.int8(127)):
            for i in range(first, stop):
                if symbols[i] == WIDE:
                    out[i] = floats[at]
                    at += 1
    return True


# ---- the step for a rate ----------------------------------------------------------------------------------------


@_entry
def sample(x, rms, view, stride, out):
    """out = every stride-th element in units of its scale's RMS, 0 where that is 0."""
    inner, si = view[1], view[5]
    for k in range(out.size):
        i = k * stride
        s = _first_scale(view, i // inner) + (i % inner if si else 0)
        out[k] = np.float32(np.float64(x[i]) / rms[s]) if rms[s] > 0 else np.float32(0.0)


@_entry
def finest(u, bias, goal):
    """log2 of the smallest step, of COARSEST..FINEST, at which levels of `u` take at most `goal` bits an element."""
    symbols, counts = np.empty(u.size, np.int8), np.empty(256, np.int64)
    low, high = FINEST, COARSEST
    for _ in range(13):
        middle = (low + high) / 2
        _round(u, np.float32(2.0**middle), bias, symbols)
        count(symbols, counts)
        bits = 40.0 * counts[WIDE & 255] / u.size
        for s in range(256):
            if counts[s] > 0:
                bits -= counts[s] * np.log2(counts[s] / u.size) / u.size
        if bits > goal:
            low = middle
        else:
            high = middle
    return high


# ---- the table --------------------------------------------------------------------------------------------------


@_jit
def _range(counts, size):
    """(lo, hi): the symbols of a table, without rare ones at its ends; 0, 0 where all are WIDE."""
    lo, hi = -127, 127
    while lo < hi and counts[lo & 255] == 0:
        lo += 1
    while lo < hi and counts[hi & 255] == 0:
        hi -= 1
    if counts[lo & 255] == 0:
        return 0, 0
    while lo < hi and counts[lo & 255] * RARE < size:
        lo += 1
    while lo < hi and counts[hi & 255] * RARE < size:
        hi -= 1
    return lo, hi


@_jit
def _normalise(counts, size, lo, hi, frequency):
    """Fill `frequency`, of the escape and then of lo..hi, with numbers that sum to TOTAL; returns how many escape.

    What occurs gets at least 1, and no one all: where lo and hi are one, it and the escape both get some.
    """
    inside, kinds = np.int64(0), hi - lo + 2
    for s in range(lo, hi + 1):
        inside += counts[s & 255]
    escapes, left, best = size - inside, np.int64(TOTAL), 0
    for t in range(kinds):
        c = escapes if t == 0 else counts[(lo + t - 1) & 255]
        f = (c * TOTAL + size // 2) // size
        frequency[t] = max(f, np.int64(1)) if c > 0 or lo == hi else np.int64(0)
        left -= frequency[t]
        best = t if frequency[t] > frequency[best] else best
    if left > 0:
        frequency[best] += left
    while left < 0:
        best = 0
        for t in range(kinds):
            best = t if frequency[t] > frequency[best] else best
        frequency[best] -= 1
        left += 1
    return escapes


@_jit
def _number_size(value):
    size = 1
    while value >= 128:
        value >>= 7
        size += 1
    return size


@_entry
def put_number(value, out):
    """A non-negative number, 7 bits a byte from the lowest on; returns the bytes written."""
    at = 0
    while value >= 128:
        out[at] = np.uint8((value & 127) | 128)
        value >>= 7
        at += 1
    out[at] = np.uint8(value)
    return at + 1


@_entry
def get_number(source):
    """(number, bytes it takes), at most 5 of these; (0, 0) where there is none or it could be shorter."""
    value, size = np.int64(0), min(source.size, 5)
    for at in range(size):
        value |= np.int64(source[at] & 127) << np.int64(7 * at)
        if source[at] < 128:
            return (np.int64(0), 0) if at > 0 and source[at] == 0 else (value, at + 1)
    return np.int64(0), 0


@_entry
def table_range(counts, size):
    """(lo, hi) of the table that `encode` makes."""
    return _range(counts, size)


@_entry
def table_size(counts, size):
    """Bytes of the table, and of the number of escapes after it."""
    lo, hi = _range(counts, size)
    frequency = np.empty(257, np.int64)
    total = 2 + _number_size(_normalise(counts, size, lo, hi, frequency))
    for t in range(hi - lo + 2):
        total += _number_size(frequency[t])
    return total


@_entry
def cost(counts, size):
    """Bytes `encode` will make of symbols with these counts at most, and no more than 16 above what it makes."""
    lo, hi = _range(counts, size)
    frequency = np.empty(257, np.int64)
    escapes = _normalise(counts, size, lo, hi, frequency)
    bits = 0.0
    for t in range(hi - lo + 2):
        c = escapes if t == 0 else counts[(lo + t - 1) & 255]
        if c > 0:
            bits += c * (np.float64(PRECISION) - np.log2(np.float64(frequency[t])))
    return bits / 8 + table_size(counts, size) + escapes + 4 * LANES


# ---- symbols to words and back ----------------------------------------------------------------------------------


@_jit
def _push(state, at, symbol, reciprocal, rest, words):
    """Put a symbol on a state that may first have to shed a word; branchless, so a word is always stored."""
    i = np.uint8(symbol)
    more = rest[i]
    words[at] = np.uint16(state)
    full = state >= (more >> _U64(32))
    at = _U64(at + _U64(full))
    state = state >> _U64(16) if full else state
    quotient = _U64(_U64(state * reciprocal[i]) >> _U64(_DROP))
    return _U64(_U64(state + (more & _U64(0xFFFF))) + _U64(quotient * _U64((more >> _U64(16)) & _U64(0xFFFF)))), at


@_jit
def _encoder(lo, hi, frequency, reciprocal, rest):
    """Per symbol: 2^44 / f rounded up; and f 2^20 (where a state is full), TOTAL - f and where its slots start."""
    start = np.int64(0)
    for t in range(hi - lo + 2):
        f = frequency[t]
        if f > 0:
            up = _U64(((np.int64(1) << np.int64(_DROP)) + f - 1) // f)
            more = _U64((f << 52) | ((TOTAL - f) << 16) | start)
            if t > 0:
                reciprocal[(lo + t - 1) & 255], rest[(lo + t - 1) & 255] = up, more
            else:
                for s in range(256):
                    reciprocal[s], rest[s] = up, more
        start += f


@_jit
def _code(symbols, reciprocal, rest, words, states):
    """All symbols, last one first. Returns how many words, or MALFORMED where there is no room; needs 8 at least."""
    at, room = _U64(0), np.int64(words.size) - LANES
    for lane in range(LANES):
        states[lane] = 1 << 16
    whole = symbols.size // LANES * LANES
    for lane in range(symbols.size - whole - 1, -1, -1):
        state, at = _push(_U64(states[lane]), at, symbols[whole + lane], reciprocal, rest, words)
        states[lane] = _U32(state)
    i = _U64(whole)
    while i > _U64(0):
        if at > _U64(room):
            return MALFORMED
        i = _U64(i - _U64(LANES))
        for step in range(LANES):
            j = _U64(LANES - 1 - step)
            state, at = _push(_U64(states[j]), at, symbols[_U64(i + j)], reciprocal, rest, words)
            states[j] = _U32(state)
    return np.int64(at)


@_entry
def encode(symbols, counts, out):
    """Write the stream of `symbols` (int8, one or more) with these counts into `out`; its length, 0 where too long."""
    lo, hi = _range(counts, symbols.size)
    frequency = np.empty(257, np.int64)
    escapes = _normalise(counts, symbols.size, lo, hi, frequency)
    if out.size < table_size(counts, symbols.size) + escapes + 4 * LANES:
        return 0
    out[0], out[1], at = np.uint8(lo), np.uint8(hi), 2
    for t in range(hi - lo + 2):
        at += put_number(frequency[t], out[at:])
    at += put_number(escapes, out[at:])
    if escapes:
        for first in range(0, symbols.size, _BLOCK):
            stop = min(symbols.size, first + _BLOCK)
            if _outside(symbols[first:stop], np.int8(lo), np.int8(hi)):
                for i in range(first, stop):
                    if symbols[i] < lo or symbols[i] > hi:
                        out[at] = np.uint8(symbols[i])
                        at += 1
    # Where the escape has no slots, no symbol reads what would be its entry.
    reciprocal, rest = np.zeros(256, np.uint64), np.zeros(256, np.uint64)
    _encoder(lo, hi, frequency, reciprocal, rest)
    room = (out.size - at - 4 * LANES) // 2
    states = np.empty(LANES, np.uint32)
    # The word that is stored whether needed or not may lie where the states come later.
    count = _code(symbols, reciprocal, rest, out[at : at + 2 * room + 4 * LANES].view(np.uint16), states)
    if count < 0 or count > room:
        return 0
    at += 2 * count
    end = out[at : at + 4 * LANES].view(np.uint32)
    for j in range(LANES):
        end[j] = states[j]
    return at + 4 * LANES


@_jit
def _pop(state, at, table, words, symbols, i):
    """Take a symbol off a state, then a word to fill it where that is short; branchless, so a word is always read."""
    entry = table[state & _U32(TOTAL - 1)]
    symbols[i] = np.int8(_U32(entry >> _U32(24)))
    state = _U32(_U32(state >> _U32(PRECISION)) * _U32(_U32(entry >> _U32(12)) & _U32(0xFFF)))
    state = _U32(state + _U32(entry & _U32(0xFFF)))
    short = state < _U32(1 << 16)
    filled = _U32(_U32(state << _U32(16)) | _U32(words[at]))
    return filled if short else state, _U64(at - _U64(short))


@_jit
def _uncode(symbols, table, words, states):
    """Fill `symbols`; words[0] is none of the stream. False unless all words are used and every state is at rest."""
    at, i, whole = _U64(words.size - 1), _U64(0), _U64(symbols.size // LANES * LANES)
    while i < whole and at >= _U64(LANES):
        for step in range(LANES):
            j = _U64(step)
            states[j], at = _pop(states[j], at, table, words, symbols, _U64(i + j))
        i = _U64(i + _U64(LANES))
    for rest in range(np.int64(i), symbols.size):
        lane, before = rest % LANES, at
        states[lane], at = _pop(states[lane], at, table, words, symbols, rest)
        if at > before:  # wrapped: there was no word left
            return False
    good = at == _U64(0)
    for lane in range(LANES):
        good &= states[lane] == _U32(1 << 16)
    return good


@_jit
def _read_table(payload, table):
    """Fill the decoder's table: symbol, frequency and place within its slots. Returns bytes read or MALFORMED."""
    if payload.size < 2:
        return MALFORMED
    lo, hi, at, start = np.int64(np.int8(payload[0])), np.int64(np.int8(payload[1])), 2, 0
    if lo > hi or lo < -127:
        return MALFORMED
    for t in range(hi - lo + 2):
        f, size = get_number(payload[at:])
        if size == 0 or f >= TOTAL or start + f > TOTAL:
            return MALFORMED
        symbol = WIDE if t == 0 else lo + t - 1
        entry = _U32(_U32(_U32(symbol & 255) << _U32(24)) | _U32(_U32(f) << _U32(12)))
        for k in range(f):
            table[start + k] = _U32(entry | _U32(k))
        at += size
        start += f
    return at if start == TOTAL else MALFORMED


@_entry
def decode(payload, symbols):
    """Fill `symbols` (int8) from a stream of its exact length; how many are WIDE, or MALFORMED."""
    table, states = np.empty(TOTAL, np.uint32), np.empty(LANES, np.uint32)
    at = _read_table(payload, table)
    if at < 0:
        return MALFORMED
    escapes, size = get_number(payload[at:])
    at += size
    left = payload.size - at - escapes - 4 * LANES
    if size == 0 or escapes > symbols.size or left < 0 or left % 2:
        return MALFORMED
    stored = payload[payload.size - 4 * LANES :].view(np.uint32)
    for j in range(LANES):
        states[j] = stored[j]
        if states[j] < _U32(1 << 16):
            return MALFORMED
    words = payload[payload.size - 4 * LANES - left - 2 : payload.size - 4 * LANES].view(np.uint16)
    if not _uncode(symbols, table, words, states):
        return MALFORMED
    return _fill_escapes(symbols, payload[at : at + escapes])


@_jit
def _fill_escapes(symbols, escapes):
    """Put each escape's symbol in its place; how many of these are WIDE, or MALFORMED where their number differs."""
    at, wide = 0, 0
    for first in range(0, symbols.size, _BLOCK):
        stop = min(symbols.size, first + _BLOCK)
        if _outside(symbols[first:stop], np.int8(-127), np.int8(127)):
            for i in range(first, stop):
                if symbols[i] == WIDE:
                    if at == escapes.size:
                        return MALFORMED
                    symbols[i] = np.int8(escapes[at])
                    wide += symbols[i] == WIDE
                    at += 1
    return wide if at == escapes.size else MALFORMED
