"""Activations and how much they change between two visits of a sample, by epoch, a panel a boundary."""

from __future__ import annotations

import functools
import math

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from thinpipe.plots import _select as select
from thinpipe.plots import style

VERSION = 1
SUMMARY = "mean activation, and its mean change since the sample's last visit, by epoch, a panel a boundary"
SOURCE = "AC-SGD, arXiv 2206.01299, figure 1b"
PARAMETERS: dict = {}
REQUIRES = ("runs", "transfers")
NAME = "activation_change"
COLUMNS = "tables transfers (epoch, boundary, direction, mean_abs, mean_abs_change), runs (arm, seed, fidelity)"
#: Column -> dashes of its line (None: the method's own) and what legends call it.
LINES: dict[str, tuple[tuple[float, ...] | None, str]] = {
    "mean_abs": ((1.0, 1.3), "activations,\nmean |a|"),
    "mean_abs_change": (None, "their change,\nmean |a - last visit's|"),
}
PER_ROW = 4


def figures(tables: select.Tables) -> select.Drawn:
    return select.per_part(NAME, select.trained(tables), functools.partial(_figure, tables))


def by_epoch(transfers: pd.DataFrame) -> pd.DataFrame:
    """Sampled steps -> mean_abs and mean_abs_change (means) of activations, a run, epoch and boundary.

    Only of runs that know a last visit; a value of 0, or one that is no number, has no place on a log axis.
    """
    forward = transfers[transfers["direction"] == "forward"]
    points = forward.groupby(["run_id", "epoch", "boundary"])[list(LINES)].mean()
    points = points.where((points > 0) & (points < math.inf)).reset_index()
    return points[points.groupby("run_id")["mean_abs_change"].transform("count") > 0]


def _figure(tables: select.Tables, part: str, runs: pd.DataFrame) -> Figure:
    runs = select.once(runs)
    transfers = tables["transfers"]
    points = by_epoch(transfers[transfers["run_id"].isin(runs["run_id"])])
    points = points.merge(runs[["run_id", "arm", "seed", "fidelity"]], on="run_id")
    if points.empty:
        raise select.nothing(tables, f"runs of part {part!r} with a memory of activations that saw a sample twice")
    places = sorted(set(points["boundary"]))
    columns = min(len(places), PER_ROW)
    rows = math.ceil(len(places) / columns)
    fig = style.new_figure(rows, columns, (3.6 if columns == 1 else 2.9, 2.6))
    grid = fig.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    arms = style.methods(points["arm"])
    counts: list[int] = []
    for ax, boundary in zip(grid.flat, places, strict=False):
        counts += _panel(ax, points[points["boundary"] == boundary], arms)
        ax.set(title=f"boundary {boundary}", xlabel="epoch (the first is 0)")
    for ax in grid.flat[len(places) :]:
        ax.remove()
    _axes(list(grid[:, 0]), points)
    text = select.caption(tables, part, COLUMNS, counts, timing=False)
    text += " Mean over the sampled steps of an epoch; runs without a memory know no last visit and are not drawn."
    style.finish(fig, f"Activations and their changes, part {part}", text, _legend(arms, points))
    return fig


def _panel(ax: Axes, points: pd.DataFrame, arms: list[style.Method]) -> list[int]:
    """Two lines a method over epochs; return the numbers of seeds."""
    counts = []
    for i, arm in enumerate(arms):
        shift = style.dodge(i, len(arms), 1.0)
        for column, (dashes, _) in LINES.items():
            look = arm if dashes is None else arm._replace(dashes=dashes)
            own = points[points["arm"] == arm.label].dropna(subset=[column])
            if own.empty:
                continue
            style.seeds(ax, look, list(own["epoch"] + shift), list(own[column]), select.flagged(own))
            means = [
                (epoch + shift, select.bar(g[column]), any(select.flagged(g))) for epoch, g in own.groupby("epoch")
            ]
            xs, bars, flags = zip(*means, strict=True)
            style.means(ax, look, xs, bars, flags, size=4)
            counts += [bar.n for bar in bars]
    return counts


def _axes(first: list[Axes], points: pd.DataFrame) -> None:
    """The axes that all panels share, and the labels of the first panel of each row."""
    values = points[list(LINES)].stack()
    for ax in first:
        ax.set_ylabel("mean absolute value (log scale)")
    style.log_axis(first[0].yaxis, list(values))
    first[0].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    first[0].set_xlim(points["epoch"].min() - 0.5, points["epoch"].max() + 0.5)


def _legend(arms: list[style.Method], points: pd.DataFrame) -> list[Artist]:
    lines = [
        Line2D([], [], color=style.NOTE_COLOUR, dashes=dashes or (None, None), label=label)
        for dashes, label in LINES.values()
    ]
    return [*map(style.handle, arms), *lines, *style.notes(flagged=any(select.flagged(points)))]
