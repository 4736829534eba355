"""What is particular to delta and ef21: formats, first visits, keys, the fused way, and codecs of every kind inside."""

import copy

import pytest
import torch
from toy_codecs import Fitted, Masked, Sparse

from thinpipe.harness.compression import grammar
from thinpipe.harness.compression.base import Context
from thinpipe.harness.compression.codecs.fixpoint import FixedPoint
from thinpipe.harness.compression.codecs.none import Uncompressed
from thinpipe.harness.compression.memories.delta import Delta
from thinpipe.harness.compression.memories.ef21 import EF21
from thinpipe.harness.compression.rows import CastRows, CodeRows
from thinpipe.harness.errors import CodecError, DivergedError

ROW = (5, 16)


def data(count, row=ROW, seed=0):
    return torch.randn((count, *row), generator=torch.Generator().manual_seed(seed))


def context(ids, row=ROW, **more):
    return Context((len(ids), *row), sample_ids=tuple(ids), **more)


def encode(memory, x, ctx, decoded=None):
    out = torch.zeros(memory.max_bytes(ctx.shape), dtype=torch.uint8)
    n = memory.encode(x, ctx, out) if decoded is None else memory.encode_decoded(x, ctx, out, decoded)
    return out[:n]


def decode(memory, payload, ctx):
    return memory.decode(payload, ctx, torch.full(ctx.shape, 9.0))


class Pair:
    """Both ends of a memory: of a text, or as `make` builds it."""

    def __init__(self, made):
        def build():
            if isinstance(made, str):
                return grammar.build(made)
            memory = made()
            memory.name = "toy"
            return memory

        self.sender, self.receiver = build(), build()
        self.step = 0

    def cross(self, x, ids, **more):
        self.step += 1
        ctx = context(ids, tuple(x.shape[1:]), step=self.step, **more)
        known = torch.full(ctx.shape, 7.0)
        # Every other message by the fused way, where there is one.
        payload = encode(self.sender, x, ctx, known if self.step % 2 else None)
        decoded = decode(self.receiver, payload, ctx)
        assert not self.step % 2 or torch.equal(decoded, known)
        assert self.sender.digest() == self.receiver.digest()
        return decoded, payload


def test_the_parts_of_delta():
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
    assert grammar.build("delta(fixpoint:4, key=slot)").state_bytes(1000, shape, 8) == 32 * 2 * 64 * 128
    assert grammar.build("delta(fixpoint:4, key=batch)").state_bytes(1000, shape, 8) == 2 * 64 * 128
    pair, x = Pair("delta(fixpoint:4)"), data(4, (64, 128))
    for ids, due in (((0, 1), 2 * 4 * 8192), ((0, 1, 2), 4 * 8192 + 2 * 128 + 2 * 4096), ((0, 1), 2 * 128 + 2 * 4096)):
        assert pair.cross(x[: len(ids)], ids)[1].numel() == due


def test_first_visits_are_exact_and_per_sample():
    """A sample missed in the first epoch still goes in full on its first visit, whatever the step."""
    pair, x = Pair("delta(fixpoint:2)"), data(3)
    for _ in range(3):
        pair.cross(x[:2], (0, 1))
    assert torch.equal(pair.cross(x, (0, 1, 2))[0][2], x[2])


def test_values_the_cache_cannot_hold():
    pair, x = Pair("delta(fixpoint:4, cache=fp16)"), data(2)
    pair.cross(x, (0, 1))
    before = copy.deepcopy(pair.sender.state_dict())
    big = x.clone()
    big[0, 0, 0] = 9e4
    for ids in ((0, 1), (0, 2), (2, 3)):
        with pytest.raises(CodecError, match="use cache=bf16"):
            encode(pair.sender, big, context(ids))
    assert torch.equal(pair.sender.state_dict()["rows"], before["rows"])
    assert len(pair.sender.rows) == 2
    Pair("delta(fixpoint:4)").cross(big, (0, 1))


def test_a_change_that_overflows_is_not_divergence():
    for text in ("delta(fixpoint:4)", "delta(fixpoint:4, cache=fp32)", "ef21(fixpoint:4)"):
        pair, x = Pair(text), torch.full((1, *ROW), -3e38)
        pair.cross(x, (0,))
        with pytest.raises(CodecError, match="change of a finite value"):
            encode(pair.sender, -x, context((0,)))


