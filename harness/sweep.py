"""Execute a plan: one run after the other under the machine's timing lock, each isolated from the others'
faults.

    lock -> states read again -> session opened and asked to check -> for each run: begin, run, finish

A failed run is reported at once, and again at the end; it never stops the sweep unless asked. The session
does the running: it is handed in, so that this module knows neither torch nor the network."""

from __future__ import annotations

import shutil
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from thinpipe.harness import lock, manifest
from thinpipe.harness.errors import RunError, UserError
from thinpipe.harness.plan import Entry, Plan
from thinpipe.harness.spec import RunSpec
from thinpipe.harness.store import CHECKPOINTS, Store, explain_disk_full
from thinpipe.netem.errors import NetemError

EXIT_DONE, EXIT_FAILED, EXIT_USER, EXIT_INTERRUPTED = 0, 1, 2, 130


class Session(Protocol):
    """What runs are executed by; open for the length of a sweep."""

    def check(self, specs: Sequence[RunSpec]) -> None:
        """Raise UserError when one of `specs` cannot run here. Called once, before anything starts."""

    def run(self, spec: RunSpec, run_dir: Path, progress: Callable[[int, int], None]) -> dict[str, Any]:
        """Execute one run, its files below `run_dir`; return the content of its status.json without writing
        it.

        progress(step, steps) may be called as it goes. On KeyboardInterrupt: tear down, then raise it on.
        UserError: the machine, not the run, is at fault (no tc, no privilege); no other run could work.
        """


class Progress(Protocol):
    """Where a sweep says what it does."""

    def start(self, entries: Sequence[Entry]) -> None:
        """These runs are about to be executed."""

    def begin(self, entry: Entry) -> None: ...

    def step(self, step: int, steps: int) -> None: ...

    def end(self, entry: Entry, status: dict[str, Any]) -> None: ...

    def say(self, message: str) -> None: ...

    def stop(self) -> None:
        """The sweep has ended, however it did."""


@dataclass
class Result:
    """What a sweep did. `plan`: the states afterwards. `executed`: entries with the status they ended
    with."""

    plan: Plan
    executed: list[tuple[Entry, dict[str, Any]]] = field(default_factory=list)
    interrupted: bool = False
    stopped: bool = False

    @property
    def failed(self) -> list[Entry]:
        """Every failed run of the plan, also one that failed earlier and was not repeated."""
        return [entry for entry in self.plan.entries if entry.state == "failed"]

    @property
    def exit_code(self) -> int:
        if self.interrupted:
            return EXIT_INTERRUPTED
        return EXIT_FAILED if self.failed else EXIT_DONE


def execute(
    plan: Plan,
    store: Store,
    session: Callable[[], AbstractContextManager[Session]],
    *,
    retry_failed: bool = False,
    force: bool = False,
    fail_fast: bool = False,
    progress: Progress,
    accepted: Callable[[], None] = lambda: None,
) -> Result:
    """Execute what `plan` has to do. `session` is opened only when there is something. `accepted` is called once
    nothing of the plan was refused, before the first run: a refusal leaves no trace.

    Raises UserError when nothing can be started or results can no longer be written; what is finished stays.
    """
    if not plan.todo(retry_failed=retry_failed, force=force):
        accepted()
        return Result(plan)
    result = Result(plan)
    try:
        with lock.hold(plan.experiment, store.root, progress.say):
            now = plan.refreshed(store)
            entries = [entry for entry in now.todo(retry_failed=retry_failed, force=force) if not _changed(entry, plan)]
            if entries:
                with session() as runner:
                    progress.say("preparing: networks, data, kernels (compiled once, up to a minute)")
                    runner.check([entry.spec for entry in entries])
                    accepted()
                    progress.start(entries)
                    try:
                        _execute(entries, store, runner, progress, result, fail_fast=fail_fast, afresh=force)
                    finally:
                        progress.stop()
    except KeyboardInterrupt:
        result.interrupted = True
    result.plan = plan.refreshed(store)
    return result


def _changed(entry: Entry, plan: Plan) -> bool:
    """Whether a run was finished since the plan was made: another sweep did it while this one waited."""
    before = next(item.status for item in plan.entries if item.run_id == entry.run_id)
    return entry.status is not None and entry.status != before


def _execute(
    entries: list[Entry],
    store: Store,
    runner: Session,
    progress: Progress,
    result: Result,
    *,
    fail_fast: bool,
    afresh: bool,
) -> None:
    for entry in entries:
        status = _run(entry, store, runner, progress, afresh=afresh)
        result.executed.append((entry, status))
        progress.end(entry, status)
        if fail_fast and status["state"] == "failed":
            result.stopped = True
            return


def _run(entry: Entry, store: Store, runner: Session, progress: Progress, *, afresh: bool) -> dict[str, Any]:
    """One run from begin to finish. UserError (machine or disk) and an interrupt get out, the run left
    open."""
    if entry.note:
        progress.say(f"{entry.name}: {entry.note}")
    folder = store.begin(entry.spec, afresh=afresh)
    progress.begin(entry)
    started, clock = _utc(), time.monotonic()
    try:
        with explain_disk_full(folder):
            status = runner.run(entry.spec, folder, progress.step)
    except UserError:
        raise
    except Exception as error:
        status = failed_status(error, started, time.monotonic() - clock)
    if status["state"] == "failed":
        # A rank that could not write its files fails for whatever reason it saw first.
        store.check_space()
    store.finish(entry.run_id, status)
    if status["state"] == "done" and not entry.spec.checkpoint.keep:
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    return {**status, "run_id": entry.run_id}


def failed_status(error: Exception, started_at: str, wall_s: float) -> dict[str, Any]:
    """The status of a run that ended in `error`, when the session could not make one itself."""
    expected = isinstance(error, (RunError, NetemError))
    text = str(error) if expected else f"{type(error).__name__}: {error}"
    return {
        "state": error.state if isinstance(error, RunError) else "failed",
        "error": text or type(error).__name__,
        "detail": None if expected else "".join(traceback.format_exception(error)),
        "started_at": started_at,
        "ended_at": _utc(),
        "wall_s": wall_s,
        "machine": manifest.machine_id(),
        "fidelity": {"flags": [], "reasons": []},
        "totals": dict.fromkeys(("steps", "raw_bytes", "payload_bytes", "frame_bytes"), 0)
        | dict.fromkeys(("wire_bytes", "sync_bytes", "data_bytes")),
        "links": {"measured_rate_mbit": None, "measured_rtt_ms": None},
        "run_queue_pct": None,
    }


def _utc() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
