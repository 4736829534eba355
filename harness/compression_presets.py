"""Published settings of `compression` by name: `compression.preset = "acsgd-fw4bw8"`. Pure.

A preset is sugar: spec.py puts what it says in its place before a run is named, so that a run has the same id however
it is written. A share of TopK is written in per cent in a name.

>>> PRESETS["acsgd-fw4bw8"].backward
'fixpoint:8(preset=acsgd)'
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

AQSGD = "Wang et al., 2022 (arXiv 2206.01299)"
RUDAKOV = "Rudakov et al., 2023 (arXiv 2401.07788)"
BITS_FORWARD, BITS_BACKWARD = (2, 4, 8), (2, 4, 6, 8)
SHARES = (50, 30, 20, 10, 5, 2)


class Preset(NamedTuple):
    """Settings of spec.CompressionSpec, and what they are. Compressors are canonical texts."""

    forward: str
    backward: str
    summary: str
    source: str
    warmup_epochs: int = 0
    evaluation: Literal["off", "codec"] = "off"

    def settings(self) -> dict[str, Any]:
        """What it fills in, by key of CompressionSpec."""
        return {name: getattr(self, name) for name in ("forward", "backward", "warmup_epochs", "evaluation")}


def _acsgd() -> dict[str, Preset]:
    def made(bits: int, cache: str, backward: int, summary: str) -> Preset:
        forward = f"delta(fixpoint:{bits}(preset=acsgd), cache={cache})"
        return Preset(forward, f"fixpoint:{backward}(preset=acsgd)", summary, AQSGD, warmup_epochs=1)

    return {
        "acsgd-fw4bw8": made(4, "fp16", 8, "AQ-SGD on GPT-2: changes in 4 bits, gradients in 8, one warm-up epoch"),
        "acsgd-fw3bw6": made(3, "fp16", 6, "AQ-SGD on DeBERTa: changes in 3 bits, gradients in 6, one warm-up epoch"),
        "acsgd-lowbits": made(2, "fixpoint:8(preset=acsgd)", 8, "delta-lowbits: changes in 2 bits, an 8-bit cache"),
    }


def _rudakov() -> dict[str, Preset]:
    def made(forward: str, backward: str, summary: str) -> Preset:
        return Preset(forward, backward, summary, RUDAKOV, evaluation="codec")

    found = {
        f"rudakov-q{fw}-{bw}": made(f"minmax:{fw}", f"minmax:{bw}", f"min-max: activations {fw} bits, gradients {bw}")
        for fw in BITS_FORWARD
        for bw in BITS_BACKWARD
    }
    for percent in SHARES:
        share = f"{percent / 100:g}"
        top, shared = f"topk:{share}(ties=drop)", f"topk:{share}(mask=forward)"
        found |= {
            f"rudakov-top{percent}": made(top, top, f"TopK {percent} % both ways, chosen apart"),
            f"rudakov-top{percent}-shared": made(top, shared, f"TopK {percent} %, gradients where activations are"),
            f"rudakov-ef-top{percent}": made(f"ef({top})", f"ef({top})", f"error feedback and TopK {percent} %"),
            f"rudakov-ef21-top{percent}": made(f"ef21({top})", f"ef21({top})", f"EF21 and TopK {percent} %"),
            f"rudakov-aqsgd-top{percent}": made(f"delta({top}, cache=fp32)", top, f"AQ-SGD and TopK {percent} %"),
        }
    return found


PRESETS: Mapping[str, Preset] = MappingProxyType(_acsgd() | _rudakov())
