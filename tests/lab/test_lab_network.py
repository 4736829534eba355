"""The network of a lab: what was asked for is in force, counted, and refused where it cannot be."""

import ctypes
import encodings.idna  # noqa: F401 - sockets load it late, when an ordinary user may not read it
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import pytest

from thinpipe.netem import calibrate, probe, qdisc, script, shaping, tools
from thinpipe.netem.errors import NetemError
from thinpipe.netem.lab import Lab
from thinpipe.netem.link import LinkSpec
from thinpipe.netem.topology import Topology

pytestmark = pytest.mark.lab

HERE = __name__
HUNDRED = Topology.mesh(2, LinkSpec(rate_mbit=100.0))
HEADER_BYTES = 66
# A SYN's options take 20 bytes, any other segment's 12.
SYN_EXTRA_BYTES = 8


def sink(control, address):
    with socket.create_server((address, 0)) as listener:
        control.send(listener.getsockname()[1])
        connection, _ = listener.accept()
        with connection:
            total = 0
            while data := connection.recv(1 << 16):
                total += len(data)
            control.send(total)


def source(control, address, port, count):
    """Send, wait until all is acknowledged, report what TCP counted; then wait before the FIN."""
    with socket.create_connection((address, port), 10) as connection:
        connection.sendall(bytes(count))
        while unacknowledged(connection):
            pass
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        (segments,) = struct.unpack_from("I", info, 136)
        (sent,) = struct.unpack_from("Q", info, 200)
        control.send({"segments": segments, "sent": sent})
        control.receive(20.0)


def unacknowledged(connection):
    """Segments on their way, or bytes not sent yet: with the window closed there may be none of the first."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return struct.unpack_from("I", info, 24)[0] or struct.unpack_from("I", info, 144)[0]


def transfer(lab, names, count, source_host=0, destination=1):
    """One transfer; returns what the sender's TCP counted, and the counters before the FIN."""
    receiver, sender = names
    address = lab.topology.address(destination)
    lab.spawn(receiver, destination, f"{HERE}:sink", {"address": address})
    port = lab.event(10.0).data
    args = {"address": address, "port": port, "count": count}
    lab.spawn(sender, source_host, f"{HERE}:source", args)
    counted = lab.event(20.0).data
    counters = lab.counters()
    lab.send(sender, "go on")
    events = [lab.event(10.0) for _ in range(3)]
    assert [e.data for e in events if e.kind == "message"] == [count]
    assert [e.status for e in events if e.kind == "exit"] == [0, 0]
    return counted, counters


def by_pair(counters):
    return {(c["host"], c["destination"]): c for c in counters}


@pytest.mark.parametrize("rate", [100.0, None], ids=["limited", "unlimited"])
@pytest.mark.parametrize("count", [2_000, 100_000, 1_000_000])
def test_counters_agree_with_tcp_to_the_byte(rate, count):
    with Lab(Topology.mesh(2, LinkSpec(rate_mbit=rate))) as lab:
        assert {c["bytes"] for c in lab.counters()} == {0}
        counted, counters = transfer(lab, ("sink", "source"), count)
        leaf = by_pair(counters)[0, None if rate is None else 1]
        assert counted["sent"] >= count
        assert leaf["bytes"] == counted["sent"] + HEADER_BYTES * counted["segments"] + SYN_EXTRA_BYTES
        assert leaf["packets"] == counted["segments"]
        assert (leaf["drops"], leaf["backlog"]) == (0, 0)
        if rate is not None:
            assert by_pair(counters)[0, None]["bytes"] == 0
            assert leaf["overlimits"] > 0 or count < 50_000
        assert all(host["bytes"] == 0 for host in lab.loopback())


def test_each_destination_has_its_own_rate_and_counter():
    rates = [[None, 50.0, None], [100.0, None, 20.0], [None, None, None]]
    with Lab(Topology.matrix(rates, LinkSpec())) as lab:
        counted, counters = transfer(lab, ("sink", "source"), 500_000, 1, 2)
        got = by_pair(counters)
        assert got[1, 2]["bytes"] > 500_000
        assert got[1, 0]["bytes"] == got[1, None]["bytes"] == got[0, 1]["bytes"] == 0
        assert got[2, None]["bytes"] > 0
        assert set(got) == {(0, 1), (0, 2), (0, None), (1, 0), (1, 2), (1, None), (2, None)}
        assert lab.info["effective"]["h1"]["classes"]["1:12"]["rate"] == "20Mbit"
        assert counted["segments"] > 300


