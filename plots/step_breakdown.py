"""Where the time of a step goes: compute, codec, wait, idle; a bar a method, a panel a link rate."""

from __future__ import annotations

import functools

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from thinpipe.plots import _select as select
from thinpipe.plots import style

VERSION = 1
SUMMARY = "time of a step split into compute, codec, wait and idle, by method and link rate"
SOURCE = "thinpipe, docs/numbers.md"
PARAMETERS: dict = {}
REQUIRES = ("runs",)
NAME = "step_breakdown"
COLUMNS = "table runs (compute_s, codec_s, wait_s, idle_s, step_time_s, rate_mbit, arm, seed, fidelity)"
PHASES = {
    "compute_s": ("compute", "#3B3B3B", ""),
    "codec_s": ("codec (encode, decode)", "#009E73", "\\\\\\"),
    "wait_s": ("wait (frame on its way)", "#CC79A7", "///"),
    "idle_s": ("idle (bubble, sync)", "#F2F2F2", ""),
}


def figures(tables: select.Tables) -> select.Drawn:
    runs = select.finite(select.timed(tables), list(PHASES))
    if runs.empty:
        raise select.nothing(tables, "timing runs with spans (their wait and idle times come from these)")
    return select.per_part(NAME, runs, functools.partial(_figure, tables))


def _figure(tables: select.Tables, part: str, runs: pd.DataFrame) -> Figure:
    select.one_setting(runs, ["arm", "rate_mbit"])
    arms = style.methods(runs["arm"])
    rates = list(runs.groupby("rate_mbit", dropna=False))
    fig = style.new_figure(1, len(rates), (max(0.42 * len(arms) + 0.9, 3.2 / len(rates)), 3.4))
    counts = []
    for ax, (rate, here) in zip(fig.subplots(1, len(rates), squeeze=False)[0], rates, strict=True):
        counts += [_bar(ax, x, here[here["arm"] == arm.label]) for x, arm in enumerate(arms)]
        ax.set_title(select.rate_text(rate, "Mbit/s"))
        ax.set_xticks(range(len(arms)), [arm.label for arm in arms], rotation=60, ha="right", rotation_mode="anchor")
        ax.grid(axis="x", visible=False)
        ax.set_ylim(bottom=0)
    fig.axes[0].set_ylabel("time of a step (s)")
    patches = [
        Patch(facecolor=colour, edgecolor="#777777", hatch=hatch, label=label)
        for label, colour, hatch in PHASES.values()
    ]
    marks = [style.note("step time, a seed"), *style.notes(flagged=any(select.flagged(runs)))]
    seen = [n for n in counts if n]
    text = select.caption(tables, part, COLUMNS, seen, timing=True, points="points: seeds; bars")
    text += " Stacks: means over ranks of medians over steps, then over seeds."
    text += " Scales differ between panels." if len(rates) > 1 else ""
    style.finish(fig, f"Where a step's time goes, part {part}", text, [*reversed(patches), *marks])
    return fig


def _bar(ax: Axes, x: int, runs: pd.DataFrame) -> int:
    """One method's stack, with the step time of each seed over it; return the number of seeds."""
    if runs.empty:
        ax.text(x, 0, " no run", rotation=90, ha="center", va="bottom", size=6, color=style.NOTE_COLOUR)
        return 0
    bottom = 0.0
    for column, (_, colour, hatch) in PHASES.items():
        height = float(runs[column].mean())
        ax.bar(x, height, 0.72, bottom, color=colour, edgecolor="#777777", linewidth=0.5, hatch=hatch)
        bottom += height
    mark = style.Method("step time", style.NOTE_COLOUR, "o", style.SOLID, ())
    style.seeds(ax, mark, [x] * len(runs), list(runs["step_time_s"]), select.flagged(runs))
    found = select.bar(runs["step_time_s"])
    if not pd.isna(found.low):
        error = [[found.mean - found.low], [found.high - found.mean]]
        ax.errorbar(x, found.mean, yerr=error, fmt="none", color=mark.colour, capsize=2, elinewidth=0.9)
    return found.n
