"""What one rank measures while it runs: spans, and rows for the tables, kept in memory and as JSON lines.

The JSON lines (`rank<r>.jsonl`) are there while the run goes on and after it was killed; the parquet shards that
tables are built from are written once, at the end, from the same rows.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from thinpipe.harness import metrics

now = time.monotonic
COMPUTE = ("forward_compute", "backward_compute", "optimizer")
CODEC = ("encode", "decode")
BLOCKED = ("wait_receive", "wait_send")


class Recorder:
    """Collects rows of one rank. While `keep_spans` is False spans are summed only (evaluation)."""

    def __init__(self, run_id: str, rank: int, path: Path | None = None):
        self.run_id, self.rank, self.keep_spans = run_id, rank, True
        self.rows: dict[str, list[dict[str, Any]]] = {name: [] for name in metrics.OF_RANKS}
        self.step = 0
        self._sums: dict[str, float] = defaultdict(float)
        self._file = path.open("a", encoding="utf-8") if path else None

    def span(
        self,
        phase: str,
        start: float,
        end: float,
        microbatch: int = -1,
        direction: str | None = None,
        *,
        boundary: int | None = None,
        stage: int | None = None,
    ) -> None:
        """Note that this rank spent `start` to `end` (CLOCK_MONOTONIC seconds) in `phase`, waits included."""
        self._sums[phase] += end - start
        if self.keep_spans:
            self.rows["spans"].append(
                {
                    "run_id": self.run_id,
                    "rank": self.rank,
                    "step": self.step,
                    "microbatch": microbatch,
                    "phase": phase,
                    "direction": direction,
                    "boundary": boundary,
                    "stage": stage,
                    "start_s": start,
                    "end_s": end,
                }
            )

    def take_sums(self) -> dict[str, float]:
        """compute_s, codec_s, blocked_s, sync_s since the last call."""
        sums, self._sums = self._sums, defaultdict(float)
        return {
            "compute_s": sum(sums[p] for p in COMPUTE),
            "codec_s": sum(sums[p] for p in CODEC),
            "blocked_s": sum(sums[p] for p in BLOCKED),
            "sync_s": sums["sync"],
        }

    def row(self, table: str, **values: Any) -> None:
        """Add a row; columns are checked against the vocabulary. The run's id is filled in."""
        row = {"run_id": self.run_id, **values}
        metrics.check(table, row)
        self.rows[table].append(row)
        if self._file:
            self._file.write(json.dumps({"table": table, **row}) + "\n")

    def restore(self, rows: dict[str, list[dict[str, Any]]]) -> None:
        """Go on from a checkpoint's rows: those written after it are dropped from the JSON lines too."""
        self.rows = {name: list(rows.get(name, ())) for name in self.rows}
        if self._file:
            self._file.seek(0)
            self._file.truncate()
            for table, kept in self.rows.items():
                for row in kept if table != "spans" else ():
                    self._file.write(json.dumps({"table": table, **row}) + "\n")

    def flush(self) -> None:
        if self._file:
            self._file.flush()

    def write_shards(self, folder: Path) -> None:
        """Write `<table>.rank<r>.parquet` for every table. pyarrow is imported here: it starts threads."""
        from thinpipe.harness import shards

        for table, rows in self.rows.items():
            shards.write_shard(table, rows, folder / f"{table}.rank{self.rank}.parquet")
