"""Block quantisation on one CPU thread: the bytes of reference_blocks.py. numpy arrays in and out; nothing of the
tensor's size is allocated."""

from __future__ import annotations

import functools
import time
from typing import Any

import numpy as np

from thinpipe.harness.compression.kernels import blocks, reference_blocks
from thinpipe.harness.compression.kernels.reference_blocks import Blocks, MinMax
from thinpipe.harness.errors import CodecError, DivergedError, OverflowedError

_ELEMENTS = {"uniform": blocks.UNIFORM, "nf4": blocks.NF4, "e2m1": blocks.E2M1, "e4m3": blocks.E4M3}
_SCALES = {"fp32": blocks.FP32, "bf16": blocks.BF16, "fp16": blocks.FP16, "e8m0": blocks.E8M0}


def encode(x: np.ndarray, how: Blocks, key: int, out: np.ndarray) -> int:
    """Write the payload of `x` (float32, C-contiguous) into `out` (uint8); return its length.

    Raises DivergedError where x is not finite, CodecError where a scale cannot be held.
    """
    total = how.num_bytes(x.size)
    if total:
        numbers, top, _, midpoints = _plan(how, x.size)
        _check(blocks.encode(x.reshape(-1), numbers, top, midpoints, np.uint64(key), out[:total]), how.scale)
    return total


def decode(payload: np.ndarray, how: Blocks, out: np.ndarray) -> None:
    """Fill `out` (float32, C-contiguous) from a payload of its exact length; CodecError where it is malformed."""
    _require_length(payload, how.num_bytes(out.size))
    if out.size:
        numbers, top, levels, _ = _plan(how, out.size)
        _check(blocks.decode(payload, numbers, top, levels, out.reshape(-1)))


def encode_minmax(x: np.ndarray, how: MinMax, out: np.ndarray) -> int:
    """As `encode`."""
    total = how.num_bytes(x.size)
    if total:
        _check(blocks.encode_minmax(x.reshape(-1), how.block or x.size, how.bits, out[:total]))
    return total


def decode_minmax(payload: np.ndarray, how: MinMax, out: np.ndarray) -> None:
    """As `decode`."""
    _require_length(payload, how.num_bytes(out.size))
    if out.size:
        _check(blocks.decode_minmax(payload, how.block or out.size, how.bits, out.reshape(-1)))


def warm_up() -> float:
    """Compile, or load from disk, everything above; seconds it took."""
    start = time.perf_counter()
    x, out = np.zeros(8, np.float32), np.zeros(32, np.uint8)
    how, ends = Blocks(4, 32, "bf16"), MinMax(4)
    decode(out[: encode(x, how, 0, out)], how, x)
    decode_minmax(out[: encode_minmax(x, ends, out)], ends, x)
    return time.perf_counter() - start


@functools.lru_cache(maxsize=256)
def _plan(how: Blocks, size: int) -> tuple[tuple[int, ...], np.float32, np.ndarray, np.ndarray]:
    """What follows from the arithmetic and the size, worked out once: (numbers, top, levels, midpoints)."""
    numbers = (
        _ELEMENTS[how.element], how.bits, how.block, _SCALES[how.scale], int(how.affine), int(how.stochastic),
        how.num_blocks(size),
    )  # fmt: skip
    table: Any = () if how.element == "uniform" else reference_blocks.levels(how.element)
    return numbers, np.float32(how.top), np.array(table, np.float32), reference_blocks.midpoints().numpy()


def _check(status: int, scale: str = "") -> None:
    if status == blocks.NONFINITE:
        raise DivergedError("the tensor to send holds a non-finite value (NaN or infinity)")
    if status == blocks.SCALE_OVERFLOW:
        raise OverflowedError(reference_blocks.too_wide(scale))
    if status == blocks.MALFORMED:
        raise CodecError("the payload is malformed: no encoder writes such a scale, code or padding")


def _require_length(payload: np.ndarray, due: int) -> None:
    if payload.size != due:
        raise CodecError(f"the payload is malformed: {payload.size} B where {due} B are due")
