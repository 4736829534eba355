"""Small runs between namespaces, and their rows: shared by tests that need real training."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from thinpipe.harness.runner import Session
from thinpipe.harness.spec import RunSpec, parse
from thinpipe.harness.store import Store

SMALL = {
    "model": {"layers": 4, "width": 32, "heads": 4},
    "task": {"num_sequences": 64, "num_eval_sequences": 10, "sequence_length": 64},
    "train": {"epochs": 5, "max_steps": 20, "warmup_steps": 4, "evaluate_every": 1},
}


def small(**changes) -> RunSpec:
    """A run of 20 steps that takes a second; `changes` are merged one level deep."""
    data = {key: dict(value) for key, value in SMALL.items()}
    for key, value in changes.items():
        data[key] = {**data.get(key, {}), **value} if isinstance(value, dict) else value
    return parse(data)


class Lab:
    """Runs specs in one session and reads their rows back."""

    def __init__(self, session: Session, root: Path):
        self.session, self.store = session, Store(root)
        self._statuses: dict[str, dict] = {}

    def run(self, spec: RunSpec, **kwargs) -> dict:
        self.session.check([spec])
        return self.session.run(spec, self.store.begin(spec), **kwargs)

    def status(self, spec: RunSpec) -> dict:
        """How the spec's run ended; runs it if it has not been run here."""
        if spec.run_id not in self._statuses:
            self._statuses[spec.run_id] = self.run(spec)
        status = self._statuses[spec.run_id]
        assert status["state"] == "done", status["error"]
        return status

    def rows(self, spec: RunSpec, table: str) -> pd.DataFrame:
        shards = sorted(self.store.run_dir(spec.run_id).glob(f"{table}.rank*.parquet"))
        assert len(shards) == spec.world_size
        return pd.concat([pd.read_parquet(path) for path in shards], ignore_index=True)

    def losses(self, spec: RunSpec) -> list[float]:
        """Training losses by step; runs the spec if it has not been run here."""
        self.status(spec)
        steps = self.rows(spec, "steps").dropna(subset=["train_loss"]).sort_values("step")
        return steps["train_loss"].tolist()
