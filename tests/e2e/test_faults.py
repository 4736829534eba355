"""Faults: each ends in a clear message, a status for that run only, nothing left behind."""

import os
import signal
import subprocess
import time

import psutil
import pytest

from runs import Lab, small
from thinpipe.harness.errors import UserError
from thinpipe.harness.launch.local import LocalLauncher
from thinpipe.harness.runner import Session

pytestmark = [pytest.mark.lab, pytest.mark.e2e]

# 10 Mbit and big messages: a transfer is nearly always under way.
SLOW = {"network": {"rate_mbit": 10.0}, "model": {"width": 256}, "train": {"max_steps": 40}}


class Holding(LocalLauncher):
    """A launcher that lets a test reach into the lab of the run under way."""

    def start_rank(self, lab, rank, *args):
        self.running = lab
        super().start_rank(lab, rank, *args)


def descendants():
    """Live descendants of this process; one that has ended and waits to be collected is not left over."""
    return {p.pid for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE}


def namespaces():
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=10, check=True).stdout


@pytest.fixture(scope="module")
def session():
    with Session(calibrated=False, launcher=Holding(), limit_s=6.0) as opened:
        yield opened


@pytest.fixture
def held(session, tmp_path):
    return Lab(session, tmp_path), session.launcher


def strike(lab, launcher, blow, at=3):
    """Run SLOW and call blow(lab) once, at step `at`; (status, seconds from the blow to the end)."""
    spec = small(**SLOW)
    struck = []

    def progress(step, _):
        if step == at and not struck:
            time.sleep(0.05)
            struck.append(time.monotonic())
            blow(launcher.running)

    status = lab.run(spec, progress=progress)
    return status, time.monotonic() - struck[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_in_mid_transfer_ends_the_run_within_two_seconds(held, rank):
    lab, launcher = held
    before = descendants()
    status, seconds = strike(lab, launcher, lambda running: running.kill(f"rank{rank}", signal.SIGKILL))
    assert status["state"] == "failed"
    assert f"rank {rank} was killed by signal 9" in status["error"]
    assert seconds < 2.0
    assert descendants() == before, "no process of the lab is left"
    assert namespaces() == ""
    again = lab.run(small())
    assert again["state"] == "done", "the session goes on with the next run"


def test_a_rank_that_hangs_is_named_with_the_step_it_stopped_at(held):
    lab, launcher = held
    status, seconds = strike(lab, launcher, lambda running: running.kill("rank1", signal.SIGSTOP))
    assert status["state"] == "failed"
    assert "boundary 0" in status["error"], "the rank that waited says for which message"
    assert "did not complete within 6 s" in status["error"]
    assert "step" in status["error"]
    assert seconds < 15.0
    assert namespaces() == ""


def test_training_that_becomes_non_finite_has_diverged(trained):
    status = trained.run(small(train={"lr": 1e30, "clip_norm": None, "warmup_steps": 0}))
    assert status["state"] == "diverged", status["error"]
    assert "step" in status["error"]


def test_training_that_leaves_its_number_format_has_diverged(trained):
    """A finite value that fp16 does not hold: decision 0013."""
    status = trained.run(
        small(train={"lr": 3e3, "warmup_steps": 0, "clip_norm": None}, compression={"forward": "fp16"})
    )
    assert status["state"] == "diverged", status["error"]
    assert "fp16" in status["error"]
    assert "micro-batch" in status["error"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pipeline": {"stages": 5}}, "stages"),
        ({"task": {"corpus": "/nowhere/at/all.txt"}}, "/nowhere/at/all.txt"),
        ({"task": {"num_sequences": 10**6}}, "num_sequences"),
        ({"model": {"checkpoint": "/nowhere"}}, "/nowhere"),
        ({"network": {"delay_ms": 5.0}}, "netem"),
        ({"network": {"rate_mbit": 39_000.0}}, "allow-unreached"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(trained, changes, says):
    with pytest.raises(UserError, match=says):
        trained.session.check([small(**changes)])


def test_what_does_not_fit_is_refused_before_anything_starts():
    from thinpipe.harness import check, memory

    model = {"width": 256, "layers": 2}
    spec = small(model=model, compression={"forward": "delta(fixpoint:4, cache=fp32)"}, task={"num_sequences": 100_000})
    ranks = memory.predict(spec, 64)
    assert sum(one.caches for one in ranks) == 2 * 64 * 64 * 256 * 4, "two ends hold every sample"
    needed = sum(one.total for one in ranks)
    with pytest.raises(UserError, match=r"need .* GiB together"):
        memory.fits(spec, 64, needed)
    memory.fits(spec, 64, 2 * needed)
    with pytest.raises(UserError, match=r"caches .*cache=fixpoint"):
        memory.fits(spec, 100_000, needed)
    with pytest.raises(UserError, match=r"need .* GiB together"):
        check.check(small(model=model), available_bytes=2**20)


def test_the_client_killed_leaves_nothing(tmp_path):
    """SIGKILL of the process that runs the sweep: server, lab and ranks end by themselves."""
    import sys

    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); from runs import *; from pathlib import Path\n"
        "with Session(calibrated=False) as s:\n"
        "    Lab(s, Path(sys.argv[1])).run(small(**eval(sys.argv[3])), progress=lambda *_: print('step', flush=True))"
    )
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    command = [sys.executable, "-c", code, str(tmp_path), here, repr(SLOW)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "step\n"
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 4
        process.kill()
        _, alive = psutil.wait_procs(family, timeout=3.0)
        assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    assert namespaces() == ""
