"""EF21: send the compressed change from what was made so far, from zero on."""

from __future__ import annotations

from typing import Any

from thinpipe.harness.compression.base import Codec
from thinpipe.harness.compression.keys import Key
from thinpipe.harness.compression.memories.delta import Delta

VERSION = 1
SUMMARY = "the compressed change from what both ends made so far, which begins at zero"
SOURCE = "Richtarik et al., 2021 (arXiv 2106.05203); at pipeline boundaries: arXiv 2401.07788"
STATE = "shared"
PARAMETERS = {
    "codec": {"place": "item", "type": "codec"},
    "cache": {"type": "word", "choices": ["bf16", "fp16", "fp32"], "default": "fp32"},
    "key": {"type": "word", "choices": ["sample", "slot", "batch"], "default": "slot"},
    "store": {"type": "word", "choices": ["ram", "disk"], "default": "ram"},
}
CONTRACT = {
    "ef21(fixpoint:4)": {"absolute": 0.126, "change": 0.126},
    "ef21(fixpoint:2, cache=bf16, key=sample)": {"absolute": 0.504, "change": 0.504},
    "ef21(fixpoint:4, key=batch)": {"absolute": 0.126, "change": 0.126},
}


class EF21(Delta):
    """g += C(x - g) at both ends, and g is used: delta whose g is 0 at first, so that C itself codes the first visit.

    All rows of a message, met or not, are one message of the codec. key=slot and cache=fp32 are as published: one
    buffer of the batch's shape a boundary and direction, where a row meets the g of an unrelated sample;
    key=sample is what the method's theory speaks of.
    """

    def __init__(self, codec: Codec, *, cache: str = "fp32", key: Key = "slot", **place: Any) -> None:
        super().__init__(codec, cache=cache, key=key, **place)
