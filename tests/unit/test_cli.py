"""The command line: exit codes, output on the right stream, and what each verb shows."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_session import STEPS, FakeSession
from typer.testing import CliRunner

from thinpipe import cli
from thinpipe.harness import (
    doctor,
    experiment,
    figures,
    lock,
    metrics,
    render,
    store,
    tables,
    verbs,
    views,
)
from thinpipe.harness.errors import UserError
from thinpipe.harness.reproduce import PAPERS
from thinpipe.netem import probe

# What experiments/smoke.toml declares.
FIGURES = ["loss_vs_step", "throughput_vs_bandwidth", "step_breakdown", "boundary_error"]


@pytest.fixture(autouse=True)
def own_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lock, "PATH", tmp_path / "lock")


@pytest.fixture
def quick_figures(monkeypatch):
    """Drawing takes seconds; what is drawn is not this file's business."""

    def draw(built, folder, names=(), *, optional=False):
        assert set(built) == set(tables.TABLES)
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / f"{name}.png" for name in names or ("loss_vs_step", "throughput_vs_bandwidth")]
        for path in files:
            path.write_bytes(b"png")
        return files, {"boundary_error": "boundary_error: nothing to draw"}

    monkeypatch.setattr(figures, "draw", draw)


@pytest.fixture
def session(monkeypatch, quick_figures):
    fake = FakeSession()
    monkeypatch.setattr(verbs, "session", lambda **_: fake)
    return fake


@pytest.fixture
def no_session(monkeypatch):
    monkeypatch.setattr(verbs, "session", lambda **_: pytest.fail("a session was opened"))


def thinpipe(*args):
    result = CliRunner().invoke(cli.app, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return SimpleNamespace(code=result.exit_code, out=result.stdout, err=result.stderr)


def test_help_is_fast_and_imports_nothing_heavy(tmp_path):
    code = (
        "import sys, time; sys.argv = ['thinpipe', '--help']\n"
        "start = time.process_time()\n"
        "from thinpipe.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'pandas', 'matplotlib', 'pyarrow', 'pydantic', 'rich'} & set(sys.modules)\n"
        "print(time.process_time() - start, sorted(heavy), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    seconds, heavy = done.stderr.split(maxsplit=1)
    assert heavy.strip() == "[]"
    assert float(seconds) < 0.5


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["plan", "quickstrat"], "Did you mean 'quickstart'?"),
        (["plan", "smoke", "--set", "train.epoch=1"], "Did you mean 'train.epochs'?"),
        (["plan", "smoke", "--only", "amr=FP32"], "Did you mean 'arm'?"),
        (["plan", "smoke", "--only", "arm=FP64"], "Arms: AQ-SGD fw4 bw8, FP32"),
        (["plan", "missing.toml"], "no experiment file missing.toml"),
        (["run", "smoke", "--limit", "0"], "--limit"),
        (["run", "smoke", "--set", "pipeline.microbatches=3"], "multiple of 3"),
        (["run", "smoke", "--set", "model.preset=giant"], "giant"),
        (["show", "abc"], "no runs"),
        (["status", "smoke"], "no results"),
        (["tables", "smoke"], "`thinpipe run` it first"),
        (["plot", "smoke"], "`thinpipe run` it first"),
        (["list", "codec"], "Did you mean 'codecs'?"),
        (["net", "script", "10.0.0.1", "10.0.0.2", "--host", "2"], "host 2"),
        (["net", "script", "10.0.0.1", "10.0.0.2", "--rate-mbit", "-3"], "rate_mbit"),
    ],
)
def test_a_mistake_is_one_message_on_stderr_and_exit_code_2(args, words, no_session, tmp_path):
    result = thinpipe(*args)
    assert result.code == 2
    assert result.out == ""
    assert words in result.err
    assert result.err.startswith("thinpipe: ")
    assert "Traceback" not in result.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("args", [["run"], ["run", "smoke", "--nope"], ["nope"]])
def test_usage_errors_have_exit_code_2(args):
    assert thinpipe(*args).code == 2


