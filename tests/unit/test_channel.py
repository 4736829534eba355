"""A channel's two ends over a wire of lists: order, checks, counters, and what happens when something is wrong."""

import pytest
import torch

from thinpipe.harness import channel as channel_module
from thinpipe.harness import frame
from thinpipe.harness.channel import Channel, Policy
from thinpipe.harness.compression import grammar
from thinpipe.harness.errors import CodecError, DivergedError, FrameError, RunError
from thinpipe.harness.recorder import Recorder

SHAPE = (2, 5, 8)


class Wire:
    """Stands in for torch.distributed: first in, first out; `tamper` may change a message on its way."""

    def __init__(self):
        self.queue = []
        self.tags = {"sent": [], "posted": []}
        self.tamper = lambda data: data

    def isend(self, tensor, tag, **_):
        self.tags["sent"].append(tag)
        self.queue.append(self.tamper(bytearray(tensor.numpy().tobytes())))
        return Done(lambda: None)

    def irecv(self, buffer, tag, **_):
        self.tags["posted"].append(tag)
        return Done(lambda: self.deliver(buffer))

    def deliver(self, buffer):
        if not self.queue:
            raise RuntimeError("timed out")
        data = self.queue.pop(0)
        buffer[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)


class Done:
    def __init__(self, act):
        self.act = act

    def wait(self, timeout):
        assert timeout.total_seconds() == 7.0
        self.act()


@pytest.fixture
def wire(monkeypatch):
    wire = Wire()
    monkeypatch.setattr(channel_module.dist, "isend", wire.isend)
    monkeypatch.setattr(channel_module.dist, "irecv", wire.irecv)
    return wire


def ends(*texts, seed=0, boundary=1, direction="forward"):
    def end(sends):
        return Channel(
            boundary=boundary, direction=direction, sends=sends, rank=1 if sends else 2, peer=2 if sends else 1,
            group=None,
            compressors={t: grammar.build(t) for t in ("none", *texts)}, shape=SHAPE, microbatches=2, seed=seed,
            recorder=Recorder("run", 0), policy=Policy(digest_every=1, sample_every=1, limit_s=7.0),
        )  # fmt: skip

    return end(True), end(False)


def step(sender, receiver, tensors, number=0, *, ids=((0, 1), (2, 3)), their_ids=None, **kwargs):
    kwargs = {"training": True, "use": "none", **kwargs}
    sender.begin_step(number, ids, **kwargs)
    receiver.begin_step(number, their_ids or ids, **kwargs)
    for i, x in enumerate(tensors):
        sender.send(i, x)
    got = [receiver.receive(i).clone() for i in range(len(tensors))]
    receiver.finish_step()
    return got, sender.finish_step()


def tensors(seed=0):
    torch.manual_seed(seed)
    return [torch.randn(SHAPE) for _ in range(2)]


def test_none_arrives_bit_for_bit_and_is_counted(wire):
    sender, receiver = ends()
    sent = tensors()
    got, traffic = step(sender, receiver, sent)
    assert all(torch.equal(a, b) for a, b in zip(sent, got, strict=True))
    raw = 2 * 4 * 80
    assert (traffic.messages, traffic.raw_bytes, traffic.payload_bytes) == (2, raw, raw)
    assert traffic.frame_bytes == raw + 2 * frame.HEADER_BYTES
    assert (sender.messages, sender.bytes) == (receiver.messages, receiver.bytes) == (2, traffic.frame_bytes)


def test_a_micro_batch_has_a_tag_of_its_own_on_every_channel(wire):
    """Schedules may send them in another order than they are received in."""
    seen = set()
    for boundary in (0, 1):
        for direction in ("forward", "backward"):
            wire.tags = {"sent": [], "posted": []}
            step(*ends(boundary=boundary, direction=direction), tensors())
            assert wire.tags["sent"] == wire.tags["posted"]
            assert not seen & set(wire.tags["sent"])
            seen |= set(wire.tags["sent"])
    assert len(seen) == 2 * 2 * 2


def test_what_is_recorded_names_boundary_and_micro_batch_counted_through_the_passes_of_a_step(wire):
    sender, receiver = ends()
    for offset in (0, 2):
        sender.offset = receiver.offset = offset
        step(sender, receiver, tensors())
    for end, phases in ((sender, ("encode", "send")), (receiver, ("wait_receive", "decode"))):
        spans = end.recorder.rows["spans"]
        assert {(row["boundary"], row["direction"], row["stage"]) for row in spans} == {(1, "forward", None)}
        for phase in phases:
            assert [row["microbatch"] for row in spans if row["phase"] == phase] == [0, 1, 2, 3]
    assert [row["microbatch"] for row in sender.recorder.rows["spans"] if row["phase"] == "wait_send"] == [-1, -1]


