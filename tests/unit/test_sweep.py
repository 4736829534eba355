"""Sweeps with a fake session: isolation, retry, interrupts, full disks, two sweeps on one folder."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from thinpipe.harness import lock, manifest, plan, progress, store, sweep, verbs
from thinpipe.harness.errors import CodecError, DivergedError, UserError
from thinpipe.harness.experiment import expand

DATA = {
    "name": "demo",
    "seeds": [0, 1],
    "base": {"measure": "timing"},
    "arm": [{"label": "FP32"}, {"label": "BF16", "compression.forward": "bf16"}],
    "part": [{"name": "time", "axes": {"network.rate_mbit": [10, 100]}}],
}
TOTAL = 8


def status(state="done", error=None, **changes):
    return {
        **sweep.failed_status(RuntimeError(error), "2024-01-01T00:00:00+00:00", 1.0),
        "state": state,
        "error": error,
    } | changes


class FakeSession:
    """outcomes: run number (from 0) -> an exception to raise or a status to return."""

    def __init__(self, outcomes=None, refuse=None):
        self.outcomes, self.refuse = outcomes or {}, refuse
        self.opened = self.closed = 0
        self.checked, self.ran = [], []

    @contextlib.contextmanager
    def __call__(self):
        self.opened += 1
        try:
            yield self
        finally:
            self.closed += 1

    def check(self, specs):
        self.checked.append([spec.run_id for spec in specs])
        if self.refuse:
            raise self.refuse

    def run(self, spec, run_dir, step):
        number = len(self.ran)
        self.ran.append(spec.run_id)
        assert json.loads((run_dir / "run.json").read_text())["run_id"] == spec.run_id
        assert not (run_dir / "status.json").exists()
        step(1, 2)
        outcome = self.outcomes.get(number, status())
        if isinstance(outcome, BaseException):
            raise outcome
        store.write_json(run_dir / "manifest.json", manifest.collect(spec))
        return outcome


@pytest.fixture(autouse=True)
def own_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "PATH", tmp_path / "lock")
    monkeypatch.setattr(lock, "POLL_S", 0.02)


@pytest.fixture
def results(tmp_path):
    return store.Store(tmp_path / "results")


@pytest.fixture
def demo():
    return expand(DATA)


@pytest.fixture
def stream():
    return io.StringIO()


@pytest.fixture
def go(results, demo, stream):
    def execute(session, only=None, limit=None, **options):
        made = plan.make(demo, results, only=only, limit=limit)
        return sweep.execute(made, results, session, progress=progress.PlainProgress(stream), **options)

    return execute


def test_everything_is_run_once_in_order_and_a_second_time_nothing(go, results, demo, stream):
    session = FakeSession()
    result = go(session)
    order = [entry.run_id for entry in plan.make(demo, results).entries]
    assert session.ran == order
    assert session.checked == [order]
    assert (session.opened, session.closed) == (1, 1)
    assert result.exit_code == 0
    assert result.plan.counts() == {"done": TOTAL}
    assert "8 run(s) to do" in stream.getvalue()
    again = FakeSession()
    result = go(again)
    assert (again.opened, result.executed, result.exit_code) == (0, [], 0)
    assert verbs.closing(result) == ["nothing to do: no run of demo is left (8 done)."]


def test_a_failed_run_stops_nothing_and_is_said_at_once_and_again(go, results, stream):
    session = FakeSession({1: status("failed", "rank 1 was killed\ndetail"), 3: CodecError("bf16 decoded NaN")})
    result = go(session)
    assert len(session.ran) == TOTAL
    assert result.exit_code == 1
    assert result.plan.counts() == {"done": TOTAL - 2, "failed": 2}
    lines = stream.getvalue().splitlines()
    first = next(i for i, line in enumerate(lines) if "rank 1 was killed" in line)
    assert lines[first].startswith(f"[2/{TOTAL}] FAILED")
    assert session.ran[1] in lines[first]
    assert len(lines) - first == TOTAL - 1
    closing = verbs.closing(result)
    assert any("rank 1 was killed" in line for line in closing)
    assert any("bf16 decoded NaN" in line for line in closing)
    assert any("--retry-failed" in line for line in closing)
    assert results.status(session.ran[3])["error"] == "bf16 decoded NaN"


def test_failed_runs_are_repeated_only_when_asked(go):
    first = FakeSession({1: status("failed", "x")})
    go(first)
    idle = FakeSession()
    result = go(idle)
    assert idle.ran == []
    assert result.exit_code == 1
    assert any("failed" in line for line in verbs.closing(result))
    retry = FakeSession()
    assert go(retry, retry_failed=True).exit_code == 0
    assert retry.ran == [first.ran[1]]


def test_divergence_is_a_finding_not_a_failure(go, results):
    session = FakeSession({0: DivergedError("loss is not finite at step 3")})
    result = go(session)
    assert result.exit_code == 0
    assert results.status(session.ran[0])["state"] == "diverged"
    assert result.plan.counts() == {"done": TOTAL - 1, "diverged": 1}


def test_a_bug_in_a_session_fails_its_run_with_a_traceback(go, results):
    session = FakeSession({0: ZeroDivisionError("oops"), 1: AssertionError()})
    result = go(session)
    assert result.plan.counts() == {"done": TOTAL - 2, "failed": 2}
    found = results.status(session.ran[0])
    assert found["error"] == "ZeroDivisionError: oops"
    assert "test_sweep.py" in found["detail"]


def test_fail_fast(go):
    session = FakeSession({2: status("failed", "x")})
    result = go(session, fail_fast=True)
    assert len(session.ran) == 3
    assert result.stopped
    assert result.exit_code == 1
    assert session.closed == 1
    assert result.plan.counts() == {"done": 2, "failed": 1, "pending": TOTAL - 3}


def test_force_repeats_what_is_chosen(go):
    go(FakeSession())
    session = FakeSession()
    go(session, force=True, only="arm=FP32")
    assert len(session.ran) == TOTAL // 2
    go(second := FakeSession(), force=True)
    assert len(second.ran) == TOTAL


class SavingSession(FakeSession):
    """Notes the checkpoints that a run finds, and leaves one."""

    def run(self, spec, run_dir, step):
        saved = run_dir / store.CHECKPOINTS / "step-00000002"
        self.found = [*getattr(self, "found", []), saved.exists()]
        saved.mkdir(parents=True, exist_ok=True)
        return super().run(spec, run_dir, step)


def checkpoints(results, session):
    return [(results.run_dir(run_id) / store.CHECKPOINTS).exists() for run_id in session.ran]


def test_checkpoints_of_a_run_go_when_it_is_done_and_stay_when_it_is_not(go, results):
    outcomes = {0: status("failed", "x"), 1: status("diverged", "nan"), 3: KeyboardInterrupt()}
    first = SavingSession(outcomes)
    go(first)
    assert checkpoints(results, first) == [True, True, False, True]
    second = SavingSession()
    go(second, retry_failed=True)
    # The failed and the interrupted one go on from theirs.
    assert dict(zip(second.ran, second.found, strict=True)) == {
        run_id: run_id in (first.ran[0], first.ran[3]) for run_id in second.ran
    }
    assert not any(checkpoints(results, second))


def test_what_is_forced_begins_afresh(go, results):
    go(SavingSession({0: status("failed", "x")}))
    again = SavingSession()
    go(again, force=True)
    assert len(again.ran) == TOTAL
    assert not any(again.found)


def test_checkpoints_are_kept_when_asked(results, stream):
    kept = expand({**DATA, "base": {**DATA["base"], "checkpoint.every": 2, "checkpoint.keep": True}})
    session = SavingSession()
    sweep.execute(plan.make(kept, results), results, session, progress=progress.PlainProgress(stream))
    assert len(session.ran) == TOTAL
    assert all(checkpoints(results, session))


def test_limit_counts_runs_of_this_sweep(go):
    sessions = [FakeSession() for _ in range(3)]
    results = [go(session, limit=3) for session in sessions]
    assert [len(session.ran) for session in sessions] == [3, 3, 2]
    assert len({run for session in sessions for run in session.ran}) == TOTAL
    assert [r.plan.counts().get("pending", 0) for r in results] == [5, 2, 0]
    assert "5 run(s) are left" in verbs.closing(results[0])[-1]


def test_what_cannot_run_here_is_refused_before_anything_starts(go, results):
    session = FakeSession(refuse=UserError("no tc"))
    with pytest.raises(UserError, match="no tc"):
        go(session)
    assert session.ran == []
    assert session.closed == 1
    assert not results.root.exists()
    assert lock.holder() is None


def test_a_fault_of_the_machine_leaves_the_run_open(go, results, demo):
    session = FakeSession({2: UserError("no privilege")})
    with pytest.raises(UserError, match="no privilege"):
        go(session)
    assert plan.make(demo, results).counts() == {"done": 2, "pending": TOTAL - 2}
    assert session.closed == 1


def test_interrupt_leaves_a_resumable_plan(go, results):
    session = FakeSession({2: KeyboardInterrupt()})
    result = go(session)
    assert result.exit_code == 130
    assert session.closed == 1
    assert result.plan.counts() == {"done": 2, "pending": TOTAL - 2}
    assert "interrupted; 6 run(s) are left" in verbs.closing(result)[-1]
    resumed = FakeSession()
    assert go(resumed).exit_code == 0
    assert resumed.ran == session.ran[2:3] + resumed.ran[1:]
    assert len(resumed.ran) == TOTAL - 2


@pytest.mark.parametrize("where", ["session", "status", "rank"])
def test_a_full_disk_stops_the_sweep_and_leaves_it_resumable(go, results, demo, monkeypatch, where):
    no_space = OSError(errno.ENOSPC, "No space left on device")
    session = FakeSession({2: no_space if where == "session" else status("failed" if where == "rank" else "done", "x")})
    if where == "status":
        real = results.finish

        def finish(run_id, found):
            if len(session.ran) == 3:
                with store.explain_disk_full(results.run_dir(run_id)):
                    raise no_space
            real(run_id, found)

        monkeypatch.setattr(results, "finish", finish)
    if where == "rank":

        def check_space():
            with store.explain_disk_full(results.root):
                raise no_space

        monkeypatch.setattr(results, "check_space", check_space)
    with pytest.raises(store.DiskFullError, match=str(results.root)):
        go(session)
    assert len(session.ran) == 3
    monkeypatch.setattr(results, "finish", store.Store(results.root).finish)
    assert plan.make(demo, results).counts() == {"done": 2, "pending": TOTAL - 2}
    resumed = FakeSession()
    go(resumed)
    assert resumed.ran[0] == session.ran[2]


def test_a_damaged_status_is_run_again_and_said(go, results, stream):
    session = FakeSession()
    go(session)
    (results.run_dir(session.ran[4]) / "status.json").write_text('{"state"')
    again = FakeSession()
    go(again)
    assert again.ran == [session.ran[4]]
    assert "is damaged" in stream.getvalue()


def test_states_are_read_again_once_the_lock_is_held(results, demo, stream):
    """A run that another sweep finished while this one waited is not done twice, also not when forced or
    retried."""
    made = plan.make(demo, results)
    late = sweep.execute(
        made, results, FakeSession({0: status("failed", "x")}), progress=progress.PlainProgress(stream)
    )
    assert late.exit_code == 1
    for options in ({}, {"retry_failed": True}, {"force": True}):
        session = FakeSession()
        result = sweep.execute(made, results, session, progress=progress.PlainProgress(stream), **options)
        assert (session.opened, result.executed) == (0, [])


# ---- real processes

DRIVER = """
import sys, time, os
sys.path.insert(0, sys.argv[1])
import test_sweep as t
from pathlib import Path
from thinpipe.harness import lock, plan, progress, store, sweep, verbs