def test_plan(session):
    shown = thinpipe("plan", "smoke")
    assert shown.code == 0
    assert shown.out.count("pending") == 5
    assert "4 to do" in shown.out
    data = json.loads(thinpipe("plan", "smoke", "--only", "part=timing", "--json").out)
    assert data["counts"] == {"pending": 2}
    assert {run["arm"] for run in data["runs"]} == {"FP32", "AQ-SGD fw4 bw8"}
    assert data["todo_s"] == pytest.approx(sum(run["predicted_s"] for run in data["runs"]), abs=0.2)
    assert session.ran == []


def test_dry_run_executes_nothing(no_session, tmp_path):
    shown = thinpipe("run", "smoke", "--dry-run", "--json", "--limit", "1")
    assert shown.code == 0
    assert [run["todo"] for run in json.loads(shown.out)["runs"]].count(True) == 1
    assert list(tmp_path.iterdir()) == []


def test_run_prints_a_table_names_the_figures_and_then_does_nothing(session, tmp_path):
    first = thinpipe("run", "smoke", "--results", "out")
    assert first.code == 0, first.err
    assert len(session.ran) == 4
    line = next(line for line in first.out.splitlines() if line.startswith("convergence") and "FP32" in line)
    assert line.split() == ["convergence", "FP32", "100", "2.00", "3.000", "3.500", "1/1"]
    timing = [line.split() for line in first.out.splitlines() if line.startswith("timing") and "FP32" in line]
    assert timing == [["timing", "FP32", "100", "100.0", "80.0", "2.00", "1/1"]]
    assert "half their range" not in first.out
    drawn = [line.removeprefix("figure: ") for line in first.err.splitlines() if line.startswith("figure: ")]
    assert [Path(name).stem for name in drawn] == FIGURES
    assert all(Path(name).exists() for name in drawn)
    assert "no figure boundary_error: " in first.err
    assert (tmp_path / "out" / "smoke" / "tables" / "runs.csv").exists()
    second = thinpipe("run", "smoke", "--results", "out")
    assert second.code == 0
    assert len(session.ran) == 4
    assert "nothing to do" in second.err
    assert second.out == first.out
    assert "figure" not in second.err


