"""Every memory, found by itself, keeps the contract of base.Memory on the texts its CONTRACT names.

Nothing here looks into a memory: what it keeps is seen by its digest and its saved state. `key` and `store`, where it
has options of these names, mean what they mean in delta.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from thinpipe.harness import plugins
from thinpipe.harness.compression import grammar
from thinpipe.harness.compression.base import Compressor, Context, Memory
from thinpipe.harness.errors import CodecError, DivergedError

CASES: dict[str, dict[str, Any]] = {
    text: bounds for plugin in plugins.find("memories").values() for text, bounds in plugin.load().CONTRACT.items()
}
SHARED = [text for text in CASES if grammar.state(text) == "shared"]
SENDER = [text for text in CASES if grammar.state(text) == "sender"]
every_text = pytest.mark.parametrize("text", CASES)
every_shared = pytest.mark.parametrize("text", SHARED)
every_sender = pytest.mark.parametrize("text", SENDER)
ROW = (5, 16)


def option(text: str, name: str, otherwise: str) -> str:
    """An option as written, or by default."""
    written = grammar.parse(text).options.get(name)
    return written.name if written else parameters(text).get(name, {}).get("default", otherwise)


def parameters(text: str) -> Any:
    return plugins.get("memories", grammar.parse(text).name).parameters


def key(text: str) -> str:
    return option(text, "key", "sample")


def only_rows(text: str) -> bool:
    """Whether no codec inside keeps anything itself."""
    codecs = [name.removeprefix("codecs/") for name in grammar.plugins_used(text) if name.startswith("codecs/")]
    return not any("STATE" in plugins.get("codecs", codec).extra for codec in codecs)


def peer_of(text: str, shape: tuple[int, ...]) -> torch.Tensor | None:
    if "peer" not in grammar.uses(text):
        return None
    return torch.randn(shape, generator=torch.Generator().manual_seed(99)).relu()


class Ends:
    """A sender and a receiver of one direction of one boundary."""

    def __init__(self, text: str, capacity: int | None = None, folder: Path | None = None) -> None:
        self.text = text
        self.sender, self.receiver = (self.build(capacity, folder) for _ in range(2))
        self.step = 0

    def build(self, capacity: int | None = None, folder: Path | None = None) -> Any:
        return grammar.build(self.text, capacity, folder)

    def context(self, ids: tuple[int, ...], row: tuple[int, ...] = ROW) -> Context:
        self.step += 1
        shape = (len(ids), *row)
        return Context(shape, sample_ids=ids, step=self.step, seed=3, peer=peer_of(self.text, shape))

    def encode(self, x: torch.Tensor, ctx: Context, decoded: torch.Tensor | None = None) -> torch.Tensor:
        return encode(self.sender, x, ctx, decoded)

    def cross(self, x: torch.Tensor, ids: tuple[int, ...]) -> torch.Tensor:
        ctx = self.context(ids, tuple(x.shape[1:]))
        return self.receiver.decode(self.encode(x, ctx), ctx, torch.full(ctx.shape, 9.0))

    def agree(self) -> bool:
        """A shared state is equal at both ends, one of the sender's own does not exist at the other."""
        shared = grammar.state(self.text) == "shared"
        other = self.sender if shared else self.build() if only_rows(self.text) else self.receiver
        return self.receiver.digest() == other.digest()


def encode(memory: Compressor, x: torch.Tensor, ctx: Context, decoded: torch.Tensor | None = None) -> torch.Tensor:
    """The payload, written at an odd offset amid guard bytes."""
    most, exact = memory.max_bytes(ctx.shape), memory.num_bytes(ctx.shape)
    buffer = torch.full((most + 8,), 0xA5, dtype=torch.uint8)
    body = buffer[3 : 3 + most]
    n = memory.encode(x, ctx, body) if decoded is None else memory.encode_decoded(x, ctx, body, decoded)
    assert n <= most
    assert exact is None or n == exact
    assert bool((buffer[3 + most :] == 0xA5).all() and (buffer[:3] == 0xA5).all())
    return body[:n]


def data(count: int, row: tuple[int, ...] = ROW, seed: int = 0) -> torch.Tensor:
    return torch.randn((count, *row), generator=torch.Generator().manual_seed(seed))


