"""What codecs share whose work is done by compiled loops on the CPU, and wrappers that hand on a part of a message."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import torch

from thinpipe.harness.compression.base import Codec, Context
from thinpipe.harness.compression.tensors import dense, own_decoding, relative_error, require_length
from thinpipe.harness.errors import UserError


class Hosted(Codec):
    """A codec of CPU tensors. Tensors on a GPU are copied to the CPU and back, and so is Context.peer.

    A subclass writes `encode_host` and `decode_host`, which are given what the contract lets in and nothing empty: an
    empty tensor has an empty payload.
    """

    def __init__(self) -> None:
        self.diagnostics: dict[str, float] = {}

    def encode(self, x: torch.Tensor, ctx: Context, out: torch.Tensor) -> int:
        x = dense(x, ctx)
        if x.numel() == 0:
            return 0
        if x.is_cpu and out.is_cpu:
            total = self.encode_host(x, ctx, out)
        else:
            host = torch.empty(self.max_bytes(ctx.shape), dtype=torch.uint8)
            total = self.encode_host(x.cpu(), _on_host(ctx), host)
            out[:total].copy_(host[:total])
        if self.diagnose:
            self.diagnostics = {"rel_error": relative_error(self.due(x, ctx), own_decoding(self, out[:total], ctx))}
        return total

    def decode(self, payload: torch.Tensor, ctx: Context, out: torch.Tensor) -> torch.Tensor:
        if out.numel() == 0:
            require_length(payload, 0)
        elif payload.is_cpu and out.is_cpu:
            self.decode_host(payload, ctx, out)
        else:
            out.copy_(self.decode_host(payload.cpu(), _on_host(ctx), torch.empty(ctx.shape)))
        return out

    def due(self, x: torch.Tensor, ctx: Context) -> torch.Tensor:
        """What is to be sent of `x`, as far as its error is concerned."""
        return x

    @abstractmethod
    def encode_host(self, x: torch.Tensor, ctx: Context, out: torch.Tensor) -> int:
        """As `encode`; `x` is contiguous float32, not empty."""

    @abstractmethod
    def decode_host(self, payload: torch.Tensor, ctx: Context, out: torch.Tensor) -> torch.Tensor:
        """As `decode`; `out` is not empty."""


def part(ctx: Context, count: int) -> Context:
    """The context of a 1-D message of `count` values picked from this one."""
    return replace(ctx, shape=(count,), sample_ids=(), peer=None)


def require_plain(codec: Codec, outer: str) -> Codec:
    """`codec`, to stand inside `outer`; UserError where it keeps something between messages or asks for the peer."""
    if codec.state != "none":
        raise UserError(
            f"{codec.name} keeps something between messages, so it cannot stand inside {outer}; "
            "use a codec without state there, or put a memory around the whole"
        )
    if codec.uses_peer:
        raise UserError(f"{codec.name} reads the forward tensor, which {outer} does not hand on; write it outermost")
    return codec


def _on_host(ctx: Context) -> Context:
    return ctx if ctx.peer is None else replace(ctx, peer=ctx.peer.cpu())
