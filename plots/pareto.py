"""Final loss against what was paid for it: bytes sent, and time a step at each network."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from thinpipe.plots import _composed, style
from thinpipe.plots import _select as select

VERSION = 1
SUMMARY = "final training loss against bytes sent and against time a step, the best trade-offs joined"
SOURCE = "thinpipe"
PARAMETERS: dict = {}
REQUIRES = ("runs", "curves")
NAME = "pareto"
COLUMNS = (
    "tables runs (arm, seed, final_train_loss, frame_bytes), "
    "curves (rate_mbit, rho, time_of, t_s, step, composed, fidelity)"
)
ACROSS = 3
FRONT = "none is better in both"


class Point(NamedTuple):
    """One method in one panel. lost: a seed of it diverged, so the means are those of the lucky ones."""

    method: style.Method
    cost: style.Bar
    loss: style.Bar
    flagged: bool
    lost: bool


def figures(tables: select.Tables) -> select.Drawn:
    return select.per_part(NAME, select.trained(tables, ["final_train_loss"]), functools.partial(_figure, tables))


def _figure(tables: select.Tables, part: str, runs: pd.DataFrame) -> Figure:
    runs = select.once(runs)
    found = _composed.curves(tables, runs)
    every = tables["runs"]
    lost = set(every.loc[(every["part"] == part) & (every["state"] == "diverged"), "arm"])
    panels = _panels(runs, found, lost)
    across = min(ACROSS, len(panels))
    down = -(-len(panels) // across)
    fig = style.new_figure(down, across, (3.1, 2.9))
    axes = list(fig.subplots(down, across, squeeze=False).flat)
    for ax, (label, points) in zip(axes, panels.items(), strict=False):
        _panel(ax, label, points)
    for ax in axes[len(panels) :]:
        ax.remove()
    points = [point for drawn in panels.values() for point in drawn]
    text = select.caption(
        tables,
        part,
        COLUMNS,
        [point.loss.n for point in points],
        timing=False,
        points="means; bars",
        left_out=("failed", "diverged"),
    )
    text += f" Grey line: methods of which {FRONT}, by means; one with a seed that diverged (x) is not on it."
    text += _composed.composed_text(found) if len(found) else ""
    marks = style.notes(flagged=any(p.flagged for p in points), diverged=any(p.lost for p in points))
    handles = [*map(style.handle, style.methods(runs["arm"])), *marks]
    style.finish(fig, f"Final training loss against its price, part {part}", text, handles)
    return fig


def _panels(runs: pd.DataFrame, found: pd.DataFrame, lost: Collection[str]) -> dict[str, list[Point]]:
    """By x label: bytes, then time a step at each network."""
    losses = {str(arm): _by_seed(own, "final_train_loss") for arm, own in runs.groupby("arm")}
    sent = {str(arm): _by_seed(own.assign(mb=own["frame_bytes"] / 1e6), "mb") for arm, own in runs.groupby("arm")}
    panels = {"bytes sent in training (MB, log scale)": _points(losses, sent, {}, lost)}
    for network, rows in _composed.networks(found):
        last = rows.sort_values("epoch").groupby("run_id").tail(1)
        last = last.assign(each=last["t_s"] / last["step"])
        cost = {str(arm): _by_seed(own, "each") for arm, own in last.groupby("arm")}
        flags = {str(arm): bool((own["fidelity"] != "ok").any()) for arm, own in rows.groupby("arm")}
        panels[f"mean time a step (s, log scale)\n{network.text()}"] = _points(losses, cost, flags, lost)
    return panels


def _by_seed(rows: pd.DataFrame, column: str) -> dict[int, float]:
    return {int(seed): float(value) for seed, value in zip(rows["seed"], rows[column], strict=True)}


def _points(
    losses: Mapping[str, Mapping[int, float]],
    costs: Mapping[str, Mapping[int, float]],
    flags: Mapping[str, bool],
    lost: Collection[str],
) -> list[Point]:
    """A point a method that has both, of the seeds that have both."""
    found = []
    for method in style.methods(losses):
        arm = method.label
        seeds = sorted(losses[arm].keys() & costs.get(arm, {}).keys())
        if seeds and all(costs[arm][seed] > 0 for seed in seeds):
            cost, loss = (select.bar([values[arm][seed] for seed in seeds]) for values in (costs, losses))
            found.append(Point(method, cost, loss, flags.get(arm, False), arm in lost))
    return found


def front(points: Sequence[Point]) -> list[Point]:
    """Those of which no other is at most as dear and has at most the loss, by rising cost. Equal ones all stay."""

    def beaten(p: Point) -> bool:
        return any(
            q.cost.mean <= p.cost.mean
            and q.loss.mean <= p.loss.mean
            and (q.cost.mean, q.loss.mean) != (p.cost.mean, p.loss.mean)
            for q in whole
        )

    whole = [p for p in points if not p.lost]
    return sorted((p for p in whole if not beaten(p)), key=lambda p: p.cost.mean)


def _panel(ax: Axes, label: str, points: Sequence[Point]) -> None:
    best = front(points)
    ax.plot([p.cost.mean for p in best], [p.loss.mean for p in best], color="#BBBBBB", lw=2.5, zorder=1, gid="front")
    for point in points:
        _mark(ax, point)
    style.log_axis(ax.xaxis, [p.cost.mean for p in points])
    ax.set_xlabel(label)
    ax.set_ylabel("final training loss (nat)")


def _mark(ax: Axes, point: Point) -> None:
    """One method: its bars, its mark (hollow when flagged), and a cross where a seed diverged."""
    method, cost, loss = point.method, point.cost, point.loss
    bars: dict[str, Any] = {"fmt": "none", "color": method.colour, "elinewidth": 0.9, "zorder": 3}
    across, up = ([[bar.mean - bar.low], [bar.high - bar.mean]] for bar in (cost, loss))
    if np.isfinite(up).all():
        ax.errorbar(cost.mean, loss.mean, yerr=up, capsize=2, **bars)
    if np.isfinite(across).all() and cost.low > 0:
        ax.errorbar(cost.mean, loss.mean, xerr=across, **bars)
    look: dict[str, Any] = {
        "marker": method.marker,
        "markersize": 7,
        "markerfacecolor": "white" if point.flagged else method.colour,
    }
    ax.plot(cost.mean, loss.mean, linestyle="none", color=method.colour, zorder=4, label=method.label, **look)
    if point.lost:
        ax.plot(cost.mean, loss.mean, "x", color=method.colour, markersize=12, zorder=5)
