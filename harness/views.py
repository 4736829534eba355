"""What the command line shows, as plain data: each verb's answer, printed as JSON or by render.py. Reads
only."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from thinpipe.harness import memory, metrics
from thinpipe.harness.dotted import flat
from thinpipe.harness.errors import UserError, near_miss
from thinpipe.harness.plan import Entry, Plan
from thinpipe.harness.store import Store

LOG_LINES = 10
# Settings that have a place of their own in the summary.
SHOWN_ALREADY = ("seed", "network.rate_mbit")
LIST_KINDS = ("experiments", "codecs", "memories", "models", "tasks", "figures", "links")
# Columns of the runs table that `run --json` carries: what is known of a run once it has ended.
RUN_NUMBERS = (
    "forward",
    "backward",
    "measured_rate_mbit",
    "step_time_s",
    "samples_per_s",
    "tokens_per_s",
    "final_train_loss",
    "final_eval_loss",
    *(f"final_{score}" for score in metrics.SCORES),
    "compression_ratio",
    "measured_compression_ratio",
    "wire_bytes",
    "fidelity",
    "fidelity_reason",
    "wall_s",
    "error",
)


def plan(plan: Plan, *, retry_failed: bool = False, force: bool = False) -> dict[str, Any]:
    """A plan: its runs in order, what a sweep would do now, the seconds and the memory a rank that is predicted."""
    todo = plan.todo(retry_failed=retry_failed, force=force)
    chosen = {entry.run_id for entry in todo}
    return {
        "experiment": plan.experiment,
        "shuffle_seed": plan.shuffle_seed,
        "counts": plan.counts(),
        "todo": len(todo),
        "todo_s": round(sum(entry.predicted_s for entry in todo), 1),
        "runs": [
            {
                "run_id": entry.run_id,
                "part": entry.part,
                "arm": entry.arm,
                "uses": [{"part": part, "arm": arm} for part, arm in entry.uses],
                "cell": entry.cell,
                "seed": entry.seed,
                "rate_mbit": entry.spec.network.rate_mbit,
                "state": entry.state,
                "note": entry.note,
                "predicted_s": round(entry.predicted_s, 1),
                "memory_mib": [round(of.total / 2**20) for of in memory.predict(entry.spec)],
                "todo": entry.run_id in chosen,
            }
            for entry in plan.entries
        ],
    }


def runs(plan: Plan, table: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every use of the plan's runs with state and main numbers; table: rows of the runs table, if there are
    any.

    What was asked for comes from the plan, so that runs that have not ended have it too. varies: the settings,
    by dotted key, in which the cells of this part and arm differ, besides the rate.
    """
    measured = {use(row): row for row in table}
    differing = _differing(plan)
    listed = []
    for entry in plan.entries:
        own = _settings_of(entry)
        for part, arm in entry.uses:
            row = measured.get((entry.run_id, part, arm), {})
            numbers = {name: plain(row.get(name)) for name in RUN_NUMBERS}
            identity = {
                "run_id": entry.run_id,
                "part": part,
                "arm": arm,
                "cell": entry.cell,
                "varies": {key: own[key] for key in differing[part, arm]},
                "seed": entry.seed,
                "state": entry.state,
                "measure": entry.spec.measure,
                "rate_mbit": entry.spec.network.rate_mbit,
            }
            listed.append({**identity, **numbers})
    return listed


def _settings_of(entry: Entry) -> dict[str, Any]:
    """Every setting of a run by dotted key, defaults included."""
    return flat(entry.spec.model_dump(mode="json"))


