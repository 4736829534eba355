"""bfloat16: float32's range with 8 significant bits."""

from __future__ import annotations

import torch

from thinpipe.harness.compression.halves import Half

VERSION = 1
SUMMARY = "16-bit float, 8 significant bits, float32's range"
SOURCE = "baseline"
PARAMETERS = {"bits": {"place": "fixed", "value": 16}}
CONTRACT = {"bf16": {"relative": 0.003907, "absolute": 0.0, "largest": 3.3895e38}}


class BrainFloat(Half):
    """2 bytes an element."""

    format = torch.bfloat16
    advice = "use none"