def test_figures_cut_short_are_drawn_by_the_next_run(session, monkeypatch):
    whole = figures.draw

    def interrupted(*args, **_):
        whole(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(figures, "draw", interrupted)
    assert thinpipe("run", "smoke").code == 130
    monkeypatch.setattr(figures, "draw", whole)
    assert "figure: " in thinpipe("run", "smoke").err
    assert "figure: " not in thinpipe("run", "smoke").err
    assert len(session.ran) == 4


def test_run_json_is_one_document_and_nothing_else(session):
    shown = thinpipe("run", "smoke", "--json")
    rows = json.loads(shown.out)
    assert [row["state"] for row in rows] == ["done"] * 4
    declared = [(part, arm) for part in ("convergence", "timing") for arm in ("FP32", "AQ-SGD fw4 bw8")]
    assert [(row["part"], row["arm"]) for row in rows] == declared
    row = next(row for row in rows if row["part"] == "convergence")
    assert row["final_train_loss"] == 3.0
    assert row["step_time_s"] == 0.1
    assert row["seed"] == 0
    assert row["fidelity"] == "ok"
    timing = next(row for row in rows if row["part"] == "timing")
    assert timing["final_train_loss"] is None


def test_a_failed_run_has_exit_code_1_and_is_retried_when_asked(session):
    session.fail = ("delta(fixpoint:4)",)
    shown = thinpipe("run", "smoke", "--json")
    assert shown.code == 1
    rows = json.loads(shown.out)
    assert sorted(row["state"] for row in rows) == ["done", "done", "failed", "failed"]
    assert {row["error"] for row in rows if row["state"] == "failed"} == {"rank 1 was killed by signal 9"}
    assert shown.err.count("rank 1 was killed by signal 9") == 4
    assert "--retry-failed" in shown.err
    assert thinpipe("run", "smoke").code == 1
    assert len(session.ran) == 4
    session.fail = ()
    assert thinpipe("run", "smoke", "--retry-failed").code == 0
    assert len(session.ran) == 6


def test_fail_fast_stops(session):
    session.fail = ("none", "delta(fixpoint:4)")
    assert thinpipe("run", "smoke", "--fail-fast").code == 1
    assert len(session.ran) == 1


def test_a_stored_run_is_run_again(session, tmp_path):
    thinpipe("run", "smoke", "--only", "part=timing,arm=FP32")
    (run_id,) = session.ran
    path = f"results/runs/{run_id}/run.json"
    assert "nothing to do" in thinpipe("run", path).err
    assert thinpipe("run", path, "--force").code == 0
    assert session.ran == [run_id] * 2
    assert thinpipe("run", path, "--results", "elsewhere").code == 0
    assert (tmp_path / "elsewhere" / "runs" / run_id / "status.json").exists()


def test_runs_of_other_settings_in_the_same_folder_are_pointed_out(session):
    thinpipe("run", "smoke")
    shown = thinpipe("run", "smoke", "--set", "train.epochs=3", "--limit", "1", "--json")
    assert "also lists 4 run(s)" in shown.err
    assert "--set name=" in shown.err
    assert len(json.loads(shown.out)) == 4


def test_a_full_disk_has_exit_code_2_and_resumes(session, monkeypatch):
    def full():
        if len(session.ran) == 2:
            raise OSError(28, "No space left on device")

    session.before = full
    shown = thinpipe("run", "smoke")
    assert shown.code == 2
    assert "disk is full" in shown.err
    assert "results/runs/" in shown.err
    assert "Traceback" not in shown.err
    session.before = lambda: None
    assert thinpipe("run", "smoke").code == 0
    assert len(session.ran) == 4


def test_interrupt_has_exit_code_130(session):
    def interrupt():
        if len(session.ran) == 1:
            raise KeyboardInterrupt

    session.before = interrupt
    shown = thinpipe("run", "smoke", "--json")
    assert shown.code == 130
    assert "3 run(s) are left" in shown.err
    assert sorted(row["state"] for row in json.loads(shown.out)) == ["done", "pending", "pending", "pending"]


def cells_of(*args, code=0):
    """What the summary of `run` shows, as rows of words by column."""
    shown = thinpipe("run", "smoke", *args)
    assert shown.code == code, shown.err
    header, *lines = shown.out.split("\n\n")[0].splitlines()
    return header, [line for line in lines if line.startswith(("timing", "convergence"))]


def test_cells_of_one_arm_are_not_pooled_and_say_what_differs(session, tmp_path):
    text = experiment.builtin()["smoke"].replace(
        'base.measure = "timing"', 'base.measure = "timing"\naxes.train.batch_size = [4, 8]'
    )
    (tmp_path / "mine.toml").write_text(text)
    shown = thinpipe("run", "mine.toml", "--only", "part=timing")
    assert shown.code == 0, shown.err
    assert "setting" in shown.out.splitlines()[0]
    lines = [line for line in shown.out.splitlines() if line.startswith("timing") and "FP32" in line]
    # Samples a second: of each size its own.
    assert [line.split()[2:6] for line in lines] == [
        ["train.batch_size=4", "100", "100.0", "40.0"],
        ["train.batch_size=8", "100", "100.0", "80.0"],
    ]
    assert all(line.rstrip().endswith("1/1") for line in lines)


def test_seeds_of_a_cell_are_pooled_and_rates_are_not_a_setting(session):
    options = ("--set", "seeds=[0,2]", "--set", "network.rate_mbit=30", "--only", "part=convergence,arm=FP32")
    header, lines = cells_of(*options)
    assert "setting" not in header
    assert [line.split() for line in lines] == [
        ["convergence", "FP32", "30", "2.00", "4.000", "±", "1.000", "3.500", "±", "0.000", "2/2"]
    ]


def test_after_an_interrupt_rates_are_the_plans_and_finished_runs_have_numbers(session, tmp_path):
    def interrupt():
        if session.ran:
            raise KeyboardInterrupt

    session.before = interrupt
    text = experiment.builtin()["smoke"].replace(
        'base.measure = "timing"', 'base.measure = "timing"\naxes.network.rate_mbit = [10, 30]'
    )
    (tmp_path / "mine.toml").write_text(text)
    shown = thinpipe("run", "mine.toml", "--only", "part=timing,arm=FP32")
    assert shown.code == 130
    lines = [line.split()[2:] for line in shown.out.splitlines() if line.startswith("timing")]
    assert [words[0] for words in lines] == ["10", "30"]
    assert sorted(words[1:] for words in lines) == [["0/1", "pending"], ["100.0", "80.0", "2.00", "1/1"]]


def test_after_an_interrupt_without_tables_the_counts_are_shown(session, monkeypatch):
    def refuse(*_):
        raise UserError("a shard is missing")

    def interrupt():
        if session.ran:
            raise KeyboardInterrupt

    session.before = interrupt
    monkeypatch.setattr(tables, "build", refuse)
    shown = thinpipe("run", "smoke", "--only", "part=timing")
    assert shown.code == 130
    assert "a shard is missing" in shown.err
    lines = [line.split()[-2:] for line in shown.out.splitlines() if line.startswith("timing")]
    assert sorted(lines) in ([["0/1", "pending"], ["100", "1/1"]],)


def test_a_ratio_below_one_is_not_rounded_to_it():
    assert [render._ratio(value) for value in (None, 0.996, 7.847)] == ["", "0.996", "7.85"]


def test_status(session):
    assert "no results" in thinpipe("status").out
    thinpipe("run", "smoke", "--limit", "3")
    data = json.loads(thinpipe("status", "--json").out)
    assert [(item["experiment"], item["total"], item["counts"]) for item in data] == [
        ("smoke", 4, {"done": 3, "pending": 1})
    ]
    assert data[0]["running"] is None
    shown = thinpipe("status", "smoke")
    assert "3 done, 1 pending" in shown.out
    assert thinpipe("status", "quickstart").code == 2


def test_status_while_a_sweep_runs(session):
    seen = []

    def look():
        if len(session.ran) == 1:
            seen.append(json.loads(thinpipe("status", "smoke", "--json").out)[0])
            seen.append(thinpipe("status").out)

    session.before = look
    thinpipe("run", "smoke")
    data, text = seen
    assert data["running"]["run_id"] == session.ran[1]
    assert data["running"]["pid"] == os.getpid()
    assert data["cut_short"] == []
    assert "running: " in text
    assert "process" in text


def test_status_of_a_sweep_that_was_killed(session):
    thinpipe("run", "smoke", "--limit", "2")
    spec = next(
        spec for cell in experiment.load("smoke").cells() for _, spec in cell.runs if spec.run_id not in session.ran
    )
    store.Store(Path("results")).begin(spec)
    (Path("results/runs") / session.ran[0] / "status.json").write_text('{"st')
    data = json.loads(thinpipe("status", "--json").out)[0]
    assert data["running"] is None
    assert {run["run_id"] for run in data["cut_short"]} == {spec.run_id, session.ran[0]}
    assert "damaged" in data["notes"][0]
    assert "cut short" in thinpipe("status").out


def test_show(session):
    thinpipe("run", "smoke")
    run_id = session.ran[0]
    data = json.loads(thinpipe("show", run_id[:5], "--json").out)
    assert data["run_id"] == run_id
    assert data["state"] == "done"
    assert data["requested"] == {"threads": 1}
    assert data["effective"]["rank1"] == {"threads": 1}
    assert data["logs"]["rank1.log"] == [f"line {i} of rank 1" for i in range(20, 30)]
    assert data["uses"][0]["experiment"] == "smoke"
    shown = thinpipe("show", run_id)
    for words in ("network.rate_mbit = 100.0", "in force", "line 29 of rank 0", "used by smoke"):
        assert words in shown.out
    assert "line 19 of rank 0" not in shown.out
    several = thinpipe("show", "")
    assert several.code == 2
    assert "4 runs" in several.err


def test_settings_are_paired_up_and_shown_once_where_ranks_agree(capsys):
    channels = {"0/forward/0": ["delta(fixpoint:4)", "fixpoint:4", "none"]}
    ranks = {
        "rank0": {"threads": 1, "compressors": channels, "parameters": 10, "data": {"tokens": 7}},
        "rank1": {"threads": 1, "compressors": channels, "parameters": 20, "data": {"tokens": 7}},
        "rank2": {"threads": 1, "compressors": {}, "parameters": 20, "data": {"tokens": 7}},
    }
    rows = views.settings({"threads": 1, "compressors": channels, "schedule": "gpipe"}, ranks)
    assert [(row["setting"], row["requested"], row["in_force"]) for row in rows] == [
        ("threads", 1, {"all": 1}),
        ("compressors.0/forward/0", channels["0/forward/0"], {"all": channels["0/forward/0"]}),
        ("schedule", "gpipe", {}),
        ("parameters", None, {"rank0": 10, "rank1": 20, "rank2": 20}),
        ("data.tokens", None, {"all": 7}),
    ]
    render._settings(rows)
    shown = capsys.readouterr().out.splitlines()
    line = next(line for line in shown if line.startswith("compressors.0/forward/0"))
    assert line.split()[1:] == ["delta(fixpoint:4),", "fixpoint:4,", "none"] * 2
    assert any("rank0: 10; rank1: 20; rank2: 20" in line for line in shown)


def test_show_of_a_run_that_did_not_end(session, tmp_path):
    spec = experiment.load("smoke").parts[0].cells[0].runs[0][1]
    store.Store(tmp_path / "results").begin(spec)
    shown = thinpipe("show", spec.run_id)
    assert shown.code == 0
    assert "not finished" in shown.out


def test_tables_and_plot(session):
    thinpipe("run", "smoke")
    data = json.loads(thinpipe("tables", "smoke", "--json").out)
    assert data["rows"]["runs"] == 4
    assert data["rows"]["steps"] == 4 * 2 * STEPS
    assert all(Path(name).exists() for name in data["files"])
    assert len(data["files"]) == 2 * len(tables.TABLES)
    drawn = json.loads(thinpipe("plot", "smoke", "--json").out)["files"]
    assert [Path(name).stem for name in drawn] == FIGURES
    assert thinpipe("plot", "loss_vs_time", "smoke").out == "results/smoke/figures/loss_vs_time.png\n"


def test_results_of_one_size_do_not_answer_for_another(session):
    thinpipe("run", "smoke", "--set", "name=mine")
    for verb in ("tables", "plot", "claims", "status"):
        refused = thinpipe(verb, "mine", "--size", "paper")
        assert refused.code == 2, verb
        assert "'mine' are of no size, not of size paper" in refused.err


def test_real_figures(session, monkeypatch, tmp_path):
    thinpipe("run", "smoke", "--only", "part=convergence")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    drawn = thinpipe("plot", "loss_vs_step", "smoke")
    assert drawn.code == 0, drawn.err
    assert {Path(name).suffix for name in drawn.out.split()} == {".png", ".pdf", ".svg"}
    assert all("loss_vs_step" in name and Path(name).stat().st_size > 1000 for name in drawn.out.split())
    wrong = thinpipe("plot", "loss_vs_stop", "smoke")
    assert wrong.code == 2
    assert "Did you mean 'loss_vs_step'?" in wrong.err
    impossible = thinpipe("plot", "throughput_vs_bandwidth", "smoke")
    assert impossible.code == 2
    assert "nothing to draw" in impossible.err


def test_scores_are_shown_where_there_are_any(session, capsys):
    rows = json.loads(thinpipe("run", "smoke", "--json").out)
    pair = [row for row in rows if row["part"] == "convergence"][:1] * 2
    assert [row["final_accuracy"] for row in pair] == [None, None], "a language model has none"
    scored = [row | {"final_accuracy": value} for row, value in zip(pair, (0.75, 0.85), strict=True)]
    for given, words in ((pair, []), (scored, ["accuracy", "0.800 ± 0.050"])):
        render.cells(views.cells(given))
        shown = capsys.readouterr().out
        assert all(word in shown for word in words)
        assert ("accuracy" in shown) == bool(words)
        assert "matthews" not in shown


def test_tables_that_cannot_be_built_hide_no_run(session):
    thinpipe("run", "smoke", "--limit", "1")
    (Path("results/runs") / session.ran[0] / "steps.rank0.parquet").unlink()
    shown = thinpipe("run", "smoke", "--json")
    assert shown.code == 2
    assert "steps.rank0.parquet" in shown.err
    assert [row["state"] for row in json.loads(shown.out)] == ["done"] * 4


def test_list():
    data = json.loads(thinpipe("list", "--json").out)
    assert set(data) == set(views.LIST_KINDS)
    root = Path(cli.__file__).parent / "experiments"
    there = {path.stem for path in root.glob("*.toml")}
    there |= {f"{path.parent.name}/{path.stem}" for paper in PAPERS for path in (root / paper).glob("*.toml")}
    assert {item["name"] for item in data["experiments"]} == there > {"smoke", "quickstart", "bandwidth_vs_bits"}
    assert {"none", "fixpoint", "bf16"} <= {item["name"] for item in data["codecs"]}
    assert all(item["summary"] for item in data["codecs"] + data["models"] + data["figures"])
    shown = thinpipe("list", "memories").out
    assert "delta" in shown
    assert "fixpoint" not in shown.split("delta")[0]


def test_net_script_is_for_the_host_asked():
    shown = thinpipe("net", "script", "10.0.0.1", "10.0.0.2", "--rate-mbit", "30", "--host", "1", "--interface", "ens3")
    assert shown.code == 0
    assert shown.out.startswith("#!/bin/sh\n")
    assert "10.0.0.1/32" in shown.out
    assert "ens3" in shown.out
    assert "30000000bit" in shown.out


def test_doctor_says_what_to_do_and_whether_it_is_required(monkeypatch):
    findings = [probe.Check("tc", True, "found", "")]
    monkeypatch.setattr(doctor.probe, "checks", lambda: findings)
    monkeypatch.setattr(doctor.checks, "__defaults__", (lambda: findings,))
    good = thinpipe("doctor", "--json")
    names = {check["name"] for check in json.loads(good.out)}
    assert good.code == 0
    assert {"tc", "python", "torch", "cores", "load", "memory", "disk", "timing lock"} <= names
    findings.append(probe.Check("bbr", False, "none", "load its module", required=False))
    optional = thinpipe("doctor")
    assert optional.code == 0
    assert "load its module" in optional.out
    findings.append(probe.Check("ip", False, "not found", "install iproute2"))
    bad = thinpipe("doctor")
    assert bad.code == 1
    assert "FAIL" in bad.out
    assert "install iproute2" in bad.out


def test_doctor_names_the_holder_of_the_timing_lock(tmp_path):
    with lock.hold("other", tmp_path, pytest.fail):
        found = {check["name"]: check for check in doctor.checks(tmp_path, list)}["timing lock"]
    assert not found["ok"]
    assert not found["required"]
    assert str(os.getpid()) in found["found"]


DRIVER = """
import sys, time
from pathlib import Path
sys.path[:0] = [sys.argv[1], str(Path(sys.argv[1]).parent)]
import test_cli as t
t.lock.PATH = Path("lock")
def wait():
    print("running", file=sys.stderr, flush=True)
    time.sleep(30)
t.verbs.session = lambda **_: t.FakeSession(before=wait)
sys.argv = ["thinpipe", *sys.argv[2:]]
t.cli.main()
"""


def drive(*args, **streams):
    return subprocess.Popen([sys.executable, "-c", DRIVER, str(Path(__file__).parent), *args], text=True, **streams)


def test_ctrl_c_of_a_real_process():
    process = drive("run", "smoke", "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while process.stderr.readline() != "running\n":
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert {row["state"] for row in json.loads(out)} == {"pending"}
    assert "run the same command again" in err
    assert "Traceback" not in err


def test_the_bar_of_a_terminal_ends_cleanly():
    """On a terminal: a bar while it runs, gone after Ctrl-C, the last words below."""
    ours, theirs = pty.openpty()
    process = drive("run", "smoke", stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    text, sent, limit = "", False, time.monotonic() + 120
    with contextlib.suppress(OSError):
        while time.monotonic() < limit:
            text += os.read(ours, 4096).decode(errors="replace")
            if "running" in text and not sent:
                process.send_signal(signal.SIGINT)
                sent = True
    os.close(ours)
    assert process.wait(10) == 130, text
    assert "1/4" in text
    assert "4 run(s) are left" in text
    assert "Traceback" not in text


def test_a_run_table_row_has_every_column_we_show():
    assert set(views.RUN_NUMBERS) <= set(metrics.RUNS)


def test_errors_of_the_network_are_messages_too(monkeypatch):
    def refuse(**_):
        raise UserError("no privilege: enable user namespaces")

    monkeypatch.setattr(verbs, "session", refuse)
    shown = thinpipe("run", "smoke")
    assert (shown.code, shown.out) == (2, "")
    assert "enable user namespaces" in shown.err
