"""Every memory, found by itself, keeps the contract of base.Memory on the texts its CONTRACT names."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from thinpipe.harness import plugins
from thinpipe.harness.compression import grammar
from thinpipe.harness.compression.base import Context, Memory
from thinpipe.harness.compression.rows import CastRows, CodeRows
from thinpipe.harness.errors import CodecError, DivergedError

CASES: dict[str, dict[str, Any]] = {
    text: bounds for plugin in plugins.find("memories").values() for text, bounds in plugin.load().CONTRACT.items()
}
every_text = pytest.mark.parametrize("text", CASES)
ROW = (5, 16)


class Ends:
    """A sender and a receiver of one direction of one boundary."""

    def __init__(self, text: str, capacity: int | None = None) -> None:
        self.sender, self.receiver = self.memories = grammar.build(text), grammar.build(text, capacity=capacity)
        self.step = 0

    def context(self, ids: tuple[int, ...], row: tuple[int, ...] = ROW) -> Context:
        self.step += 1
        return Context((len(ids), *row), sample_ids=ids, step=self.step, seed=3)

    def encode(self, x: torch.Tensor, ctx: Context) -> torch.Tensor:
        most = self.sender.max_bytes(ctx.shape)
        buffer = torch.full((most + 8,), 0xA5, dtype=torch.uint8)
        n = self.sender.encode(x, ctx, buffer[:most])
        assert n <= most
        assert bool((buffer[most:] == 0xA5).all())
        return buffer[:n]

    def cross(self, x: torch.Tensor, ids: tuple[int, ...]) -> torch.Tensor:
        ctx = self.context(ids, tuple(x.shape[1:]))
        return self.receiver.decode(self.encode(x, ctx), ctx, torch.full(ctx.shape, 9.0))

    def agree(self) -> bool:
        return self.sender.digest() == self.receiver.digest()


def data(count: int, row: tuple[int, ...] = ROW, seed: int = 0) -> torch.Tensor:
    return torch.randn((count, *row), generator=torch.Generator().manual_seed(seed))


def test_the_suite_covers_every_memory() -> None:
    assert {grammar.parse(text).name for text in CASES} == set(plugins.find("memories"))
    for text in CASES:
        memory = grammar.build(text)
        assert isinstance(memory, Memory)
        assert memory.state in ("shared", "sender")


@every_text
def test_two_hundred_steps_with_repeats_and_missing_samples(text: str) -> None:
    """Both ends stay equal, the error is that of the change, and repeats within a message are part of it."""
    case, ends, pick = CASES[text], Ends(text), random.Random(1)
    base, last = data(24), {}
    for step in range(200):
        ids = tuple(pick.choices(range(24), k=pick.randint(1, 5)))
        ids = ids if step % 10 == 0 else tuple(dict.fromkeys(ids))
        x = base[list(ids)] + data(len(ids), seed=step) * 0.3 / (1 + step / 20)
        ends.sender.diagnose = step % 7 == 0
        decoded = ends.cross(x, ids)
        seen = torch.tensor([sample in last for sample in ids])
        for i in range(len(ids)):
            if not seen[i]:
                allowed = case["relative"] * x[i].abs() + case["absolute"] * x[~seen].abs().max() + 1e-35
                assert bool(((decoded[i] - x[i]).abs() <= allowed).all())
        if bool(seen.any()):
            old = torch.stack([last[sample] for i, sample in enumerate(ids) if seen[i]])
            change = (x[seen] - old).abs().max()
            # What is kept is rounded to the cache's format, which the test does not model: 1 % of the values.
            slack = 0.01 * x.abs().max() * (1 + case["change"])
            assert (decoded[seen] - x[seen]).abs().max() <= case["change"] * change + slack
        for i, sample in enumerate(ids):
            last[sample] = decoded[i]
        if step % 5 == 0:
            assert ends.agree(), f"step {step}"
    assert ends.agree()


@every_text
def test_the_digest_sees_every_row_and_not_the_order(text: str) -> None:
    one, two, x = Ends(text), Ends(text), data(4)
    empty = one.sender.digest()
    for ends, order in ((one, (0, 1, 2, 3)), (two, (3, 1, 0, 2))):
        for i in order:
            ends.step = i  # a draw of random numbers depends on the step
            ends.cross(x[i : i + 1], (i,))
            if ends is one:
                ends.sender.digest()
    assert one.sender.digest() == two.sender.digest() != empty
    for i in range(4):
        row = one.sender.rows.data[one.sender.rows.slots[i]].view(torch.uint8)
        row[-1] ^= 1
        one.sender.rows.touched([i])
        assert one.sender.digest() != two.sender.digest()
        row[-1] ^= 1
        one.sender.rows.touched([i])
        assert one.sender.digest() == two.sender.digest()


@every_text
def test_swapped_samples_are_not_equal(text: str) -> None:
    one, two, x = Ends(text), Ends(text), data(2)
    one.cross(x, (0, 1))
    two.cross(x, (1, 0))
    assert one.sender.digest() != two.sender.digest()


@every_text
def test_a_frozen_sample_comes_closer_with_each_visit(text: str) -> None:
    ends, x = Ends(text), data(3)
    ends.cross(x + data(3, seed=9), (4, 5, 6))
    errors = [(ends.cross(x, (4, 5, 6)) - x).norm().item() for _ in range(12)]
    assert errors[-1] < 0.02 * x.norm()
    assert errors[-1] <= errors[0]


@every_text
def test_a_sample_twice_in_a_message(text: str) -> None:
    """Both occurrences are coded against what was there before; the last one's value stays."""
    ends, x = Ends(text), data(4)
    ends.cross(x[:3], (0, 1, 2))
    twice = x[[0, 1, 0]] + data(3, seed=5)
    decoded = ends.cross(twice, (0, 1, 0))
    assert ends.agree()
    alone = Ends(text)
    alone.cross(x[:3], (0, 1, 2))
    ctx = Context((2, *ROW), sample_ids=(1, 0), step=9)
    alone.sender.observe(decoded[1:], ctx)
    if "rounding=stochastic" not in text:  # a draw depends on the message's key
        assert alone.sender.digest() == ends.sender.digest()
    fresh = Ends(text)
    fresh.cross(x, (7, 8, 7, 8))
    assert fresh.agree()
    assert len(fresh.sender.rows) == 2


