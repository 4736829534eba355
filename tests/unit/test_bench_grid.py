"""bench/grid.py: what it makes of the tables of both ways, by hand."""

import importlib.util
import sys
from pathlib import Path

import pandas as pd
import pytest

from thinpipe.harness import experiment

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def grid(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    spec = importlib.util.spec_from_file_location("bench_grid", BENCH / "grid.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("common", None)


@pytest.fixture
def cells(grid):
    return grid.in_full(experiment.load("bandwidth_vs_bits", grid.SETTINGS))


def tables_of(cells, *, same=True):
    """Two cells checked, composed at 8 and 20 s, measured at 10 s and 20 s; two curves composed of 45."""
    first, second = (cell.runs[0][1].run_id for cell in cells)
    checked = [
        {"run_id": first, "timing_run_id": "a+b", "composed_s": 8.0, "measured_s": 10.0, "total_error": 0.2},
        {"run_id": second, "timing_run_id": "c", "composed_s": 20.0, "measured_s": 20.0, "total_error": 0.0},
        # The same run held against another network has no time of its own.
        {"run_id": second, "timing_run_id": "d", "composed_s": 5.0, "measured_s": None, "total_error": None},
    ]
    shared = {"part": experiment.COMPOSITION_CHECK, "same_losses": same}
    checked = [{**row, "fidelity": "link-off" if row["run_id"] == first else "ok"} for row in checked]
    curves = [{"part": "convergence", "composed_s": 8.0}, {"part": "convergence", "composed_s": 20.0}]
    composition = pd.DataFrame([*({**row, **shared} for row in checked), *curves])
    runs = pd.DataFrame(
        [
            {"run_id": "a", "compute_s": 0.30, "wait_s": 0.1, "step_time_s": 1.0},
            {"run_id": "b", "compute_s": 0.50, "wait_s": 0.3, "step_time_s": 1.0},
            {"run_id": "c", "compute_s": 0.40, "wait_s": 0.5, "step_time_s": 1.0},
            {"run_id": first, "compute_s": 0.50, "wait_s": 0.1, "step_time_s": 1.0},
            {"run_id": second, "compute_s": 0.30, "wait_s": 0.5, "step_time_s": 1.0},
        ]
    )
    return composition, runs


def test_the_whole_grid_is_45_full_runs_each_of_its_own(cells):
    assert len({cell.runs[0][1].run_id for cell in cells}) == len(cells) == 45
    assert {cell.runs[0][1].measure for cell in cells} == {"full"}


def test_the_numbers(grid, cells):
    picked = [cells[0], cells[44]]
    found = grid.result(*tables_of(picked), picked, taken=[13.0, 25.0], composed_s=10.0)
    # Each run costs 4 s around its training; trainings are 30 / 28 of what was composed for them.
    assert found["in_full_s"] == pytest.approx(2 * 4.0 + 30.0)
    assert found["speedup"] == pytest.approx(3.8)
    assert found["max_difference"] == 0.2
    assert list(found["differences"].values()) == [0.2, 0.0]
    assert list(found["flagged"].values()) == ["link-off"]
    fair = found["at_equal_speed"]
    assert list(fair["speed"].values()) == pytest.approx([1.25, 0.75])
    # 8 s, four fifths of them work, a quarter slower: 9.6 s of 10. 20 s, half of them work, a quarter faster: 17.5 s.
    assert list(fair["differences"].values()) == pytest.approx([0.04, 0.125])
    assert fair["max_difference"] == pytest.approx(0.125)


def test_other_losses_end_it(grid, cells):
    picked = [cells[0], cells[44]]
    with pytest.raises(SystemExit, match="other losses"):
        grid.result(*tables_of(picked, same=False), picked, taken=[13.0, 25.0], composed_s=10.0)
