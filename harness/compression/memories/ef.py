"""Error feedback: what a message lost is added to the next one."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import torch

from thinpipe.harness.compression import keys
from thinpipe.harness.compression.base import Codec, Context
from thinpipe.harness.compression.keys import Key
from thinpipe.harness.compression.row_memory import RowMemory
from thinpipe.harness.compression.tensors import own_decoding, relative_error, require_finite
from thinpipe.harness.errors import CodecError, DivergedError

VERSION = 1
SUMMARY = "adds to a message what the last one lost"
SOURCE = "Seide et al., 2014; Karimireddy et al., 2019 (arXiv 1901.09847); at pipeline boundaries: arXiv 2401.07788"
STATE = "sender"
PARAMETERS = {
    "codec": {"place": "item", "type": "codec"},
    "cache": {"type": "word", "choices": ["bf16", "fp16", "fp32"], "default": "fp32"},
    "key": {"type": "word", "choices": ["sample", "slot", "batch"], "default": "slot"},
    "store": {"type": "word", "choices": ["ram", "disk"], "default": "ram"},
}
# Of a first visit, where there is no error yet.
CONTRACT = {
    "ef(topk:0.1)": {"norm": 0.94869},
    "ef(fixpoint:4, cache=bf16, key=sample)": {"absolute": 0.126},
    "ef(fixpoint:2, key=batch)": {"absolute": 0.504},
}


class ErrorFeedback(RowMemory):
    """The sender sends C(x + e) and keeps e <- x + e - C(x + e); the receiver holds nothing.

    e begins at 0. Where a row's identity comes twice in one message its e goes with the first occurrence only, and
    what all of them lost is kept as one sum, so that nothing is lost or sent twice; with key=batch the mean over rows
    of e is added to each of them. So what is decoded sums up to what was to be sent, but for the last e:
    per sample, per place, or for the mean over rows. Of a codec that goes by the forward tensor, what was to be sent is
    zero where that is. key=slot and cache=fp32 are as published: a row is given the error
    of whatever sample was in its place last; key=sample gives it its own.
    """

    state: ClassVar[Literal["none", "shared", "sender"]] = "sender"

    def __init__(
        self,
        codec: Codec,
        *,
        cache: str = "fp32",
        key: Key = "slot",
        store: str = "ram",
        capacity: int | None = None,
        folder: Path | None = None,
    ) -> None:
        super().__init__(codec, cache=cache, key=key, store=store, capacity=capacity, folder=folder)

    def _encode(self, x: torch.Tensor, ctx: Context, out: torch.Tensor, decoded: torch.Tensor | None) -> int:
        ids = self._begin(ctx)
        if self.uses_peer and ctx.peer is not None:
            # What the codec leaves out by the forward tensor is not lost, so it must not come back as an error. The
            # codec will not see it, so whether it is finite is asked here.
            require_finite(x)
            x = torch.where(ctx.peer != 0, x, 0.0)
        errors = self._errors(ids, ctx, x.device)
        made = self._scratch("made", ctx.shape, x.device) if decoded is None else decoded
        self.codec.diagnose = self.diagnose
        try:
            total, lost = self._send(x, errors, ctx, out, made)
        except DivergedError:
            require_finite(x)
            raise CodecError(f"{self.name}: a finite value and the error added to it are not finite") from None
        if self.diagnose:
            self.diagnostics = {**self.codec.diagnostics, "rel_error": relative_error(x, made)}
        if ids:
            kept, values = (ids[:1], keys.mean(lost)) if self.key == "batch" else keys.folded(ids, lost)
            self.rows.put(kept, self.rows.prepare(values, kept, ctx), ctx)
            self._end(kept)
        return total

    def _send(
        self, x: torch.Tensor, errors: torch.Tensor, ctx: Context, out: torch.Tensor, made: torch.Tensor
    ) -> tuple[int, torch.Tensor]:
        """Code x and errors, fill `made` with what the other end will hold. Returns (bytes, what is lost), the latter
        perhaps where `errors` was."""
        total = errors.add_(x)
        length = self.codec.encode(total, ctx, out)
        return length, total.sub_(own_decoding(self.codec, out[:length], ctx, made))

    def decode(self, payload: torch.Tensor, ctx: Context, out: torch.Tensor) -> torch.Tensor:
        self._require_training(ctx)
        return self.codec.decode(payload, ctx, out)

    def observe(self, decoded: torch.Tensor, ctx: Context) -> None:
        """Another compressor's errors are not ours to send."""
        self._require_training(ctx)

    def max_bytes(self, shape: tuple[int, ...]) -> int:
        return self.codec.max_bytes(shape)

    def num_bytes(self, shape: tuple[int, ...]) -> int | None:
        return self.codec.num_bytes(shape)

    def _errors(self, ids: tuple[int, ...], ctx: Context, device: torch.device) -> torch.Tensor:
        """What is to be added to each row."""
        errors = self.rows.load(ids, ctx, self._scratch("errors", ctx.shape, device))
        if self.key != "batch" and len(set(ids)) < len(ids):
            for i, one in enumerate(ids):
                if one in ids[:i]:
                    errors[i] = 0.0
        return errors
