"""Training and held-out loss against training time, a row a network: what compression buys."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from thinpipe.plots import _composed, _curves, style
from thinpipe.plots import _select as select

VERSION = 2
SUMMARY = "training loss and held-out loss against training seconds, one line a method"
SOURCE = "AC-SGD, arXiv 2206.01299, figure 4"
PARAMETERS: dict = {}
REQUIRES = ("runs", "steps", "evals", "curves")
NAME = "loss_vs_time"
COLUMNS = (
    "tables steps (step_time_s, train_loss), evals (t_s, eval_loss), curves (t_s, train_loss, eval_loss, composed), "
    "runs (rate_mbit, arm, seed, fidelity)"
)
# What a panel's width holds.
TITLE_CHARACTERS = 46


def figures(tables: select.Tables) -> select.Drawn:
    runs = select.trained(tables)
    return select.per_part(NAME, runs, functools.partial(_part, tables))


def _part(tables: select.Tables, part: str, runs: pd.DataFrame) -> Figure:
    """From table curves where it has the part's runs; else by the times that the runs took themselves."""
    found = _composed.curves(tables, runs)
    if found.empty:
        runs = runs[runs["state"] != "foreign"]
        if runs.empty:
            raise select.nothing(tables, "a convergence run of this machine: times of another are not compared")
        return _measured(tables, part, runs)
    return _figure(tables, part, runs, found)


def _figure(tables: select.Tables, part: str, runs: pd.DataFrame, found: pd.DataFrame) -> Figure:
    select.one_setting(found, ["arm", "seed", "key"], "train_id")
    each = _composed.networks(found)
    rows = {}
    for network, here in each:
        kinds = {"training": _points(here, "train_loss"), "held-out": _points(here, "eval_loss")}
        here = here.drop_duplicates("run_id")
        rows[network.text()] = here, {kind: curves for kind, curves in kinds.items() if curves}
    fig, counts = _panels(rows, tables, part)
    drawn = pd.concat([here for here, _ in rows.values()])
    text = select.caption(tables, part, COLUMNS, counts, timing=False, points=_curves.POINTS)
    text += _composed.composed_text(found)
    without = set(runs.loc[runs["state"] != "diverged", "arm"]) - set(found["arm"])
    text += f" Not timed at any network: {', '.join(sorted(without))}." if without else ""
    every = {f"{where} {kind}": curves for where, (_, kinds) in rows.items() for kind, curves in kinds.items()}
    text += _curves.remark(runs.drop_duplicates("run_id"), every)
    style.finish(fig, f"Loss against training time, part {part}", text, _curves.legend(drawn))
    return fig


def _points(rows: pd.DataFrame, column: str) -> dict[str, pd.DataFrame]:
    rows = select.finite(rows, [column]).sort_values("epoch").assign(loss=lambda frame: frame[column])
    return {
        str(run): own[["epoch", "step", "t_s", "loss"]].reset_index(drop=True) for run, own in rows.groupby("run_id")
    }


def _measured(tables: select.Tables, part: str, runs: pd.DataFrame) -> Figure:
    select.one_setting(runs, ["arm", "rate_mbit"])
    kinds = {kind: _curves.curves(tables, kind, runs) for kind in _curves.KINDS}
    kinds = {kind: found for kind, found in kinds.items() if found}
    if not kinds:
        raise select.nothing(tables, f"runs of part {part!r} that got as far as one step")
    # Two machines' seconds are two scales: each has panels of its own.
    several = runs["machine"].nunique() > 1
    rows = {}
    for (rate, machine), here in runs.groupby(["rate_mbit", "machine"], dropna=False):
        where = select.rate_text(rate, "Mbit/s") + (f", machine {machine}" if several else "")
        rows[where] = here, kinds
    fig, counts = _panels(rows, tables, part)
    text = select.caption(tables, part, COLUMNS, counts, timing=False, points=_curves.POINTS)
    if (runs["measure"] == "convergence").any():
        text += " Times: of the runs' own steps, which no timing run fits."
    text += _curves.remark(runs, kinds)
    style.finish(fig, f"Loss against training time, part {part}", text, _curves.legend(runs))
    return fig


def _panels(
    rows: Mapping[str, tuple[pd.DataFrame, Mapping[str, _curves.Curves]]], tables: select.Tables, part: str
) -> tuple[Figure, list[int]]:
    """A row a network, by its title, a column a kind of loss; the numbers of seeds behind the means."""
    kinds = [kind for kind in _curves.KINDS if any(kind in found for _, found in rows.values())]
    if not kinds:
        raise select.nothing(tables, f"runs of part {part!r} that got as far as one epoch")
    fig = style.new_figure(len(rows), len(kinds))
    panels = fig.subplots(len(rows), len(kinds), squeeze=False)
    counts: list[int] = []
    for axes, (where, (runs, found)) in zip(panels, rows.items(), strict=True):
        for ax, kind in zip(axes, kinds, strict=True):
            counts += _curves.panel(ax, kind, "t_s", runs, found.get(kind, {}))
            ax.set_title(textwrap.fill(f"{ax.get_title()}, {where}", TITLE_CHARACTERS))
            ax.set_xlabel("training time (s, evaluation left out)")
            ax.set_xlim(left=0)
    return fig, counts