def _differing(plan: Plan) -> dict[tuple[str, str], list[str]]:
    """By (part, arm): the settings that its runs in the plan do not all share, besides seed and rate."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for entry in plan.entries:
        for pair in entry.uses:
            groups.setdefault(pair, []).append(_settings_of(entry))
    return {
        pair: [
            key
            for key in group[0]
            # As JSON, since a value may be a list of rules.
            if key not in SHOWN_ALREADY and len({json.dumps(found[key], sort_keys=True) for found in group}) > 1
        ]
        for pair, group in groups.items()
    }


def use(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """What names one use of a run in an experiment."""
    return row["run_id"], row["part"], row["arm"]


def cells(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`runs` by (part, arm, cell): medians of times, mean and half the range of losses over the finished
    seeds. A convergence run has no times here: errors are sampled within its steps."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["part"], row["arm"], row["cell"]), []).append(row)
    return [_cell(group) for group in groups.values()]


def _cell(group: list[Mapping[str, Any]]) -> dict[str, Any]:
    finished = [row for row in group if row["state"] in ("done", "stale", "foreign")]

    def known(name: str) -> list[float]:
        return [row[name] for row in finished if row[name] is not None]

    def middle(name: str) -> float | None:
        return statistics.median(known(name)) if known(name) else None

    cell = {name: group[0][name] for name in ("part", "arm", "cell", "varies", "rate_mbit", "measure")}
    cell |= {"seeds": len(finished), "of": len(group)}
    timed = cell["measure"] != "convergence"
    cell |= {name: middle(name) if timed else None for name in ("step_time_s", "samples_per_s")}
    cell["measured_compression_ratio"] = middle("measured_compression_ratio")
    for name in ("final_train_loss", "final_eval_loss", *(f"final_{score}" for score in metrics.SCORES)):
        values = known(name)
        cell[name] = statistics.fmean(values) if values else None
        cell[f"{name}_half_range"] = (max(values) - min(values)) / 2 if len(values) > 1 else None
    cell["states"] = sorted({row["state"] for row in group} - {"done"})
    cell["flags"] = sorted({row["fidelity"] for row in finished if row["fidelity"] not in (None, "ok")})
    return cell


def status(store: Store, name: str, holder: Mapping[str, Any] | None) -> dict[str, Any]:
    """How far an experiment is, from the results folder alone: counts, failures, and the run in progress.

    holder: of the timing lock; a run counts as running only while its sweep holds that.
    """
    rows = store.saved_runs(name)
    if not rows:
        known = store.experiments()
        raise UserError(f"no results of experiment {name!r} below {store.root}.{near_miss(name, known)}")
    states: dict[str, str] = {}
    failures, notes, open_runs = [], [], []
    for row in {row["run_id"]: row for row in rows}.values():
        found, problem = store.read_status(row["run_id"])
        states[row["run_id"]] = found["state"] if found else "pending"
        if problem:
            notes.append(problem)
        if found is None and store.begun(row["run_id"]):
            open_runs.append(row)
        if found and found["state"] in ("failed", "diverged"):
            failures.append({**_brief(row), "state": found["state"], "error": _first_line(found.get("error"))})
    running = _running(store, name, open_runs, holder)
    listed = list(states.values())
    return {
        "experiment": name,
        "total": len(states),
        "counts": {state: listed.count(state) for state in sorted(set(listed))},
        "running": running,
        "cut_short": [_brief(row) for row in open_runs if not running or row["run_id"] != running["run_id"]],
        "failures": failures,
        "notes": notes,
    }


def _running(
    store: Store, name: str, rows: list[dict[str, Any]], holder: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    if not holder or holder.get("experiment") != name or holder.get("results") != str(store.root.resolve()):
        return None
    begun = {row["run_id"]: (store.run_dir(row["run_id"]) / "run.json").stat().st_mtime for row in rows}
    since = datetime.fromisoformat(str(holder["started_at"])).timestamp()
    # The lock's time has whole seconds.
    ours = [row for row in rows if begun[row["run_id"]] >= since - 1]
    if not ours:
        return None
    row = max(ours, key=lambda row: begun[row["run_id"]])
    elapsed = datetime.now(UTC).timestamp() - begun[row["run_id"]]
    return {**_brief(row), "elapsed_s": round(elapsed, 1), "pid": holder.get("pid")}


def _brief(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("run_id", "part", "arm", "seed")}


def find_run(store: Store, prefix: str) -> str:
    """The id of the only run that begins with `prefix`; UserError when there is none or several."""
    known = store.run_ids()
    found = [run_id for run_id in known if run_id.startswith(prefix)]
    if len(found) == 1:
        return found[0]
    if not known:
        raise UserError(f"there are no runs below {store.root}. Give the folder they are in with --results.")
    if not found:
        raise UserError(f"no run of {store.root} is called {prefix!r}.{near_miss(prefix, known)}")
    raise UserError(f"{prefix!r} names {len(found)} runs: {', '.join(found[:8])}. Give more digits.")


def run(store: Store, run_id: str) -> dict[str, Any]:
    """One run: what it was asked to be, what it was, how it ended, and the last lines its ranks logged."""
    found, problem = store.read_status(run_id)
    folder = store.run_dir(run_id)
    manifest = store.manifest(run_id)
    requested, effective = manifest.pop("requested", {}), manifest.pop("effective", {})
    uses = [
        {"experiment": name, "part": row["part"], "arm": row["arm"]}
        for name in store.experiments()
        for row in store.saved_runs(name)
        if row["run_id"] == run_id
    ]
    return {
        "run_id": run_id,
        "folder": str(folder),
        "state": found["state"] if found else "not finished",
        "note": problem,
        "uses": uses,
        "spec": store.spec(run_id).canonical(),
        "requested": requested,
        "effective": effective,
        "settings": settings(requested, effective),
        "status": found,
        "manifest": manifest,
        "logs": {path.name: tail(path) for path in sorted(folder.glob("*.log"))},
    }


def settings(requested: Mapping[str, Any], effective: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row a setting: what was asked for (None where the ranks only report it) beside what each rank reads back.

    in_force: {"all": value} where every rank that has the setting agrees, else {rank: value}.
    """
    asked = flat(requested)
    found = {name: flat(values) for name, values in sorted(effective.items())}
    rows = []
    for key in dict.fromkeys([*asked, *(key for values in found.values() for key in values)]):
        in_force = {name: values[key] for name, values in found.items() if key in values}
        values = list(in_force.values())
        if values and all(value == values[0] for value in values):
            in_force = {"all": values[0]}
        rows.append({"setting": key, "requested": asked.get(key), "in_force": in_force})
    return rows


