"""The compiled entropy coder gives the bytes of the plain definition, and survives what is no stream of its own."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpipe.harness.compression import grammar
from thinpipe.harness.compression.base import Context
from thinpipe.harness.compression.kernels import entropy, rans, reference_grid
from thinpipe.harness.compression.kernels.layout import layout
from thinpipe.harness.errors import CodecError, DivergedError

SHAPES = [
    (1,), (7,), (1, 1, 1), (3, 7), (2, 5, 9), (5, 20, 13), (2, 16, 64), (2, 3, 5, 7), (3, 2, 1, 1), (2, 3, 20, 20),
    (2, 2, 3, 2, 5), (1, 1, 1025),
]  # fmt: skip
SCALES = ["tensor", "token", "channel"]


def tensor(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Normal values of unlike size by channel, with zeros, ties and one outlier."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if x.numel() > 4:
        x *= torch.logspace(-6, 0, shape[-1])
        flat = x.view(-1)
        flat[:: max(2, x.numel() // 3)] = 0.0
        flat[x.numel() // 2] *= 1e4
        flat[1] = -flat[3]
    return x


def encode(codec, x: torch.Tensor) -> torch.Tensor:
    """The payload, at an odd place in a larger buffer."""
    most = codec.max_bytes(tuple(x.shape))
    buffer = torch.full((most + 9,), 0xA5, dtype=torch.uint8)
    total = codec.encode(x, Context(tuple(x.shape)), buffer[3 : 3 + most])
    assert bool((buffer[3 + most :] == 0xA5).all())
    return buffer[3 : 3 + total].clone()


def decode(codec, payload: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return codec.decode(payload, Context(shape), torch.full(shape, 123.0))


def stream(symbols: np.ndarray) -> np.ndarray:
    out = np.zeros(symbols.size + 1000, np.uint8)
    length = entropy.encode(symbols, entropy.count(symbols), out)
    assert length is not None
    return out[:length]


@pytest.mark.parametrize(("scale", "value"), list(itertools.product(SCALES, [0.02, 1.0, 2.5])))
def test_payloads_and_values_are_those_of_the_reference(scale: str, value: float) -> None:
    for shape, dead in itertools.product(SHAPES, (0.0, 0.3)):
        codec = grammar.build(f"grid:{value}(scale={scale}, dead={dead})")
        where = layout(shape, scale)
        for size in (1.0, 1e-4, 1e-37, 1e33):
            x = tensor(shape, seed=len(shape)) * size
            payload = encode(codec, x)
            wanted = reference_grid.encode(x, where, value, 0.5 - dead)
            assert payload.numpy().tobytes() == wanted, (shape, dead, size)
            if wanted[0] == 1:
                step = reference_grid.steps(reference_grid.root_mean_square(x, where), value)
                symbols = reference_grid.quantise(x, step, where, 0.5 - dead)
                values = reference_grid.dequantise(symbols, step, where, x.view(-1)[symbols == -128])
                assert torch.equal(decode(codec, payload, shape).view(-1), values)


def test_rms_does_not_depend_on_the_order() -> None:
    """Neither on that of elements nor of devices' sums: the same to the last bit however the tensor is shuffled."""
    for seed in range(20):
        x = tensor((1, 1, 5000), seed) * 10.0 ** (seed - 10)
        where, found = layout((1, 1, 5000), "tensor"), set()
        for order in range(4):
            y = x[..., torch.randperm(5000, generator=torch.Generator().manual_seed(order))].contiguous()
            rms = np.empty(1)
            assert rans.measure(y.view(-1).numpy(), (1, 5000, 1, 0, 0, 0), 5000, rms)
            found |= {float(rms[0]), reference_grid.root_mean_square(y, where).item()}
        assert len(found) == 1
        assert found.pop() == pytest.approx(x.double().square().mean().sqrt().item(), rel=1e-3)


