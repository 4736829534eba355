"""The grid of bandwidth_vs_bits (5 rates x 9 methods x 1 seed): trained once a method, or in full for every cell.

composed: a training a method, a few timed steps a cell, curves put together of both (harness/compose.py), all through
one fork server that measures each network once. in full: every cell its own processes, network and training; measured
on a sample of cells, drawn by a fixed seed, and scaled up by the composed times of all cells.

    speedup >= 5        max_difference <= 0.05        losses equal, bit for bit

`differences` says of which cells, so that one that is off can be looked into. Where other work shares the machine, a
cell is timed at one speed of computing and run in full, minutes later, at another. The compute of a step is the same
work in both, so it tells by how much: `speed` is compute_s of the run in full over that of the timed steps, and
`at_equal_speed` gives the differences with the timed steps, but for their waiting, brought to the speed of the run in
full. That is a rough correction: it takes a cell's computing for slower throughout, and overshoots where only some
steps were. `flagged` says which cells rest on runs whose times are not to be trusted (docs/numbers.md, fidelity).
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
from thinpipe.harness import experiment, lock, tables
from thinpipe.harness.experiment import COMPOSITION_CHECK, Cell, Experiment, ExperimentPart
from thinpipe.harness.runner import Session
from thinpipe.harness.spec import RunSpec
from thinpipe.harness.store import Store

if TYPE_CHECKING:
    import pandas as pd

# One seed; a cell's step time needs fewer steps than a figure that compares a few per cent.
SETTINGS = ("seeds=[0]", "timing.batches=2", "timing.passes=5")
DRAWN_BY = "grid"


def in_full(loaded: Experiment) -> list[Cell]:
    """Every cell of the grid as a full run: the training of its method at its network."""
    parts = {part.name: part for part in loaded.parts}
    trained = {cell.arm: cell.runs[0][1] for cell in parts["convergence"].cells}
    cells = []
    for cell in parts["timing"].cells:
        seed, timed = cell.runs[0]
        spec = trained[cell.arm].model_copy(update={"network": timed.network, "measure": "full"})
        cells.append(Cell(COMPOSITION_CHECK, cell.arm, cell.settings, spec.cell_id, ((seed, spec),)))
    return cells


def run_all(session: Session, store: Store, specs: Iterable[RunSpec]) -> None:
    """Check, then run each of `specs` and keep it in `store`; SystemExit where one does not end well."""
    every = list(specs)
    session.check(every)
    for spec in every:
        status = session.run(spec, store.begin(spec))
        if status["state"] != "done":
            raise SystemExit(f"run {spec.run_id}: {status['error']}")
        store.finish(spec.run_id, status)


def compare(loaded: Experiment, sample: int, root: Path) -> dict[str, Any]:
    """Both ways through the grid, the second on `sample` of its cells."""
    store = Store(root)
    cells = random.Random(DRAWN_BY).sample(full := in_full(loaded), sample)
    check = ExperimentPart(COMPOSITION_CHECK, tuple(cells))
    store.save_runs(replace(loaded, parts=(*loaded.parts, check)))
    start = time.monotonic()
    with Session() as session:
        run_all(session, store, {spec.run_id: spec for cell in loaded.cells() for _, spec in cell.runs}.values())
    tables.build(store, loaded.name)
    composed_s = time.monotonic() - start
    taken = []
    for cell in cells:
        start = time.monotonic()
        with Session(fresh=True) as session:
            run_all(session, store, [cell.runs[0][1]])
        taken.append(time.monotonic() - start)
    built = tables.build(store, loaded.name)
    return result(built["composition"], built["runs"], cells, taken, composed_s) | {"cells": len(full)}


def result(
    composition: pd.DataFrame, runs: pd.DataFrame, cells: Sequence[Cell], taken: Sequence[float], composed_s: float
) -> dict[str, Any]:
    """The numbers, from table composition: every cell's composed time, and the sampled ones' measured time. runs: what
    both ways computed a step."""
    checked = composition[composition["part"] == COMPOSITION_CHECK].set_index("run_id")
    # A run checked elsewhere than at its own network has no measured time.
    checked = checked.loc[checked["measured_s"].notna()].loc[[cell.runs[0][1].run_id for cell in cells]]
    if not checked["same_losses"].all():
        raise SystemExit("a run in full has other losses than the training that is composed")
    curves = composition[composition["part"] == "convergence"]["composed_s"]
    around = statistics.mean(wall - trained for wall, trained in zip(taken, checked["measured_s"], strict=True))
    slower = checked["measured_s"].sum() / checked["composed_s"].sum()
    whole_s = len(curves) * around + slower * curves.sum()
    names = [f"{cell.arm}, {cell.runs[0][1].network.rate_mbit:g} Mbit/s" for cell in cells]
    speeds, errors = at_equal_speed(checked, runs)
    return {
        "speedup": float(whole_s / composed_s),
        "max_difference": float(checked["total_error"].max()),
        "differences": dict(zip(names, map(float, checked["total_error"]), strict=True)),
        "at_equal_speed": {
            "max_difference": max(errors),
            "differences": dict(zip(names, errors, strict=True)),
            "speed": dict(zip(names, speeds, strict=True)),
        },
        "composed_s": composed_s,
        "in_full_s": float(whole_s),
        "sampled": len(cells),
        "sampled_s": sum(taken),
        "flagged": {name: str(flags) for name, flags in zip(names, checked["fidelity"], strict=True) if flags != "ok"},
    }


def at_equal_speed(checked: pd.DataFrame, runs: pd.DataFrame) -> tuple[list[float], list[float]]:
    """By sampled cell: compute_s of its run in full over that of its timed steps, and total_error with the composed
    time at the speed of the run in full."""
    by_id = runs.drop_duplicates("run_id").set_index("run_id")
    speeds, errors = [], []
    for run_id, row in checked.iterrows():
        timed = by_id.loc[row["timing_run_id"].split("+"), ["compute_s", "wait_s", "step_time_s"]].median()
        ratio = by_id.loc[run_id, "compute_s"] / timed["compute_s"]
        working = 1 - timed["wait_s"] / timed["step_time_s"]
        composed_s = row["composed_s"] * (1 + (ratio - 1) * working)
        speeds.append(float(ratio))
        errors.append(float(abs(composed_s - row["measured_s"]) / row["measured_s"]))
    return speeds, errors


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def main() -> None:
    options = common.arguments(__doc__ or "", repeats=4)
    loaded = experiment.load("bandwidth_vs_bits", SETTINGS)
    with tempfile.TemporaryDirectory() as folder, lock.hold("bench grid", Path(folder), say):
        found = compare(loaded, options.repeats, Path(folder))
    common.show(found, options.json)


if __name__ == "__main__":
    main()
