"""Seconds until a method's training loss is as low as the uncompressed arm's at its end, against link rate."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from thinpipe.plots import _composed, style
from thinpipe.plots import _select as select
from thinpipe.plots._composed import Network, Reached

VERSION = 1
SUMMARY = "time to the uncompressed arm's final training loss against link rate, one line a method"
SOURCE = "AC-SGD, arXiv 2206.01299, figure 4"
PARAMETERS: dict = {}
REQUIRES = ("runs", "curves")
NAME = "time_to_target"
COLUMNS = (
    "tables runs (arm, seed, forward, backward, final_train_loss), "
    "curves (rate_mbit, rho, time_of, t_s, train_loss, composed, fidelity)"
)
NOT_REACHED = "not reached by all\nseeds (mean of the\ntimes they ran)"
ARROW = "$\\uparrow$"


def figures(tables: select.Tables) -> select.Drawn:
    return select.per_part(NAME, select.trained(tables), functools.partial(_figure, tables))


def _figure(tables: select.Tables, part: str, runs: pd.DataFrame) -> Figure:
    found, goal, arm = _composed.timed(tables, runs)
    every = [(network, _composed.reached(rows, goal)) for network, rows in _composed.networks(found)]
    whose = sorted({network.time_of for network, _ in every})
    arms = style.methods(found["arm"])
    fig = style.new_figure(1, len(whose), (4.6, 3.4))
    counts: list[int] = []
    for ax, time_of in zip(fig.subplots(1, len(whose), squeeze=False)[0], whose, strict=True):
        here = [(network, reached) for network, reached in every if network.time_of == time_of]
        xs = _places([network for network, _ in here])
        for i, method in enumerate(arms):
            shift = 10 ** style.dodge(i, len(arms), 0.1)
            counts += _line(
                ax, method, [(x * shift, by.get(method.label)) for x, (_, by) in zip(xs, here, strict=True)]
            )
        times = [t for _, by in here for one in by.values() for t in (*one.times.values(), *one.censored.values())]
        style.log_axis(ax.yaxis, times)
        _axes(ax, xs, [network for network, _ in here])
        ax.set_title(time_of)
    text = select.caption(tables, part, COLUMNS, counts, timing=False)
    text += _composed.target_text(arm) + _composed.composed_text(found) + " Methods side by side at each rate."
    handles = [*map(style.handle, arms), *_notes([one for _, by in every for one in by.values()])]
    style.finish(fig, f"Time to the final loss of {arm}, part {part}", text, handles)
    return fig


def _places(networks: list[Network]) -> list[float]:
    """x of each network, on a logarithmic axis; a link without limit stands right of the fastest one."""
    fastest = max((n.rate for n in networks if not np.isnan(n.rate)), default=0.4)
    return [2.5 * fastest if np.isnan(network.rate) else network.rate for network in networks]


def _line(ax: Axes, arm: style.Method, points: list[tuple[float, Reached | None]]) -> list[int]:
    """Draw one method; return the number of seeds behind each of its means."""
    xs, bars, flags = [], [], []
    for x, one in points:
        if one is None:
            continue
        own = list(one.times.values())
        style.seeds(ax, arm, [x] * len(own), own, [one.flagged] * len(own))
        if one.censored:
            ends = [*own, *one.censored.values()]
            look: dict[str, Any] = {"linestyle": "none", "marker": ARROW, "markersize": 9, "zorder": 5}
            ax.plot(x, float(np.mean(ends)), color=arm.colour, gid=f"censored {arm.label}", **look)
        elif own:
            xs.append(x)
            bars.append(select.bar(own))
            flags.append(one.flagged)
    style.means(ax, arm, xs, bars, flags)
    return [bar.n for bar in bars]


def _axes(ax: Axes, xs: list[float], networks: list[Network]) -> None:
    ax.set_xscale("log")
    ax.set_xticks(xs, [network.tick() for network in networks])
    ax.minorticks_off()
    rho = any(not np.isnan(network.rho) for network in networks)
    ax.set_xlabel("link rate set (Mbit/s, log scale)" + (", in brackets rho" if rho else ""))
    ax.set_ylabel("training time to the target (s, log scale)")
    if len(xs) == 1:
        ax.set_xlim(xs[0] / 2, 2 * xs[0])


def _notes(every: list[Reached]) -> list[Artist]:
    notes = style.notes(flagged=any(one.flagged for one in every))
    return [*notes, *([style.note(NOT_REACHED, ARROW)] if any(one.censored for one in every) else [])]
