"""AQ-SGD: send the change of a sample's activation since its last visit, quantised."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from thinpipe.harness.compression import keys
from thinpipe.harness.compression.base import Codec, Context
from thinpipe.harness.compression.keys import Key
from thinpipe.harness.compression.row_memory import RowMemory, encode_part, length_bytes, part_length
from thinpipe.harness.compression.rows import CastRows
from thinpipe.harness.compression.tensors import dense, own_decoding, relative_error, require_finite
from thinpipe.harness.errors import CodecError, DivergedError

VERSION = 1
SUMMARY = "the change since the sample's last visit; the first visit in full"
SOURCE = "Wang et al., 2022 (arXiv 2206.01299): AQ-SGD; cache=fixpoint:k is AC-SGD's delta-lowbits"
STATE = "shared"
PARAMETERS = {
    "codec": {"place": "item", "type": "codec"},
    "cache": {
        "type": "codec",
        "plain": True,
        "choices": ["bf16", "fp16", "fp32"],
        "aliases": {"none": "fp32"},
        "default": "bf16",
    },
    "first": {"type": "codec", "default": "none"},
    "key": {"type": "word", "choices": ["sample", "slot", "batch"], "default": "sample"},
    "store": {"type": "word", "choices": ["ram", "disk"], "default": "ram"},
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
    "delta(grid:1.0, first=grid:0.05)": {"absolute": 0.0252, "change": 0.503},
    "delta(fixpoint:2, key=slot)": {"change": 0.504},
    "delta(fixpoint:2, key=batch)": {"change": 0.504},
    "delta(fixpoint:4(scale=token), first=fixpoint:8)": {
        "relative": 0.0,
        "absolute": 0.00788,
        "change": 0.126,
    },
}


#: Identities and their rows, to be put.
_Prepared = tuple[Sequence[int], torch.Tensor]


class Delta(RowMemory):
    """Both ends hold m, what they last made of each sample, and the sender codes x - m.

        first visit of a sample: payload by `first`;  later: payload of codec(x - m)
        value used downstream = m + decoded change (float32);  m = that value in the cache's format

    Payload: the message's unseen rows by `first`, then its seen rows by the codec, each in the message's order; which
    are which both ends know, per sample and not per epoch. Where `first` has no fixed length, 4 bytes before its part
    say how long it is. m follows decoded values only, so it is equal at both ends. A sample that comes twice in one
    message is coded both times against m as it was before the message, and what was decoded for its last occurrence
    stays. Nothing of the rows changes when `encode` or `decode` raises.

    cache: bf16 (cannot overflow where float32 does not, save its last half step), fp16, fp32, or a codec, which then
    keeps each row as a message of one sample. key: whose m a row is coded against (keys.py); with batch that is the
    mean of what was decoded for the last message's rows. first: None has unseen rows coded as changes from zero.
    """

    state: ClassVar[Literal["none", "shared", "sender"]] = "shared"

    def __init__(
        self,
        codec: Codec,
        *,
        cache: str | Codec = "bf16",
        first: Codec | None = None,
        key: Key = "sample",
        store: str = "ram",
        capacity: int | None = None,
        folder: Path | None = None,
    ) -> None:
        super().__init__(
            codec, cache=cache, key=key, store=store, capacity=capacity, folder=folder,
            besides=() if first is None else (first,),
        )  # fmt: skip
        self.first = first
        # The codec may form, code and add the change in one go.
        self._fuses = isinstance(cache, str) and key != "batch" and hasattr(codec, "encode_change")
        self._max_bytes: dict[tuple[int, ...], int] = {}

    def _encode(self, x: torch.Tensor, ctx: Context, out: torch.Tensor, decoded: torch.Tensor | None) -> int:
        if decoded is None and (done := self._encode_at_once(x, ctx, out)) is not None:
            return done
        ids = self._begin(ctx)
        if self._stateful:
            # One codec must not have moved when the other one, of the rest of the rows, finds this out.
            require_finite(x)
        fresh, known = self._split(ids)
        head = tail = 0
        first = change = None
        if fresh:
            head, first = self._encode_first(_pick(x, fresh), _part(ctx, fresh), out)
        kept = self._prepare(first, fresh, ids, ctx)
        if known or not ids:
            tail, change = self._encode_known(x, known, ids, ctx, out[head:], plain=decoded is not None)
        moved = self._prepare(change, known, ids, ctx)
        if self.diagnose:
            self.diagnostics = self._diagnosis(x, (fresh, first), (known, change))
        for index, values in ((fresh, first), (known, change)):
            if decoded is not None and values is not None:
                _place(decoded, index, values)
        self._keep(ids, (kept, moved), ctx)
        return head + tail

    def decode(self, payload: torch.Tensor, ctx: Context, out: torch.Tensor) -> torch.Tensor:
        if self._decode_at_once(payload, ctx, out):
            return out
        ids = self._begin(ctx)
        fresh, known = self._split(ids)
        start, stop = self._first_part(payload, len(fresh), bool(known), ctx)
        first = change = None
        if fresh:
            assert self.first is not None
            part = _part(ctx, fresh)
            first = self.first.decode(payload[start:stop], part, torch.empty(part.shape, device=out.device))
        kept = self._prepare(first, fresh, ids, ctx)
        if known or not ids:
            change = self._decode_known(payload[stop:], known, ids, ctx, out)
        moved = self._prepare(change, known, ids, ctx)
        for index, values in ((fresh, first), (known, change)):
            if values is not None:
                _place(out, index, values)
        self._keep(ids, (kept, moved), ctx)
        return out

    def _encode_at_once(self, x: torch.Tensor, ctx: Context, out: torch.Tensor) -> int | None:
        """What nearly every message of an epoch but the first is: all rows seen, moved in place. The same as the way
        by parts, without its bookkeeping, which costs as much as coding a small message. None: it is another one."""
        slots = None if self.diagnose else self._slots_at_once(ctx, x)
        if slots is None:
            return None
        rows: Any = self.rows
        try:
            done = self.codec.encode_change(
                x.view(len(slots), -1).numpy(), np.arange(len(slots)), rows.patterns, slots, ctx, out.numpy()
            )
        except DivergedError:
            return None  # the way by parts says whose fault it is
        if done is None:
            return None
        rows.largest = max(rows.largest, done[1])
        rows.touched(ctx.sample_ids)
        return done[0]

    def _decode_at_once(self, payload: torch.Tensor, ctx: Context, out: torch.Tensor) -> bool:
        """As _encode_at_once; whether `out` has been filled."""
        slots = self._slots_at_once(ctx, out)
        if slots is None:
            return False
        rows: Any = self.rows
        flat = out.view(len(slots), -1).numpy()
        largest = self.codec.decode_change(payload.numpy(), rows.patterns, slots, ctx, flat)
        if largest is None:
            return False
        rows.largest = max(rows.largest, largest)
        rows.touched(ctx.sample_ids)
        return True

    def _slots_at_once(self, ctx: Context, x: torch.Tensor) -> np.ndarray | None:
        """Where the rows of a message lie that may be moved in place, all of them; None where that is not so."""
        ids, rows = ctx.sample_ids, self.rows
        plain = self._fuses and self.key == "sample" and ctx.training and x.is_cpu and not rows.store.on_disk
        if not plain or not ids or len(ids) != ctx.shape[0] or len(set(ids)) < len(ids):
            return None
        assert isinstance(rows, CastRows)
        if ctx.shape[1:] != rows.shape or not rows.movable or not all(map(rows.slots.__contains__, ids)):
            return None
        return np.array([rows.slots[one] for one in ids], np.int64)

    def observe(self, decoded: torch.Tensor, ctx: Context) -> None:
        ids = self._begin(ctx)
        values = dense(decoded, ctx)
        require_finite(values)
        self._keep(ids, (self._prepare(values if ids else None, range(len(ids)), ids, ctx),), ctx)

    def max_bytes(self, shape: tuple[int, ...]) -> int:
        if shape not in self._max_bytes:
            count, rest = shape[0], shape[1:]
            most = self.codec.max_bytes(shape)
            if self.first is not None:
                for new in range(1, count + 1):
                    first = length_bytes(self.first, (new, *rest)) + self.first.max_bytes((new, *rest))
                    most = max(most, first + (self.codec.max_bytes((count - new, *rest)) if new < count else 0))
            self._max_bytes[shape] = most
        return self._max_bytes[shape]

    def num_bytes(self, shape: tuple[int, ...]) -> int | None:
        return self.codec.num_bytes(shape) if self.first is None else None

    def _split(self, ids: tuple[int, ...]) -> tuple[list[int], list[int]]:
        """Which rows of the message come for the first time, and which are coded as changes."""
        every = list(range(len(ids)))
        if self.first is None:
            return [], every
        known = [i for i in every if ids[i] in self.rows]
        if len(known) == len(ids):
            return [], known
        seen = set(known)
        return [i for i in every if i not in seen], known

    def _encode_first(self, x: torch.Tensor, part: Context, out: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Code rows met for the first time. Returns (bytes, their values)."""
        assert self.first is not None
        start, stop = encode_part(self.first, x, part, out)
        return stop, own_decoding(self.first, out[start:stop], part)

    def _first_part(self, payload: torch.Tensor, count: int, more: bool, ctx: Context) -> tuple[int, int]:
        """Where the part of the first visits lies in the payload. CodecError where it cannot."""
        if not count:
            return 0, 0
        assert self.first is not None
        shape = (count, *ctx.shape[1:])
        start = length_bytes(self.first, shape)
        stop = start + part_length(self.first, payload, shape)
        if payload.numel() > stop and not more:
            raise CodecError(f"the payload is malformed: {payload.numel()} B where {stop} B are due for first visits")
        return start, stop

    def _encode_known(
        self, x: torch.Tensor, known: list[int], ids: tuple[int, ...], ctx: Context, out: torch.Tensor, *, plain: bool
    ) -> tuple[int, torch.Tensor | None]:
        """Code the seen rows. Returns (length, their values), or None for these where the rows moved in place: not if
        `plain`."""
        part, mine = _part(ctx, known), _part_of(ids, known)
        try:
            rows = None if plain or self.diagnose else self._rows_in_place(mine, part, x.device)
            if rows is not None:
                slots = np.array(rows.where(mine), np.int64)
                index, flat = np.array(known, np.int64), x.view(len(x), -1).numpy()
                done = self.codec.encode_change(flat, index, rows.patterns, slots, part, out.numpy())
                if done is not None:
                    rows.largest = max(rows.largest, done[1])
                    rows.touched(mine)
                    return done[0], None
            m = self.rows.load(mine, ctx, self._scratch("m", part.shape, x.device))
            change = torch.sub(_pick(x, known), m, out=self._scratch("change", part.shape, x.device))
            self.codec.diagnose = self.diagnose
            total = self.codec.encode(change, part, out)
        except DivergedError:
            require_finite(x)
            raise CodecError(f"{self.name}: the change of a finite value is not finite") from None
        if self.diagnose:
            self.codec.diagnostics["mean_abs_change"] = change.abs().mean().item() if known else 0.0
        return total, m.add_(own_decoding(self.codec, out[:total], part, change))

    def _decode_known(
        self, payload: torch.Tensor, known: list[int], ids: tuple[int, ...], ctx: Context, out: torch.Tensor
    ) -> torch.Tensor | None:
        """Decode the seen rows. Returns their values, or None where `out` has them and the rows moved in place."""
        part, mine = _part(ctx, known), _part_of(ids, known)
        rows = self._rows_in_place(mine, part, out.device)
        if rows is not None:
            whole = len(known) == ctx.shape[0]
            target = out if whole else torch.empty(part.shape)
            slots = np.array(rows.where(mine), np.int64)
            flat = target.view(len(known), -1).numpy()
            largest = self.codec.decode_change(payload.numpy(), rows.patterns, slots, part, flat)
            if largest is not None:
                rows.largest = max(rows.largest, largest)
                rows.touched(mine)
                if not whole:
                    _place(out, known, target)
                return None
        change = own_decoding(self.codec, payload, part, self._scratch("change", part.shape, out.device))
        return self.rows.load(mine, ctx, self._scratch("m", part.shape, out.device)).add_(change)

    def _rows_in_place(self, mine: Sequence[int], part: Context, device: torch.device) -> CastRows | None:
        """The rows where codec and cache allow them to be moved in place: nothing can overflow, none comes twice."""
        rows = self.rows
        if not self._fuses or device.type != "cpu" or not mine or len(set(mine)) < len(mine):
            return None
        assert isinstance(rows, CastRows)
        met = self.first is not None or all(one in rows for one in mine)
        return rows if met and rows.movable and part.shape[1:] == rows.shape else None

    def _prepare(
        self, values: torch.Tensor | None, index: Sequence[int], ids: tuple[int, ...], ctx: Context
    ) -> _Prepared | None:
        """What is to be kept of the message's rows `index`; None: they were moved in place already."""
        if values is None or not index:
            return None
        mine = _part_of(ids, index)
        if self.key == "batch":
            mine, values = mine[:1], keys.mean(values)
        return mine, self.rows.prepare(values, mine, ctx)

    def _keep(self, ids: tuple[int, ...], parts: Sequence[_Prepared | None], ctx: Context) -> None:
        for prepared in parts:
            if prepared is not None:
                self.rows.put(*prepared, ctx)
        self._end(ids)

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


def _part_of(ids: tuple[int, ...], index: Sequence[int]) -> Sequence[int]:
    return ids if len(index) == len(ids) else [ids[i] for i in index]


def _pick(x: torch.Tensor, index: list[int]) -> torch.Tensor:
    """These rows of `x`, without a copy where they are all of them in order."""
    return x if len(index) == len(x) else x.index_select(0, torch.tensor(index, device=x.device))


def _place(x: torch.Tensor, index: list[int], values: torch.Tensor) -> None:
    """x[index] = values. Indexing by a list would copy element by element."""
    if len(index) == len(x):
        x.copy_(values)
    else:
        x.index_copy_(0, torch.tensor(index, device=x.device), values)
