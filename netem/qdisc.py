"""LinkSpec -> text for `tc -batch`, and back from what tc prints. Pure.

    root htb 1:                       where no link of the host is limited: root pfifo 1:, for its counters
      |- 1:10 rate, ceil, burst ...   one class per destination (0x10 + its number), leaf 10: bfifo
      |- 1:11 ...                     a destination without a limit: RATE_UNLIMITED_BIT, leaf pfifo
      `- 1:fff                        everything no filter matches, not limited

Classes hang under the root, not under a common parent: HTB lets children with a `rate` above their parent's
send anyway, so a parent would only look like a cap. Why two buckets: `burst` (4 ms of line rate) makes up for
late timers in the long run, `cburst` (50 us) with ceil = 1.02 rate keeps a message after an idle gap from
passing for free. Numbers are integers in `bit` and `b`: tc's larger units are ambiguous. Source: tc-htb(8),
tc-u32(8), tc-bfifo(8).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from thinpipe.netem.errors import NetemError
from thinpipe.netem.link import LinkSpec, bytes_per_s, frame_bytes, gso_bytes, queue_bytes
from thinpipe.netem.topology import INTERFACE, Topology

BURST_S = 4e-3
CBURST_S = 50e-6
BURST_BYTES_MIN = 1600
CEIL_FACTOR = 1.02
QUANTUM_BYTES_MAX = 60_000
RATE_UNLIMITED_BIT = 100_000_000_000
PFIFO_PACKETS = 10_000
CLASS_BASE = 0x10
CLASS_DEFAULT = 0xFFF

# tc keeps a burst as whole microseconds at the class's rate, and rounds down once more when it prints it.
BURST_ROUNDING_S = 2e-6


@dataclass(frozen=True)
class ClassPlan:
    """One HTB class and its leaf. destination: number of the host, None = the default class. Sizes in bytes;
    leaf_limit in bytes for bfifo, in packets for pfifo."""

    minor: int
    destination: int | None
    rate_bit: int
    ceil_bit: int
    burst_bytes: int
    cburst_bytes: int
    quantum_bytes: int
    leaf_kind: str
    leaf_limit: int


@dataclass(frozen=True)
class HostPlan:
    """What one host's interface gets: classes, or none where nothing is limited (a plain root pfifo)."""

    classes: tuple[ClassPlan, ...]


@dataclass(frozen=True)
class Effective:
    """What tc says is in force on one interface: qdiscs and filters from JSON, classes from text
    (`parse_*`)."""

    qdiscs: list[dict[str, Any]]
    classes: dict[int, dict[str, Any]]
    filters: dict[str, int]


def plan(topology: Topology, host: int) -> HostPlan:
    """The classes of one host."""
    links = {peer: topology.link(host, peer) for peer in topology.peers(host)}
    if not any(link.limited for link in links.values()):
        return HostPlan(())
    classes = [
        _limited(CLASS_BASE + peer, peer, link) if link.limited else _unlimited(CLASS_BASE + peer, peer)
        for peer, link in links.items()
    ]
    return HostPlan((*classes, _unlimited(CLASS_DEFAULT, None)))


def _limited(minor: int, destination: int, link: LinkSpec) -> ClassPlan:
    speed = bytes_per_s(link)
    return ClassPlan(
        minor=minor,
        destination=destination,
        rate_bit=_whole_bytes(speed * 8),
        ceil_bit=_whole_bytes(speed * 8 * CEIL_FACTOR),
        burst_bytes=max(BURST_BYTES_MIN, int(speed * BURST_S)),
        cburst_bytes=max(BURST_BYTES_MIN, int(speed * CBURST_S)),
        quantum_bytes=max(2 * frame_bytes(link), min(gso_bytes(link), QUANTUM_BYTES_MAX)),
        # A pfifo would count chunks of any size, so queue_ms would mean nothing.
        leaf_kind="bfifo",
        leaf_limit=queue_bytes(link),
    )


