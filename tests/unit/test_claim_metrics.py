"""Metrics of claims: numbers worked out by hand, and claims about curves."""

from __future__ import annotations

import functools
import itertools
import math

import pandas as pd
import pytest
from claim_cases import BAD, declared, judged, run_id, run_rows

from thinpipe.harness import metrics
from thinpipe.harness.claims import metrics as claim_metrics
from thinpipe.harness.claims.scope import Network
from thinpipe.harness.claims.subject import NoValue, Subject
from thinpipe.harness.claims.times import gpipe_bound_s, speed_up
from thinpipe.harness.claims.verdict import LEVEL
from thinpipe.harness.profile import StageTimes
from thinpipe.harness.spec import RunSpec
from thinpipe.harness.stats import TOLERANCE, t_quantile

# --- metrics ---


def test_every_number_of_the_runs_table_says_which_way_is_better():
    settings_of_runs = {"seed", "stages", "groups", "microbatches", "batch_size", "forward_bits", "backward_bits",
                        "warmup_epochs", "rate_mbit", "measured_rate_mbit", "rho", "steps"}  # fmt: skip
    numeric = {name for name, column in metrics.RUNS.items() if column.type in (int, float)}
    assert numeric <= claim_metrics.REGISTRY.keys()
    undecided = {name for name in numeric if claim_metrics.REGISTRY[name].better is None}
    assert undecided == settings_of_runs
    assert set(claim_metrics.TIMED) | set(claim_metrics.DIFFERENCES) <= numeric
    for name in numeric:
        assert not name.endswith("_s") or claim_metrics.REGISTRY[name].is_time, name


def subject(row=None, spec=None, args=None, network=None, reference=None, **frames):
    frames = {name: pd.DataFrame(rows) for name, rows in frames.items()}
    return Subject(spec or RunSpec(), {"state": "done", **(row or {})}, frames.get, args or {}, network, reference)


def value(name, **given):
    metric = claim_metrics.REGISTRY[name]
    given["args"] = {**metric.args, **given.get("args", {})}
    return metric.function(subject(**given))


