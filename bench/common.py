"""What the benchmarks share: one thread, interleaved repeats, medians, JSON or a table on stdout.

Import it before torch or numpy: they read the number of threads when they are imported.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Mapping
from typing import Any

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ[_name] = "1"


def arguments(description: str, repeats: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout, nothing else")
    parser.add_argument("--repeats", type=int, default=repeats, help="interleaved repeats of each contender")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats takes a number from 1 on, got {options.repeats}")
    return options


def interleave(contenders: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Run all contenders in turn, `repeats` times, so that drift of the machine hits all alike."""
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, run in contenders.items():
            taken[name].append(run())
    return taken


def paired_ratio(a: list[float], b: list[float]) -> float:
    """Median of a/b, pair by pair."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def show(result: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, indent=2))
        return
    for key, value in result.items():
        print(f"{key}: {value if not isinstance(value, float) else round(value, 4)}")
