"""What the one setting that a part varies does to the final loss and score: a line a family of methods."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import ScaledTranslation

from thinpipe.plots import _select as select
from thinpipe.plots import style

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
#: Settings with columns of their own; others are numbers in the texts of compressors.
SETTINGS = ("stages", "groups", "microbatches", "batch_size", "warmup_epochs")
NUMBER = re.compile(r"(?:(?P<key>\w+)=)?(?:(?P<name>[A-Za-z][\w-]*):)?(?P<value>(?<=[:=])\d[\d.e-]*)")
# From this ratio of its largest value to its least on, an axis is logarithmic.
WIDE = 6.0
EDGE = 0.97


class Varied(NamedTuple):
    """The setting a part varies. `x`: by run, NaN where its family has no such number; `ticks`: what axes show
    at each x; `family`: by run, of which each is a line."""

    label: str
    x: pd.Series
    ticks: dict[float, str]
    family: pd.Series


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
        _axes(ax, found, column)
    text = select.caption(tables, part, COLUMNS, counts, timing=False, left_out=("failed",))
    text += " Lines across: methods without this setting." if runs["x"].isna().any() else ""
    lost = int((runs["state"] == "diverged").sum())
    text += f" {lost} run(s) diverged (at the edge); no mean where one did." if lost else ""
    title = f"{', '.join(VALUES[c].removeprefix('final ').split(' (')[0] for c in shown)} by {found.label}, part {part}"
    style.finish(fig, title[0].upper() + title[1:], text, _legend(families))
    return fig


# --- which setting ---


def varied(tables: select.Tables, runs: pd.DataFrame) -> Varied:
    """The setting of `runs`: the one that an axis varies within arms, else the one that arms of a family differ in.

    Settings that go together, bits forward and back, say, are one. Of several that arms cross, the one with the most
    values is the axis, the others tell lines apart. Where nothing varies, or each family's own, the axis is the method.
    UserError where axes cross.
    """
    numbers = _numbers(runs)
    if changing := _changing(numbers, runs["arm"]):
        if not _together(numbers, changing):
            crossed = f"a part that varies one setting by axes; {runs['part'].iloc[0]!r} varies {', '.join(changing)}"
            raise select.nothing(tables, crossed)
        return _varied(numbers, changing, runs["arm"])
    family = _families(runs)
    changing = _changing(numbers, family)
    if _together(numbers, changing):
        return _varied(numbers, changing, family)
    most = max(changing, key=lambda name: numbers[name].nunique(), default=None)
    if most is None or numbers.loc[family.isin(_varying(numbers, changing, family)), most].isna().any():
        return _by_method(runs)
    others = numbers[[name for name in changing if name != most]].astype(str).agg(" ".join, axis=1)
    return _varied(numbers, [most], family + others)


def _together(numbers: pd.DataFrame, names: list[str]) -> bool:
    """Whether each of `names` tells the values of all others."""
    values = numbers[names].dropna().drop_duplicates()
    return not values.empty and not any(values[name].duplicated().any() for name in names)


def _varied(numbers: pd.DataFrame, names: list[str], family: pd.Series) -> Varied:
    values = numbers[names].dropna().drop_duplicates().sort_values(names[0])
    ticks = {float(row[0]): " / ".join(f"{value:g}" for value in row) for row in values.to_numpy()}
    return Varied(" / ".join(names), numbers[names[0]].astype(float), ticks, family)


def _by_method(runs: pd.DataFrame) -> Varied:
    place = {method.label: float(i) for i, method in enumerate(style.methods(runs["arm"]))}
    return Varied("method", runs["arm"].map(place), {x: label for label, x in place.items()}, runs["arm"])


def _varying(numbers: pd.DataFrame, names: list[str], family: pd.Series) -> list[str]:
    return [str(name) for name, own in numbers.groupby(family) if (own[names].nunique() > 1).any()]


def _changing(numbers: pd.DataFrame, family: pd.Series) -> list[str]:
    return [name for name in numbers if (numbers[name].groupby(family).nunique() > 1).any()]


def _numbers(runs: pd.DataFrame) -> pd.DataFrame:
    """A column a setting that any of `runs` has a number for, NaN where one has not."""
    rows = []
    for run in runs.to_dict("records"):
        row = {name.replace("_", " "): float(run[name]) for name in SETTINGS}
        for direction in ("forward", "backward"):
            for found in NUMBER.finditer(run[direction]):
                what = found["key"] or ("bits" if found["name"] in ("fixpoint", "minmax") else found["name"])
                row[f"{direction} {what}"] = float(found["value"])
        rows.append(row)
    return pd.DataFrame(rows, index=runs.index)


def _families(runs: pd.DataFrame) -> pd.Series:
    """Compressors without their numbers: arms that share them differ in numbers alone."""

    def template(text: str) -> str:
        return NUMBER.sub(lambda found: found[0].removesuffix(found["value"]) + "#", text)

    return runs["forward"].map(template) + " | " + runs["backward"].map(template)


# --- drawing ---


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


def _axes(ax: Axes, found: Varied, column: str) -> None:
    xs = list(found.ticks)
    if min(xs) > 0 and max(xs) / min(xs) >= WIDE:
        ax.set_xscale("log")
    upright = found.label != "method"
    turned = {} if upright else {"rotation": 35, "ha": "right", "rotation_mode": "anchor"}
    ax.set_xticks(xs, list(found.ticks.values()), **turned)
    ax.minorticks_off()
    ax.margins(x=0.08, y=0.12)
    ax.set_xlabel(found.label)
    ax.set_ylabel(VALUES[column])


def _legend(families: list[pd.DataFrame]) -> list[Artist]:
    handles: list[Artist] = []
    for own in families:
        members = style.methods(own["arm"])
        if len(members) > 1:
            last = members[-1]
            handles.append(Line2D([], [], color=last.colour, dashes=last.dashes or (None, None), label=_name(members)))
        handles += map(style.handle, members)
    every = pd.concat(families)
    return [
        *handles,
        *style.notes(flagged=any(select.flagged(every)), diverged=bool((every["state"] == "diverged").any())),
    ]


def _name(members: list[style.Method]) -> str:
    """The words that all labels of a family have."""
    first, *rest = (method.label.split() for method in members)
    shared = [word for word in first if all(word in other for other in rest)]
    return (" ".join(shared) or "one family") + ", all"