def over_loopback(control):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(bytes(1000), ("127.0.0.1", 9))


def own_address(control, address):
    """A host's own address goes by loopback, unshaped: this is what the counter is there to find."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(bytes(1000), (address, 9))


def test_loopback_traffic_is_seen():
    with Lab(HUNDRED) as lab:
        lab.call(0, f"{HERE}:over_loopback", {}, timeout_s=10.0)
        lab.call(1, f"{HERE}:own_address", {"address": "10.77.0.2"}, timeout_s=10.0)
        assert all(host["bytes"] >= 1000 for host in lab.loopback())
        assert {c["bytes"] for c in lab.counters()} == {0}


def test_info_says_what_was_run_and_what_is_in_force():
    topology = Topology.mesh(2, LinkSpec(rate_mbit=33.3, mtu=9000, congestion="reno"))
    with Lab(topology) as lab:
        info = json.loads(json.dumps(lab.info))
    assert info["commands"]["tc"]["h1"] == qdisc.tc_commands(topology, 1)
    assert info["hosts"][0] == {"name": "h0", "address": "10.77.0.1", "interface": "eth0"}
    effective = info["effective"]["h0"]
    assert effective["interface"]["mtu"] == 9000
    assert effective["interface"]["congestion"]["10.77.0.2"] == "reno"
    assert effective["classes"]["1:11"]["rate"] == "33300Kbit"
    assert effective["filters"] == {"10.77.0.2": "1:11"}
    assert effective["sysctl"]["net.ipv4.tcp_slow_start_after_idle"] == "0"
    assert info["user_namespace"] == (os.geteuid() != 0)
    assert info["kernel"] == os.uname().release
    assert info["iproute2"].startswith("iproute2")


def congestion_of(control, address, port):
    with socket.create_connection((address, port), 10) as connection:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


@pytest.mark.parametrize("name", ["cubic", "reno"])
def test_congestion_control_reaches_the_sockets(name):
    with Lab(Topology.mesh(2, LinkSpec(congestion=name))) as lab:
        lab.spawn("sink", 1, f"{HERE}:sink", {"address": "10.77.0.2"})
        args = {"address": "10.77.0.2", "port": lab.event(10.0).data}
        assert lab.call(0, f"{HERE}:congestion_of", args, timeout_s=10.0) == name


def test_many_hosts():
    with Lab(Topology.chain(16, LinkSpec(rate_mbit=10.0))) as lab:
        assert len(lab.info["hosts"]) == 16
        assert len(lab.loopback()) == 16


def fake_tc(tmp_path, monkeypatch, script_text):
    real = shutil.which("tc", path=f"{os.environ['PATH']}:{tools.SYSTEM_PATH}")
    fake = tmp_path / "tc"
    fake.write_text(script_text.format(real=real))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ("s/rate 100000000bit/rate 90000000bit/", "rate is 90Mbit, asked for 100000000bit"),
        ("s/cburst 1600b/cburst 65536b/", "cburst is 6"),
        ("s/bfifo limit 1250000/bfifo limit 3000/", "bfifo limit 3000, asked for bfifo limit 1250000"),
        ("/^filter/d", "no filter sends 10.77.0.2"),
        ("s/default fff/default 11/", "default class is 0x11"),
        ("s/^qdisc add dev eth0 root.*/qdisc add dev eth0 root handle 1: prio/", "failed with status"),
    ],
)
def test_a_setting_that_did_not_take_is_refused(tmp_path, monkeypatch, edit, said):
    fake_tc(
        tmp_path, monkeypatch, f"#!/bin/sh\nif [ \"$1\" = -batch ]; then sed '{edit}' | {{real}} -batch -\n"
        'else exec {real} "$@"; fi\n'
    )  # fmt: skip
    with pytest.raises(NetemError) as error, Lab(HUNDRED):
        pass
    assert said in str(error.value)


def test_a_tc_that_does_nothing_is_refused(tmp_path, monkeypatch):
    fake_tc(tmp_path, monkeypatch, '#!/bin/sh\n[ "$1" = -batch ] && exit 0\nexec {real} "$@"\n')
    with pytest.raises(NetemError, match="asked for htb"), Lab(HUNDRED):
        pass


def test_no_tc_names_the_package(monkeypatch):
    monkeypatch.setattr(tools, "SYSTEM_PATH", "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NetemError, match="install the package iproute2"), Lab(HUNDRED):
        pass
    assert [check.name for check in probe.checks() if not check.ok] == ["ip", "tc"]


@pytest.mark.parametrize(
    "link",
    [LinkSpec(delay_ms=5.0), LinkSpec(delay_ms=5.0, jitter_ms=1.0), LinkSpec(loss_pct=1.0)],
)
def test_delay_jitter_and_loss_are_refused_not_ignored(link):
    with (
        pytest.raises(NetemError, match="asks for delay, jitter or loss") as error,
        Lab(Topology.mesh(2, link)),
    ):
        pass
    assert "sch_netem" in str(error.value)
    assert "set delay_ms, jitter_ms and loss_pct to 0" in str(error.value)


def test_an_unknown_congestion_control_is_refused():
    topology = Topology.mesh(2, LinkSpec(congestion="nonsense"))
    with pytest.raises(NetemError, match="nonsense"), Lab(topology):
        pass


def test_a_lab_that_is_late_says_so(tmp_path, monkeypatch):
    fake_tc(tmp_path, monkeypatch, '#!/bin/sh\nsleep 1\nexec {real} "$@"\n')
    with pytest.raises(NetemError, match=r"not up within 0\.3 s"), Lab(HUNDRED, limit_s=0.3):
        pass


def identity(control):
    return [os.getuid(), Path("/proc/self/uid_map").read_text().split(), os.getpid()]


def as_nobody(folder, pipe):
    """Everything an ordinary user may do: a whole lab, a transfer, a log of one's own."""
    result = {}
    try:
        os.chdir("/")
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            # A change of uid, unlike a login, leaves /proc/self to root.
            ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
        uid = os.getuid()
        with Lab(HUNDRED) as lab:
            counted, counters = transfer(lab, ("sink", "source"), 100_000)
            lab.spawn("log", 0, f"{HERE}:over_loopback", {}, log=Path(folder, "log"))
            assert lab.event(10.0).status == 0
            result = {
                "uid": uid,
                "inside": lab.call(0, f"{HERE}:identity", {}, timeout_s=10.0),
                "user_namespace": lab.info["user_namespace"],
                "bytes": by_pair(counters)[0, 1]["bytes"],
                "counted": counted["sent"] + HEADER_BYTES * counted["segments"] + SYN_EXTRA_BYTES,
            }
        result["probe"] = [check.name for check in probe.checks() if check.required and not check.ok]
    except BaseException:
        result["error"] = traceback.format_exc()
    os.write(pipe, json.dumps(result).encode())
    os._exit(0)


