"""Training and held-out loss against training time, a row a link rate: what compression buys."""

from __future__ import annotations

import functools

import pandas as pd
from matplotlib.figure import Figure

from thinpipe.plots import _curves, style
from thinpipe.plots import _select as select

VERSION = 1
SUMMARY = "training loss and held-out loss against training seconds, one line a method"
SOURCE = "AC-SGD, arXiv 2206.01299, figure 4"
PARAMETERS: dict = {}
REQUIRES = ("runs", "steps", "evals")
NAME = "loss_vs_time"
COLUMNS = "tables steps (step_time_s, train_loss), evals (t_s, eval_loss), runs (rate_mbit, arm, seed, fidelity)"


def figures(tables: select.Tables) -> select.Drawn:
    runs = select.trained(tables)
    runs = runs[runs["state"] != "foreign"]
    if runs.empty:
        raise select.nothing(tables, "a convergence run of this machine: times of another are not compared")
    return select.per_part(NAME, runs, functools.partial(_figure, tables))


def _figure(tables: select.Tables, part: str, runs: pd.DataFrame) -> Figure:
    select.one_setting(runs, ["arm", "rate_mbit"])
    kinds = {kind: _curves.curves(tables, kind, runs) for kind in _curves.KINDS}
    kinds = {kind: found for kind, found in kinds.items() if found}
    if not kinds:
        raise select.nothing(tables, f"runs of part {part!r} that got as far as one step")
    # Two machines' seconds are two scales: each has panels of its own.
    networks = list(runs.groupby(["rate_mbit", "machine"], dropna=False))
    several = runs["machine"].nunique() > 1
    fig = style.new_figure(len(networks), len(kinds))
    panels = fig.subplots(len(networks), len(kinds), squeeze=False)
    counts = []
    for row, ((rate, machine), here) in zip(panels, networks, strict=True):
        where = select.rate_text(rate, "Mbit/s") + (f", machine {machine}" if several else "")
        for ax, (kind, found) in zip(row, kinds.items(), strict=True):
            counts += _curves.panel(ax, kind, "t_s", here, found)
            ax.set_title(f"{ax.get_title()}, {where}")
            ax.set_xlabel("training time (s, evaluation left out)")
            ax.set_xlim(left=0)
    text = select.caption(tables, part, COLUMNS, counts, timing=False, points=_curves.POINTS)
    text += _curves.remark(runs, kinds)
    style.finish(fig, f"Loss against training time, part {part}", text, _curves.legend(runs))
    return fig