def test_steps_of_every_exponent() -> None:
    patterns = torch.randint(0, 0x7F800000, (20_000,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    edges = torch.arange(0, 0x7F80, dtype=torch.int32) << 16
    x = torch.cat([patterns, edges, edges + 1, edges + 0x7FFF]).view(torch.float32)
    where = layout((1, x.numel()), "channel")
    rms, head, step = np.empty(x.numel()), np.empty(2 * x.numel(), np.uint8), np.empty(x.numel(), np.float32)
    assert rans.measure(x.numpy(), (1, x.numel(), 1, 0, 0, 1), 1, rms)
    rans.scales(rms, 0.7, head, step)
    wanted = reference_grid.root_mean_square(x, where)
    assert np.array_equal(rms, wanted.numpy())
    assert np.array_equal(head.view(np.uint16), reference_grid.steps(wanted, 0.7).view(torch.int16).numpy().view("u2"))
    again = np.empty_like(step)
    assert rans.read_scales(head, again)
    assert np.array_equal(again, np.where(np.isinf(step), 0.0, step))


SYMBOLS = {
    "one": lambda r: [r.choice([-127, 0, 3, 127])] * r.randint(1, 3000),
    "two": lambda r: r.choices([0, 1], [r.random(), 1e-3], k=r.randint(1, 3000)),
    "all": lambda r: [r.randint(-128, 127) for _ in range(r.randint(1, 3000))],
    "normal": lambda r: [max(-128, min(127, round(r.gauss(0, r.choice([0.3, 2, 60]))))) for _ in range(3000)],
    "escapes": lambda r: [-128] * r.randint(1, 40),
    "rare": lambda r: r.sample([*range(-128, 128), *[0] * 40_000], k=40_256),
}


@pytest.mark.parametrize("kind", SYMBOLS)
def test_streams_are_those_of_the_reference(kind: str) -> None:
    pick = random.Random(kind)
    for _ in range(2 if kind == "rare" else 12):
        symbols = SYMBOLS[kind](pick)
        array, back = np.array(symbols, np.int8), np.empty(len(symbols), np.int8)
        coded = stream(array)
        assert coded.tobytes() == reference_grid.encode_symbols(symbols)
        assert entropy.decode(coded, back) == symbols.count(-128)
        assert back.tolist() == symbols == reference_grid.decode_symbols(coded.tobytes(), len(symbols))


def test_a_stream_is_as_long_as_its_entropy_asks() -> None:
    generator = np.random.default_rng(0)
    for sigma in (0.05, 0.2, 0.5, 1.0, 4.0, 20.0):
        for draw in (generator.standard_normal, lambda n: generator.standard_t(2, n)):
            symbols = np.clip(np.rint(sigma * draw(100_000)), -128, 127).astype(np.int8)
            counts, found = entropy.count(symbols), stream(symbols).size
            assert np.array_equal(counts, np.bincount(symbols.view(np.uint8), minlength=256))
            assert entropy.ideal_bytes(counts) <= found <= 1.005 * entropy.ideal_bytes(counts) + 40
            assert found <= entropy.cost(counts) <= found + 17
            shares = counts[counts > 0] / symbols.size
            assert found <= 1.03 * -(shares * np.log2(shares)).sum() * symbols.size / 8 + 100


def test_a_buffer_that_is_too_short_is_left_alone_beyond_its_end() -> None:
    symbols = np.random.default_rng(1).integers(-100, 100, 3000).astype(np.int8)
    whole, counts = stream(symbols), entropy.count(symbols)
    for room in [0, 1, 40, 300, 450, *range(whole.size - 20, whole.size)]:
        out = np.full(whole.size + 50, 0xA5, np.uint8)
        assert entropy.encode(symbols, counts, out[:room]) is None
        assert bool((out[room:] == 0xA5).all())


def refused_or_finite(codec, payload: np.ndarray, shape: tuple[int, ...]) -> bool:
    try:
        assert bool(torch.isfinite(decode(codec, torch.from_numpy(payload), shape)).all())
    except CodecError:
        return True
    return False


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_damaged_payloads_are_refused_or_finite(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(["grid:1.0", "grid:0.02", "grid:1.0(scale=channel)", "lossless:bf16"]))
    shape = data.draw(st.sampled_from([(2, 5, 9), (3, 40, 17), (1, 1, 3000)]))
    codec = grammar.build(text)
    payload = encode(codec, tensor(shape, data.draw(st.integers(0, 3)))).numpy().copy()
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(80, payload.size - 1)) | st.integers(0, payload.size - 1))
        payload[at] ^= data.draw(st.integers(1, 255))
    refused_or_finite(codec, payload, shape)
    cut = payload[: data.draw(st.integers(0, payload.size - 1))]
    grown = np.concatenate([payload, payload[: data.draw(st.integers(1, 9))]])
    refused_or_finite(codec, cut, shape)
    refused_or_finite(codec, grown, shape)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=700), st.integers(1, 500))
