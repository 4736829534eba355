"""One row per identity, in some format and some place: what memories keep.

    casts     bf16, fp16, fp32: one array of that type
    codes     any codec of fixed length: each row is a message of one sample, so it has scales of its own

An identity is an int: a sample's, a place's in a batch (keys.py). Rows are allocated for a known number at once, else
the array doubles as they appear; where it lies is disk.py's. The digest is the XOR over rows of XXH3-64 of the row's
bytes, seeded with its identity: the order of visits does not matter, and only rows changed since the last call are
hashed. Nothing is hashed on a step that does not ask, a row visited several times in between is hashed once, so it
never costs more than hashing each row as it is stored (as is done on disk: later it would have to be read again).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import xxhash

from thinpipe.harness.compression.base import Compressor, Context, Stateful
from thinpipe.harness.compression.disk import Ram
from thinpipe.harness.compression.halves import overflows
from thinpipe.harness.compression.kernels.layout import SAFE
from thinpipe.harness.compression.tensors import as_bytes, peak
from thinpipe.harness.errors import CodecError, DivergedError, OverflowedError, UserError

CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_U64 = (1 << 64) - 1


class Rows(ABC):
    """Rows by identity. shape: of one sample; capacity: most rows there can be, None = not known."""

    def __init__(self, capacity: int | None, store: Ram | None = None) -> None:
        self.capacity = capacity
        self.store = store or Ram()
        #: As many will come soon.
        self.expected = 0
        self.clear()

    def clear(self) -> None:
        self.shape: tuple[int, ...] | None = None
        self.slots: dict[int, int] = {}
        self.data = torch.empty((0, 0))
        self._hashes: dict[int, int] = {}
        self._dirty: set[int] = set()
        self._digest = 0

    def __contains__(self, identity: int) -> bool:
        return identity in self.slots

    def __len__(self) -> int:
        return len(self.slots)

    def require_room(self, identities: Sequence[int], shape: tuple[int, ...]) -> None:
        """Raise CodecError unless rows of `shape` can be kept for all of `identities`."""
        if self.shape is not None and shape != self.shape:
            raise CodecError(f"a memory of rows of shape {self.shape} was given one of shape {shape}")
        if self.capacity is not None:
            count = len(self.slots) + len({one for one in identities if one not in self.slots})
            if count > self.capacity:
                raise CodecError(f"a memory made for {self.capacity} samples met sample number {count}")

    def _add(self, identities: Sequence[int], shape: tuple[int, ...], device: torch.device) -> None:
        self.require_room(identities, shape)
        self.shape = shape
        new = [one for one in identities if one not in self.slots]
        count = len(self.slots) + len(new)
        if count > len(self.data):
            kind, width = self.format(shape)
            data = self.data if len(self.data) else torch.empty((0, width), dtype=kind)
            most = self.capacity or max(count, self.expected, 2 * len(self.data))
            self.data = self.store.grow(data, len(self.slots), (most, width), device)
        for one in new:
            self.slots[one] = len(self.slots)

    def where(self, identities: Sequence[int]) -> list[int]:
        return [self.slots[one] for one in identities]

    def touched(self, identities: Sequence[int]) -> None:
        """These rows have changed."""
        self._dirty.update(identities)
        if self.store.on_disk:
            self.digest()

    def digest(self) -> int:
        for one in self._dirty:
            row = self.data[self.slots[one]].contiguous().cpu()
            fresh = xxhash.xxh3_64_intdigest(as_bytes(row).numpy().data, seed=one & _U64)
            self._digest ^= self._hashes.get(one, 0) ^ fresh
            self._hashes[one] = fresh
        self._dirty.clear()
        return self._digest

    def state_dict(self) -> dict[str, Any]:
        """Rows on disk are given as they lie there, not as a copy: to be saved before the next message."""
        rows = self.data[: len(self.slots)]
        if self.store.on_disk and rows.numel():
            self.store.lend()
            rows = torch.from_numpy(rows.view(torch.uint8).numpy()).view(rows.dtype)
        else:
            rows = rows.clone()
        return {"ids": torch.tensor(list(self.slots), dtype=torch.int64), "shape": self.shape, "rows": rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        ids, rows = state["ids"].tolist(), state["rows"]
        self.clear()
        if state["shape"] is None:
            return
        shape = tuple(state["shape"])
        kind, width = self.format(shape)
        if rows.dtype != kind or rows.shape != (len(ids), width):
            raise CodecError(
                f"the saved memory holds {tuple(rows.shape)} {rows.dtype}, this one needs {(len(ids), width)} {kind}"
            )
        self._add(ids, shape, rows.device)
        for one, row in zip(ids, rows, strict=True):
            self.data[self.slots[one]] = row
            self.touched([one])
            self.store.end([self.slots[one]])

    def row_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of one row."""
        kind, width = self.format(shape)
        return width * kind.itemsize

    @abstractmethod
    def format(self, shape: tuple[int, ...]) -> tuple[torch.dtype, int]:
        """(type, elements) of a row that stands for a sample of `shape`."""

    def load(self, identities: Sequence[int], ctx: Context, out: torch.Tensor) -> torch.Tensor:
        """Fill `out` (float32, contiguous, (len, *shape)) with the values kept, 0 of what was never put."""
        for i, one in enumerate(identities):
            if i and one == identities[i - 1]:
                out[i] = out[i - 1]
            elif one in self.slots:
                self._read(one, ctx, out[i : i + 1])
            else:
                out[i] = 0.0
        return out

    @abstractmethod
    def _read(self, identity: int, ctx: Context, out: torch.Tensor) -> None:
        """Fill `out` (1, *shape) with this row's values."""

    @abstractmethod
    def prepare(self, values: torch.Tensor, identities: Sequence[int], ctx: Context) -> torch.Tensor:
        """`values` (len, *shape) as rows, to be put. Raises CodecError where a value cannot be kept."""

    def put(self, identities: Sequence[int], rows: torch.Tensor, ctx: Context) -> None:
        """Store prepared rows of a message; where an identity comes twice the later row stays."""
        last = {one: i for i, one in enumerate(identities)}
        self._add(list(last), ctx.shape[1:], rows.device)
        for one, i in last.items():
            self.data[self.slots[one]] = rows[i]
        self.touched(list(last))


