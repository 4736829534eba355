"""Curves composed of training runs and timing runs: every time by hand, and what must not be timed by what."""

import pandas as pd
import pytest

from thinpipe.harness import claims, compose, metrics
from thinpipe.harness.errors import UserError
from thinpipe.harness.experiment import expand
from thinpipe.harness.spec import parse
from thinpipe.plots import _composed

BASE = {
    "task": {"num_sequences": 48},
    "train": {"epochs": 3, "batch_size": 16},
    "compression": {"forward": "none", "backward": "none"},
}
AQ = {"forward": "delta(fixpoint:4)", "backward": "fixpoint:8"}
RAW = 1000
# Frame bytes of a step, by what crosses: uncompressed, a first visit, a later one.
FULL, FIRST, LATER = 1016, 700, 200


def spec_of(measure, *, rate=100.0, seed=0, **changes):
    data = {**BASE, "measure": measure, "seed": seed, "network": {"rate_mbit": rate}}
    for key, value in changes.items():
        data[key] = {**data.get(key, {}), **value} if isinstance(value, dict) else value
    return parse(data)


def use_of(spec, steps, *, arm="arm", state="done", times=(None, None), fidelity="ok", evals=()):
    """steps: (epoch, frame bytes, loss, seconds, measured), one of each step."""
    row = dict.fromkeys(metrics.RUNS) | {
        "experiment": "e",
        "part": spec.measure,
        "arm": arm,
        "cell": spec.cell_id,
        "seed": spec.seed,
        "run_id": spec.run_id,
        "train_id": spec.train_id,
        "state": state,
        "fidelity": fidelity,
        "rate_mbit": spec.network.rate_mbit,
        "rho": spec.network.rho,
        **dict(zip(("step_time_s", "cold_step_time_s"), times, strict=True)),
    }
    frames = {"steps": [], "transfers": []}
    for number, (epoch, sent, loss, seconds, measured) in enumerate(steps):
        for rank in range(2):
            at = {"rank": rank, "step": number, "epoch": epoch}
            mine = {"train_loss": loss if rank else None, "step_time_s": seconds * (1 - 0.1 * rank)}
            frames["steps"].append({**at, **mine, "measured": measured})
        frames["transfers"].append({"step": number, "frame_bytes": sent, "raw_bytes": RAW})
    made = {name: pd.DataFrame(rows) for name, rows in frames.items()}
    made["evals"] = pd.DataFrame(list(evals), columns=["step", "eval_loss"])
    return compose.Use(row, spec, made)


def timing(compression, step_s, first_s, *, sent=(LATER, LATER), rate=100.0, seed=0, **more):
    """A timing run of two batches: one pass of first visits, one that counts. sent: bytes of a step of each."""
    changes = {key: more.pop(key) for key in ("model", "train", "task", "pipeline") if key in more}
    spec = spec_of("timing", rate=rate, seed=seed, compression=compression, **changes)
    first, later = sent
    steps = [(0, first, 9.0, first_s, False)] * 2 + [(0, later, 9.0, step_s, True)] * 2
    return use_of(spec, steps, times=(step_s, first_s), **more)


