"""On a GPU: codecs of CUDA tensors write the CPU's bytes, on torch's current stream, without a way over the host.

    python -m pytest -m gpu --noconftest tests/contract/test_cuda_kernels.py

needs torch 2.11 or newer, numba and CuPy, and of thinpipe the compression package only. The arithmetic is held against
the reference without a GPU in test_cuda_source.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from thinpipe.harness.compression import grammar
from thinpipe.harness.compression.base import Compressor, Context
from thinpipe.harness.errors import CodecError, DivergedError

pytestmark = pytest.mark.gpu

ROUNDINGS = ("nearest", "stochastic")
FIXED = [
    *(f"fixpoint:{bits}(rounding={rounding}, scale={scale})"
      for bits in range(1, 9) for rounding in ROUNDINGS for scale in ("channel", "token", "tensor")),
    *(f"fixpoint:{bits}(clip=symmetric, rounding={rounding}, scale={scale})"
      for bits in range(2, 9) for rounding in ROUNDINGS for scale in ("channel", "token")),
    *(f"fixpoint:{bits}(preset=acsgd, scale={scale})" for bits in range(1, 9) for scale in ("channel", "token")),
    "fixpoint:4(eps=1e-3)",
]  # fmt: skip
BLOCKS = [
    *(f"blockwise:{bits}(block={block}, form={form}, rounding={rounding})"
      for bits in range(2, 9) for block in (32, 64, 128) for form in ("absmax", "affine") for rounding in ROUNDINGS),
    *(f"blockwise:4(form={form}, scale={scale})" for form in ("absmax", "affine") for scale in ("fp16", "e8m0")),
    *(f"minmax:{bits}" for bits in range(1, 9)), "minmax:3(block=1)", "minmax:5(block=100)",
    "nf4", "mxfp4", "fp8",
]  # fmt: skip
# The last two are long enough for several pieces, and atomics, a scale.
SHAPES = [(1,), (7,), (3, 7), (2, 5, 9), (1, 1, 4097), (2, 3, 5, 7), (2, 2, 3, 2, 5), (4, 500, 768), (8, 16, 100, 101)]


@pytest.fixture
def device() -> torch.device:
    assert torch.cuda.is_available(), "these tests need a CUDA device and torch built for it"
    return torch.device("cuda", torch.cuda.current_device())


def sample(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Normal values of very different size by channel, some zero, one large, some subnormal."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-6, 0, shape[-1])
    flat = x.view(-1)
    flat[:: max(2, flat.numel() // 3)] = 0.0
    flat[flat.numel() // 2] *= 1e4
    flat[flat.numel() // 3] = 1e-41
    return x


def encode(codec: Compressor, x: torch.Tensor, offset: int = 0) -> torch.Tensor:
    size = codec.max_bytes(tuple(x.shape))
    room = torch.full((size + 16,), 0xAB, dtype=torch.uint8, device=x.device)
    total = codec.encode(x, Context(tuple(x.shape)), room[offset : offset + size])
    assert bool((room[:offset] == 0xAB).all() and (room[offset + size :] == 0xAB).all()), "wrote beside the payload"
    return room[offset : offset + total]


def decode(codec: Compressor, payload: torch.Tensor, shape: tuple[int, ...], offset: int = 0) -> torch.Tensor:
    room = torch.full((math.prod(shape) + 8,), 7e37, device=payload.device)
    out = room[offset : offset + math.prod(shape)].view(shape)
    assert codec.decode(payload, Context(shape), out) is out
    assert int((room == 7e37).sum()) == 8, "wrote beside its tensor"
    return out


@pytest.mark.parametrize("text", [*FIXED, *BLOCKS])
def test_bytes_and_values_are_those_of_the_cpu(device: torch.device, text: str) -> None:
    codec = grammar.build(text)
    for number, shape in enumerate(SHAPES):
        x = sample(shape, number)
        expected = encode(codec, x)
        for offset in (0, number % 8, 2):
            assert torch.equal(encode(codec, x.to(device), offset).cpu(), expected), (shape, offset)
        values = decode(codec, expected.to(device), shape, number % 4)
        assert torch.equal(values.cpu().view(torch.int32), decode(codec, expected, shape).view(torch.int32)), shape


@pytest.mark.parametrize("text", ["fixpoint:4", "fixpoint:4(scale=tensor)", "blockwise:4", "minmax:4"])
def test_errors_are_those_of_the_cpu(device: torch.device, text: str) -> None:
    codec, shape = grammar.build(text), (3, 100, 768)
    for at in (0, 100_000, 3 * 100 * 768 - 1):
        for bad in (float("nan"), float("inf"), float("-inf")):
            x = torch.randn(shape, device=device)
            x.view(-1)[at] = bad
            with pytest.raises(DivergedError):
                encode(codec, x)
    payload = encode(codec, torch.randn(shape, device=device))
    for bad_payload in (payload[:-1], torch.cat([payload[:1], payload]), torch.full_like(payload, 0xFF)):
        with pytest.raises(CodecError, match="malformed"):
            decode(codec, bad_payload, shape)


@pytest.mark.parametrize("text", ["fixpoint:4", "blockwise:4", "minmax:4"])
def test_it_runs_on_the_current_stream(device: torch.device, text: str) -> None:
    """The input is written late on a stream of its own: on any other the kernels would find it empty."""
    codec, shape = grammar.build(text), (4, 256, 768)
    source = sample(shape)
    expected, ready = encode(codec, source), source.to(device)
    encode(codec, ready)  # compiled by now
    x, out = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        x.copy_(ready)
        payload = encode(codec, x)
        late = torch.zeros_like(payload)
        torch.cuda._sleep(200_000_000)
        late.copy_(payload)
        codec.decode(late, Context(shape), out)
        assert torch.equal(payload.cpu(), expected)
        assert torch.equal(out.cpu(), decode(codec, expected, shape))


def copies(run: Callable[[], Any], folder: Path) -> list[dict[str, Any]]:
    """Copies between host and device while `run` runs: their kind and bytes."""
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        run()
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events), "the profiler saw nothing"
    found = [event for event in events if event.get("cat") == "gpu_memcpy"]
    return [{"name": event["name"], **event["args"]} for event in found if "DtoD" not in event["name"]]


@pytest.mark.parametrize("text", ["fixpoint:4", "blockwise:4", "minmax:4"])
def test_only_a_status_word_comes_to_the_host(device: torch.device, text: str, tmp_path: Path) -> None:
    codec, shape = grammar.build(text), (4, 256, 768)
    x, out = torch.randn(shape, device=device), torch.empty(shape, device=device)
    room = torch.empty(codec.max_bytes(shape), dtype=torch.uint8, device=device)
    codec.decode(room[: codec.encode(x, Context(shape), room)], Context(shape), out)
    for run in (lambda: codec.encode(x, Context(shape), room), lambda: codec.decode(room, Context(shape), out)):
        found = copies(run, tmp_path)
        assert len(found) == 1, found
        assert "DtoH" in found[0]["name"]
        assert found[0]["bytes"] == 4
