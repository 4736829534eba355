"""Pair assertions: each can fail, and says what is wrong."""

from typing import get_args

import pytest

from thinpipe.harness import audit
from thinpipe.harness.errors import RunError
from thinpipe.harness.pipeline import schedules
from thinpipe.harness.spec import PipelineSpec, TrainSpec, parse

SPEC = parse({"compression": {"forward": "fixpoint:4"}})
GOOD = {
    "threads": 1,
    "dtype": "float32",
    "compute": "real",
    "autocast": "None",
    "seed": 0,
    "schedule": "ScheduleGPipe",
    "optimizer": "AdamW",
    "exchange": "none",
    "compressors": {"0/forward/0": ["fixpoint:4", "none"], "0/backward/0": ["none"]},
    "stages": {"0": [0, 1], "1": [2, 3]},
    "steps": 5,
    "data": {"corpus_sha256": "ab"},
    "resumed_from": None,
    "spec": {"train": {"lr": 0.1}},
}


def test_settings_that_read_back_as_asked_pass():
    audit.compare_settings(audit.requested(SPEC), {0: GOOD, 1: GOOD})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("threads", 2),
        ("dtype", "float64"),
        ("compute", "replay"),
        ("autocast", "bfloat16"),
        ("seed", 1),
        ("schedule", "Schedule1F1B"),
        ("optimizer", "SGD"),
        ("exchange", "fp16"),
        ("compressors", {"0/forward/0": ["fixpoint:3"]}),
        ("compressors", {"1/forward/0": ["fixpoint:4", "none"]}),
        ("stage", {"0": [0, 2]}),
    ],
)
def test_settings_that_read_back_otherwise_are_refused(name, value):
    field = "stages" if name == "stage" else name
    with pytest.raises(RunError, match=r"rank 1.*" + name):
        audit.compare_settings(audit.requested(SPEC), {0: GOOD, 1: GOOD | {field: value}})


def test_a_rank_that_was_started_with_other_settings_is_named_with_them():
    other = GOOD | {"spec": {"train": {"lr": 0.2, "epochs": 3}}}
    with pytest.raises(
        RunError, match=r"rank 1 .*train.epochs 3 instead of 'its default'; train.lr 0.2 instead of 0.1"
    ):
        audit.compare_settings(audit.requested(SPEC), {0: GOOD, 1: other})


def test_a_channel_that_is_missing_is_noticed():
    one = GOOD | {"compressors": {"0/forward/0": ["fixpoint:4", "none"]}}
    with pytest.raises(RunError, match=r"no rank has a channel for 0/backward/0"):
        audit.compare_settings(audit.requested(SPEC), {0: one, 1: one})


def test_a_stage_that_is_missing_is_noticed():
    one = GOOD | {"stages": {"0": [0, 1]}}
    with pytest.raises(RunError, match=r"no rank has stage 1"):
        audit.compare_settings(audit.requested(SPEC), {0: one, 1: one})


def test_channels_of_every_group_are_asked_for_and_none_inside_a_rank():
    """A V of four stages on two ranks, twice: stages 1 and 2 lie on one rank."""
    pipe = {"stages": 4, "stages_per_rank": 2, "schedule": "zbv-zb"}
    asked = audit.requested(parse({"pipeline": pipe, "data_parallel": {"groups": 2}}))
    ends = {f"{group}/{way}/{at}" for group in (0, 1) for way in ("forward", "backward") for at in (0, 2)}
    assert set(asked["compressors"]) == ends
    assert asked["stages"] == {str(k): [k, k] for k in range(4)}
    assert asked["schedule"] == "ScheduleZBVZeroBubble"


@pytest.mark.parametrize(
    ("data", "name", "shown"),
    [
        ({"train": {"autocast": "bf16"}}, "autocast", "bfloat16"),
        ({"train": {"optimizer": "sgd"}}, "optimizer", "SGD"),
        ({"data_parallel": {"groups": 2, "exchange": "powersgd"}}, "exchange", "powersgd"),
        ({"pipeline": {"cuts": [1]}}, "stages", {"0": [0, 0], "1": [1, 3]}),
    ],
)
def test_what_is_asked_for_is_what_the_settings_say(data, name, shown):
    assert audit.requested(parse(data))[name] == shown


def test_momenta_that_are_exchanged_are_an_optimizer_of_their_own():
    data = {"data_parallel": {"groups": 2, "exchange": "quantized-adam"}, "compression": {"warmup_epochs": 1}}
    assert audit.requested(parse(data))["optimizer"] == "QuantizedAdam"


def test_every_schedule_and_optimizer_has_a_name_to_be_read_back():
    known = {name: kind.__name__ for name, kind in (schedules.SINGLE | schedules.SEVERAL).items()}
    assert known == audit.SCHEDULES
    assert set(known) == set(get_args(PipelineSpec.model_fields["schedule"].annotation))
    assert set(audit.OPTIMIZERS) == set(get_args(TrainSpec.model_fields["optimizer"].annotation))


@pytest.mark.parametrize(("name", "value"), [("steps", 6), ("data", {"corpus_sha256": "cd"}), ("resumed_from", 40)])
def test_ranks_that_disagree_are_noticed(name, value):
    with pytest.raises(RunError, match=f"disagree about their {name}"):
        audit.compare_settings(audit.requested(SPEC), {0: GOOD, 1: GOOD | {name: value}})


def test_memories_are_compared_at_the_end():
    same = {0: {"digests": {"0/forward/0 delta": "aa"}}, 1: {"digests": {"0/forward/0 delta": "aa"}}}
    audit.compare_digests(same)
    for other in ({"0/forward/0 delta": "ab"}, {}):
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
    alone = {"pipeline": {"stages": 1}}
    assert audit.fidelity(parse(alone), 1.0, [])["flags"] == [], "one rank has no link"
    pair = audit.fidelity(parse(alone | {"data_parallel": {"groups": 2}}), 1.0, [])
    assert pair["flags"] == ["link-off"], "two groups of one rank have one"


def test_a_replay_whose_work_outlasts_its_profile_is_flagged():
    assert audit.fidelity(SPEC, 1.0, [LINK], 1.9)["flags"] == []
    over = audit.fidelity(SPEC, 1.0, [LINK], 12.34)
    assert over["flags"] == ["cpu-bound"]
    assert "overrun by 12.3 %" in over["reasons"][0]
    both = audit.fidelity(SPEC, 7.5, [LINK], 12.34)
    assert (both["flags"], len(both["reasons"])) == (["cpu-bound"], 2)


def test_the_worst_link_is_reported():
    slow = LINK | {"measured_rate_mbit": 50.0, "rtt_ms": 9.0}
    assert audit.worst_link([LINK, slow]) == {"measured_rate_mbit": 50.0, "measured_rtt_ms": 9.0}
    assert audit.worst_link([]) == {"measured_rate_mbit": None, "measured_rtt_ms": None}
