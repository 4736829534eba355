"""Build the lab's network. Runs in PID 1 of a lab, whose own network namespace becomes the switch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from thinpipe.netem import qdisc, shaping, tools, topology
from thinpipe.netem.errors import NetemError
from thinpipe.netem.namespaces import inside
from thinpipe.netem.topology import INTERFACE, Topology

# Per namespace. Idle restart would put every message after a pause back into slow start; saved metrics would
# carry a connection's history to the next one; IPv6 would add its own packets to the counters.
SYSCTLS = {
    "net.ipv4.tcp_slow_start_after_idle": "0",
    "net.ipv4.tcp_no_metrics_save": "1",
    "net.ipv6.conf.all.disable_ipv6": "1",
    "net.ipv6.conf.default.disable_ipv6": "1",
}
# Not ours to set, but results depend on them.
SYSCTLS_RECORDED = ("net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem", "net.ipv4.tcp_timestamps", "net.ipv4.tcp_sack")


def build(wanted: Topology, *, user_namespace: bool) -> dict[str, Any]:
    """Bring hosts and links up, shaped and read back; returns the lab's info (see Lab.info). Raises
    NetemError."""
    shaping.check_backend(wanted)
    _set_sysctls()
    tools.run(["ip", "-batch", "-"], topology.ip_commands(wanted))
    effective = {}
    for host, name in enumerate(wanted.hosts):
        with inside(name):
            _set_sysctls()
            effective[name] = shaping.apply(wanted, host) | {"sysctl": _read_sysctls()}
    hosts = range(len(wanted.hosts))
    return {
        "topology": wanted.id,
        "hosts": [{"name": wanted.hosts[i], "address": wanted.address(i), "interface": INTERFACE} for i in hosts],
        "commands": {
            "ip": topology.ip_commands(wanted),
            "hosts": {wanted.hosts[i]: topology.host_commands(wanted, i) for i in hosts},
            "tc": {wanted.hosts[i]: qdisc.tc_commands(wanted, i) for i in hosts},
        },
        "effective": effective,
        "user_namespace": user_namespace,
        "kernel": os.uname().release,
        "iproute2": tools.run(["tc", "-V"]).strip().removeprefix("tc utility, "),
    }


def counters(wanted: Topology) -> list[dict[str, Any]]:
    """Leaf counters of all hosts."""
    found = []
    for host, name in enumerate(wanted.hosts):
        with inside(name):
            found += shaping.counters(wanted, host)
    return found


def loopback(wanted: Topology) -> list[dict[str, Any]]:
    """Bytes and packets that went over each host's loopback, which no link shapes."""
    found = []
    for host, name in enumerate(wanted.hosts):
        with inside(name):
            found.append({"host": host, **parse_loopback(Path("/proc/thread-self/net/dev").read_text())})
    return found


def parse_loopback(text: str) -> dict[str, int]:
    """bytes and packets sent over lo, from /proc/net/dev."""
    line = next(line for line in text.splitlines() if line.strip().startswith("lo:"))
    fields = line.partition(":")[2].split()
    return {"bytes": int(fields[8]), "packets": int(fields[9])}


def _sysctl_path(name: str) -> Path:
    return Path("/proc/sys", *name.split("."))


def _set_sysctls() -> None:
    for name, value in SYSCTLS.items():
        path = _sysctl_path(name)
        if name.startswith("net.ipv6.") and not path.exists():
            continue  # a kernel without IPv6 sends none
        try:
            path.write_text(value)
        except OSError as error:
            raise NetemError(f"{name} cannot be set to {value} in the lab's own namespace: {error}") from error
        if (got := path.read_text().strip()) != value:
            raise NetemError(f"{name} reads back as {got}, asked for {value}")


def _read_sysctls() -> dict[str, str]:
    paths = {name: _sysctl_path(name) for name in (*SYSCTLS, *SYSCTLS_RECORDED)}
    return {name: " ".join(path.read_text().split()) for name, path in paths.items() if path.exists()}