def kept(*memories: Any) -> Any:
    """What these memories keep, copied."""
    return copy.deepcopy([(memory.digest(), memory.state_dict()) for memory in memories])


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def tensors(state: Any) -> Iterable[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for part in state.values() if isinstance(state, dict) else state:
            yield from tensors(part)


class Model:
    """What a shared memory goes on from, by its key: what was decoded last, or 0 where first visits are changes too."""

    def __init__(self, text: str) -> None:
        self.key, self.splits = key(text), "first" in parameters(text)
        self.last: dict[int, torch.Tensor] = {}

    def rows(self, ids: tuple[int, ...]) -> list[int]:
        return {"sample": list(ids), "slot": list(range(len(ids))), "batch": [0] * len(ids)}[self.key]

    def found(self, ids: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """(which rows go by what was there before, that or zero of every row)"""
        rows = self.rows(ids)
        met = torch.tensor([row in self.last or not self.splits for row in rows])
        return met, torch.stack([self.last.get(row, torch.zeros(ROW)) for row in rows])

    def keep(self, ids: tuple[int, ...], decoded: torch.Tensor) -> None:
        values = decoded.mean(0, keepdim=True).expand_as(decoded) if self.key == "batch" else decoded
        self.last |= zip(self.rows(ids), values.clone(), strict=True)


def test_the_suite_covers_every_memory() -> None:
    assert {grammar.parse(text).name for text in CASES} == set(plugins.find("memories"))
    for text in CASES:
        memory = grammar.build(text)
        assert isinstance(memory, Memory)
        assert memory.state == grammar.state(text) in ("shared", "sender")
        assert memory.uses_peer == ("peer" in grammar.uses(text))


@every_shared
def test_two_hundred_steps_with_repeats_and_missing_samples(text: str) -> None:
    """Both ends stay equal, the error is that of the change, and repeats within a message are part of it."""
    case, ends, pick, model = CASES[text], Ends(text, 24), random.Random(1), Model(text)
    base = data(24)
    for step in range(200):
        ids = tuple(pick.choices(range(24), k=pick.randint(1, 5)))
        ids = ids if step % 10 == 0 else tuple(dict.fromkeys(ids))
        x = base[list(ids)] + data(len(ids), seed=step) * 0.3 / (1 + step / 20)
        ends.sender.diagnose = step % 7 == 0
        decoded = ends.cross(x, ids)
        met, before = model.found(ids)
        if not bool(met.all()):
            allowed = case.get("relative", 0.0) * x.abs() + case.get("absolute", 0.0) * x[~met].abs().max() + 1e-35
            assert bool(((decoded - x).abs() <= allowed)[~met].all())
        if bool(met.any()):
            change = (x - before)[met].abs().max()
            # What is kept is rounded to the cache's format, which the test does not model: 1 % of the values.
            slack = 0.01 * x.abs().max() * (1 + case["change"])
            assert (decoded - x)[met].abs().max() <= case["change"] * change + slack
        model.keep(ids, decoded)
        if step % 5 == 0:
            assert ends.agree(), f"step {step}"
    assert ends.agree()


@every_sender
def test_what_a_message_loses_is_sent_later(text: str) -> None:
    """The sum of what was decoded stays as near to the sum of what was sent as one message's loss allows: sums of
    errors do not grow with the steps. With key=batch that holds for the mean over rows."""
    ends, ids = Ends(text, 4), (4, 2, 9, 7)
    share = CASES[text].get("norm") or CASES[text].get("relative", 0.0) + CASES[text].get("absolute", 0.0)
    size = (lambda t: t.norm().item()) if "norm" in CASES[text] else (lambda t: t.abs().max().item())
    assert share < 1, "the test needs a bound on a message's loss"
    owed, largest, lost = torch.zeros(4, *ROW), 0.0, torch.zeros(4, *ROW)
    for step in range(200):
        x = data(4, seed=step) + 0.3
        ends.sender.diagnose = step % 7 == 0
        decoded = ends.cross(x, ids)
        owed, lost, largest = owed + (x - decoded), lost + (x - decoded).abs(), max(largest, size(x))
        rest = owed.mean(0) if key(text) == "batch" else owed
        # e <= share (x + e), so e <= share / (1 - share) x; what is kept is rounded to the cache's format.
        assert size(rest) <= 1.1 * share / (1 - share) * largest
    assert lost.mean() > 3 * owed.abs().mean() or key(text) == "batch"
    assert ends.agree()


@every_text
def test_the_receiver_needs_no_more_than_messages(text: str) -> None:
    """Repeats, missing samples and messages of other sizes: what is decoded is what the sender knows it will be."""
    ends, pick = Ends(text, 24), random.Random(2)
    for step in range(40):
        ids = tuple(pick.choices(range(24), k=pick.randint(1, 5)))
        ctx, x = ends.context(ids), data(len(ids), seed=step)
        known = torch.full(ctx.shape, 7.0)
        payload = ends.encode(x, ctx, known)
        assert torch.equal(ends.receiver.decode(payload, ctx, torch.full(ctx.shape, 9.0)), known)
        assert ends.agree()


@every_text
def test_encode_decoded_is_encode_and_tells(text: str) -> None:
    plain, told = Ends(text), Ends(text)
    for ids in ((0, 1), (0, 1, 2), (1, 2, 3), (3, 0), (5,), (2, 2, 6)):
        x, ctx = data(len(ids), seed=sum(ids)), plain.context(ids)
        decoded = torch.full(ctx.shape, 7.0)
        payload = plain.encode(x, ctx)
        assert torch.equal(payload, told.encode(x, ctx, decoded))
        assert torch.equal(plain.receiver.decode(payload, ctx, torch.full(ctx.shape, 9.0)), decoded)
        assert equal(kept(plain.sender), kept(told.sender))


@every_text
def test_the_digest_tells_states_apart(text: str) -> None:
    one, two, other, x = Ends(text), Ends(text), Ends(text), data(3)
    empty = one.sender.digest()
    for ends, values in ((one, x), (two, x), (other, x * 1.01 + 0.1)):
        ends.cross(values, (0, 1, 2))
    assert one.sender.digest() == two.sender.digest() != empty
    assert other.sender.digest() != one.sender.digest()
    if key(text) == "sample":
        swapped = Ends(text)
        swapped.cross(x, (1, 0, 2))
        assert swapped.sender.digest() != one.sender.digest()


@every_shared
def test_a_frozen_sample_comes_closer_with_each_visit(text: str) -> None:
    ends, x = Ends(text), data(3)
    # One row for all comes closer to what they have in common.
    x = x[:1].repeat(3, 1, 1) if key(text) == "batch" else x
    ends.cross(x + data(3, seed=9), (4, 5, 6))
    errors = [(ends.cross(x, (4, 5, 6)) - x).norm().item() for _ in range(12)]
    assert errors[-1] < 0.02 * x.norm()
    assert errors[-1] <= errors[0]


@every_shared
def test_a_sample_twice_in_a_message(text: str) -> None:
    """Both occurrences are coded against what was there before; the last one's value stays."""
    ends, x = Ends(text), data(4)
    ends.cross(x[:3], (0, 1, 2))
    decoded = ends.cross(x[[0, 1, 0]] + data(3, seed=5), (0, 1, 0))
    assert ends.agree()
    if key(text) == "sample" and "rounding=stochastic" not in text and only_rows(text):  # a draw depends on the key
        alone = Ends(text)
        alone.cross(x[:3], (0, 1, 2))
        alone.sender.observe(decoded[1:], Context((2, *ROW), sample_ids=(1, 0), step=9))
        assert alone.sender.digest() == ends.sender.digest()
    fresh = Ends(text)
    fresh.cross(x, (7, 8, 7, 8))
    assert fresh.agree()


@every_text
def test_evaluation_never_touches_a_memory(text: str) -> None:
    ends, x = Ends(text), data(2)
    ends.cross(x, (0, 1))
    before = kept(ends.sender, ends.receiver)
    ctx = replace(ends.context((0, 1)), training=False)
    with pytest.raises(CodecError, match="evaluation"):
        ends.encode(x, ctx)
    with pytest.raises(CodecError, match="evaluation"):
        ends.encode(x, ctx, torch.zeros(ctx.shape))
    with pytest.raises(CodecError, match="evaluation"):
        ends.receiver.decode(torch.zeros(8, dtype=torch.uint8), ctx, torch.zeros(ctx.shape))
    with pytest.raises(CodecError, match="evaluation"):
        ends.sender.observe(x, ctx)
    assert equal(kept(ends.sender, ends.receiver), before)


@every_text
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("row", [1, 3], ids=["seen", "unseen"])
def test_divergence_leaves_the_state_as_it_was(text: str, bad: float, row: int) -> None:
    ends, x = Ends(text), data(4)
    ends.cross(x[:2], (0, 1))
    before = kept(ends.sender)
    broken = x.clone()
    broken[row, 2, 5] = bad
    with pytest.raises(DivergedError, match="non-finite"):
        ends.encode(broken, ends.context((0, 1, 2, 3)))
    assert equal(kept(ends.sender), before)
    ends.cross(x, (0, 1, 2, 3))
    assert ends.agree()


@every_text
def test_a_malformed_payload_leaves_the_state_as_it_was(text: str) -> None:
    ends, x = Ends(text), data(3)
    ends.cross(x[:2], (0, 1))
    before = kept(ends.receiver)
    for ids, rows in (((0, 1), x[:2]), ((0, 1, 2), x), ((2,), x[2:])):
        ctx = ends.context(ids)
        sender = ends.build()
        sender.load_state_dict(copy.deepcopy(ends.sender.state_dict()))
        buffer = torch.zeros(sender.max_bytes(ctx.shape) + 1, dtype=torch.uint8)
        n = sender.encode(rows, ctx, buffer)
        for wrong in (buffer[: n - 1], buffer[: n + 1], buffer[:0]):
            with pytest.raises(CodecError, match="malformed"):
                ends.receiver.decode(wrong, ctx, torch.zeros(ctx.shape))
    assert equal(kept(ends.receiver), before)


@every_text
def test_saved_state_goes_on_as_if_nothing_had_happened(text: str) -> None:
    ends, x = Ends(text), data(6)
    ends.cross(x[:4], (0, 1, 2, 3))
    ends.cross(x[[1, 2]] * 1.1, (1, 2))
    resumed = Ends(text)
    resumed.step = ends.step
    for old, new in zip((ends.sender, ends.receiver), (resumed.sender, resumed.receiver), strict=True):
        new.load_state_dict(copy.deepcopy(old.state_dict()))
    assert resumed.sender.digest() == ends.sender.digest()
    for ids in ((0, 1, 4), (4, 5), (2, 3)):
        assert torch.equal(ends.cross(x[list(ids)] * 0.9, ids), resumed.cross(x[list(ids)] * 0.9, ids))
    assert resumed.sender.digest() == ends.sender.digest()
    assert resumed.agree()
    empty = ends.build()
    empty.load_state_dict(ends.build().state_dict())
    assert empty.digest() == ends.build().digest()


@every_shared
def test_observed_samples_count_as_visited(text: str) -> None:
    """Warm-up: what crossed by another compressor is what both ends go on from."""
    ends, x = Ends(text), data(3)
    x = x[:1].repeat(3, 1, 1) if key(text) == "batch" else x
    ctx = ends.context((0, 1, 2))
    for memory in (ends.sender, ends.receiver):
        memory.observe(x, ctx)
    assert ends.agree()
    assert ends.sender.digest() != ends.build().digest()
    # 1 % is the change; 1 % is what the cache may have rounded.
    assert (ends.cross(x * 1.01, (0, 1, 2)) - x * 1.01).abs().max() <= 0.02 * x.abs().max()
    assert ends.agree()
    broken = x.clone()
    broken[0, 0, 0] = math.nan
    before = kept(ends.sender)
    with pytest.raises(DivergedError):
        ends.sender.observe(broken, ends.context((0, 1, 2)))
    assert equal(kept(ends.sender), before)


@every_sender
def test_what_another_compressor_sent_is_not_ours_to_correct(text: str) -> None:
    ends, x = Ends(text), data(3)
    ends.cross(x, (0, 1, 2))
    before = kept(ends.sender, ends.receiver)
    for memory in (ends.sender, ends.receiver):
        memory.observe(x * 2, ends.context((0, 1, 2)))
    assert equal(kept(ends.sender, ends.receiver), before)


@every_text
def test_state_bytes_is_a_bound_known_before(text: str) -> None:
    ends, shape = Ends(text, capacity=10), (2, *ROW)
    due = ends.sender.state_bytes(10, shape, 3)
    assert 0 < ends.sender.state_bytes(1, (1, *ROW), 1) <= due <= ends.sender.state_bytes(20, shape, 6)
    for first in (0, 2, 4, 6, 8, 0):
        ctx = replace(ends.context((first, first + 1)), microbatch=first // 2 % 3)
        ends.receiver.decode(ends.encode(data(2), ctx), ctx, torch.zeros(shape))
    for memory in (ends.sender, ends.receiver):
        held = sum(tensor.numel() * tensor.itemsize for tensor in tensors(memory.state_dict()))
        assert held <= due + 64 * 10 or not only_rows(text), "rows, and a few numbers a row"
    if key(text) == "sample":
        with pytest.raises(CodecError, match="10"):
            ends.encode(data(1), ends.context((10,)))


@every_text
def test_ids_are_asked_for_where_they_are_needed(text: str) -> None:
    ends, x = Ends(text), data(2)
    ctx = Context((2, *ROW), seed=3)
    if key(text) == "sample":
        with pytest.raises(CodecError, match="sample id"):
            ends.encode(x, ctx)
    else:
        ends.receiver.decode(ends.encode(x, ctx), ctx, torch.zeros(ctx.shape))
    ends.cross(x, (0, 1))
    assert ends.cross(data(0), ()).shape == (0, *ROW)
    assert ends.agree()


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
def test_zero_comes_back_as_zero(text: str) -> None:
    ends = Ends(text)
    for _ in range(3):
        assert torch.equal(ends.cross(torch.zeros(2, *ROW), (0, 1)), torch.zeros(2, *ROW))


@every_text
def test_diagnosing_changes_nothing_and_tells(text: str) -> None:
    """Diagnosis may take another way through the arithmetic: equal bytes and state show that it is the same."""
    plain, watched, x = Ends(text), Ends(text), data(4)
    watched.sender.diagnose = True
    for ids in ((0, 1), (0, 1, 2), (1, 2, 3), (3, 0)):
        rows = x[list(ids)] + data(len(ids), seed=sum(ids))
        ctx = plain.context(ids)
        payload = watched.encode(rows, ctx)
        assert torch.equal(plain.encode(rows, ctx), payload)
        assert plain.sender.digest() == watched.sender.digest()
        decoded = watched.receiver.decode(payload, ctx, torch.full(ctx.shape, 9.0))
    known = watched.sender.diagnostics
    assert known["rel_error"] == pytest.approx(((decoded - rows).norm() / rows.norm()).item(), rel=1e-4)
    if text in SHARED:
        assert 0.3 < known["mean_abs_change"] < 3


@pytest.mark.parametrize("text", [text for text in CASES if "store" in parameters(text)])
def test_rows_on_disk_are_those_in_ram(text: str, tmp_path: Path) -> None:
    """Bit by bit, with messages announced and without, from a saved state too; nothing is left in the folder."""
    head, _, inside = text.partition("(")
    ram, disk = Ends(text, 9), Ends(f"{head}({inside.removesuffix(')')}, store=disk)", 9, tmp_path)
    pick = random.Random(3)
    for step in range(30):
        messages = [tuple(pick.choices(range(9), k=3)) for _ in range(3)]
        contexts = [replace(ram.context(ids), microbatch=i, step=step) for i, ids in enumerate(messages)]
        if step % 3:
            for memory in (ram.sender, ram.receiver, disk.sender, disk.receiver):
                memory.prefetch(contexts)
        for i, ctx in enumerate(contexts if step % 2 else reversed(contexts)):
            x = data(3, seed=3 * step + i)
            found = [ends.receiver.decode(ends.encode(x, ctx), ctx, torch.full(ctx.shape, 9.0)) for ends in (ram, disk)]
            assert torch.equal(*found)
        if step == 15:
            again = disk.build(9, tmp_path)
            again.load_state_dict(copy.deepcopy(ram.sender.state_dict()))
            disk.sender = again
        assert disk.sender.digest() == ram.sender.digest()
        assert disk.receiver.digest() == ram.receiver.digest()
    assert equal(kept(disk.sender, disk.receiver), kept(ram.sender, ram.receiver))
    assert equal(kept(disk.build()), kept(ram.build()))
    assert list(tmp_path.iterdir()) == []