def test_an_ordinary_user_needs_no_root():
    folder = tempfile.mkdtemp()
    os.chmod(folder, 0o777)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        as_nobody(folder, writing)
    os.close(writing)
    with open(reading) as pipe:
        result = json.loads(pipe.read())
    os.waitpid(pid, 0)
    assert "error" not in result, result["error"]
    assert result["uid"] != 0
    assert result["user_namespace"]
    assert result["inside"][:2] == [0, ["0", str(result["uid"]), "1"]]
    assert result["bytes"] == result["counted"] > 100_000
    assert result["probe"] == []
    assert Path(folder, "log").exists()
    shutil.rmtree(folder)


def test_root_without_the_capability_is_told_so():
    if os.geteuid() != 0:
        pytest.skip("only root can give a capability up")
    program = (
        "from thinpipe.netem.lab import *; from thinpipe.netem.link import *\n"
        "from thinpipe.netem import probe\n"
        "try: Lab(Topology.mesh(2, LinkSpec())).__enter__()\n"
        "except Exception as e: print(type(e).__name__, e)\n"
        "print([c.name for c in probe.checks() if not c.ok])\n"
    )
    argv = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", sys.executable, "-c", program]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    assert "NetemError private namespaces are refused" in done.stdout
    assert "--privileged" in done.stdout
    assert "['namespaces']" in done.stdout


