"""Links and topologies: what they allow, and what follows from them."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinpipe.netem.errors import NetemError
from thinpipe.netem.link import (
    PRESETS,
    LinkSpec,
    expected_goodput_mbit,
    gso_bytes,
    queue_bytes,
    segmented_bytes,
    wire_bytes,
    wire_time_s,
)
from thinpipe.netem.topology import (
    Topology,
    compare_interface,
    host_commands,
    ip_commands,
    parse_interface,
)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rate_mbit": 0}, "rate_mbit 0"),
        ({"rate_mbit": float("nan")}, "rate_mbit nan"),
        ({"rate_mbit": float("inf")}, "rate_mbit inf"),
        ({"rate_mbit": True}, "rate_mbit True"),
        ({"rate_mbit": "10"}, "rate_mbit '10'"),
        ({"rate_mbit": 1e6}, "must lie in 0.1..40000"),
        ({"mtu": 9001}, "mtu 9001"),
        ({"delay_ms": -1}, "delay_ms -1"),
        ({"jitter_ms": 1}, "jitter_ms 1"),
        ({"loss_pct": 100}, "loss_pct 100"),
        ({"congestion": "cubic; reboot"}, "'cubic; reboot' is not a name"),
        ({"rate_mbit": 10.0, "queue_ms": 1.0}, "set queue_ms to 5 or more"),
    ],
)
def test_impossible_links_are_refused(values, said):
    with pytest.raises(NetemError) as error:
        LinkSpec(**values)
    assert said in str(error.value)


def test_the_queue_that_the_message_names_is_accepted():
    LinkSpec(rate_mbit=10.0, queue_ms=5.0)


@pytest.mark.parametrize(
    ("link", "goodput"),
    [
        (LinkSpec(rate_mbit=100.0), 100 * 1448 / 1514),
        (LinkSpec(rate_mbit=100.0, mtu=9000), 100 * 8948 / 9014),
        (LinkSpec(), None),
    ],
)
def test_goodput_is_rate_less_headers(link, goodput):
    assert expected_goodput_mbit(link) == (None if goodput is None else pytest.approx(goodput))


def test_wire_time_counts_headers_of_started_segments_and_delay():
    assert wire_bytes(LinkSpec(), 1449) == 1449 + 2 * 66
    # docs/numbers.md, wire_bytes: a frame of 131136 B, and what gloo adds at both ends.
    assert segmented_bytes(131_136 + 144, 1500) == 137_286
    assert segmented_bytes(8948.5, 9000) == 8948.5 + 2 * 66, "of a mean, too"
    assert wire_time_s(LinkSpec(rate_mbit=8.0), 1448) == pytest.approx(1514e-6)
    assert wire_time_s(LinkSpec(delay_ms=7.0), 10**6) == pytest.approx(7e-3)


@given(st.floats(0.1, 40_000), st.integers(576, 9000))
def test_chunks_are_whole_frames_at_least_and_small_against_a_message(rate, mtu):
    size = gso_bytes(LinkSpec(rate_mbit=rate, mtu=mtu, queue_ms=60_000))
    assert 2 * (mtu + 14) <= size <= 65_536
    if rate <= 500 and mtu <= 8000:
        assert size <= 16_384
    assert size <= max(2 * (mtu + 14), rate * 125)


def test_queue_is_in_time_at_full_rate():
    assert queue_bytes(LinkSpec(rate_mbit=80.0, queue_ms=50.0)) == 500_000


def test_presets_are_links_and_wan_ones_name_their_round_trip():
    assert PRESETS["100mbit"].rate_mbit == 100
    assert PRESETS["wan-100mbit-20ms"].delay_ms == 10
    assert all(isinstance(link, LinkSpec) for link in PRESETS.values())


LINK = LinkSpec(rate_mbit=10.0)


@pytest.mark.parametrize(
    ("made", "pairs"),
    [
        (Topology.mesh(3, LINK), {(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)}),
        (Topology.chain(3, LINK), {(0, 1), (1, 0), (1, 2), (2, 1)}),
        (Topology.star(3, LINK), {(0, 1), (1, 0), (0, 2), (2, 0)}),
        (Topology.mesh(1, LINK), set()),
    ],
)
def test_shapes_of_topologies(made, pairs):
    assert set(made.links) == pairs
    assert set(made.links.values()) <= {LINK}


def test_matrix_sets_each_pair():
    made = Topology.matrix([[None, 10, 20], [30, None, 40], [None, 60, 0]], LinkSpec(queue_ms=50.0))
    assert made.link(0, 2) == LinkSpec(rate_mbit=20, queue_ms=50.0)
    assert made.link(1, 0).rate_mbit == 30
    assert not made.link(2, 0).limited
    assert len(made.links) == 6
    with pytest.raises(NetemError, match="square"):
        Topology.matrix([[None, 1.0]], LINK)


@pytest.mark.parametrize(
    ("hosts", "links", "said"),
    [
        ((), {}, "0 hosts"),
        (("a", "a"), {}, "must differ"),
        (("a b",), {}, "'a b'"),
        (("a", "b"), {(0, 2): LINK}, "0 -> 2"),
        (("a", "b"), {(0, 0): LINK}, "0 -> 0"),
        (("a", "b"), {(0, 1): LINK, (1, 0): LinkSpec(mtu=9000)}, "one MTU"),
    ],
)
def test_impossible_topologies_are_refused(hosts, links, said):
    with pytest.raises(NetemError) as error:
        Topology(hosts, links)
    assert said in str(error.value)


def test_topology_is_a_value():
    pairs = {(1, 0): LINK, (0, 1): LINK}
    one, other = Topology(("h0", "h1"), pairs), Topology.mesh(2, LINK)
    assert one == other
    assert hash(one) == hash(other)
    assert one.id == other.id == pickle.loads(pickle.dumps(one)).id
    assert one.id != Topology.mesh(2, LinkSpec(rate_mbit=10.5)).id
    pairs.clear()
    assert one.links


def test_ip_text():
    made = Topology.chain(2, LINK)
    assert ip_commands(made).splitlines() == [
        "netns add h0",
        "netns add h1",
        "link add br0 type bridge stp_state 0 mcast_snooping 0",
        "link set dev br0 up",
        "link add p0 mtu 1500 type veth peer name eth0 mtu 1500 address 02:00:0a:4d:00:01 netns h0",
        "link set dev p0 master br0 up",
        "link add p1 mtu 1500 type veth peer name eth0 mtu 1500 address 02:00:0a:4d:00:02 netns h1",
        "link set dev p1 master br0 up",
    ]
    assert host_commands(made, 1).splitlines() == [
        "link set dev lo up",
        "link set dev eth0 gso_max_size 3028",
        "address add 10.77.0.2/24 dev eth0",
        "link set dev eth0 up",
        "route replace 10.77.0.1/32 dev eth0 proto static scope link src 10.77.0.2 congctl cubic",
        "neigh replace 10.77.0.1 lladdr 02:00:0a:4d:00:01 dev eth0 nud permanent",
    ]


def test_unlimited_hosts_keep_the_kernels_chunks_and_the_slowest_link_decides():
    assert "gso" not in host_commands(Topology.mesh(2, LinkSpec()), 0)
    assert Topology.matrix([[None, 10, 100], [None] * 3, [None] * 3], LINK).gso_max_size(0) == 3028


ROUTES = [
    {"dst": "10.77.0.0/24"},
    {"dst": "10.77.0.2", "metrics": [{"mtu": 1}, {"congestion": "cubic"}]},
]
SHOWN = [{"mtu": 1500, "gso_max_size": 3028, "flags": ["UP", "LOWER_UP"]}]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, []),
        ({"mtu": 1400}, ["h0: mtu is 1400, asked for 1500"]),
        ({"gso_max_size": 65536}, ["h0: gso_max_size is 65536, asked for 3028"]),
        ({"flags": []}, ["h0: up is False, asked for True"]),
    ],
)
def test_interface_mismatches(change, said):
    made = Topology.mesh(2, LINK)
    assert compare_interface(made, 0, parse_interface([SHOWN[0] | change], ROUTES)) == said


def test_congestion_mismatch():
    made = Topology.mesh(2, LinkSpec(rate_mbit=10.0, congestion="bbr"))
    said = ["h0 -> h1: congestion control is cubic, asked for bbr"]
    assert compare_interface(made, 0, parse_interface(SHOWN, ROUTES)) == said
