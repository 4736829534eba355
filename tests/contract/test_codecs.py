"""Every codec, found by itself, keeps the contract of base.Codec on the texts its CONTRACT names.

What is asked is listed in harness/compression/__init__.py; each assertion says which demand it is.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpipe.harness import plugins
from thinpipe.harness.compression import grammar
from thinpipe.harness.compression.base import Codec, Compressor, Context, Stateful
from thinpipe.harness.compression.kernels.layout import layout
from thinpipe.harness.compression.rows import CASTS, CastRows
from thinpipe.harness.errors import CodecError, DivergedError, OverflowedError

CASES: dict[str, dict[str, Any]] = {
    text: bounds for plugin in plugins.find("codecs").values() for text, bounds in plugin.load().CONTRACT.items()
}
SHAPES = [(0, 4, 8), (2, 0, 3), (1,), (5,), (1, 1, 1), (3, 7), (2, 5, 9), (4, 16, 32), (2, 3, 5, 7), (2, 1, 2053)]
GUARD = 0xA5
every_text = pytest.mark.parametrize("text", CASES)


stateless = pytest.mark.parametrize("text", [text for text in CASES if grammar.state(text) == "none"])


def peer_of(text: str, shape: tuple[int, ...]) -> torch.Tensor | None:
    """A forward tensor of which about half is zero, for codecs that ask for it."""
    if "peer" not in grammar.uses(text):
        return None
    return torch.randn(shape, generator=torch.Generator().manual_seed(99)).relu()


def context(text: str, shape: tuple[int, ...], **kept: Any) -> Context:
    return Context(shape, peer=peer_of(text, shape), **kept)


def seen(text: str, x: torch.Tensor) -> torch.Tensor:
    """`x` as far as the codec is to send it: zero where its peer is."""
    peer = peer_of(text, tuple(x.shape))
    return x if peer is None else torch.where(peer != 0, x.float(), 0.0)


def make(text: str, diagnose: bool = False) -> Compressor:
    codec = grammar.build(text)
    codec.diagnose = diagnose
    return codec


def sample(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def encode(codec: Compressor, x: torch.Tensor, ctx: Context | None = None) -> torch.Tensor:
    """The payload, written amid guard bytes at an odd offset: it must be as long as was said, and no byte longer."""
    shape = tuple(x.shape)
    most, exact = codec.max_bytes(shape), codec.num_bytes(shape)
    buffer = torch.full((most + 37,), GUARD, dtype=torch.uint8)
    ctx = ctx or context(codec.name, shape, dtype=x.dtype)
    n = codec.encode(x, ctx, buffer[5 : 5 + most])
    assert isinstance(n, int), "encode returns the number of bytes it wrote"
    assert 0 <= n <= most, f"encode wrote {n} B for {shape}, but max_bytes says at most {most}"
    assert exact is None or n == exact, f"encode wrote {n} B for {shape}, but num_bytes says {exact}"
    assert bool((buffer[:5] == GUARD).all() and (buffer[5 + most :] == GUARD).all()), "wrote outside its buffer"
    return buffer[5 : 5 + n]


def decode(
    codec: Compressor, payload: torch.Tensor, shape: tuple[int, ...], ctx: Context | None = None
) -> torch.Tensor:
    count = math.prod(shape)
    buffer = torch.full((count + 16,), 123.0)
    out = buffer[8 : 8 + count].view(shape)
    ctx = ctx or context(codec.name, shape)
    assert codec.decode(payload, ctx, out) is out, "decode fills the tensor it is given, returns it"
    assert bool((buffer[:8] == 123.0).all() and (buffer[8 + count :] == 123.0).all()), "wrote outside its tensor"
    return out


def round_trip(text: str, x: torch.Tensor) -> torch.Tensor:
    return decode(make(text), encode(make(text), x), tuple(x.shape))


def assert_within(text: str, x: torch.Tensor, decoded: torch.Tensor) -> None:
    """The bounds of CONTRACT (harness/compression/__init__.py); 1e-35: what may count as zero."""
    case = CASES[text]
    assert bool(torch.isfinite(decoded).all()), f"{text}: decoded a non-finite value from a finite one"
    if not x.numel():
        return
    kept = seen(text, x).double()
    assert not bool(decoded[kept == 0].any()) or peer_of(text, tuple(x.shape)) is None, (
        f"{text}: what is decoded must be zero where the forward tensor is"
    )
    error, floor = (decoded.double() - kept).abs(), case.get("floor", 1e-35)
    if "norm" in case:
        assert 0 <= case["norm"] <= 1, "a projection does not make the tensor longer"
        over = error.norm() / math.sqrt(x.numel()) - case["norm"] * kept.norm() / math.sqrt(x.numel()) - floor
        assert over <= 1e-6 * kept.abs().max(), f"{text}: the error's norm is {over:g} more than its contract says"
        return
    allowed = case.get("relative", 0.0) * kept.abs() + case.get("absolute", 0.0) * x.double().abs().max() + floor
    worst = (error - allowed).max().item()
    assert worst <= 0, f"{text}: off by {worst:g} more than its contract says"


def test_the_suite_covers_every_codec() -> None:
    covered = {grammar.parse(text).name for text in CASES}
    assert covered == set(plugins.find("codecs")), "each codec names at least one text of its own in CONTRACT"
    for text in CASES:
        assert isinstance(make(text), Codec), f"{text}: the class is a subclass of base.Codec"
        assert make(text).state == grammar.state(text) in ("none", "shared"), f"{text}: STATE is what the class says"
        assert isinstance(make(text), Stateful) == (grammar.state(text) == "shared"), "what is kept is saved"
        assert grammar.bits(text) is not None or "FORMULA" in plugins.get("codecs", grammar.parse(text).name).extra, (
            f"{text}: neither a parameter `bits` nor a FORMULA says how many bits an element it takes"
        )
        assert grammar.is_steered(text) == bool(make(text).steered()), (
            f"{text}: `uses: steering` is what the class says"
        )
        assert make(text).uses_peer == ("peer" in grammar.uses(text)), f"{text}: `uses` and uses_peer are one"


@every_text
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_round_trip(text: str, shape: tuple[int, ...]) -> None:
    for x in (sample(shape), sample(shape).abs(), -sample(shape).abs()):
        assert_within(text, x, round_trip(text, x))


@every_text
def test_what_is_not_dense_float32(text: str) -> None:
    x = sample((6, 10, 8))
    for strided in (x.transpose(0, 1), x[::2, 1:, ::3], x[..., :1].expand(6, 10, 4), x.clone().requires_grad_()):
        plain = strided.detach().clone().contiguous()
        assert torch.equal(encode(make(text), strided), encode(make(text), plain)), (
            "strides and a graph change nothing: begin with tensors.dense"
        )
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(encode(make(text), x.to(dtype)), encode(make(text), x.to(dtype).float())), (
            f"{dtype} is sent as the float32 it stands for: begin with tensors.dense"
        )


@every_text
def test_special_values(text: str) -> None:
    shape = (2, 6, 8)
    for x in (
        torch.zeros(shape),
        torch.full(shape, 3.0),
        torch.full(shape, -0.75),
        sample(shape) * 1e-39,
        sample(shape) * 1e-20,
        sample(shape) * 1e-7,
        sample(shape) * 1e-3,
    ):
        assert_within(text, x, round_trip(text, x))
    assert not bool(round_trip(text, torch.zeros(shape)).any()), "zero must stay zero"


@every_text
@pytest.mark.parametrize("size", [1e4, 1e9, 1e36, 3.38e38])
def test_outliers_are_kept_or_refused(text: str, size: float) -> None:
    x = sample((2, 6, 8)).clamp(-2, 2)
    x[1, 2, 3], x[0, 0, 0] = size, -size
    if size <= CASES[text].get("largest", math.inf):
        assert_within(text, x, round_trip(text, x))
    else:
        # Above the CONTRACT's `largest`, encode refuses, and names a codec with a wider range.
        with pytest.raises(OverflowedError, match=r"made a non-finite value from a finite one.*use|.*bf16") as refused:
            encode(make(text), x)
        # As published code would have: it goes on with an infinity, and the loss becomes one.
        assert refused.value.state == "diverged"


@pytest.mark.parametrize("text", [text for text, case in CASES.items() if "largest" not in case])
def test_the_largest_float_stays_finite(text: str) -> None:
    x = torch.full((2, 3, 4), torch.finfo(torch.float32).max)
    x[0] *= -1
    assert bool(torch.isfinite(round_trip(text, x)).all()), (
        "the largest float32 overflows on the way: scale in another order, or give `largest` in CONTRACT"
    )


@every_text
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_value_is_divergence(text: str, bad: float) -> None:
    for at in (0, 17, 2 * 5 * 9 - 1):
        x = sample((2, 5, 9))
        x.view(-1)[at] = bad
        # tensors.raise_if_diverged(tensors.peak(x)) says it in these words.
        with pytest.raises(DivergedError, match="non-finite"):
            encode(make(text), x)


@stateless
def test_both_ends_and_reruns_agree(text: str) -> None:
    """The same message gives the same bytes from any instance; another message's key may change them."""
    shape = (3, 5, 9)
    x = sample(shape)

    def at(**kept: Any) -> Context:
        return context(text, shape, **kept)

    ctx = at(step=4, microbatch=2, boundary=1, seed=7)
    codec = make(text)
    first = encode(codec, x, ctx).clone()
    encode(codec, -x, at(step=5))
    assert torch.equal(encode(codec, x, ctx), first), "a message in between must leave no trace"
    assert torch.equal(encode(make(text), x, ctx), first), "any instance gives the same bytes"
    assert torch.equal(encode(make(text, diagnose=True), x, ctx), first), "diagnosing must not change what is sent"
    keyed = "stochastic" in text or CASES[text].get("keyed", False)
    for other in (at(step=4, microbatch=3, boundary=1, seed=7), at(step=4, microbatch=2, seed=7)):
        again = encode(codec, x, other)
        same = again.shape == first.shape and torch.equal(again, first)
        assert same != keyed, "bytes depend on the message's key exactly where text or CONTRACT say so: see Context.key"