STEPS = [
    {"step": step, "epoch": step // 2, "rank": rank, "train_loss": loss if rank else None}
    for step, loss in enumerate([4.0, 3.0, 2.0, 1.5, 1.2, 1.0])
    for rank in (0, 1)
]


def test_metrics_of_losses():
    assert value("warmup_losses", steps=STEPS, args={"epochs": 2}) == (4.0, 3.0, 2.0, 1.5)
    assert value("first_epoch_loss", steps=STEPS) == 3.5
    assert value("loss_at_step", steps=STEPS, args={"step": 4}) == 1.2
    assert value("loss_over_initial", steps=STEPS, row={"final_train_loss": 1.1}) == pytest.approx(1.1 / 4.0)
    evals = [{"accuracy": a, "eval_loss": e} for a, e in ((0.5, 2.0), (0.75, 1.0), (0.7, 1.25))]
    assert (value("max_accuracy", evals=evals), value("best_eval_loss", evals=evals)) == (0.75, 1.0)
    with pytest.raises(NoValue, match="no step 9"):
        value("loss_at_step", steps=STEPS, args={"step": 9})
    with pytest.raises(NoValue, match="no rows of evals"):
        value("max_accuracy")


def transfers(**columns):
    """A row an epoch of a boundary, forward, and one of the backward direction that is not meant."""
    count = max(len(v) for v in columns.values())
    rows = [{name: values[i] for name, values in columns.items()} for i in range(count)]
    forward = [{"epoch": i, "step": i, "direction": "forward", "boundary": 0, **row} for i, row in enumerate(rows)]
    return [*forward, {**forward[-1], "direction": "backward", "rel_error": 9.0, "mean_abs_change": 9.0}]


def test_metrics_of_changes_and_errors():
    sent = transfers(
        mean_abs=[2.0, 2.0, 1.0, 2.0], mean_abs_change=[None, 1.0, 0.2, 0.1], rel_error=[0.0, 0.4, 0.2, 0.1]
    )
    found = {name: value(name, transfers=sent) for name in (
        "change_ratio_first", "change_ratio_last", "change_ratio_max", "change_ratio_decay", "change_ratio_spearman",
        "rel_error_first", "rel_error_last", "rel_error_decay", "error_per_change",
    )}  # fmt: skip
    assert found == {
        "change_ratio_first": 0.5, "change_ratio_last": 0.05, "change_ratio_max": 0.5, "change_ratio_decay": 0.1,
        "change_ratio_spearman": pytest.approx(-1.0), "rel_error_first": 0.4, "rel_error_last": 0.1,
        "rel_error_decay": 0.25, "error_per_change": pytest.approx(0.1 / 0.05),
    }  # fmt: skip
    assert value("rel_error_at", transfers=sent, args={"visit": 2}) == 0.2
    with pytest.raises(NoValue, match="no mean_abs_change"):
        value("change_ratio_first", transfers=transfers(mean_abs=[1.0], mean_abs_change=[None]))
    with pytest.raises(NoValue, match="nothing was lost"):
        value("rel_error_first", transfers=transfers(rel_error=[0.0, 0.0]))


def test_bytes_against_the_published_formula():
    # GPT-2 micro as the default task has it: 4 micro-batches of 4 x 64 tokens; width from the model itself.
    spec = RunSpec.model_validate({"model": {"preset": "micro"}, "compression": {"forward": "delta(fixpoint:3)"}})
    from thinpipe.harness.models.base import resolve

    width = resolve(spec.model, spec.task).width
    elements = 4 * 64 * width
    exact = 4 * (math.ceil(elements * 3 / 8) + 2 * width)
    sent = transfers(
        raw_bytes=[4 * 4 * elements] * 2, payload_bytes=[4 * 4 * elements, exact], frame_bytes=[0, exact + 256],
        messages=[4, 4], compressor=["none", "delta(fixpoint:3)"],
    )  # fmt: skip
    assert value("bytes_formula_ratio", spec=spec, transfers=sent) == 1.0
    assert value("bits_per_element", transfers=sent) == 8 * (exact + 256) / (4 * elements)
    assert value("sent_bytes", transfers=sent) == exact + 256
    sent[1]["payload_bytes"] += 1
    assert value("bytes_formula_ratio", spec=spec, transfers=sent) > 1.0
    sent[1]["compressor"] = "topk:0.1"
    with pytest.raises(NoValue, match="not of topk"):
        value("bytes_formula_ratio", spec=spec, transfers=sent)


def test_parts_of_a_step():
    row = {"compute_s": 0.5, "codec_s": 0.1, "wait_s": 0.2, "idle_s": 0.1, "step_time_s": 1.0}
    assert value("codec_fraction", row=row) == pytest.approx(0.1)
    assert value("time_sum_error", row=row) == pytest.approx(0.1)
    with pytest.raises(NoValue, match="wait_s is empty"):
        value("time_sum_error", row={**row, "wait_s": float("nan")})


@pytest.mark.parametrize("transfer", [0.001, 0.5])
@pytest.mark.parametrize(("stages", "micro"), [(2, 8), (8, 32), (4, 1)])
def test_the_bound_is_the_published_model(stages, micro, transfer):
    # References: phase = t_c + (K - 1)(t_c + t_m) + (M - 1) max(t_c, t_m), forward and backward.
    def phase(compute):
        return compute + (stages - 1) * (compute + transfer) + (micro - 1) * max(compute, transfer)

    times = [StageTimes(0.05, 0.15, 1.0)] * stages
    links = [transfer] * (stages - 1)
    assert gpipe_bound_s(times, links, links, micro) == pytest.approx(phase(0.05) + phase(0.15))


@pytest.mark.parametrize("mtu", [1500, 9000])
def test_a_replayed_step_over_its_bound(mtu):
    spec = RunSpec.model_validate({
        "model": {"preset": "xl"}, "task": {"sequence_length": 1024}, "measure": "timing", "compute": "replay",
        "profile": "v100-gpt2-xl", "pipeline": {"stages": 8, "microbatches": 2},
        "network": {"rate_mbit": 500, "mtu": mtu},
        "train": {"batch_size": 2, "recompute": True},
    })  # fmt: skip
    from thinpipe.harness import profile

    frame = (mtu - 52) * 100
    # A memory's first visits are sent in full, in a step that is not measured.
    sent = [
        {"step": step, "epoch": 0, "direction": d, "boundary": b, "frame_bytes": 2 * size, "messages": 2}
        for d in ("forward", "backward")
        for b in range(7)
        for step, size in enumerate((9 * frame, frame))
    ]
    steps = [{"step": step, "epoch": 0, "rank": 0, "measured": bool(step)} for step in (0, 1)]  # fmt: skip
    tau = [8 * (frame + 66 * 100) / 500e6] * 7
    bound = gpipe_bound_s(profile.of_spec(profile.load("v100-gpt2-xl"), spec), tau, tau, 2)
    row = {"step_time_s": 1.1 * bound}
    assert value("step_time_over_bound", spec=spec, row=row, steps=steps, transfers=sent) == pytest.approx(1.1)
    assert value("throughput_over_bound", spec=spec, row=row, steps=steps, transfers=sent) == pytest.approx(1 / 1.1)
    with pytest.raises(NoValue, match="replayed runs"):
        value("step_time_over_bound", row=row, transfers=sent)


@functools.cache
def link(rate=100.0, **more):
    return RunSpec.model_validate({"network": {"rate_mbit": rate, **more}})


@functools.cache
def network_id(spec):
    return spec.network_id


HERE = Network((link(),))


def curve_rows(step_s, spec=None, losses=(3.5, 1.75, 1.1), **more):
    return [{"network_id": network_id(spec or link()), "time_of": None, "fidelity": "ok", "step": 2 * epoch,
             "epoch": epoch, "t_s": 2 * epoch * step_s, "train_loss": loss, "timing_run_id": None, "composed": False,
             "flagged_runs": 0, **more} for epoch, loss in enumerate(losses, 1)]  # fmt: skip


def test_time_and_bytes_to_target():
    sent = [{"step": row["step"], "frame_bytes": 10} for row in STEPS]
    # The other ends at 2.1; of the run the epochs' means are 3.5, 1.75, 1.1.
    base = subject({"final_train_loss": 2.1})
    given = {"steps": STEPS, "transfers": sent, "curves": curve_rows(0.5), "network": HERE}
    assert value("time_to_target_s", reference=base, **given) == 4 * 0.5
    assert value("bytes_to_target", reference=base, **given) == 4 * 2 * 10
    assert value("time_to_target_s", reference=base, args={"tolerance": 0.1}, **given) == math.inf
    assert value("time_to_target_s", reference=base, args={"tolerance": 2.0}, **given) == 2 * 0.5
    with pytest.raises(NoValue, match="sets the target"):
        value("time_to_target_s", reference=subject({"state": "diverged", "final_train_loss": 2.1}), **given)
    assert value("total_time_s", **given) == 3.0
    two = [*curve_rows(0.5, time_of="a"), *curve_rows(0.6, time_of="b")]
    with pytest.raises(NoValue, match="several things timed it"):
        value("total_time_s", **{**given, "curves": two})
    assert value("total_time_s", args={"time_of": "b"}, **{**given, "curves": two}) == pytest.approx(3.6)


@pytest.mark.parametrize("last", [2.0, 2.0 / TOLERANCE, 1.96])
def test_claims_and_figures_reach_a_target_at_the_same_time(last):
    from thinpipe.plots import _composed

    rows = curve_rows(0.5, losses=(3.0, 2.0, 1.9999), arm="a", seed=0, state="done")
    runs = pd.DataFrame([{"arm": "FP32", "seed": 0, "state": "done", "final_train_loss": last}])
    shown = _composed.reached(pd.DataFrame(rows), _composed.targets(runs, "FP32"))["a"].times.get(0, math.inf)
    assert value("time_to_target_s", curves=rows, network=HERE, reference=subject({"final_train_loss": last})) == shown
    assert f"({TOLERANCE} unless given)" in claim_metrics.REGISTRY["time_to_target_s"].meaning


def test_a_curve_is_found_by_its_network_not_by_its_rate():
    short = link(queue_ms=10.0)
    both = [*curve_rows(0.5), *curve_rows(2.0, short)]
    assert value("total_time_s", curves=both, network=HERE) == 3.0
    assert value("total_time_s", curves=both, network=Network((short,))) == 12.0
    lacking = [{"network_id": network_id(spec), "time_of": None, "missing": f"no timing run of {name}"}
               for name, spec in (("a", link(30.0)), ("b", link(30.0, queue_ms=10.0)))]  # fmt: skip
    with pytest.raises(NoValue, match=r"^has no curve at 30 Mbit/s \(no timing run of a\)$"):
        value("total_time_s", curves=both, composition=lacking, network=Network((link(30.0),)))
    with pytest.raises(NoValue, match="several networks of 100 Mbit/s"):
        value("total_time_s", curves=both, network=Network((link(), short)))


def test_speed_up_accounting():
    assert speed_up(6.8, 10, 1) == pytest.approx(10 / (1 + 9 / 6.8))
    assert speed_up(8.5, 10, 1) == pytest.approx(10 / (1 + 9 / 8.5))
    assert value("accounting", args={"s": 2.0, "epochs": 4}) == 1.6


def full_run(step_s, ends_s, *, composed=False, fidelity="ok", **more):
    """A run of three epochs whose ends were measured, and what the timing runs of its network say of its steps."""
    rows = [{**row, "t_s": t_s} for row, t_s in zip(curve_rows(1.0, composed=composed), ends_s, strict=True)]
    about = {"network_id": network_id(link()), "time_of": None, "fidelity": fidelity, "missing": None}
    return {"curves": rows, "composition": [{**about, "step_s": step_s, "measured_s": ends_s[-1]}], **more}


def test_the_accounting_is_held_against_what_was_measured_in_full():
    # A first epoch as slow as the other's, the two after four times as fast as timed: 6 / (2 + 4 / 4) = 2.
    slow = subject(**full_run(1.0, (2.0, 4.0, 6.0)), network=HERE)
    given = {"row": {"warmup_epochs": 1}, "network": HERE, "reference": slow}
    assert value("accounting_ratio", **full_run(0.25, (2.0, 2.5, 3.0)), **given) == pytest.approx(1.0)
    # The whole took longer than its timed steps say: what a composed curve could never show.
    assert value("accounting_ratio", **full_run(0.25, (2.0, 3.0, 4.0)), **given) == pytest.approx(0.75)
    with pytest.raises(NoValue, match="composed, of which the accounting is an identity"):
        value("accounting_ratio", **full_run(0.25, (2.0, 2.5, 3.0), composed=True), **given)
    with pytest.raises(NoValue, match="flagged"):
        value("accounting_ratio", **full_run(0.25, (2.0, 2.5, 3.0), fidelity="link-off"), **given)
    with pytest.raises(NoValue, match="no timing run has its last epoch's compressors"):
        value("accounting_ratio", **full_run(None, (2.0, 2.5, 3.0)), **given)


def test_composition_error():
    rows = [{"total_error": error, "fidelity": f} for error, f in ((0.01, "ok"), (0.03, "ok"), (0.2, "cpu-bound"))]
    assert value("composition_error", composition=rows) == 0.03
    with pytest.raises(NoValue, match="flagged"):
        value("composition_error", composition=rows[2:])


def curves_of(experiment, step_s, flagged=(), timing="a+b+c", left_out=0):
    """A curve for each run of part `loss` at each network of part `time`: step_s[arm] at 100 Mbit/s, slower in
    proportion below. timing: the timing runs of all seeds, or of each."""
    rows = []
    timed = {cell.runs[0][1].network: cell.runs[0][1] for cell in experiment.parts[1].cells}
    for cell, at in itertools.product(experiment.parts[0].cells, timed.values()):
        rate = at.network.rate_mbit
        for seed, spec in cell.runs:
            flag = "link-off" if (cell.arm, rate, seed) in flagged else "ok"
            ids = timing if timing is None or isinstance(timing, str) else timing[seed]
            own = {"fidelity": flag, "timing_run_id": ids, "composed": ids is not None, "flagged_runs": left_out}
            own = curve_rows(step_s[cell.arm] * 100 / rate, at, **own)
            rows += [{"run_id": run_id(spec), **row} for row in own]
    return pd.DataFrame(rows)


def test_a_claim_about_curves_has_the_networks_of_the_timing_runs():
    item = {"metric": "total_time_s", "factor": 0.9}
    demo = declared(item, {**item, "where": {"network.rate_mbit": 30}})
    runs = run_rows(demo, {"AQ": [1.0] * 3, "FP32": [1.0] * 3, "Direct": [1.0] * 3})
    curves = curves_of(demo, {"FP32": 1.0, "AQ": 0.5, "Direct": 0.5})
    every, one = judged(demo, runs, curves=curves)
    assert [pair["pair"] for pair in every["pairs"]] == [f"network.rate_mbit {rate}" for rate in (100, 30, 10)]
    assert (every["state"], one["state"], one["value"]) == ("holds", "holds", pytest.approx(0.5))
    flagged = {("AQ", 30, 0), ("FP32", 30, 1)}
    _, one = judged(demo, runs, curves=curves_of(demo, {"FP32": 1.0, "AQ": 0.5, "Direct": 0.5}, flagged))
    assert (one["state"], one["n"]) == ("undecided", 1)
    _, one = judged(demo, runs)
    assert (one["state"], one["why"]) == ("undecided", "6 runs: no rows of curves")


STEP_S = {"FP32": 1.0, "AQ": 0.5, "Direct": 0.5}


@pytest.mark.parametrize(
    ("timing", "state", "n"),
    [("a", "undecided", 1), ("a+b", "undecided", 2), (None, "holds", 3), ("abc", "holds", 3), ("aab", "undecided", 2)],
)
def test_more_trainings_do_not_make_a_composed_time_surer(timing, state, n):
    demo = declared({"metric": "total_time_s", "where": {"network.rate_mbit": 10}})
    runs = run_rows(demo, {"AQ": [1.0] * 3, "FP32": [1.0] * 3})
    timing = dict(enumerate(timing)) if timing in ("abc", "aab") else timing
    found = judged(demo, runs, curves=curves_of(demo, STEP_S, timing=timing))
    assert (found["state"], found["n"]) == (state, n)
    assert (f"composed of those of {n} timing run" in found["why"]) == (n < 3)


def test_the_interval_of_trainings_that_share_times_is_of_as_many_as_the_timing_runs():
    demo = declared({"metric": "total_time_s", "where": {"network.rate_mbit": 10}}, seeds=range(6))
    runs = run_rows(demo, {"AQ": [1.0] * 6, "FP32": [1.0] * 6})
    curves = curves_of(demo, STEP_S, timing=dict(enumerate(("a", "b", "c", "a+b+c", "a+b+c", "a+b+c"))), left_out=1)
    own = dict(
        zip((run_id(spec) for _, spec in demo.parts[0].cells[1].runs), (1.0, 1.1, 1.2, 1.1, 1.1, 1.1), strict=True)
    )
    found = judged(demo, runs, curves=curves.assign(t_s=curves["t_s"] * curves["run_id"].map(own).fillna(1.0)))
    logs = [math.log(0.5 * factor) for factor in own.values()]
    spread = pd.Series(logs).std()
    half = t_quantile(LEVEL, 2) * spread / math.sqrt(3)
    mean = sum(logs) / 6
    assert (found["state"], found["n"]) == ("holds", 3)
    assert found["interval"] == pytest.approx([math.exp(mean - half), math.exp(mean + half)])
    assert "the times of 6 trainings are composed of those of 3 timing runs" in found["why"]
    assert "left out 1 timing run: flagged" in found["why"]


def test_networks_of_one_rate_are_hypotheses_apart():
    item = {"metric": "total_time_s", "where": {"network.rate_mbit": 100}}
    parts = [{"name": "loss"}, {"name": "time", "base": {"measure": "timing", "network.rate_mbit": 100},
                                "axes": {"network.queue_ms": [100, 10]}}]  # fmt: skip
    demo = declared(item, {**item, "where": {"network.queue_ms": 10}}, part=parts)
    runs = run_rows(demo, {"AQ": [1.0] * 3, "FP32": [1.0] * 3})
    curves = curves_of(demo, STEP_S, timing=dict(enumerate("abc")))
    short = {cell.runs[0][1].network_id for cell in demo.parts[1].cells if cell.runs[0][1].network.queue_ms == 10}
    slow_ids = {run_id(spec) for cell in demo.parts[0].cells if cell.arm == "AQ" for _, spec in cell.runs}
    worse = curves["network_id"].isin(short) & curves["run_id"].isin(slow_ids)
    every, one = judged(demo, runs, curves=curves.assign(t_s=curves["t_s"].where(~worse, 4 * curves["t_s"])))
    assert [(pair["pair"], pair["state"]) for pair in every["pairs"]] == [
        ("network.queue_ms 100", "holds"),
        ("network.queue_ms 10", "fails"),
    ]
    assert (one["state"], one["value"]) == ("fails", pytest.approx(2.0))


def test_a_target_of_another_arm():
    item = {"metric": "time_to_target_s", "arm": "AQ", "other": "Direct", "relation": "<=",
            "where": {"network.rate_mbit": 100}, "args": {"target": "FP32"}}  # fmt: skip
    demo = declared(item)
    runs = run_rows(demo, {"AQ": [1.0] * 3, "FP32": [1.1] * 3, "Direct": [BAD, 1.0, 1.0]})
    curves = curves_of(demo, {"FP32": 1.0, "AQ": 0.5, "Direct": 0.6}, timing=dict(enumerate("abc")))
    found = judged(demo, runs, curves=curves)
    assert (found["state"], found["value"]) == ("holds", None), "a diverged run never gets there"
    runs = run_rows(demo, {"AQ": [1.0] * 3, "FP32": [BAD] * 3, "Direct": [1.0] * 3})
    lost = judged(demo, runs, curves=curves)
    assert "sets the target diverged" in lost["why"]


def test_the_start_of_a_diverged_run_counts():
    demo = declared({"metric": "warmup_losses", "relation": "=="})
    runs = run_rows(demo, {"AQ": [BAD] * 3, "FP32": [1.0] * 3})
    steps = pd.DataFrame([{"run_id": run_id, **row} for run_id in runs["run_id"] for row in STEPS])
    assert judged(demo, runs, steps=steps)["state"] == "holds"
    short = steps[(steps["step"] != 1) | (steps["run_id"] != runs["run_id"].iloc[0])]
    found = judged(demo, runs, steps=short)
    assert (found["state"], found["value"]) == ("fails", None), "of another length is not equal"


def test_accounting_needs_no_run():
    item = {"metric": "accounting", "arm": None, "other": None, "relation": "~", "bound": 4.3, "margin": 0.02}
    demo = declared({**item, "args": {"s": 6.8, "epochs": 10}}, {**item, "args": {"s": 5.0, "epochs": 10}})
    good, bad = judged(demo, run_rows(demo, {}))
    assert (good["state"], good["value"], good["n"]) == ("holds", pytest.approx(4.303, abs=1e-3), 0)
    assert bad["state"] == "fails"
