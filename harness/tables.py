"""Per-rank parquet shards of runs -> the tidy tables of an experiment.

    results/runs/<run_id>/<table>.rank<r>.parquet      written by each rank, once, at its end
    results/<experiment>/tables/<table>.{parquet,csv}  written here, from the shards of the runs in runs.json

Both have the columns of metrics.TABLES, in that order, whether or not there are rows. Nothing is filled in or
left out silently: a shard that a finished run should have and has not is an error.

>>> TABLES
('runs', 'steps', 'transfers', 'evals', 'curves', 'composition')
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from thinpipe.harness import compose, metrics, regimes, summary
from thinpipe.harness.compression import grammar
from thinpipe.harness.errors import UserError
from thinpipe.harness.shards import replace, schema, to_arrow
from thinpipe.harness.spec import RunSpec

SHARDS = metrics.OF_RANKS
#: The tables of an experiment. Spans stay with their run: they are its trace, and many.
OF_RUNS = ("steps", "transfers", "evals")
TABLES = ("runs", *OF_RUNS, "curves", "composition")
TIMED = ("timing", "full")
MEMORY = ("predicted_memory_mib", "peak_memory_mib", "memory_state_bytes")


class Results(Protocol):
    """What tables need of the store (store.py)."""

    def saved_runs(self, name: str) -> list[dict[str, Any]]: ...

    def run_dir(self, run_id: str) -> Path: ...

    def status(self, run_id: str) -> Mapping[str, Any] | None: ...

    def spec(self, run_id: str) -> RunSpec: ...

    def manifest(self, run_id: str) -> Mapping[str, Any]: ...

    def experiment_dir(self, name: str) -> Path: ...


def to_frame(table: str, content: pa.Table) -> pd.DataFrame:
    """`content` as a frame whose dtypes do not depend on its values: an optional int is Int64, not float."""
    frame = content.to_pandas()
    for name, column in metrics.TABLES[table].items():
        if column.type is int and column.optional:
            frame[name] = content.column(name).to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get)
    return frame


def build(store: Results, experiment_name: str) -> dict[str, pd.DataFrame]:
    """Build and write the tables of one experiment; return them by name, as in TABLES.

    A run without status.json is unfinished and leaves no row. A failed or diverged run has a row with nulls
    for what could not be computed, and the rows its ranks had written by then. Raises UserError naming run
    and file where a shard of a finished run is missing, unreadable or another run's.
    """
    listed = store.saved_runs(experiment_name)
    if not listed:
        raise UserError(f"there is no run of an experiment {experiment_name!r}: `thinpipe run` it first.")
    rows: list[dict[str, Any]] = []
    read: dict[str, dict[str, pa.Table]] = {}
    frames: dict[str, dict[str, pd.DataFrame]] = {}
    uses: list[compose.Use] = []
    for entry in listed:
        run_id = entry["run_id"]
        status = store.status(run_id)
        if status is None:
            continue
        spec = store.spec(run_id)
        # Two parts of an experiment may share a run: then it has a row in each, its steps only once.
        if run_id not in read:
            read[run_id] = read_run(store.run_dir(run_id), run_id, spec.world_size, status["state"])
            frames[run_id] = {table: to_frame(table, read[run_id][table]) for table in OF_RUNS}
        rows.append(run_row(experiment_name, entry, spec, status, read[run_id], store.manifest(run_id)))
        uses.append(compose.Use(rows[-1], spec, frames[run_id]))
    curves, composition = compose.build(uses)
    made = {"runs": rows, "curves": curves, "composition": composition}
    tables = {table: to_arrow(table, content) for table, content in made.items()}
    for table in OF_RUNS:
        parts = [shards[table] for shards in read.values()]
        tables[table] = pa.concat_tables([schema(table).empty_table(), *parts])
    return write(store.experiment_dir(experiment_name) / "tables", tables)


def of_run(store: Results, run_id: str) -> dict[str, pd.DataFrame]:
    """The tables of one run that has ended, its spans too; it counts as an experiment of its own."""
    status = store.status(run_id)
    if status is None:
        raise UserError(f"run {run_id} has not ended: run its experiment again to finish it.")
    spec = store.spec(run_id)
    shards = read_run(store.run_dir(run_id), run_id, spec.world_size, status["state"])
    made = _settings(spec)
    method = f"{made['forward']} / {made['backward']}"
    entry = {"run_id": run_id, "part": "run", "arm": method, "cell": spec.cell_id, "seed": spec.seed}
    row = run_row("run", entry, spec, status, shards, store.manifest(run_id))
    return {"runs": to_frame("runs", to_arrow("runs", [row])), **{k: to_frame(k, v) for k, v in shards.items()}}


def read_run(folder: Path, run_id: str, ranks: int, state: str) -> dict[str, pa.Table]:
    """All rows of one run, ranks in order: from shards, or from JSON lines where it did not finish.

    A rank writes its shards at its end, so one that diverged or died has only the lines it wrote on the way.
    """
    tables = {}
    for table in SHARDS:
        parts = [schema(table).empty_table()]
        for rank in range(ranks):
            path = folder / f"{table}.rank{rank}.parquet"
            if path.exists() or state == "done":
                parts.append(read_shard(table, path, run_id))
            else:
                parts.append(to_arrow(table, read_lines(table, folder / f"rank{rank}.jsonl")))
        tables[table] = pa.concat_tables(parts)
    return tables


def read_lines(table: str, path: Path) -> list[dict[str, Any]]:
    """The rows of `table` among a rank's JSON lines; none without the file. A cut last line is left out."""
    if not path.exists():
        return []
    rows = []
    # What follows the last line break was being written when the rank died.
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number}, is damaged: {error}. Delete {path.parent}.") from None
        if row.pop("table") == table:
            rows.append(row)
    return rows


