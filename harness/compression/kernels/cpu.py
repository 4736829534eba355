"""Fixed-point coding on one CPU thread: the bytes of reference.py, several times faster than its torch operations.

numpy arrays in and out; nothing of the tensor's size is allocated. `*_change` work on a memory's rows as well: the
difference is formed, coded and added to the rows while a block of it is at hand.
"""

# ruff: noqa: PLR0917 - kernels take arrays and shapes by position

from __future__ import annotations

import functools
import time
from typing import Any

import numpy as np

from thinpipe.harness.compression.kernels import fused
from thinpipe.harness.compression.kernels.layout import Grid, Layout
from thinpipe.harness.errors import CodecError, DivergedError


def encode(x: np.ndarray, where: Layout, grid: Grid, key: int, out: np.ndarray) -> int:
    """Write the payload of `x` (float32, C-contiguous) into `out` (uint8); return its length.

    Raises DivergedError where x is not finite, CodecError where the published form's fp16 scale overflows.
    """
    total = grid.num_bytes(where)
    if total:
        shape, whole = _whole(where)
        rows = _first(shape[0])
        _encode_checked(x.reshape(shape), rows, None, rows, whole, grid, where, key, out[:total])
    return total


def encode_change(
    x: np.ndarray,
    rows: np.ndarray,
    m: np.ndarray,
    slots: np.ndarray,
    where: Layout,
    grid: Grid,
    key: int,
    out: np.ndarray,
) -> tuple[int, float] | None:
    """As `encode` for x[rows] - m[slots], and m[slots] += what is decoded from it, rounded to bf16.

    x: (any, row) float32; m: (any, row) uint16, bf16 patterns; rows and slots: int64 [where.outer], slots distinct.
    Returns (length, the largest |sum|), or None, with m as it was, where a sum might overflow.
    """
    total = grid.num_bytes(where)
    best = _encode_checked(x, rows, m, slots, _inside(where), grid, where, key, out[:total]) if total else 0.0
    return None if best is None else (total, best)


def decode(payload: np.ndarray, where: Layout, grid: Grid, out: np.ndarray) -> None:
    """Fill `out` (float32, C-contiguous) from a payload of its exact length; CodecError where it is malformed."""
    if _due(payload, where, grid):
        shape, whole = _whole(where)
        rows = _first(shape[0])
        _decode_checked(payload, None, rows, whole, grid, where, out.reshape(shape))


def decode_change(
    payload: np.ndarray, m: np.ndarray, slots: np.ndarray, where: Layout, grid: Grid, out: np.ndarray
) -> float | None:
    """m[slots] += the decoded change, rounded to bf16; `out` (outer, row) gets the sums before that rounding.

    Returns the largest |sum|, or None, with m as it was, where a sum might overflow.
    """
    if not _due(payload, where, grid):
        return 0.0
    return _decode_checked(payload, m, slots, _inside(where), grid, where, out)


def copy(source: np.ndarray, target: np.ndarray) -> float:
    """target = source (float32, flat, same size; target may be bytes of any alignment); returns the largest
    magnitude, infinity or NaN if there is any."""
    return _float(fused.copy(source.view(np.int32), target.view(np.int32)))


def peak(x: np.ndarray) -> float:
    """The largest magnitude in `x` (float32, flat), infinity or NaN if there is any."""
    return _float(fused.peak(x.view(np.int32)))


def warm_up() -> float:
    """Compile, or load from disk, everything above, so that processes forked later need not; seconds it took."""
    start = time.perf_counter()
    where, grid = Layout(1, 1, 8, 0, 0, 1, 8), Grid(4)
    x, m, out = np.zeros((1, 8), np.float32), np.zeros((1, 8), np.uint16), np.zeros(20, np.uint8)
    rows = np.zeros(1, np.int64)
    encode(x, where, grid, 0, out)
    decode(out, where, grid, x)
    encode_change(x, rows, m, rows, where, grid, 0, out)
    decode_change(out, m, rows, where, grid, x)
    copy(x[0], x[0].copy())
    peak(x[0])
    return time.perf_counter() - start


def _encode_checked(
    x: np.ndarray, rows: np.ndarray, m: Any, slots: np.ndarray, view: tuple[int, ...], grid: Grid, where: Layout,
    key: int, out: np.ndarray,
) -> float | None:  # fmt: skip
    status, best = fused.encode(
        x, rows, m, slots, view, _numbers(grid, where), np.float32(grid.eps), grid.published, grid.stochastic,
        np.uint64(key), out,
    )  # fmt: skip
    if status == fused.NONFINITE:
        raise DivergedError("the tensor to send holds a non-finite value (NaN or infinity)")
    if status == fused.SCALE_OVERFLOW:
        raise CodecError(
            "a scale above 65504 made a non-finite value from a finite one: preset=acsgd keeps scales as fp16; "
            "leave the preset out to use bf16"
        )
    return None if status == fused.WIDE else _float(best)


def _decode_checked(
    payload: np.ndarray,
    m: Any,
    slots: np.ndarray,
    view: tuple[int, ...],
    grid: Grid,
    where: Layout,
    out: np.ndarray,
) -> float | None:
    status, best = fused.decode(
        payload, m, slots, view, slots.size, _numbers(grid, where), grid.published, grid.symmetric, out
    )
    if status == fused.MALFORMED:
        raise CodecError("the payload is malformed: no encoder writes such a scale, code or padding")
    return None if status == fused.WIDE else _float(best)


def _due(payload: np.ndarray, where: Layout, grid: Grid) -> int:
    total = grid.num_bytes(where)
    if payload.size != total:
        raise CodecError(f"the payload is malformed: {payload.size} B where {total} B are due")
    return total


def _float(pattern: int) -> float:
    return float(np.int32(pattern).view(np.float32))


@functools.lru_cache(maxsize=256)
def _whole(where: Layout) -> tuple[tuple[int, int], tuple[int, ...]]:
    """A view with as few outer slices as the layout allows, since blocks do not reach across them."""
    merged = (where.so, where.sm) == (0, 0) or (where.sm == 1 and where.so == where.middle)
    if merged:
        return (1, where.numel), (where.outer * where.middle, where.inner, 0, where.sm, where.si)
    return (where.outer, where.row), _inside(where)


def _inside(where: Layout) -> tuple[int, ...]:
    return where.middle, where.inner, where.so, where.sm, where.si


@functools.lru_cache(maxsize=64)
def _first(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int64)


@functools.lru_cache(maxsize=256)
def _numbers(grid: Grid, where: Layout) -> tuple[int, ...]:
    return grid.bits, grid.low, grid.high, grid.offset, grid.steps, where.num_scales
