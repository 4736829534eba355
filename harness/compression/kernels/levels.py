"""Compiled coding by a table of levels for one CPU thread: the nearest level's number in 1..8 bits, and back.

Codes are packed as fixed-point codes are, the first in the highest bits, the last byte filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

_BLOCK = 1024


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


@_jit
def _codes(x, middles, bits, codes):
    """codes[i]: how many of the ascending `middles` are x[i] or less."""
    if bits <= 5:
        # Vectorised, so faster than looking for the place.
        for i in range(x.size):
            codes[i] = 0
        for j in range(middles.size):
            middle = middles[j]
            for i in range(x.size):
                codes[i] = np.uint8(codes[i] + np.uint8(middle <= x[i]))
        return
    for i in range(x.size):
        code, half = np.uint64(0), np.uint64(1 << (bits - 1))
        while half:
            step = half if middles[np.uint64(code + half - np.uint64(1))] <= x[i] else np.uint64(0)
            code = np.uint64(code + step)
            half = np.uint64(half >> np.uint64(1))
        codes[i] = np.uint8(code)


@_entry
def encode(x, middles, bits, out):
    """Code of each x: how many of the 2^bits - 1 ascending `middles` are x or less.

    x, middles: float32; out: uint8, as long as the codes take. Returns the largest |x|, not finite where any x is not.
    """
    word, held, at = np.uint64(0), 0, 0
    best = np.int32(0)
    codes = np.empty(_BLOCK, np.uint8)
    patterns = x.view(np.int32)
    for start in range(0, x.size, _BLOCK):
        part = x[start : start + _BLOCK]
        for i in range(start, start + part.size):
            size = np.int32(patterns[i] & np.int32(0x7FFFFFFF))
            best = size if size > best else best
        _codes(part, middles, bits, codes)
        for i in range(part.size):
            word = (word << np.uint64(bits)) | np.uint64(codes[i])
            held += bits
            if held >= 8:
                held -= 8
                out[at] = np.uint8(word >> np.uint64(held))
                at += 1
    if held:
        out[at] = np.uint8(word << np.uint64(8 - held))
    return np.int32(best).view(np.float32)


@_entry
def decode(packed, levels, bits, out):
    """out = levels[code]; `packed` has the length that out.size codes take. Returns the bits that are left over."""
    word, held, at, mask = np.uint64(0), 0, 0, np.uint64((1 << bits) - 1)
    for i in range(out.size):
        if held < bits:
            word = (word << np.uint64(8)) | np.uint64(packed[at])
            held += 8
            at += 1
        held -= bits
        out[i] = levels[(word >> np.uint64(held)) & mask]
    return np.int64(word & np.uint64((1 << held) - 1))
