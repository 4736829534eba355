"""ef and ef-mixed: what is decoded sums up to what was to be sent, but for the last error."""

import copy

import pytest
import torch
from toy_codecs import Fitted, Masked, Sparse

from thinpipe.harness.compression import grammar
from thinpipe.harness.compression.base import Context
from thinpipe.harness.compression.codecs.fixpoint import FixedPoint
from thinpipe.harness.compression.memories.ef import ErrorFeedback
from thinpipe.harness.compression.memories.ef_mixed import MixedErrorFeedback
from thinpipe.harness.errors import CodecError, DivergedError

ROW = (4, 8)
both = pytest.mark.parametrize("kind", [ErrorFeedback, MixedErrorFeedback])


def data(count, seed=0):
    return torch.randn((count, *ROW), generator=torch.Generator().manual_seed(seed))


def context(ids, **more):
    return Context((len(ids), *ROW), sample_ids=tuple(ids), **more)


def build(kind, *given, **options):
    memory = kind(*given, **options)
    memory.name = "toy"
    return memory


def encode(memory, x, ctx, decoded=None):
    out = torch.zeros(memory.max_bytes(ctx.shape), dtype=torch.uint8)
    n = memory.encode(x, ctx, out) if decoded is None else memory.encode_decoded(x, ctx, out, decoded)
    return out[:n]


def decode(memory, payload, ctx):
    return memory.decode(payload, ctx, torch.full(ctx.shape, 9.0))


def error(memory, identity):
    return memory.rows.load([identity], context([identity]), torch.zeros(1, *ROW))[0]


@both
@pytest.mark.parametrize("inner", [lambda: FixedPoint(bits=2), lambda: Sparse(0.1)], ids=["fixpoint", "sparse"])
@pytest.mark.parametrize("key", ["sample", "slot"])
def test_nothing_is_lost_or_sent_twice(kind, inner, key):
    """By row: sum of decoded + error = sum of inputs, with samples missing, and twice in a message."""
    sender, receiver = build(kind, inner(), key=key), build(kind, inner(), key=key)
    sent, made = torch.zeros(6, *ROW), torch.zeros(6, *ROW)
    for step in range(60):
        ids = ((0, 1, 2), (3, 4, 5), (2, 2, 0), (1, 1, 1))[step % 4]
        x, ctx = data(3, seed=step), context(ids, step=step, microbatch=step % 2)
        decoded = decode(receiver, encode(sender, x, ctx), ctx)
        rows = ids if key == "sample" else [3 * (step % 2) + i for i in range(3)]
        for i, row in enumerate(rows):
            sent[row] += x[i]
            made[row] += decoded[i]
    for row in range(6):
        assert torch.allclose(made[row] + error(sender, row), sent[row], atol=1e-4)
        assert error(sender, row).abs().max() > 0.01
    assert len(receiver.rows) == 0


@both
def test_by_batch_the_mean_loses_nothing(kind):
    sender = build(kind, FixedPoint(bits=2), key="batch")
    sent, made = torch.zeros(ROW), torch.zeros(ROW)
    for step in range(40):
        x, ctx = data(4, seed=step), context(range(4 * step, 4 * step + 4), step=step, microbatch=step % 3)
        decoded = torch.zeros(ctx.shape)
        encode(sender, x, ctx, decoded)
        sent, made = sent + x.mean(0), made + decoded.mean(0)
    assert torch.allclose(made + error(sender, 0), sent, atol=1e-4)
    assert len(sender.rows) == 1


def test_error_feedback_is_as_published():
    """By the formula, slot by slot: send C(x + e), e <- x + e - C(x + e)."""
    memory, plain, e = build(ErrorFeedback, FixedPoint(bits=2)), FixedPoint(bits=2), torch.zeros(3, *ROW)
    for step in range(5):
        x, ctx = data(3, seed=step), context(range(3 * step, 3 * step + 3), step=step)
        payload = encode(plain, x + e, ctx)
        assert torch.equal(encode(memory, x, ctx), payload)
        e = x + e - decode(plain, payload, ctx)
        assert torch.equal(torch.stack([error(memory, i) for i in range(3)]), e)


