"""Compiled rotation of tiles by a random-sign Hadamard matrix, for one CPU thread; reference_select.rotate gives
the same bits.

    forward   y = H (signs * x / sqrt(block));   inverse   x = signs * H y / sqrt(block)

H is the Walsh-Hadamard matrix in natural order, applied by butterflies of width 1, 2, 4, ..; the scale comes first,
so that no sum is longer than sqrt(block) times the largest value.
"""

# ruff: noqa: PLR0917 - compiled functions take no keywords

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np


def _jit(function: Callable[..., Any], **options: Any) -> Any:
    """Compiled, and kept on disk where some folder for it can be written (else compiled again by each process)."""
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, **options}
    try:
        return numba.njit(cache=True, nogil=True, error_model="numpy", **options)(function)
    except RuntimeError:
        return numba.njit(nogil=True, error_model="numpy", **options)(function)


@_jit
def _butterflies(tile):
    # Widths 1, 2 and 4 in registers: as loops of a few turns they would take most of the time.
    for i in range(0, tile.size, 8):
        t = tile[i : i + 8]
        a0, a1, a2, a3 = t[0] + t[1], t[0] - t[1], t[2] + t[3], t[2] - t[3]
        a4, a5, a6, a7 = t[4] + t[5], t[4] - t[5], t[6] + t[7], t[6] - t[7]
        b0, b1, b2, b3 = a0 + a2, a1 + a3, a0 - a2, a1 - a3
        b4, b5, b6, b7 = a4 + a6, a5 + a7, a4 - a6, a5 - a7
        t[0], t[1], t[2], t[3] = b0 + b4, b1 + b5, b2 + b6, b3 + b7
        t[4], t[5], t[6], t[7] = b0 - b4, b1 - b5, b2 - b6, b3 - b7
    width = 8
    while width < tile.size:
        for first in range(0, tile.size, 2 * width):
            low, high = tile[first : first + width], tile[first + width : first + 2 * width]
            for i in range(width):
                total = np.float32(low[i] + high[i])
                high[i] = np.float32(low[i] - high[i])
                low[i] = total
        width *= 2


@_jit
def _stands_out(tile, tau):
    """Whether the largest magnitude is more than tau times the second largest."""
    largest = second = np.float32(0.0)
    for i in range(tile.size):
        size = np.abs(tile[i])
        second = max(second, min(size, largest))
        largest = max(largest, size)
    return largest > np.float32(np.float32(tau) * second)


def _rotate(x, signs, inverse, flags, tau, out):
    """out = the tiles of x rotated, the tail shorter than a tile as it is.

    x, out: float32, flat, may be the same; signs: float32 [block], each +-1 / sqrt(block). flags (uint8, a bit a tile,
    first in the lowest bit): which tiles are rotated; filled here where tau > 0, all of them where flags is empty.
    """
    block = signs.size
    tiles = x.size // block
    for t in range(tiles):
        source, tile = x[t * block : (t + 1) * block], out[t * block : (t + 1) * block]
        chosen = True
        if flags.size:
            if tau > 0:
                chosen = _stands_out(source, tau)
                flags[t >> 3] |= np.uint8(np.uint8(chosen) << (t & 7))
            else:
                chosen = (flags[t >> 3] >> (t & 7)) & 1 == 1
        for i in range(block):
            tile[i] = source[i]
        if chosen and not inverse:
            for i in range(block):
                tile[i] = np.float32(tile[i] * signs[i])
        elif chosen:
            # 1 / sqrt(block) first here too.
            for i in range(block):
                tile[i] = np.float32(tile[i] * np.abs(signs[i]))
        if chosen:
            _butterflies(tile)
        if chosen and inverse:
            for i in range(block):
                tile[i] = tile[i] if signs[i] > 0 else -tile[i]
    for i in range(tiles * block, x.size):
        out[i] = x[i]


rotate = _jit(_rotate, no_cpython_wrapper=False)
