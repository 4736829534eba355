"""One row per sample, in RAM, in some format: what a memory keyed by sample keeps.

    casts     bf16, fp16, fp32: one array of that type
    codes     any codec of fixed length: each row is a message of one sample, so it has scales of its own

Rows are allocated for a known number of samples at once, else the array doubles as samples appear. The digest is
the XOR over samples of XXH3-64 of the row's bytes, seeded with the sample's id: the order of visits does not matter,
and only rows changed since the last call are hashed. Nothing is hashed on a step that does not ask, a row visited
several times in between is hashed once, so it never costs more than hashing each row as it is stored.
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

from thinpipe.harness.compression.base import Compressor, Context
from thinpipe.harness.compression.halves import overflows
from thinpipe.harness.compression.tensors import as_bytes, peak
from thinpipe.harness.errors import CodecError, DivergedError

CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_U64 = (1 << 64) - 1


class Rows(ABC):
    """Rows by sample id. shape: of one sample; capacity: most samples there can be, None = not known."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.clear()

    def clear(self) -> None:
        self.shape: tuple[int, ...] | None = None
        self.slots: dict[int, int] = {}
        self.data = torch.empty(0)
        self._hashes: dict[int, int] = {}
        self._dirty: set[int] = set()
        self._digest = 0

    def __contains__(self, sample: int) -> bool:
        return sample in self.slots

    def __len__(self) -> int:
        return len(self.slots)

    def require_room(self, samples: Sequence[int], shape: tuple[int, ...]) -> None:
        """Raise CodecError unless rows of `shape` can be kept for all of `samples`."""
        if self.shape is not None and shape != self.shape:
            raise CodecError(f"a memory of rows of shape {self.shape} was given one of shape {shape}")
        if self.capacity is not None:
            count = len(self.slots) + len({sample for sample in samples if sample not in self.slots})
            if count > self.capacity:
                raise CodecError(f"a memory made for {self.capacity} samples met sample number {count}")

    def _add(self, samples: Sequence[int], shape: tuple[int, ...], device: torch.device) -> None:
        self.require_room(samples, shape)
        self.shape = shape
        new = [sample for sample in samples if sample not in self.slots]
        count = len(self.slots) + len(new)
        if count > len(self.data):
            kind, width = self.format(shape)
            data = torch.empty((self.capacity or max(count, 2 * len(self.data)), width), dtype=kind, device=device)
            if len(self.slots):
                data[: len(self.slots)] = self.data[: len(self.slots)]
            self.data = data
        for sample in new:
            self.slots[sample] = len(self.slots)

    def where(self, samples: Sequence[int]) -> list[int]:
        return [self.slots[sample] for sample in samples]

    def touched(self, samples: Sequence[int]) -> None:
        """These samples' rows have changed."""
        self._dirty.update(samples)

    def digest(self) -> int:
        for sample in self._dirty:
            row = self.data[self.slots[sample]].contiguous().cpu()
            fresh = xxhash.xxh3_64_intdigest(as_bytes(row).numpy().data, seed=sample & _U64)
            self._digest ^= self._hashes.get(sample, 0) ^ fresh
            self._hashes[sample] = fresh
        self._dirty.clear()
        return self._digest

    def state_dict(self) -> dict[str, Any]:
        ids = torch.tensor(list(self.slots), dtype=torch.int64)
        return {"ids": ids, "shape": self.shape, "rows": self.data[: len(self.slots)].clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        ids, rows = state["ids"].tolist(), state["rows"]
        self.clear()
        if state["shape"] is None:
            return
        kind, width = self.format(tuple(state["shape"]))
        if rows.dtype != kind or rows.shape != (len(ids), width):
            raise CodecError(
                f"the saved memory holds {tuple(rows.shape)} {rows.dtype}, this one needs {(len(ids), width)} {kind}"
            )
        self._add(ids, tuple(state["shape"]), rows.device)
        self.data[: len(ids)] = rows
        self.touched(ids)

    def row_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of one sample's row."""
        kind, width = self.format(shape)
        return width * kind.itemsize

    @abstractmethod
    def format(self, shape: tuple[int, ...]) -> tuple[torch.dtype, int]:
        """(type, elements) of a row that stands for a sample of `shape`."""

    @abstractmethod
    def load(self, samples: Sequence[int], out: torch.Tensor) -> torch.Tensor:
        """Fill `out` (float32, contiguous, (len, *shape)) with the samples' values."""

    @abstractmethod
    def prepare(self, values: torch.Tensor, ctx: Context) -> torch.Tensor:
        """`values` (len, *shape) as rows, to be put. Raises CodecError where a value cannot be kept."""

    def put(self, samples: Sequence[int], rows: torch.Tensor, shape: tuple[int, ...]) -> None:
        """Store prepared rows of samples of `shape`; where a sample comes twice the later row stays."""
        last = {sample: i for i, sample in enumerate(samples)}
        self._add(list(last), shape, rows.device)
        for sample, i in last.items():
            self.data[self.slots[sample]] = rows[i]
        self.touched(list(last))


class CastRows(Rows):
    """Rows as 16- or 32-bit floats."""

    def __init__(self, capacity: int | None, cast: str) -> None:
        super().__init__(capacity)
        self.cast = cast
        #: No magnitude kept is above this: rows are moved in place only while it is far from overflow.
        self.largest = 0.0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.largest = peak(self.data[: len(self)].to(torch.float32))

    @property
    def patterns(self) -> np.ndarray:
        """The 16-bit rows as uint16, sharing their memory (CPU)."""
        return self.data.view(torch.int16).numpy().view(np.uint16)

    def format(self, shape: tuple[int, ...]) -> tuple[torch.dtype, int]:
        return CASTS[self.cast], math.prod(shape)

    def load(self, samples: Sequence[int], out: torch.Tensor) -> torch.Tensor:
        for row, slot in zip(out.view(len(samples), -1), self.where(samples), strict=True):
            row.copy_(self.data[slot])
        return out

    def prepare(self, values: torch.Tensor, ctx: Context) -> torch.Tensor:
        largest = peak(values)
        if not math.isfinite(largest):
            raise CodecError("a value to be kept in the cache is not finite")
        if overflows(largest, CASTS[self.cast]):
            better = "bf16" if self.cast == "fp16" else "fp32"
            raise CodecError(f"cache={self.cast} cannot hold {largest:g}; use cache={better}")
        self.largest = max(self.largest, largest)
        return values.view(len(values), -1).to(CASTS[self.cast])


class CodeRows(Rows):
    """Rows as a codec's payloads."""

    def __init__(self, capacity: int | None, codec: Compressor) -> None:
        super().__init__(capacity)
        self.codec = codec

    def format(self, shape: tuple[int, ...]) -> tuple[torch.dtype, int]:
        width = self.codec.num_bytes((1, *shape))
        if width is None:
            raise CodecError(f"{self.codec.name} has no fixed length, so rows of it cannot be kept as a cache")
        return torch.uint8, width

    def load(self, samples: Sequence[int], out: torch.Tensor) -> torch.Tensor:
        ctx = Context((1, *out.shape[1:]))
        for i, slot in enumerate(self.where(samples)):
            self.codec.decode(self.data[slot], ctx, out[i : i + 1])
        return out

    def prepare(self, values: torch.Tensor, ctx: Context) -> torch.Tensor:
        rows = torch.empty((len(values), self.row_bytes(ctx.shape[1:])), dtype=torch.uint8, device=values.device)
        for i, sample in enumerate(ctx.sample_ids):
            # Its own draw of random numbers a row, where the codec rounds stochastically.
            one = replace(ctx.rows([i]), seed=ctx.key(f"cache {sample}") >> 1)
            try:
                self.codec.encode(values[i : i + 1], one, rows[i])
            except DivergedError as error:
                raise CodecError(f"a value to be kept in the cache is not finite: {error}") from error
        return rows
