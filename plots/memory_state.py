"""What memories keep at both ends of all boundaries, against the samples that a run visits, by method."""

from __future__ import annotations

import functools

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from thinpipe.plots import _select as select
from thinpipe.plots import style

VERSION = 1
SUMMARY = "bytes that memories keep against the number of samples, one line a method"
SOURCE = "AC-SGD, arXiv 2206.01299, its code"
PARAMETERS: dict = {}
REQUIRES = ("runs", "steps")
NAME = "memory_state"
COLUMNS = "tables runs (memory_state_bytes, steps, batch_size, final_train_loss, arm, seed, fidelity), steps (epoch)"


def figures(tables: select.Tables) -> select.Drawn:
    runs = select.trained(tables, ["final_train_loss", "memory_state_bytes"])
    return select.per_part(NAME, runs[runs["state"] != "diverged"], functools.partial(_figure, tables))


def samples(runs: pd.DataFrame, steps: pd.DataFrame) -> pd.Series:
    """The samples a run visits in an epoch, by its steps, its batch and the epochs of table steps."""
    epochs = steps.groupby("run_id")["epoch"].max() + 1
    return runs["steps"] * runs["batch_size"] / runs["run_id"].map(epochs)


def _figure(tables: select.Tables, part: str, runs: pd.DataFrame) -> Figure:
    runs = runs.drop_duplicates(["arm", "seed", "train_id"])
    runs = runs.assign(samples=samples(runs, tables["steps"]), kept=runs["memory_state_bytes"].astype(float))
    select.one_setting(runs, ["arm", "samples", "seed"], "train_id")
    shown = runs[runs["kept"] > 0]
    if shown.empty:
        raise select.nothing(tables, f"a run of part {part!r} with a memory (delta, ef, ef21, ef-mixed)")
    fig = style.new_figure(1, 1, (4.6, 3.2))
    ax = fig.add_subplot()
    arms = style.methods(shown["arm"])
    counts: list[int] = []
    for arm in arms:
        counts += _line(ax, arm, shown[shown["arm"] == arm.label])
    _axes(ax, shown)
    text = select.caption(tables, part, COLUMNS, counts, timing=False, left_out=("failed", "diverged"))
    text += " At a run's end, all ranks together, in RAM or on disk."
    without = [arm.label for arm in style.methods(set(runs["arm"]) - set(shown["arm"]))]
    text += f" Without a memory: {', '.join(without)}." if without else ""
    handles = [*map(style.handle, arms), *style.notes(flagged=any(select.flagged(shown)))]
    style.finish(fig, f"What memories keep, part {part}", text, handles)
    return fig


def _line(ax: Axes, arm: style.Method, runs: pd.DataFrame) -> list[int]:
    """Draw one method; return the number of seeds at each number of samples."""
    xs, bars, flags = [], [], []
    for x, here in runs.groupby("samples"):
        flagged = select.flagged(here)
        style.seeds(ax, arm, [float(str(x))] * len(here), list(here["kept"]), flagged)
        xs.append(float(str(x)))
        bars.append(select.bar(here["kept"]))
        flags.append(any(flagged))
    style.means(ax, arm, xs, bars, flags)
    return [bar.n for bar in bars]


def _axes(ax: Axes, shown: pd.DataFrame) -> None:
    style.log_axis(ax.xaxis, list(shown["samples"]))
    style.log_axis(ax.yaxis, list(shown["kept"]))
    xs = sorted(set(shown["samples"]))
    ax.set_xticks(xs, [f"{x:g}" for x in xs])
    ax.yaxis.set_major_formatter(lambda value, _: style.bytes_text(value))
    ax.set_xlabel("samples visited in an epoch (log scale)")
    ax.set_ylabel("kept by all memories (log scale)")
