"""ReLU skipping: of a gradient, only what the ReLU at the boundary lets through."""

from __future__ import annotations

import math

import torch

from thinpipe.harness.compression import masked
from thinpipe.harness.compression.base import Codec, Context
from thinpipe.harness.compression.hosted import part, require_plain
from thinpipe.harness.compression.tensors import dense, own_decoding, relative_error, require_finite, require_length

VERSION = 1
SUMMARY = "gradients: only positions where the forward tensor is not zero, by another codec"
SOURCE = "chain rule at a ReLU; the idea is in SplitFC (arXiv 2307.10805)"
UNBIASED = "codec_unbiased"
PARAMETERS = {
    "codec": {"place": "item", "type": "codec", "plain": True},
    "skips": {"place": "fixed", "value": "relu", "uses": {"relu": ["peer", "relu"]}},
    "bits": {"place": "fixed", "value": None},
}
#: As if half of the forward tensor were zero; the true share is the model's and changes as it learns.
FORMULA = "codec / 2"
CONTRACT = {
    "relu(none)": {},
    "relu(fixpoint:8)": {"absolute": 0.00788},
    "relu(topk:0.25)": {"norm": 0.8661},
}


class ReluSkipping(Codec):
    """Values at positions where the decoded forward tensor is not zero, as one 1-D message of `codec`; zero elsewhere.

    A stage that ends in a ReLU multiplies the gradient it receives by (output > 0), so what is left out would be
    thrown away there: nothing is lost where the forward codec keeps zeros zero and nothing else. How many values there
    are, and where, both ends know. The codec is given a context of shape (count,) and no forward tensor.
    """

    uses_peer = True

    def __init__(self, codec: Codec) -> None:
        self.codec = require_plain(codec, "relu(...)")
        self.diagnostics: dict[str, float] = {}

    def encode(self, x: torch.Tensor, ctx: Context, out: torch.Tensor) -> int:
        x = dense(x, ctx)
        if x.numel() == 0:
            return 0
        # Also what is not sent: a gradient that is not finite somewhere means that the run has diverged.
        require_finite(x)
        peer = masked.peer_of(ctx, self.name)
        values = masked.pick(x, peer)
        self.codec.diagnose = self.diagnose
        total = self.codec.encode(values, part(ctx, values.numel()), out) if values.numel() else 0
        if self.diagnose:
            inner = self.codec.diagnostics if values.numel() else {}
            due = torch.where(peer != 0, x, 0.0)
            self.diagnostics = {**inner, "rel_error": relative_error(due, own_decoding(self, out[:total], ctx))}
        return total

    def decode(self, payload: torch.Tensor, ctx: Context, out: torch.Tensor) -> torch.Tensor:
        if out.numel() == 0:
            require_length(payload, 0)
            return out
        peer = masked.peer_of(ctx, self.name)
        values = masked.room(peer)
        if values.numel():
            self.codec.decode(payload, part(ctx, values.numel()), values)
        else:
            require_length(payload, 0)
        return masked.place(values, peer, out)

    def max_bytes(self, shape: tuple[int, ...]) -> int:
        count = math.prod(shape)
        return self.codec.max_bytes((count,)) if count else 0
