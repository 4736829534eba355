"""Compiled loops of sparse codecs for one CPU thread: which elements are kept, and how they are picked and put back.

Magnitudes are compared as bit patterns: of two finite floats the larger pattern is the larger magnitude, and NaN and
infinity are above all of them. The k-th largest is found by halving the range of patterns and counting, since a count
is one vectorised pass: over all of a small group, else over the candidates above a bound that a sample suggests. The
sample decides about speed only; what is found is exact, and that of reference_select.py.

One file, because the compiled code is kept on disk by this file's time stamp.
"""

# ruff: noqa: PLR0917 - compiled functions take no keywords

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

#: Groups up to this size are counted whole, larger ones by candidates.
DIRECT = 4096
SAMPLE = 1024
#: Places past the last position that may be written.
SLACK = 8

_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)
_U64 = np.uint64

# Of eight elements, those whose bit is set in a byte: where they are, a byte each in a word, and how many.
_MASK = 2048
_SETS = [[j for j in range(8) if byte >> j & 1] for byte in range(256)]
_PLACES = np.array([sum(j << 8 * i for i, j in enumerate(which)) for which in _SETS], np.uint64)
_HOW_MANY = np.array([len(which) for which in _SETS], np.uint8)


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


# ---- the largest of each group ----------------------------------------------------------------------------------


@_jit
def _peak(x):
    best = np.int32(0)
    for i in range(x.size):
        size = np.int32(x[i] & _MAGNITUDE)
        best = size if size > best else best
    return best


@_jit
def _count(x, least):
    """How many magnitudes are `least` or more."""
    found = np.int32(0)
    for i in range(x.size):
        found = np.int32(found + np.int32(np.int32(x[i] & _MAGNITUDE) >= least))
    return found


@_jit
def _threshold(x, k, low, at_low, high, at_high):
    """(bound, ties): the k largest are those above `bound` and the first `ties` that equal it.

    More than k are `low` or more: at_low, and fewer `high` or more: at_high. Where the next count is taken is guessed
    in turn by halving and by the counts' slope, which takes a third of the steps on smooth data.
    """
    halve = False
    while np.int32(high - low) > 1:
        span = np.int64(high - low)
        ahead = span // 2 if halve else np.int64(span * ((at_low - k) / (at_low - at_high)))
        middle = np.int32(low + min(max(ahead, 1), span - 1))
        halve = not halve
        found = np.int64(_count(x, middle))
        if found == k:
            return np.int32(middle - 1), np.int64(0)
        if found > k:
            low, at_low = middle, found
        else:
            high, at_high = middle, found
    return low, np.int64(k - at_high)