@pytest.mark.parametrize(("cast", "size"), [("bf16", 1e38), ("fp16", 2e4), ("fp32", 1e38)])
def test_huge_values_take_the_careful_way_to_the_same_rows(cast, size):
    """Near the format's end rows are not moved in place, since a sum might overflow with the row half written."""
    pair, x = Pair(f"delta(fixpoint:4, cache={cast})"), torch.full((2, *ROW), size)
    for factor in (1.0, 0.5, 0.9, -0.2):
        assert bool(torch.isfinite(pair.cross(x * factor, (0, 1))[0]).all())
    assert not pair.sender.rows.movable


@pytest.mark.parametrize("cast", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("codec", ["fixpoint:3(preset=acsgd)", "fixpoint:4(scale=token, rounding=stochastic)"])
def test_in_place_and_in_steps_are_the_same(codec, cast):
    """Payloads, values and rows; a diagnosis is made in steps."""
    fast, slow = Pair(f"delta({codec}, cache={cast})"), Pair(f"delta({codec}, cache={cast})")
    slow.sender.diagnose = True
    slow.receiver._fuses = False
    for step in range(6):
        x = data(2) * 1.1**step
        ends = [pair.cross(x, (0, 1)) for pair in (fast, slow)]
        assert torch.equal(ends[0][0], ends[1][0])
        assert torch.equal(ends[0][1], ends[1][1])
    assert fast.sender.digest() == slow.sender.digest() == fast.receiver.digest() == slow.receiver.digest()


@pytest.mark.parametrize("more", ["", ", key=slot", ", store=disk", ", cache=fp16", ", cache=fp32"])
def test_rows_are_moved_in_place(more):
    """The fast way is taken, wherever it can be: not where a diagnosis or a sample that comes twice forbids it."""
    text = f"delta(fixpoint:4{more})"
    pair, x, calls = Pair(text), data(2), []
    change = pair.sender.codec.encode_change
    pair.sender.codec.encode_change = lambda *given: calls.append(1) or change(*given)
    for ids in ((0, 1), (0, 1), (0, 1)):
        encode(pair.sender, x, context(ids))
    assert len(calls) == 2
    pair.sender.diagnose = True
    encode(pair.sender, x, context((0, 1)))
    pair.sender.diagnose = False
    encode(pair.sender, x, context((1, 1) if "slot" not in text else (0, 1)))
    assert len(calls) == (3 if "slot" in text else 2)


def test_by_slot_a_row_goes_on_from_whatever_was_in_its_place():
    pair, x = Pair("delta(fixpoint:8, key=slot, cache=fp32)"), data(4)
    first, payload = pair.cross(x[:2], (0, 1))
    assert payload.numel() == 4 * 2 * 80
    pair.cross(x[2:], (2, 3), microbatch=1)
    assert len(pair.sender.rows) == 4
    second, payload = pair.cross(x[2:], (8, 9))
    assert payload.numel() == 2 * 80 + 2 * 16
    plain = FixedPoint(bits=8)
    ctx = context((8, 9))
    change = decode(plain, encode(plain, x[2:] - first, ctx), ctx)
    assert torch.equal(second, first + change)


def test_by_batch_there_is_one_row_the_mean_of_what_was_decoded():
    pair, x = Pair("delta(fixpoint:4, key=batch)"), data(4)
    for i in range(3):
        decoded, _ = pair.cross(x + i, range(4), microbatch=i)
        kept = pair.sender.rows.load([0], context([0]), torch.zeros(1, *ROW))
        assert torch.allclose(kept, decoded.mean(0, keepdim=True), rtol=2**-8, atol=1e-6)
        assert len(pair.sender.rows) == 1


@pytest.mark.parametrize("key", ["sample", "slot", "batch"])
def test_first_visits_by_a_codec_of_any_length(key):
    pair, x = Pair(lambda: Delta(FixedPoint(bits=4), first=Sparse(1.0), key=key)), data(8)
    for ids in ((0, 1), (1, 2, 3), (4,), (), (0, 4, 7, 2)):
        decoded, payload = pair.cross(x[list(ids)], ids)
        assert payload.numel() <= pair.sender.max_bytes((len(ids), *ROW))
        if key == "sample":
            assert torch.allclose(decoded, x[list(ids)], atol=0.5)
    fresh, x = Pair(lambda: Delta(FixedPoint(bits=4), first=Sparse(1.0))), x.clone()
    x[0, 0] = 0.0
    assert torch.equal(fresh.cross(x[:2], (0, 1))[0], x[:2])
    assert fresh.cross(x[:3], (0, 1, 2))[1].numel() == 4 + 8 * 80 + 2 * 16 + 2 * 40


def test_a_length_is_checked_before_it_is_trusted():
    def ends():
        return Pair(lambda: Delta(FixedPoint(bits=4), first=Sparse(1.0)))

    pair, x = ends(), data(3)
    pair.cross(x[:2], (0, 1))
    before = pair.receiver.digest()
    ctx = context((0, 1, 2))
    payload = encode(pair.sender, x, ctx)
    for length in (0, 8, 639, 641, 648, 10**6, 2**32 - 1):
        wrong = payload.clone()
        wrong[:4] = torch.frombuffer(bytearray(length.to_bytes(4, "little")), dtype=torch.uint8)
        with pytest.raises(CodecError, match="malformed"):
            decode(pair.receiver, wrong, ctx)
    for size in (0, 3, 4, 100):
        with pytest.raises(CodecError, match="malformed"):
            decode(pair.receiver, payload[:size], ctx)
    with pytest.raises(CodecError, match="malformed"):
        decode(ends().receiver, torch.cat([payload, payload]), ctx)
    assert pair.receiver.digest() == before


@pytest.mark.parametrize("make", [
    lambda: Delta(Fitted(), first=Uncompressed(), cache="bf16"),
    lambda: Delta(Fitted(), first=Fitted(), cache="fp32"),
    lambda: EF21(Fitted()),
    lambda: EF21(Fitted(), key="sample"),
])  # fmt: skip
def test_codecs_with_a_state_inside(make):
    """It moves once a message at both ends, is part of the digest, and is saved."""
    pair, x = Pair(make), data(6)
    for step in range(12):
        ids = ((0, 1, 2), (2, 3, 4), (1,), (5, 0))[step % 4]
        pair.cross(x[list(ids)] + 0.1 * data(len(ids), seed=step), ids)
        if step == 7:
            resumed = Pair(make)
            resumed.step = pair.step
            for old, new in ((pair.sender, resumed.sender), (pair.receiver, resumed.receiver)):
                new.load_state_dict(copy.deepcopy(old.state_dict()))
            pair = resumed
    assert pair.sender.codec.met > 5
    digest = pair.sender.digest()
    pair.sender.codec.met += 1
    assert pair.sender.digest() != digest
    assert not isinstance(pair.sender.first, Fitted) or pair.sender.first.met > 0
    digest = pair.sender.digest()
    broken = data(7)
    broken[5, 0, 0] = torch.nan
    with pytest.raises(DivergedError):
        encode(pair.sender, broken, context(range(7)))
    assert pair.sender.digest() == digest, "also where the rows of the first part are finite"


@pytest.mark.parametrize("make", [lambda: Delta(Masked(), first=Masked()), lambda: EF21(Masked(), key="sample")])
def test_codecs_that_read_the_forward_tensor(make):
    """Each part is given the forward tensor of its own rows."""
    pair, x = Pair(make), data(4)
    assert pair.sender.uses_peer
    for ids in ((0, 1), (3, 1, 2), (2, 0)):
        peer = data(len(ids), seed=50 + sum(ids)).relu()
        decoded, _ = pair.cross(x[list(ids)], ids, peer=peer)
        assert torch.allclose(decoded[peer != 0], x[list(ids)][peer != 0], rtol=1e-2, atol=1e-2)
    assert not Delta(Uncompressed(), first=Uncompressed()).uses_peer


@pytest.mark.parametrize("kept", [0.1, 0.5])
def test_ef21_contracts_on_a_frozen_sample(kept):
    """|x - g|^2 shrinks by the share of elements sent, or faster, at each visit, whatever the key."""
    x = data(1)
    for key in ("sample", "slot", "batch"):
        pair = Pair(lambda key=key: EF21(Sparse(kept), key=key))
        rest = x.square().sum()
        for _ in range(20):
            decoded, _ = pair.cross(x, (0,))
            now = (x - decoded).square().sum()
            assert now <= (1 - kept) * rest * (1 + 1e-5)
            rest = now


def test_ef21_sends_first_visits_by_its_codec_from_zero():
    """All rows are one message of the codec, met or not."""
    pair, plain, x = Pair("ef21(fixpoint:4, key=sample)"), FixedPoint(bits=4), data(3)
    ctx = context((0, 1))
    first, payload = pair.cross(x[:2], (0, 1))
    assert torch.equal(payload, encode(plain, x[:2], ctx))
    assert pair.sender.num_bytes((2, *ROW)) == payload.numel()
    second, payload = pair.cross(x, (0, 1, 2))
    g = torch.cat([first, torch.zeros(1, *ROW)])
    ctx = context((0, 1, 2))
    assert torch.equal(second, g + decode(plain, encode(plain, x - g, ctx), ctx))
