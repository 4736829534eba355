"""One run, from spec to status: lab up, links verified, ranks launched, watched, counted, taken down.

    lab up and read back ─▶ calibrate (once a network) ─▶ ranks: ready ─▶ settings compared ─▶ counters ─▶ go
        ─▶ progress ... done ─▶ counters, bytes compared ─▶ finish ─▶ closed ─▶ status

Every wait has a limit. gloo does not notice a peer that dies while a message is on its way, so the runner watches
processes and their pipes and ends a failed run itself.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from thinpipe.harness import audit, manifest, predict, rho, store
from thinpipe.harness.errors import DivergedError, RunError, UserError
from thinpipe.harness.launch.base import Launcher, topology_to_json
from thinpipe.harness.launch.local import LocalLauncher
from thinpipe.harness.pipeline import placement
from thinpipe.harness.spec import NetworkSpec, RunSpec
from thinpipe.netem import calibrate
from thinpipe.netem.errors import NetemError
from thinpipe.netem.link import LinkSpec
from thinpipe.netem.topology import Topology

SETUP_LIMIT_S = 180.0
SETTLE_LIMIT_S = 60.0
# A rank may be silent this many times as long as its longest step or evaluation batch is predicted to take.
STALL_FACTOR, STALL_LIMIT_S = 20.0, 60.0
# A rank that waits in vain says which message it waited for; only then is it the runner's turn.
GRACE_S = 5.0
# How long the cause of a failure may come after a consequence of it.
CAUSE_WITHIN_S = 0.5
# Rates up to this are carried by any machine; above, what this one carries is measured first.
SURE_RATE_MBIT = 200.0

# Bytes that are counted by the kernel, from a process's start on.
COUNTED = ("wire_bytes", "sync_bytes", "data_bytes", "shared_bytes")

Progress = Callable[[int, int], None]


def topology_of(spec: RunSpec) -> Topology:
    """Every pair of hosts is joined by the run's link: neighbours exchange frames, all exchange clip norms. Hosts of
    one data group (the same place in every pipeline) by data_parallel.rate_mbit, where it is set."""
    ranks, rate = spec.pipeline.ranks, spec.data_parallel.rate_mbit
    mesh = Topology.mesh(spec.world_size, link_of(spec.network))
    if rate is None:
        return mesh
    within = {(i, j): replace(link, rate_mbit=rate) for (i, j), link in mesh.links.items() if i % ranks == j % ranks}
    return Topology(mesh.hosts, {**mesh.links, **within})


def carrying(spec: RunSpec) -> frozenset[tuple[int, int]]:
    """The links (source, destination) that a run's times depend on: those of frames, and inside data groups. Over the
    others go a clip norm's few bytes and barriers."""
    ranks, groups = spec.pipeline.ranks, range(spec.data_parallel.groups)
    frames = {(g * ranks + i, g * ranks + j) for g in groups for i, j in placement.neighbours(spec.pipeline)}
    data = {(g * ranks + i, h * ranks + i) for i in range(ranks) for g in groups for h in groups if g < h}
    return frozenset(pair for i, j in frames | data for pair in ((i, j), (j, i)))


def link_of(network: NetworkSpec) -> LinkSpec:
    if not network.is_resolved:
        raise UserError(
            f"network.rate {network.rate!r} is a ratio, and no run can start before the rate is worked out from it: "
            "run the experiment that asks for it, or set network.rate_mbit"
        )
    return LinkSpec(**network.link())


def stall_limit_s(spec: RunSpec) -> float:
    """How long a rank may wait for one message; its longest silence is predicted from the spec."""
    return max(STALL_LIMIT_S, STALL_FACTOR * predict.longest_silence_s(spec))