@every_text
def test_evaluation_never_touches_a_memory(text: str) -> None:
    ends, x = Ends(text), data(2)
    ends.cross(x, (0, 1))
    before = ends.sender.digest()
    ctx = replace(ends.context((0, 1)), training=False)
    with pytest.raises(CodecError, match="evaluation"):
        ends.encode(x, ctx)
    with pytest.raises(CodecError, match="evaluation"):
        ends.receiver.decode(torch.zeros(8, dtype=torch.uint8), ctx, torch.zeros(ctx.shape))
    with pytest.raises(CodecError, match="evaluation"):
        ends.sender.observe(x, ctx)
    assert ends.sender.digest() == before == ends.receiver.digest()


@every_text
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["seen", "unseen"])
def test_divergence_leaves_the_state_as_it_was(text: str, bad: float, where: str) -> None:
    ends, x = Ends(text), data(4)
    ends.cross(x[:2], (0, 1))
    before = ends.sender.digest()
    broken = x.clone()
    broken[1 if where == "seen" else 3, 2, 5] = bad
    with pytest.raises(DivergedError, match="non-finite"):
        ends.encode(broken, ends.context((0, 1, 2, 3)))
    ends.sender.rows.touched(list(ends.sender.rows.slots))
    assert ends.sender.digest() == before
    assert len(ends.sender.rows) == 2
    ends.cross(x, (0, 1, 2, 3))
    assert ends.agree()


