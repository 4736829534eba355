"""Block quantisers on a GPU: the bytes of reference_blocks.py, by the kernels of blocks.cu. See cuda.py for the rest.

Blocks of a scale are coded and decoded in one pass. Min-max takes three to encode: its ranges may be the whole message.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from thinpipe.harness.compression.kernels import cuda_device, reference_blocks
from thinpipe.harness.compression.kernels.cuda import pieces, raise_for, require_countable
from thinpipe.harness.compression.kernels.cuda_device import scalars
from thinpipe.harness.compression.kernels.reference_blocks import Blocks, MinMax
from thinpipe.harness.compression.tensors import require_length

# As blocks.cu numbers them.
_ELEMENTS = {"uniform": 0, "nf4": 1, "e2m1": 2, "e4m3": 3}
_SCALES = {"fp32": 0, "bf16": 1, "fp16": 2, "e8m0": 3}


def encode(x: torch.Tensor, how: Blocks, key: int, out: torch.Tensor) -> int:
    """Write the payload of `x` (float32, contiguous, CUDA) into `out` (uint8, same device); return its length.

    Raises DivergedError where x is not finite, CodecError where a scale cannot be held.
    """
    numel, total, head = x.numel(), how.num_bytes(x.numel()), how.head_bytes(x.numel())
    if not total:
        return 0
    require_countable(x, numel)
    status, blocks = torch.zeros(1, dtype=torch.int32, device=x.device), how.num_blocks(numel)
    table = _table(how.element, x.device)
    with cuda_device.on(x.device) as gpu:
        values, payload, found, levels = gpu.arrays(x, out[:total], status, table)
        # A power of two, so that a warp holds whole blocks.
        per = min(gpu.lanes, 1 << ((how.block // 8).bit_length() - 1))
        gpu.run(
            "blocks_codes", blocks * per, values, *scalars(numel, how.block, per, blocks),
            np.int32(_ELEMENTS[how.element]), np.uint32(how.bits), np.int32(_SCALES[how.scale]), np.int32(how.affine),
            np.int32(how.stochastic), np.float32(how.top), *scalars(key & 0xFFFFFFFF, key >> 32), levels, payload,
            payload[head:], found,
        )  # fmt: skip
    raise_for(status, reference_blocks.too_wide(how.scale) if how.scale in reference_blocks.LARGEST_SPAN else "")
    return total


def decode(payload: torch.Tensor, how: Blocks, out: torch.Tensor) -> torch.Tensor:
    """Fill `out` (float32, contiguous, CUDA) from a payload of its exact length; CodecError where it is malformed."""
    numel = out.numel()
    require_length(payload, how.num_bytes(numel))
    if not numel:
        return out
    require_countable(out, numel)
    status, table = torch.zeros(1, dtype=torch.int32, device=out.device), _table(how.element, out.device)
    with cuda_device.on(out.device) as gpu:
        data, values, found, levels = gpu.arrays(payload, out, status, table)
        gpu.run(
            "blocks_values", -(-numel // 8), data, data[how.head_bytes(numel) :],
            *scalars(numel, how.block, how.num_blocks(numel)), np.int32(_ELEMENTS[how.element]), np.uint32(how.bits),
            np.int32(_SCALES[how.scale]), np.int32(how.affine), np.float32(how.top), levels, values, found,
        )  # fmt: skip
    raise_for(status)
    return out


def encode_minmax(x: torch.Tensor, how: MinMax, out: torch.Tensor) -> int:
    """As `encode`."""
    numel, total, blocks = x.numel(), how.num_bytes(x.numel()), how.num_blocks(x.numel())
    if not total:
        return 0
    require_countable(x, numel)
    block = how.block or numel
    work = torch.zeros(1 + 4 * blocks, dtype=torch.int32, device=x.device)
    size, chunks = pieces(min(block, numel), numel)
    with cuda_device.on(x.device) as gpu:
        values, payload, words = gpu.arrays(x, out[:total], work)
        found, ends, ranges = words[:1], words[1 : 1 + 2 * blocks], words[1 + 2 * blocks :]
        threads = blocks * chunks * gpu.lanes
        gpu.run("minmax_ends", threads, values, *scalars(numel, block, blocks, chunks, size), ends)
        gpu.run("minmax_settle", blocks, ends, np.uint32(blocks), payload, ranges, found)
        packed = payload[8 * blocks :]
        gpu.run("minmax_codes", -(-numel // 8), values, *scalars(numel, block, how.bits), ranges, packed)
    raise_for(work)
    return total


def decode_minmax(payload: torch.Tensor, how: MinMax, out: torch.Tensor) -> torch.Tensor:
    """As `decode`."""
    numel = out.numel()
    require_length(payload, how.num_bytes(numel))
    if not numel:
        return out
    require_countable(out, numel)
    status = torch.zeros(1, dtype=torch.int32, device=out.device)
    with cuda_device.on(out.device) as gpu:
        data, values, found = gpu.arrays(payload, out, status)
        numbers = scalars(numel, how.block or numel, how.bits)
        gpu.run("minmax_values", -(-numel // 8), data, data[8 * how.num_blocks(numel) :], *numbers, values, found)
    raise_for(status)
    return out


@functools.lru_cache(maxsize=64)
def _table(element: str, device: torch.device) -> torch.Tensor:
    """The levels of an element type, by code, and behind those of nf4 the midpoints; copied to the device once."""
    if element == "uniform":
        return torch.zeros(1, device=device)
    levels = torch.tensor(reference_blocks.levels(element))
    return (torch.cat([levels, reference_blocks.midpoints()]) if element == "nf4" else levels).to(device)
