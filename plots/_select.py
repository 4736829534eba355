"""Which runs a figure draws, what it leaves out, and the words that say so. Shared by figures.

A figure that has nothing to draw says which part of an experiment would give it something, as a UserError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from thinpipe.harness.errors import UserError
from thinpipe.harness.stats import Interval, interval, paired_ratio
from thinpipe.plots import style
from thinpipe.plots.style import Bar

Tables = Mapping[str, pd.DataFrame]
#: What a figure module's `figures` returns: file stem -> figure, or why a part has none.
Drawn = list[tuple[str, Figure | UserError]]
TIMED = ("timing", "full")
TRAINED = ("convergence", "full")
LEVEL = 0.95
#: A few cells that were run once more, in full, to hold composed times against: no part of what is compared.
CHECK_PART = "composition-check"


def timed(tables: Tables, columns: Sequence[str] = ("step_time_s",)) -> pd.DataFrame:
    """Runs whose step times may be compared: done, measured for timing, on this machine, `columns` finite."""
    runs = _declared(tables)
    chosen = finite(runs[runs["measure"].isin(TIMED) & (runs["state"] == "done")], columns)
    if chosen.empty:
        raise nothing(tables, 'a part with measure = "timing" with a finished run on this machine')
    return chosen


def trained(tables: Tables, columns: Sequence[str] = ()) -> pd.DataFrame:
    """Runs that trained, done or diverged, wherever they ran; of these the ones whose `columns` are finite."""
    runs = _declared(tables)
    ended = runs["state"].isin(("done", "diverged", "foreign"))
    chosen = finite(runs[runs["measure"].isin(TRAINED) & ended], columns)
    if chosen.empty:
        raise nothing(tables, 'a part with measure = "convergence" with a finished run')
    return chosen


def _declared(tables: Tables) -> pd.DataFrame:
    runs = tables["runs"]
    return runs[runs["part"] != CHECK_PART]


def finite(rows: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """The rows whose `columns` all hold a number: what did not end has none, what diverged may hold inf."""
    numbers = rows[list(columns)].astype(np.float64)
    return rows[np.isfinite(numbers).all(axis=1)]


def nothing(tables: Tables, needed: str) -> UserError:
    """The error of a figure whose data an experiment does not have."""
    return UserError(f"nothing to draw for {experiment(tables)!r}: it needs {needed}.")


def experiment(tables: Tables) -> str:
    names = sorted(set(tables["runs"]["experiment"]))
    return ", ".join(names) or "an experiment without finished runs"


def per_part(name: str, runs: pd.DataFrame, make: Callable[[str, pd.DataFrame], Figure]) -> Drawn:
    """One figure a part, make(part, its runs), so that different grids never meet in one line.

    A part that cannot be drawn (a UserError of `make`) does not keep the others from it: its error stands in
    the place of its figure, and is raised only when no part can be drawn.
    """
    parts = sorted(set(runs["part"]))
    drawn: Drawn = []
    with style.context():
        for part in parts:
            try:
                made: Figure | UserError = make(part, runs[runs["part"] == part])
            except UserError as error:
                made = error
            drawn.append((name if len(parts) == 1 else f"{name}.{part}", made))
    errors = [made for _, made in drawn if isinstance(made, UserError)]
    if errors and len(errors) == len(drawn):
        raise errors[0]
    return drawn


def once(runs: pd.DataFrame) -> pd.DataFrame:
    """One run for each training: those that differ in the network alone have the same numbers (train_id).

    UserError where an arm has several settings with one seed, which cannot share a curve.
    """
    runs = runs.drop_duplicates(["arm", "seed", "train_id"])
    one_setting(runs, ["arm", "seed"], "train_id")
    return runs


def one_setting(runs: pd.DataFrame, by: Sequence[str], identity: str = "cell") -> None:
    """Refuse to average over different settings: within each group of `by`, `identity` must be one.

    It happens where an experiment was changed and run again: its old runs are still listed.
    """
    counts = runs.groupby(list(by), dropna=False)[identity].nunique()
    mixed = counts[counts > 1]
    if not mixed.empty:
        key = mixed.index[0] if isinstance(mixed.index[0], tuple) else (mixed.index[0],)
        where = ", ".join(f"{name} {value}" for name, value in zip(by, key, strict=True))
        raise UserError(
            f"part {runs['part'].iloc[0]!r} has {mixed.iloc[0]} different settings for {where}: they cannot "
            "share a line. Give them arms or parts of their own. If the experiment was changed since, delete "
            "its runs.json and run it again (done runs are kept)."
        )


def bar(values: Sequence[float] | pd.Series) -> Bar:
    """Mean over seeds of finite values (see `finite`); the bar is the 95 % t interval from 3 seeds on, and spans
    both of two."""
    data = np.asarray(values, dtype=np.float64)
    found = interval(list(data), LEVEL)
    return _as_bar(found, float(data.min()), float(data.max()))


def ratio_bar(a: Mapping[int, float], b: Mapping[int, float]) -> Bar | None:
    """Geometric mean of a / b paired by seed, with a bar as `bar` has; None where they share no seed."""
    seeds = a.keys() & b.keys()
    if not seeds:
        return None
    ratios = [a[seed] / b[seed] for seed in seeds]
    return _as_bar(paired_ratio(a, b, LEVEL), min(ratios), max(ratios))


def _as_bar(found: Interval, least: float, most: float) -> Bar:
    if found.low is None or found.high is None:
        return Bar(found.mean, np.nan, np.nan, found.n)
    if found.n == 2:
        # Their t interval is 12.7 times as wide as they are apart: it would hide everything else.
        return Bar(found.mean, least, most, 2)
    return Bar(found.mean, found.low, found.high, found.n)


def flagged(runs: pd.DataFrame) -> list[bool]:
    """Which of `runs` have a fidelity that is not ok."""
    return [fidelity != "ok" for fidelity in runs["fidelity"]]


def caption(
    tables: Tables,
    part: str,
    source: str,
    counts: Sequence[int],
    *,
    timing: bool,
    points: str = "small points: seeds, large: their mean; bars",
    left_out: Sequence[str] | None = None,
) -> str:
    """Experiment, part, tables and columns, number of seeds, meaning of bars, and what was left out.

    points: what shows the seeds and their interval; counts: the number of seeds behind each mean; left_out:
    states whose runs the figure does not show. UserError without any mean: then there is nothing to draw.
    """
    if not counts:
        raise nothing(tables, f"a run of part {part!r} that got far enough to have numbers")
    runs = tables["runs"]
    rest = runs[(runs["part"] == part) & runs["measure"].isin(TIMED if timing else TRAINED)]
    hidden = left_out if left_out is not None else ("failed", "foreign", "diverged") if timing else ("failed",)
    absent = [f"{count} {state}" for state in hidden if (count := int((rest["state"] == state).sum()))]
    text = f"Experiment {experiment(tables)}, part {part}. Source: {source}. {_seeds(counts, points)}."
    return text + (f" Left out: {', '.join(absent)} run(s)." if absent else "")


def _seeds(counts: Sequence[int], points: str) -> str:
    low, high = min(counts), max(counts)
    if high == 1:
        return "n = 1 seed: no interval"
    n = f"n = {low} seeds" if low == high else f"n = {low} to {high} seeds"
    spans = []
    if high >= 3:
        spans.append("95 % Student t interval of the mean")
    if low <= 2:
        spans.append("both seeds where n = 2")
    return f"{n}; {points}: {', '.join(spans)}"


def rate_text(rate: float, unit: str = "") -> str:
    """A link rate as labels show it; NaN is a link without a limit."""
    return "no limit" if pd.isna(rate) else f"{rate:g} {unit}".rstrip()
