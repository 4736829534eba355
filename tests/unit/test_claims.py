"""Claims: every state, from made tables; what is refused as it is written; numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import math

import pandas as pd
import pytest
from claim_cases import BAD, TIME, declared, judged, losses, run_rows, timed
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpipe.harness import claims, experiment, verbs
from thinpipe.harness.claims import render as render_claims
from thinpipe.harness.claims.verdict import LEVEL, decide, obeys
from thinpipe.harness.errors import UserError
from thinpipe.harness.stats import interval, t_quantile

# --- states ---


def test_a_claim_holds_fails_and_stays_open():
    demo = declared({})
    clear = losses(demo, AQ=[1.0, 1.1, 0.9], FP32=[2.0, 2.1, 1.9])
    assert (clear["state"], clear["n"], clear["bound"], clear["why"]) == ("holds", 3, 1.0, "")
    logs = interval([math.log(a / b) for a, b in ((1.0, 2.0), (1.1, 2.1), (0.9, 1.9))], LEVEL)
    assert clear["value"] == pytest.approx(math.exp(logs.mean))
    assert clear["interval"] == pytest.approx([math.exp(logs.low), math.exp(logs.high)])
    assert losses(demo, AQ=[2.0, 2.1, 1.9], FP32=[1.0, 1.1, 0.9])["state"] == "fails"
    noisy = losses(demo, AQ=[1.0, 1.3, 1.0], FP32=[1.2, 1.2, 1.3])
    assert noisy["state"] == "undecided"
    assert noisy["needs"] > 3
    assert f"about {noisy['needs']} seeds" in noisy["why"]


def test_seeds_are_paired():
    # Seeds differ by a factor of ten, the arms by 1 %: unpaired it would be noise.
    demo = declared({})
    assert losses(demo, AQ=[0.99, 9.9, 99.1], FP32=[1.0, 10.0, 100.0])["state"] == "holds"


def test_what_is_needed_decides_at_that_spread():
    values = [-0.1, -0.5, 0.3, -0.2]
    found = decide(dict(enumerate(values)), "<")
    assert found.state == "undecided"
    mean = sum(values) / 4
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / 3)

    def high(n):
        return mean + t_quantile(LEVEL, n - 1) * deviation / math.sqrt(n)

    assert high(found.needs) < 0 < high(found.needs - 1)
    wrong_side = decide({0: 0.3, 1: -0.2, 2: 0.1}, "<")
    assert (wrong_side.state, wrong_side.needs) == ("undecided", None)
    assert "wrong side" in wrong_side.why


@pytest.mark.parametrize("n", [1, 2])
def test_few_seeds_decide_nothing_unless_exact(n):
    seeds = range(n)
    found = losses(declared({}, seeds=seeds), AQ=[1.0] * n, FP32=[2.0] * n)
    assert (found["state"], found["n"], found["needs"]) == ("undecided", n, 3)
    exact = declared({"exact": True}, seeds=seeds)
    assert losses(exact, AQ=[1.0] * n, FP32=[2.0] * n)["state"] == "holds"
    assert losses(exact, AQ=[2.0] * n, FP32=[1.0] * n)["state"] == "fails"


@pytest.mark.parametrize(
    ("relation", "state"), [("<", "fails"), ("<=", "holds"), (">", "fails"), (">=", "holds"), ("==", "holds")]
)
def test_identical_values(relation, state):
    found = losses(declared({"relation": relation}), AQ=[1.5] * 3, FP32=[1.5] * 3)
    assert found["state"] == state


def test_zero_spread_decides():
    demo = declared({"relation": "<=", "factor": 1.1})
    assert losses(demo, AQ=[1.05] * 3, FP32=[1.0] * 3)["state"] == "holds"
    assert losses(demo, AQ=[1.15] * 3, FP32=[1.0] * 3)["state"] == "fails"


def test_equivalence():
    demo = declared({"relation": "~", "margin": 0.1})
    near = losses(demo, AQ=[1.01, 1.02, 0.99], FP32=[1.0] * 3)
    assert (near["state"], near["bound"]) == ("holds", pytest.approx([1 / 1.1, 1.1]))
    assert losses(demo, AQ=[1.21, 1.2, 1.22], FP32=[1.0] * 3)["state"] == "fails"
    assert losses(demo, AQ=[0.8, 0.81, 0.79], FP32=[1.0] * 3)["state"] == "fails"
    assert losses(demo, AQ=[1.0, 1.15, 0.9], FP32=[1.0] * 3)["state"] == "undecided"
    bound = declared({"relation": "~", "margin": 0.1, "bound": 2.0, "other": None})
    held = losses(bound, AQ=[2.1, 2.0, 2.05])
    assert (held["state"], held["bound"]) == ("holds", pytest.approx([2 / 1.1, 2.2]))
    assert held["value"] == pytest.approx((2.1 * 2.0 * 2.05) ** (1 / 3))


@pytest.mark.parametrize(
    ("item", "left", "right"),
    [
        # Of each the logs, or the products, are apart by a rounding: log 2.2 - log 2.0 > log 1.1.
        ({"relation": "<=", "factor": 1.1}, 2.2, 2.0),
        ({"relation": ">=", "factor": 1.1}, 2.2, 2.0),
        ({"relation": "<=", "factor": 0.1}, 0.3, 3.0),
        ({"relation": ">=", "factor": 0.1}, 0.3, 3.0),
        ({"relation": "<=", "factor": 1.1, "args": {"scale": "difference"}}, 3.3, 3.0),
        ({"relation": ">=", "factor": 1.1, "args": {"scale": "difference"}}, 3.3, 3.0),
        ({"relation": "~", "margin": 0.1}, 3.3, 3.0),
        ({"relation": "~", "margin": 0.1}, 3.0, 3.3),
    ],
)
@pytest.mark.parametrize("exact", [True, False])
def test_a_value_at_its_bound_is_at_it(item, left, right, exact):
    found = losses(declared({**item, "exact": exact}), AQ=[left] * 3, FP32=[right] * 3)
    assert found["state"] == "holds"
    strict = {"<=": "<", ">=": ">"}.get(item["relation"])
    if strict:
        against = losses(declared({**item, "exact": exact, "relation": strict}), AQ=[left] * 3, FP32=[right] * 3)
        assert against["state"] == "fails"


def test_what_is_off_by_more_than_rounding_is_not_equal():
    demo = declared({"relation": "<=", "exact": True})
    assert losses(demo, AQ=[1e9 + 1] * 3, FP32=[1e9] * 3)["state"] == "fails"


@pytest.mark.parametrize("bound", [10.0, 3.0, 0.1, 1.7])
def test_a_bound_is_reported_as_it_was_written(bound):
    found = losses(declared({"bound": bound, "other": None, "relation": "<="}), AQ=[bound] * 3)
    assert (found["bound"], found["value"], found["state"]) == (bound, bound, "holds")


def test_equal_is_bit_equal_and_one_counterexample_is_enough():
    demo = declared({"relation": "=="})
    assert losses(demo, AQ=[1.0, 2.0, 3.0], FP32=[1.0, 2.0, 3.0])["state"] == "holds"
    off = losses(demo, AQ=[1.0, 2.0, math.nextafter(3.0, 4.0)], FP32=[1.0, 2.0, 3.0])
    assert (off["state"], off["bound"]) == ("fails", 0.0)
    assert 0 < off["value"] < 1e-15
    one = declared({"relation": "=="}, seeds=[0])
    assert losses(one, AQ=[1.0], FP32=[1.0])["state"] == "undecided"
    assert losses(one, AQ=[1.0], FP32=[1.1])["state"] == "fails"


def test_a_difference_where_a_ratio_does_not_exist():
    refused = losses(declared({}), AQ=[0.0, 0.1, 0.1], FP32=[1.0] * 3)
    assert refused["state"] == "undecided"
    assert 'scale = "difference"' in refused["why"]
    demo = declared({"args": {"scale": "difference"}, "factor": 1.5})
    found = losses(demo, AQ=[0.0, 0.1, 0.1], FP32=[1.0, 1.1, 1.0])
    assert (found["state"], found["bound"]) == ("holds", 0.0)
    assert found["value"] == pytest.approx((0.0 - 1.5 + 0.1 - 1.65 + 0.1 - 1.5) / 3)
    allowed = {"metric": "final_matthews", "relation": ">=", "args": {"offset": -0.05}}
    near = declared(allowed)
    values = {"AQ": [-0.01, 0.0, 0.01], "FP32": [0.0, 0.01, 0.0]}
    assert judged(near, run_rows(near, values, "final_matthews"))["state"] == "holds"


# --- runs that end otherwise ---


def test_a_diverged_run_is_worse_than_any_value():
    demo = declared({"relation": ">", "arm": "Direct", "other": "AQ"})
    every = losses(demo, Direct=[BAD] * 3, AQ=[1.0] * 3)
    assert (every["state"], every["value"], every["interval"]) == ("holds", None, None)
    one = losses(demo, Direct=[BAD, 1.5, 1.1], AQ=[1.0] * 3)
    assert (one["state"], "sign" in one["why"]) == ("holds", True)
    mixed = losses(demo, Direct=[BAD, 0.5, 1.1], AQ=[1.0] * 3)
    assert (mixed["state"], "seed 1 against" in mixed["why"]) == ("undecided", True)
    assert losses(demo, Direct=[1.0] * 3, AQ=[BAD] * 3)["state"] == "fails"
    both = losses(demo, Direct=[BAD] * 3, AQ=[BAD] * 3)
    assert (both["state"], "both sides" in both["why"]) == ("undecided", True)
    close = declared({"relation": "~", "margin": 9.0})
    assert losses(close, AQ=[BAD] * 3, FP32=[1.0] * 3)["state"] == "fails"


def test_where_more_is_better_a_diverged_run_is_the_least():
    item = {"metric": "final_accuracy", "bound": 0.85, "other": None, "relation": "<"}
    demo = declared(item)
    runs = run_rows(demo, {"AQ": [BAD, BAD, {"final_accuracy": 0.2}]}, "final_accuracy")
    assert judged(demo, runs)["state"] == "holds"
    demo = declared({**item, "relation": ">="})
    assert judged(demo, runs)["state"] == "fails"


def test_seeds_that_only_one_side_has_are_named():
    parts = [{"name": "loss", "arm": [{"label": "FP32"}, {"label": "AQ", "compression.forward": "fixpoint:2"}]}]
    demo = declared({}, part=parts, seeds=range(5))
    (part,) = demo.parts
    cells = tuple(replaced if cell.arm == "FP32" else cell for cell in part.cells
                  for replaced in [dataclasses.replace(cell, runs=cell.runs[:3])])  # fmt: skip
    demo = dataclasses.replace(demo, parts=(dataclasses.replace(part, cells=cells),))
    found = losses(demo, AQ=[1.0, 1.1, 0.9, 9.0, 9.0], FP32=[2.0, 2.1, 1.9])
    assert (found["state"], found["n"], found["why"]) == ("holds", 3, "only one side has seeds 3, 4")


def test_missing_runs_keep_a_claim_open():
    demo = declared({}, seeds=range(5))
    found = losses(demo, AQ=[1.0, 1.0, 1.1, 1.0, None], FP32=[2.0, 2.1, 2.0, {"state": "failed"}, 2.0])
    assert (found["state"], found["n"], found["needs"]) == ("undecided", 3, None)
    assert found["why"] == "1 run: failed; 1 run: not run yet"
    assert found["value"] == pytest.approx((1.0 / 2.0 * 1.0 / 2.1 * 1.1 / 2.0) ** (1 / 3))
    empty = losses(demo)
    assert (empty["state"], empty["n"], empty["value"]) == ("undecided", 0, None)
    exact = declared({"exact": True})
    assert losses(exact, AQ=[3.0, None, None], FP32=[2.0] * 3)["state"] == "fails"


def test_flagged_runs_never_enter_a_time():
    demo = declared(TIME, seeds=range(4))
    # Rows: FP32 at 100, 30, 10, then AQ: the 9th to 12th are FP32's at 10, the 21st to 24th AQ's.
    values = {"FP32": [2.0, 2.0, 2.1, 2.0], "AQ": [1.0, 1.1, 1.0, 9.0]}
    assert timed(demo, **values)["state"] == "undecided"
    found = timed(demo, flagged=[23], **values)
    assert (found["state"], found["n"], found["why"]) == ("holds", 3, "left out 1 run: flagged")
    alone = timed(demo, flagged=range(36), **values)
    assert (alone["state"], alone["n"]) == ("undecided", 0)
    assert "left out 8 runs: flagged" in alone["why"]
    abroad = timed(demo, state="foreign", **values)
    assert (abroad["state"], abroad["n"]) == ("undecided", 0)
    # A loss is the same on any machine, however busy.
    loss = declared({})
    runs = run_rows(loss, {"AQ": [1.0] * 3, "FP32": [2.0] * 3}, state="foreign")
    assert judged(loss, runs.assign(fidelity="cpu-bound"))["state"] == "holds"


def test_runs_of_another_setting_do_not_count():
    demo, older = declared({}), declared({}, base={"model.preset": "micro", "train.epochs": 3})
    assert judged(demo, run_rows(older, {"AQ": [1.0] * 3, "FP32": [2.0] * 3}))["n"] == 0


# --- several hypotheses ---


def test_a_free_axis_is_asked_at_every_value():
    demo = declared({**TIME, "where": {}, "factor": 0.9})
    values = {"FP32": [2.0, 2.02, 2.01], ("AQ", 100): [1.0, 1.01, 1.02], ("AQ", 30): [1.5, 1.51, 1.52]}
    good = judged(demo, run_rows(demo, {**values, ("AQ", 10): [1.1, 1.1, 1.11]}, "step_time_s", "time"))
    assert (good["state"], len(good["pairs"])) == ("holds", 3)
    assert good["value"] == pytest.approx(0.75, rel=0.01), "the pair nearest to the bound is shown"
    bad = judged(demo, run_rows(demo, {**values, ("AQ", 10): [1.95, 1.96, 1.97]}, "step_time_s", "time"))
    assert (bad["state"], bad["value"]) == ("fails", pytest.approx(0.975, rel=0.01))
    assert [pair["state"] for pair in bad["pairs"]] == ["holds", "holds", "fails"]
    assert bad["pairs"][2]["pair"] == "network.rate_mbit 10"


def test_along_an_axis_each_value_against_the_next():
    demo = declared({**TIME, "where": {}, "along": "network.rate_mbit", "other": None, "arm": "FP32"})
    values = {("FP32", 100): [1.0] * 3, ("FP32", 30): [2.0] * 3, ("FP32", 10): [5.0] * 3}
    found = judged(demo, run_rows(demo, values, "step_time_s", "time"))
    assert (found["state"], found["value"]) == ("holds", pytest.approx(0.5))
    assert [pair["pair"] for pair in found["pairs"]] == [
        "network.rate_mbit 100 against 30",
        "network.rate_mbit 30 against 10",
    ]
    values["FP32", 30] = [6.0] * 3
    assert judged(demo, run_rows(demo, values, "step_time_s", "time"))["state"] == "fails"


def test_along_an_axis_of_gains():
    # FP32 / AQ grows as the link slows down: 2 < 3 < 4.
    item = {**TIME, "where": {}, "along": "network.rate_mbit", "arm": "FP32", "other": "AQ"}
    demo = declared(item)
    values = {("FP32", 100): [2.0] * 3, ("FP32", 30): [3.0] * 3, ("FP32", 10): [4.0] * 3, "AQ": [1.0] * 3}
    found = judged(demo, run_rows(demo, values, "step_time_s", "time"))
    assert (found["state"], found["value"]) == ("holds", pytest.approx(3 / 4))
    falling = declared({**item, "relation": ">"})
    assert judged(falling, run_rows(falling, values, "step_time_s", "time"))["state"] == "fails"


def test_along_arms():
    item = {"arm": None, "other": None, "arms": ["FP32", "AQ", "Direct"]}
    values = {"FP32": [1.0] * 3, "AQ": [1.5] * 3, "Direct": [1.8] * 3}
    assert losses(declared(item), **values)["state"] == "holds"
    tolerant = declared({**item, "arms": ["AQ", "FP32", "Direct"], "factor": 1.6})
    assert losses(tolerant, **values)["state"] == "holds"
    assert losses(declared({**item, "arms": ["AQ", "FP32"]}), **values)["state"] == "fails"
    gaps = {**item, "arms": ["Direct", "AQ"], "args": {"others": ["AQ", "FP32"]}}
    # Direct / AQ = 1.2 against AQ / FP32 = 1.5.
    assert losses(declared(gaps), **values)["value"] == pytest.approx(1.2 / 1.5)


def test_one_cell_of_the_other_side_serves_all():
    item = {**TIME, "arm": "FP32", "other": "FP32", "where": {}, "other_where": {"network.rate_mbit": 100}}
    demo = declared({**item, "relation": ">=", "factor": 4.0, "where": {"network.rate_mbit": 10}})
    values = {("FP32", 100): [1.0] * 3, ("FP32", 30): [2.0] * 3, ("FP32", 10): [5.0] * 3}
    assert judged(demo, run_rows(demo, values, "step_time_s", "time"))["value"] == pytest.approx(5.0)
    every = declared({**item, "relation": ">="})
    found = judged(every, run_rows(every, values, "step_time_s", "time"))
    assert [pair["value"] for pair in found["pairs"]] == pytest.approx([1.0, 2.0, 5.0])


def test_failing_by_one_of_many_takes_a_wider_interval():
    values = {0: 0.5, 1: 0.2, 2: 0.4}
    assert decide(values, "<").state == "fails"
    wide = decide(values, "<", tests=40)
    assert wide.state == "undecided"
    assert wide.why.startswith("against it, but not at the level for 40 pairs")
    mean, deviation = sum(values.values()) / 3, pd.Series(values).std()
    level = 1 - (1 - LEVEL) / 40
    low = {n: mean - t_quantile(level, n - 1) * deviation / math.sqrt(n) for n in (wide.needs - 1, wide.needs)}
    assert low[wide.needs] > 0 > low[wide.needs - 1]
    outside = decide({seed: -v for seed, v in values.items()}, "~", margin=0.01, tests=40)
    assert (outside.state, outside.why.partition(",")[0], outside.needs > 3) == ("undecided", "against it", True)
    # Holding needs no correction: every pair has to.
    assert decide({s: -v for s, v in values.items()}, "<", tests=40).state == "holds"


def test_sizes_choose_claims_and_names_say_so():
    sizes = {"check": {"seeds": [0]}, "cpu": {}}
    demo = declared({}, {"sizes": ["paper"], "arm": "of the paper's"}, size=sizes)
    assert (demo.name, [claim.name for claim in demo.claims]) == ("demo.cpu", ["c0"])


# --- properties ---

VALUES = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(VALUES, st.floats(0.2, 5.0), st.floats(1.0, 3.0), st.sampled_from(["<", "<="]), st.booleans())
def test_a_larger_factor_never_turns_holds_into_fails(ratios, factor, more, relation, exact):
    order = ["fails", "undecided", "holds"]

    def state(by):
        distances = {seed: math.log(ratio) - math.log(by) for seed, ratio in enumerate(ratios)}
        return order.index(decide(distances, relation, exact=exact).state)

    assert state(factor * more) >= state(factor)


@settings(max_examples=40, deadline=None)
@given(VALUES, st.sampled_from([("<", ">"), ("<=", ">=")]))
def test_a_claim_and_its_mirror_agree(ratios, pair):
    logs = {seed: math.log(ratio) for seed, ratio in enumerate(ratios)}
    mirrored = {seed: -value for seed, value in logs.items()}
    assert decide(logs, pair[0]).state == decide(mirrored, pair[1]).state


@settings(max_examples=40, deadline=None)
@given(VALUES, st.floats(0.01, 2.0), st.floats(0.0, 2.0))
def test_a_wider_margin_never_turns_holds_into_fails(ratios, margin, more):
    logs = {seed: math.log(ratio) for seed, ratio in enumerate(ratios)}
    order = ["fails", "undecided", "holds"]
    narrow, wide = (order.index(decide(logs, "~", margin=m).state) for m in (margin, margin + more))
    assert wide >= narrow


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.1, 10.0) | st.just(math.inf), min_size=3, max_size=6))
def test_no_state_goes_against_all_seeds(ratios):
    logs = {seed: math.log(ratio) if math.isfinite(ratio) else ratio for seed, ratio in enumerate(ratios)}
    found = decide(logs, "<")
    answers = {obeys(value, "<") for value in logs.values()}
    assert not (found.state == "holds" and answers == {False})
    assert not (found.state == "fails" and answers == {True})


# --- as written ---


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"metric": "final_train_los"}, "Did you mean 'final_train_loss'"),
        ({"arm": "AQs"}, "Did you mean 'AQ'"),
        ({"other": "FP23"}, "Did you mean 'FP32'"),
        ({"part": "los"}, "Did you mean 'loss'"),
        ({"bound": 1.0}, "bound and other exclude"),
        ({"other": None}, "compares with nothing"),
        ({"relation": "~"}, "margin above 0"),
        ({"relation": "~", "margin": 0.1, "factor": 2.0}, "factor goes with"),
        ({"margin": 0.1}, "margin goes with ~"),
        ({"factor": 0.0}, "factor must be above 0"),
        ({"bound": -1.0, "other": None}, "no ratio"),
        ({"arm": None}, "needs arm"),
        ({"arms": ["AQ", "FP32"]}, "leave arm out"),
        ({"arms": ["AQ"], "arm": None, "other": None}, "two labels"),
        ({"args": {"stepp": 3}}, "no argument 'stepp'"),
        ({"args": {"scale": "log"}}, "unknown args.scale"),
        ({"metric": "accounting", "args": {"s": 0, "epochs": 10}}, "args.s must be a number above 0"),
        ({"metric": "accounting", "args": {"s": 2, "epochs": 2, "warmup": 5}}, "more than args.epochs"),
        ({"metric": "warmup_losses", "args": {"epochs": 0}}, "args.epochs must be a whole number from 1"),
        ({"metric": "loss_at_step", "args": {"step": True}}, "args.step must be a whole number from 0"),
        ({"metric": "sent_bytes", "args": {"direction": "forwards"}}, "Did you mean 'forward'"),
        ({"args": {"offset": 1.0}}, "args.offset goes with"),
        ({"metric": "loss_at_step"}, "needs args.step"),
        ({"metric": "warmup_losses"}, "is a sequence"),
        ({"metric": "step_time_s"}, "measures convergence"),
        ({"where": {"train.lrr": 1.0}}, "unknown setting 'train.lrr'"),
        ({"where": {"train.epochs": 9}}, "no cell with train.epochs = 9; there is 4"),
        ({"along": "train.epochs", "other": None}, "one value of train.epochs"),
        ({**TIME, "where": {"network.rate_mbit": 10}, "other_where": {"network.rate_mbit": 20}},
         "there is 100, 30, 10"),
        ({"metric": "time_to_target_s", "other": None, "bound": 3.0}, "needs args.target"),
        ({"metric": "accounting", "args": {"s": 2, "epochs": 10}, "other": None, "bound": 1.8}, "no arm"),
        ({"relation": "==", "factor": 1.1}, "factor goes with"),
        ({**TIME, "exact": True}, "step_time_s is a time"),
    ],
)  # fmt: skip
def test_what_cannot_be_judged_is_refused_at_load_time(item, message):
    with pytest.raises(UserError, match=r"claim 'c0': ") as refused:
        declared(item)
    assert message in str(refused.value)


def test_a_claim_that_changes_leave_nothing_to_compare_is_not_asked_and_named():
    whole = experiment.load("acsgd/T2", size="cpu")
    assert whole.unasked == {}
    one = experiment.load("acsgd/T2", ["network.rate_mbit=300"], "cpu")
    assert "one value of network.rate_mbit" in one.unasked["gpt2-xl: FP32 falls"]
    assert "no cell with network.rate_mbit = 100" in one.unasked["gpt2-xl: AQ-SGD beats FP32 at 100 Mbit/s"]
    assert {claim.name for claim in one.claims} | set(one.unasked) == {claim.name for claim in whole.claims}
    assert "gpt2-xl: AQ-SGD beats FP32 at 300 Mbit/s" in {claim.name for claim in one.claims}
    assert experiment.load("acsgd/T2", ["seeds=[0]"], "cpu").unasked == {}


def test_a_plan_names_the_claims_that_are_not_asked(tmp_path, capsys):
    verbs.planned("acsgd/T2", ["network.rate_mbit=300"], tmp_path, only=None, limit=None, size="cpu")
    assert "not asked with --set: acsgd/T2 claim 'gpt2-xl: FP32 falls'" in capsys.readouterr().err


def test_a_cell_without_a_counterpart_is_refused():
    arms = [{"label": "FP32", "measure": "full", "network.rate_mbit": 50}, {"label": "AQ"}]
    with pytest.raises(UserError, match=r"has 0 cells to hold against 'FP32' at network.rate_mbit 50"):
        declared({"metric": "total_time_s", "arm": "FP32", "other": "AQ"}, part=[
            {"name": "loss", "arm": arms},
            {"name": "time", "base": {"measure": "timing"}, "axes": {"network.rate_mbit": [100, 30]}},
        ])  # fmt: skip


# --- what is done with them ---


def test_the_exit_code_is_of_failing_claims_only():
    states = [{"state": "holds"}, {"state": "undecided"}]
    assert claims.outcome_table(states) == 0
    assert claims.outcome_table([*states, {"state": "fails"}]) == 1
    assert claims.outcome_table([]) == 0


def test_what_one_metric_lacks_is_said_of_its_claim_alone(monkeypatch):
    def lacking(subject):
        raise UserError("there is no profile 'gone'")

    metric = dataclasses.replace(claims.REGISTRY["final_eval_loss"], function=lacking)
    monkeypatch.setitem(claims.REGISTRY, "final_eval_loss", metric)
    demo = declared({}, {"metric": "final_eval_loss"})
    good, bad = judged(demo, run_rows(demo, {"AQ": [1.0, 1.0, 1.1], "FP32": [2.0, 2.0, 2.1]}))
    assert (good["state"], bad["state"]) == ("holds", "undecided")
    assert "no profile 'gone'" in bad["why"]


def test_rendered_claims_show_everything_that_was_said(capsys):
    demo = declared({"name": "a [bold] name"}, {"relation": "~", "margin": 0.1, "sentence": "They are about equal."})
    found = judged(demo, run_rows(demo, {"AQ": [1.0, 1.0, None], "FP32": [2.0, 2.0, 2.1]}))
    render_claims.render(found)
    shown = capsys.readouterr().out
    for text in ("a [bold] name", "It is so.", "They are about equal.", "< 1", "0.9091 .. 1.1", "1 run: not run yet"):
        assert text in shown
    assert "2 claims: 0 holds, 0 fails, 2 undecided." in shown
    render_claims.render([])
    assert "no claims" in capsys.readouterr().out
