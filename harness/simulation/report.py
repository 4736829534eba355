"""`thinpipe simulate`: predictions of an experiment's cells, held against its replays, written, shown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from thinpipe.harness import metrics
from thinpipe.harness import profile as profiles
from thinpipe.harness.errors import UserError
from thinpipe.harness.experiment import Cell, Experiment
from thinpipe.harness.simulation import cells, costs, wan
from thinpipe.harness.simulation.cells import Setting
from thinpipe.harness.simulation.cluster import cluster
from thinpipe.harness.simulation.costs import Codecs, Constants
from thinpipe.harness.simulation.model import Times
from thinpipe.harness.spec import RunSpec

if TYPE_CHECKING:
    import pandas as pd

    from thinpipe.harness.store import Store

TABLE = "predictions"
FIGURE = "predicted_vs_measured"
#: The part of an experiment whose replays the constants are fitted to: no test of the simulator.
FITTED = "constants"
DEFAULTS = "the defaults"
#: What `--against` asks for: cells, the median and the largest error, and the latter in units of a cell's own spread.
CELLS, MEDIAN, WORST, SPREADS = 30, 0.05, 0.10, 2.0


def setting(
    profile: str | None = None, stages: int | None = None, network: str | None = None, *, best_order: bool = False
) -> Setting:
    """What the command line's options ask for. UserError for an order without a network."""
    if best_order and network is None:
        raise UserError("--best-order is of the regions of a network: give one, --wan NAME.")
    found = None if network is None else wan.load(network)
    return Setting(profile=profile, stages=stages, wan=found, order="best" if best_order else "given")


def predict(experiment: Experiment, setting: Setting) -> dict[str, Any]:
    """{experiment, network, constants, cells, against: None, files: []}: every cell simulated, codecs timed here."""
    return _data(experiment, setting, cells.cells(experiment.cells(), setting, Codecs()))


def against(experiment: Experiment, store: Store, setting: Setting) -> dict[str, Any]:
    """As `predict`, with what replays in the store say of codecs and, where the experiment has a part FITTED, of the
    constants, and held against the measured steps of the other cells' replays. Writes the table and the figure.

    UserError where cells are simulated otherwise than they were run, or nothing was replayed.
    """
    from thinpipe.harness import figures, shards, tables

    if setting.profile is not None or setting.stages is not None or setting.wan is not None:
        raise UserError("--against compares with runs as they were: leave out --profile, --stages and --wan.")
    runs = tables.build(store, experiment.name)["runs"]
    replays = runs[(runs["compute"] == "replay") & (runs["state"] == "done")]
    if replays.empty:
        raise UserError(f'{experiment.name} has no finished replay: `thinpipe run` one with compute = "replay".')
    good = replays[replays["fidelity"] == "ok"]
    read = {run_id: _read(store, run_id) for run_id in dict.fromkeys(good["run_id"])}
    codecs = Codecs(costs.of_runs((spec, spans) for spec, _, spans in read.values()))
    fitting = [read[run_id] for run_id in dict.fromkeys(good[good["part"] == FITTED]["run_id"])]
    if fitting:
        setting = replace(setting, constants=constants(fitting, codecs))
    origin = f"fitted to {len(fitting)} replays of part {FITTED!r}" if fitting else DEFAULTS
    waits = [cell for cell in experiment.cells() if cell.runs[0][1].compute == "replay"]
    found = [row | _measured(cell, replays) for row, cell in zip(_rows(waits, setting, codecs), waits, strict=True)]
    data = _data(experiment, setting, found) | {"against": verdict(found), "constants_from": origin}
    columns = metrics.TABLES[TABLE]
    table = [{name: row.get(name) for name in columns} | {"experiment": experiment.name} for row in found]
    folder = store.experiment_dir(experiment.name)
    frames = tables.write(folder / "tables", {TABLE: shards.to_arrow(TABLE, table)})
    data["files"] = [str(folder / "tables" / f"{TABLE}.{kind}") for kind in ("parquet", "csv")]
    if data["against"]["cells"]:
        data["files"] += [str(path) for path in figures.draw(frames, folder / "figures", [FIGURE])[0]]
    return data


def _rows(found: Sequence[Cell], setting: Setting, codecs: Codecs) -> list[dict[str, Any]]:
    return [cells.row(cell, setting, codecs) | {"fitted": cell.part == FITTED} for cell in found]


def _data(experiment: Experiment, setting: Setting, rows: list[dict[str, Any]]) -> dict[str, Any]:
    specs = {cell.cell_id: cell.runs[0][1] for cell in experiment.cells()}
    elsewhere = [cluster(row, specs[row["cell"]], setting) for row in rows if row["beyond"]]
    used = setting.constants
    return {
        "experiment": experiment.name,
        "network": setting.wan.name if setting.wan else None,
        "constants_from": DEFAULTS,
        "constants": {**used.overheads.__dict__, "sync_round_s": used.sync_round_s},
        "cells": rows,
        "cluster": elsewhere[0] if elsewhere else None,
        "against": None,
        "files": [],
    }


def _read(store: Store, run_id: str) -> tuple[RunSpec, pd.DataFrame, pd.DataFrame]:
    """A run's spec, and the steps and spans of its measured steps."""
    from thinpipe.harness import tables

    found = tables.of_run(store, run_id)
    steps = found["steps"][found["steps"]["measured"]]
    return store.spec(run_id), steps, found["spans"][found["spans"]["step"].isin(set(steps["step"]))]