@every_text
def test_a_malformed_payload_leaves_the_state_as_it_was(text: str) -> None:
    ends, x = Ends(text), data(3)
    ends.cross(x[:2], (0, 1))
    before = ends.receiver.digest()
    for ids, rows in (((0, 1), x[:2]), ((0, 1, 2), x), ((2,), x[2:])):
        ctx = ends.context(ids)
        sender = grammar.build(text)
        sender.load_state_dict(ends.sender.state_dict())
        buffer = torch.zeros(sender.max_bytes(ctx.shape) + 1, dtype=torch.uint8)
        n = sender.encode(rows, ctx, buffer)
        for wrong in (buffer[: n - 1], buffer[: n + 1], buffer[:0]):
            with pytest.raises(CodecError, match="malformed"):
                ends.receiver.decode(wrong, ctx, torch.zeros(ctx.shape))
    ends.receiver.rows.touched(list(ends.receiver.rows.slots))
    assert ends.receiver.digest() == before
    assert len(ends.receiver.rows) == 2


@every_text
def test_saved_state_goes_on_as_if_nothing_had_happened(text: str) -> None:
    ends, x = Ends(text), data(6)
    ends.cross(x[:4], (0, 1, 2, 3))
    ends.cross(x[[1, 2]] * 1.1, (1, 2))
    resumed = Ends(text)
    resumed.step = ends.step
    for old, new in zip(ends.memories, resumed.memories, strict=True):
        new.load_state_dict(old.state_dict())
    assert resumed.sender.digest() == ends.sender.digest()
    for ids in ((0, 1, 4), (4, 5), (2, 3)):
        assert torch.equal(ends.cross(x[list(ids)] * 0.9, ids), resumed.cross(x[list(ids)] * 0.9, ids))
    assert resumed.sender.digest() == ends.sender.digest() == resumed.receiver.digest()
    empty = grammar.build(text)
    empty.load_state_dict(grammar.build(text).state_dict())
    assert empty.digest() == grammar.build(text).digest()


@every_text
def test_observed_samples_count_as_visited(text: str) -> None:
    """Warm-up: what crossed by another compressor is what both ends go on from."""
    ends, x = Ends(text), data(3)
    ctx = ends.context((0, 1, 2))
    for memory in ends.memories:
        memory.observe(x, ctx)
    assert ends.agree()
    again = ends.context((0, 1, 2))
    assert ends.encode(x * 1.01, again).numel() <= ends.sender.codec.max_bytes(again.shape)


@every_text
def test_state_bytes_is_what_is_held(text: str) -> None:
    ends = Ends(text, capacity=10)
    shape = (4, *ROW)
    ends.cross(data(4), (0, 1, 2, 3))
    held = ends.receiver.rows.data
    assert held.numel() * held.itemsize == ends.receiver.state_bytes(10, shape)
    address = held.data_ptr()
    for first in (4, 6, 8):
        ends.cross(data(2), (first, first + 1))
    assert ends.receiver.rows.data.data_ptr() == address, "allocated once"
    x, ctx = data(1), ends.context((10,))
    with pytest.raises(CodecError, match="made for 10 samples"):
        ends.receiver.decode(ends.encode(x, ctx), ctx, torch.zeros(1, *ROW))


@every_text
def test_what_a_memory_refuses(text: str) -> None:
    ends = Ends(text)
    with pytest.raises(CodecError, match="sample id"):
        ends.encode(data(2), Context((2, *ROW)))
    ends.cross(data(2), (0, 1))
    with pytest.raises(CodecError, match="shape"):
        ends.cross(data(2, (3, 16)), (0, 1))
    assert ends.cross(data(0), ()).shape == (0, *ROW)


@every_text
@pytest.mark.parametrize("row", [(7,), (3, 5, 5), (1, 2500)], ids=str)
def test_other_shapes(text: str, row: tuple[int, ...]) -> None:
    ends = Ends(text)
    for ids in ((0, 1, 2), (2, 3), (1, 0), (0, 1, 2, 3)):
        x = data(len(ids), row, seed=sum(ids))
        assert bool(torch.isfinite(ends.cross(x, ids)).all())
        assert ends.agree()
    assert ends.cross(data(2, row).transpose(0, -1).contiguous().transpose(0, -1), (0, 1)).shape == (2, *row)


