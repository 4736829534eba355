"""The lab's tc text as a shell script for a real host."""

from __future__ import annotations

import ipaddress
import re
import shlex

from thinpipe.netem import qdisc
from thinpipe.netem.errors import NetemError
from thinpipe.netem.link import expected_goodput_mbit
from thinpipe.netem.topology import INTERFACE, Topology

_TEMPLATE = """\
#!/bin/sh
# thinpipe: shape what host {name} (number {host}, {own}) sends through {interface}.
# Topology {id}.
#
#   sh {name}.sh apply     shape; the root qdisc there was is kept in $STATE
#   sh {name}.sh revert    take the shaping away and put that root qdisc back
#   sh {name}.sh show      what is in force, with counters
#
# tc sees only traffic of the kernel's own network stack. RDMA, SR-IOV and NCCL's InfiniBand transport pass it
# by: set NCCL_IB_DISABLE=1, NCCL_SOCKET_IFNAME={interface} and GLOO_SOCKET_IFNAME={interface}. Congestion
# control, MTU and tcp_slow_start_after_idle are left as they are: record them.
set -eu

IF={interface}
STATE=${{THINPIPE_STATE:-/run/thinpipe-$IF.qdisc}}

fail() {{ echo "$0: $*" >&2; exit 1; }}
root_line() {{ tc qdisc show dev "$IF" root | head -n 1; }}
gso_size() {{ ip -d link show dev "$IF" | sed -n 's/.* gso_max_size \\([0-9]*\\).*/\\1/p'; }}

restore() {{
    tc qdisc del dev "$IF" root 2>/dev/null || true
    ip link set dev "$IF" gso_max_size "$(sed -n 2p "$STATE")"
    old=$(sed -n 1p "$STATE")
    case "$old" in
        ''|'qdisc '*' 0: root'*) ;;  # the kernel's default: it comes back by itself
        *)
            # "qdisc KIND HANDLE: root refcnt N OPTIONS"; tc prints 10p for packets but does not read it.
            set -- $old
            kind=$2 handle=$3
            options=$(echo "$old" | sed 's/.* root//; s/ refcnt [0-9]*//' \\
                | sed 's/\\([0-9]\\)p\\( \\|$\\)/\\1\\2/g')
            tc qdisc add dev "$IF" root handle "$handle" "$kind" $options \\
                || fail "could not put back: $old (do it by hand, then remove $STATE)"
            ;;
    esac
    rm -f "$STATE"
}}

apply() {{
    [ ! -e "$STATE" ] || fail "$STATE exists: shaped already. Run '$0 revert' first"
    # A classful root cannot be saved as one line, so it is not taken away.
    if tc qdisc show dev "$IF" | grep -v ' root ' | grep -v '^qdisc [a-z_]* 0: ' \\
        | grep -qv '^qdisc \\(ingress\\|clsact\\) '; then
        fail "$IF has a root qdisc with classes of its own; remove it first (tc qdisc show dev $IF)"
    fi
    {{ root_line; gso_size; }} >"$STATE"
    trap restore EXIT
    case "$(sed -n 1p "$STATE")" in ''|'qdisc '*' 0: root'*) ;; *) tc qdisc del dev "$IF" root ;; esac
{gso}    tc -batch - <<'END'
{commands}END
    trap - EXIT
    echo "$IF is shaped. That is not proof: measure it (iperf3 -s there, iperf3 -c ADDRESS here). Expect"
    cat <<'END'
{expected}END
}}

[ "$(id -u)" -eq 0 ] || fail "only root may change qdiscs: run 'sudo sh $0 ${{1:-}}'"
command -v tc >/dev/null || fail "tc is missing: install the package iproute2"
command -v ip >/dev/null || fail "ip is missing: install the package iproute2"
ip link show dev "$IF" >/dev/null 2>&1 || fail "there is no interface $IF here (ip -br link)"

case "${{1:-}}" in
    apply) apply ;;
    revert)
        [ -e "$STATE" ] || fail "$STATE is missing: nothing was applied"
        restore
        echo "$IF is as it was."
        ;;
    show)
        tc -s -d qdisc show dev "$IF"
        tc -s -d class show dev "$IF"
        tc filter show dev "$IF"
        ;;
    *) echo "usage: $0 apply|revert|show" >&2; exit 2 ;;
esac
"""


def render(topology: Topology, host: int, *, interface: str = INTERFACE, addresses: list[str]) -> str:
    """A POSIX shell script that shapes host number `host` of a real cluster: the same tc text the lab runs.

    addresses: IPv4 address of each host, by number, as seen on `interface`. Run as root with apply, revert or
    show. Raises NetemError for wrong addresses or interface, and for links with delay, jitter or loss (not
    built yet).
    """
    _check(topology, host, interface, addresses)
    gso = topology.gso_max_size(host)
    return _TEMPLATE.format(
        name=topology.hosts[host],
        host=host,
        own=addresses[host],
        id=topology.id,
        interface=shlex.quote(interface),
        gso="" if gso is None else f'    ip link set dev "$IF" gso_max_size {gso}\n',
        commands=qdisc.tc_commands(topology, host, interface=interface, addresses=addresses),
        expected="".join(_expected(topology, host, peer, addresses[peer]) for peer in topology.peers(host)),
    )


def _check(topology: Topology, host: int, interface: str, addresses: list[str]) -> None:
    if not 0 <= host < len(topology.hosts):
        raise NetemError(f"host {host} is not one of 0..{len(topology.hosts) - 1}")
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,15}", interface):
        raise NetemError(f"interface {interface!r} is not a name (see `ip -br link` on the host)")
    if len(addresses) != len(topology.hosts) or len(set(addresses)) != len(addresses):
        raise NetemError(f"{len(topology.hosts)} different addresses are needed, one for each host; got {addresses}")
    for address in addresses:
        try:
            ipaddress.IPv4Address(address)
        except ValueError as error:
            raise NetemError(f"address {address!r} is not IPv4: {error}") from None
    for (source, destination), link in topology.links.items():
        if source == host and link.impaired:
            raise NetemError(
                f"{source} -> {destination} asks for delay, jitter or loss; scripts cannot set these yet: use 0"
            )


def _expected(topology: Topology, host: int, peer: int, address: str) -> str:
    link = topology.link(host, peer)
    goodput = expected_goodput_mbit(link)
    rate = "no limit" if goodput is None else f"{goodput:.4g} Mbit of TCP payload ({link.rate_mbit:g} at layer 2)"
    return f"  to {address}: {rate}\n"
