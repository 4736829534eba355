"""How a tensor's elements map to scales, and which grid of levels a fixed-point codec uses."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

#: Below this a bf16 scale counts as zero: levels / scale would leave float32's range.
TINY = 2.0**-118
#: The largest bf16 value; a scale that would round up past it stays here.
BF16_MAX = float.fromhex("0x1.fep127")

#: A memory's rows are moved in place only while rows and changes are below this, an eighth of what ends the format
#: they are kept in: no sum can overflow.
SAFE = {"bf16": 2.0**125, "fp16": 2.0**13, "fp32": 2.0**125}


@dataclass(frozen=True)
class Layout:
    """A contiguous tensor seen as (outer, middle, inner); element (o, m, i) uses scale o*so + m*sm + i*si."""

    outer: int
    middle: int
    inner: int
    so: int
    sm: int
    si: int
    num_scales: int

    @property
    def row(self) -> int:
        """Elements of one outer slice."""
        return self.middle * self.inner

    @property
    def numel(self) -> int:
        return self.outer * self.middle * self.inner


@functools.lru_cache(maxsize=256)
def layout(shape: tuple[int, ...], scale: str) -> Layout:
    """Scales of a tensor whose first axis is the sample; none where the tensor is empty.

    tensor: one. channel: one an entry of the channel axis, over everything else; that axis is the last one up to
    3 dimensions (.., sequence, hidden) and axis 1 from 4 on (sample, channel, height, width). token: one a position,
    over the channel axis: a row of the last axis up to 3 dimensions, a pixel of a sample from 4 on.
    """
    assert shape
    assert scale in ("tensor", "token", "channel")
    outer = shape[0]
    if 0 in shape:
        return Layout(outer, 0, 0, 0, 0, 0, 0)
    if len(shape) == 1:
        shape = (outer, 1)
    if scale == "tensor":
        return Layout(outer, 1, math.prod(shape[1:]), 0, 0, 0, 1)
    if len(shape) <= 3:
        middle, inner = math.prod(shape[1:-1]), shape[-1]
        if scale == "channel":
            return Layout(outer, middle, inner, 0, 0, 1, inner)
        return Layout(outer, middle, inner, middle, 1, 0, outer * middle)
    middle, inner = shape[1], math.prod(shape[2:])
    if scale == "channel":
        return Layout(outer, middle, inner, 0, 1, 0, middle)
    return Layout(outer, middle, inner, inner, 0, 1, outer * inner)


@dataclass(frozen=True)
class Grid:
    """The levels code * scale / steps for code in low..high, stored as code + offset in `bits` bits.

    published: scales as fp16, x / ((scale + eps) / steps) instead of a product with a reciprocal.
    """

    bits: int
    symmetric: bool = False
    stochastic: bool = False
    published: bool = False
    eps: float = 0.0

    @property
    def offset(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def steps(self) -> int:
        return self.offset - 1 if self.symmetric else self.offset

    @property
    def low(self) -> int:
        return -self.steps

    @property
    def high(self) -> int:
        return self.offset - 1

    def num_bytes(self, where: Layout) -> int:
        """Two bytes a scale, then the codes without gaps."""
        return 2 * where.num_scales + (where.numel * self.bits + 7) // 8