@every_text
def test_diagnosing_changes_nothing_and_tells(text: str) -> None:
    """Diagnosis takes the plain way through torch: equal bytes and rows show that the fused one does the same."""
    plain, watched, x = Ends(text), Ends(text), data(4)
    watched.sender.diagnose = True
    for ids in ((0, 1), (0, 1, 2), (1, 2, 3), (3, 0)):
        rows = x[list(ids)] + data(len(ids), seed=sum(ids))
        ctx = plain.context(ids)
        assert torch.equal(plain.encode(rows, ctx), watched.encode(rows, ctx))
        assert plain.sender.digest() == watched.sender.digest()
    known = watched.sender.diagnostics
    assert 0 < known["rel_error"] < 1
    assert 0.3 < known["mean_abs_change"] < 3


def test_values_the_cache_cannot_hold() -> None:
    ends, x = Ends("delta(fixpoint:4, cache=fp16)"), data(2)
    ends.cross(x, (0, 1))
    before = ends.sender.digest()
    big = x.clone()
    big[0, 0, 0] = 9e4
    for ids in ((0, 1), (0, 2), (2, 3)):
        with pytest.raises(CodecError, match="use cache=bf16"):
            ends.encode(big, ends.context(ids))
    ends.sender.rows.touched([0, 1])
    assert ends.sender.digest() == before
    assert len(ends.sender.rows) == 2
    Ends("delta(fixpoint:4)").cross(big, (0, 1))


def test_a_change_that_overflows_is_not_divergence() -> None:
    for text in ("delta(fixpoint:4)", "delta(fixpoint:4, cache=fp32)"):
        ends, x = Ends(text), torch.full((1, *ROW), 3e38)
        ends.cross(x, (0,))
        with pytest.raises(CodecError, match="change of a finite value"):
            ends.encode(-x, ends.context((0,)))


def test_huge_values_take_the_careful_way_to_the_same_rows() -> None:
    """From 2^125 on, rows are not moved in place, since a sum might overflow with the row half written."""
    ends, x = Ends("delta(fixpoint:4)"), torch.full((2, *ROW), 1e38)
    for factor in (1.0, 0.5, 0.9, -0.2):
        decoded = ends.cross(x * factor, (0, 1))
        assert bool(torch.isfinite(decoded).all())
        assert ends.agree()
    assert ends.sender.rows.largest > 2.0**125


def test_the_parts_of_delta() -> None:
    """The names that the formats stand for, and the bytes of a row, by formula."""
    shape = (4, 64, 128)
    for text, kind, row in (
        ("delta(fixpoint:4)", CastRows, 2 * 64 * 128),
        ("delta(fixpoint:4, cache=fp16)", CastRows, 2 * 64 * 128),
        ("delta(fixpoint:4, cache=fp32)", CastRows, 4 * 64 * 128),
        ("delta(fixpoint:2, cache=fixpoint:8)", CodeRows, 64 * 128 + 2 * 128),
        ("delta(fixpoint:2, cache=fixpoint:3)", CodeRows, 64 * 128 * 3 // 8 + 2 * 128),
    ):
        memory = grammar.build(text)
        assert isinstance(memory.rows, kind)
        assert memory.state_bytes(1000, shape) == 1000 * row
    ends, x = Ends("delta(fixpoint:4)"), data(4, (64, 128))
    for ids, due in (((0, 1), 2 * 4 * 8192), ((0, 1, 2), 4 * 8192 + 2 * 128 + 2 * 4096), ((0, 1), 2 * 128 + 2 * 4096)):
        assert ends.encode(x[: len(ids)], ends.context(ids, (64, 128))).numel() == due


def test_first_visits_are_exact_and_per_sample() -> None:
    """A sample missed in the first epoch still goes in full on its first visit, whatever the step."""
    ends, x = Ends("delta(fixpoint:2)"), data(3)
    for _ in range(3):
        ends.cross(x[:2], (0, 1))
    assert torch.equal(ends.cross(x, (0, 1, 2))[2], x[2])
