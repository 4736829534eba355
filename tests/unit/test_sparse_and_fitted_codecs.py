"""What sparsifiers, wrappers and fitted codecs promise beyond the contract suite: published rules, rates, traps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from thinpipe.harness.compression import grammar, indices
from thinpipe.harness.compression.base import Compressor, Context
from thinpipe.harness.errors import CodecError, UserError


def sample(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def send(codec: Compressor, x: torch.Tensor, **kept: Any) -> torch.Tensor:
    out = torch.empty(codec.max_bytes(tuple(x.shape)), dtype=torch.uint8)
    return out[: codec.encode(x, Context(tuple(x.shape), **kept), out)]


def through(text: str, x: torch.Tensor, **kept: Any) -> torch.Tensor:
    codec = grammar.build(text)
    return codec.decode(send(codec, x, **kept), Context(tuple(x.shape), **kept), torch.empty(x.shape))


def decibels(x: torch.Tensor, decoded: torch.Tensor) -> float:
    return 20 * math.log10(((decoded.double() - x.double()).norm() / x.double().norm()).item())


def bits_of(text: str, x: torch.Tensor, **kept: Any) -> float:
    return 8 * send(grammar.build(text), x, **kept).numel() / x.numel()


# ---- topk -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.9])
def test_ties_drop_is_the_published_rule(ratio: float) -> None:
    """Per sample, strictly above the interpolated quantile of |x|; a sparse sample is sent whole, no constant one."""
    x = sample((6, 7, 31))
    x[1] = x[1].mul(2).round()
    x[2] = torch.where(sample((7, 31), 5) > 2.5, x[2], 0.0)
    x[3] = 2.0
    flat = x.view(6, -1).abs()
    threshold = torch.quantile(flat.double(), 1 - ratio, dim=1, keepdim=True)
    expected = torch.where(flat > threshold, x.view(6, -1), 0.0).view_as(x)
    decoded = through(f"topk:{ratio}(ties=drop)", x)
    assert torch.equal(decoded, expected)
    assert torch.equal(decoded[2], x[2])
    assert not decoded[3].any()


def test_how_many_are_kept() -> None:
    """ceil(ratio * n), in decimal: 0.1 of 10 is one, though as floats 0.7 * 10 is more than 7."""
    for ratio in (0.1, 0.3, 0.7, 0.9):
        for n in (1, 7, 9, 10, 11, 20, 30, 1000):
            tenths = round(10 * ratio)
            x = sample((2, n)) + 10
            assert int((through(f"topk:{ratio}", x) != 0).sum()) == 2 * -(-tenths * n // 10)
    x = sample((3, 5, 8))
    assert torch.equal(through("topk:1", x), x)
    assert int((through("topk:0.5", torch.full((2, 10), -3.0)) != 0).sum()) == 10, "ties=first keeps k of equal ones"


def test_groups() -> None:
    for shape, axes in [((3, 4, 20), (2,)), ((2, 20, 3, 5), (1,)), ((4, 20), (1,))]:
        kept = through("topk:0.25(by=token)", sample(shape)) != 0
        assert bool((kept.sum(axes) == 5).all()), shape
    x = sample((3, 4, 20)) * torch.tensor([1e-3, 1.0, 1e3]).view(3, 1, 1)
    assert ((through("topk:0.1", x) != 0).sum((1, 2)) == 8).all()
    assert not through("topk:0.1(by=tensor)", x)[:2].any()
    assert int((through("topk:0.1", sample((50,))) != 0).sum()) == 5, "a 1-D message is one group"


@pytest.mark.parametrize(
    "text", ["topk:0.5", "topk:0.1", "topk:0.02", "topk:0.1(values=bf16)", "topk:0.2(values=fixpoint:4)"]
)
def test_a_topk_message_is_as_long_as_its_formula(text: str) -> None:
    """Values, and positions at their entropy: Rice codes are within 5 % of it."""
    ratio = float(grammar.parse(text).argument or 0)
    entropy = -ratio * math.log2(ratio) - (1 - ratio) * math.log2(1 - ratio)
    found = bits_of(text, sample((4, 64, 512)))
    assert grammar.estimate(text) - 0.01 <= found <= grammar.estimate(text) + 0.05 * entropy


def test_zeros_are_never_sent() -> None:
    x = torch.where(sample((2, 400), 1) > 1.5, sample((2, 400)), 0.0)
    payload = send(grammar.build("topk:0.9"), x)
    assert torch.equal(through("topk:0.9", x), x)
    assert payload.numel() < indices.HEADER.size + 5 * int(torch.count_nonzero(x)) + 1
    assert send(grammar.build("topk:0.9"), torch.zeros(2, 400)).numel() == indices.HEADER.size


def test_the_forward_mask_costs_no_positions_and_bounds_the_length() -> None:
    forward = through("topk:0.25", sample((2, 8, 16)))
    x = sample((2, 8, 16), 1)
    codec = grammar.build("topk:0.25(mask=forward)")
    assert codec.uses_peer
    assert grammar.uses(codec.name) == {"peer"}
    assert send(codec, x, peer=forward).numel() == 4 * 64 == codec.max_bytes((2, 8, 16))
    assert torch.equal(through(codec.name, x, peer=forward), torch.where(forward != 0, x, 0.0))
    for ctx in (Context((2, 8, 16), peer=x), Context((2, 8, 16))):
        with pytest.raises(CodecError, match=r"use topk:0.25 forward|none was given"):
            codec.encode(x, ctx, torch.empty(4096, dtype=torch.uint8))
        with pytest.raises(CodecError, match=r"use topk:0.25 forward|none was given"):
            codec.decode(torch.zeros(256, dtype=torch.uint8), ctx, torch.empty(2, 8, 16))
    with pytest.raises(UserError, match="ties"):
        grammar.check("topk:0.1(mask=forward, ties=drop)")


@pytest.mark.parametrize(
    "text",
    ["topk:0.1(values=kmeans:4)", "relu(relu(none))", "hadamard(relu(bf16))", "hadamard(kmeans:4)", "relu(kmeans:2)",
     "randk:0.1(values=kmeans:2)"],
)  # fmt: skip
def test_what_cannot_stand_inside_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"keeps something between messages|reads the forward tensor"):
        grammar.build(text)


# ---- randk, relu, hadamard --------------------------------------------------------------------------------------


def test_randk_sends_values_only_and_scales_at_the_receiver() -> None:
    x = sample((3, 5, 7))
    codec = grammar.build("randk:0.2")
    assert send(codec, x).numel() == 4 * 21 == codec.num_bytes((3, 5, 7))
    decoded = through("randk:0.2", x)
    assert torch.equal(decoded[decoded != 0], x[decoded != 0] * 5)
    top = torch.finfo(torch.float32).max
    assert through("randk:0.2", torch.full((3, 5), top)).max() == top, "a product out of range stays at the end"


def test_relu_sends_what_the_relu_lets_through() -> None:
    forward, x = sample((2, 3, 8, 8)).relu(), sample((2, 3, 8, 8), 1)
    kept = int(torch.count_nonzero(forward))
    assert torch.equal(through("relu(none)", x, peer=forward), x * (forward > 0))
    assert send(grammar.build("relu(none)"), x, peer=forward).numel() == 4 * kept
    assert send(grammar.build("relu(none)"), x, peer=torch.zeros_like(x)).numel() == 0
    assert not through("relu(none)", x, peer=torch.zeros_like(x)).any()
    with pytest.raises(CodecError, match="none was given"):
        send(grammar.build("relu(none)"), x)
    assert grammar.uses("relu(fixpoint:4)") == {"peer", "relu"}
    assert grammar.bits("relu(fixpoint:4)") is None


def test_a_rotation_helps_outliers_and_hurts_zeros() -> None:
    x = sample((4, 32, 256))
    x[:, :, 7] *= 40
    plain = "fixpoint:4(scale=token)"
    assert decibels(x, through(f"hadamard({plain})", x)) < decibels(x, through(plain, x)) - 1
    sparse = torch.where(sample((4, 32, 256), 1) > 1, sample((4, 32, 256)), 0.0)
    assert not bool((through("hadamard(fixpoint:4)", sparse)[sparse == 0] == 0).all())


def test_only_tiles_with_an_outlier_are_rotated() -> None:
    x = sample((1, 4 * 32 + 5)).clamp(-1, 1)
    x[0, 40] = 30.0
    payload = send(grammar.build("hadamard(none, block=32, tiles=outliers)"), x)
    assert payload[0] == 0b0010
    sent = payload[1:].clone().view(torch.float32)
    assert torch.equal(sent[:32], x[0, :32])
    assert torch.equal(sent[64:], x[0, 64:])
    assert sent[32:64].abs().max() < 8
    assert grammar.estimate("hadamard(fixpoint:4, block=32, tiles=outliers)") == 4 + 1 / 32


# ---- kmeans, lowrank --------------------------------------------------------------------------------------------


def test_kmeans_is_near_the_best_quantiser_of_a_gaussian() -> None:
    """Lloyd-Max at 2, 3 and 4 bits: -9.3, -14.6 and -20.2 dB; a level is spent on zero, which costs most at 2 bits."""
    x = sample((4, 64, 512))
    for bits, limit in ((2, -8.0), (3, -14.0), (4, -19.9)):
        assert decibels(x, through(f"kmeans:{bits}", x)) < limit
    x[0, 0, 0] = 1e4
    assert decibels(x, through("kmeans:4", x)) < -48, "an outlier that is nearly all of the energy gets a level"
    near = 3.0 + sample((4, 64)) * 1e-4
    assert (through("kmeans:4", near) - near).abs().max() < 1e-4, "levels are as fine as what they stand for"


def test_levels_are_sent_once_a_period() -> None:
    x, ctx = sample((2, 8, 16)), {"step": 5}
    ends = [grammar.build("kmeans:3(period=10)") for _ in range(2)]
    lengths = []
    for step in (5, 5, 9, 14, 15, 24, 3):
        ctx = {"step": step}
        payload = send(ends[0], x * (step + 1), **ctx)
        ends[1].decode(payload, Context((2, 8, 16), **ctx), torch.empty(x.shape))
        lengths.append(payload.numel() - 96)
    assert lengths == [33, 5, 5, 5, 33, 5, 33], "a step before the last fit is another run: fitted anew"
    assert send(ends[0], x, step=4, training=False).numel() == 96 + 33
    assert send(ends[0], x, step=4).numel() == 96 + 5


def test_levels_that_the_receiver_does_not_hold_are_refused() -> None:
    x = sample((2, 8, 16))
    sender, other = grammar.build("kmeans:3(period=10)"), grammar.build("kmeans:3(period=10)")
    send(sender, x)
    payload = send(sender, x, step=1)
    with pytest.raises(CodecError, match="levels that this end does not hold"):
        other.decode(payload, Context((2, 8, 16), step=1), torch.empty(x.shape))
    other.decode(send(grammar.build("kmeans:3(period=10)"), 2 * x), Context((2, 8, 16)), torch.empty(x.shape))
    with pytest.raises(CodecError, match="levels that this end does not hold"):
        other.decode(payload, Context((2, 8, 16), step=1), torch.empty(x.shape))


def test_a_matrix_of_low_rank_is_kept() -> None:
    left, right = sample((4, 30, 3)), sample((3, 40), 1)
    x = left @ right
    assert decibels(x, through("lowrank:3(values=fp32)", x)) < -100
    assert decibels(x, through("lowrank:3", x)) < -45
    assert -30 < decibels(x, through("lowrank:2", x)) < -1
    pixels = x.view(4, 30, 40).movedim(2, 1).reshape(4, 40, 5, 6)
    assert decibels(pixels, through("lowrank:3(values=fp32)", pixels)) < -100
    for size in (1e-30, 1e37):
        assert decibels(x * size, through("lowrank:3(values=fp32)", x * size)) < -100


def test_lowrank_finds_nearly_the_best_fit_and_falls_back_to_the_elements() -> None:
    x = sample((64, 48)) * torch.logspace(0, -2, 48)
    values = torch.linalg.svdvals(x)
    best = (values[4:].square().sum() / values.square().sum()).sqrt()
    assert ((through("lowrank:4(values=fp32)", x) - x).norm() / x.norm()) < 1.03 * best
    codec = grammar.build("lowrank:4")
    assert codec.num_bytes((64, 48)) == 2 + 2 * 4 * (64 + 48)
    assert codec.num_bytes((4, 6)) == 2 + 2 * 24
    assert torch.equal(through("lowrank:4(values=fp32)", sample((4, 6))), sample((4, 6)))
