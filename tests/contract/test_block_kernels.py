"""The compiled block quantisers give the bytes, values and errors of the plain torch reference, bit for bit; and the
arithmetic is that of the formats' publications."""

from __future__ import annotations

import itertools
import math
import struct

import numpy as np
import pytest
import torch

from thinpipe.harness.compression import grammar
from thinpipe.harness.compression.base import Context
from thinpipe.harness.compression.kernels import blocks, cpu_blocks, reference_blocks
from thinpipe.harness.compression.kernels.reference_blocks import FLOAT_MAX, WIDTHS, Blocks, MinMax
from thinpipe.harness.errors import CodecError, DivergedError

# Single elements, short and whole blocks, several chunks, tails that fill no byte.
SIZES = [1, 5, 8, 31, 33, 64, 129, 1000, blocks.CHUNK, blocks.CHUNK + 1, 2 * blocks.CHUNK + 77]
FLOATS = [Blocks(4, block, "bf16", "nf4") for block in (32, 64, 128)] + [
    Blocks(4, 32, "e8m0", "e2m1"),
    Blocks(8, 128, "fp32", "e4m3"),
    Blocks(8, 128, "bf16", "e4m3"),
]
KEY = 0x0123456789ABCDEF


def uniform(bits: int) -> list[Blocks]:
    return [
        Blocks(bits, block, scale, affine=affine, stochastic=stochastic)
        for (block, scale), affine, stochastic in itertools.product(
            [(32, "e8m0"), (64, "bf16"), (128, "fp16")], [False, True], [False, True]
        )
    ]


