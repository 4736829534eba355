"""Nothing of a lab survives, whoever is killed; nothing of the machine is touched."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from thinpipe.netem import lab as lab_module
from thinpipe.netem.errors import NetemError
from thinpipe.netem.lab import Lab
from thinpipe.netem.link import LinkSpec
from thinpipe.netem.topology import Topology

pytestmark = pytest.mark.lab

HERE = __name__
PAIR = Topology.mesh(2, LinkSpec(rate_mbit=100.0))


def with_child(control):
    """Starts a process of its own, which ignores what it can and holds the control socket open."""
    if os.fork() == 0:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        os.setsid()
        time.sleep(60)
        os._exit(0)
    control.send("ready")
    control.receive(60.0)


def fill(lab):
    """A process with a child in each host; returns the lab's processes and the namespaces they are in."""
    for host in range(2):
        lab.spawn(f"p{host}", host, f"{HERE}:with_child", {})
        assert lab.event(10.0).data == "ready"
    guard = psutil.Process(lab.pid)
    processes = [guard, *guard.children(recursive=True)]
    assert len(processes) == 6
    spaces = {os.readlink(f"/proc/{p.pid}/ns/{kind}") for p in processes for kind in ("net", "mnt", "pid")}
    own = {os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "mnt", "pid")}
    assert len(spaces - own) == 5
    return processes, spaces - own


def wait_until_gone(processes, spaces, limit_s=5.0):
    deadline = time.monotonic() + limit_s
    while True:
        alive = [p.pid for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        held = spaces & used_namespaces()
        if not alive and not held:
            return
        assert time.monotonic() < deadline, f"still alive: {alive}; still held: {held}"
        time.sleep(0.01)


def used_namespaces():
    found = set()
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it may end while it is looked at
            folder = f"/proc/{process}/ns"
            found |= {os.readlink(f"{folder}/{name}") for name in os.listdir(folder)}
    return found


def machine():
    """What a lab could change of this machine's own network and mounts."""
    path = {"PATH": "/usr/sbin:/sbin:/usr/bin:/bin"}
    shown = [
        subprocess.run(argv, env=path, capture_output=True, text=True, check=True, timeout=10).stdout
        for argv in (["ip", "-j", "link"], ["ip", "-j", "address"], ["tc", "-j", "qdisc"], ["ip", "netns"])
    ]
    return [*shown, Path("/proc/self/mountinfo").read_text(), sysctls()]


def sysctls():
    names = ("tcp_slow_start_after_idle", "tcp_no_metrics_save", "tcp_congestion_control")
    return [Path("/proc/sys/net/ipv4", name).read_text() for name in names]


def test_up_and_down_leaves_nothing_and_touches_nothing():
    before = machine()
    with Lab(PAIR) as lab:
        found = fill(lab)
        during = machine()
    wait_until_gone(*found)
    assert before == during == machine()
    lab.close()


def test_an_exception_in_the_block_tears_down_too():
    found = []

    def body():
        with Lab(PAIR) as lab:
            found.extend(fill(lab))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    wait_until_gone(*found)


@pytest.mark.parametrize("victim", ["guard", "first"])
def test_killing_a_process_of_the_lab_ends_all_of_it(victim):
    with Lab(PAIR) as lab:
        processes, spaces = fill(lab)
        first = next(p for p in processes if p.ppid() == lab.pid)
        os.kill(lab.pid if victim == "guard" else first.pid, signal.SIGKILL)
        wait_until_gone(processes, spaces)
        with pytest.raises(NetemError, match="the lab ended"):
            lab.event(5.0)


def in_child(body):
    """Fork; the child runs body(its end of a socket) and waits. Returns its pid and our end."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            kept = body(theirs)  # a lab that nobody holds is closed
            time.sleep(60)
            del kept
        finally:
            os._exit(1)
    theirs.close()
    ours.settimeout(20)
    return pid, ours


def test_killing_the_client_ends_its_labs():
    def client(sock):
        labs = [Lab(PAIR).__enter__() for _ in range(2)]
        for lab in labs:
            lab.spawn("p", 0, f"{HERE}:with_child", {})
            lab.event(10.0)
        sock.sendall(json.dumps([lab.pid for lab in labs]).encode())
        return labs

    pid, sock = in_child(client)
    with sock:
        guards = [psutil.Process(p) for p in json.loads(sock.recv(100))]
    processes = [p for guard in guards for p in [guard, *guard.children(recursive=True)]]
    assert len(processes) == 8
    spaces = {os.readlink(f"/proc/{p.pid}/ns/net") for p in processes} - {os.readlink("/proc/self/ns/net")}
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    wait_until_gone(processes, spaces)


def serve(sock):
    """What a fork server does: start a lab, hand its socket over."""
    pid, control = lab_module.start(PAIR)
    socket.send_fds(sock, [str(pid).encode()], [control.fileno()])
    control.close()


def attached(sock):
    data, (descriptor, *_), _, _ = socket.recv_fds(sock, 100, 1)
    return Lab.attach(int(data), socket.socket(fileno=descriptor), PAIR)


def test_attaching_to_a_lab_started_elsewhere_and_closing_it():
    server, sock = in_child(serve)
    with sock:
        lab = attached(sock)
        assert lab.info["hosts"][1]["address"] == "10.77.0.2"
        found = fill(lab)
        lab.close()
        wait_until_gone(*found)
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)


def test_killing_the_process_that_started_a_lab_ends_it():
    server, sock = in_child(serve)
    with sock:
        lab = attached(sock)
        found = fill(lab)
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
        wait_until_gone(*found)
        with pytest.raises(NetemError, match="the lab ended"):
            lab.event(5.0)
        lab.close()


def test_two_labs_at_once_are_apart():
    with Lab(PAIR) as one, Lab(Topology.mesh(3, LinkSpec())) as other:
        assert len(one.info["hosts"]) == 2
        assert len(other.info["hosts"]) == 3
        found = fill(one)
        _, spaces = fill_any(other)
        assert not found[1] & spaces
        one.close()
        wait_until_gone(*found)
        assert other.loopback() == [{"host": i, "bytes": 0, "packets": 0} for i in range(3)]


def fill_any(lab):
    guard = psutil.Process(lab.pid)
    processes = [guard, *guard.children(recursive=True)]
    own = os.readlink("/proc/self/ns/net")
    return processes, {os.readlink(f"/proc/{p.pid}/ns/net") for p in processes} - {own}


def test_up_and_down_are_fast():
    up, down = [], []
    for _ in range(3):
        start = time.monotonic()
        with Lab(PAIR):
            ready = time.monotonic()
        up.append(ready - start)
        down.append(time.monotonic() - ready)
    # Around 0.08 and 0.01 s on an idle machine.
    assert min(up) < 0.5
    assert min(down) < 0.25


def test_descriptors_do_not_pile_up():
    with Lab(PAIR):
        pass
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with Lab(PAIR) as lab:
            lab.call(0, f"{HERE}:nothing", {}, timeout_s=10.0)
    assert len(os.listdir("/proc/self/fd")) == before


def nothing(control):
    pass
