"""Cutting a model into stages: tables, and every cut of small cases compared with all cuts there are."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinpipe.harness.errors import UserError
from thinpipe.harness.models.base import ModelShape
from thinpipe.harness.pipeline.partition import balance, split


def shape(layers: int, *, blocks: tuple[int, ...] | None = None, head: int = 0) -> ModelShape:
    """A model whose blocks take that many multiply-adds; its parameters say the opposite, and do not count."""
    flops = blocks or (10,) * layers
    return ModelShape(
        kind="lm",
        layers=layers,
        width=8,
        heads=2,
        vocab_size=300,
        positions=64,
        num_labels=0,
        parameters_per_block=tuple(1000 - count for count in flops),
        parameters_embedding=10**6,
        parameters_head=10**6 - head,
        flops_per_block=flops,
        flops_head=head,
        activations_per_block=(1,) * layers,
        activations_embedding=1,
        activations_head=1,
        boundaries=((64, 8),) * (layers - 1),
        relu=False,
        shared="",
    )


def lengths(costs: list[float], stages: int) -> list[int]:
    return [len(blocks) for blocks in balance(costs, stages)]


@pytest.mark.parametrize(
    ("costs", "stages", "expected"),
    [
        ([1], 1, [1]),
        ([1] * 4, 1, [4]),
        ([1] * 4, 2, [2, 2]),
        ([1] * 4, 4, [1, 1, 1, 1]),
        ([1] * 5, 2, [3, 2]),
        ([1] * 5, 3, [2, 2, 1]),
        ([1] * 12, 5, [3, 3, 2, 2, 2]),
        ([9, 1, 1, 1, 9], 3, [1, 3, 1]),
        ([1, 1, 1, 9], 2, [3, 1]),
        ([9, 1, 1, 1], 2, [1, 3]),
        # The largest stage is 100 however the rest is cut; the rest is cut evenly all the same.
        ([100, 1, 1, 1, 1], 3, [1, 2, 2]),
        ([0, 0, 0], 3, [1, 1, 1]),
    ],
)
def test_table(costs, stages, expected):
    assert lengths(costs, stages) == expected


@st.composite
def cases(draw):
    costs = draw(st.lists(st.one_of(st.integers(0, 50), st.floats(0, 1e12)), min_size=1, max_size=8))
    return costs, draw(st.integers(1, len(costs)))


@given(cases())
def test_no_other_cut_is_better_and_no_block_is_dropped_or_repeated(case):
    costs, stages = case
    parts = balance(costs, stages)
    assert len(parts) == stages
    assert all(len(part) for part in parts)
    assert [block for part in parts for block in part] == list(range(len(costs)))

    def largest(ranges):
        return max(math.fsum(costs[block] for block in part) for part in ranges)

    every = (
        [range(a, b) for a, b in itertools.pairwise((0, *inner, len(costs)))]
        for inner in itertools.combinations(range(1, len(costs)), stages - 1)
    )
    assert largest(parts) <= min(map(largest, every)) * (1 + 1e-9) + 1e-3


@given(st.integers(1, 12), st.integers(0, 200), st.booleans(), st.data())
def test_split_covers_every_block_once(layers, head, explicit, data):
    stages = data.draw(st.integers(1, layers))
    choices = list(itertools.combinations(range(1, layers), stages - 1))
    cuts = data.draw(st.sampled_from(choices)) if explicit else None
    parts = split(shape(layers, head=head), stages, cuts)
    if cuts is not None:
        assert tuple(part.blocks[0] for part in parts[1:]) == cuts
    assert [block for part in parts for block in part.blocks] == list(range(layers))
    assert [part.index for part in parts] == list(range(stages))
    assert {part.num_stages for part in parts} == {stages}
    assert [part.first for part in parts] == [True] + [False] * (stages - 1)
    assert [part.last for part in parts] == [False] * (stages - 1) + [True]


def test_stages_are_even_in_time_with_the_head_on_the_last():
    def cut(**sizes):
        return [len(part.blocks) for part in split(shape(6, **sizes), 3)]

    assert cut() == [2, 2, 2]
    assert cut(head=20) == [3, 2, 1]
    assert cut(head=10, blocks=(30, 10, 10, 10, 10, 10)) == [1, 3, 2]
    assert cut(head=30, blocks=(40, 10, 10, 10, 10, 10)) == [1, 4, 1]


@pytest.mark.parametrize("cuts", [(4,), (2, 9)])
def test_a_cut_behind_the_last_block_is_refused(cuts):
    with pytest.raises(UserError, match=r"pipeline\.cuts .*: the model's blocks are 0\.\.3, .*block 3 at the latest"):
        split(shape(4), len(cuts) + 1, cuts)


def test_more_stages_than_blocks_is_refused():
    with pytest.raises(UserError, match=r"stages 5 is more than the model's 4 blocks.*at most 4"):
        split(shape(4), 5)


def test_a_cost_that_is_no_cost_is_our_own_bug():
    with pytest.raises(AssertionError):
        balance([1.0, math.nan], 1)
