"""What the one setting that a timed part varies does to throughput: a line a family of methods, a panel a link rate."""

from __future__ import annotations

import functools

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from thinpipe.plots import _select as select
from thinpipe.plots import style
from thinpipe.plots._setting import label_axis, varied

VERSION = 1
SUMMARY = "throughput (samples/s) against the one setting that a timed part varies, one line a method"
SOURCE = "AC-SGD, arXiv 2206.01299; its micro-batches: TAH-Quant, arXiv 2506.01352"
PARAMETERS: dict = {}
REQUIRES = ("runs",)
NAME = "throughput_by_setting"
COLUMNS = (
    "table runs (samples_per_s, rate_mbit, arm, seed, forward, backward, stages, groups, microbatches, batch_size, "
    "fidelity)"
)


def figures(tables: select.Tables) -> select.Drawn:
    return select.per_part(NAME, select.timed(tables, ["samples_per_s"]), functools.partial(_figure, tables))


def _figure(tables: select.Tables, part: str, runs: pd.DataFrame) -> Figure:
    runs = runs.reset_index(drop=True)
    found = varied(tables, runs)
    runs = runs.assign(x=found.x)
    select.one_setting(runs, ["arm", "x", "rate_mbit"])
    rates = list(runs.groupby("rate_mbit", dropna=False))
    fig = style.new_figure(1, len(rates))
    arms = style.methods(runs["arm"])
    counts: list[int] = []
    for ax, (rate, here) in zip(fig.subplots(1, len(rates), squeeze=False)[0], rates, strict=True):
        for arm in arms:
            counts += _line(ax, arm, here[here["arm"] == arm.label], list(found.ticks))
        label_axis(ax, found)
        ax.set_title(select.rate_text(float(str(rate)), "Mbit/s"))
        ax.set_ylabel("throughput (samples/s)")
        ax.set_ylim(0, 1.1 * ax.dataLim.y1)
    text = select.caption(tables, part, COLUMNS, counts, timing=True)
    text += " Lines across: methods without this setting." if runs["x"].isna().any() else ""
    text += " Scales differ between panels." if len(rates) > 1 else ""
    handles = [*map(style.handle, arms), *style.notes(flagged=any(select.flagged(runs)))]
    style.finish(fig, f"Throughput by {found.label}, part {part}", text, handles)
    return fig


def _line(ax: Axes, arm: style.Method, runs: pd.DataFrame, ticks: list[float]) -> list[int]:
    """Draw one method, from end to end of the axis where it has no such setting; return the numbers of seeds."""
    xs, bars, flags = [], [], []
    for x, here in runs.groupby("x", dropna=False):
        flagged, bar = select.flagged(here), select.bar(here["samples_per_s"])
        places = [min(ticks), max(ticks)] if pd.isna(x) else [float(str(x))]
        style.seeds(ax, arm, [places[0]] * len(here), list(here["samples_per_s"]), flagged)
        xs += places
        bars += [bar] * len(places)
        flags += [any(flagged)] * len(places)
    style.means(ax, arm, xs, bars, flags)
    return [bar.n for bar in bars]
