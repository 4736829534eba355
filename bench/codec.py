"""Codec speed on one thread, as ratios measured in the same run: to plain torch, and to a memcpy of the tensor.

    python bench/codec.py [--json] [--repeats N]

Headline (0.5 and 16 MB float32, one scale a channel, buffers given; the worse of the two sizes):
    vs_reference       fixpoint:4 encode + decode: time of reference.py / ours               at least 8
    vs_memcpy          fixpoint:4 encode + decode: ours / np.copyto of the tensor            at most 6
    channel_vs_memcpy  the same with frame and hash: encode, seal, unseal, decode
    codecs             by text: encode_decode_vs_memcpy (the worse of the two sizes), encode_vs_memcpy, melem_per_s
                       (encode + decode, 16 MB), and vs_bitsandbytes: ours / theirs, for those that have a peer there
                       (block-wise 8 bits, NF4), null else; vs_torch_topk: topk's encode / torch.topk. Aims: fixpoint
                       and blockwise at 2, 3, 4, 6, 8 bits at most 4, delta(fixpoint:4) at most 8, topk:0.1's encode at
                       most 10, grid:2.4 (1 bit an element of normal data) at least 80 M elements/s
Detail: every width, by scale, rounding, delta, and `vs_torch_nibbles`: a hand-written 4-bit torch version without the
reference's bit matrix, the fairest opponent that stays in torch. Each number is a median over repeats, interleaved
with a memcpy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from thinpipe.harness import frame
from thinpipe.harness.compression import grammar
from thinpipe.harness.compression.base import Compressor, Context
from thinpipe.harness.compression.kernels import reference
from thinpipe.harness.compression.kernels.layout import Grid, layout
from thinpipe.harness.compression.warm_up import warm_up

SHAPES = {"0.5MB": (4, 64, 512), "16MB": (4, 1024, 1024)}
TEXTS = [
    *(f"fixpoint:{bits}" for bits in range(1, 9)),
    "fixpoint:4(scale=token)", "fixpoint:4(scale=tensor)", "fixpoint:4(rounding=stochastic)",
    *(f"blockwise:{bits}" for bits in (2, 3, 4, 6, 8)), "blockwise:4(form=affine)", "minmax:4", "nf4", "mxfp4", "fp8",
    "topk:0.1", "topk:0.1(by=token)", "topk:0.1(values=blockwise:4)", "randk:0.1", "grid:2.4", "grid:0.5",
    "hadamard(blockwise:4)", "kmeans:4", "lowrank:4", "lossless:zstd", "lossless:bf16",
    "fixpoint:4(preset=acsgd)", "delta(fixpoint:4)", "delta(fixpoint:4, cache=fp16)", "delta(fixpoint:2)",
    "delta(fixpoint:2, cache=fixpoint:8)",
    "ef(topk:0.1)", "delta(grid:0.5)", "none", "bf16", "fp16",
]  # fmt: skip


class Case:
    """A sender and a receiver of one compressor, with buffers as a channel has them."""

    def __init__(self, text: str, x: torch.Tensor) -> None:
        self.x, self.shape = x, tuple(x.shape)
        self.sender: Compressor = grammar.build(text)
        self.receiver: Compressor = grammar.build(text)
        self.ctx = Context(self.shape, sample_ids=tuple(range(self.shape[0])))
        self.buffer = torch.zeros(frame.HEADER_BYTES + self.sender.max_bytes(self.shape), dtype=torch.uint8)
        self.view = memoryview(self.buffer.numpy())
        self.body = self.buffer[frame.HEADER_BYTES :]
        self.out = torch.zeros(self.shape)
        self.header = frame.Header(
            False, False, 0, 0, 0, frame.compressor_id(text), "float32", self.shape, frame.ids_hash(self.ctx.sample_ids)
        )
        self.n = 0
        for _ in range(2):  # a memory's first visit is not what is measured
            self.encode()
            self.decode()

    def encode(self) -> None:
        self.n = self.sender.encode(self.x, self.ctx, self.body)

    def decode(self) -> None:
        self.receiver.decode(self.body[: self.n], self.ctx, self.out)

    def channel(self) -> None:
        self.encode()
        frame.seal(self.view, self.header, self.n)
        length, _ = frame.unseal(self.view, self.header)
        self.receiver.decode(self.body[:length], self.ctx, self.out)


def plain_torch(x: torch.Tensor) -> tuple[Callable[[], None], Callable[[], None]]:
    """The reference's fixpoint:4."""
    where, grid = layout(tuple(x.shape), "channel"), Grid(4)
    payload, out = torch.zeros(grid.num_bytes(where), dtype=torch.uint8), torch.zeros(x.shape)

    def encode() -> None:
        reference.encode(x, where, grid, 0, payload)

    def decode() -> None:
        reference.decode(payload, where, grid, out)

    return encode, decode


