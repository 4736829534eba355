"""What starts, watches and ends a run where no runner does: every rank does its part, and rank 0 writes the status.

The worker talks to it as to a runner; where a runner would compare what all ranks sent, the ranks tell each other,
over a gloo group of their own that no counter includes:

    ready    settings of all ranks compared          progress    printed
    done     digests of all caches compared          closed      traces written, outcomes exchanged, status written
    error    kept; another rank's end is looked up in the store, where its cause was left
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from thinpipe.harness import audit, manifest, runner
from thinpipe.harness.errors import PeerError, RunError
from thinpipe.harness.spec import RunSpec
from thinpipe.harness.store import Store, write_json

# How long the cause of a failure may come after a consequence of it.
CAUSE_WITHIN_S = 3.0
CAUSE = "thinpipe/cause"


class Tail:
    """The rows a rank has written to its JSON lines since the last look."""

    def __init__(self, path: Path):
        self.path, self.at = path, 0

    def rows(self) -> list[dict[str, Any]]:
        with self.path.open(encoding="utf-8") as file:
            file.seek(self.at)
            lines = file.readlines()
            self.at = file.tell()
        return [json.loads(line) for line in lines]


@dataclass
class Control:
    """One rank's. say: takes a line for standard output; artifacts: called once all has been measured, writes traces;
    finally_: on rank 0, once every rank has ended well."""

    spec: RunSpec
    store: Store
    rank: int
    limit_s: float
    say: Callable[[str], None]
    started: Callable[[], None]
    artifacts: Callable[[], None]
    finally_: Callable[[], None]
    failure: dict[str, Any] | None = None
    step_times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.began, self.began_at = time.monotonic(), datetime.now(UTC)
        self.run_dir = self.store.run_dir(self.spec.run_id)
        self.tail = Tail(self.run_dir / f"rank{self.rank}.jsonl")
        self.group: Any = None
        # What a runner knows of a run it has executed; it makes the status out of it.
        self.run = runner.Run(self.spec, self.run_dir, cast(Any, None), lambda done, total: None)
        if self.rank == 0:
            self.run.manifest |= manifest.collect(self.spec)

    def send(self, message: dict[str, Any]) -> None:
        """A message of the worker's. Raises RunError where the ranks do not agree."""
        handle = {
            "ready": self._ready,
            "progress": self._progress,
            "done": self._done,
            "closed": self._closed,
            "error": self._error,
        }.get(message["type"])
        if handle is not None:
            handle(message)

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """The answer to `ready` and `done`: every rank has been heard by then."""
        return {"go": True}

    def _gather(self, mine: Any) -> dict[int, Any]:
        """What every rank has to say, by rank."""
        if self.spec.world_size == 1:
            return {0: mine}
        if self.group is None:
            # Another rank may still write its trace, as it may still read a checkpoint at the start.
            limit = timedelta(seconds=max(self.limit_s, runner.SETUP_LIMIT_S))
            self.group = dist.new_group(list(range(self.spec.world_size)), timeout=limit, backend="gloo")
        found: list[Any] = [None] * self.spec.world_size
        try:
            dist.all_gather_object(found, mine, group=self.group)
        except RuntimeError as error:
            raise PeerError(f"rank {self.rank}: another rank is gone ({str(error).splitlines()[0]})") from error
        return dict(enumerate(found))

    def _ready(self, message: dict[str, Any]) -> None:
        effective = self._gather(message["effective"])
        requested = audit.requested(self.spec)
        self.run.manifest |= {"requested": requested, "effective": {f"rank{r}": e for r, e in effective.items()}}
        audit.compare_settings(requested, effective)
        self.run.resumed_from = effective[0]["resumed_from"]
        self.run.steps = dict.fromkeys(range(self.spec.world_size), self.run.resumed_from)
        if self.rank == 0:
            self.say(f"run {self.spec.run_id}: {effective[0]['steps']} steps, results in {self.run_dir}")
            if self.run.resumed_from:
                self.say(f"goes on from the checkpoint after step {self.run.resumed_from}")
        self.started()

    def _progress(self, message: dict[str, Any]) -> None:
        self.run.steps = dict.fromkeys(self.run.steps, message["step"])
        for row in self.tail.rows():
            if row.get("step", -1) < self.run.resumed_from:
                continue  # shown before the run was cut short
            if row["table"] == "steps":
                self.step_times.append(row["step_time_s"])
                self.say(step_line(row, message["steps"]))
                if row["train_loss"] is not None:
                    self.say(str({"loss": row["train_loss"], "lr": row["lr"], "step": row["step"] + 1}))
            elif row["table"] == "evals" and row["step"] > self.run.resumed_from:
                self.say(str(scores(row)))

    def _done(self, message: dict[str, Any]) -> None:
        self.run.done = self._gather(message)
        audit.compare_digests(self.run.done)

    def _closed(self, _: dict[str, Any]) -> None:
        """Traces, then everybody's outcome: a rank whose trace failed fails the run on all of them."""
        mine: str | None = None
        try:
            self.artifacts()
        except Exception as error:  # whatever a trace fails by: the others wait to be told
            mine = f"rank {self.rank}: its trace failed: {type(error).__name__}: {error}"
        wrong = [error for error in self._gather(mine).values() if error is not None]
        if wrong:
            raise RunError("; ".join(wrong))
        if self.rank == 0:
            self.finally_()
            self.finish("done", None, None)
            self.say(average_line(self.step_times))

    def _error(self, message: dict[str, Any]) -> None:
        if message["cause"]:
            self._leave_cause(message)
        else:
            message = self._cause() or message
        self.failure = message
        if self.rank == 0:
            self.finish(message["state"], message["error"], message["detail"])

    def _leave_cause(self, message: dict[str, Any]) -> None:
        # The store may be gone with rank 0; then there is nobody to tell.
        with contextlib.suppress(Exception):
            dist.distributed_c10d._get_default_store().set(CAUSE, json.dumps(message))

    def _cause(self) -> dict[str, Any] | None:
        with contextlib.suppress(Exception):
            store = dist.distributed_c10d._get_default_store()
            store.wait([CAUSE], timedelta(seconds=CAUSE_WITHIN_S))
            return json.loads(store.get(CAUSE))
        return None

    def finish(self, state: str, error: str | None, detail: str | None) -> None:
        """Write manifest.json, then status.json."""
        write_json(self.run_dir / "manifest.json", self.run.manifest)
        self.store.finish(
            self.spec.run_id,
            {
                "state": state,
                "error": error,
                "detail": detail,
                "started_at": self.began_at.isoformat(timespec="seconds"),
                "ended_at": datetime.now(UTC).isoformat(timespec="seconds"),
                "wall_s": time.monotonic() - self.began,
                "machine": manifest.machine_id(),
                **self.run.summary(),
            },
        )


def step_line(row: dict[str, Any], steps: int) -> str:
    return (
        f"rank {row['rank']} step {row['step'] + 1}/{steps}: {row['step_time_s']:.3f} s "
        f"(computing {row['compute_s']:.3f}, coding {row['codec_s']:.3f}, waiting {row['blocked_s']:.3f})"
    )


def scores(row: dict[str, Any]) -> dict[str, Any]:
    """What an evaluation found, as AC-SGD prints it: the metrics there are."""
    names = ("perplexity", "accuracy", "matthews", "f1")
    return {"epoch": row["epoch"], "loss": row["eval_loss"]} | {n: row[n] for n in names if row[n] is not None}


def average_line(step_times: list[float]) -> str:
    """Over the steps that were run, the first left out where there is another."""
    counted = step_times[1:] or step_times
    if not counted:
        return "no step was run"
    left_out = ", the first left out" if len(step_times) > 1 else ""
    return f"average step time: {sum(counted) / len(counted):.4f} s over {len(counted)} steps{left_out}"
