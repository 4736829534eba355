"""Which rank of a pipeline holds which stages. Pure.

>>> stages_of(1, PipelineSpec(stages=4, stages_per_rank=2, schedule="looped-bfs"))
(1, 3)
>>> neighbours(PipelineSpec(stages=4, stages_per_rank=2, schedule="zbv-zb"))
[(0, 1)]
"""

from __future__ import annotations

from thinpipe.harness.spec import PipelineSpec

V_SHAPED = ("zbv-zb", "dualpipev")


def rank_of(stage: int, pipe: PipelineSpec) -> int:
    """The rank that holds `stage`."""
    turn, place = divmod(stage, pipe.ranks)
    return pipe.ranks - 1 - place if pipe.schedule in V_SHAPED and turn % 2 else place


def stages_of(rank: int, pipe: PipelineSpec) -> tuple[int, ...]:
    """The stages of `rank`, ascending."""
    return tuple(stage for stage in range(pipe.stages) if rank_of(stage, pipe) == rank)


def boundaries(pipe: PipelineSpec) -> list[int]:
    """The boundaries that lie between two ranks: all, but for the turn of a V."""
    return [k for k in range(pipe.stages - 1) if rank_of(k, pipe) != rank_of(k + 1, pipe)]


def neighbours(pipe: PipelineSpec) -> list[tuple[int, int]]:
    """The pairs of ranks that exchange frames, each once, in order."""
    pairs = {(rank_of(k, pipe), rank_of(k + 1, pipe)) for k in boundaries(pipe)}
    return sorted({(min(pair), max(pair)) for pair in pairs})
