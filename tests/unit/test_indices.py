"""Lists of positions: round trips, lengths against entropy and bound, and that no bytes make the reader stray."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpipe.harness.compression import indices
from thinpipe.harness.compression.kernels import positions as kernel
from thinpipe.harness.errors import CodecError


def written(positions: np.ndarray, count: int) -> np.ndarray:
    most = indices.max_bytes(count, positions.size)
    out = np.full(most + 5, 0xA5, np.uint8)
    size = indices.encode(positions, count, out[:most])
    assert (out[most:] == 0xA5).all(), "wrote outside its buffer"
    return out[:size]


def chosen(count: int, share: float, seed: int = 0) -> np.ndarray:
    picked = np.random.default_rng(seed).permutation(count)[: round(share * count)]
    return np.sort(picked).astype(np.int32)


@given(st.integers(1, 3000).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
@settings(max_examples=80, deadline=None)
def test_round_trip(case: tuple[int, set[int]]) -> None:
    count, places = case
    positions = np.array(sorted(places), np.int32)
    payload = written(positions, count)
    found, used = indices.decode(np.concatenate([payload, np.zeros(4, np.uint8)]), count, positions.size)
    assert used == payload.size, "what comes after is not its own"
    assert found.tolist() == positions.tolist()


@pytest.mark.parametrize("share", [0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9])
def test_random_positions_take_nearly_their_entropy(share: float) -> None:
    count = 100_000
    ideal = -count * (share * math.log2(share) + (1 - share) * math.log2(1 - share))
    payload = written(chosen(count, share), count)
    # From a half on the bitmap is as good as any Rice code, and entropy goes down again.
    limit = 1.05 * ideal if share <= 0.5 else count
    assert 8 * (payload.size - indices.HEADER.size) <= limit + 8


def test_each_way_is_taken_where_it_is_shortest() -> None:
    count = 4096
    assert written(chosen(count, 0.7), count)[0] == kernel.BITMAP
    assert written(chosen(count, 0.05), count)[0] == kernel.RICE + 4
    runs = np.concatenate([np.arange(100, 1100), np.arange(3000, 3500)]).astype(np.int32)
    payload = written(runs, count)
    assert payload[0] == kernel.PACKED
    assert payload.size < 200
    assert written(np.arange(count, dtype=np.int32), count).size == indices.HEADER.size + count // 64


@pytest.mark.parametrize(("count", "most"), [(1, 1), (64, 3), (1000, 10), (1000, 1000), (5000, 50)])
def test_no_list_is_longer_than_the_bound(count: int, most: int) -> None:
    pick = random.Random(count)
    lists = [sorted(pick.sample(range(count), pick.randint(0, most))) for _ in range(50)]
    lists += [list(range(most)), list(range(count - most, count)), [count - 1], [*range(most - 1), count - 1]]
    lists += [list(range(count - 1, -1, -(count // most)))[:most][::-1]]
    for positions in lists:
        assert written(np.array(positions, np.int32), count).size <= indices.max_bytes(count, most)


def array(data: bytes) -> np.ndarray:
    return np.frombuffer(bytearray(data), np.uint8)


def refused_or_sound(payload: np.ndarray, count: int, most: int) -> bool:
    """Whether it was refused; what was not must be positions."""
    try:
        found, used = indices.decode(payload, count, most)
    except CodecError:
        return True
    assert 0 <= used <= payload.size
    assert found.size <= most
    assert found.size == 0 or (found[0] >= 0 and found[-1] < count and (np.diff(found) > 0).all())
    return False


@given(st.binary(max_size=80), st.integers(0, 35), st.integers(0, 40), st.integers(1, 2000))
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_positions_or_refused(body: bytes, mode: int, size: int, count: int) -> None:
    payload = array(indices.HEADER.pack(mode, size) + body)
    refused = refused_or_sound(payload, count, 30)
    assert refused or size <= 30


@pytest.mark.parametrize("share", [0.02, 0.2, 0.6])
def test_cut_short_or_damaged(share: float) -> None:
    count = 700
    positions = chosen(count, share)
    payload = written(positions, count)
    for size in range(payload.size):
        assert refused_or_sound(payload[:size], count, positions.size)
    for bit in range(8 * payload.size):
        damaged = payload.copy()
        damaged[bit // 8] ^= 1 << bit % 8
        refused_or_sound(damaged, count, positions.size)


def test_a_count_that_cannot_be_is_refused_before_anything_is_allocated() -> None:
    huge = array(indices.HEADER.pack(kernel.RICE, 2**32 - 1) + b"\xff" * 40)
    with pytest.raises(CodecError, match="malformed"):
        indices.decode(huge, 2**31 - 1, 1000)
    unary = array(indices.HEADER.pack(kernel.RICE + kernel.RICE_MAX, 3) + b"\0" * 4000 + b"\x80")
    with pytest.raises(CodecError, match="malformed"):
        indices.decode(unary, 2**31 - 1, 1000)
