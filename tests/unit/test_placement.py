"""Which rank holds which stages, against what the schedules of torch take for granted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinpipe.harness.pipeline import placement
from thinpipe.harness.spec import PipelineSpec

SINGLE = ("gpipe", "1f1b")
LOOPED = ("interleaved-1f1b", "looped-bfs", "interleaved-zb")


@st.composite
def pipelines(draw):
    schedule = draw(st.sampled_from((*SINGLE, *LOOPED, *placement.V_SHAPED)))
    if schedule in SINGLE:
        each = 1
    else:
        each = 2 if schedule in placement.V_SHAPED else draw(st.integers(2, 5))
    ranks = draw(st.integers(1, 8))
    return PipelineSpec(stages=ranks * each, stages_per_rank=each, schedule=schedule)


@given(pipelines())
def test_every_stage_is_on_one_rank_and_every_rank_has_its_number(pipe):
    held = [placement.stages_of(rank, pipe) for rank in range(pipe.ranks)]
    assert sorted(stage for stages in held for stage in stages) == list(range(pipe.stages))
    assert {len(stages) for stages in held} == {pipe.stages_per_rank}
    for rank, stages in enumerate(held):
        assert list(stages) == sorted(stages)
        assert {placement.rank_of(stage, pipe) for stage in stages} == {rank}


@given(pipelines())
def test_stages_go_round_or_back_in_a_v(pipe):
    for rank in range(pipe.ranks):
        stages = placement.stages_of(rank, pipe)
        if pipe.schedule in placement.V_SHAPED:
            assert stages == (rank, 2 * pipe.ranks - 1 - rank)
        else:
            assert stages == tuple(range(rank, pipe.stages, pipe.ranks))


@given(pipelines())
def test_boundaries_between_ranks_are_those_frames_cross(pipe):
    between = placement.boundaries(pipe)
    inside = sorted(set(range(pipe.stages - 1)) - set(between))
    for at in range(pipe.stages - 1):
        same = placement.rank_of(at, pipe) == placement.rank_of(at + 1, pipe)
        assert (at in inside) == same
    if pipe.ranks == 1:
        assert between == []
    elif pipe.schedule in placement.V_SHAPED:
        assert inside == [pipe.ranks - 1], "the turn of the V"
    else:
        assert inside == []


@given(pipelines())
def test_neighbours_are_each_pair_once_and_nothing_else(pipe):
    pairs = placement.neighbours(pipe)
    assert pairs == sorted(set(pairs))
    assert all(0 <= low < high < pipe.ranks for low, high in pairs)
    wanted = {
        frozenset((placement.rank_of(at, pipe), placement.rank_of(at + 1, pipe))) for at in placement.boundaries(pipe)
    }
    assert {frozenset(pair) for pair in pairs} == wanted
    reached = {0}
    for low, high in pairs * pipe.ranks:
        reached |= {low, high} if reached & {low, high} else set()
    assert reached == set(range(pipe.ranks)), "every rank has a way to every other"


@pytest.mark.parametrize(
    ("schedule", "stages", "each", "pairs"),
    [
        ("gpipe", 1, 1, []),
        ("gpipe", 3, 1, [(0, 1), (1, 2)]),
        ("looped-bfs", 4, 2, [(0, 1)]),
        # From the last rank back to the first: a pair of its own.
        ("interleaved-1f1b", 6, 2, [(0, 1), (0, 2), (1, 2)]),
        ("zbv-zb", 6, 2, [(0, 1), (1, 2)]),
        ("dualpipev", 8, 2, [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_pairs(schedule, stages, each, pairs):
    pipe = PipelineSpec(stages=stages, stages_per_rank=each, schedule=schedule)
    assert placement.neighbours(pipe) == pairs
