"""Codecs that no text names, for what a memory must get along with: variable length, state, the forward tensor."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from thinpipe.harness.compression.base import Codec, Context, Stateful
from thinpipe.harness.compression.tensors import dense, require_finite
from thinpipe.harness.errors import CodecError


class Sparse(Codec):
    """The share `kept` of the largest elements of each row, without zeros: its length depends on the data."""

    def __init__(self, kept: float = 0.25) -> None:
        self.name, self.kept = f"toy-sparse:{kept}", kept
        self.diagnostics: dict[str, float] = {}

    def encode(self, x: torch.Tensor, ctx: Context, out: torch.Tensor) -> int:
        x = dense(x, ctx).reshape(ctx.shape[0], -1)
        require_finite(x)
        count = max(1, round(self.kept * x.shape[1])) if x.shape[1] else 0
        top = x.abs().topk(count, dim=1).indices if x.numel() else torch.empty((len(x), 0), dtype=torch.int64)
        kept = torch.zeros_like(x).scatter_(1, top, x.gather(1, top)).view(-1)
        where = kept.nonzero().view(-1)
        payload = where.int().numpy().tobytes() + kept[where].numpy().tobytes()
        out[: len(payload)] = torch.from_numpy(np.frombuffer(payload, np.uint8).copy())
        return len(payload)

    def decode(self, payload: torch.Tensor, ctx: Context, out: torch.Tensor) -> torch.Tensor:
        count = payload.numel() // 8
        if payload.numel() % 8 or count > out.numel():
            raise CodecError("the payload is malformed: half an element")
        data = payload.numpy().tobytes()
        where = torch.from_numpy(np.frombuffer(data[: 4 * count], np.int32).astype(np.int64))
        if count and not 0 <= int(where.min()) <= int(where.max()) < out.numel():
            raise CodecError("the payload is malformed: no such element")
        out.zero_().view(-1)[where] = torch.from_numpy(np.frombuffer(data[4 * count :], np.float32).copy())
        return out

    def max_bytes(self, shape: tuple[int, ...]) -> int:
        return 8 * int(np.prod(shape))


class Fitted(Codec, Stateful):
    """Multiples of a step that follows the tensors sent before: it goes wrong wherever a message is met twice, or
    by one end only."""

    state: ClassVar[Any] = "shared"

    def __init__(self) -> None:
        self.name, self.step, self.met = "toy-fitted", 0.25, 0
        self.diagnostics: dict[str, float] = {}
        self._own: tuple[int, float] | None = None

    def encode(self, x: torch.Tensor, ctx: Context, out: torch.Tensor) -> int:
        x = dense(x, ctx)
        require_finite(x)
        codes = (x / self.step).round().clamp(-2000, 2000).to(torch.int16)
        out[: 2 * x.numel()] = torch.from_numpy(codes.numpy().reshape(-1).view(np.uint8))
        self._own = (self.met, self.step)
        self._learn(codes)
        return 2 * x.numel()

    def decode(self, payload: torch.Tensor, ctx: Context, out: torch.Tensor) -> torch.Tensor:
        if payload.numel() != 2 * out.numel():
            raise CodecError("the payload is malformed: its length")
        codes = torch.from_numpy(np.frombuffer(payload.numpy().tobytes(), np.int16).copy()).view(ctx.shape)
        own, self._own = self._own, None
        out.copy_(codes * (own[1] if own else self.step))
        if own is None:
            self._learn(codes)
        return out

    def _learn(self, codes: torch.Tensor) -> None:
        self.met += 1
        self.step *= 0.9 if codes.numel() and int(codes.abs().max()) < 20 else 1.1

    def max_bytes(self, shape: tuple[int, ...]) -> int:
        return 2 * int(np.prod(shape))

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        return 2 * int(np.prod(shape))

    def digest(self) -> int:
        return int(np.float64(self.step).view(np.uint64)) ^ self.met

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "met": self.met}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.met = state["step"], state["met"]


class Masked(Codec):
    """What the forward tensor has non-zero, as float32."""

    uses_peer = True

    def __init__(self) -> None:
        self.name = "toy-masked"
        self.diagnostics: dict[str, float] = {}

    def encode(self, x: torch.Tensor, ctx: Context, out: torch.Tensor) -> int:
        assert ctx.peer is not None
        values = dense(x, ctx)[ctx.peer != 0]
        out[: 4 * len(values)] = torch.from_numpy(values.numpy().view(np.uint8))
        return 4 * len(values)

    def decode(self, payload: torch.Tensor, ctx: Context, out: torch.Tensor) -> torch.Tensor:
        assert ctx.peer is not None
        where = ctx.peer != 0
        if payload.numel() != 4 * int(where.sum()):
            raise CodecError("the payload is malformed: its length")
        out.zero_()[where] = torch.from_numpy(np.frombuffer(payload.numpy().tobytes(), np.float32).copy())
        return out

    def max_bytes(self, shape: tuple[int, ...]) -> int:
        return 4 * int(np.prod(shape))
