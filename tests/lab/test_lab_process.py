"""Processes of a lab: spawn, messages, results, exits, logs."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from thinpipe.netem.errors import NetemError
from thinpipe.netem.lab import Event, Lab
from thinpipe.netem.link import LinkSpec
from thinpipe.netem.topology import Topology

pytestmark = pytest.mark.lab

HERE = __name__


@pytest.fixture(scope="module")
def shared_lab():
    with Lab(Topology.mesh(2, LinkSpec())) as lab:
        yield lab


def echo(control, prefix):
    while (text := control.receive(20.0)) != "end":
        control.send(prefix + text)


def leave(control, how):
    control.send("before")
    match how:
        case "return":
            return {"not": {"json"}}
        case "exit":
            sys.exit(7)
        case "text":
            sys.exit("a reason")
        case "raise":
            raise ValueError("went wrong")
        case "signal":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "hang":
            time.sleep(60)


def world(control):
    show = subprocess.run(
        ["ip", "-j", "-4", "address"], env={"PATH": "/usr/sbin:/sbin:/bin"}, capture_output=True, check=True
    )
    return {
        "parent": os.getppid(),
        "addresses": [a["local"] for link in json.loads(show.stdout) for a in link["addr_info"]],
        "files": sorted(os.listdir("/proc/self/fd"), key=int),
        "targets": [os.readlink(f"/proc/self/fd/{n}") for n in (0, 1, 2)],
        "held": [link for link in map(_link, os.listdir("/proc/self/fd")) if link.startswith("socket")],
        "interrupt": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
        "terminate": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "environment": os.environ.get("THINPIPE_TEST"),
    }


def _link(number):
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return ""


def send_world(control):
    control.send(world(control))
    print("to standard output", flush=True)
    print("to standard error", file=sys.stderr)


def fail(control, text):
    raise ValueError(text)


def add(control, a, b):
    return a + b


def big(control, count):
    for _ in range(count):
        control.send("x" * 1_000_000)


def test_messages_both_ways_keep_their_order(shared_lab):
    shared_lab.spawn("echo", 1, f"{HERE}:echo", {"prefix": "> "})
    for word in ("one", "two", "end"):
        shared_lab.send("echo", word)
    got = [shared_lab.event(10.0) for _ in range(3)]
    assert got == [
        Event("message", "echo", "> one"),
        Event("message", "echo", "> two"),
        Event("exit", "echo", None, 0),
    ]


@pytest.mark.parametrize(
    ("how", "status"),
    [("return", 0), ("exit", 7), ("text", 1), ("raise", 1), ("signal", -signal.SIGSEGV)],
)
def test_exits_come_after_the_last_message(shared_lab, tmp_path, how, status):
    log = tmp_path / "log"
    shared_lab.spawn(f"leave-{how}", 0, f"{HERE}:leave", {"how": how}, log=log)
    assert shared_lab.event(10.0) == Event("message", f"leave-{how}", "before")
    assert shared_lab.event(10.0) == Event("exit", f"leave-{how}", None, status)
    expected = {"raise": "ValueError: went wrong", "text": "a reason"}.get(how, "")
    assert expected in log.read_text()


def test_kill(shared_lab):
    shared_lab.spawn("hang", 0, f"{HERE}:leave", {"how": "hang"})
    assert shared_lab.event(10.0).data == "before"
    assert shared_lab.event(0.05) is None
    shared_lab.kill("hang")
    assert shared_lab.event(10.0) == Event("exit", "hang", None, -signal.SIGKILL)
    shared_lab.kill("hang")
    shared_lab.send("hang", "nobody reads this")
    assert shared_lab.event(0.05) is None


def test_a_process_lives_in_its_host_and_holds_nothing_of_others(shared_lab, tmp_path):
    ours, theirs = socket.socketpair()
    log = tmp_path / "log"
    log.write_text("kept\n")
    shared_lab.spawn("other", 0, f"{HERE}:leave", {"how": "hang"})
    assert shared_lab.event(10.0).data == "before"
    shared_lab.spawn("world", 1, f"{HERE}:send_world", {}, log=log, env={"THINPIPE_TEST": "set"})
    seen = shared_lab.event(10.0).data
    assert shared_lab.event(10.0).status == 0
    shared_lab.kill("other")
    assert shared_lab.event(10.0).kind == "exit"
    with ours, theirs:
        assert sorted(seen["addresses"]) == ["10.77.0.2", "127.0.0.1"]
        assert seen["parent"] == 1
        assert seen["targets"] == ["/dev/null", str(log), str(log)]
        assert len(seen["held"]) == 1
        assert seen["interrupt"]
        assert seen["terminate"]
        assert seen["environment"] == "set"
    assert log.read_text() == "kept\nto standard output\nto standard error\n"
    assert "THINPIPE_TEST" not in os.environ


def test_call_returns_the_result(shared_lab):
    assert shared_lab.call(0, f"{HERE}:add", {"a": [1], "b": [None]}, timeout_s=10.0) == [1, None]


@pytest.mark.parametrize(
    ("target", "args", "said"),
    [
        ("fail", {"text": "the reason"}, "ValueError: the reason"),
        ("add", {"a": 1}, "missing 1 required positional argument"),
        ("leave", {"how": "signal"}, f"status {-signal.SIGSEGV}"),
        ("leave", {"how": "return"}, "not JSON serializable"),
        ("nothing", {}, "no function 'nothing'"),
    ],
)
def test_call_raises_what_went_wrong(shared_lab, target, args, said):
    with pytest.raises(NetemError) as error:
        shared_lab.call(0, f"{HERE}:{target}", args, timeout_s=10.0)
    assert said in str(error.value)
    assert "h0" in str(error.value)
    assert shared_lab.event(0.05) is None


def test_call_has_a_limit_and_ends_its_process(shared_lab):
    start = time.monotonic()
    with pytest.raises(NetemError, match=r"did not return within 0\.2 s"):
        shared_lab.call(0, f"{HERE}:leave", {"how": "hang"}, timeout_s=0.2)
    assert time.monotonic() - start < 5
    assert shared_lab.event(0.1) is None


def test_a_call_keeps_the_events_of_others(shared_lab):
    shared_lab.spawn("early", 0, f"{HERE}:leave", {"how": "exit"})
    assert shared_lab.call(1, f"{HERE}:add", {"a": 1, "b": 2}, timeout_s=10.0) == 3
    assert [shared_lab.event(10.0).kind for _ in range(2)] == ["message", "exit"]


def test_a_client_that_does_not_read_loses_nothing(shared_lab):
    shared_lab.spawn("big", 0, f"{HERE}:big", {"count": 20})
    time.sleep(0.2)
    assert len(shared_lab.counters()) == 2
    got = [shared_lab.event(20.0) for _ in range(21)]
    assert [event.kind for event in got] == ["message"] * 20 + ["exit"]
    assert all(len(event.data) == 1_000_000 for event in got[:20])


def test_wrong_use_is_refused_with_a_reason(shared_lab, tmp_path):
    with pytest.raises(NetemError, match=r"host 2 .* not one of 0\.\.1"):
        shared_lab.spawn("far", 2, f"{HERE}:add", {})
    with pytest.raises(NetemError, match="no process 'nobody'"):
        shared_lab.send("nobody", 1)
    with pytest.raises(NetemError, match="only JSON"):
        shared_lab.spawn("odd", 0, f"{HERE}:add", {"a": {1}})
    shared_lab.spawn("once", 0, f"{HERE}:add", {"a": 1, "b": 1})
    assert shared_lab.event(10.0).status == 0
    with pytest.raises(NetemError, match="taken"):
        shared_lab.spawn("once", 0, f"{HERE}:add", {})
    shared_lab.spawn("logless", 0, f"{HERE}:add", {}, log=tmp_path / "no" / "folder")
    with pytest.raises(NetemError, match="No such file"):
        shared_lab.event(10.0)
    with pytest.raises(NetemError, match="not up"):
        Lab(Topology.mesh(2, LinkSpec())).event(0.1)


def test_a_lab_outlives_the_thread_that_started_it():
    made = Lab(Topology.mesh(1, LinkSpec()))
    stop = threading.Event()
    other = threading.Thread(target=stop.wait, args=(30.0,))
    other.start()
    starter = threading.Thread(target=made.__enter__)
    starter.start()
    starter.join()
    time.sleep(0.2)
    assert made.call(0, f"{HERE}:add", {"a": 1, "b": 2}, timeout_s=10.0) == 3
    stop.set()
    other.join()
    made.close()