def read_shard(table: str, path: Path, run_id: str) -> pa.Table:
    """One shard, checked. Raises UserError naming run and file: missing, unreadable, or not this run's."""
    hint = f"Delete {path.parent}, then `thinpipe run` repeats the run."
    try:
        # ParquetFile, not read_table: that one adds columns for folders called `name=value`.
        with pq.ParquetFile(path) as file:
            content = file.read()
    except FileNotFoundError:
        raise UserError(f"run {run_id} is done, but its shard {path} is missing. {hint}") from None
    except (pa.ArrowException, OSError) as error:
        reason = str(error).split("\n", 1)[0]
        raise UserError(f"run {run_id}: the shard {path} cannot be read ({reason}). {hint}") from None
    expected = schema(table)
    if content.schema.names != expected.names or content.schema.types != expected.types:
        odd = sorted(set(content.schema.names) ^ set(expected.names))
        detail = ", ".join(odd) or "types or order"
        raise UserError(f"run {run_id}: {path} has other columns than this version ({detail}). {hint}")
    others = set(content.column("run_id").to_pylist()) - {run_id}
    if others:
        raise UserError(f"run {run_id}: {path} holds rows of run {', '.join(sorted(others))}. {hint}")
    return content


def run_row(  # noqa: PLR0917 - what there is of a run
    experiment: str,
    entry: Mapping[str, Any],
    spec: RunSpec,
    status: Mapping[str, Any],
    shards: Mapping[str, pa.Table],
    manifest: Mapping[str, Any],
) -> dict[str, Any]:
    """The runs row of one run with a status, as in metrics.RUNS."""
    totals, links = status.get("totals") or {}, status.get("links") or {}
    fidelity = status.get("fidelity") or {}
    flags, reasons = (list(fidelity.get(name) or ()) for name in ("flags", "reasons"))
    if spec.profile is not None and (why := _other_profile(spec.profile, manifest)):
        flags.append("other-profile")
        reasons.append(why)
    return {
        **{name: entry[name] for name in ("run_id", "part", "arm", "cell", "seed")},
        "train_id": spec.train_id,
        "experiment": experiment,
        "state": _state(status, spec),
        "measure": spec.measure,
        "compute": spec.compute,
        "profile": spec.profile,
        "rho": status.get("rho"),
        **_settings(spec),
        **{name: links.get(name) for name in ("measured_rate_mbit", "measured_rtt_ms")},
        **_computed(entry["run_id"], spec, status["state"], shards),
        **_moved(entry["run_id"], status["state"], totals, shards),
        **{name: totals.get(name) for name in ("wire_bytes", "sync_bytes", "data_bytes")},
        **{name: (status.get("memory") or {}).get(name) for name in MEMORY},
        "run_queue_pct": status.get("run_queue_pct"),
        "fidelity": "+".join(flags) or "ok",
        "fidelity_reason": "; ".join(reasons) or None,
        "machine": status["machine"],
        "wall_s": status["wall_s"],
        "error": (status.get("error") or "").split("\n", 1)[0] or None,
    }