class Session:
    """What a sweep keeps between runs: the launcher and the calibrations. A context manager.

    allow_unreached: run at rates this machine was measured not to carry. calibrated=False: leave links unmeasured
    (their runs are flagged). limit_s: replaces the stall limit computed from the spec.
    """

    def __init__(
        self,
        *,
        allow_unreached: bool = False,
        calibrated: bool = True,
        fresh: bool = False,
        limit_s: float | None = None,
        launcher: Launcher | None = None,
    ):
        self.allow_unreached, self.calibrated, self.limit_s = allow_unreached, calibrated, limit_s
        self._given, self._fresh = launcher, fresh
        self._calibrations: dict[tuple[str, frozenset[tuple[int, int]]], list[dict[str, Any]]] = {}
        self._capacity_mbit: float | None = None

    def __enter__(self) -> Session:
        self.launcher: Launcher = self._given or LocalLauncher(fresh=self._fresh)
        return self

    def __exit__(self, *_: object) -> None:
        self.launcher.close()

    def check(self, specs: Iterable[RunSpec]) -> None:
        """Raise UserError for the first run that cannot work as asked, before anything starts."""
        trained: set[str] = set()
        networks: set[str] = set()
        for spec in specs:
            if spec.network_id not in networks:
                networks.add(spec.network_id)
                self._reachable(max(spec.network.rate_mbit or 0.0, spec.data_parallel.rate_mbit or 0.0) or None)
                self._buildable(spec)
            # What is checked and prepared is the same for every seed.
            key = f"{spec.model_copy(update={'seed': 0}).train_id}/{spec.measure}"
            if key not in trained:
                trained.add(key)
                with _as_user_error():
                    self.launcher.check(spec)

    def _buildable(self, spec: RunSpec) -> None:
        """Bring the network up once and down again: what tc, the kernel or a missing privilege refuses shows now."""
        with _as_user_error(), self.launcher.lab(topology_of(spec)):
            pass

    def _reachable(self, rate_mbit: float | None) -> None:
        if rate_mbit is None or rate_mbit <= SURE_RATE_MBIT or self.allow_unreached:
            return
        if self._capacity_mbit is None:
            with _as_user_error():
                self._capacity_mbit = calibrate.capacity_mbit(limit_s=10.0)
        if rate_mbit > self._capacity_mbit:
            raise UserError(
                f"network.rate_mbit {rate_mbit:g} is above what this machine carries between two hosts "
                f"({self._capacity_mbit:.0f} Mbit/s measured); lower it, or pass --allow-unreached to run anyway and "
                "have the run flagged"
            )

    def run(self, spec: RunSpec, run_dir: Path, progress: Progress = lambda done, total: None) -> dict[str, Any]:
        """Run `spec` in `run_dir` (which holds run.json); returns the status, ended well or not.

        KeyboardInterrupt passes through once everything is taken down. A UserError about the machine (no tc, no
        privilege) passes through too: it is not the run's.
        """
        if Path("/run") in run_dir.resolve().parents:
            raise UserError(f"{run_dir} lies below /run, which a lab's hosts do not see; give another with --results")
        started, begun = datetime.now(UTC), time.monotonic()
        run = Run(spec, run_dir, self, progress)
        run.manifest |= manifest.collect(spec)
        state, error = "done", None
        try:
            run.execute()
            if spec.trace:
                _trace(spec, run_dir)
        except RunError as failure:
            state, error = failure.state, str(failure)
        except NetemError as failure:
            state, error = "failed", str(failure)
        store.write_json(run_dir / "manifest.json", run.manifest)
        return {
            "run_id": spec.run_id,
            "state": state,
            "error": error,
            "detail": run.detail,
            "started_at": started.isoformat(timespec="seconds"),
            "ended_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "wall_s": time.monotonic() - begun,
            "machine": manifest.machine_id(),
            **run.summary(),
        }

    def calibration(self, spec: RunSpec, lab: Any) -> list[dict[str, Any]]:
        """Measurements of the links that matter, taken once a network in this session; one that found a link off, again
        by the next run, which would otherwise bear a flag for what was wrong before it began."""
        pairs = carrying(spec)
        key = spec.network_id, pairs
        if key not in self._calibrations:
            at = datetime.now(UTC).isoformat(timespec="seconds")
            measured = calibrate.calibrate(lab, pairs) if self.calibrated else []
            found = [asdict(link) | {"calibrated_at": at} for link in measured]
            if not all(link.ok for link in measured):
                return found
            self._calibrations[key] = found
        return self._calibrations[key]


