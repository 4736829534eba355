"""Claims: every state, from made tables; what is refused as it is written; numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpipe.harness import claims, metrics
from thinpipe.harness import declared as declared_module
from thinpipe.harness.claims import metrics as claim_metrics
from thinpipe.harness.claims import render as render_claims
from thinpipe.harness.claims.scope import Network
from thinpipe.harness.claims.subject import REQUIRED, NoValue, Subject
from thinpipe.harness.claims.times import gpipe_bound_s, speed_up
from thinpipe.harness.claims.verdict import LEVEL, decide, obeys
from thinpipe.harness.errors import UserError
from thinpipe.harness.experiment import expand
from thinpipe.harness.profile import StageTimes
from thinpipe.harness.spec import RunSpec
from thinpipe.harness.stats import TOLERANCE, interval, t_quantile

KEYS = ("experiment", "claim", "state", "value", "bound", "interval", "n", "source")


GRID = {
    "name": "demo",
    "base": {"model.preset": "micro", "train.epochs": 4},
    "arm": [
        {"label": "FP32"},
        {"label": "AQ", "compression.forward": "delta(fixpoint:2)"},
        {"label": "Direct", "compression.forward": "fixpoint:2"},
    ],
    "part": [
        {"name": "loss"},
        {"name": "time", "base": {"measure": "timing"}, "axes": {"network.rate_mbit": [100, 30, 10]}},
    ],
}
CLAIM = {"name": "c", "sentence": "It is so.", "source": "ours", "part": "loss", "metric": "final_train_loss",
         "arm": "AQ", "other": "FP32", "relation": "<"}  # fmt: skip


@functools.cache
def grid(seeds):
    return expand({**GRID, "seeds": list(seeds)})


def declared(*items, seeds=(0, 1, 2), **more):
    """An experiment of three methods, trained in one part, timed at three rates in another, and its claims. An item is
    CLAIM with changes; None leaves a key out."""
    merged = [{**CLAIM, "name": f"c{i}", **item} for i, item in enumerate(items)]
    written = [{key: value for key, value in item.items() if value is not None} for item in merged]
    if more:
        return expand({**GRID, "seeds": list(seeds), "claim": written, **more})
    # As `expand` does it, but for building the same runs again.
    found, parsed = grid(tuple(seeds)), declared_module.claims(written, "demo")
    for claim in parsed:
        claims.check(claim, {part.name: part for part in found.parts}, "demo")
    return dataclasses.replace(found, claims=parsed)


@functools.cache
def run_id(spec):
    return spec.run_id


def run_rows(experiment, values, column="final_train_loss", part="loss", **common):
    """A runs frame: values[arm][seed] or values[arm, rate][seed] in `column`; a dict adds columns, None: no run."""
    rows = []
    for cell in next(p for p in experiment.parts if p.name == part).cells:
        given_values = values.get((cell.arm, cell.runs[0][1].network.rate_mbit), values.get(cell.arm, {}))
        for seed, spec in cell.runs:
            value = given_values.get(seed) if isinstance(given_values, dict) else given_values[seed]
            if value is None:
                continue
            own = value if isinstance(value, dict) else {column: value}
            rows.append({"run_id": run_id(spec), "state": "done", "fidelity": "ok", **common, **own})
    return pd.DataFrame(rows, columns=sorted({"run_id", "state", "fidelity", column, *(k for r in rows for k in r)}))


def judged(experiment, runs, **tables):
    found = claims.evaluate(experiment, {"runs": runs, **tables})
    json.dumps(found, allow_nan=False)
    assert all(set(KEYS) <= set(claim) for claim in found)
    return found[0] if len(found) == 1 else found


def losses(experiment, **values):
    return judged(experiment, run_rows(experiment, values))


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

BAD = {"state": "diverged"}


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


def timed(experiment, flagged=(), state="done", **values):
    runs = run_rows(experiment, values, "step_time_s", "time", state=state)
    runs.loc[runs.index.isin(flagged), "fidelity"] = "cpu-bound"
    return judged(experiment, runs)


TIME = {"part": "time", "metric": "step_time_s", "where": {"network.rate_mbit": 10}}


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


def test_a_cell_without_a_counterpart_is_refused():
    arms = [{"label": "FP32", "measure": "full", "network.rate_mbit": 50}, {"label": "AQ"}]
    with pytest.raises(UserError, match=r"has 0 cells to hold against 'FP32' at network.rate_mbit 50"):
        declared({"metric": "total_time_s", "arm": "FP32", "other": "AQ"}, part=[
            {"name": "loss", "arm": arms},
            {"name": "time", "base": {"measure": "timing"}, "axes": {"network.rate_mbit": [100, 30]}},
        ])  # fmt: skip


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
    sent = [{"epoch": 1, "direction": d, "boundary": b, "frame_bytes": 2 * frame, "messages": 2}
            for d in ("forward", "backward") for b in range(7)]  # fmt: skip
    tau = [8 * (frame + 66 * 100) / 500e6] * 7
    bound = gpipe_bound_s(profile.of_spec(profile.load("v100-gpt2-xl"), spec), tau, tau, 2)
    row = {"step_time_s": 1.1 * bound}
    assert value("step_time_over_bound", spec=spec, row=row, transfers=sent) == pytest.approx(1.1)
    assert value("throughput_over_bound", spec=spec, row=row, transfers=sent) == pytest.approx(1 / 1.1)
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


# --- what is done with them ---


def test_the_exit_code_is_of_failing_claims_only():
    states = [{"state": "holds"}, {"state": "undecided"}]
    assert claims.outcome_table(states) == 0
    assert claims.outcome_table([*states, {"state": "fails"}]) == 1
    assert claims.outcome_table([]) == 0


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


# --- docs/claims.md ---

DOCS = Path(__file__).resolve().parents[2] / "docs" / "claims.md"
START, END = "<!-- metrics: start -->", "<!-- metrics: end -->"


def rendered():
    lines = [START, "| metric | unit | better | meaning | arguments |", "|---|---|---|---|---|"]
    for metric in claim_metrics.REGISTRY.values():
        if metric.name not in metrics.RUNS:
            way = ", ".join(filter(None, [metric.better, "time" if metric.is_time else ""])) or "neither"
            given = ", ".join(
                f"`{k}`" if v is REQUIRED else f"`{k}` {v}" for k, v in metric.args.items() if v is not None
            )
            free = ", ".join(f"`{k}`" for k, v in metric.args.items() if v is None)
            args = "; ".join(filter(None, [given, f"may be given: {free}" if free else ""]))
            meaning = metric.meaning.replace("|", "\\|")
            scale = "" if metric.scale == "ratio" else " (by difference)"
            lines.append(f"| `{metric.name}` | {metric.unit} | {way} | {meaning}{scale} | {args} |")
    return "\n".join([*lines, END, ""])


def test_the_metrics_of_claims_md_are_those_there_are():
    text = DOCS.read_text(encoding="utf-8")
    assert text[text.index(START) :] == rendered(), f"write it with: python {Path(__file__).name}"


if __name__ == "__main__":
    DOCS.write_text(DOCS.read_text(encoding="utf-8").partition(START)[0] + rendered(), encoding="utf-8")
    print(f"wrote the metrics of {DOCS}")
