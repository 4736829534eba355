"""Bytes a step on every link of a pipeline and between data groups, by method."""

from __future__ import annotations

import functools

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from thinpipe.plots import _select as select
from thinpipe.plots import style

VERSION = 1
SUMMARY = "bytes a step on each boundary and direction, and between data groups, by method"
SOURCE = "AC-SGD, arXiv 2206.01299, figure 2"
PARAMETERS: dict = {}
REQUIRES = ("runs", "transfers")
NAME = "bytes_by_link"
COLUMNS = (
    "tables transfers (step, epoch, boundary, direction, frame_bytes), "
    "runs (steps, data_bytes, final_train_loss, arm, seed, fidelity)"
)
DATA = "data groups"
#: Kind of link -> what is written of it, and the grey of its share in a bar.
KINDS = {
    "forward": ("forward", "#3C3C3C"),
    "backward": ("backward", "#8C8C8C"),
    DATA: ("between data groups", "#D2D2D2"),
}


def figures(tables: select.Tables) -> select.Drawn:
    runs = select.trained(tables, ["final_train_loss"])
    return select.per_part(NAME, runs[runs["state"] != "diverged"], functools.partial(_figure, tables))


def by_link(transfers: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """(run_id, kind, link, bytes a step) of `runs`: frames of the last epoch, all data groups together, and what
    averages between these, a mean over all steps.

    The last epoch is after any change of compressors. Its steps are counted by its last step and that of the epoch
    before, which rows that stand for several steps have too.
    """
    transfers = transfers[transfers["run_id"].isin(runs["run_id"])]
    ends = transfers.groupby(["run_id", "epoch"], as_index=False)["step"].max()
    ends["steps"] = ends.groupby("run_id")["step"].diff().fillna(ends["step"] + 1)
    last = ends.groupby("run_id").tail(1)
    rows = transfers.merge(last[["run_id", "epoch", "steps"]], on=["run_id", "epoch"])
    sums = rows.groupby(["run_id", "boundary", "direction"]).agg(sent=("frame_bytes", "sum"), steps=("steps", "first"))
    frames = (sums["sent"] / sums["steps"]).rename("bytes").reset_index().rename(columns={"direction": "kind"})
    frames = frames.sort_values(["boundary", "kind"], ascending=[True, False], kind="stable")
    frames["link"] = frames["boundary"].astype(str) + " " + frames["kind"]
    data = runs[["run_id"]].assign(kind=DATA, link=DATA, bytes=(runs["data_bytes"] / runs["steps"]).astype(float))
    return pd.concat([frames, data[data["bytes"] > 0]])[["run_id", "kind", "link", "bytes"]]


def _figure(tables: select.Tables, part: str, runs: pd.DataFrame) -> Figure:
    runs = select.once(runs)
    points = by_link(tables["transfers"], runs).merge(runs[["run_id", "arm", "seed", "fidelity"]], on="run_id")
    if points.empty:
        raise select.nothing(tables, f"a run of part {part!r} whose tensors crossed a boundary")
    links = list(dict.fromkeys(points["link"]))
    arms = style.methods(points["arm"])
    size = (max(3.4, 0.45 * len(links) + 1.0), max(2.7, 0.24 * len(arms) + 0.8))
    fig = style.new_figure(1, 2, size)
    left, right = fig.subplots(1, 2)
    counts: list[int] = []
    for i, arm in enumerate(arms):
        counts += _marks(left, arm, points[points["arm"] == arm.label], links, style.dodge(i, len(arms), 1.4))
    _links(left, points, links)
    _bars(right, points, arms)
    text = select.caption(tables, part, COLUMNS, counts, timing=False, left_out=("failed", "diverged"))
    text += " Frames: of the last epoch, all data groups together."
    text += " Between data groups: a mean over all steps, uncompressed ones too." if DATA in links else ""
    style.finish(fig, f"Bytes a step by link, part {part}", text, _legend(arms, points))
    return fig


def _marks(ax: Axes, arm: style.Method, own: pd.DataFrame, links: list[str], shift: float) -> list[int]:
    """A mark a link, for one method; return the numbers of seeds."""
    counts = []
    for x, link in enumerate(links):
        here = own[own["link"] == link]
        if here.empty:
            continue
        flags, bar = select.flagged(here), select.bar(here["bytes"])
        style.seeds(ax, arm, [x + shift] * len(here), list(here["bytes"]), flags)
        style.means(ax, arm, [x + shift], [bar], [any(flags)], size=5)
        counts.append(bar.n)
    return counts


def _links(ax: Axes, points: pd.DataFrame, links: list[str]) -> None:
    style.log_axis(ax.yaxis, list(points["bytes"]))
    _in_units(ax, "y")
    ax.set(title="Each link", xlabel="boundary and direction", ylabel="bytes a step (log scale)")
    ax.set_xticks(range(len(links)), links, rotation=35, ha="right", rotation_mode="anchor")
    ax.set_xlim(-0.6, len(links) - 0.4)


def _bars(ax: Axes, points: pd.DataFrame, arms: list[style.Method]) -> None:
    """All links together: a bar a method, a share a kind, and how many times fewer than the most."""
    each = points.groupby(["arm", "run_id", "kind"])["bytes"].sum().groupby(["arm", "kind"]).mean()
    totals = each.groupby("arm").sum()
    for y, arm in enumerate(arms):
        start = 0.0
        for kind, (_, colour) in KINDS.items():
            width = float(each.get((arm.label, kind), 0.0))
            ax.barh(y, width, left=start, color=colour, height=0.7)
            start += width
        fewer = totals.max() / start
        ax.text(start, y, f" {fewer:.1f}x fewer" if fewer >= 1.05 else "", va="center", size=6)
    ax.set_yticks(range(len(arms)), [arm.label for arm in arms])
    ax.set_ylim(len(arms) - 0.5, -0.5)
    ax.set_xlim(0, 1.02 * totals.max())
    ax.grid(axis="y", visible=False)
    _in_units(ax, "x")
    ax.set(title="All links together", xlabel="bytes a step")


def _in_units(ax: Axes, axis: str) -> None:
    getattr(ax, f"{axis}axis").set_major_formatter(lambda value, _: style.bytes_text(value))


def _legend(arms: list[style.Method], points: pd.DataFrame) -> list[Artist]:
    kinds = [Patch(color=colour, label=text) for kind, (text, colour) in KINDS.items() if kind in set(points["kind"])]
    return [*map(style.handle, arms), *kinds, *style.notes(flagged=any(select.flagged(points)))]
