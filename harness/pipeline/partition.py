"""Model -> stages. Pure: which consecutive blocks each stage holds.

>>> balance([1, 1, 1, 1, 1], 3)
[range(0, 2), range(2, 4), range(4, 5)]
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence

from thinpipe.harness.errors import UserError
from thinpipe.harness.models.base import ModelShape, StagePart


def split(shape: ModelShape, stages: int, cuts: Sequence[int] | None = None) -> tuple[StagePart, ...]:
    """The parts of `stages` stages: as `cuts` say (the blocks that stages 1, 2, ... begin with), else balanced by
    estimated time. The embeddings go with the first block, the head with the last; every block is in exactly one
    part. Raises UserError where there are fewer blocks than stages, or a cut is none between two blocks."""
    if stages > shape.layers:
        raise UserError(
            f"pipeline.stages {stages} is more than the model's {shape.layers} blocks, and every stage needs "
            f"one; use at most {shape.layers} stages or a model with more layers."
        )
    if cuts is None:
        costs = [float(count) for count in shape.flops_per_block]
        costs[-1] += shape.flops_head
        ranges = _balanced(tuple(costs), stages)
    else:
        if cuts and cuts[-1] >= shape.layers:
            raise UserError(
                f"pipeline.cuts {list(cuts)}: the model's blocks are 0..{shape.layers - 1}, so a stage can begin with "
                f"block {shape.layers - 1} at the latest."
            )
        ranges = [range(start, stop) for start, stop in itertools.pairwise([0, *cuts, shape.layers])]
    assert [block for blocks in ranges for block in blocks] == list(range(shape.layers)), "a block was dropped"
    return tuple(
        StagePart(index, stages, blocks, first=index == 0, last=index == stages - 1)
        for index, blocks in enumerate(ranges)
    )


@functools.lru_cache(maxsize=256)
def _balanced(costs: tuple[float, ...], stages: int) -> list[range]:
    """A plan asks for the same cuts again and again."""
    return balance(costs, stages)


def balance(costs: Sequence[float], stages: int) -> list[range]:
    """Cut 0..len(costs) into `stages` non-empty consecutive ranges so that the most costly one costs least.

    Of the cuts that reach this minimum, the most even one (least sum of squares), then the one whose early
    stages are longest: a minimax cut alone may leave a stage with nearly nothing. costs: finite, >= 0.
    O(stages len(costs)^2).
    """
    assert 1 <= stages <= len(costs), f"{stages} stages for {len(costs)} blocks"
    assert all(cost >= 0 and math.isfinite(cost) for cost in costs), costs
    ends = list(itertools.accumulate(costs, initial=0.0))

    limit = _solve(ends, stages, math.inf, max)[0]
    _, cuts = _solve(ends, stages, limit, lambda rest, cost: rest + cost * cost)
    return [range(start, stop) for start, stop in itertools.pairwise(cuts)]


def _solve(
    ends: list[float], stages: int, limit: float, combine: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """Dynamic programme over suffixes: the least combined cost of cutting blocks i.. into k ranges of at most
    `limit` each, and the cuts that reach it (ties: the longest first range)."""
    size = len(ends) - 1
    best: list[tuple[float, tuple[int, ...]]] = [(math.inf, ())] * size + [(0.0, (size,))]
    for left in range(1, stages + 1):
        current: list[tuple[float, tuple[int, ...]]] = [(math.inf, ())] * (size + 1)
        for start in range(size - left + 1):
            for stop in range(size - left + 1, start, -1):
                cost = ends[stop] - ends[start]
                value = combine(best[stop][0], cost) if cost <= limit else math.inf
                if value < current[start][0]:
                    current[start] = (value, (start, *best[stop][1]))
        best = current
    return best[0]
