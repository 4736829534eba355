"""Seconds a run adds beyond its own steps: forked from the server, and with a fresh interpreter for every rank.

Two hosts, a tiny model, a few steps, in turn. Overhead = the run's wall time less its training phase and less the
calibration transfers. The fork server itself is started once a sweep and is not counted; it is reported beside.

    forked_s <= 2        fresh_s        ratio = fresh_s / forked_s
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import common
from thinpipe.harness.runner import Session
from thinpipe.harness.spec import parse
from thinpipe.harness.store import Store


def overhead_s(session: Session, store: Store, seed: int) -> float:
    """One run of a spec nobody has run before; its overhead in seconds."""
    spec = parse(
        {
            "seed": seed,
            "network": {"rate_mbit": 100.0},
            "task": {"num_sequences": 32, "num_eval_sequences": 0},
            "train": {"epochs": 1, "max_steps": 2},
            "compression": {"forward": "fixpoint:4", "backward": "fixpoint:8"},
        }
    )
    session.check([spec])
    status = session.run(spec, store.begin(spec))
    if status["state"] != "done":
        raise SystemExit(status["error"])
    phases = status["phases_s"]
    return status["wall_s"] - phases["train_s"] - phases["calibrate_s"]


def main() -> None:
    options = common.arguments(__doc__ or "", repeats=5)
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        start = time.monotonic()
        seeds = iter(range(10_000))
        with Session() as forked, Session(fresh=True) as fresh:
            for session in (forked, fresh):  # links are calibrated and servers are up from here
                overhead_s(session, store, next(seeds))
            start_up = time.monotonic() - start
            taken = common.interleave(
                {
                    "forked": lambda: overhead_s(forked, store, next(seeds)),
                    "fresh": lambda: overhead_s(fresh, store, next(seeds)),
                },
                options.repeats,
            )
    common.show(
        {
            "forked_s": statistics.median(taken["forked"]),
            "fresh_s": statistics.median(taken["fresh"]),
            "ratio": common.paired_ratio(taken["fresh"], taken["forked"]),
            "start_up_s": start_up,
            "repeats": options.repeats,
        },
        options.json,
    )


if __name__ == "__main__":
    main()
