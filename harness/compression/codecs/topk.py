"""TopK: a share of the elements, those of the largest magnitude, and where they are."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch

from thinpipe.harness.compression import indices, masked
from thinpipe.harness.compression.base import Codec, Context
from thinpipe.harness.compression.hosted import Hosted, part, require_plain
from thinpipe.harness.compression.kernels import select
from thinpipe.harness.compression.tensors import raise_if_diverged, require_finite, require_length
from thinpipe.harness.errors import CodecError

VERSION = 1
SUMMARY = "the largest magnitudes of each sample, token or tensor, and their positions"
SOURCE = "Rudakov et al., 2023 (arXiv 2401.07788): TopK per sample, values in float32; mask=forward is its index reuse"
PARAMETERS = {
    "ratio": {"place": "argument", "type": "float", "above": 0.0, "max": 1.0},
    "by": {"type": "word", "choices": ["sample", "token", "tensor"], "default": "sample"},
    "values": {"type": "codec", "default": "none", "plain": True},
    "mask": {
        "type": "word",
        "choices": ["own", "forward"],
        "default": "own",
        "pins": {"forward": ["ties"]},
        "uses": {"forward": ["peer"]},
    },
    "ties": {"type": "word", "choices": ["first", "drop"], "default": "first"},
}
FORMULA = "ratio * values + (entropy(ratio) if mask == 'own' else 0)"
# What is left out of a group has at most (1 - ratio) of its energy; sqrt of that, and of what rounding adds.
CONTRACT = {
    "topk:0.1": {"norm": 0.94869},
    "topk:0.25(by=token, values=bf16)": {"norm": 0.8661, "largest": 3.3895e38},
    "topk:0.3(by=tensor, values=fixpoint:4(scale=tensor))": {"norm": 1.0},
    "topk:0.5(ties=drop)": {"norm": 1.0},
    "topk:0.8(mask=forward)": {},
}


class TopK(Hosted):
    """k = ceil(ratio * n) elements of each group of n, those of the largest magnitude; zero elsewhere.

    by: a group is a sample (everything after the first axis), a token (a row of the last axis up to 3 dimensions, the
    channels of a pixel from 4 on) or the tensor. A 1-D message, as wrappers hand them on, is one group. Elements that
    are zero are never sent. values: the codec of the survivors, which are one 1-D message of it. Positions take
    nearly what they must: see indices.py. Tensors on a GPU are copied to the CPU and back.

    ties=first: of equal magnitudes the earlier element is kept, so that k are, where as many are not zero.
    ties=drop: the published rule. Kept is what is strictly above the linearly interpolated (1 - ratio) quantile of the
    magnitudes: k = ceil(ratio * (n - 1)) of distinct ones; of equal magnitudes at the threshold none. A group of which
    more than (1 - ratio) is zero keeps all that is not; one of constant magnitude keeps nothing.

    mask=forward: values at positions where the decoded forward tensor is not zero, in order, and no positions. ratio
    is a bound that the length of a message follows from: more values than a forward topk of this ratio sends are a
    CodecError.

    Payload: positions (indices.py), values; with mask=forward only values.
    """

    def __init__(
        self, *, ratio: float, values: Codec, by: str = "sample", mask: str = "own", ties: str = "first"
    ) -> None:
        super().__init__()
        # As written: 0.1 is a tenth here, and not the float next to it.
        self.ratio = Fraction(repr(float(ratio)))
        self.values = require_plain(values, "topk")
        self.by, self.drop = by, ties == "drop"
        self.uses_peer = mask == "forward"
        self._known: dict[tuple[int, ...], tuple[int, int, int]] = {}

    def encode_host(self, x: torch.Tensor, ctx: Context, out: torch.Tensor) -> int:
        if self.uses_peer:
            return self._encode_by_peer(x, ctx, out)
        groups, size, kept = self._groups(ctx.shape)
        positions = np.empty(groups * kept + select.SLACK, np.int32)
        flat = self._ordered(x).numpy().view(np.int32).reshape(groups, size)
        count = select.largest(flat, kept, self.drop, positions)
        if count < 0:
            raise_if_diverged(math.inf)
        head = indices.encode(positions[:count], x.numel(), out.numpy())
        if count == 0:
            return head
        values = torch.empty(count)
        select.gather(flat.reshape(-1), positions[:count], values.numpy().view(np.int32))
        return head + self.values.encode(values, part(ctx, count), out[head:])

    def decode_host(self, payload: torch.Tensor, ctx: Context, out: torch.Tensor) -> torch.Tensor:
        if self.uses_peer:
            return self._decode_by_peer(payload, ctx, out)
        positions, head = indices.decode(payload.numpy(), out.numel(), self._most(ctx.shape))
        values = self._decode_values(payload[head:], ctx, torch.empty(positions.size))
        flat = torch.empty(out.numel()) if self._is_moved(ctx.shape) else out.view(-1)
        select.scatter(values.numpy().view(np.int32), positions, flat.numpy().view(np.int32))
        if self._is_moved(ctx.shape):
            batch, channels, *rest = ctx.shape
            out.copy_(flat.view(batch, *rest, channels).movedim(-1, 1))
        return out

    def due(self, x: torch.Tensor, ctx: Context) -> torch.Tensor:
        return torch.where(masked.peer_of(ctx, self.name) != 0, x, 0.0) if self.uses_peer else x

    def max_bytes(self, shape: tuple[int, ...]) -> int:
        count = math.prod(shape)
        if count == 0:
            return 0
        most = self._most(shape)
        head = 0 if self.uses_peer else indices.max_bytes(count, most)
        return head + (self.values.max_bytes((most,)) if most else 0)

    def _encode_by_peer(self, x: torch.Tensor, ctx: Context, out: torch.Tensor) -> int:
        require_finite(x)
        peer = masked.peer_of(ctx, self.name)
        values = masked.pick(x, peer)
        self._require_bound(values.numel(), ctx)
        return self.values.encode(values, part(ctx, values.numel()), out) if values.numel() else 0

    def _decode_by_peer(self, payload: torch.Tensor, ctx: Context, out: torch.Tensor) -> torch.Tensor:
        peer = masked.peer_of(ctx, self.name)
        values = masked.room(peer)
        self._require_bound(values.numel(), ctx)
        return masked.place(self._decode_values(payload, ctx, values), peer, out)

    def _decode_values(self, payload: torch.Tensor, ctx: Context, values: torch.Tensor) -> torch.Tensor:
        if values.numel() == 0:
            require_length(payload, 0)
            return values
        return self.values.decode(payload, part(ctx, values.numel()), values)

    def _require_bound(self, count: int, ctx: Context) -> None:
        if count > self._most(ctx.shape):
            raise CodecError(
                f"{self.name} may send {self._most(ctx.shape)} of {math.prod(ctx.shape)} values, but the forward "
                f"tensor has {count} that are not zero; use topk:{float(self.ratio)} forward, or a larger ratio here"
            )

    def _most(self, shape: tuple[int, ...]) -> int:
        groups, _, kept = self._groups(shape)
        return groups * kept

    def _groups(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """(groups, elements of each, most that are kept of each) of a tensor that is not empty."""
        if shape not in self._known:
            count = math.prod(shape)
            if self.by == "tensor" or len(shape) == 1:
                size = count
            else:
                size = count // shape[0] if self.by == "sample" else shape[-1] if len(shape) <= 3 else shape[1]
            self._known[shape] = count // size, size, math.ceil(self.ratio * (size - 1 if self.drop else size))
        return self._known[shape]

    def _is_moved(self, shape: tuple[int, ...]) -> bool:
        return self.by == "token" and len(shape) > 3

    def _ordered(self, x: torch.Tensor) -> torch.Tensor:
        """`x` with the elements of a group side by side: positions count in this order."""
        return x.movedim(1, -1).contiguous() if self._is_moved(tuple(x.shape)) else x
