"""bench/grid.py: what it makes of the tables of both ways, by hand."""

import contextlib
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
    # Its dataclasses look their module up.
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("common", None)


@pytest.fixture
def cells(grid):
    return grid.in_full(experiment.load("bandwidth_vs_bits", grid.SETTINGS))


def test_the_whole_grid_is_45_full_runs_each_of_its_own(cells):
    assert len({cell.runs[0][1].run_id for cell in cells}) == len(cells) == 45
    assert {cell.runs[0][1].measure for cell in cells} == {"full"}


def test_a_full_run_is_composed_of_its_training_and_two_timings_at_its_network(grid, cells):
    loaded = experiment.load("bandwidth_vs_bits", grid.SETTINGS)
    cell = next(cell for cell in cells if cell.arm == "AQ-SGD fw3 bw8" and cell.runs[0][1].network.rate_mbit == 50)
    own = grid.narrowed(loaded, cell)
    by_part = {part.name: [(c.arm, c.runs[0][1].network.rate_mbit) for c in part.cells] for part in own.parts}
    assert by_part == {
        "timing": [("FP32", 50), ("AQ-SGD fw3 bw8", 50)],
        "convergence": [("AQ-SGD fw3 bw8", 300)],
        experiment.COMPOSITION_CHECK: [("AQ-SGD fw3 bw8", 50)],
    }
    assert [spec.measure for spec in grid.specs_of(own, "timing", experiment.COMPOSITION_CHECK)] == ["timing"] * 2 + [
        "full"
    ]


def test_the_numbers(grid):
    pairs = {
        "A, 10 Mbit/s": [
            grid.Pair(8.0, 10.0, 13.0, "ok"),
            grid.Pair(9.8, 10.0, 15.0, "link-off"),
            grid.Pair(12.0, 12.0, 16.0, "ok"),
        ],
        "B, 20 Mbit/s": [grid.Pair(21.0, 20.0, 24.0, "ok")] * 3,
    }
    found = grid.result({"A, 10 Mbit/s": 8.0, "B, 20 Mbit/s": 20.0, "C, 10 Mbit/s": 28.0}, pairs, composed_s=10.0)
    # The flagged round of A is left out. A run costs 19 / 5 s around its training (3, 4; 4 each); trainings are
    # 31 / 28 of what was composed.
    assert found["in_full_s"] == pytest.approx(3 * 19 / 5 + 31 / 28 * 56.0)
    assert found["speedup"] == pytest.approx(7.34)
    assert found["differences"] == pytest.approx({"A, 10 Mbit/s": 1 / 11, "B, 20 Mbit/s": 0.05})
    assert found["max_difference"] == pytest.approx(1 / 11)
    assert found["of_the_sweep"]["differences"] == pytest.approx({"A, 10 Mbit/s": 3 / 11, "B, 20 Mbit/s": 0.0})
    assert found["of_the_sweep"]["max_difference"] == pytest.approx(3 / 11)
    assert found["spread"] == pytest.approx({"A, 10 Mbit/s": 2 / 11, "B, 20 Mbit/s": 0.0})
    assert found["ratios"]["B, 20 Mbit/s"] == pytest.approx([1.05, 1.05, 1.05])
    value, low, high = found["ratio_of_all"]
    assert value == pytest.approx((0.8 * 1.05**3) ** (1 / 5))
    assert low < value < high
    assert found["flagged"] == {"A, 10 Mbit/s": {"ok": 2, "link-off": 1}}
    assert (found["cells"], found["sampled"], found["rounds"]) == (3, 2, 3)


def test_a_cell_with_flagged_rounds_alone_keeps_and_names_them(grid):
    found = grid.result({"A": 8.0}, {"A": [grid.Pair(8.0, 10.0, 13.0, "link-off")]}, composed_s=10.0)
    assert found["differences"] == pytest.approx({"A": 0.2})
    assert found["flagged"] == {"A": {"link-off": 1}}
    assert found["ratios"] == {"A": [pytest.approx(0.8), None, None]}


def test_cells_of_the_sweep_are_named_as_the_sampled_ones_are(grid, cells):
    rate = cells[0].runs[0][1].network.rate_mbit
    mine = {"part": "convergence", "arm": cells[0].arm, "rate_mbit": rate, "composed_s": 8}
    composition = pd.DataFrame([mine, {**mine, "part": "check", "arm": "other", "composed_s": 1}])
    assert grid.swept(composition) == {grid.name_of(cells[0]): 8.0}


@pytest.fixture
def stubbed(grid, cells, tmp_path, monkeypatch):
    """pair() of the grid's first cell without a machine: (what it ran, a call of it)."""
    ran = []
    row = {"part": experiment.COMPOSITION_CHECK, "composed_s": 1.0, "measured_s": 2.0, "fidelity": "ok"}
    monkeypatch.setattr(grid, "Session", lambda *, fresh: contextlib.nullcontext(fresh))
    monkeypatch.setattr(grid, "run_all", lambda fresh, _, specs: ran.append((fresh, {s.measure for s in specs})))
    loaded = experiment.load("bandwidth_vs_bits", grid.SETTINGS)
    trained = grid.Store(tmp_path / "sweep")
    for spec in grid.specs_of(loaded, "convergence"):
        trained.begin(spec)

    def call(*, timed_first=True, same=True):
        built = {"composition": pd.DataFrame([{**row, "same_losses": same}])}
        monkeypatch.setattr(grid.tables, "build", lambda *_: built)
        return grid.pair(loaded, cells[0], trained, tmp_path / "pair", timed_first=timed_first)

    return ran, call


@pytest.mark.parametrize("timed_first", [True, False])
def test_a_run_in_full_is_of_a_fresh_process_and_beside_its_timing(stubbed, timed_first):
    ran, call = stubbed
    found = call(timed_first=timed_first)
    order = [(False, {"timing"}), (True, {"full"})]
    assert ran == (order if timed_first else order[::-1])
    assert (found.composed_s, found.measured_s, found.fidelity) == (1.0, 2.0, "ok")


def test_other_losses_end_it(stubbed):
    _, call = stubbed
    with pytest.raises(SystemExit, match="other losses"):
        call(same=False)


def test_no_repeats_are_refused(grid, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["grid.py", "--repeats", "0"])
    with pytest.raises(SystemExit, match="2"):
        grid.main()
    assert "--repeats takes a number from 1 on, got 0" in capsys.readouterr().err
