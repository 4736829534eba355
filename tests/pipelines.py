"""Spans of pipelines that never ran, from a schedule and the seconds its parts take: what tests of traces read."""

from __future__ import annotations

from collections.abc import Sequence


def gpipe(
    ranks: int,
    microbatches: int,
    *,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
    transfer: float = 0.0,
    codec: float = 0.0,
    steps: int = 1,
    groups: int = 1,
    optimizer: float = 0.5,
    start: float = 1000.0,
) -> list[dict]:
    """GPipe with one stage a rank. Links carry one frame after the other, a frame in `transfer` s; forward, backward:
    seconds of a micro-batch, of every stage or a number each."""
    rows: list[dict] = []
    for group in range(groups):
        clock = start
        for step in range(steps):
            clock = _step(
                rows,
                ranks,
                microbatches,
                group,
                step,
                start=clock,
                compute=(forward, backward),
                transfer=transfer,
                codec=codec,
            )
            for rank in range(ranks):
                rows.append(_row(group * ranks + rank, step, "optimizer", clock, clock + optimizer))
            clock += optimizer
    return rows


def _row(rank, step, phase, start, end, *, microbatch=-1, direction=None, boundary=None, stage=None) -> dict:
    return {
        "run_id": "0" * 12,
        "rank": rank,
        "step": step,
        "microbatch": microbatch,
        "phase": phase,
        "direction": direction,
        "boundary": boundary,
        "stage": stage,
        "start_s": start,
        "end_s": end,
    }


def _step(rows, ranks, microbatches, group, step, *, start, compute, transfer, codec) -> float:
    now = [start] * ranks
    for direction, seconds in zip(("forward", "backward"), compute, strict=True):
        order = range(ranks) if direction == "forward" else range(ranks)[::-1]
        arrived: dict[int, float] = {}
        for at in order:
            rank, first, last = group * ranks + at, at == order[0], at == order[-1]
            took = seconds if isinstance(seconds, float) else seconds[at]
            free, left = start, {}
            for i in range(microbatches):
                if not first:
                    boundary = at - 1 if direction == "forward" else at
                    here = max(now[at], arrived[i])
                    rows.append(
                        _row(
                            rank,
                            step,
                            "wait_receive",
                            now[at],
                            here,
                            microbatch=i,
                            direction=direction,
                            boundary=boundary,
                        )
                    )
                    rows.append(
                        _row(
                            rank,
                            step,
                            "decode",
                            here,
                            here + codec,
                            microbatch=i,
                            direction=direction,
                            boundary=boundary,
                        )
                    )
                    now[at] = here + codec
                rows.append(_row(rank, step, f"{direction}_compute", now[at], now[at] + took, microbatch=i, stage=at))
                now[at] += took
                if not last:
                    boundary = at if direction == "forward" else at - 1
                    rows.append(
                        _row(
                            rank,
                            step,
                            "encode",
                            now[at],
                            now[at] + codec,
                            microbatch=i,
                            direction=direction,
                            boundary=boundary,
                        )
                    )
                    now[at] += codec
                    rows.append(
                        _row(rank, step, "send", now[at], now[at], microbatch=i, direction=direction, boundary=boundary)
                    )
                    free = max(free, now[at]) + transfer
                    left[i] = free
            arrived = left
    return max(now)
