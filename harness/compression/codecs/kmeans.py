"""Clustered quantisation: 2^k levels fitted to the values by k-means (Lloyd's iterations)."""

from __future__ import annotations

import math
import struct
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import xxhash

from thinpipe.harness.compression.base import Context, Stateful
from thinpipe.harness.compression.hosted import Hosted
from thinpipe.harness.compression.kernels import levels as kernel
from thinpipe.harness.compression.tensors import raise_if_diverged, require_finite
from thinpipe.harness.errors import CodecError

VERSION = 1
SUMMARY = "2^k levels fitted to the values by k-means, one of them zero"
SOURCE = "Lloyd's quantiser (1957, IEEE Trans. IT 1982); clustered quantisation"
STATE = "shared"
PARAMETERS = {
    "bits": {"place": "argument", "type": "int", "min": 1, "max": 8},
    "period": {"type": "int", "min": 1, "max": 1000000, "default": 1},
}
# Zero is a level, so the nearest one is never further off than the value itself, however old the levels are.
CONTRACT = {
    "kmeans:4": {"relative": 1.0},
    "kmeans:2(period=8)": {"relative": 1.0},
    "kmeans:8(period=3)": {"relative": 1.0},
}

#: Values that levels are fitted to, beside the smallest and the largest.
SAMPLE = 1 << 15
_ITERATIONS = 25
_FITTED, _KEPT = 1, 0
_TAG = struct.Struct("<I")
_TINY = float(torch.finfo(torch.float32).tiny)