@pytest.mark.parametrize("text", [text for text in CASES if grammar.state(text) != "none"])
def test_a_stateful_codec_stays_equal_at_both_ends(text: str) -> None:
    """Through messages of training and evaluation, refused ones, a restart of both ends, and diagnosis at one."""
    shape, ends = (3, 5, 9), [make(text, diagnose=True), make(text)]
    for step in range(40):
        ctx = context(text, shape, step=step, training=step % 5 != 4)
        x = sample(shape, step) * (1 + step)
        before = [end.digest() for end in ends]
        with pytest.raises(DivergedError):
            encode(ends[0], x / 0, ctx)
        payload = encode(ends[0], x, ctx)
        if step % 3 == 0:
            with pytest.raises(CodecError, match="malformed"):
                decode(ends[1], payload[:-1], shape, ctx)
        assert ends[1].digest() == before[1] == before[0], "what was refused must leave no trace"
        sent = ends[0].digest()
        assert_within(text, x, decode(ends[1], payload, shape, ctx))
        assert torch.equal(decode(ends[0], payload, shape, ctx), decode(ends[1], payload, shape, ctx))
        assert ends[0].digest() == sent == ends[1].digest(), "one's own payload, and one decoded twice, change nothing"
        assert ctx.training or sent == before[0], "evaluation must leave no trace"
        if step == 20:
            fresh = [make(text), make(text)]
            for old, new in zip(ends, fresh, strict=True):
                new.load_state_dict(old.state_dict())
            ends = fresh
    assert ends[0].digest() != make(text).digest()


