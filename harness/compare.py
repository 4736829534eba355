"""Two result sets of one experiment against each other: what changed, with an interval, and whether that is sure.

    A, B ──▶ cells paired by part, arm and the settings that set cells apart ──▶ seeds paired ──▶ B / A, 90 % interval

The settings in which paired runs differ all the same (what was changed between the sets) are listed. A flagged run has
no part in an effect on times; times of different machines are shown and never judged: `foreign`. Pure, but `compare`
reads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinpipe.harness.claims.subject import Metric
from thinpipe.harness.errors import UserError
from thinpipe.harness.resultset import ResultSet, load
from thinpipe.harness.stats import interval
from thinpipe.harness.summarised import CellRuns, cells, known, metric_of, timed, varying

LEVEL = 0.90
METRICS = ("final_train_loss", "final_eval_loss", "step_time_s", "frame_bytes")
#: Counted, not measured: the same in every run of the same settings, so one pair says it.
COUNTED = ("raw_bytes", "payload_bytes", "frame_bytes", "steps")
VERDICTS = ("better", "worse", "undecided", "same", "foreign")


def compare(a: str | Path, b: str | Path, metrics: Sequence[str] = METRICS) -> dict[str, Any]:
    """`of` the result sets in two folders."""
    return of(load(a), load(b), metrics)


def of(a: ResultSet, b: ResultSet, metrics: Sequence[str] = METRICS) -> dict[str, Any]:
    """B against A: {a, b, metrics, effects, only_a, only_b, changed, foreign, counts}.

    effects: a row a pair of cells and metric: part, arm, setting, metric, effect (B / A, geometric mean over shared
    seeds; of metrics that may be 0 the difference B - A, `scale` says which), interval, n, verdict, why. changed:
    settings in which paired runs differ: {setting: [values in A, in B]}. foreign: the sets' times are of different
    machines. UserError where nothing can be paired, or a metric has no better side.
    """
    chosen = [_directed(name) for name in metrics]
    apart = _apart(a, b)
    ours, theirs = ({_key(cell): cell for cell in cells(one, apart)} for one in (a, b))
    shared = [key for key in ours if key in theirs]
    if not shared:
        raise UserError(f"{a.name} and {b.name} share no part, arm and setting: there is nothing to compare.")
    foreign = bool(_machines(a) and _machines(b)) and _machines(a) != _machines(b)
    found = [_effect(ours[key], theirs[key], metric, foreign) for key in shared for metric in chosen]
    effects = [effect for effect in found if effect is not None]
    return {
        "a": _about(a),
        "b": _about(b),
        "metrics": list(metrics),
        "effects": effects,
        "only_a": [_named(ours[key]) for key in ours if key not in theirs],
        "only_b": [_named(theirs[key]) for key in theirs if key not in ours],
        "changed": _changed(a, b, [(ours[key], theirs[key]) for key in shared]),
        "foreign": foreign,
        "counts": {verdict: sum(e["verdict"] == verdict for e in effects) for verdict in VERDICTS},
    }


def _directed(name: str) -> Metric:
    metric = metric_of(name)
    if metric.better is None:
        raise UserError(f"{name} has no better side, so no change of it is better or worse. Compare another number.")
    return metric


def _about(found: ResultSet) -> dict[str, Any]:
    return {"name": found.name, "commits": list(found.manifest.get("commits") or ()), "machines": _machines(found)}


def _machines(found: ResultSet) -> list[str]:
    """Where the runs whose times count were run."""
    return sorted({row["machine"] for row in found.tables["runs"].to_dict("records") if timed(row)})


def _apart(a: ResultSet, b: ResultSet) -> dict[tuple[str, str], list[str]]:
    """(part, arm) -> the settings that set its cells apart, in either set."""
    found: dict[tuple[str, str], set[str]] = {}
    for one in (a, b):
        for pair, keys in varying(one).items():
            found.setdefault(pair, set()).update(keys)
    return {pair: sorted(keys) for pair, keys in found.items()}


def _key(cell: CellRuns) -> tuple[str, str, str]:
    return cell.part, cell.arm, json.dumps(cell.settings, sort_keys=True)


def _named(cell: CellRuns) -> dict[str, str]:
    return {"part": cell.part, "arm": cell.arm, "setting": cell.label}


def _changed(a: ResultSet, b: ResultSet, pairs: Sequence[tuple[CellRuns, CellRuns]]) -> dict[str, list[list[Any]]]:
    """Setting -> [its values in A, its values in B], of runs paired by seed that do not have the same one."""
    found: dict[str, tuple[list[Any], list[Any]]] = {}
    for ours, theirs in pairs:
        for seed in ours.runs.keys() & theirs.runs.keys():
            mine = a.settings.get(ours.runs[seed]["run_id"], {})
            other = b.settings.get(theirs.runs[seed]["run_id"], {})
            for key in sorted(mine.keys() | other.keys()):
                if mine.get(key) != other.get(key):
                    left, right = found.setdefault(key, ([], []))
                    left += [mine.get(key)] * (mine.get(key) not in left)
                    right += [other.get(key)] * (other.get(key) not in right)
    return {key: [left, right] for key, (left, right) in sorted(found.items())}


def _effect(ours: CellRuns, theirs: CellRuns, metric: Metric, foreign: bool) -> dict[str, Any] | None:
    """None where the number is not in both sets, unless it is a divergence that it lacks for."""
    left, right = ours.values(metric), theirs.values(metric)
    lost = _lost(ours, theirs)
    there = [bool(cell.values(metric, flagged=True)) for cell in (ours, theirs)]
    if not any(there) or not (all(there) or lost):
        return None
    seeds = sorted(left.keys() & right.keys())
    ratio = metric.scale == "ratio" and all(min(left[s], right[s]) > 0 for s in seeds)
    row: dict[str, Any] = {**_named(ours), "metric": metric.name, "scale": "ratio" if ratio else "difference"}
    row |= {"effect": None, "interval": None, "n": len(seeds), "verdict": "undecided", "why": ""}
    if seeds:
        change = [math.log(right[s] / left[s]) if ratio else right[s] - left[s] for s in seeds]
        found = interval(change, LEVEL)
        back = math.exp if ratio else float
        row["effect"] = back(found.mean)
        if found.low is not None and found.high is not None:
            row["interval"] = [back(found.low), back(found.high)]
        row |= _verdict(metric, change, found.low, found.high)
    else:
        flags = metric.is_time and (ours.has_flags or theirs.has_flags)
        row["why"] = "its runs are flagged: their times do not count" if flags else "no seed has it in both sets"
    if metric.is_time and foreign:
        return row | {"verdict": "foreign", "why": "times of different machines"}
    if lost and not metric.is_time:
        return row | lost
    return row


def _verdict(metric: Metric, change: Sequence[float], low: float | None, high: float | None) -> dict[str, str]:
    if not any(change):
        return {"verdict": "same", "why": "equal for every seed"}
    if metric.name in COUNTED and (min(change) > 0 or max(change) < 0):
        low, high = min(change), max(change)
    if low is None or high is None:
        return {"verdict": "undecided", "why": "one seed has no interval"}
    sign = 1 if metric.better == "higher" else -1
    if low > 0 or high < 0:
        return {"verdict": "better" if sign * low > 0 else "worse", "why": ""}
    return {"verdict": "undecided", "why": "the interval holds no change"}


def _lost(ours: CellRuns, theirs: CellRuns) -> dict[str, str]:
    """What divergence decides: seeds that diverged in one set alone are worse than any number there."""
    seeds = ours.runs.keys() & theirs.runs.keys()
    only_a = sum(_diverged(ours, s) and not _diverged(theirs, s) for s in seeds)
    only_b = sum(_diverged(theirs, s) and not _diverged(ours, s) for s in seeds)
    if only_a == only_b:
        return {}
    worse = only_b > only_a
    why = f"{only_b if worse else only_a} seed(s) diverged in {'B' if worse else 'A'} alone"
    return {"verdict": "worse" if worse else "better", "why": why}


def _diverged(cell: CellRuns, seed: int) -> bool:
    return cell.runs[seed]["state"] == "diverged"


def render(data: Mapping[str, Any]) -> str:
    """`of`'s answer as text for people."""
    lines = [f"B ({data['b']['name']}) against A ({data['a']['name']}), {LEVEL:.0%} intervals, each on its own"]
    if data["foreign"]:
        lines.append("The sets are of different machines: their times are shown, not judged.")
    lines += [f"changed: {key}: {_words(left)} -> {_words(right)}" for key, (left, right) in data["changed"].items()]
    for row in data["effects"]:
        where = " / ".join(part for part in (row["part"], row["arm"], row["setting"]) if part)
        lines.append(f"{row['verdict']:<9} {row['metric']:<18} {_size(row):<34} n={row['n']}  {where}")
        if row["why"] and row["verdict"] != "same":
            lines[-1] += f"  ({row['why']})"
    for side in ("a", "b"):
        for cell in data[f"only_{side}"]:
            where = " / ".join(part for part in cell.values() if part)
            lines.append(f"only in {side.upper()}: {where}")
    lines.append(", ".join(f"{count} {verdict}" for verdict, count in data["counts"].items()) + ".")
    return "\n".join(lines)


def _size(row: Mapping[str, Any]) -> str:
    if not known(row["effect"]):
        return "-"
    form = "{:.4g}x" if row["scale"] == "ratio" else "{:+.4g}"
    text = form.format(row["effect"])
    return text if row["interval"] is None else f"{text} [{', '.join(form.format(v) for v in row['interval'])}]"


def _words(values: Sequence[Any]) -> str:
    return ", ".join("default" if value is None else str(value) for value in values)