def torch_topk(x: torch.Tensor) -> tuple[Callable[[], None], Callable[[], None]]:
    """The values and places of a tenth of each sample, without coding them; and nothing to decode."""
    flat = x.view(x.shape[0], -1)
    k = flat.shape[1] // 10

    def encode() -> None:
        torch.topk(flat.abs(), k, dim=1, sorted=False)

    return encode, lambda: None


def bitsandbytes_peers(x: torch.Tensor) -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
    """Its CPU quantisers by the text of ours that they are peers of; {} where it is not installed."""
    try:
        import bitsandbytes.functional as peers
    except ImportError:
        return {}
    coded, state = peers.quantize_blockwise(x, blocksize=64)
    coded4, state4 = peers.quantize_4bit(x, blocksize=64, quant_type="nf4")
    return {
        "blockwise:8": (
            lambda: peers.quantize_blockwise(x, blocksize=64), lambda: peers.dequantize_blockwise(coded, state)
        ),
        "nf4": (
            lambda: peers.quantize_4bit(x, blocksize=64, quant_type="nf4"),
            lambda: peers.dequantize_4bit(coded4, state4),
        ),
    }  # fmt: skip


def torch_nibbles(x: torch.Tensor) -> tuple[Callable[[], None], Callable[[], None]]:
    """4 bits in torch with as few passes as it takes: no bit matrix, in-place where that helps."""
    flat = x.view(-1, x.shape[-1])
    packed = torch.zeros((flat.shape[0], flat.shape[1] // 2), dtype=torch.uint8)
    scale, out, work = torch.ones(flat.shape[1]), torch.zeros(flat.shape), torch.empty(flat.shape)

    def encode() -> None:
        low, high = torch.aminmax(flat, dim=0)
        largest = torch.maximum(low.neg(), high)
        assert bool(torch.isfinite(largest).all())
        scale.copy_(largest)
        torch.mul(flat, 8 / largest, out=work)
        codes = work.round_().clamp_(-8, 7).add_(8).to(torch.uint8)
        torch.bitwise_or(codes[:, ::2] << 4, codes[:, 1::2], out=packed)

    def decode() -> None:
        out[:, ::2] = packed >> 4
        out[:, 1::2] = packed & 15
        out.sub_(8).mul_(scale / 8)

    return encode, decode


def medians(actions: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Seconds of each action: median over rounds that run every action once."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for round_ in range(repeats + 2):
        for name, action in actions.items():
            start = time.perf_counter()
            action()
            if round_ >= 2:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(shape: tuple[int, ...], repeats: int) -> dict[str, dict[str, float]]:
    """By compressor: microseconds of encode and decode, and ratios to a memcpy of this size.

    Each is interleaved with a memcpy of its own and nothing else, so that both find the caches alike: with others
    in between, the memcpy of a small tensor would start cold and flatter the ratio.
    """
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    source, target = x.numpy(), np.zeros(shape, np.float32)
    rows: dict[str, dict[str, float]] = {}
    peers = {f"bitsandbytes {text}": pair for text, pair in bitsandbytes_peers(x).items()}
    peers |= {"reference": plain_torch(x), "torch_nibbles": torch_nibbles(x), "torch.topk": torch_topk(x)}
    for name in (*peers, *TEXTS):
        actions: dict[str, Callable[[], None]] = {"memcpy": lambda: np.copyto(target, source)}
        if name in TEXTS:
            case = Case(name, x)
            actions |= {"encode": case.encode, "decode": case.decode, "channel": case.channel}
        else:
            actions["encode"], actions["decode"] = peers[name]
        found = medians(actions, repeats)
        copy, both = found["memcpy"], found["encode"] + found["decode"]
        rows[name] = {f"{action}_us": seconds * 1e6 for action, seconds in found.items()}
        rows[name]["vs_memcpy"] = both / copy
        rows[name]["encode_vs_memcpy"] = found["encode"] / copy
        rows[name]["melem_per_s"] = x.numel() / both / 1e6
        if name in TEXTS:
            rows[name]["channel_vs_memcpy"] = found["channel"] / copy
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--repeats", type=int, default=25, help="rounds, at least 10")
    options = parser.parse_args()
    if options.repeats < 10:
        parser.error("--repeats must be at least 10")
    torch.set_num_threads(1)
    warm = warm_up(TEXTS)
    sizes = {label: measure(shape, options.repeats) for label, shape in SHAPES.items()}
    speedup = {
        opponent: min(both_us(rows[opponent]) / both_us(rows["fixpoint:4"]) for rows in sizes.values())
        for opponent in ("reference", "torch_nibbles")
    }
    result = {
        "vs_reference": speedup["reference"],
        "vs_memcpy": max(rows["fixpoint:4"]["vs_memcpy"] for rows in sizes.values()),
        "channel_vs_memcpy": max(rows["fixpoint:4"]["channel_vs_memcpy"] for rows in sizes.values()),
        "vs_torch_nibbles": speedup["torch_nibbles"],
        "codecs": {text: summary(text, sizes) for text in TEXTS},
        "warm_up_s": warm,
        "repeats": options.repeats,
        "sizes": sizes,
    }
    print(json.dumps(result, indent=2) if options.json else as_text(result))


def summary(text: str, sizes: dict[str, dict[str, dict[str, float]]]) -> dict[str, float | None]:
    """What is shown of one compressor; ratios to a peer are medians of both, in the same run."""
    worst = {key: max(rows[text][key] for rows in sizes.values()) for key in ("vs_memcpy", "encode_vs_memcpy")}
    found: dict[str, float | None] = {
        "encode_decode_vs_memcpy": worst["vs_memcpy"],
        "encode_vs_memcpy": worst["encode_vs_memcpy"],
        "melem_per_s": sizes["16MB"][text]["melem_per_s"],
        "vs_bitsandbytes": None,
    }
    peer = f"bitsandbytes {text}"
    if all(peer in rows for rows in sizes.values()):
        found["vs_bitsandbytes"] = max(both_us(rows[text]) / both_us(rows[peer]) for rows in sizes.values())
    if text == "topk:0.1":
        ratios = [rows[text]["encode_us"] / rows["torch.topk"]["encode_us"] for rows in sizes.values()]
        found["vs_torch_topk"] = max(ratios)
    return found


def both_us(row: dict[str, float]) -> float:
    return row["encode_us"] + row["decode_us"]


def as_text(result: dict) -> str:
    names = ("vs_reference", "vs_memcpy", "channel_vs_memcpy", "vs_torch_nibbles", "warm_up_s")
    lines = [f"{name:20s} {result[name]:8.2f}" for name in names]
    for label, rows in result["sizes"].items():
        lines += ["", f"{label}: memcpy, encode, decode in us; encode + decode and channel over memcpy"]
        for name, row in rows.items():
            channel = f"{row['channel_vs_memcpy']:7.2f}" if "channel_vs_memcpy" in row else ""
            times = f"{row['memcpy_us']:8.0f} {row['encode_us']:9.0f} {row['decode_us']:9.0f}"
            lines.append(f"  {name:38s} {times} {row['vs_memcpy']:8.2f} {channel}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
