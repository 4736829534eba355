"""What the two 16-bit float codecs share: a cast, and the refusal of values that it would make infinite."""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from thinpipe.harness.compression.base import Codec, Context
from thinpipe.harness.compression.tensors import (
    as_bytes,
    dense,
    own_decoding,
    peak,
    raise_if_diverged,
    relative_error,
    require_length,
)
from thinpipe.harness.errors import CodecError, OverflowedError


def overflows(largest: float, kind: torch.dtype) -> bool:
    """Whether a finite magnitude becomes infinite in `kind`: from half a step above its largest value on."""
    return kind != torch.float32 and not math.isfinite(torch.tensor(largest).to(kind).item())


class Half(Codec):
    """A cast to `format` and back, round to nearest even; `advice` completes the overflow message."""

    format: ClassVar[torch.dtype]
    advice: ClassVar[str]

    def __init__(self) -> None:
        self.diagnostics: dict[str, float] = {}

    def encode(self, x: torch.Tensor, ctx: Context, out: torch.Tensor) -> int:
        x = dense(x, ctx)
        total = 2 * x.numel()
        largest = peak(x)
        raise_if_diverged(largest)
        if overflows(largest, self.format):
            raise OverflowedError(f"{self.name} made a non-finite value from a finite one ({largest:g}); {self.advice}")
        out[:total].copy_(as_bytes(x.to(self.format)))
        if self.diagnose:
            self.diagnostics = {"rel_error": relative_error(x, own_decoding(self, out[:total], ctx))}
        return total

    def decode(self, payload: torch.Tensor, ctx: Context, out: torch.Tensor) -> torch.Tensor:
        require_length(payload, self.num_bytes(ctx.shape))
        # A view needs 2-byte alignment, which a slice of someone's buffer need not have.
        aligned = payload if payload.storage_offset() % 2 == 0 else payload.clone()
        out.view(-1).copy_(aligned.view(self.format))
        if not math.isfinite(peak(out)):
            raise CodecError("the payload is malformed: it holds a non-finite value, which no encoder writes")
        return out

    def max_bytes(self, shape: tuple[int, ...]) -> int:
        return self.num_bytes(shape)

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        return 2 * math.prod(shape)
