"""Error feedback in two parts: half of the message for the tensor, half for the errors."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch

from thinpipe.harness.compression.base import Codec, Context, Stateful, Steered
from thinpipe.harness.compression.memories.ef import ErrorFeedback
from thinpipe.harness.compression.row_memory import encode_part, length_bytes, part_length
from thinpipe.harness.compression.tensors import own_decoding

VERSION = 1
SUMMARY = "the tensor and what earlier messages lost, coded side by side"
SOURCE = "named in arXiv 2401.07788, which does not define it; this definition is ours"
STATE = "sender"
PARAMETERS = {
    "codec": {"place": "item", "type": "codec"},
    "cache": {"type": "word", "choices": ["bf16", "fp16", "fp32"], "default": "fp32"},
    "key": {"type": "word", "choices": ["sample", "slot", "batch"], "default": "slot"},
    "store": {"type": "word", "choices": ["ram", "disk"], "default": "ram"},
    "messages": {"place": "fixed", "value": 2},
}
# Of a first visit, where there is no error yet.
CONTRACT = {
    "ef-mixed(grid:1.0)": {"absolute": 0.503},
    "ef-mixed(fixpoint:4, cache=bf16, key=sample)": {"absolute": 0.126},
}


class MixedErrorFeedback(ErrorFeedback):
    """The sender sends C(x) and C(e), the receiver adds them, and e <- e + x - (C(x) + C(e)).

    Payload: C(x), then C(e) by a second instance of the codec, with draws of its own; both always, though e is 0 at
    first. So with topk:0.05 inside, a message costs what topk:0.1 does. Where the codec has no fixed length, 4 bytes
    before C(x) say how long that is. All else is as ef has it.
    """

    def __init__(self, codec: Codec, **options: Any) -> None:
        super().__init__(codec, **options)
        self.second = copy.deepcopy(codec)
        if isinstance(self.second, Stateful):
            self._stateful.append(self.second)

    def steered(self) -> list[Steered]:
        return [*super().steered(), *self.second.steered()]

    def _send(
        self, x: torch.Tensor, errors: torch.Tensor, ctx: Context, out: torch.Tensor, made: torch.Tensor
    ) -> tuple[int, torch.Tensor]:
        start, middle = encode_part(self.codec, x, ctx, out)
        end = middle + self.second.encode(errors, _second(ctx), out[middle:])
        own_decoding(self.codec, out[start:middle], ctx, made)
        other = own_decoding(self.second, out[middle:end], _second(ctx), self._scratch("other", ctx.shape, x.device))
        made.add_(other)
        return end, errors.add_(x).sub_(made)

    def decode(self, payload: torch.Tensor, ctx: Context, out: torch.Tensor) -> torch.Tensor:
        self._require_training(ctx)
        start = length_bytes(self.codec, ctx.shape)
        middle = start + part_length(self.codec, payload, ctx.shape)
        self.codec.decode(payload[start:middle], ctx, out)
        other = self._scratch("other", ctx.shape, out.device)
        return out.add_(self.second.decode(payload[middle:], _second(ctx), other))

    def max_bytes(self, shape: tuple[int, ...]) -> int:
        return length_bytes(self.codec, shape) + 2 * self.codec.max_bytes(shape)

    def num_bytes(self, shape: tuple[int, ...]) -> int | None:
        one = self.codec.num_bytes(shape)
        return None if one is None else 2 * one


def _second(ctx: Context) -> Context:
    """Of the errors' part: the same message, with draws of its own."""
    return replace(ctx, seed=ctx.key("errors") >> 1)
