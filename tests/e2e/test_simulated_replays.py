"""Replays between namespaces, and what the simulator says of them.

The machine may be busy: of time a bound is asserted on one side, of bytes equality.
"""

import pandas as pd
import pytest

from thinpipe.harness import experiment
from thinpipe.harness.errors import UserError
from thinpipe.harness.runner import Session
from thinpipe.harness.simulation import cells, report
from thinpipe.harness.simulation.costs import Codecs
from thinpipe.harness.store import Store

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def grid():
    """Two cells and what constants are fitted to, of the grid: a run each."""
    data = experiment.load("replay_grid", ["seeds=[0]", "timing.passes=2"])
    parts = []
    for name, arms in (("constants", ("FP32",)), ("deep-1f1b", ("FP32", "AQ-SGD fw4 bw4"))):
        part = next(part for part in data.parts if part.name == name)
        cells = [cell for cell in part.cells if cell.arm in arms and cell.settings["network.rate_mbit"] in (30, 50)]
        parts.append(experiment.ExperimentPart(name, tuple(cells)))
    return experiment.Experiment("grid", "", "", tuple(parts))


@pytest.fixture(scope="module")
def store(grid, tmp_path_factory):
    made = Store(tmp_path_factory.mktemp("simulated"))
    made.save_runs(grid)
    with Session(calibrated=False) as session:
        for cell in grid.cells():
            ((_, spec),) = cell.runs
            session.check([spec])
            status = session.run(spec, made.begin(spec))
            assert status["state"] == "done"
            assert status["fidelity"]["flags"], "links that are not calibrated are flagged"
            made.finish(spec.run_id, status)
    return made


def unflagged(store, grid):
    """Take the flags away, as if this machine had been idle and its links calibrated."""
    for cell in grid.cells():
        run_id = cell.runs[0][1].run_id
        store.finish(run_id, {**store.status(run_id), "fidelity": {"flags": [], "reasons": []}})


def test_bytes_are_predicted_to_the_byte(store, grid):
    for cell in grid.cells():
        ((_, spec),) = cell.runs
        rows = pd.concat([pd.read_parquet(p) for p in store.run_dir(spec.run_id).glob("transfers.rank*.parquet")])
        last = rows[rows["step"] == rows["step"].max()]
        for direction in ("forward", "backward"):
            for boundary, message in enumerate(cells.messages(spec, direction, Codecs())):
                sent = last[(last["direction"] == direction) & (last["boundary"] == boundary)].iloc[0]
                frame = sent["frame_bytes"] / sent["messages"]
                segments = -(-(frame + 96) // 1448)
                assert message.wire_bytes == frame + 96 + 66 * segments


def test_flagged_replays_are_left_out_and_others_are_held_against(store, grid):
    found = report.against(grid, store, report.setting())
    assert found["against"] | {"holds": False} == found["against"]
    assert (found["against"]["cells"], found["against"]["flagged"], found["against"]["fitted"]) == (0, 2, 1)
    assert not any("predicted_vs_measured" in name for name in found["files"])
    unflagged(store, grid)
    found = report.against(grid, store, report.setting())
    assert found["constants_from"].startswith("fitted to 1 replays")
    assert found["against"]["cells"] == 2
    for row, cell in zip(found["cells"], grid.cells(), strict=True):
        usual = cells.row(cell, report.setting(), Codecs())["predicted_step_time_s"]
        # A busy machine makes a step, and the constants fitted to it, longer than they are; never much shorter.
        assert usual < 1.15 * row["measured_step_time_s"], row
        assert row["predicted_step_time_s"] > 0.9 * usual, row
        assert row["error"] == pytest.approx(row["predicted_step_time_s"] / row["measured_step_time_s"] - 1)
    table = pd.read_parquet(store.experiment_dir("grid") / "tables" / "predictions.parquet")
    assert list(table["fitted"]) == [True, False, False]
    assert any(name.endswith("predicted_vs_measured.svg") for name in found["files"])
    report.render(found)


def test_options_that_no_run_was_made_with_are_refused(store, grid):
    with pytest.raises(UserError, match="leave out --profile"):
        report.against(grid, store, report.setting(stages=8))
    with pytest.raises(UserError, match="--wan NAME"):
        report.setting(best_order=True)
