"""What compression does to the tensors that cross: relative error, and change between visits."""

from __future__ import annotations

import functools

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from thinpipe.plots import _select as select
from thinpipe.plots import style

VERSION = 1
SUMMARY = "relative error, and mean change over mean value, by epoch, a column a boundary and direction"
SOURCE = "AC-SGD, arXiv 2206.01299, figure 1b"
PARAMETERS: dict = {}
REQUIRES = ("runs", "transfers")
NAME = "boundary_error"
COLUMNS = "tables transfers (epoch, boundary, direction, rel_error, mean_abs, mean_abs_change), runs (arm, seed)"
CARRIED = {"forward": "activation", "backward": "activation gradient"}
ROWS = {
    "rel_error": "relative error |decoded - x| / |x|",
    "change": "change since last visit,\nmean |x - last| / mean |x|",
}


def figures(tables: select.Tables) -> select.Drawn:
    return select.per_part(NAME, select.trained(tables), functools.partial(_figure, tables))


def by_epoch(transfers: pd.DataFrame) -> pd.DataFrame:
    """Sampled steps -> rel_error (mean), change (ratio of means) a run, epoch, boundary and direction."""
    keys = ["run_id", "epoch", "boundary", "direction"]
    error = transfers.groupby(keys)["rel_error"].mean()
    visits = transfers.dropna(subset=["mean_abs", "mean_abs_change"]).groupby(keys)
    change = visits["mean_abs_change"].mean() / visits["mean_abs"].mean()
    return pd.concat([error, change.rename("change")], axis=1).reset_index()


def _figure(tables: select.Tables, part: str, runs: pd.DataFrame) -> Figure:
    runs = select.once(runs)
    transfers = tables["transfers"]
    points = by_epoch(transfers[transfers["run_id"].isin(runs["run_id"])])
    points = points.merge(runs[["run_id", "arm", "seed", "fidelity"]], on="run_id")
    # An exact transfer (FP32, warm-up) has error 0, which a log axis cannot show; a tensor of zeros gives inf.
    points[list(ROWS)] = points[list(ROWS)].where(lambda value: (value > 0) & (value < float("inf")))
    shown = points.dropna(subset=list(ROWS), how="all")
    if shown.empty:
        raise select.nothing(tables, f"runs of part {part!r} with compressed boundaries and sampled errors")
    places = sorted(
        set(zip(shown["boundary"], shown["direction"], strict=True)), key=lambda p: (p[0], p[1] != "forward")
    )
    fig = style.new_figure(len(ROWS), len(places), (2.9, 2.5))
    axes = fig.subplots(len(ROWS), len(places), squeeze=False)
    arms = style.methods(shown["arm"])
    counts: list[int] = []
    for row, (column, label) in zip(axes, ROWS.items(), strict=True):
        for ax, (boundary, direction) in zip(row, places, strict=True):
            here = shown[(shown["boundary"] == boundary) & (shown["direction"] == direction)]
            counts += _panel(ax, column, here.dropna(subset=[column]), arms)
            ax.set_title(f"boundary {boundary}, {direction}\n({CARRIED[direction]})")
            ax.set_xlabel("epoch (the first is 0)")
            ax.set_xlim(shown["epoch"].min() - 0.5, shown["epoch"].max() + 0.5)
        row[0].set_ylabel(label)
    text = select.caption(tables, part, COLUMNS, counts, timing=False)
    text += " Mean over the sampled steps of an epoch; exact transfers (error 0) not drawn; methods side by side."
    handles = [*map(style.handle, arms), *style.notes(flagged=any(select.flagged(shown)))]
    style.finish(fig, f"What compression does at the boundaries, part {part}", text, handles)
    return fig


def _panel(ax: Axes, column: str, points: pd.DataFrame, arms: list[style.Method]) -> list[int]:
    """One line a method over epochs; return the numbers of seeds."""
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if points.empty:
        ax.text(0.5, 0.5, "no method with a memory", transform=ax.transAxes, ha="center", color=style.NOTE_COLOUR)
        ax.set_yticks([])
        return []
    counts = []
    for i, arm in enumerate(arms):
        own = points[points["arm"] == arm.label]
        if own.empty:
            continue
        shift = style.dodge(i, len(arms), 1.0)
        style.seeds(ax, arm, list(own["epoch"] + shift), list(own[column]), select.flagged(own))
        groups = [(epoch + shift, select.bar(g[column]), any(select.flagged(g))) for epoch, g in own.groupby("epoch")]
        xs, bars, flags = zip(*groups, strict=True)
        style.means(ax, arm, xs, bars, flags, size=4)
        counts += [bar.n for bar in bars]
    _log_axis(ax, points[column])
    return counts


def _log_axis(ax: Axes, values: pd.Series) -> None:
    """At least a decade high, so that noise does not fill the panel; plain numbers at 1, 2 and 5."""
    low, high = float(values.min()), float(values.max())
    pad = max(1.4, (10 * low / high) ** 0.5)
    ax.set_yscale("log")
    ax.set_ylim(low / pad, high * pad)
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 100 else (1.0,)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
