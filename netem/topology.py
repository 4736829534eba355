"""Topology: hosts, the links between them, and the text for `ip -batch` that makes them.

All hosts hang on one bridge, so every pair can talk. A link says what one ordered pair is like; a pair
without one is not limited (a rendezvous may use it, and its counter shows what did).

>>> Topology.chain(3, LinkSpec(rate_mbit=10.0)).address(2)
'10.77.0.3'
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from thinpipe.netem.errors import NetemError
from thinpipe.netem.link import LinkSpec, gso_bytes

INTERFACE = "eth0"
BRIDGE = "br0"
HOSTS_MAX = 250


@dataclass(frozen=True)
class Topology:
    """hosts: their names, index = number of the host. links: (source, destination) -> LinkSpec, by host
    number.

    Raises NetemError for unusable names, links to nowhere, or different MTUs (one bridge has one MTU).
    """

    hosts: tuple[str, ...]
    links: Mapping[tuple[int, int], LinkSpec]

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", tuple(self.hosts))
        object.__setattr__(self, "links", dict(sorted(self.links.items())))
        if not 1 <= len(self.hosts) <= HOSTS_MAX:
            raise NetemError(f"{len(self.hosts)} hosts asked for; a lab has 1 to {HOSTS_MAX}")
        for name in self.hosts:
            if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,14}", name):
                raise NetemError(f"host name {name!r}: use up to 15 of a-z, 0-9 and '-'")
        if len(set(self.hosts)) != len(self.hosts):
            raise NetemError(f"host names must differ: {', '.join(self.hosts)}")
        for source, destination in self.links:
            if source == destination or not {source, destination} <= set(range(len(self.hosts))):
                raise NetemError(
                    f"link {source} -> {destination}: must be two different hosts of 0..{len(self.hosts) - 1}"
                )
        if len(mtus := {link.mtu for link in self.links.values()}) > 1:
            raise NetemError(f"all links of a lab share one bridge and so one MTU; got {sorted(mtus)}")

    @classmethod
    def mesh(cls, n: int, link: LinkSpec) -> Topology:
        """n hosts, the same link between every ordered pair."""
        return cls._of(n, ((i, j) for i in range(n) for j in range(n) if i != j), link)

    @classmethod
    def chain(cls, n: int, link: LinkSpec) -> Topology:
        """n hosts in a row, the same link both ways between neighbours."""
        return cls._of(n, ((i, j) for i in range(n) for j in (i - 1, i + 1) if 0 <= j < n), link)

    @classmethod
    def star(cls, n: int, link: LinkSpec) -> Topology:
        """n hosts, the same link both ways between host 0 and each other host."""
        return cls._of(n, (pair for i in range(1, n) for pair in ((0, i), (i, 0))), link)

    @classmethod
    def matrix(cls, rates_mbit: Sequence[Sequence[float | None]], link: LinkSpec) -> Topology:
        """rates_mbit[source][destination] in Mbit, None = not limited; the rest from `link`. The diagonal is
        ignored."""
        n = len(rates_mbit)
        if any(len(row) != n for row in rates_mbit):
            raise NetemError(f"a matrix of rates must be square; got rows of {[len(row) for row in rates_mbit]}")
        links = {(i, j): replace(link, rate_mbit=rates_mbit[i][j]) for i in range(n) for j in range(n) if i != j}
        return cls(_names(n), links)

    @classmethod
    def _of(cls, n: int, pairs: Iterable[tuple[int, int]], link: LinkSpec) -> Topology:
        return cls(_names(n), dict.fromkeys(pairs, link))

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def id(self) -> str:
        """12 hex digits that name hosts and links: equal for equal topologies, in every process."""
        links = [[*pair, asdict(link)] for pair, link in self.links.items()]
        text = json.dumps([self.hosts, links], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def mtu(self) -> int:
        """Of every interface of the lab."""
        return next((link.mtu for link in self.links.values()), LinkSpec().mtu)

    def link(self, source: int, destination: int) -> LinkSpec:
        """The link of an ordered pair; not limited where none is named."""
        return self.links.get((source, destination)) or LinkSpec(mtu=self.mtu)

    def peers(self, host: int) -> list[int]:
        """All other hosts."""
        return [i for i in range(len(self.hosts)) if i != host]

    def address(self, host: int) -> str:
        """IPv4 address of a host's only interface, in 10.77.0.0/24."""
        return f"10.77.0.{host + 1}"

    def mac(self, host: int) -> str:
        """Its (locally administered) Ethernet address, set by us so that neighbours can be static."""
        return f"02:00:0a:4d:00:{host + 1:02x}"

    def gso_max_size(self, host: int) -> int | None:
        """Chunk size of a host's interface, bytes: what its slowest link wants. None = leave the kernel's."""
        limited = [link for (source, _), link in self.links.items() if source == host and link.limited]
        return min((gso_bytes(link) for link in limited), default=None)