def trained(compression, sent, *, measure="convergence", rate=300.0, seconds=0.5, losses=None, **more):
    """Two steps an epoch, bytes of each as `sent`."""
    losses = losses or [6.0 - i for i in range(len(sent))]
    steps = [(i // 2, size, loss, seconds, True) for i, (size, loss) in enumerate(zip(sent, losses, strict=True))]
    changes = {key: more.pop(key) for key in ("model", "train", "task", "seed") if key in more}
    return use_of(spec_of(measure, rate=rate, compression=compression, **changes), steps, **more)


PLAIN = timing({}, 2.0, 2.2, sent=(FULL, FULL))
DELTA = timing(AQ, 0.3, 1.0, sent=(FIRST, LATER))
WARM = {**AQ, "warmup_epochs": 1}


def curve(rows, rate=100.0):
    return {row["epoch"]: row for row in rows if row["rate_mbit"] == rate}


def test_each_epoch_has_the_step_time_of_the_compressors_in_force_in_it():
    run = trained(WARM, [FULL] * 2 + [LATER] * 4, evals=[(2, 5.2), (6, 1.4)])
    rows, (about,) = compose.build([run, PLAIN, DELTA])
    found = curve(rows)
    assert [found[e]["t_s"] for e in (1, 2, 3)] == pytest.approx([4.0, 4.6, 5.2])
    assert [found[e]["train_loss"] for e in (1, 2, 3)] == [5.5, 3.5, 1.5]
    assert [found[e]["eval_loss"] for e in (1, 2, 3)] == [5.2, None, 1.4]
    assert [found[e]["frame_bytes"] for e in (1, 2, 3)] == [2 * FULL, 2 * FULL + 2 * LATER, 2 * FULL + 4 * LATER]
    assert [found[e]["step"] for e in (1, 2, 3)] == [2, 4, 6]
    assert {(r["composed"], r["timing_run_id"], r["fidelity"], r["time_of"]) for r in rows} == {
        (True, DELTA.spec.run_id, "ok", None)
    }
    assert {row["network_id"] for row in [*rows, about]} == {DELTA.spec.network_id}
    assert (about["composed_s"], about["step_s"]) == (pytest.approx(5.2), 0.3)
    assert about["missing"] is about["measured_s"] is about["total_error"] is None
    for row in rows:
        metrics.check("curves", row)
    metrics.check("composition", about)


def test_first_visits_take_the_time_of_the_first_pass_and_mixed_batches_lie_between():
    half = (FIRST + LATER) // 2
    rows, _ = compose.build([trained(AQ, [FIRST, FIRST, half, LATER, LATER, LATER]), DELTA])
    found = curve(rows)
    assert [found[e]["t_s"] for e in (1, 2, 3)] == pytest.approx([2.0, 2.0 + 0.65 + 0.3, 2.95 + 0.6])


def test_a_method_without_first_visits_has_one_step_time_however_its_bytes_vary():
    direct = {"forward": "fixpoint:4", "backward": "fixpoint:8"}
    rows, _ = compose.build([trained(direct, [150, 250, 200, 200, 900, 100]), timing(direct, 0.3, 1.0)])
    assert curve(rows)[3]["t_s"] == pytest.approx(1.8)


def ends(uses, trainings):
    """(time, timing runs, flags, flagged runs left out) of the curve of each seed trained."""
    rows, _ = compose.build([*(trained(AQ, [LATER] * 6, seed=seed) for seed in trainings), *uses])
    return {
        row["seed"]: (
            round(row["t_s"] / 6, 6),
            set(row["timing_run_id"].split("+")),
            row["fidelity"],
            row["flagged_runs"],
        )
        for row in rows
        if row["epoch"] == 3
    }


def test_a_training_has_the_times_of_its_own_seed_and_the_median_where_that_was_not_timed():
    several = [timing(AQ, step_s, 0.3, seed=seed) for seed, step_s in enumerate((0.3, 0.4, 0.7))]
    ids = [use.spec.run_id for use in several]
    found = ends(several, range(4))
    assert found == {
        **{seed: (time, {ids[seed]}, "ok", 0) for seed, time in enumerate((0.3, 0.4, 0.7))},
        3: (0.4, set(ids), "ok", 0),
    }


def test_flagged_timing_runs_are_left_out_where_others_of_their_cell_are_not():
    several = [timing(AQ, 0.1 + s, 0.3, seed=s, fidelity="cpu-bound" if s == 2 else "ok") for s in range(3)]
    clear = {use.spec.run_id for use in several[:2]}
    assert ends(several, [1, 2]) == {1: (1.1, {several[1].spec.run_id}, "ok", 1), 2: (0.6, clear, "ok", 1)}
    every = [timing(AQ, 0.1 + s, 0.3, seed=s, fidelity="cpu-bound") for s in range(3)]
    assert ends(every, [2]) == {2: (2.1, {every[2].spec.run_id}, "cpu-bound", 0)}


def test_networks_of_one_rate_that_differ_otherwise_are_curves_apart():
    queue = {"network": {"rate_mbit": 100.0, "queue_ms": 10.0}}
    near = use_of(spec_of("timing", compression=AQ, **queue), [(0, LATER, 9.0, 0.6, True)] * 2, times=(0.6, 0.6))
    rows, composition = compose.build([trained(AQ, [LATER] * 6), DELTA, near])
    times = {row["network_id"]: row["t_s"] for row in rows if row["epoch"] == 3}
    assert times == {DELTA.spec.network_id: pytest.approx(1.8), near.spec.network_id: pytest.approx(3.6)}
    assert {row["network_id"] for row in composition} == times.keys()
    # Figures tell networks apart by rate: they refuse to draw the two as one.
    runs = pd.DataFrame([{**dict.fromkeys(_composed.OF_RUN), **rows[0], "train_id": "t"}])[_composed.OF_RUN]
    with pytest.raises(UserError, match="2 different settings"):
        _composed.curves({"curves": pd.DataFrame(rows)}, runs)
    alone = pd.DataFrame([row for row in rows if row["network_id"] == near.spec.network_id])
    assert len(_composed.curves({"curves": alone}, runs)) == 3


def test_a_network_where_a_method_was_not_timed_gives_no_curve_and_says_which():
    slow = timing(AQ, 3.0, 9.0, sent=(FIRST, LATER), rate=10.0)
    rows, composition = compose.build([trained(WARM, [FULL] * 2 + [LATER] * 4), PLAIN, DELTA, slow])
    assert {row["rate_mbit"] for row in rows} == {100.0}
    missing = {row["rate_mbit"]: row["missing"] for row in composition}
    assert missing == {100.0: None, 10.0: "no timing run of forward none, backward none"}


@pytest.mark.parametrize(
    "other",
    [
        {"model": {"layers": 3}},
        {"task": {"sequence_length": 32}},
        {"task": {"corpus": "shakespeare"}},
        {"train": {"batch_size": 48}},
        {"train": {"recompute": True}},
        {"train": {"clip_norm": None}},
        {"pipeline": {"microbatches": 8}},
    ],
)
def test_a_run_of_another_shape_times_nothing(other):
    rows, (about,) = compose.build([trained(AQ, [LATER] * 6), timing(AQ, 0.3, 0.3, **other)])
    assert not rows
    assert about["missing"] == "no timing run of its model, data, pipeline and batch"
    assert about["composed_s"] is None


@pytest.mark.parametrize("same", [{"train": {"lr": 1e-4, "epochs": 9}}, {"task": {"num_sequences": 480}}])
def test_what_takes_no_time_does_not_set_runs_apart(same):
    rows, _ = compose.build([trained(AQ, [LATER] * 6), timing(AQ, 0.3, 0.3, **same)])
    assert len(rows) == 3


@pytest.mark.parametrize("state", ["failed", "foreign"])
def test_only_what_was_timed_here_and_ended_times_others(state):
    assert compose.build([trained(AQ, [LATER] * 6), timing(AQ, 0.3, 0.3, state=state)]) == ([], [])


def test_a_run_that_diverged_keeps_the_epoch_it_broke_off_in_and_a_failed_one_has_no_curve():
    losses = [6.0, 5.0, 4.0, float("inf")]
    rows, _ = compose.build([trained(AQ, [LATER] * 4, losses=losses, state="diverged"), DELTA])
    assert [(row["epoch"], row["train_loss"], row["state"]) for row in rows] == [
        (1, 5.5, "diverged"),
        (2, 4.0, "diverged"),
    ]
    assert compose.build([trained(AQ, [LATER] * 4, state="failed"), DELTA]) == ([], [])


# --- measured ---


def test_a_full_run_has_its_own_times_and_is_held_against_what_is_composed():
    run = trained(AQ, [LATER] * 6, measure="full", rate=100.0, seconds=0.25, fidelity="link-off")
    rows, (about,) = compose.build([run, DELTA])
    found = curve(rows)
    assert [found[e]["t_s"] for e in (1, 2, 3)] == pytest.approx([0.5, 1.0, 1.5])
    assert {(r["composed"], r["timing_run_id"], r["fidelity"]) for r in rows} == {(False, None, "link-off")}
    assert (about["composed_s"], about["measured_s"]) == pytest.approx((1.8, 1.5))
    assert (about["total_error"], about["max_error"]) == pytest.approx((0.2, 0.2))
    assert about["same_losses"] is None
    assert about["fidelity"] == "link-off", "what was measured is flagged, and so is what is held against it"


def test_the_largest_distance_may_lie_in_the_middle():
    run = trained(AQ, [FIRST] * 2 + [LATER] * 4, measure="full", rate=100.0, seconds=0.5)
    _, (about,) = compose.build([run, DELTA])
    # Composed: 1, 2, 2.3, 2.6, 2.9, 3.2 s; measured: 0.5, 1.0 ... 3.0 s.
    assert (about["total_error"], about["max_error"]) == pytest.approx((0.2 / 3, 1.0 / 3))


def test_elsewhere_a_full_run_is_composed_and_not_checked():
    rows, (about,) = compose.build([trained(AQ, [LATER] * 6, measure="full"), DELTA])
    assert {(row["rate_mbit"], row["composed"]) for row in rows} == {(300.0, False), (100.0, True)}
    assert about["measured_s"] is None


@pytest.mark.parametrize(("losses", "same"), [(None, True), ([6.0, 5.0, 4.0, 3.0, 2.0, 1.0 + 2**-40], False)])
def test_runs_of_one_training_must_have_its_losses_bit_for_bit(losses, same):
    full = trained(AQ, [LATER] * 6, measure="full", rate=100.0, losses=losses)
    _, composition = compose.build([trained(AQ, [LATER] * 6), full, DELTA])
    assert [row["same_losses"] for row in composition] == [None, same]


def test_a_foreign_full_run_has_no_times_of_its_own():
    rows, (about,) = compose.build([trained(AQ, [LATER] * 6, measure="full", rate=100.0, state="foreign"), DELTA])
    assert {row["composed"] for row in rows} == {True}
    assert about["measured_s"] is None


# --- replayed ---


def replay(compression, step_s, first_s, *, sent, stages=8, profile="v100-gpt2-xl", model="gpt2", rate=100.0):
    spec = parse(
        {
            **BASE,
            "measure": "timing",
            "compute": "replay",
            "profile": profile,
            "model": {"name": model, "layers": 48} if model == "gpt2" else {"name": model},
            "pipeline": {"stages": stages, "microbatches": 16},
            "network": {"rate_mbit": rate, "rate": "rho:4.1"},
            "compression": compression,
        }
    )
    first, later = sent
    steps = [(0, first, 9.0, first_s, False), (0, later, 9.0, step_s, True)]
    return use_of(spec, steps, times=(step_s, first_s))


def test_a_replay_times_a_small_model_and_says_whose_steps_they_are():
    big = [replay({}, 80.0, 80.0, sent=(FULL, FULL)), replay(AQ, 10.0, 40.0, sent=(FIRST, LATER))]
    rows, _ = compose.build([trained(WARM, [FULL] * 2 + [LATER] * 4), *big])
    assert [row["t_s"] for row in rows] == pytest.approx([160.0, 180.0, 200.0])
    assert {(row["time_of"], row["rho"]) for row in rows} == {("v100-gpt2-xl, 8 stages, 16 micro-batches", 4.1)}


def test_a_real_timing_run_goes_before_a_replay_and_another_model_times_nothing():
    big = replay(AQ, 10.0, 40.0, sent=(FIRST, LATER))
    rows, _ = compose.build([trained(AQ, [LATER] * 6), big, DELTA])
    assert {row["time_of"] for row in rows} == {None}
    other = replay(AQ, 10.0, 40.0, sent=(FIRST, LATER), model="deberta")
    rows, (about,) = compose.build([trained(AQ, [LATER] * 6), other])
    assert not rows
    assert about["missing"]


def test_replays_that_are_cut_otherwise_are_curves_apart():
    big = [replay(AQ, 10.0, 40.0, sent=(FIRST, LATER), stages=s) for s in (4, 8)]
    rows, _ = compose.build([trained(AQ, [LATER] * 6), *big])
    assert len({row["time_of"] for row in rows}) == 2
    assert len(rows) == 6


def test_boundaries_that_differ_cannot_be_told_of_a_model_of_another_depth():
    mixed = {"forward": [{"use": "fixpoint:4"}, {"use": "fixpoint:2", "boundary": 0}]}
    big = replay(mixed, 10.0, 40.0, sent=(FIRST, LATER))
    rows, composition = compose.build([trained(AQ, [LATER] * 6), big])
    assert rows == []
    assert [row["missing"] for row in composition] == [
        "no timing run of forward delta(fixpoint:4), backward fixpoint:8"
    ]


# --- claims about them ---


def test_claims_read_what_was_composed():
    claim = {"name": "total", "sentence": "s", "source": "ours", "part": "loss", "metric": "total_time_s",
             "arm": "AQ", "other": "FP32", "relation": "<"}  # fmt: skip
    whole = {**claim, "name": "whole", "part": "full", "metric": "accounting_ratio", "bound": 1.0, "relation": ">="}
    whole = {**{k: v for k, v in whole.items() if k != "other"}, "args": {"baseline": "FP32"}}
    experiment = expand({
        "name": "e", "seeds": [0, 1, 2],
        "base": {"model.preset": "micro", "network.rate_mbit": 100, "train.epochs": 3},
        "arm": [{"label": "FP32"}, {"label": "AQ", "compression": AQ}],
        "part": [{"name": "time", "base": {"measure": "timing"}},
                 {"name": "loss", "base": {"compression.warmup_epochs": 1}},
                 {"name": "full", "base": {"compression.warmup_epochs": 1, "measure": "full"}}],
        "claim": [claim, whole, {**whole, "name": "identity", "part": "loss"}],
    })  # fmt: skip
    uses = []
    for cell in experiment.cells():
        aq = cell.arm == "AQ"
        for seed, spec in cell.runs:
            step_s = (0.5 if aq else 2.0) * (1 + 0.01 * seed)
            if spec.measure == "timing":
                # Of one seed the runs were disturbed.
                flag, steps = "cpu-bound" if seed == 2 else "ok", [(0, LATER if aq else FULL, 9.0, step_s, True)] * 2
                uses.append(use_of(spec, steps, arm=cell.arm, times=(step_s, step_s), fidelity=flag))
            else:
                # In full, a step takes a tenth more than it was timed with, warm-up and later ones alike.
                steps = [(e, FULL if e == 0 or not aq else LATER, 9.0, 1.1 * (2.0 if e == 0 else step_s), True)
                         for e in (0, 0, 1, 1, 2, 2)]  # fmt: skip
                uses.append(use_of(spec, steps, arm=cell.arm))
                uses[-1].row["warmup_epochs"] = 1
    curves, composition = (pd.DataFrame(rows) for rows in compose.build(uses))
    tables = {"runs": pd.DataFrame([use.row for use in uses]), "curves": curves, "composition": composition}
    total, whole, identity = claims.evaluate(experiment, tables)
    assert (total["state"], total["n"]) == ("undecided", 2)
    assert total["value"] == pytest.approx((4 + 4 * 0.5) / 12, rel=0.02)
    assert "left out 2 timing runs: flagged" in total["why"], "one of each method in it"
    # Measured: (2 + 4 / 4) / 6 of the time, as timed steps say.
    assert whole["value"] == pytest.approx(1.0, rel=0.02)
    assert (whole["n"], identity["state"], identity["n"]) == (2, "undecided", 0)
    assert "composed, of which the accounting is an identity" in identity["why"]
