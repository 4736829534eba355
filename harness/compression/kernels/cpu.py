"""Fixed-point coding on one CPU thread: the bytes of reference.py, several times faster than its torch operations.

numpy arrays in and out; nothing of the tensor's size is allocated. `*_change` work on a memory's rows as well: the
difference is formed, coded and added to the rows while a block of it is at hand.
"""

# ruff: noqa: PLR0917 - kernels take arrays and shapes by position

from __future__ import annotations

import functools
import time
from typing import Any, NamedTuple

import numpy as np

from thinpipe.harness.compression.kernels import fused
from thinpipe.harness.compression.kernels.layout import Grid, Layout
from thinpipe.harness.errors import CodecError, DivergedError, OverflowedError


def encode(x: np.ndarray, where: Layout, grid: Grid, key: int, out: np.ndarray) -> int:
    """Write the payload of `x` (float32, C-contiguous) into `out` (uint8); return its length.

    Raises DivergedError where x is not finite, CodecError where the published form's fp16 scale overflows.
    """
    plan = _plan(where, grid)
    if plan.total:
        _encode_checked(x.reshape(plan.shape), plan.rows, None, plan.rows, plan.whole, plan, key, out)
    return plan.total


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
    """As `encode` for x[rows] - m[slots], and m[slots] += what is decoded from it, rounded to what m keeps.

    x: (any, row) float32; m: (any, row), uint16 = bf16 patterns, int16 = fp16 patterns, or float32; rows and slots:
    int64 [where.outer], slots distinct.
    Returns (length, the largest |sum|), or None, with m as it was, where a sum might overflow.
    """
    plan = _plan(where, grid)
    if not plan.total:
        return 0, 0.0
    best = _encode_checked(x, rows, m, slots, plan.inside, plan, key, out)
    return None if best is None else (plan.total, _float(best))


def decode(payload: np.ndarray, where: Layout, grid: Grid, out: np.ndarray) -> None:
    """Fill `out` (float32, C-contiguous) from a payload of its exact length; CodecError where it is malformed."""
    plan = _plan(where, grid)
    _decode_checked(payload, None, plan.rows, plan.whole, plan, out.reshape(plan.shape))


def decode_change(
    payload: np.ndarray, m: np.ndarray, slots: np.ndarray, where: Layout, grid: Grid, out: np.ndarray
) -> float | None:
    """m[slots] += the decoded change, rounded to what m keeps (see encode_change); `out` (outer, row) gets the sums
    before that rounding.

    Returns the largest |sum|, or None, with m as it was, where a sum might overflow.
    """
    plan = _plan(where, grid)
    best = _decode_checked(payload, m, slots, plan.inside, plan, out)
    return None if best is None else _float(best)


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
    x, out = np.zeros((1, 8), np.float32), np.zeros(20, np.uint8)
    rows = np.zeros(1, np.int64)
    encode(x, where, grid, 0, out)
    decode(out, where, grid, x)
    for kind in (np.uint16, np.int16, np.float32):
        m = np.zeros((1, 8), kind)
        encode_change(x, rows, m, rows, where, grid, 0, out)
        decode_change(out, m, rows, where, grid, x)
    copy(x[0], x[0].copy())
    peak(x[0])
    return time.perf_counter() - start


class _Plan(NamedTuple):
    """What follows from a layout and a grid, worked out once: a message of 0.5 MB takes only some 50 us."""

    grid: Grid
    total: int
    shape: tuple[int, int]
    rows: np.ndarray
    whole: tuple[int, ...]
    inside: tuple[int, ...]
    numbers: tuple[int, ...]
    eps: np.float32


@functools.lru_cache(maxsize=256)
def _plan(where: Layout, grid: Grid) -> _Plan:
    """`whole` is a view with as few outer slices as the layout allows, since blocks do not reach across them."""
    inside = (where.middle, where.inner, where.so, where.sm, where.si)
    shape, whole = (where.outer, where.row), inside
    if (where.so, where.sm) == (0, 0) or (where.sm == 1 and where.so == where.middle):
        shape, whole = (1, where.numel), (where.outer * where.middle, where.inner, 0, where.sm, where.si)
    numbers = (grid.bits, grid.low, grid.high, grid.offset, grid.steps, where.num_scales)
    rows = np.arange(shape[0], dtype=np.int64)
    return _Plan(grid, grid.num_bytes(where), shape, rows, whole, inside, numbers, np.float32(grid.eps))


def _encode_checked(
    x: np.ndarray,
    rows: np.ndarray,
    m: Any,
    slots: np.ndarray,
    view: tuple[int, ...],
    plan: _Plan,
    key: int,
    out: np.ndarray,
) -> int | None:
    """Returns the largest |sum| as a bit pattern, None where one might overflow."""
    grid = plan.grid
    status, best = fused.encode(
        x, rows, m, slots, view, plan.numbers, plan.eps, grid.published, grid.stochastic, np.uint64(key),
        out[: plan.total],
    )  # fmt: skip
    if status == fused.NONFINITE:
        raise DivergedError("the tensor to send holds a non-finite value (NaN or infinity)")
    if status == fused.SCALE_OVERFLOW:
        raise OverflowedError(
            "a scale above 65504 made a non-finite value from a finite one: preset=acsgd keeps scales as fp16; "
            "leave the preset out to use bf16"
        )
    return None if status == fused.WIDE else best


def _decode_checked(
    payload: np.ndarray, m: Any, slots: np.ndarray, view: tuple[int, ...], plan: _Plan, out: np.ndarray
) -> int | None:
    """Returns the largest |sum| as a bit pattern, None where one might overflow."""
    if payload.size != plan.total:
        raise CodecError(f"the payload is malformed: {payload.size} B where {plan.total} B are due")
    if not plan.total:
        return 0
    grid = plan.grid
    status, best = fused.decode(payload, m, slots, view, slots.size, plan.numbers, grid.published, grid.symmetric, out)
    if status == fused.MALFORMED:
        raise CodecError("the payload is malformed: no encoder writes such a scale, code or padding")
    return None if status == fused.WIDE else best


def _float(pattern: int) -> float:
    return float(np.int32(pattern).view(np.float32))
