"""The definition of the block quantisers in plain torch, on any device. cpu_blocks.py gives the same bytes.

A message is flat, row-major; every `block` elements share a scale, the last ones fewer (block 0: all of it is one).

    span    = max|x| of the block; affine: (max(x, 0) - min(x, 0)) / 2       float32, one rounding an operation
    scale   = span rounded up to what is kept of it; zero where span < 2^-118
    scaled  = x * (top / scale)                                              e2m1: scale = 2^(floor(log2 span) - 2)
    code    = the level nearest to `scaled`; uniform: clip(round(scaled) + zero)
    payload = scales, zero points (affine: a byte each), then the codes' low bits, first element in the highest bits
    decoded = level * (scale / top), within float32's range

Every scale is at least its block's span, so nothing clips but e2m1 (as published) and half a step at the ends of an
affine block. Zero has a level in each: it is code 2^(bits-1) of absmax, and an affine block's range is extended to hold
it and its place rounded to a code. Stochastic rounding is that of reference.py: floor, plus one where a counter-based
uniform number, by the element's place in the message, is below the fraction; it leaves one level of an affine grid
free, so that rounding its ends away from zero does not clip.

Min-max (arXiv 2401.07788) has no scale but the two ends, float32, and no level at zero:

    code    = round((x - low) / (high - low) * (2^bits - 1))
    decoded = code / (2^bits - 1) * (high - low) + low, within low .. high

worked out on halves of x, low and high, so that no difference overflows.
"""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass

import torch

from thinpipe.harness.compression.kernels.layout import BF16_MAX, TINY
from thinpipe.harness.compression.kernels.reference import pack, uniform, unpack
from thinpipe.harness.errors import CodecError, DivergedError, OverflowedError

FLOAT_MAX = torch.finfo(torch.float32).max
#: Bytes of a stored scale.
WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2, "e8m0": 1}
#: The largest span that a kind of scale can hold, where that is not every finite one.
LARGEST_SPAN = {"fp16": 65504.0, "e8m0": 2.0**127}


@dataclass(frozen=True)
class Blocks:
    """How a message is cut and coded.

    bits: of a code; block: elements that share a scale, a multiple of 8; scale: one of WIDTHS, rounded up; element:
    uniform (integers), nf4 (normal-float quantiles), e2m1 or e4m3 (small floats). affine and stochastic: uniform only.
    """

    bits: int
    block: int
    scale: str
    element: str = "uniform"
    affine: bool = False
    stochastic: bool = False

    @property
    def top(self) -> float:
        """What `scaled` is where |x| is the scale."""
        if self.element != "uniform":
            return {"nf4": 1.0, "e2m1": 1.0, "e4m3": 448.0}[self.element]
        return 2.0 ** (self.bits - 1) - (0.5 if self.affine and not self.stochastic else 1.0)

    def num_blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def head_bytes(self, numel: int) -> int:
        return (WIDTHS[self.scale] + self.affine) * self.num_blocks(numel)

    def num_bytes(self, numel: int) -> int:
        return self.head_bytes(numel) + (numel * self.bits + 7) // 8


