"""What memories that keep rows share: whose rows, where they lie, reading ahead, saving, sizes."""

from __future__ import annotations

import functools
import struct
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from thinpipe.harness.compression import keys
from thinpipe.harness.compression.base import Codec, Context, Memory, Stateful
from thinpipe.harness.compression.disk import WINDOW, Disk, Ram
from thinpipe.harness.compression.keys import Key
from thinpipe.harness.compression.rows import CastRows, CodeRows, Rows
from thinpipe.harness.compression.tensors import dense
from thinpipe.harness.errors import CodecError

_LENGTH = struct.Struct("<I")


def length_bytes(codec: Codec, shape: tuple[int, ...]) -> int:
    """Bytes that must go before a part of this codec's for its end to be known: none where its length is fixed."""
    return _LENGTH.size if codec.num_bytes(shape) is None else 0


def part_length(codec: Codec, payload: torch.Tensor, shape: tuple[int, ...]) -> int:
    """Bytes of a part of this codec's that `payload` begins with, without those of the length. CodecError where they
    cannot all be there."""
    before, length = length_bytes(codec, shape), codec.num_bytes(shape)
    if payload.numel() < before:
        raise CodecError(f"the payload is malformed: {payload.numel()} B are too few for a length")
    if length is None:
        length = _LENGTH.unpack(bytes(payload[:before].tolist()))[0]
    if length > codec.max_bytes(shape) or before + length > payload.numel():
        raise CodecError(f"the payload is malformed: {payload.numel()} B, of which {length} B are due for a part of it")
    return length


def encode_part(codec: Codec, x: torch.Tensor, ctx: Context, out: torch.Tensor) -> tuple[int, int]:
    """Code a part of a message, after its length where that is not fixed. Returns where in `out` it lies."""
    before = length_bytes(codec, ctx.shape)
    length = codec.encode(x, ctx, out[before:])
    if before:
        out[:before].copy_(torch.frombuffer(bytearray(_LENGTH.pack(length)), dtype=torch.uint8))
    return before, before + length


class RowMemory(Memory):
    """A memory whose state is rows (and what its codecs keep).

    key, store: as the options say; capacity: samples there will be, None where that is not known; folder: for rows
    on disk, None: the system's for temporary files; besides: further codecs that it uses.
    """

    def __init__(
        self,
        codec: Codec,
        *,
        cache: str | Codec,
        key: Key,
        store: str,
        capacity: int | None = None,
        folder: Path | None = None,
        besides: Sequence[Codec] = (),
    ) -> None:
        self.codec: Any = codec
        self.key: Key = key
        room = {"sample": capacity, "slot": None, "batch": 1}[key]
        place = Disk(folder) if store == "disk" else Ram()
        self.rows: Rows = CastRows(room, cache, place) if isinstance(cache, str) else CodeRows(room, cache, place)
        every = (codec, *besides)
        self.uses_peer = any(one.uses_peer for one in every)
        self._stateful: list[Stateful] = [one for one in every if isinstance(one, Stateful)]
        self._buffers: dict[str, torch.Tensor] = {}
        # Of the messages expected: the number of each micro-batch.
        self._numbers: dict[int, int] = {}
        self.diagnostics: dict[str, float] = {}

    def encode(self, x: torch.Tensor, ctx: Context, out: torch.Tensor) -> int:
        return self._encode(dense(x, ctx), ctx, out, None)

    def encode_decoded(self, x: torch.Tensor, ctx: Context, out: torch.Tensor, decoded: torch.Tensor) -> int:
        return self._encode(dense(x, ctx), ctx, out, decoded)

    @abstractmethod
    def _encode(self, x: torch.Tensor, ctx: Context, out: torch.Tensor, decoded: torch.Tensor | None) -> int:
        """As `encode` of contiguous float32; fills `decoded`, where it is given, as `encode_decoded` does."""

    def digest(self) -> int:
        own = self.rows.digest()
        if not self._stateful:
            return own
        parts = [own, *(one.digest() for one in self._stateful)]
        return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(parts)}Q", *parts))

    def state_dict(self) -> dict[str, Any]:
        return {**self.rows.state_dict(), "codecs": [one.state_dict() for one in self._stateful]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows.load_state_dict(state)
        for one, saved in zip(self._stateful, state["codecs"], strict=True):
            one.load_state_dict(saved)

    def state_bytes(self, num_samples: int, shape: tuple[int, ...], microbatches: int = 1) -> int:
        """Rows (one a sample, one a place in the step, or one) x bytes of a row: 2 or 4 an element, or num_bytes of
        one sample where a codec keeps it. On disk: at most WINDOW messages' rows are in RAM."""
        count = keys.most(self.key, num_samples, shape[0], microbatches)
        assert count is not None
        if self.rows.store.on_disk:
            count = min(count, WINDOW * shape[0])
        return count * self.rows.row_bytes(tuple(shape[1:]))

    def prefetch(self, contexts: Sequence[Context]) -> None:
        if self.key == "slot" and contexts:
            self.rows.expected = max((ctx.microbatch + 1) * ctx.shape[0] for ctx in contexts)
        if self.rows.store.on_disk:
            self._numbers = {ctx.microbatch: i for i, ctx in enumerate(contexts)}
            self.rows.store.expect([functools.partial(self._places, ctx) for ctx in contexts])

    def _places(self, ctx: Context) -> list[int]:
        """Where the rows lie that this message will find."""
        return self.rows.where([one for one in keys.identities(self.key, ctx, self.name) if one in self.rows])

    def _begin(self, ctx: Context) -> tuple[int, ...]:
        """The identities of a message's rows, of which it is sure that there is room for them."""
        self._require_training(ctx)
        found = keys.identities(self.key, ctx, self.name)
        self.rows.require_room(found, ctx.shape[1:])
        if self.rows.store.on_disk:
            self.rows.store.begin(self._numbers.get(ctx.microbatch, 0))
        return found

    def _end(self, identities: Sequence[int]) -> None:
        if self.rows.store.on_disk:
            self.rows.store.end(self.rows.where(identities))

    def _require_training(self, ctx: Context) -> None:
        if not ctx.training:
            raise CodecError(
                f"{self.name} was used in evaluation, where memories are never touched; use {self.codec.name}"
            )

    def _scratch(self, name: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """A buffer kept from message to message: a fresh one costs more than what is done in it."""
        if name not in self._buffers or self._buffers[name].shape != shape:
            self._buffers[name] = torch.empty(shape, device=device)
        return self._buffers[name]
