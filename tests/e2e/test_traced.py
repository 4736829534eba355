"""`trace = true`: a trace beside the run, or a failed run."""

import json

import pytest

from runs import small
from thinpipe.harness import trace

pytestmark = [pytest.mark.lab, pytest.mark.e2e]


def test_a_run_leaves_a_trace_that_holds_together(trained):
    spec = small(train={"max_steps": 3, "evaluate_every": 0}, trace=True)
    assert trained.run(spec)["state"] == "done"
    found = json.loads((trained.store.run_dir(spec.run_id) / "trace.json").read_text(encoding="utf-8"))
    assert trace.faults(found) == []
    arrows = [event for event in found["traceEvents"] if event["ph"] == "s"]
    assert len(arrows) == 3 * 2 * 4, "steps x directions x micro-batches"


def test_a_failure_while_tracing_is_a_failure_of_the_run(trained, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace, "write", refuse)
    spec = small(train={"max_steps": 2, "evaluate_every": 0}, trace=True)
    status = trained.run(spec)
    assert status["state"] == "failed"
    assert "its trace could not be written" in status["error"]
    assert "No space left" in status["error"]