def _names(n: int) -> tuple[str, ...]:
    return tuple(f"h{i}" for i in range(n))


def ip_commands(topology: Topology) -> str:
    """Text for `ip -batch`, run in the switch's namespace: hosts, bridge, and a veth pair from the one to the
    other."""
    mtu = topology.mtu
    lines = [f"netns add {name}" for name in topology.hosts]
    lines += [f"link add {BRIDGE} type bridge stp_state 0 mcast_snooping 0", f"link set dev {BRIDGE} up"]
    for i, name in enumerate(topology.hosts):
        lines += [
            f"link add p{i} mtu {mtu} type veth peer name {INTERFACE} mtu {mtu} address {topology.mac(i)} netns {name}",
            f"link set dev p{i} master {BRIDGE} up",
        ]
    return "\n".join(lines) + "\n"


def host_commands(topology: Topology, host: int) -> str:
    """Text for `ip -batch`, run in one host's namespace.

    Congestion control goes by route: a namespace cannot set the sysctl, an ordinary user neither. Neighbours
    are static so that no message waits for an address to be resolved.
    """
    own = topology.address(host)
    lines = ["link set dev lo up"]
    if (gso := topology.gso_max_size(host)) is not None:
        lines.append(f"link set dev {INTERFACE} gso_max_size {gso}")
    lines += [f"address add {own}/24 dev {INTERFACE}", f"link set dev {INTERFACE} up"]
    for peer in topology.peers(host):
        address, congestion = topology.address(peer), topology.link(host, peer).congestion
        lines += [
            f"route replace {address}/32 dev {INTERFACE} proto static scope link src {own} congctl {congestion}",
            f"neigh replace {address} lladdr {topology.mac(peer)} dev {INTERFACE} nud permanent",
        ]
    return "\n".join(lines) + "\n"


def parse_interface(links: list[dict[str, Any]], routes: list[dict[str, Any]]) -> dict[str, Any]:
    """What `ip -j -d link show dev eth0` and `ip -j route show` say about a host: mtu, gso_max_size, state,
    routes."""
    congestion = {
        route["dst"]: next((m["congestion"] for m in route.get("metrics", []) if "congestion" in m), None)
        for route in routes
    }
    (link,) = links
    return {
        "mtu": link["mtu"],
        "gso_max_size": link["gso_max_size"],
        "up": "UP" in link["flags"],
        "congestion": congestion,
    }


def compare_interface(topology: Topology, host: int, effective: dict[str, Any]) -> list[str]:
    """Mismatches between what a host's interface should be and `parse_interface` of what it is; empty = as
    asked."""
    name, wrong = topology.hosts[host], []
    wanted = {"mtu": topology.mtu, "up": True, "gso_max_size": topology.gso_max_size(host)}
    for key, value in wanted.items():
        if value is not None and effective[key] != value:
            wrong.append(f"{name}: {key} is {effective[key]}, asked for {value}")
    for peer in topology.peers(host):
        asked, got = topology.link(host, peer).congestion, effective["congestion"].get(topology.address(peer))
        if asked != got:
            wrong.append(f"{name} -> {topology.hosts[peer]}: congestion control is {got}, asked for {asked}")
    return wrong
