"""Low rank: the message as a matrix, and of it the best fit by a product of two thin ones."""

from __future__ import annotations

import functools
import math
import struct

import torch

from thinpipe.harness.compression.base import Context
from thinpipe.harness.compression.hosted import Hosted
from thinpipe.harness.compression.tensors import as_bytes, peak, raise_if_diverged, require_length
from thinpipe.harness.errors import CodecError

VERSION = 1
SUMMARY = "a matrix of rank r near the message, as two thin factors"
SOURCE = "PowerSGD (Vogels et al., 2019, arXiv 1905.13727) without its memory; Halko et al., 2011 (arXiv 0909.4061)"
PARAMETERS = {
    "rank": {"place": "argument", "type": "int", "min": 1, "max": 4096},
    "values": {"type": "word", "choices": ["bf16", "fp32"], "default": "bf16"},
}
#: Of a message with many more rows than its 512 columns; in general rank * (1 / rows + 1 / columns) values an element.
FORMULA = "{'bf16': 16, 'fp32': 32}[values] * min(1, rank / 512)"
CONTRACT = {
    "lowrank:2": {"norm": 1.0},
    "lowrank:1(values=fp32)": {"norm": 1.0},
}

_EXPONENT = struct.Struct("<h")
_LARGEST = torch.finfo(torch.float32).max
_ITERATIONS = 2
_KINDS = {"bf16": torch.bfloat16, "fp32": torch.float32}


class LowRank(Hosted):
    """M ~ P Q^T, P: (rows, r), Q: (columns, r); rows are the leading axes, columns the last one, and from 4 dimensions
    on rows are pixels of samples, columns channels. r is `rank`, at most the smaller side.

    Two rounds of subspace iteration from a fixed Gaussian matrix; P, orthonormal, is rounded to `values`, and Q is the
    least-squares answer to what P has become, so that the error is never longer than the message, but for Q's own
    rounding. Where P and Q would be no shorter than the message, its elements are sent in `values` instead.

    The message is divided by a power of two first, so that nothing overflows or vanishes on the way; decoding sums in a
    fixed order, element by element, so both ends agree to the bit whatever their BLAS does. Tensors on a GPU are copied
    to the CPU and back.

    Payload: the exponent (2 B), then P and Q, or the elements, row-major.
    """

    def __init__(self, *, rank: int, values: str = "bf16") -> None:
        super().__init__()
        self.rank, self.kind = rank, _KINDS[values]

    def encode_host(self, x: torch.Tensor, ctx: Context, out: torch.Tensor) -> int:
        largest = peak(x)
        raise_if_diverged(largest)
        exponent = math.frexp(largest)[1]
        matrix = _times_power(x, -exponent).movedim(1, -1) if x.ndim > 3 else _times_power(x, -exponent)
        rows, columns, rank = self._sides(ctx.shape)
        matrix = matrix.reshape(rows, columns)
        sent = [matrix.to(self.kind)] if rank == 0 else _factors(matrix, rank, self.kind)
        out[: _EXPONENT.size].copy_(torch.frombuffer(bytearray(_EXPONENT.pack(exponent)), dtype=torch.uint8))
        at = _EXPONENT.size
        for factor in sent:
            part = as_bytes(factor.contiguous())
            out[at : at + part.numel()].copy_(part)
            at += part.numel()
        return at

    def decode_host(self, payload: torch.Tensor, ctx: Context, out: torch.Tensor) -> torch.Tensor:
        require_length(payload, self.num_bytes(ctx.shape))
        (exponent,) = _EXPONENT.unpack(payload[: _EXPONENT.size].numpy().tobytes())
        values = payload[_EXPONENT.size :].clone().view(self.kind).to(torch.float32)
        # Columns of P are of length 1, so no entry of Q is longer than a column of numbers up to 1.
        rows, columns, rank = self._sides(ctx.shape)
        if not peak(values) <= 2.0 * math.sqrt(rows) or not -200 <= exponent <= 128:
            raise CodecError("the payload is malformed: no encoder writes such a value or exponent")
        if rank:
            values = _product(values[: rows * rank].view(rows, rank), values[rows * rank :].view(columns, rank))
        result = _times_power(values, exponent).clamp_(-_LARGEST, _LARGEST)
        if len(ctx.shape) > 3:
            batch, channels, *rest = ctx.shape
            out.copy_(result.view(batch, *rest, channels).movedim(-1, 1))
        else:
            out.copy_(result.view(ctx.shape))
        return out

    def max_bytes(self, shape: tuple[int, ...]) -> int:
        return self.num_bytes(shape)

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        if not math.prod(shape):
            return 0
        rows, columns, rank = self._sides(shape)
        return _EXPONENT.size + self.kind.itemsize * (rank * (rows + columns) if rank else rows * columns)

    def _sides(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """(rows, columns, rank) of a tensor that is not empty; rank 0: sent as it is."""
        columns = shape[1] if len(shape) > 3 else shape[-1] if len(shape) > 1 else 1
        rows = math.prod(shape) // columns
        rank = min(self.rank, rows, columns)
        return rows, columns, rank if rank * (rows + columns) < rows * columns else 0


def _factors(matrix: torch.Tensor, rank: int, kind: torch.dtype) -> list[torch.Tensor]:
    """P and Q of `kind` for a float32 matrix of values up to 1."""
    right = _start(matrix.shape[1], rank)
    for _ in range(_ITERATIONS):
        left = torch.linalg.qr(matrix @ right).Q
        right = torch.linalg.qr(matrix.T @ left).Q
    left = torch.linalg.qr(matrix @ right).Q.to(kind)
    rounded = left.to(torch.float32)
    right = torch.linalg.solve(rounded.T @ rounded, rounded.T @ matrix).T
    return [left, right.to(kind)]


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right.T, summed one column after the other with every operation rounded: the same on any machine."""
    total = left[:, :1] * right[:, 0]
    for k in range(1, left.shape[1]):
        total += left[:, k : k + 1] * right[:, k]
    return total


@functools.lru_cache(maxsize=16)
def _start(columns: int, rank: int) -> torch.Tensor:
    return torch.randn(columns, rank, generator=torch.Generator().manual_seed(columns))


def _times_power(x: torch.Tensor, exponent: int) -> torch.Tensor:
    """x * 2^exponent, in two steps: the factor itself may be out of range where the product is not."""
    half = exponent // 2
    return x * 2.0**half * 2.0 ** (exponent - half)
