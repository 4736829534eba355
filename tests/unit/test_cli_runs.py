"""The command line on one run that has ended, and on what can be fetched or made once."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import synthetic
from typer.testing import CliRunner

from thinpipe import cli
from thinpipe.harness import store


@pytest.fixture(autouse=True)
def own_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def thinpipe(*args):
    result = CliRunner().invoke(cli.app, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return SimpleNamespace(code=result.exit_code, out=result.stdout, err=result.stderr)


@pytest.fixture
def one_run():
    """The id of a run of two ranks, with spans, below results/."""
    key = ("timing", "AQ-SGD fw4 bw8", 100, 0)
    spec = synthetic.spec_of(*key)
    synthetic.write_run(store.Store(Path("results")), spec, key)
    return spec.run_id


def test_trace_of_a_run(one_run):
    folder = Path("results/runs") / one_run
    data = json.loads(thinpipe("trace", one_run[:6], "--json").out)
    assert (data["run_id"], data["files"]) == (one_run, [str(folder / "trace.json")])
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert len(events) == data["events"]
    assert {event["pid"] for event in events} == {0, 1}
    assert thinpipe("trace", one_run).out == f"{folder / 'trace.json'}\n"
    assert thinpipe("trace", "zzzz").code == 2


def test_a_figure_of_a_run_is_drawn_into_its_folder(one_run, monkeypatch):
    monkeypatch.setattr("thinpipe.plots.style.FORMATS", ("png",))
    drawn = thinpipe("plot", "trace", one_run[:6])
    assert drawn.code == 0, drawn.err
    assert drawn.out == f"results/runs/{one_run}/figures/trace.png\n"
    mixed = thinpipe("plot", "trace", "loss_vs_step", one_run)
    assert mixed.code == 2
    assert "loss_vs_step: drawn of an experiment, trace of a run" in mixed.err


def test_a_run_that_has_not_ended_has_no_trace(one_run):
    (Path("results/runs") / one_run / "status.json").unlink()
    for shown in (thinpipe("trace", one_run), thinpipe("plot", "trace", one_run)):
        assert shown.code == 2
        assert "has not ended" in shown.err


@pytest.mark.parametrize("verb", ["fetch-data", "pretrain"])
def test_without_a_name_what_there_is_is_listed(verb, monkeypatch, tmp_path):
    monkeypatch.setenv("THINPIPE_CACHE", str(tmp_path / "cache"))
    data = json.loads(thinpipe(verb, "--json").out)
    assert data
    shown = thinpipe(verb)
    assert shown.code == 0
    for item in data:
        assert item.get("name", item.get("recipe")) in shown.out
    wrong = thinpipe(verb, "no-such-thing")
    assert wrong.code == 2
    assert "no-such-thing" in wrong.err
    assert not (tmp_path / "cache").exists(), "listing makes nothing"
