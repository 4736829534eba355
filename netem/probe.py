"""What this kernel and user can do for a lab, found by doing it in throw-away namespaces."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from thinpipe.netem import shaping, tools
from thinpipe.netem.errors import NetemError
from thinpipe.netem.lab import Lab
from thinpipe.netem.link import LinkSpec
from thinpipe.netem.namespaces import launch
from thinpipe.netem.topology import Topology
from thinpipe.netem.wire import Connection

PROBE_LIMIT_S = 30.0


@dataclass(frozen=True)
class Check:
    """One finding. required: without it no lab works; otherwise it is only an option that is missing. remedy:
    what to do about it, empty when ok."""

    name: str
    ok: bool
    detail: str
    remedy: str
    required: bool = True


def checks() -> list[Check]:
    """All findings, the basic ones first; those that need namespaces are left out where there are none."""
    found = [_kernel(), *(_tool(name) for name in ("ip", "tc"))]
    if not all(check.ok for check in found):
        return found
    try:
        inner = _in_namespaces()
    except NetemError as error:
        return [
            *found,
            Check("namespaces", False, str(error), "see the detail: it names the setting to change"),
        ]
    found += [_namespaces(), *(Check(**item) for item in inner)]
    return [*found, _lab()]


def _kernel() -> Check:
    release = os.uname().release
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return Check("kernel", False, f"{release}: no pidfd ({error})", "use Linux 5.3 or later")
    return Check("kernel", True, f"{release}", "")


def _tool(name: str) -> Check:
    try:
        path = tools.find(name)
        return Check(name, True, f"{path}, {tools.run([name, '-V']).strip()}", "")
    except NetemError as error:
        return Check(name, False, str(error), "install the packages iproute2 and util-linux")


def _namespaces() -> Check:
    how = "as root" if os.geteuid() == 0 else f"by a user namespace, as uid {os.geteuid()}"
    return Check("namespaces", True, f"private net, mount and pid namespaces {how}", "")


def _in_namespaces() -> list[dict[str, Any]]:
    pid, sock = launch(_body)
    connection = Connection(sock)
    try:
        reply = connection.receive(PROBE_LIMIT_S)
    except (EOFError, TimeoutError) as error:
        raise NetemError(f"the probe in private namespaces gave no answer: {error}") from error
    finally:
        connection.shut()
        os.waitpid(pid, 0)
    if reply["event"] == "failed":
        raise NetemError(reply["reason"])
    return reply["checks"]


def _body(connection: Connection) -> None:
    """Runs as PID 1 of the throw-away namespaces; order matters: each step builds on those before."""
    module = "use a kernel built with {}, or load its module as root"
    steps: list[tuple[str, bool, Callable[[], str], str]] = [
        ("veth", True, _veth, module.format("CONFIG_VETH and CONFIG_BRIDGE")),
        ("htb", True, _htb, module.format("CONFIG_NET_SCH_HTB (modprobe sch_htb)")),
        ("u32", True, _u32, module.format("CONFIG_NET_CLS_U32 (modprobe cls_u32)")),
        ("fifo", True, _fifo, module.format("pfifo and bfifo (CONFIG_NET_SCHED)")),
        ("netem", False, _netem, module.format("CONFIG_NET_SCH_NETEM (modprobe sch_netem)")),
        ("congestion cubic", True, lambda: _congestion("cubic"), module.format("CONFIG_TCP_CONG_CUBIC")),
        ("congestion bbr", False, lambda: _congestion("bbr"), module.format("CONFIG_TCP_CONG_BBR")),
    ]
    found = []
    for name, required, step, remedy in steps:
        try:
            check = Check(name, True, step(), "", required)
        except NetemError as error:
            check = Check(name, False, str(error), remedy, required)
        found.append(asdict(check))
    connection.send({"event": "checks", "checks": found}, PROBE_LIMIT_S)


def _veth() -> str:
    batch = (
        "link add br0 type bridge\nlink add p0 type veth peer name eth0\nlink set p0 master br0 up\n"
        "link set eth0 gso_max_size 12500\naddress add 10.77.0.1/24 dev eth0\nlink set eth0 up\n"
    )
    tools.run(["ip", "-batch", "-"], batch)
    return "veth pair on a bridge, gso_max_size settable"


def _htb() -> str:
    tools.run(
        ["tc", "-batch", "-"],
        "qdisc add dev eth0 root handle 1: htb default fff\n"
        "class add dev eth0 parent 1: classid 1:11 htb rate 100000000bit ceil 102000000bit burst 50000b\n",
    )
    if 0x11 not in shaping.read_back("eth0").classes:
        raise NetemError("an HTB class was added but tc does not show it")
    return "class added and read back"


def _u32() -> str:
    tools.run(
        ["tc", "-batch", "-"],
        "filter add dev eth0 parent 1: protocol ip prio 1 u32 match ip dst 10.77.0.2/32 flowid 1:11\n",
    )
    if shaping.read_back("eth0").filters != {"10.77.0.2": 0x11}:
        raise NetemError("a u32 filter was added but tc does not show it")
    return "filter by destination added and read back"


def _fifo() -> str:
    tools.run(
        ["tc", "-batch", "-"],
        "qdisc add dev eth0 parent 1:11 handle 11: bfifo limit 125000\n"
        "qdisc replace dev lo root handle 1: pfifo limit 1000\n"
        "qdisc del dev lo root\n",
    )
    return "pfifo and bfifo added"


def _netem() -> str:
    if not shaping.kernel_has_netem():
        raise NetemError("this kernel has no sch_netem: links cannot have delay, jitter or loss")
    return "the kernel has it (delay, jitter and loss of links are not built yet)"


def _congestion(name: str) -> str:
    route = f"route replace 10.77.0.2/32 dev eth0 scope link congctl {name}\n"
    tools.run(["ip", "-batch", "-"], route)
    return "set by route"


def _lab() -> Check:
    start = time.monotonic()
    try:
        with Lab(Topology.mesh(2, LinkSpec(rate_mbit=100.0)), limit_s=PROBE_LIMIT_S):
            up = time.monotonic() - start
    except NetemError as error:
        return Check("lab", False, str(error), "see the detail, and the checks above")
    return Check("lab", True, f"two hosts with a link of 100 Mbit, up in {up:.2f} s, read back as asked", "")
