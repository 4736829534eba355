"""The one setting that a part varies: found from its runs, and an axis of it. Shared by figures."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes

from thinpipe.plots import _select as select
from thinpipe.plots import style

#: Settings with columns of their own; others are numbers in the texts of compressors.
SETTINGS = ("stages", "groups", "microbatches", "batch_size", "warmup_epochs")
NUMBER = re.compile(r"(?:(?P<key>\w+)=)?(?:(?P<name>[A-Za-z][\w-]*):)?(?P<value>(?<=[:=])\d[\d.e-]*)")
# From this ratio of its largest value to its least on, an axis is logarithmic.
WIDE = 6.0


class Varied(NamedTuple):
    """The setting a part varies. `x`: by run, NaN where its family has no such number; `ticks`: what axes show
    at each x; `family`: by run, of which each is a line."""

    label: str
    x: pd.Series
    ticks: dict[float, str]
    family: pd.Series


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
    family = _families(runs, numbers)
    changing = _changing(numbers, family)
    if _together(numbers, changing):
        return _varied(numbers, changing, family)
    most = max(changing, key=lambda name: numbers[name].nunique(), default=None)
    if most is None or numbers.loc[family.isin(_varying(numbers, changing, family)), most].isna().any():
        return _by_method(runs)
    return _varied(numbers, [most], family + _text(numbers[[name for name in changing if name != most]]))


def _together(numbers: pd.DataFrame, names: list[str]) -> bool:
    """Whether each of `names` tells the values of all others."""
    values = numbers[names].dropna().drop_duplicates()
    return not values.empty and not any(values[name].duplicated().any() for name in names)


def _varied(numbers: pd.DataFrame, names: list[str], family: pd.Series) -> Varied:
    values = numbers[names].dropna().drop_duplicates().sort_values(names[0])
    # Both directions alike need saying once.
    ticks = {float(row[0]): " / ".join(dict.fromkeys(f"{value:g}" for value in row)) for row in values.to_numpy()}
    return Varied(" / ".join(names), numbers[names[0]].astype(float), ticks, family)


def _by_method(runs: pd.DataFrame) -> Varied:
    place = {method.label: float(i) for i, method in enumerate(style.methods(runs["arm"]))}
    return Varied("method", runs["arm"].map(place), {x: label for label, x in place.items()}, runs["arm"])


def _varying(numbers: pd.DataFrame, names: list[str], family: pd.Series) -> list[str]:
    return [str(name) for name, own in numbers.groupby(family) if (own[names].nunique() > 1).any()]


def _text(numbers: pd.DataFrame) -> pd.Series:
    """Each row as one word: rows of equal numbers, or of equal gaps, have the same."""
    return numbers.apply(lambda row: " ".join(map(str, row)), axis=1)


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


def _families(runs: pd.DataFrame, numbers: pd.DataFrame) -> pd.Series:
    """Compressors without their numbers: arms that share them differ in numbers alone.

    Where arms of equal compressors and numbers differ in something else (how they are evaluated, say), the words of
    their labels tell them apart.
    """

    def template(text: str) -> str:
        return NUMBER.sub(lambda found: found[0].removesuffix(found["value"]) + "#", text)

    family = runs["forward"].map(template) + " | " + runs["backward"].map(template)
    same = family + _text(numbers)
    if (runs["arm"].groupby(same).nunique() > 1).any():
        family += " | " + runs["arm"].str.replace(r"[\d.]+", "#", regex=True)
    return family


def label_axis(ax: Axes, found: Varied) -> None:
    """Ticks, scale and label of the setting's axis."""
    xs = list(found.ticks)
    if min(xs) > 0 and max(xs) / min(xs) >= WIDE:
        ax.set_xscale("log")
    upright = found.label != "method"
    turned: dict[str, Any] = {} if upright else {"rotation": 35, "ha": "right", "rotation_mode": "anchor"}
    ax.set_xticks(xs, list(found.ticks.values()), **turned)
    ax.minorticks_off()
    ax.margins(x=0.08, y=0.12)
    ax.set_xlabel(found.label)
