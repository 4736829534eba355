"""Which runs a figure draws, what it leaves out, and the words that say so. Shared by figures.

A figure that has nothing to draw says which part of an experiment would give it something, as a UserError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from thinpipe.harness.errors import UserError
from thinpipe.harness.stats import Interval, interval, paired_ratio
from thinpipe.plots.style import Bar

Tables = Mapping[str, pd.DataFrame]
TIMED = ("timing", "full")
TRAINED = ("convergence", "full")
LEVEL = 0.95


def timed(tables: Tables, figure: str) -> pd.DataFrame:
    """Runs whose step times may be compared: done, measured for timing, on this machine."""
    runs = _runs(tables)
    chosen = runs[runs["measure"].isin(TIMED) & (runs["state"] == "done") & runs["step_time_s"].notna()]
    if chosen.empty:
        raise nothing(figure, tables, 'a part with measure = "timing" with a finished run on this machine')
    return chosen


def trained(tables: Tables, figure: str) -> pd.DataFrame:
    """Runs with a loss curve: done or diverged, wherever they ran."""
    runs = _runs(tables)
    chosen = runs[runs["measure"].isin(TRAINED) & runs["state"].isin(("done", "diverged", "foreign"))]
    if chosen.empty:
        raise nothing(figure, tables, 'a part with measure = "convergence" with a finished run')
    return chosen


def nothing(figure: str, tables: Tables, needed: str) -> UserError:
    """The error of a figure whose data an experiment does not have."""
    return UserError(f"{figure}: nothing to draw for {experiment(tables)!r}: it needs {needed}.")


def experiment(tables: Tables) -> str:
    names = sorted(set(tables["runs"]["experiment"]))
    return ", ".join(names) or "an experiment without finished runs"


def by_part(runs: pd.DataFrame, figure: str) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """(part, file name, its runs): one figure a part, so that different grids never meet in one line."""
    parts = sorted(set(runs["part"]))
    for part in parts:
        yield part, figure if len(parts) == 1 else f"{figure}.{part}", runs[runs["part"] == part]


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
    """Mean over seeds; the bar is the 95 % t interval from 3 seeds on, and spans both of two."""
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
) -> str:
    """Experiment, part, tables and columns, number of seeds, meaning of bars, and what was left out.

    points: what shows the seeds and their interval; counts: the number of seeds behind each mean.
    """
    runs = tables["runs"]
    rest = runs[(runs["part"] == part) & runs["measure"].isin(TIMED if timing else TRAINED)]
    hidden = ["failed", "foreign", "diverged"] if timing else ["failed"]
    left_out = [f"{count} {state}" for state in hidden if (count := int((rest["state"] == state).sum()))]
    text = f"Experiment {experiment(tables)}, part {part}. Source: {source}. {_seeds(counts, points)}."
    return text + (f" Left out: {', '.join(left_out)} run(s)." if left_out else "")


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


def _runs(tables: Tables) -> pd.DataFrame:
    runs = tables["runs"]
    return runs[runs["state"] != "failed"]
