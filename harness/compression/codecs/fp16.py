"""IEEE half precision: 11 significant bits, finite up to 65504."""

from __future__ import annotations

import torch

from thinpipe.harness.compression.halves import Half

VERSION = 1
SUMMARY = "16-bit float, 11 significant bits, range up to 65504"
SOURCE = "baseline"
PARAMETERS = {"bits": {"place": "fixed", "value": 16}}
CONTRACT = {"fp16": {"relative": 0.000489, "absolute": 0.0, "floor": 3e-8, "largest": 65504.0}}


class HalfPrecision(Half):
    """2 bytes an element. A finite value that fp16 cannot hold is an error, not infinity."""

    format = torch.float16
    advice = "use bf16"