@pytest.mark.parametrize("cast", list(CASTS))
@pytest.mark.parametrize("text", [text for text in CASES if hasattr(make(text), "encode_change")])
def test_a_change_coded_at_once_is_one_coded_in_steps(text: str, cast: str) -> None:
    """encode_change and decode_change: bytes of encode, and rows moved by what decode gives, rounded as they are."""
    shape, slots, codec = (3, 5, 9), np.array([4, 0, 2]), make(text)
    ctx = context(text, shape, step=3, seed=5)
    for turn in range(3):
        x, m = sample(shape, turn), sample((6, 45), 9).to(CASTS[cast])
        change = x - m[slots].float().view(shape)
        plain = encode(codec, change, ctx).clone()
        values = decode(codec, plain, shape, ctx) + m[slots].float().view(shape)
        due = m.clone()
        due[slots] = values.view(3, -1).to(m.dtype)
        for end in ("sender", "receiver"):
            kept = CastRows(6, cast)
            rows = kept.data = m.clone()
            patterns = kept.patterns
            if end == "sender":
                out = torch.zeros(codec.max_bytes(shape), dtype=torch.uint8)
                done = codec.encode_change(x.view(3, -1).numpy(), np.arange(3), patterns, slots, ctx, out.numpy())
                assert done is not None
                assert torch.equal(out[: done[0]], plain)
                largest = done[1]
            else:
                found = np.zeros((3, 45), np.float32)
                largest = codec.decode_change(plain.numpy(), patterns, slots, ctx, found)
                assert torch.equal(torch.from_numpy(found).view(shape), values)
            assert torch.equal(rows, due)
            assert largest == pytest.approx(values.abs().max().item(), rel=0.01)


