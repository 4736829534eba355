"""Uniform quantisation to 2..8 bits with a scale every 32, 64 or 128 elements."""

from __future__ import annotations

from thinpipe.harness.compression.blocked import BlockCodec
from thinpipe.harness.compression.kernels.reference_blocks import Blocks

VERSION = 1
SUMMARY = "b-bit integers times a scale every 32, 64 or 128 elements"
SOURCE = "Dettmers et al., 2022 (arXiv 2110.02861): block-wise scales; here with uniform levels"
FORMULA = (
    "bits + ({'bf16': 16, 'fp16': 16, 'e8m0': 8}[scale] + (8 if form == 'affine' else 0))"
    " / {'32': 32, '64': 64, '128': 128}[block]"
)
UNBIASED = "rounding == 'stochastic'"
PARAMETERS = {
    "bits": {"place": "argument", "type": "int", "min": 2, "max": 8},
    "block": {"type": "word", "choices": ["32", "64", "128"], "default": "64"},
    "form": {"type": "word", "choices": ["absmax", "affine"], "default": "absmax"},
    "rounding": {"type": "word", "choices": ["nearest", "stochastic"], "default": "nearest"},
    "scale": {"type": "word", "choices": ["bf16", "fp16", "e8m0"], "default": "bf16"},
}
# Half a step of scale / (2^(b-1) - 1), affine of 2 scale / (2^b - 1), the scale being up to 2^-7 (bf16), 2^-10 (fp16)
# or 1 (e8m0) times larger than the span; a whole step, affine of scale / (2^(b-1) - 1), where rounding is stochastic.
CONTRACT = {
    "blockwise:2": {"absolute": 0.504},
    "blockwise:4": {"absolute": 0.072},
    "blockwise:8": {"absolute": 0.00397},
    "blockwise:3(block=32, form=affine)": {"absolute": 0.144},
    "blockwise:8(block=128, form=affine)": {"absolute": 0.00396},
    "blockwise:5(scale=fp16)": {"absolute": 0.03337, "floor": 6e-8, "largest": 65504.0},
    "blockwise:6(block=32, scale=e8m0)": {"absolute": 0.0323, "largest": 2.0**127},
    "blockwise:2(rounding=stochastic)": {"absolute": 1.008, "unbiased": True},
    "blockwise:3(form=affine, rounding=stochastic)": {"absolute": 0.336, "unbiased": True},
}


class Blockwise(BlockCodec):
    """code = round(x / scale * (2^(b-1) - 1)) in a block of contiguous elements of the flat message, one scale each.

    form=absmax: scale = max|x|, levels -(2^(b-1) - 1) .. 2^(b-1) - 1 of it: zero and both ends have levels, one code is
    left out. form=affine: all 2^b levels over the block's range, extended to hold zero, and a zero point, one byte a
    block, which is a code: so zero is exact, and a block of one sign wastes nothing.
    scale: bf16 (the default: float32's range), fp16 (refuses above 65504 and loses blocks below 6e-8, as small
    gradients are) or e8m0 (a power of two in one byte; refuses above 2^127); all rounded up, so that nothing clips.
    rounding=stochastic is unbiased and keyed by the message; an affine grid then has 2^b - 2 steps for its range.
    """

    purpose = "blockwise"

    def __init__(
        self,
        *,
        bits: int,
        block: str = "64",
        form: str = "absmax",
        rounding: str = "nearest",
        scale: str = "bf16",
    ) -> None:
        super().__init__(Blocks(bits, int(block), scale, affine=form == "affine", stochastic=rounding == "stochastic"))