def _unlimited(minor: int, destination: int | None) -> ClassPlan:
    burst = int(RATE_UNLIMITED_BIT / 8 * BURST_S)
    return ClassPlan(
        minor=minor,
        destination=destination,
        rate_bit=RATE_UNLIMITED_BIT,
        ceil_bit=RATE_UNLIMITED_BIT,
        burst_bytes=burst,
        cburst_bytes=burst,
        quantum_bytes=QUANTUM_BYTES_MAX,
        leaf_kind="pfifo",
        leaf_limit=PFIFO_PACKETS,
    )


def _whole_bytes(bits: float) -> int:
    """The kernel keeps bytes a second: anything finer would read back as another rate."""
    return round(bits / 8) * 8


def tc_commands(
    topology: Topology, host: int, *, interface: str = INTERFACE, addresses: list[str] | None = None
) -> str:
    """Text for `tc -batch` that shapes what `host` sends. addresses: of all hosts, default the lab's own."""
    classes = plan(topology, host).classes
    if not classes:
        return f"qdisc add dev {interface} root handle 1: pfifo limit {PFIFO_PACKETS}\n"
    lines = [f"qdisc add dev {interface} root handle 1: htb default {CLASS_DEFAULT:x}"]
    for c in classes:
        lines += [
            f"class add dev {interface} parent 1: classid 1:{c.minor:x} htb "
            f"rate {c.rate_bit}bit ceil {c.ceil_bit}bit "
            f"burst {c.burst_bytes}b cburst {c.cburst_bytes}b quantum {c.quantum_bytes}",
            f"qdisc add dev {interface} parent 1:{c.minor:x} handle {c.minor:x}: {c.leaf_kind} limit {c.leaf_limit}",
        ]
        if c.destination is not None:
            address = addresses[c.destination] if addresses else topology.address(c.destination)
            lines.append(
                f"filter add dev {interface} parent 1: protocol ip prio 1 u32 "
                f"match ip dst {address}/32 flowid 1:{c.minor:x}"
            )
    return "\n".join(lines) + "\n"


def parse_rate(text: str) -> tuple[int, int]:
    """Lowest and highest rate, bit/s, that tc prints as `text` ('102Mbit': it cuts digits off)."""
    match = re.fullmatch(r"(\d+)([KMGT]?)bit", text)
    if match is None:
        raise NetemError(f"tc printed the rate {text!r}, which is not understood; report its version (tc -V)")
    unit = 1000 ** " KMGT".index(match[2] or " ")
    return int(match[1]) * unit, (int(match[1]) + 1) * unit - 1


def parse_size(text: str) -> tuple[int, int]:
    """Smallest and largest size, bytes, that tc prints as `text` ('49Kb': it rounds near multiples of
    1024)."""
    match = re.fullmatch(r"(\d+)([KM]?)b", text)
    if match is None:
        raise NetemError(f"tc printed the size {text!r}, which is not understood; report its version (tc -V)")
    unit, slack = {"": (1, 0), "K": (1024, 15), "M": (1024**2, 1023)}[match[2]]
    return int(match[1]) * unit - slack, int(match[1]) * unit + slack


def parse_classes(text: str) -> dict[int, dict[str, Any]]:
    """minor -> rate, ceil, burst, cburst, quantum as printed, and overlimits (with -s), of `tc -d -s class
    show`.

    Text, because some releases of iproute2 print HTB's classes as text even when asked for JSON.
    """
    found: dict[int, dict[str, Any]] = {}
    for block in re.split(r"(?m)^(?=class )", text):
        head = re.match(r"class htb 1:([0-9a-f]+) ", block)
        if head is None:
            continue
        words = block.split("\n", 1)[0].split()
        values: dict[str, Any] = {
            key: words[words.index(key) + 1].split("/")[0]
            for key in ("rate", "ceil", "burst", "cburst", "quantum")
            if key in words
        }
        if sent := re.search(r"overlimits (\d+)", block):
            values["overlimits"] = int(sent[1])
        found[int(head[1], 16)] = values
    return found


def parse_filters(items: list[dict[str, Any]]) -> dict[str, int]:
    """Destination address -> minor of its class, from `tc -j filter show`. Filters of other shapes are left
    out."""
    found = {}
    for item in items:
        options = item.get("options", {})
        match = options.get("match", {})
        if match.get("mask") == "ffffffff" and match.get("off") == 16 and "flowid" in options:
            octets = int(match["value"], 16).to_bytes(4, "big")
            found[".".join(map(str, octets))] = int(options["flowid"].rpartition(":")[2], 16)
    return found