@dataclass(frozen=True)
class MinMax:
    """Levels between a block's two ends; block: elements of one, 0: all of the message."""

    bits: int
    block: int = 0

    def num_blocks(self, numel: int) -> int:
        return -(-numel // self.block) if self.block else min(numel, 1)

    def num_bytes(self, numel: int) -> int:
        return 8 * self.num_blocks(numel) + (numel * self.bits + 7) // 8


# ---- blocks with a scale ----------------------------------------------------------------------------------------


def encode(x: torch.Tensor, how: Blocks, key: int, out: torch.Tensor) -> int:
    """Write the payload of `x` (float32, any shape) into `out` (uint8); return its length.

    Raises DivergedError where x is not finite, CodecError where a scale cannot be held.
    """
    total, head = how.num_bytes(x.numel()), how.head_bytes(x.numel())
    if not total:
        return 0
    blocks = _cut(x, how.block)
    low, high = _ends(blocks)
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    span = high * 0.5 - low * 0.5 if how.affine else torch.maximum(high, -low)
    stored, scale = _store(span, how)
    factor = torch.where(scale > 0, _number(how.top, scale) / scale, 0.0)
    zero = torch.full_like(scale, 2.0 ** (how.bits - 1))
    if how.affine:
        place = -low * factor
        zero = (place.ceil() if how.stochastic else place.round()).clamp(0, 2**how.bits - 1)
        stored = torch.cat([stored, zero.to(torch.uint8)])
    codes = _codes(blocks * factor[:, None], zero[:, None], how, key).view(-1)[: x.numel()]
    out[:head].copy_(stored)
    out[head:total].copy_(pack(codes, how.bits))
    return total


def decode(payload: torch.Tensor, how: Blocks, out: torch.Tensor) -> torch.Tensor:
    """Fill `out` (float32) from a payload of encode's; CodecError where it cannot be one."""
    count, numel = how.num_blocks(out.numel()), out.numel()
    _require_length(payload, how.num_bytes(numel))
    if not numel:
        return out
    width = WIDTHS[how.scale] * count
    scale = _restore(payload[:width], how)
    codes = _cut(_open_codes(payload[how.head_bytes(numel) :], how.bits, numel), how.block)
    if how.element == "uniform":
        zero = payload[width : width + count, None].float() if how.affine else _number(2 ** (how.bits - 1), scale)
        # _cut fills the last block with zeros: no code of a message, so it is left out of the check.
        if bool((zero > 2**how.bits - 1).any()) or (not how.affine and bool((codes.view(-1)[:numel] == 0).any())):
            raise CodecError("the payload is malformed: a zero point or a code beyond the levels")
        level = codes.float() - zero
    else:
        level = torch.tensor(levels(how.element), device=out.device)[codes.long()]
        if bool(level.isnan().any()):
            raise CodecError("the payload is malformed: a code that stands for no number")
    values = level * (scale / _number(how.top, scale))[:, None]
    out.view(-1).copy_(values.clamp(-FLOAT_MAX, FLOAT_MAX).view(-1)[:numel])
    return out


@functools.cache
def levels(element: str) -> tuple[float, ...]:
    """What each code stands for, in multiples of scale / top; NaN where a code stands for none."""
    if element == "nf4":
        return normal_float_levels()
    exponents, mantissas, bias = {"e2m1": (2, 1, 1), "e4m3": (4, 3, 7)}[element]
    found = []
    for code in range(2 ** (exponents + mantissas)):
        exponent, mantissa = code >> mantissas, code % 2**mantissas
        found.append(
            2.0 ** (exponent - bias) * (1 + mantissa / 2**mantissas)
            if exponent
            else 2.0 ** (1 - bias) * mantissa / 2**mantissas
        )
    if element == "e4m3":
        found[-1] = float("nan")
    return (*found, *(-value for value in found))


@functools.cache
def normal_float_levels() -> tuple[float, ...]:
    """The 16 levels of 4-bit NormalFloat in rising order, the seventh (from 0) being zero (QLoRA, arXiv 2305.14314,
    section 3 and its appendix): quantiles of N(0, 1) at places evenly spaced between 1/2 and 1 - d, 8 above zero and
    7 below it, d = (1/32 + 1/30) / 2, over the largest of them; rounded to float32."""
    normal, outermost = statistics.NormalDist(), 1 - (1 / 32 + 1 / 30) / 2

    def side(count: int) -> list[float]:
        step = (outermost - 0.5) / count
        return [normal.inv_cdf(0.5 + step * i) for i in range(1, count + 1)]

    above, below = side(8), side(7)
    values = torch.tensor([*(-v for v in reversed(below)), 0.0, *above], dtype=torch.float64) / above[-1]
    return tuple(values.float().tolist())


def midpoints() -> torch.Tensor:
    """float32 [15]: from which on (exclusive) `scaled` belongs to the next higher level of nf4."""
    values = torch.tensor(normal_float_levels())
    return (values[1:] + values[:-1]) * 0.5


def _codes(scaled: torch.Tensor, zero: torch.Tensor, how: Blocks, key: int) -> torch.Tensor:
    """uint8 (blocks, block)."""
    if how.element == "nf4":
        return torch.bucketize(scaled, midpoints().to(scaled.device)).to(torch.uint8)
    if how.element == "e4m3":
        return scaled.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    if how.element == "e2m1":
        # Halfway between two levels the one with the even code is taken.
        magnitude = torch.tensor(levels("e2m1")[:8], device=scaled.device)
        halfway, size = (magnitude[1:] + magnitude[:-1]) * 0.5, scaled.abs()
        below, above = torch.bucketize(size, halfway), torch.bucketize(size, halfway, right=True)
        return (torch.where(below % 2 == 0, below, above) + 8 * torch.signbit(scaled)).to(torch.uint8)
    if how.stochastic:
        down = scaled.floor()
        rounded = down + (uniform(scaled.numel(), key, scaled.device).view_as(down) < scaled - down)
    else:
        rounded = scaled.round()
    return (rounded + zero).clamp(0 if how.affine else 1, 2**how.bits - 1).to(torch.uint8)


def _store(span: torch.Tensor, how: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes of the stored scales, float32 scales) of the blocks' spans."""
    largest = LARGEST_SPAN.get(how.scale, FLOAT_MAX) if how.element != "e2m1" else FLOAT_MAX
    if bool((span > largest).any()):
        raise OverflowedError(too_wide(how.scale))
    if how.scale == "fp32":
        kept: torch.Tensor = torch.where(span < TINY, 0.0, span)
        return kept.view(torch.uint8), kept
    if how.scale == "bf16":
        bits = (span.clamp(max=BF16_MAX).view(torch.int32) + 0xFFFF) >> 16
        kind = torch.int16
    elif how.scale == "fp16":
        half = span.to(torch.float16)
        bits = half.view(torch.int16).int() + (half.float() < span)
        kind = torch.int16
    else:
        pattern = span.view(torch.int32)
        bits = (pattern >> 23) - 2 if how.element == "e2m1" else (pattern + 0x7FFFFF) >> 23
        kind = torch.uint8
    stored = torch.where(span < TINY, 0, bits).to(kind).view(torch.uint8)
    return stored, _restore(stored, how)


def _restore(stored: torch.Tensor, how: Blocks) -> torch.Tensor:
    """float32 scales from their bytes. Raises CodecError where no encoder can have written one."""
    stored = stored.clone()
    if how.scale == "e8m0":
        scale = (stored.int() << 23).view(torch.float32)
    elif how.scale == "bf16":
        scale = (stored.view(torch.int16).int() << 16).view(torch.float32)
    else:
        scale = stored.view(torch.float32 if how.scale == "fp32" else torch.float16).float()
    too_large = 2.0**125 if how.element == "e2m1" else FLOAT_MAX
    if bool((torch.signbit(scale) | ~(scale <= too_large)).any()):
        raise CodecError("the payload is malformed: a scale is negative, too large or not finite")
    return scale


def too_wide(scale: str) -> str:
    return (
        f"a scale above {LARGEST_SPAN[scale]:g} made a non-finite value from a finite one: scale={scale} cannot hold "
        "it; use scale=bf16"
    )


# ---- min-max ----------------------------------------------------------------------------------------------------


def encode_minmax(x: torch.Tensor, how: MinMax, out: torch.Tensor) -> int:
    """Write the payload of `x` (float32, any shape): two float32 a block (low, high), then the codes; its length."""
    total = how.num_bytes(x.numel())
    if not total:
        return 0
    blocks = _cut(x, how.block or x.numel(), fill=x.reshape(-1)[-1])
    ends = torch.stack(_ends(blocks), dim=1)
    low, width = _halves(ends)
    part = torch.where(width > 0, (blocks * 0.5 - low) / width, 0.0)
    codes = (part * _number(2**how.bits - 1, part)).round().to(torch.uint8).view(-1)[: x.numel()]
    head = 4 * ends.numel()
    out[:head].copy_(ends.view(-1).view(torch.uint8))
    out[head:total].copy_(pack(codes, how.bits))
    return total


def decode_minmax(payload: torch.Tensor, how: MinMax, out: torch.Tensor) -> torch.Tensor:
    """Fill `out` (float32) from a payload of encode_minmax's; CodecError where it cannot be one."""
    _require_length(payload, how.num_bytes(out.numel()))
    if not out.numel():
        return out
    head = 8 * how.num_blocks(out.numel())
    ends = payload[:head].clone().view(torch.float32).view(-1, 2)
    if not bool((torch.isfinite(ends).all(1) & (ends[:, 0] <= ends[:, 1])).all()):
        raise CodecError("the payload is malformed: two ends that are not finite or not in order")
    codes = _cut(_open_codes(payload[head:], how.bits, out.numel()), how.block or out.numel())
    low, width = _halves(ends)
    values = (codes.float() / _number(2**how.bits - 1, low) * width + low) * 2.0
    out.view(-1).copy_(values.clamp(ends[:, :1], ends[:, 1:]).view(-1)[: out.numel()])
    return out


def _halves(ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Half of the lower end and half of the distance, each (blocks, 1)."""
    low = ends[:, :1] * 0.5
    return low, ends[:, 1:] * 0.5 - low


# ---- what both share --------------------------------------------------------------------------------------------


def _cut(x: torch.Tensor, block: int, fill: torch.Tensor | float = 0) -> torch.Tensor:
    """(blocks, block), the last one filled up."""
    flat = x.reshape(-1)
    short = -flat.numel() % block
    if short:
        flat = torch.cat([flat, torch.as_tensor(fill, dtype=flat.dtype, device=flat.device).expand(short)])
    return flat.view(-1, block)


def _ends(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(min, max) of each block; zero has no sign. Raises DivergedError where one is not finite."""
    if not bool(torch.isfinite(blocks).all()):
        raise DivergedError("the tensor to send holds a non-finite value (NaN or infinity)")
    # Adding zero: which of -0 and 0 a minimum returns is nowhere promised.
    return blocks.amin(1) + 0.0, blocks.amax(1) + 0.0


def _open_codes(packed: torch.Tensor, bits: int, numel: int) -> torch.Tensor:
    unused = -numel * bits % 8
    if unused and int(packed[-1]) & ((1 << unused) - 1):
        raise CodecError("the payload is malformed: padding bits are set")
    return unpack(packed, bits, numel)


def _require_length(payload: torch.Tensor, due: int) -> None:
    if payload.numel() != due:
        raise CodecError(f"the payload is malformed: {payload.numel()} B where {due} B are due")


def _number(value: float, like: torch.Tensor) -> torch.Tensor:
    """As a tensor: by a Python number torch divides through a reciprocal on some devices, which rounds twice."""
    return torch.full((), float(value), device=like.device)
