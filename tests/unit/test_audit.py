"""Pair assertions: each can fail, and says what is wrong."""

import pytest

from thinpipe.harness import audit
from thinpipe.harness.errors import RunError
from thinpipe.harness.spec import parse

SPEC = parse({"compression": {"forward": "fixpoint:4"}})
GOOD = {
    "threads": 1,
    "dtype": "float32",
    "seed": 0,
    "schedule": "ScheduleGPipe",
    "compressors": {"forward/0": ["fixpoint:4", "none"], "backward/0": ["none"]},
    "steps": 5,
    "data": {"corpus_sha256": "ab"},
}


def test_settings_that_read_back_as_asked_pass():
    audit.compare_settings(audit.requested(SPEC), {0: GOOD, 1: GOOD})


@pytest.mark.parametrize(
    ("name", "value"),
    [("threads", 2), ("dtype", "float64"), ("seed", 1), ("compressors", {"forward/0": ["fixpoint:3"]})],
)
def test_settings_that_read_back_otherwise_are_refused(name, value):
    with pytest.raises(RunError, match=r"rank 1.*" + name):
        audit.compare_settings(audit.requested(SPEC), {0: GOOD, 1: GOOD | {name: value}})


def test_a_channel_that_is_missing_is_noticed():
    one = GOOD | {"compressors": {"forward/0": ["fixpoint:4", "none"]}}
    with pytest.raises(RunError, match=r"no rank has a channel for backward/0"):
        audit.compare_settings(audit.requested(SPEC), {0: one, 1: one})


@pytest.mark.parametrize(("name", "value"), [("steps", 6), ("data", {"corpus_sha256": "cd"})])
def test_ranks_that_disagree_are_noticed(name, value):
    with pytest.raises(RunError, match=f"disagree about their {name}"):
        audit.compare_settings(audit.requested(SPEC), {0: GOOD, 1: GOOD | {name: value}})


def test_memories_are_compared_at_the_end():
    same = {0: {"digests": {"forward/0 delta": "aa"}}, 1: {"digests": {"forward/0 delta": "aa"}}}
    audit.compare_digests(same)
    for other in ({"forward/0 delta": "ab"}, {}):
        with pytest.raises(RunError, match="memories differ"):
            audit.compare_digests(same | {1: {"digests": other}})


def reading(*counts):
    return [{"host": h, "destination": 1 - h, "bytes": b} for h, b in enumerate(counts)]


REPORT = {
    "tcp_bytes": 1_000_000,
    "segments": 700,
    "retransmitted_bytes": 0,
    "sync_bytes": 0,
    "gloo_added_bytes": 144,
}


def test_queue_bytes_that_agree_pass_and_are_kept():
    exact = 1_000_000 + 66 * 700
    wire = audit.wire_bytes(reading(5, 5), reading(5 + exact, 5 + exact))
    rows = audit.compare_bytes(wire, {0: REPORT, 1: REPORT})
    assert [row["wire_bytes"] for row in rows] == [exact, exact]


@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_queue_bytes_that_differ_fail_the_run(factor):
    wrong = int((1_000_000 + 66 * 700) * factor)
    with pytest.raises(RunError, match="host 1"):
        audit.compare_bytes({0: 1_046_200, 1: wrong}, {0: REPORT, 1: REPORT})


def test_a_replaced_queue_fails_the_run():
    with pytest.raises(RunError, match="replaced"):
        audit.wire_bytes(reading(100, 5), reading(50, 10))


LINK = {"source": 0, "destination": 1, "ok": True, "reason": "", "measured_rate_mbit": 99.0, "rtt_ms": 0.4}


def test_fidelity_flags_say_why():
    assert audit.fidelity(SPEC, 1.0, [LINK]) == {"flags": [], "reasons": []}
    off = LINK | {"ok": False, "reason": "goodput 12 % low"}
    both = audit.fidelity(SPEC, 7.5, [LINK, off])
    assert both["flags"] == ["cpu-bound", "link-off"]
    assert "7.5 %" in both["reasons"][0]
    assert "12 % low" in both["reasons"][1]
    assert audit.fidelity(SPEC, 1.0, [])["flags"] == ["link-off"], "an unmeasured link is no measured link"


def test_the_worst_link_is_reported():
    slow = LINK | {"measured_rate_mbit": 50.0, "rtt_ms": 9.0}
    assert audit.worst_link([LINK, slow]) == {"measured_rate_mbit": 50.0, "measured_rtt_ms": 9.0}
    assert audit.worst_link([]) == {"measured_rate_mbit": None, "measured_rtt_ms": None}
