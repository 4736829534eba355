"""A random-sign Hadamard rotation of short tiles around another codec: outliers are spread over their tile."""

from __future__ import annotations

import functools
import math
import random

import numpy as np
import torch

from thinpipe.harness.compression.base import Codec, Context
from thinpipe.harness.compression.hosted import Hosted, require_plain
from thinpipe.harness.compression.kernels import rotate
from thinpipe.harness.compression.tensors import peak, raise_if_diverged
from thinpipe.harness.errors import CodecError, OverflowedError

VERSION = 1
SUMMARY = (
    "tiles rotated by a random-sign Hadamard matrix, then another codec; tiles=outliers: only where one stands out"
)
SOURCE = "QuaRot (arXiv 2404.00456), HIGGS (arXiv 2411.17525); tiles=outliers is TAH-Quant's rule (arXiv 2506.01352)"
UNBIASED = "codec_unbiased"
PARAMETERS = {
    "codec": {"place": "item", "type": "codec", "plain": True},
    "block": {"type": "word", "choices": ["32", "64", "128", "256", "512", "1024"], "default": "256"},
    "tiles": {"type": "word", "choices": ["all", "outliers"], "default": "all"},
    "tau": {"type": "float", "min": 1.0, "max": 1000.0, "default": 2.0},
}
FORMULA = (
    "codec + (1 / {'32': 32, '64': 64, '128': 128, '256': 256, '512': 512, '1024': 1024}[block] "
    "if tiles == 'outliers' else 0)"
)
# A rotation keeps the 2-norm of the error, so an element may be off by all of a tile's: block times what the codec may
# do, sqrt(block) for that and as much for the larger values it is given.
CONTRACT = {
    "hadamard(bf16)": {"norm": 0.00391, "largest": 2.0**117},
    "hadamard(fixpoint:8, block=32)": {"absolute": 0.2523, "largest": 2.0**120},
    "hadamard(fixpoint:8(scale=tensor), block=64, tiles=outliers)": {"absolute": 0.5045, "largest": 2.0**119},
}


class Hadamard(Hosted):
    """y = H (s * x) / sqrt(block) in tiles of `block` elements of the flat message, coded by `codec`, and back.

    s: fixed random signs, the same for every tile and message, known to both ends. The tail shorter than a tile is not
    rotated. The codec is given a tensor of the message's shape. A rotation makes a tile's values alike, which helps
    where few of them are large and hurts where many are zero: it destroys zeros.

    tiles=outliers: only tiles whose largest magnitude is more than `tau` times the second largest are rotated, and a
    bit a tile, first in the payload, says which. Tensors on a GPU are copied to the CPU and back.

    A value above 2^125 / block is a CodecError: rotated, coded and rotated back it might not be finite.
    """

    def __init__(self, codec: Codec, *, block: str = "256", tiles: str = "all", tau: float = 2.0) -> None:
        super().__init__()
        self.codec = require_plain(codec, "hadamard(...)")
        self.block, self.tau = int(block), float(tau)
        self.outliers = tiles == "outliers"

    def encode_host(self, x: torch.Tensor, ctx: Context, out: torch.Tensor) -> int:
        largest = peak(x)
        raise_if_diverged(largest)
        if largest > 2.0**125 / self.block:
            raise OverflowedError(
                f"a rotation made a non-finite value from a finite one, or nearly ({largest:g}); use "
                f"{self.codec.name} alone"
            )
        flags = np.zeros(self._flag_bytes(ctx.shape), np.uint8)
        rotated = torch.empty(ctx.shape)
        rotate.rotate(_flat(x), signs(self.block), False, flags, self.tau, _flat(rotated))
        out[: flags.size].copy_(torch.from_numpy(flags))
        return flags.size + self.codec.encode(rotated, ctx, out[flags.size :])

    def decode_host(self, payload: torch.Tensor, ctx: Context, out: torch.Tensor) -> torch.Tensor:
        head, tiles = self._flag_bytes(ctx.shape), out.numel() // self.block
        flags = payload[:head].numpy()
        if flags.size < head or (head and tiles % 8 and flags[-1] >> (tiles % 8)):
            raise CodecError(f"the payload is malformed: {payload.numel()} B, no flags of {tiles} tiles first")
        self.codec.decode(payload[head:], ctx, out)
        rotate.rotate(_flat(out), signs(self.block), True, flags, 0.0, _flat(out))
        if not math.isfinite(peak(out)):
            raise CodecError(
                "the payload is malformed: rotated back it holds a non-finite value, which no encoder does"
            )
        return out

    def max_bytes(self, shape: tuple[int, ...]) -> int:
        return self._flag_bytes(shape) + self.codec.max_bytes(shape) if math.prod(shape) else 0

    def num_bytes(self, shape: tuple[int, ...]) -> int | None:
        inside = self.codec.num_bytes(shape) if math.prod(shape) else 0
        return None if inside is None else self._flag_bytes(shape) + inside

    def _flag_bytes(self, shape: tuple[int, ...]) -> int:
        return (math.prod(shape) // self.block + 7) // 8 if self.outliers else 0


@functools.lru_cache(maxsize=8)
def signs(block: int) -> np.ndarray:
    """The fixed signs of a tile's elements over sqrt(block), float32."""
    drawn = random.Random(block).getrandbits(block)
    ones = np.array([1 - 2 * (drawn >> i & 1) for i in range(block)], np.float32)
    return ones * np.float32(1.0 / math.sqrt(block))


def _flat(x: torch.Tensor) -> np.ndarray:
    return x.view(-1).numpy()