def compare(requested: HostPlan, effective: Effective, addresses: list[str]) -> list[str]:
    """Mismatches between plan and what is in force, each as one sentence; empty = as asked."""
    roots = [q["kind"] for q in effective.qdiscs if q.get("root")]
    if not requested.classes:
        return [] if roots == ["pfifo"] else [f"root qdisc is {roots}, asked for pfifo"]
    if roots != ["htb"]:
        return [f"root qdisc is {roots}, asked for htb"]
    wrong = []
    root = next(q for q in effective.qdiscs if q.get("root"))
    if int(str(root["options"]["default"]), 16) != CLASS_DEFAULT:
        wrong.append(f"default class is {root['options']['default']}, asked for {CLASS_DEFAULT:#x}")
    if extra := sorted(set(effective.classes) - {c.minor for c in requested.classes}):
        wrong.append(f"classes {[f'1:{minor:x}' for minor in extra]} were not asked for")
    for c in requested.classes:
        wrong += _compare_class(c, effective.classes.get(c.minor))
        wrong += _compare_leaf(c, effective.qdiscs)
        if c.destination is not None and effective.filters.get(addresses[c.destination]) != c.minor:
            wrong.append(f"no filter sends {addresses[c.destination]} to class 1:{c.minor:x}")
    return wrong


def _compare_class(asked: ClassPlan, got: dict[str, Any] | None) -> list[str]:
    name = f"class 1:{asked.minor:x}"
    if got is None:
        return [f"{name} is missing"]
    wrong = []
    for key, rate in (("rate", asked.rate_bit), ("ceil", asked.ceil_bit)):
        low, high = parse_rate(got[key])
        if not low <= rate <= high:
            wrong.append(f"{name}: {key} is {got[key]}, asked for {rate}bit")
    bursts = (("burst", asked.burst_bytes, asked.rate_bit), ("cburst", asked.cburst_bytes, asked.ceil_bit))
    for key, size, rate in bursts:
        low, high = parse_size(got[key])
        if low > size or high < size - BURST_ROUNDING_S * rate / 8 - 1:
            wrong.append(f"{name}: {key} is {got[key]}, asked for {size}b")
    if int(got["quantum"]) != asked.quantum_bytes:
        wrong.append(f"{name}: quantum is {got['quantum']}, asked for {asked.quantum_bytes}")
    return wrong


def _compare_leaf(asked: ClassPlan, qdiscs: list[dict[str, Any]]) -> list[str]:
    name = f"1:{asked.minor:x}"
    leaf = next((q for q in qdiscs if q.get("parent") == name), None)
    if leaf is None:
        return [f"class {name} has no leaf qdisc"]
    got = (leaf["kind"], leaf.get("options", {}).get("limit"))
    want = (asked.leaf_kind, asked.leaf_limit)
    return (
        [] if got == want else [f"leaf of class {name} is {got[0]} limit {got[1]}, asked for {want[0]} limit {want[1]}"]
    )


def parse_counters(
    requested: HostPlan, qdiscs: list[dict[str, Any]], classes: dict[int, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Leaf counters of one host: destination, bytes, packets, drops, overlimits, backlog (bytes queued now).

    From `tc -s -j qdisc show`. overlimits are those of the class (how often its rate held a packet back): a
    leaf has none of its own. Where nothing is limited there is one entry, destination None.
    """
    if not requested.classes:
        root = next(q for q in qdiscs if q.get("root"))
        return [_counter(root, None, root["overlimits"])]
    by_parent = {q.get("parent"): q for q in qdiscs}
    return [
        _counter(by_parent[f"1:{c.minor:x}"], c.destination, classes[c.minor]["overlimits"]) for c in requested.classes
    ]


def _counter(qdisc: dict[str, Any], destination: int | None, overlimits: int) -> dict[str, Any]:
    values = {key: qdisc[key] for key in ("bytes", "packets", "drops", "backlog")}
    return {"destination": destination, **values, "overlimits": overlimits}
