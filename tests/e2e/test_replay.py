"""A replay between namespaces: real schedule, codecs, frames and links, and waits instead of arithmetic.

The machine may be busy: what is asserted of time are lower bounds, the waits' own length and processor time.
"""

import json

import pytest

from runs import Lab
from thinpipe.harness import profile, profiling, tables
from thinpipe.harness.runner import Session
from thinpipe.harness.spec import parse

FORWARD_S, BACKWARD_S, OPTIMIZER_S = 0.012, 0.024, 0.01
MICROBATCHES, SIZE, LENGTH, WIDTH = 4, 2, 32, 64
FILE = {
    "name": "small",
    "source": "made up",
    "measured": False,
    "date": "2026-01-01",
    "machine": "none",
    "model": "gpt2:tiny(layers=4, width=64)",
    "sequence_length": LENGTH,
    "microbatch_size": SIZE,
    "recompute": False,
    "forward_s": [FORWARD_S / 2] * 4,
    "backward_s": [BACKWARD_S / 2] * 4,
    "optimizer_s": [OPTIMIZER_S / 2] * 4,
}
# Of one message: raw, and of fixpoint:4 with a scale of 2 B a channel and sample.
RAW = 4 * SIZE * LENGTH * WIDTH
HEADER = 64


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with Session(calibrated=False) as session:
        yield Lab(session, tmp_path_factory.mktemp("replay"))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A replay of two stages that takes a second; keyword arguments are settings."""
    path = tmp_path_factory.mktemp("profile") / "small.json"
    path.write_text(json.dumps(FILE))

    def make(**changes):
        base = {
            "model": {"layers": 4, "width": WIDTH},
            "task": {"sequence_length": LENGTH},
            # Not balanced by what computing would cost: two blocks each.
            "pipeline": {"stages": 2, "microbatches": MICROBATCHES, "cuts": [2]},
            "train": {"batch_size": MICROBATCHES * SIZE},
            "timing": {"batches": 1, "passes": 2},
            "network": {"rate_mbit": 20.0},
            "measure": "timing",
            "compute": "replay",
            "profile": str(path),
        }
        return parse({**base, **changes})

    return make


def test_a_replay_waits_as_its_profile_says_and_sends_as_a_run_does(lab, small):
    spec = small(compression={"forward": "delta(fixpoint:4)", "backward": "none"})
    status = lab.status(spec)
    steps = lab.rows(spec, "steps")
    waits = MICROBATCHES * (FORWARD_S + BACKWARD_S) + OPTIMIZER_S
    assert len(steps) == 2 * 3
    assert (steps["compute_s"] >= waits).all()
    # The pipeline: both stages' waits one after the other, and the others of the slower one.
    assert (steps["step_time_s"] >= (MICROBATCHES + 1) * (FORWARD_S + BACKWARD_S) + OPTIMIZER_S).all()
    assert steps["grad_norm"].tolist() == [0.0] * len(steps)

    spans = lab.rows(spec, "spans")
    took = (spans["end_s"] - spans["start_s"]).groupby(spans["phase"])
    assert took.min()["forward_compute"] >= 0
    whole = spans[spans["phase"] == "backward_compute"]
    assert ((whole["end_s"] - whole["start_s"]) >= BACKWARD_S).all()

    sent = lab.rows(spec, "transfers")
    assert set(sent["messages"]) == {MICROBATCHES}
    assert set(sent["raw_bytes"]) == {MICROBATCHES * RAW}
    assert set(sent[sent["direction"] == "backward"]["frame_bytes"]) == {MICROBATCHES * (RAW + HEADER)}
    first, later = (sent[(sent["direction"] == "forward") & (sent["step"] == step)] for step in (0, 1))
    assert set(first["payload_bytes"]) == {MICROBATCHES * RAW}, "a first visit is sent in full"
    assert later["payload_bytes"].sum() < MICROBATCHES * RAW / 6
    # Rows of bf16 at both ends.
    assert status["memory"]["memory_state_bytes"] == 2 * MICROBATCHES * RAW / 2


def test_what_it_waited_by_is_kept_and_in_its_columns(lab, small):
    spec = small(compression={"forward": "delta(fixpoint:4)", "backward": "none"})
    status = lab.status(spec)
    lab.store.finish(spec.run_id, status)
    kept = lab.store.manifest(spec.run_id)
    assert kept["profile"] == FILE
    assert kept["inputs"][f"profile {spec.profile}"] == profile.digest(spec.profile)
    row = tables.of_run(lab.store, spec.run_id)["runs"].iloc[0]
    assert (row["compute"], row["profile"]) == ("replay", spec.profile)
    assert row["rho"] == pytest.approx(2 * 8 * RAW * (1 + 66 / 1448) / 20e6 / (FORWARD_S + BACKWARD_S), rel=0.01)
    assert row["memory_state_bytes"] == status["memory"]["memory_state_bytes"]
    assert row["compute_s"] >= MICROBATCHES * (FORWARD_S + BACKWARD_S) + OPTIMIZER_S


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "each"), [("1f1b", 1), ("interleaved-1f1b", 2), ("looped-bfs", 2)])
def test_other_schedules_replay_too(lab, small, schedule, each):
    pipeline = {"stages": 2 * each, "stages_per_rank": each, "microbatches": MICROBATCHES, "schedule": schedule}
    pipeline["cuts"] = [2] if each == 1 else None
    spec = small(pipeline=pipeline, timing={"batches": 1, "passes": 1})
    lab.status(spec)
    waits = MICROBATCHES * (FORWARD_S + BACKWARD_S) + OPTIMIZER_S
    assert (lab.rows(spec, "steps")["compute_s"] >= waits).all()


@pytest.mark.slow
def test_a_replay_of_a_measured_profile_takes_as_long_as_the_run(lab):
    """Where the machine is quiet; a busy one flags the run that computes, and then says nothing."""
    base = {
        "model": {"layers": 4, "width": 256, "heads": 4},
        "task": {"sequence_length": 128},
        "timing": {"batches": 2, "passes": 4},
        "network": {"rate_mbit": 100.0},
        "measure": "timing",
    }
    real = parse(base)
    path = lab.store.root / "measured.json"
    profile.write(profiling.profile_run(real), path)
    replay = parse({**base, "compute": "replay", "profile": str(path)})
    took = {}
    for spec in (real, replay):
        status = lab.status(spec)
        steps = lab.rows(spec, "steps")
        took[spec.compute] = steps[steps["measured"]].groupby("step")["step_time_s"].max().median()
        assert "cpu-bound" not in status["fidelity"]["flags"], "the machine is too busy to compare on"
    assert took["replay"] == pytest.approx(took["real"], rel=0.1)
