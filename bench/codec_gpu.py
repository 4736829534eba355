"""Codec speed on a GPU: GB/s of float32 input, against a device-to-device copy of the tensor measured in the same run.

    python bench/codec_gpu.py [--json] [--repeats N]

Buffers are given; a time is that of one call as a channel makes it, launches and the wait for its status included, and
the copy's that of a copy and a wait. Medians of interleaved repeats. A rate counts the tensor once, copy_gb_s too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

import common
from thinpipe.harness.compression import grammar
from thinpipe.harness.compression.base import Context

SHAPES = {"16MB": (4, 1024, 1024), "256MB": (16, 1024, 4096)}
TEXTS = [
    *(f"fixpoint:{bits}" for bits in (2, 3, 4, 6, 8)), "fixpoint:4(scale=token)", "fixpoint:4(scale=tensor)",
    "fixpoint:4(rounding=stochastic)", *(f"blockwise:{bits}" for bits in (2, 3, 4, 6, 8)), "blockwise:4(form=affine)",
    "minmax:4",
]  # fmt: skip


def timed(action: Callable[[], object]) -> Callable[[], float]:
    def run() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        action()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    return run


def measure(text: str, shape: tuple[int, ...], repeats: int) -> dict[str, float]:
    codec, ctx = grammar.build(text), Context(shape)
    x, out = torch.randn(shape, device="cuda"), torch.empty(shape, device="cuda")
    room = torch.empty(codec.max_bytes(shape), dtype=torch.uint8, device="cuda")
    payload = room[: codec.encode(x, ctx, room)]
    actions = {
        "copy": lambda: out.copy_(x),
        "encode": lambda: codec.encode(x, ctx, room),
        "decode": lambda: codec.decode(payload, ctx, out),
    }
    taken = common.interleave({name: timed(action) for name, action in actions.items()}, repeats + 3)
    seconds = {name: statistics.median(times[3:]) for name, times in taken.items()}
    size = 4 * x.numel()
    rates = {f"{name}_gb_s": size / spent / 1e9 for name, spent in seconds.items()}
    return {**rates, "encode_decode_vs_copy": (seconds["encode"] + seconds["decode"]) / seconds["copy"]}


def main() -> None:
    options = common.arguments(__doc__.splitlines()[0] if __doc__ else "", repeats=30)
    if not torch.cuda.is_available():
        raise SystemExit("bench/codec_gpu.py needs a CUDA device and a torch built for it; this machine shows none")
    sizes = {label: {text: measure(text, shape, options.repeats) for text in TEXTS} for label, shape in SHAPES.items()}
    common.show({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "sizes": sizes}, options.json)


if __name__ == "__main__":
    main()
