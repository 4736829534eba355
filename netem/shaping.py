"""Shape one host's interface, read back what is in force, refuse if it is not what was asked for.

Acts on the network namespace of the calling thread; the texts come from qdisc and topology.
"""

from __future__ import annotations

from typing import Any

from thinpipe.netem import qdisc, tools, topology
from thinpipe.netem.errors import NetemError
from thinpipe.netem.topology import INTERFACE, Topology


def check_backend(wanted: Topology) -> None:
    """Refuse delay, jitter and loss, which nothing here can do yet. Call where `lo` may be changed for a
    moment."""
    impaired = [pair for pair, link in wanted.links.items() if link.impaired]
    if not impaired:
        return
    source, destination = impaired[0]
    asked = f"link {wanted.hosts[source]} -> {wanted.hosts[destination]} asks for delay, jitter or loss"
    remedy = "set delay_ms, jitter_ms and loss_pct to 0"
    if kernel_has_netem():
        raise NetemError(f"{asked}; this kernel has sch_netem, but using it is not built yet: {remedy}")
    raise NetemError(
        f"{asked}, but this kernel has no sch_netem and there is no other backend yet: {remedy}, or use a "
        "kernel with CONFIG_NET_SCH_NETEM (package linux-modules-extra or kernel-modules-extra)"
    )


def kernel_has_netem() -> bool:
    """Found by doing: a netem qdisc on this namespace's lo, removed again."""
    try:
        tools.run(["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"])
    except NetemError as error:
        if "kind is unknown" in str(error):
            return False
        raise
    tools.run(["tc", "qdisc", "del", "dev", "lo", "root"])
    return True


def apply(wanted: Topology, host: int) -> dict[str, Any]:
    """Configure this namespace as `host`: addresses, routes, shaping. Returns what is in force, as plain
    data.

    Raises NetemError naming every setting that reads back otherwise than asked.
    """
    tools.run(["ip", "-batch", "-"], topology.host_commands(wanted, host))
    tools.run(["tc", "-batch", "-"], qdisc.tc_commands(wanted, host))
    links = tools.run_json(["ip", "-j", "-d", "link", "show", "dev", INTERFACE])
    interface = topology.parse_interface(links, tools.run_json(["ip", "-j", "route", "show"]))
    effective = read_back(INTERFACE)
    addresses = [wanted.address(i) for i in range(len(wanted.hosts))]
    wrong = topology.compare_interface(wanted, host, interface)
    wrong += [f"{wanted.hosts[host]}: {text}" for text in qdisc.compare(qdisc.plan(wanted, host), effective, addresses)]
    if wrong:
        raise NetemError(
            f"the network is not what was asked for: {'; '.join(wrong)}. Nothing was run; check which "
            "`tc` and `ip` are first in PATH and their version (tc -V)"
        )
    return {
        "interface": interface,
        "qdiscs": [{key: q.get(key) for key in ("kind", "handle", "parent", "options")} for q in effective.qdiscs],
        "classes": {f"1:{minor:x}": values for minor, values in sorted(effective.classes.items())},
        "filters": {address: f"1:{minor:x}" for address, minor in sorted(effective.filters.items())},
    }


def read_back(interface: str) -> qdisc.Effective:
    """What tc says is in force on an interface of this namespace."""
    return qdisc.Effective(
        qdiscs=tools.run_json(["tc", "-j", "qdisc", "show", "dev", interface]),
        classes=qdisc.parse_classes(tools.run(["tc", "-d", "class", "show", "dev", interface])),
        filters=qdisc.parse_filters(tools.run_json(["tc", "-j", "filter", "show", "dev", interface])),
    )


def counters(wanted: Topology, host: int) -> list[dict[str, Any]]:
    """Leaf counters of this namespace's interface, see qdisc.parse_counters, each with `host`."""
    qdiscs = tools.run_json(["tc", "-s", "-j", "qdisc", "show", "dev", INTERFACE])
    classes = qdisc.parse_classes(tools.run(["tc", "-s", "class", "show", "dev", INTERFACE]))
    found = qdisc.parse_counters(qdisc.plan(wanted, host), qdiscs, classes)
    return [{"host": host, **counter} for counter in found]
