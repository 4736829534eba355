"""Simulated step times against measured ones, a mark a cell, by method, with bands of 5 and 10 %."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from thinpipe.harness.errors import UserError
from thinpipe.plots import style

VERSION = 1
SUMMARY = "simulated against measured step time, a mark a cell, bands of 5 and 10 %"
SOURCE = "thinpipe"
PARAMETERS: dict = {"of_simulation": True}
REQUIRES = ("predictions",)
NAME = "predicted_vs_measured"
COLUMNS = "table predictions (experiment, arm, part, predicted_step_time_s, measured_step_time_s, runs, fitted)"
BANDS = ((0.10, "#EEEEEE"), (0.05, "#DADADA"))


def figures(tables: Mapping[str, pd.DataFrame]) -> list[tuple[str, Figure]]:
    with style.context():
        return [(NAME, _figure(tables["predictions"]))]


def _figure(rows: pd.DataFrame) -> Figure:
    tested = rows[rows["measured_step_time_s"].notna() & ~rows["fitted"]]
    if tested.empty:
        raise UserError(
            f"nothing to draw for {NAME}: it needs cells with a replay that is not flagged (`thinpipe simulate "
            "EXPERIMENT --against`)."
        )
    fig = style.new_figure(1, 1, (4.4, 4.2))
    ax = fig.add_subplot()
    _bands(ax, tested)
    arms = style.methods(tested["arm"])
    for arm in arms:
        own = tested[tested["arm"] == arm.label]
        ax.plot(
            own["measured_step_time_s"], own["predicted_step_time_s"], arm.marker, color=arm.colour, markersize=5,
            alpha=0.8, zorder=3, gid=f"seeds {arm.label}",
        )  # fmt: skip
    errors = (tested["predicted_step_time_s"] / tested["measured_step_time_s"] - 1).abs()
    left = len(rows) - len(tested)
    runs = sorted(set(tested["runs"]))
    text = (
        f"Experiment {', '.join(sorted(set(rows['experiment'])))}. Source: {COLUMNS}. {len(tested)} cells, each the "
        f"median of n = {runs[0]}{f' to {runs[-1]}' if runs[1:] else ''} replays that are not flagged; no interval. "
        f"Median error {errors.median():.1%}, worst {errors.max():.1%}. Bands: 5 and 10 %. "
        f"Left out: {left} cells, whose replays are flagged or missing, or that constants are fitted to."
    )
    style.finish(fig, "Simulated against measured step time", text, [_handle(arm) for arm in arms])
    # Laid out once: done again for each format, a panel moves by a rounding error, and the files' bytes with it.
    fig.draw_without_rendering()
    fig.set_layout_engine("none")
    return fig


def _handle(arm: style.Method) -> Any:
    made = style.handle(arm)
    made.set_linestyle("none")
    return made


def _bands(ax: Axes, tested: pd.DataFrame) -> None:
    both = tested[["measured_step_time_s", "predicted_step_time_s"]].to_numpy(dtype=np.float64)
    ends = np.array([both.min() / 1.3, both.max() * 1.3])
    for share, colour in BANDS:
        ax.fill_between(ends, ends * (1 - share), ends * (1 + share), color=colour, lw=0, zorder=0)
    ax.plot(ends, ends, color=style.NOTE_COLOUR, lw=0.8, zorder=1)
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    decades = np.floor(np.log10(ends)).astype(int)
    ticks = [m * 10.0**k for k in range(decades[0], decades[1] + 1) for m in (1, 2, 5)]
    shown = [tick for tick in ticks if ends[0] <= tick <= ends[1]]
    ax.set_xticks(shown, [f"{tick:g}" for tick in shown])
    ax.set_yticks(shown, [f"{tick:g}" for tick in shown])
    ax.minorticks_off()
    ax.set_xlabel("measured step time (s, log scale)")
    ax.set_ylabel("simulated step time (s, log scale)")
