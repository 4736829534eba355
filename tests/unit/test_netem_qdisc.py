"""tc text: what is asked for, what tc prints back, and that a difference is found."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinpipe.netem import qdisc
from thinpipe.netem.errors import NetemError
from thinpipe.netem.link import LinkSpec
from thinpipe.netem.topology import Topology

PAIR = Topology.mesh(2, LinkSpec(rate_mbit=100.0))
ADDRESSES = ["10.77.0.1", "10.77.0.2", "10.77.0.3"]

# As iproute2 6.1 printed it for PAIR's host 0.
QDISCS = [
    {
        "kind": "htb",
        "handle": "1:",
        "dev": "eth0",
        "root": True,
        "options": {"r2q": 10, "default": "0xfff", "direct_packets_stat": 0},
        "bytes": 33554440,
        "packets": 23180,
        "drops": 1,
        "overlimits": 7,
        "backlog": 0,
    },
    {
        "kind": "bfifo",
        "handle": "11:",
        "parent": "1:11",
        "options": {"limit": 1250000},
        "bytes": 33554370,
        "packets": 23179,
        "drops": 1,
        "overlimits": 0,
        "backlog": 12500,
    },
    {
        "kind": "pfifo",
        "handle": "fff:",
        "parent": "1:fff",
        "options": {"limit": 10000},
        "bytes": 70,
        "packets": 1,
        "drops": 0,
        "overlimits": 0,
        "backlog": 0,
    },
]
CLASSES = """\
class htb 1:11 root leaf 11: prio 0 quantum 12500 rate 100Mbit ceil 102Mbit linklayer ethernet \
burst 50000b/1 mpu 0b cburst 1581b/1 mpu 0b level 0 
 Sent 33554370 bytes 23179 pkt (dropped 1, overlimits 2641 requeues 0) 
 backlog 0b 0p requeues 0
 lended: 3034 borrowed: 0 giants: 0
 tokens: 62500 ctokens: 1953

class htb 1:fff root leaf fff: prio 0 quantum 60000 rate 100Gbit ceil 100Gbit linklayer ethernet \
burst 50000000b/1 mpu 0b cburst 50000000b/1 mpu 0b level 0 
 Sent 70 bytes 1 pkt (dropped 0, overlimits 0 requeues 0) 
 backlog 0b 0p requeues 0
