"""Affine min-max quantisation to 1..8 bits, one range for the whole message or for each block."""

from __future__ import annotations

import math

import torch

from thinpipe.harness.compression.base import Codec, Context
from thinpipe.harness.compression.kernels import cpu_blocks, cuda_blocks
from thinpipe.harness.compression.kernels.reference_blocks import MinMax
from thinpipe.harness.compression.tensors import dense, own_decoding, relative_error

VERSION = 1
SUMMARY = "b-bit levels between a message's smallest and largest value"
SOURCE = "Rudakov et al., 2023 (arXiv 2401.07788): its k-bit uniform quantiser"
FORMULA = "bits + (64 / block if block else 0)"
PARAMETERS = {
    "bits": {"place": "argument", "type": "int", "min": 1, "max": 8},
    "block": {"type": "int", "min": 0, "max": 65536, "default": 0},
}
# Half a step of (max - min) / (2^b - 1), the range being at most 2 max|x|.
CONTRACT = {
    "minmax:1": {"absolute": 1.00001},
    "minmax:2": {"absolute": 0.33334},
    "minmax:4": {"absolute": 0.06667},
    "minmax:6": {"absolute": 0.01588},
    "minmax:8": {"absolute": 0.00393},
    "minmax:3(block=2048)": {"absolute": 0.14287},
}


class MinMaxRange(Codec):
    """code = round((x - min) / (max - min) * (2^b - 1)), ties to even: the levels reach from min to max.

    block: elements of the flat message that share a range; 0, as published, is all of it. Two float32 a range are sent
    before the codes (bf16 would have to be rounded outwards, and a constant would not be exact), which makes small
    blocks dear: 64 / block bits an element. Where max = min, which is 0 / 0 as published, all codes are 0 and decode
    to that value. Zero is a level only by chance, in signed tensors hardly ever: few bits add energy to gradients,
    which are mostly near zero. That is the published form, and what `blockwise` (form=affine) does otherwise.
    """

    def __init__(self, *, bits: int, block: int = 0) -> None:
        self.how = MinMax(bits, block)
        self.diagnostics: dict[str, float] = {}

    def encode(self, x: torch.Tensor, ctx: Context, out: torch.Tensor) -> int:
        x = dense(x, ctx)
        if x.is_cpu:
            total = cpu_blocks.encode_minmax(x.numpy(), self.how, out.numpy())
        else:
            total = cuda_blocks.encode_minmax(x, self.how, out)
        if self.diagnose:
            self.diagnostics = {"rel_error": relative_error(x, own_decoding(self, out[:total], ctx))}
        return total

    def decode(self, payload: torch.Tensor, ctx: Context, out: torch.Tensor) -> torch.Tensor:
        if out.is_cpu:
            cpu_blocks.decode_minmax(payload.numpy(), self.how, out.numpy())
        else:
            cuda_blocks.decode_minmax(payload, self.how, out)
        return out

    def max_bytes(self, shape: tuple[int, ...]) -> int:
        return self.num_bytes(shape)

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        return self.how.num_bytes(math.prod(shape))
