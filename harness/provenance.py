"""Where runs come from: machine, versions, source and links of each, told once where runs share it.

A run's manifest.json is some 20 kB, and mostly the same for all runs of an experiment: what identifies its surroundings
is kept once, and a run names it by its place in the list.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinpipe.harness.store import Store

SURROUNDINGS = ("machine_id", "machine", "python", "versions", "tools", "source")
#: What differs between methods: plug-ins and files that a run uses, by hash.
USED = ("plugins", "inputs")
#: Of each link: what was set, and what was measured before the run.
LINK_SET = ("rate_mbit", "delay_ms")
LINK_MEASURED = ("measured_rate_mbit", "goodput_mbit", "rtt_ms", "ok", "reason")


@dataclass(frozen=True)
class Provenance:
    """surroundings, used: distinct ones. links: distinct lists of rows (link_rows). runs: run_id -> {started_at,
    ended_at, load_at_start, surroundings, used, links}, the last three as places in these lists (None: not known)."""

    surroundings: Sequence[Mapping[str, Any]]
    used: Sequence[Mapping[str, Any]]
    links: Sequence[Sequence[Mapping[str, Any]]]
    runs: Mapping[str, Mapping[str, Any]]

    def summary(self) -> dict[str, Any]:
        """commits, dirty, date, machines and versions of all runs together."""
        sources = [found.get("source") or {} for found in self.surroundings]
        return {
            "commits": sorted({source["commit"] for source in sources if source.get("commit")}),
            "dirty": any(source.get("dirty") for source in sources),
            "date": max((str(run["ended_at"]) for run in self.runs.values() if run.get("ended_at")), default=None),
            "machines": {found["machine_id"]: found["machine"] for found in self.surroundings if "machine_id" in found},
            "versions": dict(self.surroundings[-1].get("versions") or {}) if self.surroundings else {},
        }

    def of(self, run_id: str) -> dict[str, Any]:
        """Everything known of one run: its own, its surroundings, what it used, `links` as rows."""
        own = dict(self.runs.get(run_id, {}))
        around, used, links = (own.pop(name, None) for name in ("surroundings", "used", "links"))
        return {
            **own,
            **({} if around is None else self.surroundings[around]),
            **({} if used is None else self.used[used]),
            "links": [] if links is None else list(self.links[links]),
        }

    def to_json(self) -> dict[str, Any]:
        return {"surroundings": self.surroundings, "used": self.used, "links": self.links, "runs": self.runs}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Provenance:
        return cls(data["surroundings"], data["used"], data["links"], data["runs"])


class _Once:
    """Distinct values in the order they came."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._places: dict[str, int] = {}

    def place(self, value: Any) -> int:
        key = json.dumps(value, sort_keys=True)
        if key not in self._places:
            self._places[key] = len(self.values)
            self.values.append(value)
        return self._places[key]


def of_runs(store: Store, run_ids: Sequence[str]) -> Provenance:
    """What the manifests and statuses of runs that have ended say; a run without a manifest has its dates alone."""
    surroundings, used, links, runs = _Once(), _Once(), _Once(), {}
    for run_id in run_ids:
        manifest, status = store.manifest(run_id), store.status(run_id) or {}
        around = {key: manifest[key] for key in SURROUNDINGS if key in manifest}
        uses = {key: manifest[key] for key in USED if key in manifest}
        rows = link_rows(manifest.get("network") or {})
        runs[run_id] = {
            **{key: status.get(key) for key in ("started_at", "ended_at")},
            "load_at_start": manifest.get("load_at_start"),
            "surroundings": surroundings.place(around) if around else None,
            "used": used.place(uses) if uses else None,
            "links": links.place(rows) if rows else None,
        }
    return Provenance(surroundings.values, used.values, links.values, runs)


def link_rows(network: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row a directed link: source, destination, what was set (LINK_SET), what was measured (LINK_MEASURED; None: was
    not)."""
    measured = {(row["source"], row["destination"]): row for row in network.get("calibration") or []}
    rows = []
    for source, destination, asked in (network.get("topology") or {}).get("links", []):
        found = measured.get((source, destination), {})
        row = {"source": source, "destination": destination, **{k: asked.get(k) for k in LINK_SET}}
        rows.append(row | {key: found.get(key) for key in LINK_MEASURED})
    return rows
