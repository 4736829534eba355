"""The floor: what a general compressor makes of the exact values, and of bfloat16's."""

from __future__ import annotations

import math

import numpy as np
import torch
import zstandard

from thinpipe.harness.compression.base import Codec, Context
from thinpipe.harness.compression.halves import overflows
from thinpipe.harness.compression.kernels import entropy
from thinpipe.harness.compression.tensors import (
    as_bytes,
    dense,
    own_decoding,
    peak,
    raise_if_diverged,
    relative_error,
)
from thinpipe.harness.errors import CodecError, OverflowedError

VERSION = 1
SUMMARY = "exact float32 by zstandard, or bfloat16 with its exponents entropy-coded"
SOURCE = "zstandard (RFC 8878); bf16: Zhang et al., 2025 (arXiv 2504.11651), exponents coded by rANS"
FORMULA = "{'zstd': 27, 'bf16': 11}[method]"
UNBIASED = "method == 'zstd'"
PARAMETERS = {"method": {"place": "argument", "type": "word", "choices": ["zstd", "bf16"]}}
CONTRACT = {
    "lossless:zstd": {"relative": 0.0, "absolute": 0.0, "floor": 0.0},
    "lossless:bf16": {"relative": 0.003907, "absolute": 0.0, "largest": 3.3895e38, "entropy": True},
}
RAW, CODED = 0, 1
#: Of the exponents as symbols: those of zero and subnormals to those of the largest values become -127..127.
_MIDDLE = 127


class Lossless(Codec):
    """A byte that says raw or coded, then the values, whichever is shorter.

    zstd: float32, its bytes sorted by place (the highest of every element first), by zstandard at level 1.
    bf16: a cast to bfloat16 as codec bf16 does it, the sign and 7 bits of fraction as one byte an element, then the
    exponents, whose entropy is some 2.6 bits for trained networks' tensors. A tensor on a GPU is copied.
    """

    def __init__(self, *, method: str) -> None:
        self.exact = method == "zstd"
        self.diagnostics: dict[str, float] = {}

    def encode(self, x: torch.Tensor, ctx: Context, out: torch.Tensor) -> int:
        x = dense(x, ctx).cpu()
        largest = peak(x)
        raise_if_diverged(largest)
        if not self.exact and overflows(largest, torch.bfloat16):
            raise OverflowedError(
                f"{self.name} made a non-finite value from a finite one ({largest:g}); use lossless:zstd"
            )
        total = 0
        if x.numel():
            raw = as_bytes(x if self.exact else x.to(torch.bfloat16))
            coded = _shuffled(raw.numpy()) if self.exact else _split(raw.numpy())
            form = RAW if coded is None else CODED
            body = raw if coded is None else torch.from_numpy(coded)
            total = 1 + body.numel()
            out[0] = form
            out[1:total].copy_(body)
        if self.diagnose:
            decoded = own_decoding(self, out[:total], ctx)
            self.diagnostics = {"rel_error": relative_error(x.to(decoded.device), decoded)}
        return total

    def decode(self, payload: torch.Tensor, ctx: Context, out: torch.Tensor) -> torch.Tensor:
        source, count = payload.cpu().numpy(), out.numel()
        if source.size > self.max_bytes(ctx.shape) or (source.size == 0) != (count == 0):
            raise CodecError(f"the payload is malformed: {source.size} B for {count} elements")
        if count:
            raw = _unshuffled(source, count) if self.exact else _joined(source, count)
            values = torch.from_numpy(raw).view(torch.float32 if self.exact else torch.bfloat16)
            out.view(-1).copy_(values)
            if not math.isfinite(peak(out)):
                raise CodecError("the payload is malformed: it holds a non-finite value, which no encoder writes")
        return out

    def max_bytes(self, shape: tuple[int, ...]) -> int:
        count = math.prod(shape)
        return 1 + (4 if self.exact else 2) * count if count else 0

    def ideal_bytes(self, x: torch.Tensor, ctx: Context) -> float:
        """bf16: the entropy of the exponents, their table, a byte an element for the rest, one for the form."""
        assert not self.exact
        exponents, _ = _parts(as_bytes(dense(x, ctx).cpu().to(torch.bfloat16)).numpy())
        return 1 + x.numel() + min(entropy.ideal_bytes(entropy.count(exponents)), x.numel())


def _shuffled(raw: np.ndarray) -> np.ndarray | None:
    """float32 bytes by place, compressed; None where that is not shorter."""
    planes = np.ascontiguousarray(raw.reshape(-1, 4).T[::-1])
    coded = zstandard.ZstdCompressor(level=1).compress(planes.data)
    return np.frombuffer(bytearray(coded), np.uint8) if len(coded) < raw.size else None


def _unshuffled(source: np.ndarray, count: int) -> np.ndarray:
    body = _body(source, 4 * count)
    if body is not None:
        return body
    coded = source[1:].tobytes()
    try:
        # The frame says itself how much it needs; the decompressor would allocate that, whatever it is.
        if zstandard.frame_content_size(coded) != 4 * count:
            raise CodecError("the payload is malformed: its zstandard frame holds another number of bytes")
        planes = zstandard.ZstdDecompressor().decompress(coded, max_output_size=4 * count, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"the payload is malformed: zstandard says {error}") from None
    return np.ascontiguousarray(np.frombuffer(planes, np.uint8).reshape(4, count)[::-1].T).reshape(-1)


def _parts(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(exponents as int8 symbols, sign and fraction as bytes) of bf16 bytes."""
    pattern = raw.view(np.uint16)
    exponents = ((pattern >> 7) & 0xFF).astype(np.int16) - _MIDDLE
    return exponents.astype(np.int8), ((pattern >> 8) & 0x80 | pattern & 0x7F).astype(np.uint8)


def _split(raw: np.ndarray) -> np.ndarray | None:
    """Signs and fractions, then the stream of exponents; None where that is not shorter."""
    exponents, rest = _parts(raw)
    out = np.empty(raw.size, np.uint8)
    out[: rest.size] = rest
    length = entropy.encode(exponents, entropy.count(exponents), out[rest.size : -1])
    return None if length is None else out[: rest.size + length]


def _joined(source: np.ndarray, count: int) -> np.ndarray:
    body = _body(source, 2 * count)
    if body is not None:
        return body
    exponents, rest = entropy.scratch(count), source[1 : 1 + count].astype(np.uint16)
    if source.size <= 1 + count or entropy.decode(source[1 + count :], exponents):
        raise CodecError("the payload is malformed: it holds no exponents, or one that no finite value has")
    pattern = (rest & 0x80) << 8 | (exponents.astype(np.int16) + _MIDDLE).astype(np.uint16) << 7 | rest & 0x7F
    return pattern.view(np.uint8)


def _body(source: np.ndarray, due: int) -> np.ndarray | None:
    """A copy of the raw form's bytes; None for the coded form."""
    if source[0] == CODED:
        return None
    if source[0] != RAW or source.size != 1 + due:
        raise CodecError(f"the payload is malformed: {source.size - 1} B of an unknown form or where {due} B are due")
    return source[1:].copy()
