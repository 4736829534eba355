"""Fixed-point quantisation to 1..8 bits with one scale a channel, token or tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from thinpipe.harness.compression.base import Codec, Context
from thinpipe.harness.compression.kernels import cpu, cuda, reference
from thinpipe.harness.compression.kernels.layout import Grid, layout
from thinpipe.harness.compression.tensors import dense, own_decoding, relative_error

if TYPE_CHECKING:
    import numpy as np

VERSION = 1
SUMMARY = "b-bit integers times a scale per channel, token or tensor"
SOURCE = "Wang et al., 2022 (arXiv 2206.01299): the direct quantiser of AQ-SGD / AC-SGD"
UNBIASED = "rounding == 'stochastic'"
PARAMETERS = {
    "bits": {"place": "argument", "type": "int", "min": 1, "max": 8},
    "rounding": {"type": "word", "choices": ["nearest", "stochastic"], "default": "nearest"},
    "scale": {"type": "word", "choices": ["channel", "token", "tensor"], "default": "channel"},
    "clip": {
        "type": "word",
        "choices": ["asymmetric", "symmetric"],
        "default": "asymmetric",
        "needs": {"symmetric": {"bits": 2}},
    },
    "eps": {"type": "float", "min": 0.0, "max": 1.0, "default": 0.0},
    "preset": {
        "type": "word",
        "choices": ["none", "acsgd"],
        "default": "none",
        "pins": {"acsgd": ["rounding", "clip", "eps"]},
    },
}
# +max|x| has no level of its own unless clip=symmetric: it is off by one step of 2^(1-bits) x scale, and the
# scale exceeds max|x| by up to 2^-7 (bf16, rounded up).
CONTRACT = {
    "fixpoint:1": {"relative": 0.0, "absolute": 1.008},
    "fixpoint:2": {"relative": 0.0, "absolute": 0.504},
    "fixpoint:3": {"relative": 0.0, "absolute": 0.252},
    "fixpoint:4": {"relative": 0.0, "absolute": 0.126},
    "fixpoint:5": {"relative": 0.0, "absolute": 0.063},
    "fixpoint:6": {"relative": 0.0, "absolute": 0.0315},
    "fixpoint:7": {"relative": 0.0, "absolute": 0.01575},
    "fixpoint:8": {"relative": 0.0, "absolute": 0.00788},
    "fixpoint:4(scale=token)": {"relative": 0.0, "absolute": 0.126},
    "fixpoint:3(scale=tensor)": {"relative": 0.0, "absolute": 0.252},
    "fixpoint:2(clip=symmetric)": {"relative": 0.0, "absolute": 0.504},
    "fixpoint:5(clip=symmetric, scale=token)": {"relative": 0.0, "absolute": 0.0336},
    "fixpoint:4(rounding=stochastic)": {"relative": 0.0, "absolute": 0.126, "unbiased": True},
    "fixpoint:2(clip=symmetric, rounding=stochastic)": {"relative": 0.0, "absolute": 1.008, "unbiased": True},
    "fixpoint:4(eps=1e-6)": {"relative": 0.0, "absolute": 0.126, "floor": 1e-6},
    "fixpoint:4(preset=acsgd)": {"relative": 0.0, "absolute": 0.1255, "floor": 1e-6, "largest": 65504.0},
    "fixpoint:8(preset=acsgd)": {"relative": 0.0, "absolute": 0.0084, "floor": 1e-6, "largest": 65504.0},
}


class FixedPoint(Codec):
    """code = clip(round(x / scale * steps)), decoded = code * scale / steps.

    bits: 1..8. clip: asymmetric has the levels -2^(b-1) .. 2^(b-1)-1 in steps of scale / 2^(b-1), as published, so
    that +max|x| is one step off; symmetric leaves the lowest out and has both ends exact. eps: added to the scale
    where x is divided by it, nowhere else. rounding=stochastic is unbiased for what is not clipped and keyed by the
    message, so a rerun draws the same. Scales are bf16 rounded up, so a scale neither overflows nor is too small.

    preset=acsgd: the arithmetic of the AC-SGD code (2022) with its faults: fp16 scale, x / (scale + 1e-6), round to
    nearest. A scale beyond 65504, which there becomes NaN, is a CodecError.
    """

    def __init__(
        self,
        *,
        bits: int,
        rounding: str = "nearest",
        scale: str = "channel",
        clip: str = "asymmetric",
        eps: float = 0.0,
        preset: str = "none",
    ) -> None:
        published = preset == "acsgd"
        self.grid = Grid(
            bits, clip == "symmetric", rounding == "stochastic", published, 1e-6 if published else float(eps)
        )
        self.scale = scale
        self.diagnostics: dict[str, float] = {}

    def encode(self, x: torch.Tensor, ctx: Context, out: torch.Tensor) -> int:
        x = dense(x, ctx)
        where = layout(ctx.shape, self.scale)
        if x.is_cpu:
            total = cpu.encode(x.numpy(), where, self.grid, self._key(ctx), out.numpy())
        else:
            total = cuda.encode(x, where, self.grid, self._key(ctx), out)
        if self.diagnose:
            self.diagnostics = self._diagnose(x, ctx, out[:total])
        return total

    def decode(self, payload: torch.Tensor, ctx: Context, out: torch.Tensor) -> torch.Tensor:
        where = layout(ctx.shape, self.scale)
        if out.is_cpu:
            cpu.decode(payload.numpy(), where, self.grid, out.numpy())
        else:
            cuda.decode(payload, where, self.grid, out)
        return out

    def encode_change(  # noqa: PLR0917 - as many as the kernel takes
        self, x: np.ndarray, rows: np.ndarray, m: np.ndarray, slots: np.ndarray, ctx: Context, out: np.ndarray
    ) -> tuple[int, float] | None:
        """Code x[rows] - m[slots] and advance m, in one go; `ctx` is that of these rows. See cpu.encode_change."""
        return cpu.encode_change(x, rows, m, slots, layout(ctx.shape, self.scale), self.grid, self._key(ctx), out)

    def decode_change(
        self, payload: np.ndarray, m: np.ndarray, slots: np.ndarray, ctx: Context, out: np.ndarray
    ) -> float | None:
        """Advance m by what was coded, in one go; `out` gets the sums. See cpu.decode_change."""
        return cpu.decode_change(payload, m, slots, layout(ctx.shape, self.scale), self.grid, out)

    def max_bytes(self, shape: tuple[int, ...]) -> int:
        return self.num_bytes(shape)

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        return self.grid.num_bytes(layout(shape, self.scale))

    def _key(self, ctx: Context) -> int:
        return ctx.key("fixpoint") if self.grid.stochastic else 0

    def _diagnose(self, x: torch.Tensor, ctx: Context, payload: torch.Tensor) -> dict[str, float]:
        if x.numel() == 0:
            return {}
        codes, _ = reference.open_payload(payload, layout(ctx.shape, self.scale), self.grid)
        level = codes.int() - self.grid.offset
        at_end = (level == self.grid.low) | (level == self.grid.high)
        return {
            "rel_error": relative_error(x, own_decoding(self, payload, ctx)),
            "clip_fraction": at_end.float().mean().item(),
        }