class KMeans(Hosted, Stateful):
    """Each value's nearest level; levels are float32, ascending, fitted by the sender, and one is zero exactly.

    period: how many training steps levels stay in use. 1: every message brings its own. Otherwise the first message
    of a step that is `period` or more after the last fit (or before it, or where there is none) is fitted and brings
    its levels; later ones name these by 4 bytes. Values outside old levels' range are sent as the nearest one. Messages
    of evaluation always bring their own and leave no trace. Tensors on a GPU are copied to the CPU and back.

    Fitting: a fixed jittered sample of up to 2^15 values and both extremes; Lloyd's iterations from quantiles and from
    even steps, the better of the two in squared error kept; then the level nearest to zero is put there, and the
    others settle again. Levels nearer to zero than the smallest normal float32 are zero.

    Payload: 1 and the 2^bits levels, or 0 and a hash of them; then the levels' numbers, `bits` each.
    """

    state: ClassVar[Literal["none", "shared", "sender"]] = "shared"

    def __init__(self, *, bits: int, period: int = 1) -> None:
        super().__init__()
        self.bits, self.period = bits, period
        self._levels: np.ndarray | None = None
        self._step = 0

    def encode_host(self, x: torch.Tensor, ctx: Context, out: torch.Tensor) -> int:
        flat, target = x.view(-1).numpy(), out.numpy()
        kept = self._levels if ctx.training and not self._is_due(ctx.step) else None
        if kept is None:
            require_finite(x)
        table = fit(flat, self.bits) if kept is None else kept
        head = table.tobytes() if kept is None else _tag(table)
        total = 1 + len(head) + self._packed(x.numel())
        target[0] = _FITTED if kept is None else _KEPT
        target[1 : 1 + len(head)] = np.frombuffer(head, np.uint8)
        raise_if_diverged(float(kernel.encode(flat, _middles(table), self.bits, target[1 + len(head) : total])))
        if kept is None and ctx.training:
            self._levels, self._step = table, ctx.step
        return total

    def decode_host(self, payload: torch.Tensor, ctx: Context, out: torch.Tensor) -> torch.Tensor:
        source = payload.numpy()
        fitted = source.size > 0 and source[0] == _FITTED
        head = 1 + (4 << self.bits if fitted else _TAG.size)
        due = head + self._packed(out.numel())
        if source.size != due or source[0] not in (_FITTED, _KEPT):
            raise CodecError(f"the payload is malformed: {source.size} B where {due} B are due, or an unknown kind")
        table = self._sent(source[1:head]) if fitted else self._named(source[1:head], ctx)
        if kernel.decode(source[head:], table, self.bits, out.view(-1).numpy()):
            raise CodecError("the payload is malformed: no encoder writes such padding")
        if fitted and ctx.training:
            self._levels, self._step = table, ctx.step
        return out

    def max_bytes(self, shape: tuple[int, ...]) -> int:
        count = math.prod(shape)
        return 1 + (4 << self.bits) + self._packed(count) if count else 0

    def num_bytes(self, shape: tuple[int, ...]) -> int | None:
        return self.max_bytes(shape) if self.period == 1 or not math.prod(shape) else None

    def digest(self) -> int:
        held = b"" if self._levels is None else self._levels.tobytes()
        return xxhash.xxh3_64_intdigest(held, seed=self._step & (2**64 - 1))

    def state_dict(self) -> dict[str, Any]:
        return {"levels": None if self._levels is None else torch.from_numpy(self._levels.copy()), "step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        found = state["levels"]
        if found is not None and (found.dtype != torch.float32 or found.shape != (1 << self.bits,)):
            raise CodecError(f"the saved levels are {tuple(found.shape)} {found.dtype}, kmeans needs {1 << self.bits}")
        self._levels = None if found is None else found.cpu().numpy().copy()
        self._step = int(state["step"])

    def _is_due(self, step: int) -> bool:
        return self.period == 1 or not self._step <= step < self._step + self.period

    def _packed(self, count: int) -> int:
        return (count * self.bits + 7) // 8

    def _sent(self, head: np.ndarray) -> np.ndarray:
        table = head.copy().view(np.float32)
        if not (np.isfinite(table).all() and (np.diff(table) >= 0).all() and (table == 0).any()):
            raise CodecError("the payload is malformed: levels must be finite and ascending, and one of them zero")
        return table

    def _named(self, head: np.ndarray, ctx: Context) -> np.ndarray:
        if self._levels is None or not ctx.training or head.tobytes() != _tag(self._levels):
            raise CodecError(
                f"{self.name}: the message is coded by levels that this end does not hold: messages must be decoded in "
                "the order they were encoded in, and both ends go on from the same checkpoint"
            )
        return self._levels


def fit(x: np.ndarray, bits: int) -> np.ndarray:
    """2^bits levels for the values `x` (float32, finite, 1-D): float32, ascending, one of them zero."""
    values = np.sort(_sample(x)).astype(np.float64)
    count = 1 << bits
    quantiles = values[((np.arange(count) + 0.5) * values.size / count).astype(np.int64)]
    even = np.linspace(values[0], values[-1], count)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    best = min((_settle(start, None, values, sums) for start in (quantiles, even)), key=lambda t: _error(t, values))
    pinned = int(np.argmin(np.abs(best)))
    best[pinned] = 0.0
    table = _settle(np.sort(best), pinned, values, sums).astype(np.float32)
    # Half of such a level would not be exact, and zero would no longer be nearest to zero.
    table[np.abs(table) < 4 * _TINY] = 0.0
    return table


def _sample(x: np.ndarray) -> np.ndarray:
    """Every value of a short message; of a long one a value from each of SAMPLE stretches, and both extremes."""
    if x.size <= SAMPLE:
        return x
    starts = np.arange(SAMPLE, dtype=np.int64) * x.size // SAMPLE
    # Some way into the stretch, by a fixed sequence: equal steps would meet the same channels again and again.
    jitter = (np.arange(SAMPLE, dtype=np.int64) * 40503 % 65536) * (x.size // SAMPLE) >> 16
    return np.concatenate([x[starts + jitter], [x.min(), x.max()]])


def _settle(table: np.ndarray, pinned: int | None, values: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """Lloyd's iterations on sorted `values` (`sums`: of the first 0, 1, .. of them); level `pinned` stays."""
    for _ in range(_ITERATIONS):
        edges = np.concatenate([[0], np.searchsorted(values, (table[1:] + table[:-1]) / 2), [values.size]])
        inside = np.diff(edges)
        means = (sums[edges[1:]] - sums[edges[:-1]]) / np.maximum(inside, 1)
        moved = np.where(inside > 0, means, table)
        if pinned is not None:
            moved[pinned] = table[pinned]
        if np.array_equal(moved, table):
            break
        # Sums of long runs are rounded: a mean may leave its cell by a hair.
        table = np.sort(moved)
    return table


def _error(table: np.ndarray, values: np.ndarray) -> float:
    nearest = table[np.searchsorted((table[1:] + table[:-1]) / 2, values)]
    return float(np.square(values - nearest).sum())


def _middles(table: np.ndarray) -> np.ndarray:
    wide = table.astype(np.float64)
    return ((wide[1:] + wide[:-1]) / 2).astype(np.float32)


def _tag(table: np.ndarray) -> bytes:
    return _TAG.pack(xxhash.xxh32_intdigest(table.tobytes()))