def test_traffic_of_the_passes_of_a_step_adds_up(wire):
    sender, receiver = ends("delta(fixpoint:4)")
    kwargs = {"use": "delta(fixpoint:4)"}
    (_, first), (_, second) = (step(sender, receiver, tensors(seed), **kwargs) for seed in (0, 1))
    first.add(second)
    assert (first.messages, first.raw_bytes) == (4, 4 * 4 * 80)
    assert first.frame_bytes == sender.bytes == first.payload_bytes + 4 * frame.HEADER_BYTES
    assert {"rel_error", "mean_abs_change"} <= set(first.samples)


def test_delta_sends_a_sample_in_full_once_and_both_ends_agree(wire):
    sender, receiver = ends("delta(fixpoint:4)")
    sizes = []
    for number in range(3):
        got, traffic = step(sender, receiver, tensors(), number, use="delta(fixpoint:4)")
        sizes.append(traffic.payload_bytes)
    assert sizes[0] >= 2 * 4 * 80 > 4 * sizes[1]
    assert sizes[1] == sizes[2]
    assert all(torch.allclose(a, b, atol=0.2) for a, b in zip(tensors(), got, strict=True))
    assert {"rel_error", "mean_abs", "mean_abs_change"} <= set(traffic.samples)


def test_a_memory_that_watches_warm_up_has_seen_its_samples(wire):
    sender, receiver = ends("delta(fixpoint:4)")
    step(sender, receiver, tensors(), 0, use="none", watch=["delta(fixpoint:4)"])
    _, traffic = step(sender, receiver, tensors(), 1, use="delta(fixpoint:4)")
    assert traffic.payload_bytes < 4 * 80


def test_evaluation_leaves_memories_alone(wire):
    sender, receiver = ends("delta(fixpoint:4)", "fixpoint:4")
    step(sender, receiver, tensors(), 0, use="delta(fixpoint:4)")
    before = sender.compressors["delta(fixpoint:4)"].digest()
    step(sender, receiver, tensors(5), 0, use="fixpoint:4", training=False)
    assert sender.compressors["delta(fixpoint:4)"].digest() == before
    assert receiver.compressors["delta(fixpoint:4)"].digest() == before


def test_a_corrupted_frame_names_rank_boundary_step_and_microbatch(wire):
    sender, receiver = ends()

    def flip(data):
        data[100] ^= 1
        return data

    wire.tamper = flip
    with pytest.raises(FrameError, match=r"rank 2, boundary 1 forward, step 4, micro-batch 0: .*corrupted"):
        step(sender, receiver, tensors(), 4)


def test_mismatched_sample_ids_are_named(wire):
    sender, receiver = ends()
    with pytest.raises(FrameError, match=r"rank 2.*step 0.*samples"):
        step(sender, receiver, tensors(), their_ids=((0, 1), (3, 2)))


def test_memories_that_parted_are_noticed(wire):
    sender, receiver = ends("delta(fixpoint:4)")
    step(sender, receiver, tensors(), 0, use="delta(fixpoint:4)")
    receiver.compressors["delta(fixpoint:4)"] = grammar.build("delta(fixpoint:4)")
    with pytest.raises(FrameError, match="memories differ"):
        step(sender, receiver, tensors(), 1, use="delta(fixpoint:4)")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("text", ["none", "fp16", "bf16", "fixpoint:4", "delta(fixpoint:4)"])
def test_a_non_finite_activation_is_divergence(wire, text, value):
    sender, receiver = ends(text)
    bad = tensors()
    bad[1][1, 2, 3] = value
    with pytest.raises(DivergedError, match=r"rank 1, boundary 1 forward, step 0, micro-batch 1"):
        step(sender, receiver, bad, use=text)


def test_a_codec_that_makes_one_is_a_failure(wire):
    sender, receiver = ends("fp16")
    with pytest.raises(CodecError, match="fp16"):
        step(sender, receiver, [x * 1e6 for x in tensors()], use="fp16")


def test_a_decoded_non_finite_value_is_caught_whatever_made_it():
    bad = torch.ones(SHAPE)
    bad[0, 0, 0] = float("inf")
    with pytest.raises(CodecError, match="fixpoint:4"):
        channel_module.check_decoded(bad, grammar.build("fixpoint:4"))
    channel_module.check_decoded(torch.full(SHAPE, 3e38), grammar.build("none"))  # the sum overflows, no element did


def test_a_receive_that_never_completes_says_what_it_waited_for(wire):
    _, receiver = ends()
    receiver.begin_step(3, ((0, 1), (2, 3)), training=True, use="none")
    with pytest.raises(RunError, match=r"rank 2, boundary 1 forward, step 3, micro-batch 0: .*rank 1.*7 s"):
        receiver.receive(0)
