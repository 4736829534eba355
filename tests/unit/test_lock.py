"""The timing lock: one holder a machine, whoever it is, released however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from thinpipe.harness import lock
from thinpipe.harness.errors import UserError

HOLDER = """
import sys, time
from pathlib import Path
from thinpipe.harness import lock
lock.PATH = Path(sys.argv[1])
with lock.hold("other", Path("."), print):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "PATH", tmp_path / "lock")
    monkeypatch.setattr(lock, "POLL_S", 0.02)
    return tmp_path / "lock"


@pytest.fixture
def other(path):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait(10)
    process.stdout.close()


def test_holder_is_known_only_while_it_holds(tmp_path, path):
    assert lock.holder() is None
    with lock.hold("demo", tmp_path, pytest.fail):
        info = lock.holder()
        assert (info["pid"], info["experiment"], info["results"]) == (os.getpid(), "demo", str(tmp_path))
        assert "demo" in lock.describe(info)
        assert info["user"] in lock.describe(info)
    assert lock.holder() is None
    assert path.read_text() == ""


def test_released_when_the_body_raises(tmp_path):
    with pytest.raises(KeyError), lock.hold("demo", tmp_path, pytest.fail):
        raise KeyError
    assert lock.holder() is None


def test_waiting_says_for_whom_once_then_reminds(tmp_path, other, monkeypatch):
    said = []
    monkeypatch.setattr(lock, "REMIND_S", 0.5)
    with (
        pytest.raises(UserError, match=rf"waited 1 s.*process {other.pid}"),
        lock.hold("d", tmp_path, said.append, limit_s=1.2),
    ):
        pytest.fail("held by two")
    assert 2 <= len(said) <= 3
    assert all(f"process {other.pid}" in line and "experiment other" in line for line in said)


def test_the_kernel_releases_it_when_the_holder_is_killed(tmp_path, other):
    assert lock.holder()["pid"] == other.pid
    os.kill(other.pid, signal.SIGKILL)
    start = time.monotonic()
    said = []
    with lock.hold("demo", tmp_path, said.append, limit_s=10):
        assert lock.holder()["pid"] == os.getpid()
    assert time.monotonic() - start < 5


def test_a_child_that_outlives_the_body_does_not_keep_it(tmp_path):
    with lock.hold("demo", tmp_path, pytest.fail):
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
    try:
        assert lock.holder() is None
        with lock.hold("demo", tmp_path, pytest.fail, limit_s=1):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_the_file_is_for_everyone_whatever_the_umask(tmp_path, path):
    mask = os.umask(0o077)
    try:
        with lock.hold("demo", tmp_path, pytest.fail):
            assert path.stat().st_mode & 0o777 == 0o666
    finally:
        os.umask(mask)


def test_an_existing_file_is_never_opened_for_creation(tmp_path, path, monkeypatch):
    """In a sticky folder the kernel refuses O_CREAT on another user's file (fs.protected_regular), also for
    root."""
    path.write_text("")
    real = os.open

    def checked(name, flags, *args):
        assert not flags & os.O_CREAT, "an existing file was opened with O_CREAT"
        return real(name, flags, *args)

    monkeypatch.setattr(lock.os, "open", checked)
    with lock.hold("demo", tmp_path, pytest.fail):
        pass


def test_leftover_content_is_no_holder(tmp_path, path):
    path.write_text(json.dumps({"pid": 1, "user": "x", "experiment": "y" * 500}))
    assert lock.holder() is None
    with lock.hold("demo", tmp_path, pytest.fail):
        assert lock.holder()["experiment"] == "demo"


@pytest.mark.parametrize("kind", ["link", "folder", "fifo"])
def test_what_is_no_plain_file_is_refused(tmp_path, path, kind):
    if kind == "link":
        path.symlink_to(tmp_path / "victim")
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(UserError, match=str(path)), lock.hold("demo", tmp_path, pytest.fail):
        pass
    assert not (tmp_path / "victim").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_an_ordinary_user_and_root_share_it(tmp_path, path):
    """Both orders: root finds a user's file, a user finds root's, in a sticky folder."""
    folder = path.parent
    for parent in folder.parents:
        if str(parent).startswith("/tmp/"):
            parent.chmod(0o755)
    folder.chmod(0o1777)

    def as_nobody():
        child = os.fork()
        if child == 0:
            os.setgid(65534)
            os.setuid(65534)
            try:
                with lock.hold("theirs", folder, print, limit_s=2):
                    os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0

    as_nobody()
    assert path.stat().st_uid == 65534
    with lock.hold("ours", folder, pytest.fail):
        assert lock.holder()["experiment"] == "ours"
    path.unlink()
    with lock.hold("ours", folder, pytest.fail):
        pass
    assert path.stat().st_uid == 0
    as_nobody()