@dataclass
class Run:
    """One run's state while it is executed."""

    spec: RunSpec
    run_dir: Path
    session: Session
    progress: Progress
    manifest: dict[str, Any] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    calibration: list[dict[str, Any]] = field(default_factory=list)
    done: dict[int, dict[str, Any]] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    wire_bytes: int | None = None
    resumed_from: int = 0
    detail: str | None = None

    def execute(self) -> None:
        topology = topology_of(self.spec)
        limit = self.session.limit_s or stall_limit_s(self.spec)
        with self._phase("lab_s"):
            lab_context = self.session.launcher.lab(topology)
        with lab_context as lab:
            self.manifest["network"] = lab.info | {"topology": topology_to_json(topology)}
            with self._phase("calibrate_s"):
                if self.spec.world_size > 1:
                    self.calibration = self.session.calibration(self.spec, lab)
                    self.manifest["network"]["calibration"] = self.calibration
            with self._phase("launch_s"):
                self._launch(lab, limit)
                ready = self._collect(lab, "ready", SETUP_LIMIT_S)
                self._verify_settings({rank: message["effective"] for rank, message in ready.items()})
            before = lab.counters()
            self._tell(lab, {"go": True})
            with self._phase("train_s"):
                self.done = self._collect(lab, "done", limit + GRACE_S)
            with self._phase("settle_s"):
                self._verify_bytes(before, lab.counters())
                self._tell(lab, {"finish": True})
                self._collect(lab, "closed", SETTLE_LIMIT_S)
            teardown = time.monotonic()
        self.phases["teardown_s"] = time.monotonic() - teardown

    @contextlib.contextmanager
    def _phase(self, name: str):
        start = time.monotonic()
        try:
            yield
        finally:
            self.phases[name] = time.monotonic() - start

    def _launch(self, lab: Any, limit_s: float) -> None:
        rendezvous = self.run_dir / "rendezvous"
        rendezvous.unlink(missing_ok=True)
        args = {
            "run_dir": str(self.run_dir.resolve()),
            "rendezvous": str(rendezvous.resolve()),
            "limit_s": limit_s,
        }
        for rank in range(self.spec.world_size):
            log = self.run_dir / f"rank{rank}.log"
            self.session.launcher.start_rank(lab, rank, self.spec.world_size, args, log)
            self.steps[rank] = 0

    def _tell(self, lab: Any, message: dict[str, Any]) -> None:
        for rank in self.steps:
            lab.send(f"rank{rank}", message)

    def _collect(self, lab: Any, kind: str, silence_s: float) -> dict[int, dict[str, Any]]:
        """Wait until every rank has sent a message of `kind`; any message counts as a sign of life.

        Raises RunError at once when a rank reports an error or ends early, and after `silence_s` without any message.
        """
        got: dict[int, dict[str, Any]] = {}
        last = dict.fromkeys(self.steps, time.monotonic())
        while len(got) < len(self.steps):
            quiet = {rank: heard for rank, heard in last.items() if rank not in got}
            rank, heard = min(quiet.items(), key=lambda item: item[1])
            left = heard + silence_s - time.monotonic()
            if left <= 0:
                raise RunError(self._stalled(kind, rank, silence_s))
            event = lab.event(min(left, 1.0))
            if event is None:
                continue
            rank = int(event.name.removeprefix("rank"))
            if event.kind == "exit":
                if kind == "closed" and rank in got and event.status == 0:
                    continue  # done and gone, while a slower rank still writes
                raise RunError(self._ended(kind, rank, event.status))
            last[rank] = time.monotonic()
            message = event.data
            if message["type"] == "error":
                raise self._failure(lab, kind, message)
            if message["type"] == "progress":
                self.steps[rank] = message["step"]
                if rank == 0:
                    self.progress(message["step"], message["steps"])
            elif message["type"] == kind:
                got[rank] = message
        return got

    def _failure(self, lab: Any, kind: str, message: dict[str, Any]) -> RunError:
        """The error to end the run with: the first cause, or after a short wait for one, the consequence in hand."""
        deadline = time.monotonic() + CAUSE_WITHIN_S
        while not message["cause"] and (left := deadline - time.monotonic()) > 0:
            event = lab.event(left)
            if event is not None and event.kind == "exit" and event.status < 0:
                return RunError(self._ended(kind, int(event.name.removeprefix("rank")), event.status))
            if event is not None and event.kind == "message" and event.data.get("cause"):
                message = event.data
        self.detail = message["detail"]
        return (DivergedError if message["state"] == "diverged" else RunError)(message["error"])

    def _stalled(self, kind: str, rank: int, silence_s: float) -> str:
        at = ", ".join(f"rank {r} at step {s}" for r, s in self.steps.items())
        return f"rank {rank} gave no sign of life for {silence_s:.0f} s while it was waited for ({kind}); {at}"

    def _ended(self, kind: str, rank: int, status: int) -> str:
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        log = self.run_dir / f"rank{rank}.log"
        self.detail = _tail(log)
        return f"rank {rank} {how} at step {self.steps[rank]} before it was {kind}; its log is {log.name}"

    def _verify_settings(self, effective: dict[int, dict[str, Any]]) -> None:
        requested = audit.requested(self.spec)
        self.manifest |= {"requested": requested, "effective": {f"rank{r}": e for r, e in effective.items()}}
        audit.compare_settings(requested, effective)
        self.resumed_from = effective[0]["resumed_from"]
        self.steps = dict.fromkeys(self.steps, self.resumed_from)

    def _verify_bytes(self, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
        if self.spec.world_size == 1:
            self.wire_bytes = 0
            return
        audit.compare_digests(self.done)
        per_host = audit.wire_bytes(before, after)
        self.wire_bytes = sum(per_host.values())
        self.manifest["bytes"] = audit.compare_bytes(per_host, self.done)

    def _memory(self, reports: list[dict[str, Any]]) -> dict[str, float | None]:
        """Of the largest rank, in MiB: predicted before the start, and measured. Of all: what memories keep."""
        of = {
            name: max((report[f"{name}_memory_bytes"] for report in reports), default=None)
            for name in ("predicted", "peak")
        }
        kept = sum(report["memory_state_bytes"] for report in reports) if reports else None
        sizes = {f"{name}_memory_mib": None if value is None else value / 2**20 for name, value in of.items()}
        return {**sizes, "memory_state_bytes": kept}

    def summary(self) -> dict[str, Any]:
        """The part of status.json that the run measured."""
        reports = list(self.done.values())
        names = ("raw_bytes", "payload_bytes", "frame_bytes", "sync_bytes", "data_bytes", "shared_bytes")
        totals = {name: sum(int(r.get(name, 0)) for r in reports) if reports else None for name in names}
        queue, overrun = (
            max((r[name] for r in reports if r[name] is not None), default=None)
            for name in ("run_queue_pct", "overrun_pct")
        )
        return {
            "fidelity": audit.fidelity(self.spec, queue, self.calibration, overrun),
            # What was sent before a run was resumed is in no counter any more.
            "totals": totals
            | {"steps": max(self.steps.values(), default=0), "wire_bytes": self.wire_bytes}
            | (dict.fromkeys(COUNTED) if self.resumed_from else {}),
            "resumed_from": self.resumed_from,
            "parameters": [report["parameters_digest"] for _, report in sorted(self.done.items())],
            "memory": self._memory(reports),
            "rho": rho.of_run(self.spec),
            "links": audit.worst_link(self.calibration),
            "run_queue_pct": queue,
            "phases_s": self.phases,
        }


def _trace(spec: RunSpec, run_dir: Path) -> None:
    """Write the run's trace.json from its ranks' spans. A failure to is the run's."""
    from thinpipe.harness import tables, trace

    spans = tables.read_run(run_dir, spec.run_id, spec.world_size, "done")["spans"]
    try:
        trace.write(run_dir / "trace.json", tables.to_frame("spans", spans), spec.pipeline.ranks)
    except Exception as error:
        raise RunError(f"the run ended well, but its trace could not be written: {error}") from error


@contextlib.contextmanager
def _as_user_error():
    try:
        yield
    except NetemError as error:
        raise UserError(str(error)) from error
    except RunError as error:
        first, *rest = str(error).splitlines()
        where = next((line.strip() for line in reversed(rest) if line.strip().startswith("File ")), "")
        raise UserError(f"the run cannot be prepared: {first} {where}".strip()) from error


def _tail(path: Path, lines: int = 20) -> str | None:
    try:
        return os.linesep.join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return None
