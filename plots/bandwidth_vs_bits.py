"""Two heat maps over link rate (rows) and method (columns): step time, and speed-up over uncompressed."""

from __future__ import annotations

import functools
from collections.abc import Callable

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from thinpipe.plots import _select as select
from thinpipe.plots import style

VERSION = 1
SUMMARY = "heat maps of step time and of speed-up over FP32: link rate against method"
SOURCE = "AC-SGD, arXiv 2206.01299, table 2"
PARAMETERS: dict = {}
REQUIRES = ("runs",)
NAME = "bandwidth_vs_bits"
COLUMNS = "table runs (rate_mbit, step_time_s, arm, seed, forward, backward, fidelity)"
CELL_IN = (0.66, 0.5)


def figures(tables: select.Tables) -> select.Drawn:
    return select.per_part(NAME, select.timed(tables), functools.partial(_figure, tables))


def _figure(tables: select.Tables, part: str, runs: pd.DataFrame) -> Figure:
    select.one_setting(runs, ["arm", "rate_mbit"])
    baseline = _baseline(runs)
    arms = style.methods(runs["arm"])
    rates = [rate for rate, _ in runs.groupby("rate_mbit", dropna=False)]
    maps = 1 if baseline.empty else 2
    # At least wide enough for the titles, and high enough for the label of the rates.
    size = (max(len(arms) * CELL_IN[0] + 0.8, 4.5), max(len(rates) * CELL_IN[1] + 0.5, 1.8))
    fig = style.new_figure(maps, 1, size, legend_in=0.0)
    axes = fig.subplots(maps, 1, squeeze=False, sharex=True)[:, 0]
    counts = _map(axes[0], runs, arms, rates, _step_time)
    axes[0].set_title("Step time (s)")
    text = select.caption(tables, part, COLUMNS, counts, timing=True, points="in brackets")
    if maps == 2:
        _map(axes[1], runs, arms, rates, lambda here: _speed_up(here, baseline), ratio=True)
        over = baseline["arm"].iloc[0]
        axes[1].set_title(f"Speed-up over {over} (ratio of step times; above 1 is faster)")
        text += " Speed-up: geometric mean of the ratios paired by seed."
    else:
        text += " No uncompressed arm in this part, so no speed-up."
    axes[-1].set_xticks(range(len(arms)), [arm.label for arm in arms], rotation=35, ha="right", rotation_mode="anchor")
    text += " *: a run of the cell is flagged (runs.fidelity)." if any(select.flagged(runs)) else ""
    style.finish(fig, f"Step time by link rate and method, part {part}", text, [])
    return fig


def _baseline(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs of the uncompressed arm, the first in legend order where there are several; maybe none."""
    plain = runs[(runs["forward"] == "none") & (runs["backward"] == "none")]
    return plain if plain.empty else plain[plain["arm"] == style.methods(plain["arm"])[0].label]


def _step_time(here: pd.DataFrame) -> style.Bar:
    return select.bar(here["step_time_s"])


def _speed_up(here: pd.DataFrame, baseline: pd.DataFrame) -> style.Bar | None:
    """None where the uncompressed arm has no seed in common with the cell."""
    return select.ratio_bar(_by_seed(_at(baseline, here["rate_mbit"].iloc[0])), _by_seed(here))


def _by_seed(runs: pd.DataFrame) -> dict[int, float]:
    return dict(zip(runs["seed"], runs["step_time_s"], strict=True))


def _at(runs: pd.DataFrame, rate: float) -> pd.DataFrame:
    return runs[runs["rate_mbit"].isna() if pd.isna(rate) else runs["rate_mbit"] == rate]


def _map(
    ax: Axes,
    runs: pd.DataFrame,
    arms: list[style.Method],
    rates: list[float],
    estimate: Callable[[pd.DataFrame], style.Bar | None],
    *,
    ratio: bool = False,
) -> list[int]:
    """One heat map with its numbers written in; return the number of seeds behind each cell."""
    grid = np.full((len(rates), len(arms)), np.nan)
    texts, counts = {}, []
    for i, rate in enumerate(rates):
        for j, arm in enumerate(arms):
            here = _at(runs[runs["arm"] == arm.label], rate)
            found = None if here.empty else estimate(here)
            if found is None:
                continue
            grid[i, j] = found.mean
            counts.append(found.n)
            flag = "*" if any(select.flagged(here)) else ""
            bounds = "" if np.isnan(found.low) else f"[{_digits(found.low)}, {_digits(found.high)}]"
            texts[i, j] = f"{_digits(found.mean)}{flag}", bounds
    _paint(ax, grid, texts, ratio=ratio)
    ax.set_yticks(range(len(rates)), [select.rate_text(rate) for rate in rates])
    ax.set_ylabel("link rate set (Mbit/s)")
    return counts


def _digits(value: float) -> str:
    """Three significant digits, trailing zeros kept: 0.180, 1.00, 12.3, 123."""
    return f"{value:#.3g}".rstrip(".")


def _paint(ax: Axes, grid: np.ndarray, texts: dict[tuple[int, int], tuple[str, str]], *, ratio: bool) -> None:
    finite = grid[np.isfinite(grid)]
    # Colours follow the logarithm: twice as fast is as far from 1 as twice as slow.
    if ratio:
        reach = max(float(np.abs(np.log(finite)).max()), 0.05) if finite.size else 1.0
        norm, colours = LogNorm(np.exp(-reach), np.exp(reach)), mpl.colormaps["PuOr"]
    else:
        norm, colours = LogNorm(finite.min() / 1.02, finite.max() * 1.02), mpl.colormaps["cividis_r"]
    ax.grid(False)
    ax.set_facecolor("#EEEEEE")
    ax.imshow(grid, norm=norm, cmap=colours, aspect="auto")
    for (i, j), (value, bounds) in texts.items():
        red, green, blue, _ = colours(norm(grid[i, j]))
        ink = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
        ax.text(j, i, value, ha="center", va="bottom" if bounds else "center", size=7.5, color=ink)
        ax.text(j, i, bounds, ha="center", va="top", size=5, color=ink)
