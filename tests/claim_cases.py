"""Made experiments and runs for tests of claims, and what is judged of them."""

from __future__ import annotations

import dataclasses
import functools
import json

import pandas as pd

from thinpipe.harness import claims
from thinpipe.harness import declared as declared_module
from thinpipe.harness.experiment import expand

KEYS = ("experiment", "claim", "state", "value", "bound", "interval", "n", "source")


GRID = {
    "name": "demo",
    "base": {"model.preset": "micro", "train.epochs": 4},
    "arm": [
        {"label": "FP32"},
        {"label": "AQ", "compression.forward": "delta(fixpoint:2)"},
        {"label": "Direct", "compression.forward": "fixpoint:2"},
    ],
    "part": [
        {"name": "loss"},
        {"name": "time", "base": {"measure": "timing"}, "axes": {"network.rate_mbit": [100, 30, 10]}},
    ],
}
CLAIM = {"name": "c", "sentence": "It is so.", "source": "ours", "part": "loss", "metric": "final_train_loss",
         "arm": "AQ", "other": "FP32", "relation": "<"}  # fmt: skip


@functools.cache
def grid(seeds):
    return expand({**GRID, "seeds": list(seeds)})


def declared(*items, seeds=(0, 1, 2), **more):
    """An experiment of three methods, trained in one part, timed at three rates in another, and its claims. An item is
    CLAIM with changes; None leaves a key out."""
    merged = [{**CLAIM, "name": f"c{i}", **item} for i, item in enumerate(items)]
    written = [{key: value for key, value in item.items() if value is not None} for item in merged]
    if more:
        return expand({**GRID, "seeds": list(seeds), "claim": written, **more})
    # As `expand` does it, but for building the same runs again.
    found, parsed = grid(tuple(seeds)), declared_module.claims(written, "demo")
    for claim in parsed:
        claims.check(claim, {part.name: part for part in found.parts}, "demo")
    return dataclasses.replace(found, claims=parsed)


@functools.cache
def run_id(spec):
    return spec.run_id


def run_rows(experiment, values, column="final_train_loss", part="loss", **common):
    """A runs frame: values[arm][seed] or values[arm, rate][seed] in `column`; a dict adds columns, None: no run."""
    rows = []
    for cell in next(p for p in experiment.parts if p.name == part).cells:
        given_values = values.get((cell.arm, cell.runs[0][1].network.rate_mbit), values.get(cell.arm, {}))
        for seed, spec in cell.runs:
            value = given_values.get(seed) if isinstance(given_values, dict) else given_values[seed]
            if value is None:
                continue
            own = value if isinstance(value, dict) else {column: value}
            rows.append({"run_id": run_id(spec), "state": "done", "fidelity": "ok", **common, **own})
    return pd.DataFrame(rows, columns=sorted({"run_id", "state", "fidelity", column, *(k for r in rows for k in r)}))


def judged(experiment, runs, **tables):
    found = claims.evaluate(experiment, {"runs": runs, **tables})
    json.dumps(found, allow_nan=False)
    assert all(set(KEYS) <= set(claim) for claim in found)
    return found[0] if len(found) == 1 else found


def losses(experiment, **values):
    return judged(experiment, run_rows(experiment, values))


BAD = {"state": "diverged"}
TIME = {"part": "time", "metric": "step_time_s", "where": {"network.rate_mbit": 10}}


def timed(experiment, flagged=(), state="done", **values):
    runs = run_rows(experiment, values, "step_time_s", "time", state=state)
    runs.loc[runs.index.isin(flagged), "fidelity"] = "cpu-bound"
    return judged(experiment, runs)
