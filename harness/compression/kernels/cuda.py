"""Fixed-point coding on a GPU: the bytes of reference.py, in raw CUDA kernels (.cu here) launched through CuPy.

    encode   peaks of |x| by scale (integer maximum of bit patterns: any order gives the same, and NaN and infinity
             show in the same pass)  ->  scales  ->  codes, rounded and packed a group of 8 at a time
    decode   scales, checked  ->  values, codes and padding checked

Torch tensors are handed over without a copy, on torch's current stream. What comes back to the host is one status
word a call, since an error must be raised before the message is used; where one is raised, `out` has been written to.

Tests: without a GPU, tests/contract/test_cuda_source.py compiles the kernels by NVRTC and runs the same text on the
CPU against reference.py, through the functions of this module. With one, and CuPy (`pip install 'thinpipe[cuda13]'`,
the number being that of torch.version.cuda), `make test-gpu` runs the real thing; so does, where torch is another
release than the pipeline supports, `python -m pytest -m gpu --noconftest tests/contract/test_cuda_kernels.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from thinpipe.harness.compression.kernels import cuda_device
from thinpipe.harness.compression.kernels.cuda_device import Launcher, scalars
from thinpipe.harness.compression.kernels.layout import Grid, Layout
from thinpipe.harness.compression.tensors import require_length
from thinpipe.harness.errors import CodecError, DivergedError, OverflowedError, UserError

NONFINITE, SCALE_OVERFLOW, MALFORMED = 1, 2, 4
#: Kernels count elements in 32 bits.
MOST = 2**31 - 1


def encode(x: torch.Tensor, where: Layout, grid: Grid, key: int, out: torch.Tensor) -> int:
    """Write the payload of `x` (float32, contiguous, CUDA) into `out` (uint8, same device); return its length.

    Raises DivergedError where x is not finite, CodecError where the published form's fp16 scale overflows.
    """
    total, count = grid.num_bytes(where), where.num_scales
    if not total:
        return 0
    require_countable(x, where.numel)
    work = torch.zeros(1 + 2 * count, dtype=torch.int32, device=x.device)
    with cuda_device.on(x.device) as gpu:
        values, payload, words = gpu.arrays(x, out[:total], work)
        status, peaks, factor = words[:1], words[1 : 1 + count], words[1 + count :]
        _peaks(gpu, values, where, peaks)
        gpu.run(
            "fixpoint_scales", count, peaks, np.uint32(count), np.float32(grid.steps), np.float32(grid.eps),
            np.int32(grid.published), payload, factor, status,
        )  # fmt: skip
        gpu.run(
            "fixpoint_codes", -(-where.numel // 8), values, *_view(where), factor, np.uint32(grid.bits),
            np.float32(grid.low), np.float32(grid.high), np.int32(grid.published), np.int32(grid.stochastic),
            *scalars(key & 0xFFFFFFFF, key >> 32), payload[2 * count :],
        )  # fmt: skip
    raise_for(
        work,
        "a scale above 65504 made a non-finite value from a finite one: preset=acsgd keeps scales as fp16; "
        "leave the preset out to use bf16",
    )
    return total


def decode(payload: torch.Tensor, where: Layout, grid: Grid, out: torch.Tensor) -> torch.Tensor:
    """Fill `out` (float32, contiguous, CUDA) from a payload of its exact length; CodecError where it is malformed."""
    total, count = grid.num_bytes(where), where.num_scales
    require_length(payload, total)
    if not total:
        return out
    require_countable(out, where.numel)
    work = torch.zeros(1 + count, dtype=torch.int32, device=out.device)
    with cuda_device.on(out.device) as gpu:
        data, values, words = gpu.arrays(payload, out, work)
        status, step = words[:1], words[1:]
        gpu.run(
            "fixpoint_steps", count, data, np.uint32(count), np.float32(grid.steps), np.int32(grid.published),
            step, status,
        )  # fmt: skip
        gpu.run(
            "fixpoint_values", -(-where.numel // 8), data[2 * count :], *_view(where), step, np.uint32(grid.bits),
            np.int32(grid.symmetric), values, status,
        )  # fmt: skip
    raise_for(work)
    return out


def require_countable(x: torch.Tensor, numel: int) -> None:
    """Raise UserError where `x`, of `numel` elements, is more than the kernels count."""
    if numel > MOST:
        raise UserError(f"a message of {numel} elements on a GPU: at most {MOST}; use smaller micro-batches")
    assert x.is_contiguous()
    assert x.numel() == numel


def raise_for(work: torch.Tensor, overflow: str = "") -> None:
    """Wait for the kernels and raise what the status, the first word of `work`, says; `overflow` words one error."""
    found = int(work[0].item())
    if found & NONFINITE:
        raise DivergedError("the tensor to send holds a non-finite value (NaN or infinity)")
    if found & SCALE_OVERFLOW:
        raise OverflowedError(overflow)
    if found & MALFORMED:
        raise CodecError("the payload is malformed: no encoder writes such a scale, code or padding")


def pieces(run: int, numel: int) -> tuple[int, int]:
    """(elements of a piece, pieces of a run): enough warps to fill a large GPU, each with work worth its atomic."""
    size = min(run, max(1024, -(-numel // 2**13)))
    return size, -(-run // size)


def _view(where: Layout) -> list[np.uint32]:
    return scalars(where.numel, where.middle, where.inner, where.so, where.sm, where.si)


def _peaks(gpu: Launcher, values: Any, where: Layout, peaks: Any) -> None:
    """max|x| of each scale into `peaks` (zeros), outer slices taken together where they share their scales."""
    outer, middle, inner = where.outer, where.middle, where.inner
    if where.si:
        if not where.so:
            outer, middle = 1, outer * middle
        # Enough threads to fill a large GPU, with enough rows each to make their one atomic cheap.
        size = min(middle, max(16, -(-where.numel // 2**18)))
        chunks = -(-middle // size)
        arguments = scalars(outer, middle, inner, where.so, chunks, size)
        gpu.run("peaks_of_columns", outer * chunks * inner, values, *arguments, peaks)
        return
    segments = outer * middle
    if where.num_scales == 1:
        segments, middle, inner = 1, 1, where.numel
    size, chunks = pieces(inner, where.numel)
    arguments = scalars(segments, middle, inner, where.so, where.sm, chunks, size)
    gpu.run("peaks_of_runs", segments * chunks * gpu.lanes, values, *arguments, peaks)
