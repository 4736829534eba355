"""The compiled loops of sparse, rotated and clustered codecs give what reference_select.py defines, bit for bit."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from thinpipe.harness.compression.codecs.hadamard import signs
from thinpipe.harness.compression.kernels import levels, reference, reference_select, rotate, select
from thinpipe.harness.compression.kernels import positions as kernel

# One element, groups that are counted whole, and ones that a sample is taken of, with tails of every kind.
SHAPES = [(1, 1), (3, 1), (1, 7), (5, 64), (2, 4096), (3, 4097), (2, 9001), (1, 40_003)]


def values(shape: tuple[int, int], kind: str) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(shape[1]))
    return {
        "normal": x,
        "heavy": x * (3 * torch.randn(shape, generator=torch.Generator().manual_seed(1))).exp(),
        "half zero": x.relu(),
        "few values": (x * 2).round() / 2,
        "constant": torch.full(shape, -0.75),
        "zeros": torch.zeros(shape),
        "negative zeros": -torch.zeros(shape),
        "subnormal": x * 1e-39,
        "ascending": x.abs().sort().values,
        "one outlier": torch.where(torch.arange(shape[1]) == shape[1] // 2, 1e30, x * 1e-30),
    }[kind]


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize(
    "kind",
    ["normal", "heavy", "half zero", "few values", "constant", "zeros", "negative zeros", "subnormal", "ascending",
     "one outlier"],
)  # fmt: skip
def test_the_largest_of_each_group(kind: str, drop: bool) -> None:
    for shape in SHAPES:
        x = values(shape, kind)
        for k in sorted({0, 1, shape[1] // 100, shape[1] // 10, shape[1] // 2, shape[1] - 1, shape[1]}):
            positions = np.full(shape[0] * k + select.SLACK + 3, -7, np.int32)
            found = select.largest(x.numpy().view(np.int32), k, drop, positions[: shape[0] * k + select.SLACK])
            assert positions[:found].tolist() == reference_select.largest(x, k, drop), (shape, k)
            assert (positions[-3:] == -7).all(), "wrote past its room"


def test_a_sample_that_misleads_changes_nothing() -> None:
    """All large values where a sample cannot see them, or all it sees: the bound is then far off."""
    x = torch.full((1, 20_000), 1e-3) * torch.linspace(1, 2, 20_000)
    dense = x.clone()
    dense[0, 777:1777] += torch.arange(1000).flip(0)
    for y in (dense, dense.flip(1).contiguous(), -dense):
        for k in (5, 999, 1000, 1001, 5000):
            positions = np.empty(k + select.SLACK, np.int32)
            found = select.largest(y.numpy().view(np.int32), k, False, positions)
            assert positions[:found].tolist() == reference_select.largest(y, k, False)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_value_anywhere_is_found(bad: float) -> None:
    for shape in [(2, 50), (3, 6000)]:
        for at in (0, shape[1] - 1, shape[1] + 17, shape[0] * shape[1] - 1):
            for k in (0, 5, shape[1]):
                x = values(shape, "normal")
                x.view(-1)[at] = bad
                positions = np.empty(shape[0] * k + select.SLACK, np.int32)
                assert select.largest(x.numpy().view(np.int32), k, False, positions) == -1


def test_draws() -> None:
    pick = random.Random(3)
    for count in (1, 2, 17, 1000):
        for k in {1, count // 3, count}:
            key = pick.getrandbits(64)
            positions = np.empty(k + select.SLACK, np.int32)
            select.draw(count, k, np.uint64(key), positions)
            assert positions[:k].tolist() == reference_select.draw(count, k, key)


def test_every_position_is_drawn_as_often() -> None:
    count, k, draws = 40, 7, 4000
    times = np.zeros(count)
    positions = np.empty(k + select.SLACK, np.int32)
    for key in range(draws):
        select.draw(count, k, np.uint64(key * 0x9E3779B97F4A7C15 % 2**64), positions)
        times[positions[:k]] += 1
    spread = math.sqrt(draws * k / count * (1 - k / count))
    assert np.abs(times - draws * k / count).max() < 4.5 * spread


def test_positions_as_bytes() -> None:
    pick = random.Random(1)
    for count, share in [(1, 1.0), (8, 0.5), (500, 0.02), (500, 0.5), (500, 1.0), (3000, 0.1), (20_000, 0.001)]:
        places = sorted(pick.sample(range(count), max(1, int(share * count))))
        array = np.array(places, np.int32)
        ways = {
            kernel.BITMAP: reference_select.bitmap(places, count),
            kernel.PACKED: reference_select.packed(places, kernel.BLOCK),
        } | {kernel.RICE + p: reference_select.rice(places, p) for p in (0, 1, 3, 8, 16, kernel.RICE_MAX)}
        for mode, expected in ways.items():
            out = np.full(len(expected) + 3, 0xA5, np.uint8)
            kernel.write(array, mode, out[: len(expected)])
            assert out.tobytes() == expected + b"\xa5" * 3, (count, share, mode)
            back = np.empty(len(places), np.int32)
            assert kernel.read(out, mode, count, back) == len(expected)
            assert back.tolist() == places
        shortest = min(
            [len(ways[kernel.BITMAP]), len(ways[kernel.PACKED])]
            + [len(reference_select.rice(places, p)) for p in range(18)]
        )
        mode, size = kernel.plan(array, count)
        assert size == shortest, (count, share)
        assert mode in (kernel.BITMAP, kernel.PACKED) or size == len(reference_select.rice(places, mode - 2))


@pytest.mark.parametrize("block", [32, 256, 1024])
def test_rotations(block: int) -> None:
    x = values((1, 5 * block + 17), "heavy").view(-1)
    x[3], x[block : 2 * block] = 1e20, 0.0
    sign = torch.from_numpy(signs(block))
    for chosen in ([True] * 5, reference_select.stand_out(x, block, 2.0)):
        flags = np.zeros(0 if all(chosen) else 1, np.uint8)
        out = np.empty(x.numel(), np.float32)
        rotate.rotate(x.numpy(), signs(block), False, flags, 2.0, out)
        expected = reference_select.rotate(x, sign, False, chosen)
        assert torch.equal(torch.from_numpy(out), expected)
        assert flags.size == 0 or [bool(flags[0] >> t & 1) for t in range(8)] == [*chosen, False, False, False]
        rotate.rotate(out, signs(block), True, flags, 0.0, out)
        assert torch.equal(torch.from_numpy(out), reference_select.rotate(expected, sign, True, chosen))
        norm = x.double().norm()
        assert (torch.from_numpy(out).double() - x.double()).norm() < 1e-6 * norm
    assert not all(reference_select.stand_out(x, block, 2.0))
    assert reference_select.stand_out(x, block, 2.0)[0]


@pytest.mark.parametrize("bits", range(1, 9))
def test_levels(bits: int) -> None:
    table = torch.randn(1 << bits, generator=torch.Generator().manual_seed(bits)).sort().values
    middles = ((table[1:].double() + table[:-1].double()) / 2).float()
    for count in (1, 3, 8, 1001):
        x = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 2
        x[: min(count, middles.numel())] = middles[:count]
        codes = reference_select.nearest(x, table)
        expected = reference.pack(codes.to(torch.uint8), bits).numpy()
        out = np.full(expected.size + 2, 0xA5, np.uint8)
        assert levels.encode(x.numpy(), middles.numpy(), bits, out[: expected.size]) == x.abs().max()
        assert out.tobytes() == expected.tobytes() + b"\xa5\xa5"
        back = np.empty(count, np.float32)
        assert levels.decode(out[: expected.size], table.numpy(), bits, back) == 0
        assert torch.equal(torch.from_numpy(back), table[codes])
