"""Loss curves: from the steps and evals tables to points a seed and lines a method. Shared by figures.

Training loss is a mean over the steps of an epoch, held-out loss one value an evaluation; they never share a
panel. A seed is a thin line, the mean of the seeds a thick one with marks at some epochs, other ones for each
method, so that curves that lie on one another can still be told apart. Time is training time: the sum of
step_time_s on the rank that has the loss, evaluation left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from thinpipe.plots import _select as select
from thinpipe.plots import style

KINDS = ("training", "held-out")
#: What a classification is scored by, columns of evals.
SCORES = ("accuracy", "matthews", "f1")
#: For captions: how seeds and intervals are shown.
POINTS = "thin: seeds, thick: their mean, marked at some epochs; bands"
#: How many marks a curve keeps at least.
MARKS = 3
YLABELS = {
    "training": "training loss (nat, mean of an epoch)",
    "held-out": "held-out loss (nat)",
    "accuracy": "held-out accuracy",
    "matthews": "held-out Matthews correlation",
    "f1": "held-out F1",
}
TITLES = {
    "training": "Training loss",
    "held-out": "Held-out loss",
    "accuracy": "Accuracy",
    "matthews": "Matthews correlation",
    "f1": "F1",
}
Curves = Mapping[str, pd.DataFrame]


def curves(tables: select.Tables, kind: str, runs: pd.DataFrame) -> Curves:
    """run_id -> points (epoch, step, t_s, loss) of each run that has any; every loss (or score) is finite."""
    found = {}
    column = "eval_loss" if kind == "held-out" else kind
    for run_id in runs["run_id"]:
        if kind == "training":
            points = _training(tables["steps"], run_id)
        else:
            points = _held_out(tables["evals"], run_id, column)
        if not points.empty:
            found[run_id] = points
    return found


def _training(steps: pd.DataFrame, run_id: str) -> pd.DataFrame:
    rows = select.finite(steps[steps["run_id"] == run_id], ["train_loss"]).sort_values("step")
    rows = rows.assign(step=rows["step"] + 1, t_s=rows["step_time_s"].cumsum(), loss=rows["train_loss"])
    ends = rows.groupby("epoch").agg(step=("step", "last"), t_s=("t_s", "last"), loss=("loss", "mean"))
    return ends.reset_index()


def _held_out(evals: pd.DataFrame, run_id: str, column: str) -> pd.DataFrame:
    rows = select.finite(evals[evals["run_id"] == run_id], [column]).sort_values("step")
    return rows.assign(loss=rows[column])[["epoch", "step", "t_s", "loss"]].reset_index(drop=True)


def before(runs: pd.DataFrame, found: Curves) -> float | None:
    """The mean loss of the uncompressed model before any training, where a curve ends no better; else None.

    Such a run has made the model worse than it was, which the end of a curve alone does not show.
    """
    first = select.finite(runs[runs["forward"] == "none"], ["initial_train_loss"])["initial_train_loss"]
    level = float(first.mean()) if len(first) else math.inf
    ends = [found[run_id]["loss"].iloc[-1] for run_id in runs["run_id"] if run_id in found]
    return level if any(end >= level for end in ends) else None


def panel(ax: Axes, kind: str, x: str, runs: pd.DataFrame, found: Curves) -> list[int]:
    """Draw every method of `runs` with loss against column `x` (step or t_s); return the numbers of seeds."""
    counts = []
    arms = style.methods(runs["arm"])
    for i, arm in enumerate(arms):
        own = runs[runs["arm"] == arm.label]
        counts += _method(ax, arm, own, found, kind=kind, x=x, turn=(i, len(arms)))
    ax.set_title(TITLES[kind])
    ax.set_ylabel(YLABELS[kind])
    _limit(ax, runs, found)
    return counts


def against_steps(
    tables: select.Tables, part: str, runs: pd.DataFrame, kinds: Mapping[str, Curves], *, what: str, columns: str
) -> Figure:
    """A panel a kind of curve, over optimizer steps, with title, caption and legend. what: title's beginning."""
    fig = style.new_figure(1, len(kinds))
    counts = []
    level = before(runs, kinds.get("training", {}))
    for ax, (kind, found) in zip(fig.subplots(1, len(kinds), squeeze=False)[0], kinds.items(), strict=True):
        counts += panel(ax, kind, "step", runs, found)
        ax.set_xlabel("optimizer steps")
        if kind == "training" and level is not None:
            ax.axhline(level, color=style.NOTE_COLOUR, linestyle=":", zorder=1)
    text = select.caption(tables, part, columns, counts, timing=False, points=POINTS)
    text += " Dotted: the training loss before any update, uncompressed." if level is not None else ""
    text += remark(runs, kinds)
    style.finish(fig, f"{what} against steps, part {part}", text, legend(runs))
    return fig