def test_probe_finds_what_labs_need():
    found = {check.name: check for check in probe.checks()}
    assert [name for name, check in found.items() if check.required and not check.ok] == []
    assert {"kernel", "ip", "tc", "namespaces", "veth", "htb", "u32", "fifo", "netem", "lab"} <= set(found)
    assert all(check.ok or check.remedy for check in found.values())
    assert not found["netem"].required


def run_script(control, path, steps, state):
    """Run a host's script step by step in this host; returns [(status, said, root qdisc, mismatches)]."""
    topology, done = HUNDRED, []
    addresses = ["10.77.0.1", "10.77.0.2"]
    os.environ["THINPIPE_STATE"] = state
    for step in steps:
        ran = subprocess.run(["sh", path, step], capture_output=True, text=True, timeout=20, check=False)
        effective = shaping.read_back("eth0")
        wrong = qdisc.compare(qdisc.plan(topology, 0), effective, addresses)
        root = next((q for q in effective.qdiscs if q.get("root")), None)
        size = tools.run_json(["ip", "-j", "-d", "link", "show", "dev", "eth0"])[0]["gso_max_size"]
        shown = None if root is None else [root["kind"], root.get("options"), size]
        done.append([ran.returncode, ran.stdout + ran.stderr, shown, wrong])
    return done


def test_a_hosts_script_applies_and_reverts(tmp_path):
    path = tmp_path / "h0.sh"
    path.write_text(script.render(HUNDRED, 0, addresses=["10.77.0.1", "10.77.0.2"]))
    state = str(tmp_path / "state")
    with Lab(Topology.mesh(2, LinkSpec())) as lab:
        steps = ["show", "apply", "apply", "show", "revert", "revert", "nonsense"]
        args = {"path": str(path), "steps": steps, "state": state}
        before, applied, again, shown, reverted, twice, wrong = lab.call(0, f"{HERE}:run_script", args, timeout_s=30.0)
    assert before[2] == ["pfifo", {"limit": 10000}, 65536]
    assert applied[0] == 0, applied[1]
    assert applied[2][0] == "htb"
    assert applied[2][2] == 12500
    assert applied[3] == []
    assert "95.64 Mbit" in applied[1]
    assert again[0] == 1
    assert "revert' first" in again[1]
    assert again[3] == []
    assert "class htb 1:11" in shown[1]
    assert reverted[0] == 0, reverted[1]
    assert reverted[2] == before[2]
    assert twice[0] == 1
    assert "nothing was applied" in twice[1]
    assert wrong[0] == 2
    assert not Path(state).exists()


def test_a_hosts_script_that_fails_half_way_puts_the_old_qdisc_back(tmp_path):
    text = script.render(HUNDRED, 0, addresses=["10.77.0.1", "10.77.0.2"])
    path = tmp_path / "h0.sh"
    path.write_text(text.replace("bfifo limit 1250000", "bfifo limit nonsense"))
    with Lab(Topology.mesh(2, LinkSpec())) as lab:
        args = {"path": str(path), "steps": ["apply"], "state": str(tmp_path / "state")}
        ((status, said, root, _),) = lab.call(0, f"{HERE}:run_script", args, timeout_s=30.0)
    assert status != 0
    assert "nonsense" in said
    assert root == ["pfifo", {"limit": 10000}, 65536]


def test_a_hosts_script_leaves_a_classful_root_alone(tmp_path):
    path = tmp_path / "h0.sh"
    path.write_text(script.render(HUNDRED, 0, addresses=["10.77.0.1", "10.77.0.2"]))
    with Lab(Topology.mesh(2, LinkSpec(rate_mbit=10.0))) as lab:
        args = {"path": str(path), "steps": ["apply"], "state": str(tmp_path / "state")}
        ((status, said, root, _),) = lab.call(0, f"{HERE}:run_script", args, timeout_s=30.0)
    assert status == 1
    assert "classes of its own" in said
    assert root[0] == "htb"


def test_capacity_is_more_than_a_gigabit():
    assert calibrate.capacity_mbit(30.0) > 1000
