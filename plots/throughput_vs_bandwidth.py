"""Samples a second against the rate of the links: one line a method."""

from __future__ import annotations

import functools

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from thinpipe.plots import _select as select
from thinpipe.plots import style

VERSION = 1
SUMMARY = "throughput (samples/s) against link rate, one line a method"
SOURCE = "AC-SGD, arXiv 2206.01299, table 2"
PARAMETERS: dict = {}
REQUIRES = ("runs",)
NAME = "throughput_vs_bandwidth"
COLUMNS = "table runs (rate_mbit, samples_per_s, arm, seed, fidelity)"


def figures(tables: select.Tables) -> select.Drawn:
    return select.per_part(NAME, select.timed(tables, ["samples_per_s"]), functools.partial(_figure, tables))


def _figure(tables: select.Tables, part: str, runs: pd.DataFrame) -> Figure:
    select.one_setting(runs, ["arm", "rate_mbit"])
    fig = style.new_figure(1, 1, (4.6, 3.2))
    ax = fig.add_subplot()
    positions = _positions(runs["rate_mbit"])
    arms = style.methods(runs["arm"])
    counts = []
    for i, arm in enumerate(arms):
        # A gap of a tenth of a decade: on this axis a shift is a factor.
        shift = 10 ** style.dodge(i, len(arms), 0.1)
        counts += _line(ax, arm, runs[runs["arm"] == arm.label], positions, shift)
    _axes(ax, positions)
    handles = [*map(style.handle, arms), *style.notes(flagged=any(select.flagged(runs)))]
    text = select.caption(tables, part, COLUMNS, counts, timing=True) + " Methods side by side at each rate."
    style.finish(fig, f"Throughput against link rate, part {part}", text, handles)
    return fig


def _positions(rates: pd.Series) -> dict[float | None, float]:
    """x of each rate. An unlimited link stands right of the fastest one, under its own tick."""
    limited = sorted(set(rates.dropna()))
    positions: dict[float | None, float] = {rate: rate for rate in limited}
    if rates.isna().any():
        positions[None] = 2.5 * limited[-1] if limited else 1.0
    return positions


def _line(
    ax: Axes, arm: style.Method, runs: pd.DataFrame, positions: dict[float | None, float], shift: float
) -> list[int]:
    """Draw one method; return the number of seeds at each rate."""
    xs, bars, flags = [], [], []
    for rate, x in positions.items():
        here = runs[runs["rate_mbit"].isna() if rate is None else runs["rate_mbit"] == rate]
        if here.empty:
            continue
        flagged = select.flagged(here)
        style.seeds(ax, arm, [x * shift] * len(here), list(here["samples_per_s"]), flagged)
        xs.append(x * shift)
        bars.append(select.bar(here["samples_per_s"]))
        flags.append(any(flagged))
    style.means(ax, arm, xs, bars, flags)
    return [bar.n for bar in bars]


def _axes(ax: Axes, positions: dict[float | None, float]) -> None:
    ax.set_xscale("log")
    ax.set_xticks(list(positions.values()), [select.rate_text(float("nan") if r is None else r) for r in positions])
    ax.minorticks_off()
    ax.set_xlabel("link rate set (Mbit/s, log scale)")
    ax.set_ylabel("throughput (samples/s)")
    if len(positions) == 1:
        # Left to itself, the axis would end at the outermost of the methods that stand side by side.
        (only,) = positions.values()
        ax.set_xlim(only / 2, 2 * only)
    ax.set_ylim(0, 1.1 * ax.dataLim.y1)
