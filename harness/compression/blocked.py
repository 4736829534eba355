"""What the codecs share that cut a message into blocks with a scale each (kernels/reference_blocks.py)."""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from thinpipe.harness.compression.base import Codec, Context
from thinpipe.harness.compression.kernels import cpu_blocks, cuda_blocks
from thinpipe.harness.compression.kernels.reference_blocks import Blocks
from thinpipe.harness.compression.tensors import dense, own_decoding, relative_error


class BlockCodec(Codec):
    """Codes by `how`. purpose: of the key that stochastic rounding draws by."""

    purpose: ClassVar[str] = ""

    def __init__(self, how: Blocks) -> None:
        self.how = how
        self.diagnostics: dict[str, float] = {}

    def encode(self, x: torch.Tensor, ctx: Context, out: torch.Tensor) -> int:
        x = dense(x, ctx)
        key = ctx.key(self.purpose) if self.how.stochastic else 0
        if x.is_cpu:
            total = cpu_blocks.encode(x.numpy(), self.how, key, out.numpy())
        else:
            total = cuda_blocks.encode(x, self.how, key, out)
        if self.diagnose:
            self.diagnostics = self._diagnose(x, ctx, out[:total])
        return total

    def decode(self, payload: torch.Tensor, ctx: Context, out: torch.Tensor) -> torch.Tensor:
        if out.is_cpu:
            cpu_blocks.decode(payload.numpy(), self.how, out.numpy())
        else:
            cuda_blocks.decode(payload, self.how, out)
        return out

    def max_bytes(self, shape: tuple[int, ...]) -> int:
        return self.num_bytes(shape)

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        return self.how.num_bytes(math.prod(shape))

    def _diagnose(self, x: torch.Tensor, ctx: Context, payload: torch.Tensor) -> dict[str, float]:
        return {"rel_error": relative_error(x, own_decoding(self, payload, ctx))}
