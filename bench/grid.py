"""The grid of bandwidth_vs_bits (5 rates x 9 methods x 1 seed): trained once a method, or in full for every cell.

composed: a training a method, a few timed steps a cell, curves put together of both (harness/compose.py), all through
one fork server that measures each network once. in full: every cell its own processes, network and training; measured
on a sample of cells, drawn by a fixed seed, and scaled up by the composed times of all cells.

    speedup >= 5        max_difference <= 0.05        losses equal, bit for bit

On a machine that others share, what is timed at one minute and run in full at another differs for that alone. So
each sampled cell is timed anew right before or after each run in full of it, `--repeats` times: `differences`, of the
medians of both, are the composition's own. `of_the_sweep` are those of the sweep's composed times against the same
medians: what a user of one cell has, the machine's drift included. `spread` is how far apart the runs in full are,
largest less smallest over their mean: where it is above 0.05, no single run tells 5 %. `ratios` are composed over
measured time with their 90 % intervals, paired by round, by cell and over all pairs: an interval within 0.9524 to 1.05
shows the composition to be within 5 %, one that reaches across leaves it open (docs/claims.md). `flagged` counts a
cell's rounds by what their runs were flagged for (docs/numbers.md, fidelity); where a cell has others, those are left
out.
"""

from __future__ import annotations

import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
from thinpipe.harness import experiment, lock, stats, tables
from thinpipe.harness.claims.verdict import LEVEL
from thinpipe.harness.experiment import COMPOSITION_CHECK, Cell, Experiment, ExperimentPart
from thinpipe.harness.runner import Session
from thinpipe.harness.spec import RunSpec
from thinpipe.harness.store import Store

if TYPE_CHECKING:
    import pandas as pd

# One seed; a cell's step time needs fewer steps than a figure that compares a few per cent.
SETTINGS = ("seeds=[0]", "timing.batches=2", "timing.passes=5")
DRAWN_BY = "grid"
# A tenth of the 45 cells.
SAMPLE = 4


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


def narrowed(loaded: Experiment, cell: Cell) -> Experiment:
    """`loaded` with only what the full run `cell` is composed of, and that run: its training, and at its network the
    timing of its method and of FP32, which the training's warm-up is."""
    network = cell.runs[0][1].network
    kept = {
        "convergence": lambda other: other.arm == cell.arm,
        "timing": lambda other: other.arm in (cell.arm, "FP32") and other.runs[0][1].network == network,
    }
    parts = [replace(part, cells=tuple(filter(kept[part.name], part.cells))) for part in loaded.parts]
    return replace(loaded, parts=(*parts, ExperimentPart(COMPOSITION_CHECK, (cell,))))


def specs_of(loaded: Experiment, *parts: str) -> list[RunSpec]:
    """The specs of `parts`, each once."""
    found = [spec for part in loaded.parts if part.name in parts for cell in part.cells for _, spec in cell.runs]
    return list({spec.run_id: spec for spec in found}.values())


def run_all(session: Session, store: Store, specs: Iterable[RunSpec]) -> None:
    """Check, then run each of `specs` and keep it in `store`; SystemExit where one does not end well."""
    every = list(specs)
    session.check(every)
    for spec in every:
        status = session.run(spec, store.begin(spec))
        if status["state"] != "done":
            raise SystemExit(f"run {spec.run_id}: {status['error']}")
        store.finish(spec.run_id, status)


@dataclass(frozen=True)
class Pair:
    """One full run beside its own timing. composed_s, measured_s: of its training; wall_s: with all around it."""

    composed_s: float
    measured_s: float
    wall_s: float
    fidelity: str


def pair(loaded: Experiment, cell: Cell, trained: Store, folder: Path, *, timed_first: bool) -> Pair:
    """Time `cell` and run it in full, one right after the other, in `folder`; its training is taken from `trained`."""
    store, own = Store(folder), narrowed(loaded, cell)
    for spec in specs_of(own, "convergence"):
        shutil.copytree(trained.run_dir(spec.run_id), store.run_dir(spec.run_id))
    store.save_runs(own)
    wall_s = 0.0
    for part in ("timing", COMPOSITION_CHECK) if timed_first else (COMPOSITION_CHECK, "timing"):
        start = time.monotonic()
        with Session(fresh=part == COMPOSITION_CHECK) as session:
            run_all(session, store, specs_of(own, part))
        if part == COMPOSITION_CHECK:
            wall_s = time.monotonic() - start
    composition = tables.build(store, own.name)["composition"]
    row = composition[(composition["part"] == COMPOSITION_CHECK) & composition["measured_s"].notna()].iloc[0]
    if not row["same_losses"]:
        raise SystemExit(f"{name_of(cell)}: the run in full has other losses than the training that is composed")
    return Pair(float(row["composed_s"]), float(row["measured_s"]), wall_s, str(row["fidelity"]))