def test_random_bytes_decode_as_the_reference_says(payload: bytes, size: int) -> None:
    """Behind a valid table as well, where the coder itself is reached."""
    for source in (payload, stream(np.array([0, 1, 1, 2, 5], np.int8)).tobytes()[:10] + payload):
        symbols = np.empty(size, np.int8)
        try:
            wanted = reference_grid.decode_symbols(source, size)
        except CodecError:
            with pytest.raises(CodecError, match="malformed"):
                entropy.decode(np.frombuffer(bytearray(source), np.uint8), symbols)
        else:
            entropy.decode(np.frombuffer(bytearray(source), np.uint8), symbols)
            assert symbols.tolist() == wanted


@pytest.mark.parametrize("text", ["grid:1.0", "grid:0.3(scale=token)", "lossless:bf16", "lossless:zstd"])
def test_a_truncated_payload_never_passes_and_most_flipped_bits_do_not(text: str) -> None:
    """Since states must end at rest and all words be used. (Signs and fractions of bf16 can be anything.)"""
    codec, shape = grammar.build(text), (2, 30, 20)
    payload = encode(codec, torch.randn(shape, generator=torch.Generator().manual_seed(0))).numpy()
    assert payload[0] == 1, "the coded form is what is tested here"
    for size in range(payload.size):
        with pytest.raises(CodecError, match="malformed"):
            decode(codec, torch.from_numpy(payload[:size].copy()), shape)
    flipped = [payload.copy() for _ in range(3, payload.size, 3)]
    for k, bad in enumerate(flipped):
        bad[3 + 3 * k] ^= 1
    refused = sum(refused_or_finite(codec, bad, shape) for bad in flipped)
    if text.startswith("grid"):
        assert refused > 0.75 * len(flipped), "most of the others are scales"


@pytest.mark.parametrize("claimed", [0, 4 * 90 - 1, 4 * 90 + 1, 1 << 40])
def test_a_zstandard_frame_is_not_asked_for_more_than_the_shape_holds(claimed: int) -> None:
    """What a frame says of its content is what the decompressor would allocate."""
    codec, shape = grammar.build("lossless:zstd"), (2, 5, 9)
    coded = bytearray(zstandard.ZstdCompressor(level=1).compress(bytes(360)))
    assert coded[4] & 0xE0 == 0x60, "one segment, content size in 2 bytes, that less 256"
    for frame in (
        coded[:4] + bytes([0xE0]) + claimed.to_bytes(8, "little") + coded[7:],
        zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(360)),
        zstandard.ZstdCompressor(level=1).compress(bytes(360)) * 2,
        b"",
    ):
        payload = torch.frombuffer(bytearray(b"\1" + frame), dtype=torch.uint8)
        with pytest.raises(CodecError, match="malformed"):
            decode(codec, payload, shape)
    good = torch.frombuffer(bytearray(b"\1" + coded), dtype=torch.uint8)
    assert not bool(decode(codec, good, shape).any())


def test_malformed_parts_are_refused() -> None:
    codec, shape = grammar.build("grid:0.05"), (1, 1, 3000)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x[0, 0, 5] = 1e4
    good = bytearray(encode(codec, x).numpy().tobytes())
    assert good[:1] + good[3:4] == b"\1\1", "one value beyond the levels"
    for what, at, value in [
        ("form", 0, b"\2"), ("infinite step", 1, b"\x80\x7f"), ("negative step", 1, b"\x00\x80"),
        ("subnormal step", 1, b"\x01\x00"), ("more values", 3, b"\2"), ("fewer values", 3, b"\0"),
        ("a longer number", 3, b"\x81\x00"), ("NaN", 4, b"\x00\x00\xc0\x7f"), ("infinity", 4, b"\x00\x00\x80\x7f"),
        ("table backwards", 8, b"\x10\x05"), ("a state below rest", len(good) - 4, b"\xff\xff\x00\x00"),
    ]:  # fmt: skip
        bad = good.copy()
        bad[at : at + len(value)] = value
        with pytest.raises(CodecError, match="malformed"):
            decode(codec, torch.frombuffer(bad, dtype=torch.uint8), shape)
        assert what