@_jit
def _expand(words, count, base, positions, place):
    """Positions (plus base) of the bytes that are 1 among the first `count` of `words`; returns the next place.

    Eight bytes at a time, by a table of where the ones are. Up to SLACK places past the last one are written. Unsigned
    indices: signed ones would be checked for being negative.
    """
    for w in range((count + 7) // 8):
        which = _U64(words[_U64(w)] * _U64(0x0102040810204080)) >> _U64(56)
        first, places, many = np.int32(base + 8 * w), _PLACES[which], _U64(_HOW_MANY[which])
        positions[place] = np.int32(first + np.int32(places & _U64(7)))
        positions[place + _U64(1)] = np.int32(first + np.int32((places >> _U64(8)) & _U64(7)))
        if many > _U64(2):
            for j in range(2, 8):
                positions[place + _U64(j)] = np.int32(first + np.int32((places >> _U64(8 * j)) & _U64(7)))
        place = _U64(place + many)
    return place


@_jit
def _above(x, bound, base, positions, at):
    """Positions (plus base) of what is above `bound`, from positions[at] on; returns the next place."""
    mask = np.empty(_MASK, np.uint8)
    place = _U64(at)
    for start in range(0, x.size, _MASK):
        part = x[start : start + _MASK]
        for i in range(part.size):
            mask[i] = np.uint8(np.int32(part[i] & _MAGNITUDE) > bound)
        for i in range(part.size, (part.size + 7) // 8 * 8):
            mask[i] = 0
        place = _expand(mask.view(np.uint64), part.size, base + start, positions, place)
    return np.int64(place)


@_jit
def _scan(x, bound, positions):
    """(how many are above `bound`, the largest magnitude), and the former's positions, in one pass over memory.

    (-1, 0) where there are more than positions.size - _MASK - SLACK.
    """
    mask = np.empty(_MASK, np.uint8)
    place, room, top = _U64(0), _U64(positions.size - _MASK - SLACK), np.int32(0)
    for start in range(0, x.size, _MASK):
        if place > room:
            return -1, np.int32(0)
        part = x[start : start + _MASK]
        for i in range(part.size):
            size = np.int32(part[i] & _MAGNITUDE)
            top = size if size > top else top
            mask[i] = np.uint8(size > bound)
        for i in range(part.size, (part.size + 7) // 8 * 8):
            mask[i] = 0
        place = _expand(mask.view(np.uint64), part.size, start, positions, place)
    return (np.int64(place), top) if place <= room else (-1, np.int32(0))


@_jit
def _take(x, bound, ties, base, positions, at):
    """As _above, and of the first `ties` elements equal to `bound`."""
    if ties == 0:
        return _above(x, bound, base, positions, at)
    for i in range(x.size):
        size = np.int32(x[i] & _MAGNITUDE)
        equal = size == bound and ties > 0
        positions[at] = base + i
        at += equal or size > bound
        ties -= equal
    return at


@_jit
def _best(x, k, least, found, top, drop, base, positions, at):
    """The k largest of x, `found` of which are `least` or more, the largest being `top`; returns the next place."""
    if k == 0:
        return at
    if found <= k:
        return _above(x, np.int32(least - 1), base, positions, at)
    bound, ties = _threshold(x, k, least, found, np.int32(top + 1), np.int64(0))
    return _take(x, bound, 0 if drop else ties, base, positions, at)


@_jit
def _suggest(x, k, sample):
    """A bound that a few more than k magnitudes are likely to reach, by a jittered sample."""
    stride, h = x.size // SAMPLE, np.uint32(0x9E3779B9)
    for j in range(SAMPLE):
        h = np.uint32(h * np.uint32(1664525) + np.uint32(1013904223))
        sample[j] = x[j * stride + np.int64((_U64(h) * _U64(stride)) >> _U64(32))]
    share = k / x.size
    rank = np.int32(SAMPLE * share + 3.5 * np.sqrt(SAMPLE * share * (1.0 - share)) + 3.0)
    found = np.int64(_count(sample, np.int32(1)))
    if rank >= found:
        return np.int32(1)
    return max(np.int32(1), _threshold(sample, rank, np.int32(1), found, _INFINITY, np.int64(0))[0])


@_entry
def largest(x, k, drop, positions):
    """The `k` largest magnitudes but zeros of each row of `x` (int32 patterns, 2-D), ties by the lowest index.

    drop: of elements equal to the smallest kept, where not all can be kept, none is. positions: int32, at least
    groups * k + SLACK; gets flat positions in ascending order. Returns how many, -1 where x is not finite.
    """
    groups, size = x.shape
    large = k > 0 and size > DIRECT
    room = k + k // 2 + 256 if large else 0
    places, sizes = np.empty(room + _MASK + SLACK, np.int32), np.empty(room, np.int32)
    sample = np.empty(SAMPLE, np.int32)
    at = 0
    for g in range(groups):
        row, base = x[g], g * size
        if large:
            least = _suggest(row, k, sample)
            found, top = _scan(row, np.int32(least - 1), places)
            if top >= _INFINITY:
                return -1
            if found >= k:
                for j in range(found):
                    sizes[j] = row[places[j]]
                first = at
                at = _best(sizes[:found], k, least, found, top, drop, 0, positions, at)
                for j in range(first, at):
                    positions[j] = places[positions[j]] + base
                continue
        top = _peak(row)
        if top >= _INFINITY:
            return -1
        at = _best(row, k, np.int32(1), np.int64(_count(row, np.int32(1))), top, drop, base, positions, at)
    return at


# ---- a random subset --------------------------------------------------------------------------------------------


@_jit
def _mix(h):
    h = np.uint32((h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    h = np.uint32((h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(h ^ (h >> np.uint32(16)))


@_entry
def draw(count, k, key, positions):
    """`k` of the positions 0..count-1, ascending, each subset as likely as any other: position i is taken with
    probability (still wanted) / (still to come). positions: int32, at least k + SLACK."""
    key0, key1 = np.uint32(key), np.uint32(key >> _U64(32))
    at = 0
    for i in range(count):
        h = _mix(np.uint32(_mix(np.uint32(np.uint32(i) ^ key0)) ^ key1))
        positions[at] = i
        at += np.int64((_U64(h) * _U64(count - i)) >> _U64(32)) < k - at


# ---- to and from a dense tensor ---------------------------------------------------------------------------------


@_entry
def gather(x, positions, out):
    for j in range(positions.size):
        out[j] = x[positions[j]]


@_entry
def scatter(values, positions, out):
    """out = 0 but for out[positions] = values."""
    for i in range(out.size):
        out[i] = 0
    for j in range(positions.size):
        out[positions[j]] = values[j]


@_entry
def count_nonzero(peer):
    """How many of these int32 patterns of floats are not (positive or negative) zero."""
    return _count(peer, np.int32(1))


@_entry
def gather_where(x, peer, out):
    """out = x where peer is not zero, in order; `out` has one place more than there are."""
    at = 0
    for i in range(x.size):
        out[at] = x[i]
        at += np.int32(peer[i] & _MAGNITUDE) != 0


@_entry
def scatter_where(values, peer, out):
    """The inverse: out = 0 where peer is zero; `values` has one place more than there are."""
    at = 0
    for i in range(out.size):
        kept = np.int32(peer[i] & _MAGNITUDE) != 0
        out[i] = values[at] if kept else np.int32(0)
        at += kept