def name_of(cell: Cell) -> str:
    return f"{cell.arm}, {cell.runs[0][1].network.rate_mbit:g} Mbit/s"


def compare(loaded: Experiment, rounds: int, root: Path) -> dict[str, Any]:
    """Both ways through the grid, the second on a sample of its cells, `rounds` times."""
    store = Store(root / "sweep")
    store.save_runs(loaded)
    start = time.monotonic()
    with Session() as session:
        run_all(session, store, specs_of(loaded, *(part.name for part in loaded.parts)))
    composition = tables.build(store, loaded.name)["composition"]
    composed_s = time.monotonic() - start
    cells = random.Random(DRAWN_BY).sample(in_full(loaded), SAMPLE)
    pairs: dict[str, list[Pair]] = {name_of(cell): [] for cell in cells}
    for turn in range(rounds):
        for place, cell in enumerate(cells):
            folder = root / f"{turn}-{place}"
            pairs[name_of(cell)].append(pair(loaded, cell, store, folder, timed_first=turn % 2 == 0))
            say(f"round {turn + 1} of {rounds}: {name_of(cell)}: {pairs[name_of(cell)][-1]}")
    return result(swept(composition), pairs, composed_s)


def swept(composition: pd.DataFrame) -> dict[str, float]:
    """Composed seconds of each cell of the sweep, from table composition."""
    curves = composition[composition["part"] == "convergence"]
    names = (f"{arm}, {rate:g} Mbit/s" for arm, rate in zip(curves["arm"], curves["rate_mbit"], strict=True))
    return dict(zip(names, map(float, curves["composed_s"]), strict=True))


def result(sweep: Mapping[str, float], pairs: Mapping[str, Sequence[Pair]], composed_s: float) -> dict[str, Any]:
    """The numbers. sweep: composed seconds by cell; pairs: of the sampled ones; composed_s: what the sweep took."""
    flagged = {name: dict(Counter(one.fidelity for one in found)) for name, found in pairs.items()}
    rounds = max(map(len, pairs.values()))
    pairs = {name: [one for one in found if one.fidelity == "ok"] or found for name, found in pairs.items()}
    every = [one for of_cell in pairs.values() for one in of_cell]
    measured = {name: statistics.median(one.measured_s for one in found) for name, found in pairs.items()}
    composed = {name: statistics.median(one.composed_s for one in found) for name, found in pairs.items()}
    around = statistics.mean(one.wall_s - one.measured_s for one in every)
    slower = sum(measured.values()) / sum(sweep[name] for name in pairs)
    whole_s = len(sweep) * around + slower * sum(sweep.values())
    differences = {name: abs(composed[name] / measured[name] - 1) for name in pairs}
    of_the_sweep = {name: abs(sweep[name] / measured[name] - 1) for name in pairs}
    return {
        "speedup": whole_s / composed_s,
        "max_difference": max(differences.values()),
        "differences": differences,
        "of_the_sweep": {"max_difference": max(of_the_sweep.values()), "differences": of_the_sweep},
        "ratios": {name: ratio(found) for name, found in pairs.items()},
        "ratio_of_all": ratio(every),
        "spread": {name: stats.spread([one.measured_s for one in found]) for name, found in pairs.items()},
        "flagged": {name: flags for name, flags in flagged.items() if set(flags) != {"ok"}},
        "composed_s": composed_s,
        "in_full_s": whole_s,
        "cells": len(sweep),
        "sampled": len(pairs),
        "rounds": rounds,
    }


def ratio(pairs: Sequence[Pair]) -> list[float | None]:
    """[value, low, high] of composed over measured time."""
    composed, measured = (
        dict(enumerate(values)) for values in ([one.composed_s for one in pairs], [one.measured_s for one in pairs])
    )
    found = stats.paired_ratio(composed, measured, level=LEVEL)
    return [found.mean, found.low, found.high]


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def main() -> None:
    options = common.arguments(__doc__ or "", repeats=5)
    loaded = experiment.load("bandwidth_vs_bits", SETTINGS)
    with tempfile.TemporaryDirectory() as folder, lock.hold("bench grid", Path(folder), say):
        found = compare(loaded, options.repeats, Path(folder))
    common.show(found, options.json)


if __name__ == "__main__":
    main()