lock.PATH = Path(sys.argv[2])
lock.POLL_S = 0.02
results, seconds = store.Store(Path(sys.argv[3])), float(sys.argv[4])
record = Path(sys.argv[3]).parent / "record"

class Session(t.FakeSession):
    def run(self, spec, run_dir, step):
        with record.open("a") as file:
            file.write(f"{spec.run_id} {os.getpid()} {time.monotonic()} ")
        try:
            print("running", spec.run_id, flush=True)
            time.sleep(seconds)
            return super().run(spec, run_dir, step)
        except KeyboardInterrupt:
            print("torn down", flush=True)
            raise
        finally:
            with record.open("a") as file:
                file.write(f"{time.monotonic()}\\n")

demo = t.expand(t.DATA, sys.argv[5:])
results.save_runs(demo)
made = plan.make(demo, results)
result = sweep.execute(made, results, Session(), progress=progress.PlainProgress())
print(*verbs.closing(result), sep="\\n", file=sys.stderr)
sys.exit(result.exit_code)
"""


@pytest.fixture
def start(tmp_path):
    started = []

    def launch(seconds, *overrides):
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                DRIVER,
                str(Path(__file__).parent),
                str(tmp_path / "lock"),
                str(tmp_path / "results"),
                str(seconds),
                *overrides,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield launch
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=10)


def recorded(tmp_path):
    lines = (tmp_path / "record").read_text().split("\n")[:-1]
    return [(run, pid, float(begin), float(end)) for run, pid, begin, end in map(str.split, lines)]


def test_two_sweeps_on_one_folder(start, tmp_path, results, demo):
    """The second waits and says for whom; every run is done once, none at the same time, none lost."""
    processes = [start(0.1), start(0.1, "seeds=[1,2]")]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    runs = recorded(tmp_path)
    assert len(runs) == 4 * 3
    assert set(Counter(run for run, *_ in runs).values()) == {1}
    assert len({pid for _, pid, *_ in runs}) == 2
    spans = sorted((begin, end) for *_, begin, end in runs)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    waited = [err for _, err in outputs if "waiting for the timing lock: process" in err]
    assert len(waited) == 1
    assert waited[0].count("waiting for") == 1
    saved = results.saved_runs("demo")
    assert sorted({row["seed"] for row in saved}) == [0, 1, 2]
    assert all(results.status(row["run_id"])["state"] == "done" for row in saved)


def test_a_killed_sweep_is_taken_over_by_the_one_that_waits(start, tmp_path, results):
    first = start(5)
    assert first.stdout.readline().startswith("running")
    second = start(0)
    assert "waiting" in second.stderr.readline()
    os.kill(first.pid, signal.SIGKILL)
    second.communicate(timeout=60)
    assert second.returncode == 0
    assert {results.status(row["run_id"])["state"] for row in results.saved_runs("demo")} == {"done"}


@pytest.mark.parametrize("waiting", [False, True])
def test_one_sigint_ends_a_sweep_with_130(start, tmp_path, results, demo, waiting):
    process = start(30)
    assert process.stdout.readline().startswith("running")
    if waiting:
        process = start(30)
        assert "waiting" in process.stderr.readline()
    sent = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert time.monotonic() - sent < 5
    assert ("torn down" in out) == (not waiting)
    assert "Traceback" not in err
    assert f"interrupted; {TOTAL} run(s) are left; run the same command again" in err
    assert plan.make(demo, results).counts() == {"pending": TOTAL}
