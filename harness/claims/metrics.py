"""The metrics of claims by name, each a number of one run.

Every numeric column of the runs table is one (harness/metrics.py has its meaning); the others are worked out from a
run's rows in the other tables: series.py from steps, transfers and evals, times.py from times and curves.

>>> REGISTRY["step_time_s"].better, REGISTRY["step_time_s"].is_time
('lower', True)
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from thinpipe.harness import metrics
from thinpipe.harness.claims import series as claim_series
from thinpipe.harness.claims import times as claim_times
from thinpipe.harness.claims.subject import Metric, Subject

HIGHER = (
    "samples_per_s", "tokens_per_s", "final_accuracy", "final_matthews", "final_f1", "compression_ratio",
    "measured_compression_ratio",
)  # fmt: skip
LOWER = (
    "step_time_s", "cold_step_time_s", "compute_s", "codec_s", "wait_s", "idle_s", "wall_s",
    "initial_train_loss", "final_train_loss",
    "final_eval_loss", "predicted_memory_mib", "peak_memory_mib", "memory_state_bytes", "raw_bytes", "payload_bytes",
    "frame_bytes", "wire_bytes", "sync_bytes", "data_bytes", "run_queue_pct", "measured_rtt_ms",
)  # fmt: skip
#: Columns that are times, or of a machine's links.
TIMED = (
    "step_time_s", "cold_step_time_s", "samples_per_s", "tokens_per_s", "compute_s", "codec_s", "wait_s", "idle_s",
    "wall_s", "measured_rate_mbit", "measured_rtt_ms",
)  # fmt: skip
#: Columns that may be 0, or below: a ratio of them may not exist.
DIFFERENCES = (
    "final_matthews", "codec_s", "wait_s", "idle_s", "sync_bytes", "data_bytes", "memory_state_bytes", "run_queue_pct",
)  # fmt: skip


def _column(name: str, column: metrics.Column) -> Metric:
    return Metric(
        name=name,
        meaning=column.meaning,
        unit=column.unit,
        better="higher" if name in HIGHER else "lower" if name in LOWER else None,
        function=functools.partial(_read, name=name),
        is_time=name in TIMED,
        scale="difference" if name in DIFFERENCES else "ratio",
    )


def _read(subject: Subject, *, name: str) -> float:
    return subject.column(name)


def _registry() -> dict[str, Metric]:
    columns = {name: _column(name, c) for name, c in metrics.RUNS.items() if c.type in (int, float)}
    own = {metric.name: metric for metric in (*claim_series.METRICS, *claim_times.METRICS)}
    assert not columns.keys() & own.keys(), "a metric has the name of a column"
    return columns | own


REGISTRY: Mapping[str, Metric] = _registry()