def _method(
    ax: Axes, arm: style.Method, runs: pd.DataFrame, found: Curves, *, kind: str, x: str, turn: tuple[int, int]
) -> list[int]:
    """A line each seed, and the mean for as long as every seed goes on; return the numbers of seeds.

    turn: (which method this is, of how many), which says the epochs that bear its marks.
    """
    whole = []
    runs = runs[runs["run_id"].isin(found)]
    flagged = select.flagged(runs)
    for run, flag in zip(runs.itertuples(), flagged, strict=True):
        curve = found[run.run_id]
        style.seed_line(ax, arm, list(curve[x]), list(curve["loss"]), flagged=flag)
        if run.state == "diverged":
            ax.plot(curve[x].iloc[-1], curve["loss"].iloc[-1], "x", color=arm.colour, markersize=9, zorder=5)
            # The epoch it broke off in is not a whole one; an evaluation always is.
            curve = curve.iloc[:-1] if kind == "training" else curve
        whole.append(curve)
    if not whole:
        return []
    joined = pd.concat(whole).groupby("epoch").agg(n=("loss", "size"), x=(x, "mean"), loss=("loss", list))
    joined = joined[(joined["n"] == len(whole)).cummin()]
    bars = [select.bar(values) for values in joined["loss"]]
    index, count = turn
    every = max(1, min(count, len(bars) // MARKS))
    flags = [any(flagged)] * len(bars)
    style.means(ax, arm, list(joined["x"]), bars, flags, size=5, band=True, marked=slice(index % every, None, every))
    return [b.n for b in bars]


def _limit(ax: Axes, runs: pd.DataFrame, found: Curves) -> None:
    """Let the runs that ended well set the height: one that diverged would flatten the others into a line."""
    done = [found[r] for r in runs.loc[runs["state"] != "diverged", "run_id"] if r in found]
    losses = pd.concat(done)["loss"] if done else pd.Series(dtype=float)
    if not losses.empty:
        margin = 0.05 * max(losses.max() - losses.min(), 0.1)
        ax.set_ylim(losses.min() - margin, losses.max() + margin)


def legend(runs: pd.DataFrame) -> list[Artist]:
    """The methods of `runs` and the marks used for them."""
    diverged = bool((runs["state"] == "diverged").any())
    marks = style.notes(flagged=any(select.flagged(runs)), diverged=diverged)
    return [*map(style.handle, style.methods(runs["arm"])), *marks]


def remark(runs: pd.DataFrame, kinds: Mapping[str, Curves]) -> str:
    """What a caption adds where a seed diverged; `kinds` holds the curves that the figure draws."""
    diverged = runs.loc[runs["state"] == "diverged", "run_id"]
    if diverged.empty:
        return ""
    drawn = {run_id for found in kinds.values() for run_id in found}
    absent = len(set(diverged) - drawn)
    text = " A mean ends with the first of its seeds."
    return text + (f" {absent} run(s) diverged before a first point." if absent else "")
