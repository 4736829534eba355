"""Held-out accuracy, Matthews correlation and F1 of a classification against optimizer steps."""

from __future__ import annotations

import functools

import pandas as pd
from matplotlib.figure import Figure

from thinpipe.plots import _curves
from thinpipe.plots import _select as select

VERSION = 1
SUMMARY = "held-out accuracy, Matthews correlation and F1 against steps, one line a method"
SOURCE = "Rudakov et al., arXiv 2401.07788"
PARAMETERS: dict = {}
REQUIRES = ("runs", "evals")
NAME = "score_vs_step"
COLUMNS = "tables evals (step, accuracy, matthews, f1), runs (arm, seed, state, fidelity)"


def figures(tables: select.Tables) -> select.Drawn:
    return select.per_part(NAME, _scored(tables), functools.partial(_figure, tables))


def _scored(tables: select.Tables) -> pd.DataFrame:
    """Runs of the parts that have any score: another part, of language modelling, is none the worse for it."""
    runs = select.trained(tables)
    evals = tables["evals"]
    scored = {run for score in _curves.SCORES for run in select.finite(evals, [score])["run_id"]}
    parts = set(runs.loc[runs["run_id"].isin(scored), "part"])
    if not parts:
        raise select.nothing(tables, "a classification that was evaluated")
    return runs[runs["part"].isin(parts)]


def _figure(tables: select.Tables, part: str, runs: pd.DataFrame) -> Figure:
    runs = select.once(runs)
    kinds = {kind: _curves.curves(tables, kind, runs) for kind in _curves.SCORES}
    kinds = {kind: found for kind, found in kinds.items() if found}
    return _curves.against_steps(tables, part, runs, kinds, what="Score", columns=COLUMNS)