@pytest.mark.parametrize("text", [text for text, case in CASES.items() if case.get("entropy")])
def test_a_coded_length_is_near_the_entropy(text: str) -> None:
    for shape, size in (((4, 64, 512), 1.0), ((2, 32, 16, 16), 1e-3), ((1, 40_000), 30.0)):
        heavy = sample(shape) * sample(shape, 1).exp() * size
        for x in (sample(shape) * size, heavy, heavy.relu()):
            codec: Any = make(text)
            ctx = context(text, shape)
            ideal, found = codec.ideal_bytes(x, ctx), encode(codec, x, ctx).numel()
            assert found <= 1.03 * ideal, f"{text}: {found} B where entropy and side information are {ideal:.0f} B"


@every_text
def test_lengths(text: str) -> None:
    codec = make(text)
    for shape in SHAPES:
        assert encode(codec, sample(shape)).numel() <= codec.max_bytes(shape), "max_bytes is a bound for every shape"
    if grammar.bits(text) is not None:
        large, due = codec.max_bytes((8, 64, 512)), grammar.estimate(text)
        assert 8 * large / (8 * 64 * 512) == pytest.approx(due, abs=0.04), (
            f"{text} is to take {due} bits an element (its FORMULA, else its bits), and takes another number (16 bits "
            "a scale, here one for 512 elements, are granted); without a parameter `bits` nothing is claimed"
        )


@every_text
def test_a_payload_of_another_length_is_refused(text: str) -> None:
    shape = (2, 5, 9)
    payload = encode(make(text), sample(shape))
    # tensors.require_length says it in these words; a codec of varying length checks its own length field.
    for wrong in (payload[:-1], payload[:1], payload[:0], torch.cat([payload, payload[:1]])):
        with pytest.raises(CodecError, match="malformed"):
            decode(make(text), wrong, shape)


