"""AQ-SGD: send the change of a sample's activation since its last visit, quantised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from thinpipe.harness.compression.base import Codec, Context, Memory
from thinpipe.harness.compression.kernels.layout import SAFE
from thinpipe.harness.compression.rows import CastRows, CodeRows, Rows
from thinpipe.harness.compression.tensors import dense, own_decoding, relative_error, require_finite
from thinpipe.harness.errors import CodecError, DivergedError, UserError

VERSION = 1
SUMMARY = "the change since the sample's last visit; the first visit in full"
SOURCE = "Wang et al., 2022 (arXiv 2206.01299): AQ-SGD; cache=fixpoint:k is AC-SGD's delta-lowbits"
STATE = "shared"
PARAMETERS = {
    "codec": {"place": "item", "type": "codec"},
    "cache": {
        "type": "codec",
        "choices": ["bf16", "fp16", "fp32"],
        "aliases": {"none": "fp32"},
        "default": "bf16",
    },
    "first": {"type": "codec", "default": "none"},
    "key": {"type": "word", "choices": ["sample"], "default": "sample"},
}
# The error of a first visit, in full by default, is what one message may show; later ones are bounded by what the
# codec makes of the change, at most twice the largest value here.
CONTRACT = {
    "delta(fixpoint:4)": {"relative": 0.0, "absolute": 0.0, "change": 0.126},
    "delta(fixpoint:2)": {"relative": 0.0, "absolute": 0.0, "change": 0.504},
    "delta(fixpoint:3, cache=fp32)": {"relative": 0.0, "absolute": 0.0, "change": 0.252},
    "delta(fixpoint:4, cache=fp16)": {"relative": 0.0, "absolute": 0.0, "change": 0.126, "largest": 65504.0},
    "delta(fixpoint:2, cache=fixpoint:8)": {"relative": 0.0, "absolute": 0.0, "change": 0.504},
    "delta(fixpoint:5(rounding=stochastic), cache=fixpoint:8(rounding=stochastic))": {
        "relative": 0.0,
        "absolute": 0.0,
        "change": 0.063,
    },
    "delta(bf16, first=bf16)": {"relative": 0.003907, "absolute": 0.0, "change": 0.003907},
    "delta(fixpoint:4(scale=token), first=fixpoint:8)": {
        "relative": 0.0,
        "absolute": 0.00788,
        "change": 0.126,
    },
}


class Delta(Memory):
    """Both ends hold m, what they last made of each sample, and the sender codes x - m.

        first visit of a sample: payload by `first`;  later: payload of codec(x - m)
        value used downstream = m + decoded change (float32);  m = that value in the cache's format

    Payload: the message's unseen rows by `first`, then its seen rows by the codec, each in the message's order; which
    are which both ends know, per sample and not per epoch. m follows decoded values only, so it is equal at both ends.
    A sample that comes twice in one message is coded both times against m as it was before the message, and what was
    decoded for its last occurrence stays. Nothing changes when `encode` or `decode` raises.

    cache: bf16 (cannot overflow where float32 does not, save its last half step), fp16, fp32, or a codec, which then
    keeps each row as a message of one sample. capacity: samples there will be, None where that is not known.
    """

    state: ClassVar[Literal["none", "shared", "sender"]] = "shared"

    def __init__(
        self,
        codec: Codec,
        cache: str | Codec = "bf16",
        first: Codec | None = None,
        key: str = "sample",
        capacity: int | None = None,
    ) -> None:
        assert key == "sample"
        assert first is not None
        self.codec: Any = codec
        self.first = first
        self.rows: Rows = CastRows(capacity, cache) if isinstance(cache, str) else CodeRows(capacity, cache)
        # The codec may form, code and add the change in one go, on bf16 rows.
        self._fuses = cache == "bf16" and hasattr(codec, "encode_change")
        self._buffers: dict[str, torch.Tensor] = {}
        self._max_bytes: dict[tuple[int, ...], int] = {}
        self.diagnostics: dict[str, float] = {}
        if first.num_bytes((1, 8)) is None:
            raise UserError(
                f"first={first.name} has no fixed length; the receiver could not tell where the rest begins"
            )

    def encode(self, x: torch.Tensor, ctx: Context, out: torch.Tensor) -> int:
        x = dense(x, ctx)
        fresh, known = self._split(ctx)
        head = tail = 0
        first = change = None
        if fresh:
            part = _part(ctx, fresh)
            head = self.first.encode(_pick(x, fresh), part, out)
            first = own_decoding(self.first, out[:head], part)
        kept = self._prepare(first, fresh, ctx)
        if known:
            tail, change = self._encode_known(x, known, ctx, out[head:])
        moved = self._prepare(change, known, ctx)
        if self.diagnose:
            self.diagnostics = self._diagnosis(x, (fresh, first), (known, change))
        self._keep(ctx, fresh, kept)
        self._keep(ctx, known, moved)
        return head + tail

    def decode(self, payload: torch.Tensor, ctx: Context, out: torch.Tensor) -> torch.Tensor:
        fresh, known = self._split(ctx)
        head = (self.first.num_bytes((len(fresh), *ctx.shape[1:])) or 0) if fresh else 0
        if payload.numel() < head or (payload.numel() > head and not known):
            raise CodecError(f"the payload is malformed: {payload.numel()} B where {head} B are due for first visits")
        first = change = None
        if fresh:
            part = _part(ctx, fresh)
            first = self.first.decode(payload[:head], part, torch.empty(part.shape, device=out.device))
        kept = self._prepare(first, fresh, ctx)
        if known:
            change = self._decode_known(payload[head:], known, ctx, out)
        moved = self._prepare(change, known, ctx)
        for index, values in ((fresh, first), (known, change)):
            if values is not None:
                _place(out, index, values)
        self._keep(ctx, fresh, kept)
        self._keep(ctx, known, moved)
        return out

    def observe(self, decoded: torch.Tensor, ctx: Context) -> None:
        self._split(ctx)
        every = list(range(ctx.shape[0]))
        values = dense(decoded, ctx)
        require_finite(values)
        self._keep(ctx, every, self.rows.prepare(values, ctx))

    def max_bytes(self, shape: tuple[int, ...]) -> int:
        if shape not in self._max_bytes:
            count, rest = shape[0], shape[1:]
            self._max_bytes[shape] = max(
                self.first.max_bytes((new, *rest)) + self.codec.max_bytes((count - new, *rest))
                for new in range(count + 1)
            )
        return self._max_bytes[shape]

    def state_bytes(self, num_samples: int, shape: tuple[int, ...]) -> int:
        """num_samples x bytes of a row: 2 or 4 an element, or codec.num_bytes of one sample (scales included)."""
        return num_samples * self.rows.row_bytes(tuple(shape[1:]))

    def digest(self) -> int:
        return self.rows.digest()

    def state_dict(self) -> dict[str, Any]:
        return self.rows.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows.load_state_dict(state)

    def _split(self, ctx: Context) -> tuple[list[int], list[int]]:
        """Which rows of the message come for the first time, and which have been here."""
        if not ctx.training:
            raise CodecError(
                f"{self.name} was used in evaluation, where memories are never touched; use {self.codec.name}"
            )
        if len(ctx.sample_ids) != ctx.shape[0]:
            raise CodecError(f"{self.name} needs one sample id a row: {len(ctx.sample_ids)} for {ctx.shape[0]} rows")
        self.rows.require_room(ctx.sample_ids, ctx.shape[1:])
        known = [i for i, sample in enumerate(ctx.sample_ids) if sample in self.rows]
        if len(known) == ctx.shape[0]:
            return [], known
        seen = set(known)
        return [i for i in range(ctx.shape[0]) if i not in seen], known

    def _encode_known(
        self, x: torch.Tensor, known: list[int], ctx: Context, out: torch.Tensor
    ) -> tuple[int, torch.Tensor | None]:
        """Code the seen rows. Returns (length, their values or None where the rows moved in place)."""
        part = _part(ctx, known)
        try:
            rows = self._rows_in_place(part, x.device)
            if rows is not None and not self.diagnose:
                slots = np.array(rows.where(part.sample_ids), np.int64)
                index, flat = np.array(known, np.int64), x.view(len(x), -1).numpy()
                done = self.codec.encode_change(flat, index, rows.patterns, slots, part, out.numpy())
                if done is not None:
                    rows.largest = max(rows.largest, done[1])
                    return done[0], None
            m = self.rows.load(part.sample_ids, self._scratch("m", part.shape, x.device))
            change = torch.sub(_pick(x, known), m, out=self._scratch("change", part.shape, x.device))
            self.codec.diagnose = self.diagnose
            total = self.codec.encode(change, part, out)
        except DivergedError:
            require_finite(x)
            raise CodecError(f"{self.name}: the change of a finite value is not finite") from None
        if self.diagnose:
            self.codec.diagnostics["mean_abs_change"] = change.abs().mean().item()
        return total, m.add_(own_decoding(self.codec, out[:total], part, change))

    def _decode_known(
        self, payload: torch.Tensor, known: list[int], ctx: Context, out: torch.Tensor
    ) -> torch.Tensor | None:
        """Decode the seen rows. Returns their values, or None where `out` has them and the rows moved in place."""
        part = _part(ctx, known)
        rows = self._rows_in_place(part, out.device)
        if rows is not None:
            whole = len(known) == ctx.shape[0]
            target = out if whole else torch.empty(part.shape)
            slots = np.array(rows.where(part.sample_ids), np.int64)
            flat = target.view(len(known), -1).numpy()
            largest = self.codec.decode_change(payload.numpy(), rows.patterns, slots, part, flat)
            if largest is not None:
                rows.largest = max(rows.largest, largest)
                if not whole:
                    _place(out, known, target)
                return None
        change = own_decoding(self.codec, payload, part, self._scratch("change", part.shape, out.device))
        return self.rows.load(part.sample_ids, self._scratch("m", part.shape, out.device)).add_(change)

    def _rows_in_place(self, part: Context, device: torch.device) -> CastRows | None:
        """The rows where codec and cache allow them to be moved in place: nothing can overflow, no sample twice."""
        rows = self.rows
        if not self._fuses or device.type != "cpu" or len(set(part.sample_ids)) < len(part.sample_ids):
            return None
        assert isinstance(rows, CastRows)
        return rows if rows.largest < SAFE and part.shape[1:] == rows.shape else None

    def _scratch(self, name: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """A buffer kept from message to message: a fresh one costs more than what is done in it."""
        if name not in self._buffers or self._buffers[name].shape != shape:
            self._buffers[name] = torch.empty(shape, device=device)
        return self._buffers[name]

    def _prepare(self, values: torch.Tensor | None, index: Sequence[int], ctx: Context) -> torch.Tensor | None:
        return None if values is None else self.rows.prepare(values, _part(ctx, index))

    def _keep(self, ctx: Context, index: Sequence[int], rows: torch.Tensor | None) -> None:
        """Store prepared rows of the message's samples `index`; None: they were moved in place already."""
        samples = [ctx.sample_ids[i] for i in index]
        if rows is None:
            self.rows.touched(samples)
        else:
            self.rows.put(samples, rows, ctx.shape[1:])

    def _diagnosis(
        self,
        x: torch.Tensor,
        first: tuple[list[int], torch.Tensor | None],
        change: tuple[list[int], torch.Tensor | None],
    ) -> dict[str, float]:
        decoded = torch.zeros_like(x)
        for index, values in (first, change):
            if values is not None:
                _place(decoded, index, values)
        found = {"rel_error": relative_error(x, decoded)}
        if change[0]:
            inner = self.codec.diagnostics
            found |= {name: inner[name] for name in ("mean_abs_change", "clip_fraction") if name in inner}
        return found


def _part(ctx: Context, index: Sequence[int]) -> Context:
    """The context of these rows; itself where they are all of them."""
    return ctx if len(index) == ctx.shape[0] else ctx.rows(list(index))


def _pick(x: torch.Tensor, index: list[int]) -> torch.Tensor:
    """These rows of `x`, without a copy where they are all of them in order."""
    return x if len(index) == len(x) else x.index_select(0, torch.tensor(index, device=x.device))


def _place(x: torch.Tensor, index: list[int], values: torch.Tensor) -> None:
    """x[index] = values. Indexing by a list would copy element by element."""
    if len(index) == len(x):
        x.copy_(values)
    else:
        x.index_copy_(0, torch.tensor(index, device=x.device), values)