def tensor(size: int, seed: int = 0) -> torch.Tensor:
    """Values of very different size by place, of one sign in every third message, with zeros, ties and an outlier."""
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-6, 0, size)
    x[:: max(2, size // 3)] = 0.0
    x[size // 2] *= 1e4
    x[-1] = -0.0 if size % 2 else x[0]
    return [x, x.abs(), -x.abs()][seed % 3]


def code(x: torch.Tensor, how: Blocks | MinMax, key: int = KEY) -> tuple[bytes, torch.Tensor]:
    """The payload and what it decodes to, once both kernels have agreed on them, at an odd offset amid guard bytes."""
    total = how.num_bytes(x.numel())
    ours, plain = torch.full((total + 8,), 0xA5, dtype=torch.uint8), torch.zeros(total, dtype=torch.uint8)
    found, expected = torch.full((x.numel() + 2,), 7.0), torch.full(x.shape, 8.0)
    view, out = ours[3 : 3 + total], found[1:-1]
    if isinstance(how, MinMax):
        assert cpu_blocks.encode_minmax(x.numpy(), how, view.numpy()) == total
        assert reference_blocks.encode_minmax(x, how, plain) == total
        cpu_blocks.decode_minmax(view.numpy(), how, out.numpy())
        reference_blocks.decode_minmax(plain, how, expected)
    else:
        assert cpu_blocks.encode(x.numpy(), how, key, view.numpy()) == total
        assert reference_blocks.encode(x, how, key, plain) == total
        cpu_blocks.decode(view.numpy(), how, out.numpy())
        reference_blocks.decode(plain, how, expected)
    assert view.numpy().tobytes() == plain.numpy().tobytes(), (how, x.numel())
    assert torch.equal(out.view(torch.int32), expected.view(torch.int32)), (how, x.numel())
    assert bool((ours[:3] == 0xA5).all() and (ours[3 + total :] == 0xA5).all()), "wrote outside its buffer"
    assert found[0] == 7.0 == found[-1], "wrote outside its tensor"
    return plain.numpy().tobytes(), expected


@pytest.mark.parametrize("bits", range(2, 9))
def test_uniform_blocks_are_those_of_the_reference(bits: int) -> None:
    for how, (seed, size) in itertools.product(uniform(bits), enumerate(SIZES)):
        code(tensor(size, seed), how)


@pytest.mark.parametrize("how", FLOATS, ids=str)
def test_small_floats_are_those_of_the_reference(how: Blocks) -> None:
    for seed, size in enumerate(SIZES):
        code(tensor(size, seed), how)


@pytest.mark.parametrize("bits", range(1, 9))
def test_ranges_are_those_of_the_reference(bits: int) -> None:
    for block, (seed, size) in itertools.product((0, 1, 7, 100, 4096, 65536), enumerate(SIZES)):
        code(tensor(size, seed), MinMax(bits, block))


def every_exponent() -> torch.Tensor:
    """Positive float32 of every exponent: subnormals, the largest, powers of two and their neighbours, bf16 and fp16
    ties; then random ones. Each stands alone in a block of 32."""
    edges = torch.arange(0, 0x7F80, dtype=torch.int32) << 16
    half = torch.arange(0x3300, 0x4780, dtype=torch.int32) << 13
    patterns = torch.cat([edges, edges + 1, edges + 0xFFFF, half, half + 1, half - 1])
    noise = torch.randint(0, 0x7F800000, (5000,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    return torch.cat([patterns[patterns < 0x7F800000], noise, torch.tensor([0x7F7FFFFF], dtype=torch.int32)]).view(
        torch.float32
    )


@pytest.mark.parametrize("scale", WIDTHS)
def test_scales_of_every_exponent_are_rounded_up(scale: str) -> None:
    values = every_exponent()
    values = values[values <= reference_blocks.LARGEST_SPAN.get(scale, FLOAT_MAX)]
    x = torch.zeros(values.numel(), 32)
    x[:, 5] = values
    payload, _ = code(x.view(-1), Blocks(8, 32, scale, "e4m3"))
    head = torch.frombuffer(bytearray(payload[: WIDTHS[scale] * values.numel()]), dtype=torch.uint8)
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "e8m0": torch.float8_e8m0fnu}[scale]
    stored = head.view(kind).float()
    large = values >= 2.0**-118
    largest = {"bf16": float.fromhex("0x1.fep127")}.get(scale, FLOAT_MAX)
    assert bool((stored[large] >= values[large].clamp(max=largest)).all()), "a scale below its block would clip it"
    slack = {"fp32": 1.0, "bf16": 1 + 2.0**-7, "fp16": 1 + 2.0**-10, "e8m0": 2.0}[scale]
    normal = large & (values >= 2.0**-14 if scale == "fp16" else large)
    assert bool((stored[normal].double() <= values[normal].double() * slack).all())
    if scale != "e8m0":
        assert not bool(stored[~large].any())


@pytest.mark.parametrize("how", [*uniform(3), *uniform(8), *FLOATS], ids=str)
def test_extreme_values(how: Blocks) -> None:
    """Subnormals, both signs of the largest float, blocks that are constant: finite, in place, zero exact."""
    largest = reference_blocks.LARGEST_SPAN.get(how.scale, FLOAT_MAX) if how.element != "e2m1" else FLOAT_MAX
    for size in (1e-45, 1e-39, 1e-30, 1e36, 3.39e38, FLOAT_MAX):
        if size <= largest:
            x = torch.zeros(300)
            x[::7], x[3::7], x[200:] = size, -size, size
            _, decoded = code(x, how)
            assert bool(torch.isfinite(decoded).all())
            assert not bool(decoded[x == 0].any())
    _, decoded = code(torch.zeros(300), how)
    assert not bool(decoded.any())


@pytest.mark.parametrize(
    "how", [Blocks(4, 32, "fp16"), Blocks(4, 32, "e8m0"), Blocks(4, 32, "fp16", affine=True)], ids=str
)
def test_a_scale_that_cannot_be_held_is_refused(how: Blocks) -> None:
    x = torch.zeros(100)
    x[40], x[41] = 3e38, -3e38
    out = torch.zeros(how.num_bytes(100), dtype=torch.uint8)
    for encode in (
        lambda: cpu_blocks.encode(x.numpy(), how, 0, out.numpy()),
        lambda: reference_blocks.encode(x, how, 0, out),
    ):
        with pytest.raises(CodecError, match=r"made a non-finite value from a finite one.*use scale=bf16"):
            encode()


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_value_anywhere_is_found(bad: float) -> None:
    for at in (0, 31, 32, 500, blocks.CHUNK, blocks.CHUNK + 999):
        x = torch.randn(blocks.CHUNK + 1000)
        x[at] = bad
        out = np.zeros(60_000, np.uint8)
        for how in (*uniform(4), *FLOATS):
            with pytest.raises(DivergedError, match="non-finite"):
                cpu_blocks.encode(x.numpy(), how, 0, out)
        for block in (0, 7, 1024):
            with pytest.raises(DivergedError, match="non-finite"):
                cpu_blocks.encode_minmax(x.numpy(), MinMax(4, block), out)
    with pytest.raises(DivergedError, match="non-finite"):
        reference_blocks.encode(x, FLOATS[0], 0, torch.from_numpy(out))


def refused_by_both(payload: bytes, how: Blocks | MinMax, size: int) -> None:
    data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    pair = (
        (cpu_blocks.decode_minmax, reference_blocks.decode_minmax)
        if isinstance(how, MinMax)
        else (cpu_blocks.decode, reference_blocks.decode)
    )
    with pytest.raises(CodecError, match="malformed"):
        pair[0](data.numpy(), how, np.zeros(size, np.float32))  # type: ignore[operator]
    with pytest.raises(CodecError, match="malformed"):
        pair[1](data, how, torch.zeros(size))  # type: ignore[operator]


def test_what_no_encoder_writes_is_refused() -> None:
    size = 67
    absmax, affine = Blocks(3, 32, "bf16"), Blocks(3, 32, "bf16", affine=True)
    good, _ = code(tensor(size), absmax)
    refused_by_both(good[:-1], absmax, size)
    refused_by_both(good + b"\0", absmax, size)
    refused_by_both(b"\x80\x7f" + good[2:], absmax, size)  # infinity
    refused_by_both(b"\x00\x80" + good[2:], absmax, size)  # negative
    refused_by_both(good[:-1] + bytes([good[-1] | 1]), absmax, size)  # padding
    refused_by_both(good[:6] + bytes([good[6] & 0x1F]) + good[7:], absmax, size)  # the code that no level has
    with_zero, _ = code(tensor(size), affine)
    refused_by_both(with_zero[:6] + b"\x08" + with_zero[7:], affine, size)  # a zero point beyond the codes
    half, _ = code(tensor(size) / 1e4, Blocks(4, 32, "fp16"))
    refused_by_both(b"\x00\x7c" + half[2:], Blocks(4, 32, "fp16"), size)
    power, _ = code(tensor(size), FLOATS[3])
    refused_by_both(b"\xfd" + power[1:], FLOATS[3], size)
    float8, _ = code(tensor(size), FLOATS[4])
    refused_by_both(float8[:-1] + b"\xff", FLOATS[4], size)  # NaN
    ends, _ = code(tensor(size), MinMax(4))
    for low, high in ((1.0, 0.5), (math.nan, 1.0), (0.0, math.inf), (-math.inf, 0.0)):
        refused_by_both(struct.pack("<ff", low, high) + ends[8:], MinMax(4), size)


def test_random_bytes_never_read_or_write_out_of_bounds() -> None:
    """Whatever arrives, both ends say the same of it: the same values, or refused."""
    generator = torch.Generator().manual_seed(3)
    for how, size in itertools.product([*uniform(5), *uniform(8), *FLOATS], (1, 40, 333)):
        payload = torch.randint(0, 256, (how.num_bytes(size),), dtype=torch.uint8, generator=generator)
        # Scales that could be: small, positive.
        width = WIDTHS[how.scale]
        payload[width - 1 : how.num_blocks(size) * width : width] &= 0x3F
        out, expected = np.zeros(size, np.float32), torch.zeros(size)
        try:
            reference_blocks.decode(payload, how, expected)
        except CodecError:
            with pytest.raises(CodecError):
                cpu_blocks.decode(payload.numpy(), how, out)
        else:
            cpu_blocks.decode(payload.numpy(), how, out)
            assert np.array_equal(out, expected.numpy())
            assert np.isfinite(out).all()


# ---- the arithmetic itself --------------------------------------------------------------------------------------


def test_the_normal_float_levels_are_the_published_ones() -> None:
    published = [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]  # fmt: skip
    # As printed they come from another implementation of the quantile function, single precision at places.
    assert reference_blocks.normal_float_levels() == pytest.approx(published, abs=2e-6)


def test_small_float_levels_are_those_of_torch_and_of_the_specification() -> None:
    assert reference_blocks.levels("e2m1")[:8] == (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    ours = torch.tensor(reference_blocks.levels("e4m3"))
    assert torch.equal(
        ours.nan_to_num(99), torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(99)
    )


def test_mxfp4_rounds_ties_to_even_and_saturates() -> None:
    x = torch.zeros(32)
    x[:14] = torch.tensor([4.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.9, -0.25, -0.26, -5.1, -7.0, 0.24])
    _, decoded = code(x, Blocks(4, 32, "e8m0", "e2m1"))
    assert decoded[:14].tolist() == [4.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 0.0, -0.5, -6.0, -6.0, 0.0]


def test_fp8_maps_the_largest_of_a_tile_to_448() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e-5
    how = Blocks(8, 128, "fp32", "e4m3")
    payload, _ = code(x, how)
    codes = np.frombuffer(payload[4 * 8 :], np.uint8)
    largest = [np.abs(x.numpy()[i : i + 128]).argmax() + i for i in range(0, 1000, 128)]
    assert set(codes[largest] & 0x7F) == {0x7E}


@pytest.mark.parametrize("bits", range(2, 9))
def test_affine_blocks_keep_zero_and_both_ends(bits: int) -> None:
    """A block of one sign uses every code; ends are off by half a step at most; zero is exact wherever it is."""
    how, last = Blocks(bits, 64, "bf16", affine=True), 2**bits - 1
    for low, high in ((0.25, 3.0), (-3.0, -0.25), (-1.0, 3.0), (-3.0, 1.0), (-2.0, 2.0)):
        x = torch.linspace(low, high, 64)
        x[7] = 0.0
        _, decoded = code(x, how)
        step = (max(high, 0.0) - min(low, 0.0)) / last * (1 + 2**-7)
        assert decoded[7] == 0
        assert float((decoded - x).abs().max()) <= step / 2 * 1.0001
        if low > 0 or high < 0:
            assert decoded.abs().max() == pytest.approx(3.0, rel=2**-7)


def test_min_max_is_the_published_arithmetic() -> None:
    for bits, seed in itertools.product(range(1, 9), range(5)):
        x = torch.randn(777, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed - 3) + seed
        low, high, last = x.min(), x.max(), torch.tensor(2.0**bits - 1)
        codes = ((x - low) / (high - low) * last).round()
        _, decoded = code(x, MinMax(bits))
        assert torch.equal(decoded, (codes / last * (high - low) + low).clamp(low, high))
        assert decoded.min() == low
        assert decoded.max() == pytest.approx(float(high), rel=1e-5)


def test_constants_are_exact_under_min_max() -> None:
    for value in (0.0, 3.0, -0.1, 1e-45, FLOAT_MAX, -FLOAT_MAX):
        for block in (0, 16):
            _, decoded = code(torch.full((37,), value), MinMax(4, block))
            assert torch.equal(decoded, torch.full((37,), value))


def energy(text: str, x: torch.Tensor) -> float:
    """Error over signal, in dB."""
    codec, ctx = grammar.build(text), Context(tuple(x.shape))
    out = torch.zeros(codec.max_bytes(ctx.shape), dtype=torch.uint8)
    decoded = codec.decode(out[: codec.encode(x, ctx, out)], ctx, torch.empty(x.shape))
    return 20 * math.log10(float((decoded - x).norm() / x.norm()))


def test_few_bits_of_min_max_drown_gradients_and_blocks_do_not() -> None:
    """A grid without zero adds energy to values that are mostly near zero; one with zero takes some away."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.where(torch.rand(64, 2048, generator=generator) < 0.5, -1.0, 1.0)
    gradient = signs * torch.empty(64, 2048).exponential_(generator=generator)
    gradient *= 1e-8 * torch.logspace(-2, 0, 64)[:, None]
    assert energy("minmax:2", gradient) > 5
    assert energy("minmax:4", gradient) > -5
    assert energy("blockwise:2", gradient) < -1
    assert energy("blockwise:4", gradient) < -15
    # Scales of such gradients are zero in fp16 or coarse: the reason for bf16.
    assert energy("blockwise:4(scale=fp16)", gradient) > -10


@pytest.mark.parametrize("bits", [2, 5, 8])
def test_stochastic_affine_blocks_are_unbiased_up_to_their_ends(bits: int) -> None:
    """Means of 3000 draws against x, ends of the range included, of one sign and of both: within 4.5 standard errors of
    a number rounded by half a step either way, which is the most there can be. A clipped end is off by far more."""
    x = torch.cat([torch.linspace(-0.7, 1.0, 64), torch.linspace(0.1, 0.9, 64), torch.linspace(-0.9, -0.013, 64)])
    step = torch.tensor([1.7, 0.9, 0.9]).repeat_interleave(64) / (2**bits - 2) * (1 + 2**-7)
    how, draws = Blocks(bits, 64, "bf16", affine=True, stochastic=True), 3000
    out, total, decoded = np.zeros(how.num_bytes(192), np.uint8), torch.zeros(192, dtype=torch.double), torch.empty(192)
    for draw in range(draws):
        cpu_blocks.encode(x.numpy(), how, KEY * (draw + 1) % 2**64, out)
        cpu_blocks.decode(out, how, decoded.numpy())
        total += decoded
    z = (total / draws - x) / (step / 2 / math.sqrt(draws))
    assert float(z.abs().max()) < 4.5
    assert abs(float(z.mean())) < 4.5 / math.sqrt(192)
    assert bool((decoded != x).any()), "it must really have been random"


@pytest.mark.parametrize(
    "text",
    ["blockwise:3", "blockwise:4(block=32, form=affine)", "blockwise:8(block=128, scale=e8m0)", "nf4", "nf4(block=128)",
     "blockwise:2(scale=fp16)", "mxfp4", "fp8", "fp8(scale=fp32)", "minmax:4", "minmax:4(block=64)",
     "minmax:1(block=10)"],
)  # fmt: skip
def test_formulas_are_the_true_length(text: str) -> None:
    shape = (4, 320, 128)
    found = 8 * grammar.build(text).num_bytes(shape) / math.prod(shape)  # type: ignore[operator]
    assert found == pytest.approx(grammar.estimate(text), abs=64 / math.prod(shape) + 1e-9)


def test_warm_up_compiles_all_that_is_used() -> None:
    """A rank that compiled during a step would be timed doing so: no call adds a signature after warm_up."""
    cpu_blocks.warm_up()
    entries = (blocks.encode, blocks.decode, blocks.encode_minmax, blocks.decode_minmax)
    before = [len(entry.signatures) for entry in entries]
    for how in (*uniform(3), *FLOATS, MinMax(3), MinMax(3, 10)):
        code(torch.randn(100), how)
    assert [len(entry.signatures) for entry in entries] == before