def _other_profile(name: str, manifest: Mapping[str, Any]) -> str | None:
    """Why a replay's times are not of the profile that its name stands for now; None where they are."""
    from thinpipe.harness import profile

    then = manifest.get("inputs", {}).get(f"profile {name}")
    try:
        now: str | None = profile.digest(name)
    except UserError:
        now = None
    if then in (None, now):
        return None
    gone = "is gone" if now is None else "is another one now"
    return f"the profile {name} that it waited by {gone}: `thinpipe run --force` repeats it"


def _moved(run_id: str, state: str, totals: Mapping[str, Any], shards: Mapping[str, pa.Table]) -> dict[str, Any]:
    """Steps and bytes, counted from the shards and held against what the runner counted in a finished run."""
    counted: dict[str, Any] = {"steps": len(set(shards["steps"].column("step").to_pylist()))}
    for name in ("raw_bytes", "payload_bytes", "frame_bytes"):
        counted[name] = sum(shards["transfers"].column(name).to_pylist())
    for name, value in counted.items():
        if state == "done" and totals[name] != value:
            raise UserError(
                f"run {run_id}: its shards add up to {name} = {value}, its status.json says {totals[name]}. "
                "One of them is not of this run: delete its folder, then `thinpipe run` repeats it."
            )
    frames = counted["frame_bytes"]
    return {**counted, "compression_ratio": counted["raw_bytes"] / frames if frames else None}


def _settings(spec: RunSpec) -> dict[str, Any]:
    """The columns that say what was asked for."""
    last = regimes.final_epoch(spec)
    forward = grammar.canonical(spec.compression.compressor("forward", 0, last))
    backward = grammar.canonical(spec.compression.compressor("backward", 0, last))
    return {
        "model": f"{spec.model.name}:{spec.model.checkpoint or spec.model.preset}",
        "task": f"{spec.task.name}:{spec.task.corpus}",
        "stages": spec.pipeline.stages,
        "groups": spec.data_parallel.groups,
        "microbatches": spec.pipeline.microbatches,
        "batch_size": spec.train.batch_size,
        "forward": forward,
        "backward": backward,
        "forward_bits": grammar.bits(forward),
        "backward_bits": grammar.bits(backward),
        "warmup_epochs": spec.compression.warmup_epochs,
        "rate_mbit": spec.network.rate_mbit,
    }


def _computed(run_id: str, spec: RunSpec, state: str, shards: Mapping[str, pa.Table]) -> dict[str, Any]:
    if state != "done":
        return dict.fromkeys(summary.COLUMNS)
    frames = {table: to_frame(table, content) for table, content in shards.items()}
    try:
        return summary.summarise(spec, *(frames[table] for table in ("steps", "spans", "evals", "transfers")))
    except UserError as error:
        raise UserError(f"run {run_id}: {error}") from None


def _state(status: Mapping[str, Any], spec: RunSpec) -> str:
    """As stored, but times measured on another machine are marked: they must never meet ours in a figure."""
    from thinpipe.harness.manifest import machine_id

    foreign = spec.measure in TIMED and status["state"] == "done" and status["machine"] != machine_id()
    return "foreign" if foreign else status["state"]


def write(folder: Path, tables: Mapping[str, pa.Table]) -> dict[str, pd.DataFrame]:
    """Write each as parquet and CSV into `folder`, whole or not at all; returns them as frames."""
    folder.mkdir(parents=True, exist_ok=True)
    frames = {}
    for table, content in tables.items():
        frame = frames[table] = to_frame(table, content)
        replace(folder / f"{table}.parquet", functools.partial(pq.write_table, content))
        replace(folder / f"{table}.csv", functools.partial(frame.to_csv, index=False))
    return frames
