"""Frames: what was sealed is what is unsealed, and anything else is named."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpipe.harness import frame
from thinpipe.harness.errors import FrameError

HEADER = frame.Header(
    backward=True,
    evaluation=False,
    boundary=2,
    microbatch=3,
    step=70_000,
    compressor=frame.compressor_id("fixpoint:4"),
    dtype="float32",
    shape=(4, 64, 128),
    ids_hash=frame.ids_hash((1, 2, 3, 4)),
    digest=0xDEADBEEF12345678,
)


def sealed(payload: bytes, header: frame.Header = HEADER, room: int = 0) -> bytearray:
    buffer = bytearray(frame.HEADER_BYTES + len(payload) + room)
    buffer[frame.HEADER_BYTES : frame.HEADER_BYTES + len(payload)] = payload
    assert frame.seal(memoryview(buffer), header, len(payload)) == frame.HEADER_BYTES + len(payload)
    return buffer


def test_the_header_is_64_bytes_so_that_payloads_stay_aligned():
    assert frame.HEADER_BYTES == 64


@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(256)) * 5])
def test_round_trip_also_in_a_larger_buffer(payload):
    length, digest = frame.unseal(memoryview(sealed(payload, room=100)), HEADER)
    assert (length, digest) == (len(payload), HEADER.digest)


def test_no_digest_is_told_apart_from_digest_zero():
    assert frame.unseal(memoryview(sealed(b"a", replace(HEADER, digest=None))), HEADER)[1] is None
    assert frame.unseal(memoryview(sealed(b"a", replace(HEADER, digest=0))), HEADER)[1] == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("backward", False),
        ("evaluation", True),
        ("boundary", 1),
        ("microbatch", 0),
        ("step", 70_001),
        ("compressor", frame.compressor_id("fixpoint:2")),
        ("dtype", "bfloat16"),
        ("shape", (4, 64, 127)),
        ("shape", (4, 64)),
        ("ids_hash", frame.ids_hash((1, 2, 4, 3))),
    ],
)
def test_every_disagreement_is_named(field, value):
    with pytest.raises(FrameError, match="samples" if field == "ids_hash" else field):
        frame.unseal(memoryview(sealed(b"payload")), replace(HEADER, **{field: value}))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=70), st.data())
def test_any_bit_flip_is_detected(payload, data):
    buffer = sealed(payload)
    bit = data.draw(st.integers(0, 8 * len(buffer) - 1))
    buffer[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FrameError):
        frame.unseal(memoryview(buffer), HEADER)


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=1, max_size=70), st.data())
def test_any_truncation_is_detected(payload, data):
    buffer = sealed(payload)
    with pytest.raises(FrameError):
        frame.unseal(memoryview(buffer[: data.draw(st.integers(0, len(buffer) - 1))]), HEADER)


def test_a_frame_longer_than_the_posted_buffer_is_refused_before_it_is_sent():
    with pytest.raises(FrameError, match="does not fit"):
        frame.seal(memoryview(bytearray(frame.HEADER_BYTES + 10)), HEADER, 11)


def test_five_dimensions_are_refused():
    with pytest.raises(FrameError, match="dimensions"):
        sealed(b"", replace(HEADER, shape=(1, 1, 1, 1, 1)))
