"""Which method is first at the target loss, at each network: a map to choose by."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from thinpipe.plots import _composed, style
from thinpipe.plots import _select as select
from thinpipe.plots._composed import Network, Reached

VERSION = 1
SUMMARY = "map of the method that reaches the uncompressed arm's final loss first, by link rate and rho"
SOURCE = "thinpipe"
PARAMETERS: dict = {}
REQUIRES = ("runs", "curves")
NAME = "best_method"
COLUMNS = (
    "tables runs (arm, seed, forward, backward, final_train_loss), "
    "curves (rate_mbit, rho, time_of, t_s, train_loss, composed, fidelity)"
)
# An interval of fewer seeds decides nothing.
SEEDS = 3
CELL_IN = (1.3, 1.0)


class Choice(NamedTuple):
    """One cell: the first and the second method there, their times, how many times longer the second takes."""

    best: str
    seconds: style.Bar
    second: str | None
    ratio: style.Bar | None
    flagged: bool

    @property
    def decided(self) -> bool:
        """Whether the second is later beyond its interval; also where no other method reaches the target."""
        enough = self.seconds.n >= SEEDS
        return enough and (self.ratio is None or (self.ratio.n >= SEEDS and self.ratio.low > 1))


def figures(tables: select.Tables) -> select.Drawn:
    return select.per_part(NAME, select.trained(tables), functools.partial(_figure, tables))


def _figure(tables: select.Tables, part: str, runs: pd.DataFrame) -> Figure:
    found, goal, arm = _composed.timed(tables, runs)
    chosen = {n: choose(_composed.reached(rows, goal)) for n, rows in _composed.networks(found)}
    whose = sorted({network.time_of for network in chosen})
    rows = [[network for network in chosen if network.time_of == name] for name in whose]
    columns = max(map(len, rows))
    fig = style.new_figure(len(rows), 1, (max(columns * CELL_IN[0] + 0.9, 4.4), CELL_IN[1] + 0.9))
    for ax, own in zip(fig.subplots(len(rows), 1, squeeze=False)[:, 0], rows, strict=True):
        for column, network in enumerate(own):
            _cell(ax, column, chosen[network])
        _axes(ax, own, columns)
    counts = [choice.seconds.n for choice in chosen.values() if choice]
    text = select.caption(tables, part, COLUMNS, counts, timing=False, points="times: means; in brackets")
    text += _composed.target_text(arm) + _composed.composed_text(found)
    text += (
        " x: how many times as long the second takes, paired by seed. Undecided: 1 is within its interval, or there are"
    )
    text += f" fewer than {SEEDS} seeds."
    text += " *: flagged (curves.fidelity)." if any(choice.flagged for choice in chosen.values() if choice) else ""
    style.finish(fig, f"First at the final loss of {arm}, part {part}", text, _legend(list(chosen.values())))
    return fig


def choose(reached: Mapping[str, Reached]) -> Choice | None:
    """The first of the methods whose seeds all reached the target; None where none did."""
    whole = {arm: one for arm, one in reached.items() if one.times and not one.censored}
    order = sorted(whole, key=lambda arm: float(np.mean(list(whole[arm].times.values()))))
    if not order:
        return None
    best, second = order[0], next(iter(order[1:]), None)
    ratio = None if second is None else select.ratio_bar(whole[second].times, whole[best].times)
    # Of methods that did not get there, one that is flagged decides nothing here.
    flagged = any(whole[arm].flagged for arm in order[:2])
    return Choice(best, select.bar(list(whole[best].times.values())), second, ratio, flagged)


def _cell(ax: Axes, column: int, choice: Choice | None) -> None:
    box: dict[str, Any] = {
        "xy": (column - 0.5, -0.5),
        "width": 1,
        "height": 1,
        "edgecolor": "white",
        "linewidth": 2,
        "clip_on": False,
    }
    if choice is None:
        ax.add_patch(Rectangle(facecolor="#EEEEEE", **box))
        _write(ax, column, "none", "black")
        return
    colour = style.method(choice.best).colour
    ax.add_patch(Rectangle(facecolor=colour, **box))
    if not choice.decided:
        ax.add_patch(Rectangle(fill=False, hatch="////", gid="undecided", **{**box, "linewidth": 0}))
    ahead = "no other" if choice.ratio is None else f"{choice.second}\n{choice.ratio.mean:.2f}x {_bounds(choice.ratio)}"
    flag = "*" if choice.flagged else ""
    text = f"{choice.best}\n{choice.seconds.mean:.3g} s{flag}\n\nthen {ahead}"
    # On hatching, text needs a ground of its own.
    ground = None if choice.decided else {"facecolor": colour, "edgecolor": "none", "pad": 1.5}
    _write(ax, column, text, _ink(colour), bbox=ground)


def _write(ax: Axes, column: int, text: str, colour: str, bbox: dict[str, Any] | None = None) -> None:
    # It lies within its cell: the layout, which rounds each format's letters otherwise, need not ask for it.
    ax.text(column, 0, text, ha="center", va="center", size=6.5, color=colour, bbox=bbox, in_layout=False)


def _bounds(bar: style.Bar) -> str:
    return "" if np.isnan(bar.low) else f"[{bar.low:.2f}, {bar.high:.2f}]"


def _ink(colour: str) -> str:
    red, green, blue = to_rgb(colour)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def _axes(ax: Axes, networks: list[Network], columns: int) -> None:
    """The rate below, rho above, whose steps they are at the left."""
    ax.grid(False)
    ax.set_xlim(-0.5, columns - 0.5)
    ax.set_ylim(0.5, -0.5)
    ax.set_xticks(range(len(networks)), [select.rate_text(network.rate) for network in networks])
    ax.set_yticks([0] if networks[0].time_of else [], [_wrapped(networks[0].time_of)] if networks[0].time_of else [])
    ax.tick_params(length=0)
    ax.set_xlabel("link rate set (Mbit/s)")
    known = {column: f"{network.rho:.3g}" for column, network in enumerate(networks) if not np.isnan(network.rho)}
    if known:
        above = ax.secondary_xaxis("top")
        above.set_xticks(list(known), list(known.values()))
        above.tick_params(length=0)
        above.set_xlabel("rho (time to transfer / time to compute)")


def _wrapped(name: str) -> str:
    return name.replace(", ", ",\n")


def _legend(chosen: list[Choice | None]) -> list[Artist]:
    drawn = [choice for choice in chosen if choice]
    entries: list[Artist] = [style.handle(method) for method in style.methods(choice.best for choice in drawn)]
    if not all(choice.decided for choice in drawn):
        entries.append(Patch(facecolor="white", edgecolor=style.NOTE_COLOUR, hatch="////", label="undecided"))
    if any(choice.flagged for choice in drawn):
        entries.append(style.note("flagged (curves.fidelity)", "$*$"))
    return entries