def constants(runs: Sequence[tuple[RunSpec, pd.DataFrame, pd.DataFrame]], codecs: Codecs) -> Constants:
    """The constants of some replays with one stage a rank."""
    residues: list[costs.Residue] = []
    late: list[float] = []
    for spec, steps, spans in runs:
        assert spec.profile is not None, "a replay has a profile"
        times = [Times(*stage) for stage in profiles.of_spec(profiles.load(spec.profile), spec)]
        residues.append(costs.residue(spec, times, steps, spans))
        late += costs.latencies(spans, cells.idle_transfers(spec, codecs))
    if not late:
        raise UserError(f"no message of part {FITTED!r} was waited for: lower its network.rate_mbit.")
    return costs.fitted(residues, late)


def _measured(cell: Cell, replays: pd.DataFrame) -> dict[str, Any]:
    """What the replays of a cell say."""
    own = replays[(replays["cell"] == cell.cell_id) & (replays["part"] == cell.part)]
    good = [float(value) for value in own[own["fidelity"] == "ok"]["step_time_s"]]
    middle = statistics.median(good) if good else None
    return {
        "measured_step_time_s": middle,
        "spread": (max(good) - min(good)) / middle if middle and len(good) > 1 else None,
        "runs": len(good),
        "flagged_runs": len(own) - len(good),
    }


def verdict(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """{cells, fitted, flagged, missing, median_error, worst_error, worst, beyond, holds}; sets each row's `error`.

    cells: with an unflagged replay, and not fitted to; flagged: whose replays are all flagged; missing: without any;
    beyond: those off by more than WORST and more than SPREADS times their own spread.
    """
    for row in rows:
        found = row["measured_step_time_s"]
        row["error"] = row["predicted_step_time_s"] / found - 1 if found else None
    tested = [row for row in rows if row["error"] is not None and not row["fitted"]]
    others = [row for row in rows if row["error"] is None and not row["fitted"]]
    errors = [abs(row["error"]) for row in tested]
    over = [row for row in tested if abs(row["error"]) > max(WORST, SPREADS * (row["spread"] or 0.0))]
    middle = statistics.median(errors) if errors else None
    return {
        "cells": len(tested),
        "fitted": sum(row["fitted"] for row in rows),
        "flagged": sum(row["flagged_runs"] > 0 for row in others),
        "missing": sum(row["flagged_runs"] == 0 for row in others),
        "median_error": middle,
        "worst_error": max(errors, default=None),
        "beyond": [_name(row) for row in over],
        "holds": len(tested) >= CELLS and middle is not None and middle <= MEDIAN and not over,
    }


def _name(row: Mapping[str, Any]) -> str:
    rate = "no limit" if row["rate_mbit"] is None else f"{row['rate_mbit']:g} Mbit/s"
    return f"{row['part']} / {row['arm']} / {rate}"


# --- for people -----------------------------------------------------------------------------------------------------


def render(data: Mapping[str, Any]) -> None:
    """The cells, the verdict, and what to run elsewhere."""
    from rich.table import Table

    from thinpipe.harness.render import console

    held = data["against"] is not None
    heads = ["part", "arm", "Mbit/s", "step s", "samples/s", "bubble", "busiest link", "critical path"]
    table = Table(*heads, *(["measured s", "error", "runs", "flagged"] if held else ["beyond this machine"]), box=None)
    for row in data["cells"]:
        rate = data["network"] or ("no limit" if row["rate_mbit"] is None else f"{row['rate_mbit']:g}")
        shares = ((part, row[f"{part}_share"]) for part in ("compute", "codec", "transfer", "delay"))
        path = ", ".join(f"{part} {share:.0%}" for part, share in shares if share >= 0.005)
        shown = [
            row["part"], row["arm"], rate, f"{row['predicted_step_time_s']:.4g}",
            f"{row['predicted_samples_per_s']:.4g}", f"{row['bubble_fraction']:.0%}", f"{row['link_use']:.0%}", path,
        ]  # fmt: skip
        table.add_row(*shown, *(_against(row) if held else [row["beyond"] or ""]))
    out = console()
    out.print(table)
    constants = ", ".join(f"{name} {1e3 * value:.3g} ms" for name, value in data["constants"].items())
    out.print(f"constants: {constants} ({data['constants_from']})", markup=False)
    for line in [*(_verdict(data["against"]) if held else ()), *(data["cluster"] or ()), *data["files"]]:
        out.print(line, markup=False)


def _against(row: Mapping[str, Any]) -> list[str]:
    measured, error = row["measured_step_time_s"], row["error"]
    return [
        "" if measured is None else f"{measured:.4g}",
        "fitted" if row["fitted"] else "" if error is None else f"{error:+.1%}",
        str(row["runs"]),
        str(row["flagged_runs"]),
    ]


def _verdict(found: Mapping[str, Any]) -> list[str]:
    left = f"left out: {found['flagged']} flagged, {found['missing']} not replayed, {found['fitted']} fitted to"
    if not found["cells"]:
        return [f"no cell with a replay that is not flagged ({left})."]
    line = (
        f"{found['cells']} cells ({left}): median error {found['median_error']:.1%}, worst {found['worst_error']:.1%}"
    )
    asked = f"asked for: {CELLS} cells, median at most {MEDIAN:.0%}, each {WORST:.0%} or {SPREADS:g} times its spread"
    return [f"{line}; {'holds' if found['holds'] else 'does not hold'} ({asked}).", *found["beyond"]]
