"""8-bit floats with a scale every 128 elements."""

from __future__ import annotations

from thinpipe.harness.compression.blocked import BlockCodec
from thinpipe.harness.compression.kernels.reference_blocks import Blocks

VERSION = 1
SUMMARY = "8-bit floats (E4M3) times a scale every 128 elements"
SOURCE = "Micikevicius et al., 2022 (arXiv 2209.05433): E4M3; tiles of 128 as in DeepSeek-V3 (arXiv 2412.19437)"
FORMULA = "bits + {'fp32': 32, 'bf16': 16}[scale] / 128"
PARAMETERS = {
    "bits": {"place": "fixed", "value": 8},
    "scale": {"type": "word", "choices": ["bf16", "fp32"], "default": "bf16"},
}
# Four significant bits; below 2^-6 of 448 steps of 2^-9.
CONTRACT = {
    "fp8": {"relative": 0.0626, "absolute": 2.3e-6},
    "fp8(scale=fp32)": {"relative": 0.0626, "absolute": 2.3e-6},
}


class TiledFloat8(BlockCodec):
    """code = float8_e4m3fn(x * 448 / max|x| of its tile), nearest even, saturating: a tile's largest element is 448.

    scale=bf16: max|x| rounded up; scale=fp32: as it is, the published form.
    """

    def __init__(self, *, scale: str = "bf16") -> None:
        super().__init__(Blocks(8, 128, scale, "e4m3"))
