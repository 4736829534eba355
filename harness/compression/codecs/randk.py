"""RandK: a random share of the elements, scaled so that their mean is right; both ends draw the same positions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch

from thinpipe.harness.compression.base import Codec, Context
from thinpipe.harness.compression.hosted import Hosted, part, require_plain
from thinpipe.harness.compression.kernels import select
from thinpipe.harness.compression.tensors import require_finite

VERSION = 1
SUMMARY = "a random share of the elements, scaled to be unbiased; no positions are sent"
SOURCE = "random sparsification with a shared seed (Stich et al., 2018, arXiv 1809.07599)"
UNBIASED = "values_unbiased"
PARAMETERS = {
    "ratio": {"place": "argument", "type": "float", "above": 0.0, "max": 1.0},
    "values": {"type": "codec", "default": "none", "plain": True},
}
FORMULA = "ratio * values"
CONTRACT = {
    "randk:0.5": {"absolute": 1.0, "unbiased": True, "keyed": True},
    "randk:0.25(values=bf16)": {"absolute": 3.02, "keyed": True, "largest": 3.3895e38},
}

_LARGEST = torch.finfo(torch.float32).max


class RandK(Hosted):
    """k = ceil(ratio * n) of a message's n elements, times n / k; zero elsewhere.

    Which ones follows from Context.key, every subset of k being as likely as any other, so the mean over messages'
    keys is x where `values`, the codec of what is sent, is unbiased (reported as such with values=none only). The
    receiver multiplies, and a product beyond float32's range stays at its end. Tensors on a GPU are copied to the CPU
    and back.

    Payload: that of `values` for the picked elements in ascending order, as one 1-D message.
    """

    def __init__(self, *, ratio: float, values: Codec) -> None:
        super().__init__()
        self.ratio = Fraction(repr(float(ratio)))
        self.values = require_plain(values, "randk")

    def encode_host(self, x: torch.Tensor, ctx: Context, out: torch.Tensor) -> int:
        require_finite(x)
        positions = self._positions(ctx)
        values = torch.empty(positions.size)
        select.gather(_patterns(x), positions, _patterns(values))
        return self.values.encode(values, part(ctx, positions.size), out)

    def decode_host(self, payload: torch.Tensor, ctx: Context, out: torch.Tensor) -> torch.Tensor:
        positions = self._positions(ctx)
        values = self.values.decode(payload, part(ctx, positions.size), torch.empty(positions.size))
        values.mul_(out.numel() / positions.size).clamp_(-_LARGEST, _LARGEST)
        select.scatter(_patterns(values), positions, _patterns(out))
        return out

    def max_bytes(self, shape: tuple[int, ...]) -> int:
        return self.values.max_bytes((self._kept(shape),)) if math.prod(shape) else 0

    def num_bytes(self, shape: tuple[int, ...]) -> int | None:
        return self.values.num_bytes((self._kept(shape),)) if math.prod(shape) else 0

    def _kept(self, shape: tuple[int, ...]) -> int:
        return math.ceil(self.ratio * math.prod(shape))

    def _positions(self, ctx: Context) -> np.ndarray:
        kept = self._kept(ctx.shape)
        positions = np.empty(kept + select.SLACK, np.int32)
        select.draw(math.prod(ctx.shape), kept, np.uint64(ctx.key("randk")), positions)
        return positions[:kept]


def _patterns(x: torch.Tensor) -> np.ndarray:
    return x.view(-1).numpy().view(np.int32)
