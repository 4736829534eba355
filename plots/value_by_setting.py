"""What the one setting that a part varies does to the final loss and score: a line a family of methods."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

from thinpipe.plots import _select as select
from thinpipe.plots import style
from thinpipe.plots._setting import Varied, label_axis, varied

VERSION = 1
SUMMARY = "final loss and accuracy against the one setting that a part varies, a line a family of methods"
SOURCE = "AC-SGD, arXiv 2206.01299; Rudakov et al., arXiv 2401.07788"
PARAMETERS: dict = {}
REQUIRES = ("runs",)
NAME = "value_by_setting"
COLUMNS = (
    "table runs (arm, seed, forward, backward, stages, groups, microbatches, batch_size, warmup_epochs, "
    "final_train_loss, final_eval_loss, final_accuracy, state, fidelity)"
)
VALUES = {
    "final_train_loss": "final training loss (nat)",
    "final_eval_loss": "final held-out loss (nat)",
    "final_accuracy": "final held-out accuracy",
}
EDGE = 0.97


def figures(tables: select.Tables) -> select.Drawn:
    return select.per_part(NAME, select.trained(tables), functools.partial(_figure, tables))


def _figure(tables: select.Tables, part: str, runs: pd.DataFrame) -> Figure:
    runs = runs.drop_duplicates(["arm", "seed", "train_id"]).reset_index(drop=True)
    found = varied(tables, runs)
    runs = runs.assign(x=found.x, family=found.family)
    select.one_setting(runs, ["arm", "x", "seed"], "train_id")
    select.one_setting(runs, ["family", "x", "seed"], "train_id")
    shown = [column for column in VALUES if len(_ended(runs, column))]
    if not shown:
        raise select.nothing(tables, f"a run of part {part!r} that ended with a loss")
    fig = style.new_figure(1, len(shown))
    counts: list[int] = []
    families = list(_in_order(runs))
    for ax, column in zip(fig.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        for i, own in enumerate(families):
            counts += _line(ax, own, column, found, (i, len(families)))
        label_axis(ax, found)
        ax.set_ylabel(VALUES[column])
    text = select.caption(tables, part, COLUMNS, counts, timing=False, left_out=("failed",))
    text += " Lines across: methods without this setting." if runs["x"].isna().any() else ""
    lost = int((runs["state"] == "diverged").sum())
    text += f" {lost} run(s) diverged (at the edge); no mean where one did." if lost else ""
    title = f"{', '.join(VALUES[c].removeprefix('final ').split(' (')[0] for c in shown)} by {found.label}, part {part}"
    style.finish(fig, title[0].upper() + title[1:], text, _legend(families))
    return fig


def _in_order(runs: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """The rows of each family, in legend order of its first arm."""
    grouped = [own for _, own in runs.groupby("family")]
    return iter(sorted(grouped, key=lambda own: style.methods(own["arm"])[0].order))


def _ended(runs: pd.DataFrame, column: str) -> pd.DataFrame:
    return select.finite(runs[runs["state"] != "diverged"], [column])


def _line(ax: Axes, own: pd.DataFrame, column: str, found: Varied, turn: tuple[int, int]) -> list[int]:
    """Draw one family; return the number of seeds behind each of its means."""
    ended = _ended(own, column)
    look = style.methods(own["arm"])[-1]
    if own["x"].isna().all():
        return _across(ax, look, ended, column, found)
    xs, bars, flags, looks = [], [], [], []
    for x, here in own.groupby("x"):
        at, values = float(str(x)), ended[ended["x"] == x]
        method = style.method(here["arm"].iloc[0])
        style.seeds(ax, method, [at] * len(values), list(values[column]), select.flagged(values))
        if (here["state"] == "diverged").any():
            _at_edge(ax, method, at, column, turn)
        elif len(values):
            xs.append(at)
            bars.append(select.bar(values[column]))
            flags.append(any(select.flagged(values)))
            looks.append(method)
    if len(set(looks)) <= 1:
        style.means(ax, look, xs, bars, flags)
    else:
        ax.plot(xs, [bar.mean for bar in bars], color=look.colour, dashes=look.dashes or (None, None), zorder=2.5)
        for method, x, bar, flag in zip(looks, xs, bars, flags, strict=True):
            style.means(ax, method, [x], [bar], [flag])
    return [bar.n for bar in bars]


def _across(ax: Axes, method: style.Method, ended: pd.DataFrame, column: str, found: Varied) -> list[int]:
    if ended.empty:
        return []
    bar, flag = select.bar(ended[column]), any(select.flagged(ended))
    ends = [min(found.ticks), max(found.ticks)]
    style.means(ax, method, ends, [bar, bar], [flag, flag], band=True, size=4)
    return [bar.n]


def _at_edge(ax: Axes, method: style.Method, x: float, column: str, turn: tuple[int, int]) -> None:
    """The bad edge: a loss's upper one, an accuracy's lower one. Families side by side."""
    y = 1 - EDGE if column == "final_accuracy" else EDGE
    points = 7 * (turn[0] - (turn[1] - 1) / 2)
    assert isinstance(ax.figure, Figure)
    aside = ScaledTranslation(points / 72, 0, ax.figure.dpi_scale_trans)
    ax.plot(
        x,
        y,
        "x",
        color=method.colour,
        markersize=8,
        markeredgewidth=2,
        zorder=5,
        transform=ax.get_xaxis_transform() + aside,
    )


def _legend(families: list[pd.DataFrame]) -> list[Artist]:
    """A line a family: which of its methods a mark is, its place on the axis says."""
    handles: list[Artist] = []
    for own in families:
        members = style.methods(own["arm"])
        handles.append(style.handle(members[-1]._replace(label=_name(members))))
    every = pd.concat(families)
    lost = bool((every["state"] == "diverged").any())
    return [*handles, *style.notes(flagged=any(select.flagged(every)), diverged=lost)]


def _name(members: list[style.Method]) -> str:
    """The words that all labels of a family have, of `Top10 %` and `Top5 %` `Top %`."""
    labels = [method.label.split() for method in members]
    if len(set(map(len, labels))) == 1 and len({re.sub(r"[\d.]+", "", method.label) for method in members}) == 1:
        labels = [
            [
                one if len({one, *others}) == 1 else re.sub(r"[\d.]+", "", one)
                for one, *others in zip(*labels, strict=True)
            ]
        ]
    first, *rest = labels
    shared = [word for word in first if all(word in other for other in rest)]
    return " ".join(shared) or f"{first[0]} ..."