class CastRows(Rows):
    """Rows as 16- or 32-bit floats."""

    def __init__(self, capacity: int | None, cast: str, store: Ram | None = None) -> None:
        super().__init__(capacity, store)
        self.cast = cast

    def clear(self) -> None:
        super().clear()
        #: No magnitude kept is above this.
        self.largest = 0.0
        self._viewed: torch.Tensor | None = None
        self._patterns = np.empty(0)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.largest = max((peak(row.to(torch.float32)) for row in state["rows"]), default=0.0)

    @property
    def patterns(self) -> np.ndarray:
        """The rows as the kernels take them (kernels/cpu.py), sharing their memory (CPU)."""
        if self._viewed is not self.data:
            kind = {"bf16": np.uint16, "fp16": np.int16, "fp32": np.float32}[self.cast]
            self._viewed, self._patterns = self.data, as_bytes(self.data).numpy().view(kind).reshape(self.data.shape)
        return self._patterns

    @property
    def movable(self) -> bool:
        """Whether rows may be moved in place: all are far from overflow."""
        return self.largest < SAFE[self.cast]

    def format(self, shape: tuple[int, ...]) -> tuple[torch.dtype, int]:
        return CASTS[self.cast], math.prod(shape)

    def _read(self, identity: int, ctx: Context, out: torch.Tensor) -> None:
        out.view(-1).copy_(self.data[self.slots[identity]])

    def prepare(self, values: torch.Tensor, identities: Sequence[int], ctx: Context) -> torch.Tensor:
        largest = peak(values)
        if not math.isfinite(largest):
            raise CodecError("a value to be kept in the cache is not finite")
        if overflows(largest, CASTS[self.cast]):
            better = "bf16" if self.cast == "fp16" else "fp32"
            raise OverflowedError(f"cache={self.cast} cannot hold {largest:g}; use cache={better}")
        self.largest = max(self.largest, largest)
        return values.reshape(len(identities), -1).to(CASTS[self.cast])


class CodeRows(Rows):
    """Rows as a codec's payloads. Each is a message of its own, and to decode it some codecs need to know which."""

    def __init__(self, capacity: int | None, codec: Compressor, store: Ram | None = None) -> None:
        self.codec = codec
        if isinstance(codec, Stateful) or codec.uses_peer:
            raise UserError(f"cache={codec.name} depends on other messages, so rows of it cannot be kept")
        self._width((1, 8))
        super().__init__(capacity, store)

    def clear(self) -> None:
        super().clear()
        #: By identity: seed, step and micro-batch of the message that the row came with.
        self._origins: dict[int, tuple[int, int, int]] = {}

    def state_dict(self) -> dict[str, Any]:
        origins = torch.tensor([self._origins[one] for one in self.slots], dtype=torch.int64)
        return {**super().state_dict(), "origins": origins}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for one, (seed, step, microbatch) in zip(state["ids"].tolist(), state["origins"].tolist(), strict=True):
            self._origins[one] = (seed, step, microbatch)

    def format(self, shape: tuple[int, ...]) -> tuple[torch.dtype, int]:
        return torch.uint8, self._width((1, *shape))

    def _width(self, shape: tuple[int, ...]) -> int:
        width = self.codec.num_bytes(shape)
        if width is None:
            raise UserError(f"cache={self.codec.name} has no fixed length, so rows of it cannot be kept")
        return width

    def _read(self, identity: int, ctx: Context, out: torch.Tensor) -> None:
        seed, step, microbatch = self._origins[identity]
        origin = replace(ctx, seed=seed, step=step, microbatch=microbatch)
        self.codec.decode(self.data[self.slots[identity]], _alone(identity, origin), out)

    def prepare(self, values: torch.Tensor, identities: Sequence[int], ctx: Context) -> torch.Tensor:
        rows = torch.empty((len(values), self.row_bytes(ctx.shape[1:])), dtype=torch.uint8, device=values.device)
        for i, one in enumerate(identities):
            try:
                self.codec.encode(values[i : i + 1], _alone(one, ctx), rows[i])
            except DivergedError as error:
                raise CodecError(f"a value to be kept in the cache is not finite: {error}") from error
        return rows

    def put(self, identities: Sequence[int], rows: torch.Tensor, ctx: Context) -> None:
        super().put(identities, rows, ctx)
        self._origins |= dict.fromkeys(identities, (ctx.seed, ctx.step, ctx.microbatch))


def _alone(identity: int, ctx: Context) -> Context:
    """The context of one row of a message, with its own draw of random numbers where its codec rounds by chance."""
    seed = ctx.key(f"cache {identity}") >> 1
    return replace(ctx, shape=(1, *ctx.shape[1:]), sample_ids=(identity,), seed=seed, peer=None)