@every_text
def test_any_bytes_decode_to_something_finite_or_are_refused(text: str) -> None:
    shape = (2, 5, 9)
    n = encode(make(text), sample(shape)).numel()
    generator = torch.Generator().manual_seed(0)
    refused = 0
    for _ in range(100):
        payload = torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator)
        try:
            assert bool(torch.isfinite(decode(make(text), payload, shape)).all()), (
                "a payload of random bytes decoded to a non-finite value: refuse it with CodecError"
            )
        except CodecError:
            refused += 1
    assert refused > 0, (
        "of 100 random payloads none was refused: check what cannot be (scales that are not finite, ...)"
    )


@every_text
@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_a_damaged_payload_is_refused_or_decodes_to_something_finite(text: str, data: st.DataObject) -> None:
    """Flipped bits, cut off, or with bytes from elsewhere: frames carry a checksum, but decoders must not trust it."""
    shape = (2, 5, 19)
    payload = encode(make(text), sample(shape) ** 3).clone()
    for _ in range(data.draw(st.integers(0, 4))):
        payload[data.draw(st.integers(0, payload.numel() - 1))] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.one_of(st.just(payload.numel()), st.integers(0, payload.numel())))
    damaged = torch.cat(
        [payload[:cut], torch.tensor(data.draw(st.lists(st.integers(0, 255), max_size=12)), dtype=torch.uint8)]
    )
    with contextlib.suppress(CodecError):
        assert bool(torch.isfinite(decode(make(text), damaged, shape)).all())


@every_text
def test_diagnostics(text: str) -> None:
    codec, shape = make(text, diagnose=True), (4, 8, 16)
    x = sample(shape)
    decoded = decode(codec, encode(codec, x), shape)
    found = codec.diagnostics
    assert "rel_error" in found, "with `diagnose` set, encode fills diagnostics['rel_error']"
    kept = seen(text, x)
    truth = ((decoded - kept).norm() / kept.norm()).item()
    assert found["rel_error"] == pytest.approx(truth, rel=1e-4, abs=1e-9), (
        "rel_error is |decoded - x| / |x|, x being what is to be sent: zero where a peer is"
    )
    assert 0.0 <= found.get("clip_fraction", 0.0) <= 1.0, "clip_fraction is a share"


@pytest.mark.parametrize("text", [text for text, case in CASES.items() if case.get("unbiased")])
def test_unbiased(text: str) -> None:
    """Mean of 4000 draws against x, in standard errors, on values that no level and no clip touches."""
    shape, draws = (1, 4, 16), 4000
    x = sample(shape, 3).clamp(-1, 1) * 0.5
    x[0, 0] = 1.0  # the scale of every channel
    x[0, 0, ::2] = -1.0
    inside = torch.ones(shape, dtype=torch.bool)
    inside[0, 0] = False
    codec = make(text)
    total, squares = torch.zeros(shape, dtype=torch.double), torch.zeros(shape, dtype=torch.double)
    for step in range(draws):
        ctx = context(text, shape, step=step)
        decoded = decode(codec, encode(codec, x, ctx), shape, ctx).double()
        total, squares = total + decoded, squares + decoded**2
    mean = total / draws
    error = ((squares / draws - mean**2).clamp(min=1e-12) / draws).sqrt()
    assert grammar.is_unbiased(text), "UNBIASED in the plug-in says so too"
    z = ((mean - x) / error)[inside & (seen(text, x) != 0)]
    assert z.abs().max() < 4.5
    assert abs(z.mean().item()) < 4.5 / math.sqrt(z.numel())
    assert bool((error[inside] > 1e-6).any()), "it must really have been random"


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("scale", ["channel", "token", "tensor"])
def test_fixpoint_scale_groups_and_error(bits: int, scale: str) -> None:
    """In each group of one scale the error is at most half a step, a whole one where the positive end is clipped."""
    for shape in [(3, 7, 16), (5, 16), (2, 6, 5, 4)]:
        x = sample(shape, bits)
        axes = {
            ("channel", 2): [0], ("channel", 3): [0, 1], ("channel", 4): [0, 2, 3],
            ("token", 2): [1], ("token", 3): [2], ("token", 4): [1],
        }.get((scale, len(shape)), list(range(len(shape))))  # fmt: skip
        largest = x.abs().amax(dim=axes, keepdim=True)
        text = f"fixpoint:{bits}(scale={scale})"
        assert grammar.build(text).num_bytes(shape) == 2 * largest.numel() + math.ceil(x.numel() * bits / 8)
        step = largest * (1 + 2**-7) / 2 ** (bits - 1)
        error = (round_trip(text, x) - x).abs()
        top = x > largest - step
        assert bool((error <= torch.where(top, step, step / 2) * 1.00001).all())
        assert error.mean() > 0