@both
def test_a_mixed_message_takes_both_parts(kind):
    memory, x = build(kind, FixedPoint(bits=2)), data(3)
    for step in range(3):
        size = encode(memory, x, context((0, 1, 2), step=step)).numel()
        assert size == memory.num_bytes((3, *ROW)) == (2 if kind is MixedErrorFeedback else 1) * (3 * 8 + 2 * 8)
    sparse = build(kind, Sparse(0.25))
    assert sparse.num_bytes((3, *ROW)) is None
    sizes = [encode(sparse, x, context((0, 1, 2), step=step)).numel() for step in range(2)]
    assert sizes == ([4 + 8 * 24, 4 + 2 * 8 * 24] if kind is MixedErrorFeedback else [8 * 24] * 2)


def test_the_two_parts_draw_apart():
    """With one draw for both, the errors of one would be those of the other."""
    memory, x = build(MixedErrorFeedback, FixedPoint(bits=2, rounding="stochastic"), cache="fp32"), data(2)
    encode(memory, x, context((0, 1), step=1))
    memory.rows.data[:2] = x.view(2, -1)
    payload = encode(memory, x, context((0, 1), step=2))
    half = payload.numel() // 2
    assert not torch.equal(payload[:half], payload[half:])


def test_a_length_in_a_mixed_message_is_checked():
    sender, receiver = (build(MixedErrorFeedback, Sparse(0.25)) for _ in range(2))
    ctx = context((0, 1))
    payload = encode(sender, data(2), ctx)
    for length in (4, 7, 8 * 16 + 1, 8 * 16 + 8, 2**32 - 1):
        wrong = payload.clone()
        wrong[:4] = torch.frombuffer(bytearray(length.to_bytes(4, "little")), dtype=torch.uint8)
        with pytest.raises(CodecError, match="malformed"):
            decode(receiver, wrong, ctx)
    for size in (0, 3, 50):
        with pytest.raises(CodecError, match="malformed"):
            decode(receiver, payload[:size], ctx)


@both
def test_codecs_with_a_state_inside(kind):
    """Both ends' codecs move alike; the receiver saves no rows, but what its codec needs."""
    sender, receiver = build(kind, Fitted()), build(kind, Fitted())
    for step in range(20):
        x, ctx = data(2, seed=step), context((0, 1), step=step)
        known = torch.zeros(ctx.shape)
        assert torch.equal(decode(receiver, encode(sender, x, ctx, known), ctx), known)
        assert sender.codec.digest() == receiver.codec.digest()
        if step == 9:
            states = copy.deepcopy([sender.state_dict(), receiver.state_dict()])
            sender, receiver = build(kind, Fitted()), build(kind, Fitted())
            sender.load_state_dict(states[0])
            receiver.load_state_dict(states[1])
            assert states[1]["ids"].numel() == states[1]["rows"].numel() == 0
    assert sender.codec.met == 20
    if kind is MixedErrorFeedback:
        assert sender.second.digest() == receiver.second.digest() != sender.codec.digest()


@both
def test_codecs_that_read_the_forward_tensor(kind):
    memory, peer = build(kind, Masked()), data(3, seed=9).relu()
    assert memory.uses_peer
    decoded = torch.zeros(3, *ROW)
    encode(memory, data(3), context((0, 1, 2), peer=peer), decoded)
    assert torch.equal(decoded != 0, peer != 0)
    for i in range(3):
        # What the forward tensor rules out is not lost, so no later message may bring it back.
        assert not bool(error(memory, i)[peer[i] == 0].any())


@both
def test_a_non_finite_value_is_found_where_the_forward_tensor_hides_it(kind):
    memory, peer = build(kind, Masked()), data(3, seed=9).relu()
    x = data(3)
    x[peer == 0] = float("nan")
    with pytest.raises(DivergedError, match="non-finite"):
        encode(memory, x, context((0, 1, 2), peer=peer))


def test_what_cannot_be_kept_or_sent():
    small = build(ErrorFeedback, Sparse(0.1), cache="fp16")
    x = data(1)
    x[0, 0, :2] = torch.tensor([2e5, 1e5])
    x[0, 1:] = 1e5
    with pytest.raises(CodecError, match="use cache=bf16"):
        encode(small, x, context((0,)))
    assert len(small.rows) == 0
    huge, x = build(ErrorFeedback, Sparse(0.1)), torch.full((1, *ROW), 3e38)
    encode(huge, x, context((0,)))
    before = copy.deepcopy(huge.state_dict())
    with pytest.raises(CodecError, match="the error added to it are not finite"):
        encode(huge, x, context((0,), step=1))
    assert torch.equal(huge.state_dict()["rows"], before["rows"])


def test_bits_as_configured():
    assert [grammar.bits(f"{name}(fixpoint:4)") for name in ("ef", "ef21", "ef-mixed")] == [4.0, 4.0, 8.0]
