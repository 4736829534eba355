"""No compression: float32 as it is."""

from __future__ import annotations

import math

import torch

from thinpipe.harness.compression.base import Codec, Context
from thinpipe.harness.compression.kernels import cpu
from thinpipe.harness.compression.tensors import as_bytes, dense, peak, raise_if_diverged, require_length
from thinpipe.harness.errors import CodecError

VERSION = 1
SUMMARY = "float32, uncompressed"
SOURCE = "baseline"
UNBIASED = "1 == 1"
PARAMETERS = {"bits": {"place": "fixed", "value": 32}}
CONTRACT = {"none": {"relative": 0.0, "absolute": 0.0}}


class Uncompressed(Codec):
    """4 bytes an element, little-endian, row-major."""

    def __init__(self) -> None:
        self.diagnostics: dict[str, float] = {}

    def encode(self, x: torch.Tensor, ctx: Context, out: torch.Tensor) -> int:
        x = dense(x, ctx)
        total = 4 * x.numel()
        raise_if_diverged(_copy(as_bytes(x), out[:total]))
        if self.diagnose:
            self.diagnostics = {"rel_error": 0.0}
        return total

    def decode(self, payload: torch.Tensor, ctx: Context, out: torch.Tensor) -> torch.Tensor:
        require_length(payload, self.num_bytes(ctx.shape))
        if not math.isfinite(_copy(payload, as_bytes(out))):
            raise CodecError("the payload is malformed: it holds a non-finite value, which no encoder writes")
        return out

    def max_bytes(self, shape: tuple[int, ...]) -> int:
        return self.num_bytes(shape)

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        return 4 * math.prod(shape)


def _copy(source: torch.Tensor, target: torch.Tensor) -> float:
    """Copy bytes of float32 values; returns the largest magnitude, non-finite where any is."""
    if source.numel() == 0:
        return 0.0
    if source.is_cpu:
        return cpu.copy(source.numpy(), target.numpy())
    target.copy_(source)
    return peak(source.clone().view(torch.float32))
