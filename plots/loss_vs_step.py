"""Training loss and held-out loss against optimizer steps: does compression change what is learned?"""

from __future__ import annotations

import functools

import pandas as pd
from matplotlib.figure import Figure

from thinpipe.plots import _curves
from thinpipe.plots import _select as select

VERSION = 1
SUMMARY = "training loss and held-out loss against steps, one line a method"
SOURCE = "AC-SGD, arXiv 2206.01299, figure 3"
PARAMETERS: dict = {}
REQUIRES = ("runs", "steps", "evals")
NAME = "loss_vs_step"
COLUMNS = "tables steps (step, train_loss), evals (step, eval_loss), runs (arm, seed, state, fidelity)"


def figures(tables: select.Tables) -> select.Drawn:
    return select.per_part(NAME, select.trained(tables), functools.partial(_figure, tables))


def _figure(tables: select.Tables, part: str, runs: pd.DataFrame) -> Figure:
    runs = select.once(runs)
    kinds = {kind: _curves.curves(tables, kind, runs) for kind in _curves.KINDS}
    kinds = {kind: found for kind, found in kinds.items() if found}
    if not kinds:
        raise select.nothing(tables, f"runs of part {part!r} that got as far as one step")
    return _curves.against_steps(tables, part, runs, kinds, what="Loss", columns=COLUMNS)
