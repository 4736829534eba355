"""The definition of the fixed-point arithmetic in plain torch, on any device. cpu.py gives the same bytes.

    scale   = max|x| over the scale's elements, kept in 2 bytes: bf16 rounded up, so |x| <= scale
    code    = clip(round(x * (steps / scale)), low, high) + offset      float32, one rounding an operation
    payload = scales, then the codes' low bits, first element in the highest bits
    decoded = (code - offset) * (scale / steps)

Rounding is to the nearest, ties to even, or stochastic: floor, plus one where a counter-based uniform number is
below the fraction. Published form (Grid.published; the 2022 AC-SGD code): fp16 scale, x / ((scale + eps) / steps).
"""

from __future__ import annotations

import torch

from thinpipe.harness.compression.kernels.layout import BF16_MAX, TINY, Grid, Layout
from thinpipe.harness.errors import CodecError, DivergedError, OverflowedError

_WORD = 0xFFFFFFFF


def encode(x: torch.Tensor, where: Layout, grid: Grid, key: int, out: torch.Tensor) -> int:
    """Write the payload of `x` (float32, any shape of where.numel elements) into `out`; return its length."""
    total = grid.num_bytes(where)
    if total:
        stored, scale = scales(amax(x, where), grid)
        head = 2 * where.num_scales
        out[:head].copy_(stored.view(torch.uint8))
        out[head:total].copy_(pack(quantise(x, scale, where, grid, key), grid.bits))
    return total


def decode(payload: torch.Tensor, where: Layout, grid: Grid, out: torch.Tensor) -> torch.Tensor:
    """Fill `out` (float32, where.numel elements) from a payload of encode's; CodecError where it cannot be one."""
    codes, scale = open_payload(payload, where, grid)
    if scale.numel():
        out.view(-1).copy_(dequantise(codes, scale, where, grid).view(-1))
    return out


def amax(x: torch.Tensor, where: Layout) -> torch.Tensor:
    """max|x| by scale, float32 [num_scales]. Raises DivergedError where x is not finite."""
    if not bool(torch.isfinite(x).all()):
        raise DivergedError("the tensor to send holds a non-finite value (NaN or infinity)")
    size = x.abs().reshape(where.outer, where.middle, where.inner)
    axes = [axis for axis, stride in enumerate((where.so, where.sm, where.si)) if stride == 0]
    return (size.amax(dim=axes) if axes else size).reshape(-1)


def scales(largest: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """(2-byte form as int16, float32 scale) of max|x|. Raises CodecError where fp16 overflows."""
    if grid.published:
        half = largest.to(torch.float16)
        if not bool(torch.isfinite(half).all()):
            raise OverflowedError(
                f"a scale of {largest.max().item():g} made a non-finite value from a finite one: preset=acsgd "
                "keeps scales as fp16; leave the preset out to use bf16"
            )
        return half.view(torch.int16), half.float()
    up = (largest.clamp(max=BF16_MAX).view(torch.int32) + 0xFFFF) >> 16
    up = torch.where(largest < TINY, 0, up)
    return up.to(torch.int16), (up << 16).view(torch.float32)


def quantise(x: torch.Tensor, scale: torch.Tensor, where: Layout, grid: Grid, key: int) -> torch.Tensor:
    """Codes as uint8, flat, in the tensor's row-major order."""
    values = x.reshape(where.outer, where.middle, where.inner)
    if grid.published:
        scaled = values / spread((scale + grid.eps) / _number(grid.steps, scale), where)
    else:
        scaled = values * spread(torch.where(scale > 0, _number(grid.steps, scale) / (scale + grid.eps), 0.0), where)
    if grid.stochastic:
        down = scaled.floor()
        rounded = down + (uniform(where.numel, key, x.device).view_as(down) < scaled - down)
    else:
        rounded = scaled.round()
    return (rounded.clamp(grid.low, grid.high) + grid.offset).to(torch.uint8).view(-1)


def dequantise(codes: torch.Tensor, scale: torch.Tensor, where: Layout, grid: Grid) -> torch.Tensor:
    """Float32 (outer, middle, inner) of flat uint8 codes."""
    level = codes.view(where.outer, where.middle, where.inner).float() - grid.offset
    return level * spread(scale / _number(grid.steps, scale), where)


def _number(value: int, like: torch.Tensor) -> torch.Tensor:
    """As a tensor: by a Python number torch divides through a reciprocal on some devices, which rounds twice."""
    return torch.full((), float(value), device=like.device)


def spread(values: torch.Tensor, where: Layout) -> torch.Tensor:
    """One value a scale, shaped to broadcast over (outer, middle, inner)."""
    sizes = ((where.outer, where.so), (where.middle, where.sm), (where.inner, where.si))
    return values.view([size if stride else 1 for size, stride in sizes])


def uniform(count: int, key: int, device: torch.device) -> torch.Tensor:
    """Numbers in [0, 1) in steps of 2^-24, one an element, of a counter-based generator with a 64-bit key.

    Two passes of MurmurHash3's 32-bit finaliser over the element's index, one for each half of the key.
    """
    index = torch.arange(count, dtype=torch.int64, device=device)
    mixed = _mix(_mix(index ^ (key & _WORD)) ^ (key >> 32))
    return (mixed >> 8).float() * 2.0**-24


def _mix(h: torch.Tensor) -> torch.Tensor:
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _WORD
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _WORD
    return h ^ (h >> 16)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The low `bits` of each uint8 code as one stream, highest bit first, zero-padded to a byte."""
    places = torch.arange(bits - 1, -1, -1, device=codes.device, dtype=torch.uint8)
    stream = ((codes.unsqueeze(-1) >> places) & 1).view(-1)
    stream = torch.nn.functional.pad(stream, (0, -stream.numel() % 8)).view(-1, 8)
    weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=codes.device)
    return (stream * weights).sum(-1, dtype=torch.uint8)


def unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """`count` uint8 codes from what `pack` gave."""
    places = torch.arange(7, -1, -1, device=packed.device, dtype=torch.uint8)
    stream = ((packed.unsqueeze(-1) >> places) & 1).view(-1)[: count * bits].view(count, bits)
    weights = 1 << torch.arange(bits - 1, -1, -1, device=packed.device, dtype=torch.uint8)
    return (stream * weights).sum(-1, dtype=torch.uint8)


def open_payload(payload: torch.Tensor, where: Layout, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scale) of a payload. Raises CodecError where no encoder can have written it."""
    total = grid.num_bytes(where)
    if payload.numel() != total:
        raise CodecError(f"the payload is malformed: {payload.numel()} B where {total} B are due")
    head = 2 * where.num_scales
    stored = payload[:head].clone().view(torch.int16)
    if grid.published:
        scale = stored.view(torch.float16).float()
    else:
        scale = (stored.to(torch.int32) << 16).view(torch.float32)
    if bool((stored < 0).any()) or not bool(torch.isfinite(scale).all()):
        raise CodecError("the payload is malformed: a scale is negative or not finite")
    codes = unpack(payload[head:], grid.bits, where.numel)
    unused = -where.numel * grid.bits % 8
    if unused and int(payload[-1]) & ((1 << unused) - 1):
        raise CodecError("the payload is malformed: padding bits are set")
    if grid.symmetric and bool((codes == 0).any()):
        raise CodecError("the payload is malformed: a code below the grid's lowest level")
    return codes, scale
