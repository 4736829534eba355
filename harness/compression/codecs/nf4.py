"""4-bit NormalFloat: the quantiles of a normal distribution as levels, one scale a block."""

from __future__ import annotations

from thinpipe.harness.compression.blocked import BlockCodec
from thinpipe.harness.compression.kernels.reference_blocks import Blocks

VERSION = 1
SUMMARY = "16 quantiles of a normal distribution times a scale every 32, 64 or 128 elements"
SOURCE = "Dettmers et al., 2023 (arXiv 2305.14314): the data type of QLoRA"
FORMULA = "bits + 16 / {'32': 32, '64': 64, '128': 128}[block]"
PARAMETERS = {
    "bits": {"place": "fixed", "value": 4},
    "block": {"type": "word", "choices": ["32", "64", "128"], "default": "64"},
}
# Half of the widest gap, between the lowest two levels, of a scale up to 2^-7 above max|x|.
CONTRACT = {"nf4": {"absolute": 0.1532}, "nf4(block=32)": {"absolute": 0.1532}}


class NormalFloat(BlockCodec):
    """code = the level nearest to x / max|x| of its block, the lower one where two are equally near.

    The levels are worked out in reference_blocks.normal_float_levels; zero is one of them. The scale is bf16 rounded
    up, where QLoRA keeps float32 and quantises these scales once more (double quantisation: for weights at rest).
    """

    def __init__(self, *, block: str = "64") -> None:
        super().__init__(Blocks(4, int(block), "bf16", "nf4"))
