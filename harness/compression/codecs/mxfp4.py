"""MXFP4: 4-bit floats under a shared power of two."""

from __future__ import annotations

import torch

from thinpipe.harness.compression.base import Context
from thinpipe.harness.compression.blocked import BlockCodec
from thinpipe.harness.compression.kernels import reference
from thinpipe.harness.compression.kernels.reference_blocks import Blocks

VERSION = 1
SUMMARY = "4-bit floats (0, .5, 1, 1.5, 2, 3, 4, 6) times a power of two every 32 elements"
SOURCE = "OCP Microscaling Formats (MX) Specification 1.0, 2023"
FORMULA = "bits + 8 / 32"
PARAMETERS = {"bits": {"place": "fixed", "value": 4}}
# A block's largest element is 4 to 8 times the scale, and the largest level is 6: what lies above is off by up to 2.
CONTRACT = {"mxfp4": {"absolute": 0.2501}}


class MicroscalingFloat4(BlockCodec):
    """E2M1 elements, to the nearest, ties to even, saturating at 6; E8M0 scales 2^(floor(log2 max|x|) - 2).

    As specified but for one thing: blocks whose max|x| is below 2^-118 are zeros, and scale byte 0 stands for zero.
    """

    def __init__(self) -> None:
        super().__init__(Blocks(4, 32, "e8m0", "e2m1"))

    def _diagnose(self, x: torch.Tensor, ctx: Context, payload: torch.Tensor) -> dict[str, float]:
        found = super()._diagnose(x, ctx, payload)
        if x.numel():
            codes = reference.unpack(payload[self.how.head_bytes(x.numel()) :], 4, x.numel())
            found["clip_fraction"] = ((codes & 7) == 7).float().mean().item()
        return found