def test_our_default_keeps_what_the_published_form_loses() -> None:
    """Small gradients: the published epsilon and fp16 scale shrink them; the default is scale-free down to 1e-35."""
    x = sample((4, 32, 64))

    def gain(text: str, size: float) -> float:
        y = x * size
        return ((round_trip(text, y).double() * y.double()).sum() / y.double().square().sum()).item()

    unit = gain("fixpoint:8", 1.0)
    assert unit == pytest.approx(1.0, abs=2e-3)
    for size in (1e-6, 1e-8, 1e-30):
        assert gain("fixpoint:8", size) == pytest.approx(unit, abs=1e-3)
    assert gain("fixpoint:8(preset=acsgd)", 1e-6) < 0.9
    assert gain("fixpoint:8(preset=acsgd)", 1e-8) < 0.2
    assert_within("fixpoint:8", x * 1e5, round_trip("fixpoint:8", x * 1e5))


def literal_acsgd(x: torch.Tensor, bits: int) -> tuple[bytes, bytes, torch.Tensor]:
    """The published arithmetic written out one number at a time, after its description: (scales, codes, decoded)."""
    mb, sequence, width = x.shape
    n = 2 ** (bits - 1)
    scale = torch.tensor(
        [max(abs(x[b, s, c].item()) for b in range(mb) for s in range(sequence)) for c in range(width)]
    ).half()
    stream, decoded = "", torch.zeros_like(x)
    for b, s, c in itertools.product(range(mb), range(sequence), range(width)):
        y = x[b, s, c] / (scale[c].float() + 1e-6) * n
        code = min(max(int(torch.round(y).item()), -n), n - 1) + n
        stream += format(code, f"0{bits}b")
        decoded[b, s, c] = torch.tensor((code - n) / n) * scale[c].float()
    stream += "0" * (-len(stream) % 8)
    packed = bytes(int(stream[i : i + 8], 2) for i in range(0, len(stream), 8))
    return scale.numpy().tobytes(), packed, decoded


@pytest.mark.parametrize("bits", range(1, 9))
def test_acsgd_preset_against_the_published_arithmetic(bits: int) -> None:
    for seed, size in enumerate((1.0, 30.0, 1e-4, 1e-6, 5e-8)):
        x = sample((2, 3, 7), seed) * size
        x[0, 0, 0], x[0, 0, 1] = 0.0, x[:, :, 1].abs().max() * 1.5
        scales, codes, decoded = literal_acsgd(x, bits)
        text = f"fixpoint:{bits}(preset=acsgd)"
        assert encode(make(text), x).numpy().tobytes() == scales + codes
        assert torch.equal(round_trip(text, x), decoded)


def test_layouts_reach_every_scale() -> None:
    for shape, scale in itertools.product(SHAPES, ["channel", "token", "tensor"]):
        where = layout(shape, scale)
        used = {
            o * where.so + m * where.sm + i * where.si
            for o, m, i in itertools.product(range(where.outer), range(where.middle), range(where.inner))
        }
        assert used == set(range(where.num_scales))
        assert where.numel == math.prod(shape) or where.num_scales == 0
