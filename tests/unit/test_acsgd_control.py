"""What one rank of `thinpipe train` says and writes: lines, averages, and the status however a run ends."""

import json
import time

import pytest

from thinpipe.harness import acsgd
from thinpipe.harness.acsgd import launch
from thinpipe.harness.acsgd.control import Control, average_line, scores, step_line
from thinpipe.harness.errors import RunError, UserError
from thinpipe.harness.spec import RunSpec
from thinpipe.harness.store import Store

ROW = {
    "table": "steps", "rank": 0, "step": 4, "step_time_s": 0.5, "compute_s": 0.25, "codec_s": 0.0625,
    "blocked_s": 0.125, "train_loss": 2.5, "lr": 0.1,
}  # fmt: skip
EVAL = {"table": "evals", "epoch": 2, "step": 5, "eval_loss": 0.5, "perplexity": None, "accuracy": 0.75}
EVAL |= {"matthews": 0.5, "f1": None}


@pytest.fixture
def control(tmp_path):
    """Rank 0 of a run of one rank; `said` holds its lines."""
    spec = RunSpec.model_validate({"pipeline": {"stages": 1}})
    store, said = Store(tmp_path), []
    folder = launch.begin(store, spec, 0)
    (folder / "rank0.jsonl").write_text("")
    made = Control(
        spec=spec, store=store, rank=0, limit_s=1.0, say=said.append, started=lambda: None, artifacts=lambda: None,
        finally_=lambda: None,
    )  # fmt: skip
    made.said = said
    return made


def ready(control, resumed_from=0):
    from thinpipe.harness import audit

    asked = audit.requested(control.spec)
    effective = {**asked, "spec": control.spec.canonical(), "steps": 6, "data": {}, "resumed_from": resumed_from}
    control.send({"type": "ready", "effective": effective})


def write(control, *rows):
    with control.tail.path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def status(control):
    return control.store.status(control.spec.run_id)


def test_lines():
    assert step_line(ROW, 9) == "rank 0 step 5/9: 0.500 s (computing 0.250, coding 0.062, waiting 0.125)"
    assert scores(EVAL) == {"epoch": 2, "loss": 0.5, "accuracy": 0.75, "matthews": 0.5}


@pytest.mark.parametrize(
    ("times", "line"),
    [
        ([9.0, 1.0, 3.0], "average step time: 2.0000 s over 2 steps, the first left out"),
        ([9.0], "average step time: 9.0000 s over 1 steps"),
        ([], "no step was run"),
    ],
)
def test_the_average_is_over_the_steps_that_were_run(times, line):
    assert average_line(times) == line


def test_each_row_is_shown_once(control):
    ready(control)
    write(control, ROW)
    control.send({"type": "progress", "step": 5, "steps": 9})
    write(control, EVAL)
    control.send({"type": "progress", "step": 6, "steps": 9})
    assert control.said[1:] == [step_line(ROW, 9), "{'loss': 2.5, 'lr': 0.1, 'step': 5}", str(scores(EVAL))]


def test_a_run_that_goes_on_shows_only_what_is_new(control):
    ready(control, resumed_from=5)
    write(control, ROW, EVAL, {**ROW, "step": 5})
    control.send({"type": "progress", "step": 6, "steps": 9})
    assert control.said[1] == "goes on from the checkpoint after step 5"
    assert control.said[2] == step_line({**ROW, "step": 5}, 9)
    assert control.step_times == [0.5]


def test_a_setting_that_reads_back_otherwise_is_refused(control):
    from thinpipe.harness import audit

    asked = audit.requested(control.spec) | {"seed": 99}
    effective = {**asked, "spec": control.spec.canonical(), "steps": 6, "data": {}, "resumed_from": 0}
    with pytest.raises(RunError, match="seed was to be 0, but is 99"):
        control.send({"type": "ready", "effective": effective})


def test_an_end_well_writes_the_status_last(control):
    order = []
    control.artifacts = lambda: order.append(("artifacts", status(control)))
    control.finally_ = lambda: order.append(("finally", status(control)))
    ready(control)
    control.send({"type": "closed"})
    assert order == [("artifacts", None), ("finally", None)]
    assert (status(control)["state"], status(control)["error"]) == ("done", None)
    assert control.store.manifest(control.spec.run_id)["requested"]["seed"] == 0


def test_a_failure_while_tracing_fails_the_run(control):
    def fail():
        raise OSError("no space")

    control.artifacts = fail
    ready(control)
    with pytest.raises(RunError, match="rank 0: its trace failed: OSError: no space"):
        control.send({"type": "closed"})
    assert status(control) is None


def test_an_error_at_any_point_ends_in_a_status(control):
    error = {"type": "error", "state": "diverged", "error": "NaN", "detail": "where", "cause": True}
    control.send(error)
    told = status(control)
    assert (told["state"], told["error"], told["detail"]) == ("diverged", "NaN", "where")
    assert control.failure == error


def test_the_cause_is_not_waited_for_where_nobody_can_tell_it(control):
    start = time.monotonic()
    control.send({"type": "error", "state": "failed", "error": "peer gone", "detail": "", "cause": False})
    assert time.monotonic() - start < 1.0
    assert status(control)["error"] == "peer gone"


def test_main_returns_two_and_explains(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "ENVIRONMENT", {})
    assert acsgd.main(["--forward-bit", "3"]) == 2
    assert capsys.readouterr().err == (
        "thinpipe: unknown argument --forward-bit. Did you mean --forward-bits? `thinpipe train --help` lists them.\n"
    )
    assert acsgd.main(["--world-size", "3"]) == 2
    assert "--world-size 3 is not" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_main_names_the_argument_of_a_setting(capsys, monkeypatch):
    def run(args):
        raise UserError("lower task.num_sequences")

    monkeypatch.setattr(launch, "run", run)
    assert acsgd.main([]) == 2
    assert capsys.readouterr().err.endswith("Here task.num_sequences is --num-sequences.\n")


def test_main_says_it_was_interrupted(capsys, monkeypatch):
    def run(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "run", run)
    assert acsgd.main([]) == 130
    assert "interrupted" in capsys.readouterr().err