@pytest.mark.parametrize("value", [0.25, 1.0, 3.0, 7.0])
def test_a_rate_is_met_from_below(value: float) -> None:
    generator = torch.Generator().manual_seed(2)
    normal = torch.randn((4, 32, 256), generator=generator)
    heavy = normal * (1.5 * torch.randn(normal.shape, generator=generator)).exp()
    for x, scale in itertools.product((normal, heavy * 1e-6, heavy.relu()), ("tensor", "token")):
        if scale == "token" and value < 1:
            continue  # scales alone take 1/16 bit an element here
        codec = grammar.build(f"grid:{value}(by=rate, scale={scale}, dead=0.2)")
        found = 8 * encode(codec, x).numel() / x.numel()
        assert 0.96 * value <= found <= value, (scale, found)


def test_a_rate_too_low_for_the_side_information_and_one_that_is_not_needed() -> None:
    x = torch.randn((8, 16, 16), generator=torch.Generator().manual_seed(0))
    codec = grammar.build("grid:0.5(by=rate, scale=token)")
    assert 8 * encode(codec, x).numel() / x.numel() < 0.25 + 1.0 + 8 * 40 / x.numel(), "half for levels, then scales"
    sparse = x * (x > 2.5)
    codec = grammar.build("grid:6.0(by=rate)")
    payload = encode(codec, sparse)
    assert 8 * payload.numel() / x.numel() < 1.0
    assert (decode(codec, payload, (8, 16, 16)) - sparse).abs().max() < 1e-3


def test_a_dead_zone_trades_error_for_bits() -> None:
    x = torch.randn((4, 64, 128), generator=torch.Generator().manual_seed(0))
    found = []
    for dead in (0.0, 0.2, 0.5):
        codec = grammar.build(f"grid:1.0(dead={dead})")
        payload = encode(codec, x)
        decoded = decode(codec, payload, (4, 64, 128))
        step = decoded[decoded > 0].min().item()
        zero = x[decoded == 0].abs().max().item()
        assert zero == pytest.approx((0.5 + dead) * step, rel=0.01)
        assert (decoded - x).abs().max() <= (0.5 + dead) * step * 1.0001
        found.append((payload.numel(), (decoded - x).norm().item()))
    assert found == sorted(found, key=lambda entry: -entry[0])
    assert found == sorted(found, key=lambda entry: entry[1])


def test_a_multiplier_moves_the_step_and_the_receiver_needs_not_know() -> None:
    x = torch.randn((4, 64, 128), generator=torch.Generator().manual_seed(0))
    sender, receiver, coarse = (grammar.build(f"grid:{value}") for value in ("0.5", "0.5", "2.0"))
    plain = encode(sender, x)
    sender.multiplier = 4.0
    assert torch.equal(encode(sender, x), encode(coarse, x))
    assert torch.equal(
        decode(receiver, encode(sender, x), (4, 64, 128)), decode(coarse, encode(coarse, x), (4, 64, 128))
    )
    assert encode(sender, x).numel() < plain.numel()
    assert sender.mean_square == pytest.approx(x.square().mean().item(), rel=1e-3)


def test_non_finite_values_are_found_anywhere() -> None:
    for scale, bad, at in itertools.product(SCALES, (math.nan, math.inf, -math.inf), (0, 66, 3 * 5 * 67 - 1)):
        x = torch.randn(3, 5, 67)
        x.view(-1)[at] = bad
        for text in (f"grid:1.0(scale={scale})", f"grid:1.0(by=rate, scale={scale})", "lossless:bf16"):
            with pytest.raises(DivergedError, match="non-finite"):
                encode(grammar.build(text), x)
        with pytest.raises(DivergedError):
            reference_grid.encode(x, layout((3, 5, 67), scale), 1.0, 0.5)


def test_warm_up_compiles_all_that_is_used() -> None:
    entropy.warm_up()
    entries = [f for f in vars(rans).values() if hasattr(f, "signatures")]
    before = [len(entry.signatures) for entry in entries]
    for scale in SCALES:
        for text in (f"grid:0.02(scale={scale})", f"grid:2.0(by=rate, scale={scale})", "lossless:bf16"):
            x = tensor((2, 30, 50))
            codec = grammar.build(text)
            decode(codec, encode(codec, x), (2, 30, 50))
    assert [len(entry.signatures) for entry in entries] == before