def tail(path: Path, lines: int = LOG_LINES) -> list[str]:
    """The last lines of a log, however long it is."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 200 * lines))
        text = file.read().decode("utf-8", errors="replace")
    return text.splitlines()[-lines:]


def listing(kind: str | None = None) -> dict[str, list[dict[str, Any]]]:
    """What there is of each kind (or one): name and a line about it."""
    if kind is not None and kind not in LIST_KINDS:
        raise UserError(f"nothing to list is called {kind!r}.{near_miss(kind, LIST_KINDS)}")
    return {name: _items(name) for name in LIST_KINDS if kind in (None, name)}


def _items(kind: str) -> list[dict[str, Any]]:
    if kind == "experiments":
        import tomllib

        from thinpipe.harness import experiment

        titles = {name: str(tomllib.loads(text).get("title", name)) for name, text in experiment.builtin().items()}
        return [{"name": name, "summary": titles[name]} for name in sorted(titles)]
    if kind == "links":
        from dataclasses import asdict

        from thinpipe.netem.link import PRESETS

        return [{"name": name, **asdict(link)} for name, link in PRESETS.items()]
    from thinpipe.harness import plugins

    return [
        {
            "name": p.name,
            "summary": p.summary,
            "version": p.version,
            "parameters": dict(p.parameters),
            "source": p.source,
        }
        for p in plugins.find(kind).values()
    ]


def measured(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the table rate_distortion, a row a source and compressor, fewest bits first: {source, compressor, kinds:
    {kind: {bits, error_db, bias}}, encode_melem_s, decode_melem_s}. Bits over all tensors, means of the errors in dB
    (None: exact), of the biases and of the speeds."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["source"], row["compressor"]), []).append(row)
    found = []
    for (source, text), own in groups.items():
        kinds = {}
        for kind in dict.fromkeys(row["kind"] for row in own):
            here = [row for row in own if row["kind"] == kind]
            errors = [row["error_db"] for row in here if row["error_db"] is not None]
            kinds[kind] = {
                "bits": 8 * sum(row["frame_bytes"] for row in here) / sum(row["elements"] for row in here),
                "error_db": statistics.fmean(errors) if errors else None,
                "bias": statistics.fmean(row["bias"] for row in here),
            }
        speeds = {name: statistics.fmean(row[name] for row in own) for name in ("encode_melem_s", "decode_melem_s")}
        found.append({"source": source, "compressor": text, "kinds": kinds, **speeds})
    return sorted(found, key=lambda row: (row["source"], min(kind["bits"] for kind in row["kinds"].values())))


def plain(value: Any) -> Any:
    """A table's value as JSON has it: missing and not-a-number become None."""
    if hasattr(value, "item"):
        value = value.item()
    if value is None or (isinstance(value, float) and not math.isfinite(value)) or str(value) == "<NA>":
        return None
    return value


def _first_line(text: str | None) -> str | None:
    return text.partition("\n")[0] if text else None