"""  # noqa: W291
FILTERS = [
    {"parent": "1:", "protocol": "ip", "pref": 1, "kind": "u32", "chain": 0},
    {"kind": "u32", "options": {"fh": "800:", "ht_divisor": 1}},
    {
        "kind": "u32",
        "options": {
            "fh": "800::800",
            "flowid": "1:11",
            "match": {"value": "a4d0002", "mask": "ffffffff", "offmask": "", "off": 16},
        },
    },
]


def effective(classes=CLASSES, qdiscs=QDISCS, filters=FILTERS):
    return qdisc.Effective(qdiscs, qdisc.parse_classes(classes), qdisc.parse_filters(filters))


def test_text_of_a_limited_link():
    assert qdisc.tc_commands(PAIR, 0).splitlines() == [
        "qdisc add dev eth0 root handle 1: htb default fff",
        "class add dev eth0 parent 1: classid 1:11 htb rate 100000000bit ceil 102000000bit "
        "burst 50000b cburst 1600b quantum 12500",
        "qdisc add dev eth0 parent 1:11 handle 11: bfifo limit 1250000",
        "filter add dev eth0 parent 1: protocol ip prio 1 u32 match ip dst 10.77.0.2/32 flowid 1:11",
        "class add dev eth0 parent 1: classid 1:fff htb rate 100000000000bit ceil 100000000000bit "
        "burst 50000000b cburst 50000000b quantum 60000",
        "qdisc add dev eth0 parent 1:fff handle fff: pfifo limit 10000",
    ]


def test_text_of_an_unlimited_host_is_a_counter_only():
    made = Topology.matrix([[None, None], [10, None]], LinkSpec())
    assert qdisc.tc_commands(made, 0) == "qdisc add dev eth0 root handle 1: pfifo limit 10000\n"
    assert "htb" in qdisc.tc_commands(made, 1)


def test_a_host_with_both_kinds_gets_a_class_for_each():
    made = Topology.chain(3, LinkSpec(rate_mbit=10.0))
    limited, unlimited, default = qdisc.plan(made, 0).classes
    assert (limited.destination, limited.rate_bit, limited.leaf_kind) == (1, 10_000_000, "bfifo")
    assert (unlimited.destination, unlimited.rate_bit, unlimited.leaf_kind) == (2, 10**11, "pfifo")
    assert (default.minor, default.destination) == (qdisc.CLASS_DEFAULT, None)


def test_real_addresses_and_interface():
    text = qdisc.tc_commands(PAIR, 0, interface="ens3", addresses=["192.0.2.7", "192.0.2.9"])
    assert "match ip dst 192.0.2.9/32" in text
    assert "dev ens3" in text
    assert "eth0" not in text
    assert "10.77" not in text


@pytest.mark.parametrize(
    ("rate", "rates_bit", "sizes_bytes"),
    [
        (0.1, (100_000, 102_000), (1600, 1600, 3028)),
        (10.0, (10_000_000, 10_200_000), (5_000, 1600, 3028)),
        (33.3333333, (33_333_336, 34_000_000), (16_666, 1600, 4166)),
        (1000.0, (1_000_000_000, 1_020_000_000), (500_000, 6250, 31_250)),
    ],
)
def test_formulas(rate, rates_bit, sizes_bytes):
    made = qdisc.plan(Topology.mesh(2, LinkSpec(rate_mbit=rate, queue_ms=500.0)), 0).classes[0]
    assert (made.rate_bit, made.ceil_bit) == rates_bit
    assert (made.burst_bytes, made.cburst_bytes, made.quantum_bytes) == sizes_bytes


@given(st.floats(0.1, 40_000))
def test_rates_are_whole_bytes_and_as_asked(rate):
    made = qdisc.plan(Topology.mesh(2, LinkSpec(rate_mbit=rate, queue_ms=60_000)), 0).classes[0]
    assert made.rate_bit % 8 == 0
    assert abs(made.rate_bit - rate * 1e6) <= 4 + 1e-6


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("512bit", 512, 512),
        ("10200Kbit", 10_200_000, 10_200_999),
        ("102Mbit", 102_000_000, 102_999_999),
        ("1Gbit", 10**9, 2 * 10**9 - 1),
    ],
)
def test_rates_read_back_as_ranges(text, low, high):
    assert qdisc.parse_rate(text) == (low, high)


@pytest.mark.parametrize(
    ("text", "low", "high"), [("1581b", 1581, 1581), ("49Kb", 50_161, 50_191), ("2Mb", 2_096_129, 2_098_175)]
)
def test_sizes_read_back_as_ranges(text, low, high):
    assert qdisc.parse_size(text) == (low, high)


@pytest.mark.parametrize("text", ["12MBps", "", "10.5Mbit", "-1bit"])
def test_unknown_rates_are_not_guessed(text):
    with pytest.raises(NetemError, match="not understood"):
        qdisc.parse_rate(text)


def test_classes_and_filters_are_parsed():
    got = effective()
    assert got.classes[0x11] == {
        "rate": "100Mbit",
        "ceil": "102Mbit",
        "burst": "50000b",
        "cburst": "1581b",
        "quantum": "12500",
        "overlimits": 2641,
    }
    assert got.filters == {"10.77.0.2": 0x11}


def test_as_asked_is_no_mismatch():
    assert qdisc.compare(qdisc.plan(PAIR, 0), effective(), ADDRESSES) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("rate 100Mbit", "rate 99Mbit", "rate is 99Mbit, asked for 100000000bit"),
        ("rate 100Mbit", "rate 100Kbit", "rate is 100Kbit"),
        ("ceil 102Mbit", "ceil 100Mbit", "ceil is 100Mbit"),
        ("burst 50000b", "burst 49000b", "burst is 49000b"),
        ("cburst 1581b", "cburst 64Kb", "cburst is 64Kb"),
        ("quantum 12500", "quantum 200000", "quantum is 200000"),
        ("class htb 1:11 ", "class htb 1:12 ", "class 1:11 is missing"),
        ("class htb 1:11 ", "class htb 1:12 ", "['1:12'] were not asked for"),
    ],
)
def test_mismatches_of_classes_are_named(old, new, said):
    assert old in CLASSES
    wrong = qdisc.compare(qdisc.plan(PAIR, 0), effective(CLASSES.replace(old, new)), ADDRESSES)
    assert any(said in text for text in wrong), wrong


def test_mismatches_of_leaves_filters_and_roots_are_named():
    plan = qdisc.plan(PAIR, 0)
    leaf = [QDISCS[0], QDISCS[1] | {"options": {"limit": 5}}, QDISCS[2]]
    assert qdisc.compare(plan, effective(qdiscs=leaf), ADDRESSES) == [
        "leaf of class 1:11 is bfifo limit 5, asked for bfifo limit 1250000"
    ]
    assert qdisc.compare(plan, effective(qdiscs=QDISCS[:2]), ADDRESSES) == ["class 1:fff has no leaf qdisc"]
    assert qdisc.compare(plan, effective(filters=[]), ADDRESSES) == ["no filter sends 10.77.0.2 to class 1:11"]
    assert qdisc.compare(plan, effective(qdiscs=[]), ADDRESSES) == ["root qdisc is [], asked for htb"]
    assert qdisc.compare(qdisc.HostPlan(()), effective(), ADDRESSES) == ["root qdisc is ['htb'], asked for pfifo"]
    other = [replace_default(QDISCS[0], "0x0"), *QDISCS[1:]]
    assert qdisc.compare(plan, effective(qdiscs=other), ADDRESSES) == ["default class is 0x0, asked for 0xfff"]


def replace_default(root, value):
    return root | {"options": root["options"] | {"default": value}}


def test_swapped_destinations_are_found():
    made = Topology.matrix([[None, 10, 20], [None] * 3, [None] * 3], LinkSpec())
    one, two, default = qdisc.plan(made, 0).classes
    swapped = qdisc.HostPlan((replace(one, destination=2), replace(two, destination=1), default))
    assert qdisc.compare(swapped, effective(), ADDRESSES)


def test_counters_are_those_of_the_leaves():
    got = qdisc.parse_counters(qdisc.plan(PAIR, 0), QDISCS, qdisc.parse_classes(CLASSES))
    assert got == [
        {
            "destination": 1,
            "bytes": 33554370,
            "packets": 23179,
            "drops": 1,
            "backlog": 12500,
            "overlimits": 2641,
        },
        {"destination": None, "bytes": 70, "packets": 1, "drops": 0, "backlog": 0, "overlimits": 0},
    ]


def test_counters_of_an_unlimited_host_are_those_of_its_root():
    root = QDISCS[2] | {"root": True}
    (got,) = qdisc.parse_counters(qdisc.HostPlan(()), [root], {})
    assert (got["destination"], got["bytes"], got["packets"]) == (None, 70, 1)
