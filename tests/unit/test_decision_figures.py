"""Figures to decide by: the best method a network, trade-offs, time to a loss, what a setting does."""

import numpy as np
import pandas as pd
import pytest
import synthetic
from drawing import caption_of, legend_of, made, only, with_runs
from matplotlib.colors import to_hex

from thinpipe.harness import plugins
from thinpipe.harness.errors import UserError
from thinpipe.plots import _composed, pareto, style, time_to_target, value_by_setting
from thinpipe.plots import _select as select
from thinpipe.plots._composed import Network, Reached
from thinpipe.plots.best_method import choose


def load(name):
    return plugins.get("figures", name).load()


@pytest.fixture(scope="module")
def tables():
    return only(synthetic.results()[1], lambda runs: runs["part"] != "classification")


# --- time to a target ---


def curve(seed, losses, state="done", fidelity="ok", seconds=10.0):
    rows = {"arm": "a", "seed": seed, "state": state, "fidelity": fidelity, "train_loss": losses}
    epochs = range(1, len(losses) + 1)
    return pd.DataFrame({**rows, "epoch": epochs, "t_s": [seconds * e for e in epochs]})


def test_a_target_is_reached_at_the_end_of_the_first_epoch_at_or_below_it():
    found = _composed.reached(pd.concat([curve(0, [3.0, 2.0, 1.0]), curve(1, [3.0, 2.5, 2.1])]), {0: 2.0, 1: 2.0})
    assert found["a"] == Reached({0: 20.0}, {1: 30.0}, False)


def test_what_diverged_has_not_reached_anything_and_a_lost_loss_is_above_any_target():
    low = _composed.reached(curve(0, [3.0, 1.0], state="diverged"), {0: 2.0})
    assert low["a"] == Reached({}, {0: 20.0}, False)
    gap = _composed.reached(curve(0, [None, 1.0], fidelity="cpu-bound"), {0: 2.0})
    assert gap["a"] == Reached({0: 20.0}, {}, True)


def test_a_seed_without_a_target_is_left_out():
    assert _composed.reached(curve(7, [1.0]), {0: 2.0}) == {}


def test_the_target_is_that_of_the_same_seed_with_its_slack():
    runs = pd.DataFrame(
        {
            "arm": ["FP32", "FP32", "FP32", "x"],
            "seed": [0, 1, 2, 0],
            "state": ["done", "done", "diverged", "done"],
            "final_train_loss": [2.0, 3.0, 1.0, 9.0],
            "forward": ["none"] * 3 + ["fixpoint:2"],
            "backward": "none",
        }
    )
    assert _composed.baseline(runs) == "FP32"
    assert _composed.targets(runs, "FP32") == pytest.approx({0: 2.2, 1: 3.3})
    assert _composed.baseline(runs[runs["arm"] == "x"]) == "x"


def test_the_lines_hold_the_times_and_what_did_not_get_there_is_an_arrow(tables):
    fig = made(load("time_to_target").figures(tables))
    (ax,) = fig.axes
    lines = {line.get_label(): line for line in ax.get_lines()}
    runs = tables["runs"].query("part == 'convergence' and arm == 'FP32'")
    curves = tables["curves"][tables["curves"]["run_id"].isin(runs["run_id"])]
    goal = dict(zip(runs["run_id"], 1.1 * runs["final_train_loss"], strict=True))
    first = curves[curves["train_loss"] <= curves["run_id"].map(goal)].groupby(["rate_mbit", "run_id"])["t_s"].min()
    assert list(lines["FP32"].get_ydata()) == pytest.approx(list(first.groupby("rate_mbit").mean()))
    arrows = {line.get_gid() for line in ax.get_lines() if line.get_marker() == time_to_target.ARROW}
    assert "censored DirectQ fw2 bw8" in arrows
    assert "censored AQ-SGD fw4 bw8" not in arrows
    assert len(lines["DirectQ fw2 bw8"].get_xdata()) == 0
    assert time_to_target.NOT_REACHED in legend_of(fig)
    assert "the final training loss of FP32 with the same seed, within 10%" in caption_of(fig)


def test_no_curve_is_an_error_that_says_which_timing_run_is_missing(tables):
    lacking = tables["composition"].head(1).assign(missing="no timing run of forward none, backward none")
    none = {**tables, "curves": tables["curves"].head(0), "composition": lacking}
    for name in ("time_to_target", "best_method"):
        with pytest.raises(UserError, match=r"it needs a trained part .* \(no timing run of forward none"):
            load(name).figures(none)


def test_rho_stands_below_the_rate_and_another_models_steps_have_a_panel_of_their_own(tables):
    curves = tables["curves"]
    big = curves.assign(time_of="v100-gpt2-xl, 8 stages", rho=400 / curves["rate_mbit"], t_s=curves["t_s"] * 50)
    both = {**tables, "curves": pd.concat([curves, big])}
    small, large = made(load("time_to_target").figures(both)).axes
    assert [t.get_text() for t in small.get_xticklabels()] == ["10", "30", "100"]
    assert [t.get_text() for t in large.get_xticklabels()] == ["10\n(40)", "30\n(13.3)", "100\n(4)"]
    assert large.get_title() == "v100-gpt2-xl, 8 stages"
    assert "rho" in large.get_xlabel()
    ours, theirs = made(load("best_method").figures(both)).axes
    assert [len(ax.texts) for ax in (ours, theirs)] == [3, 3]
    assert not ours.child_axes, "no rho is known there"
    (above,) = theirs.child_axes
    assert [t.get_text() for t in above.get_xticklabels()] == ["40", "13.3", "4"]
    assert "rho" in above.get_xlabel()
    assert [t.get_text() for t in theirs.get_yticklabels()] == ["v100-gpt2-xl,\n8 stages"]


# --- the best method ---


def times(*seconds, flagged=False):
    return Reached(dict(enumerate(seconds)), {}, flagged)


def test_the_first_is_the_one_with_the_least_mean_whose_seeds_all_got_there():
    lucky = Reached({0: 1.0}, {1: 50.0, 2: 50.0}, False)
    chosen = choose({"slow": times(20, 21, 22), "fast": times(10, 10.5, 11), "lucky": lucky})
    assert (chosen.best, chosen.second, chosen.flagged) == ("fast", "slow", False)
    assert chosen.ratio.mean == pytest.approx(2.0)
    assert chosen.decided


def test_within_the_interval_or_with_two_seeds_it_is_undecided():
    assert not choose({"a": times(10, 20, 30), "b": times(11, 19, 31)}).decided
    assert not choose({"a": times(10, 10), "b": times(20, 20)}).decided
    assert choose({"a": times(10, 10, 11), "b": times(20, 20, 21)}).decided


def test_one_that_is_flagged_marks_the_cell_also_as_the_second():
    assert choose({"a": times(1, 2, 3), "b": times(9, 9, 9, flagged=True)}).flagged
    assert not choose({"a": times(1, 2, 3), "b": times(2, 3, 4), "c": times(9, 9, 9, flagged=True)}).flagged


def test_alone_at_the_target_or_nobody_there():
    chosen = choose({"a": times(1, 2, 3), "b": Reached({}, {0: 9.0}, False)})
    assert (chosen.second, chosen.ratio, chosen.decided) == (None, None, True)
    assert choose({"b": Reached({}, {0: 9.0}, False)}) is None


def test_the_map_names_the_first_and_hatches_what_is_undecided(tables, monkeypatch):
    # A target so near that these made-up methods differ by more than their seeds.
    monkeypatch.setattr(_composed, "TOLERANCE", 1.02)
    plain = with_runs(tables, fidelity="ok")
    (ax,) = made(load("best_method").figures(plain)).axes
    assert [t.get_text().split("\n")[0] for t in ax.texts] == ["AQ-SGD fw4 bw8"] * 3
    assert {to_hex(p.get_facecolor()) for p in ax.patches} == {style.method("AQ-SGD fw4 bw8").colour.lower()}
    assert not [p for p in ax.patches if p.get_gid() == "undecided"]
    one = only(plain, lambda runs: runs["seed"] == 0)
    fig = made(load("best_method").figures(one))
    assert len([p for p in fig.axes[0].patches if p.get_hatch()]) == 3
    assert "undecided" in legend_of(fig)


# --- trade-offs ---


def point(cost, loss, *, lost=False):
    return pareto.Point(style.method("x"), style.Bar(cost, np.nan, np.nan, 1), style.Bar(loss, 0, 0, 1), False, lost)


def test_the_front_leaves_out_what_is_beaten_and_what_diverged():
    a, b, worse, equal, lost = point(1, 5), point(3, 2), point(3, 4), point(3, 2), point(0.5, 1, lost=True)
    assert pareto.front([b, worse, lost, a, equal]) == [a, b, equal]


def test_a_panel_for_bytes_and_one_a_network(tables):
    fig = made(load("pareto").figures(tables))
    assert [ax.get_xlabel().split("\n")[-1] for ax in fig.axes] == [
        "bytes sent in training (MB, log scale)", "10 Mbit/s", "30 Mbit/s", "100 Mbit/s"
    ]  # fmt: skip
    runs = tables["runs"].query("part == 'convergence' and arm == 'FP32'")
    at = {ax.get_xlabel().split("\n")[-1]: ax for ax in fig.axes}
    (sent,) = (line for line in fig.axes[0].get_lines() if line.get_label() == "FP32")
    assert sent.get_xdata() == pytest.approx([runs["frame_bytes"].mean() / 1e6])
    assert sent.get_ydata() == pytest.approx([runs["final_train_loss"].mean()])
    timing = tables["runs"].query("part == 'timing' and arm == 'FP32' and rate_mbit == 10")
    (timed,) = (line for line in at["10 Mbit/s"].get_lines() if line.get_label() == "FP32")
    assert timed.get_xdata() == pytest.approx([timing["step_time_s"].mean()]), "each seed has its own step time"
    crosses = [line for line in fig.axes[0].get_lines() if line.get_marker() == "x"]
    assert [to_hex(line.get_color()) for line in crosses] == [style.method("DirectQ fw2 bw8").colour.lower()]


def test_a_measured_curve_goes_before_a_composed_one(tables):
    curves = tables["curves"]
    measured = curves[curves["rate_mbit"] == 10].assign(composed=False, t_s=1.0)
    runs = select.trained(tables)
    found = _composed.curves({**tables, "curves": pd.concat([curves, measured])}, runs)
    assert len(found) == len(curves)
    assert set(found.loc[found["rate_mbit"] == 10, "t_s"]) == {1.0}
    assert next(network for network, _ in _composed.networks(found))[:2] == ("", 10.0)


def test_the_cells_of_the_check_are_no_part_of_what_is_compared(tables):
    runs = tables["runs"]
    again = runs[runs["part"] == "convergence"].assign(part=select.CHECK_PART, measure="full")
    both = {**tables, "runs": pd.concat([runs, again])}
    for name in ("pareto", "loss_vs_step", "throughput_vs_bandwidth"):
        assert [stem for stem, _ in load(name).figures(both)] == [name]


def test_networks_without_limit_come_last():
    assert Network("", np.nan, np.nan).text() == "no limit"
    assert Network("p, 8 stages", 100.0, 4.13).text() == "100 Mbit/s, rho 4.13, p, 8 stages"
    assert time_to_target._places([Network("", 100.0, np.nan), Network("", np.nan, np.nan)]) == [100.0, 250.0]


# --- a setting ---


def part_of(*rows, **columns):
    """A part of arms (label, forward, backward), three seeds each; further columns by list a row."""
    made_rows = []
    for number, (label, forward, backward) in enumerate(rows):
        for seed in range(3):
            same = {"arm": label, "forward": forward, "backward": backward, "seed": seed, "part": "p"}
            own = {name: values[number] for name, values in columns.items()}
            settings = {"stages": 2, "groups": 1, "microbatches": 4, "batch_size": 16, "warmup_epochs": 1, **own}
            train_id = f"{label} {forward} {backward} {own} {seed}"
            loss = 2.0 + number + 0.1 * seed
            made_rows.append(
                {**same, **settings, "train_id": train_id, "state": "done", "fidelity": "ok", "experiment": "e",
                 "measure": "convergence", "final_train_loss": loss, "final_eval_loss": loss, "final_accuracy": None}
            )  # fmt: skip
    return {"runs": pd.DataFrame(made_rows)}


def varied(tables):
    return value_by_setting.varied(tables, tables["runs"])


def test_bits_of_one_direction_are_the_setting_and_methods_without_it_have_none():
    arms = [("FP32", "none", "none"), *((f"AQ fw{b}", f"delta(fixpoint:{b})", "fixpoint:8") for b in (2, 4))]
    found = varied(part_of(*arms))
    assert (found.label, found.ticks) == ("forward bits", {2.0: "2", 4.0: "4"})
    assert found.x.isna().sum() == 3
    assert found.family.nunique() == 2


@pytest.mark.parametrize(
    ("arms", "label", "ticks"),
    [
        ([("a", "fixpoint:2", "fixpoint:4"), ("b", "fixpoint:3", "fixpoint:6")], "forward bits / backward bits",
         {2.0: "2 / 4", 3.0: "3 / 6"}),
        ([("a", "topk:0.1", "topk:0.1"), ("b", "topk:0.3", "topk:0.3")], "forward topk / backward topk",
         {0.1: "0.1", 0.3: "0.3"}),
        ([("a", "delta(fixpoint:2, cache=fixpoint:4)", "none"), ("b", "delta(fixpoint:2, cache=fixpoint:8)", "none")],
         "forward cache", {4.0: "4", 8.0: "8"}),
        ([("a", "bf16", "grid:0.5"), ("b", "bf16", "grid:1e-1")], "backward grid", {0.1: "0.1", 0.5: "0.5"}),
    ],
)  # fmt: skip
def test_numbers_of_compressors_are_settings(arms, label, ticks):
    found = varied(part_of(*arms))
    assert (found.label, found.ticks) == (label, ticks)


def test_an_axis_goes_before_what_arms_differ_in_and_each_arm_is_a_line():
    arms = [("FP32", "none", "none"), ("AQ", "delta(fixpoint:2)", "fixpoint:8")] * 2
    found = varied(part_of(*arms, stages=[2, 2, 4, 4]))
    assert (found.label, found.ticks, set(found.family)) == ("stages", {2.0: "2", 4.0: "4"}, {"FP32", "AQ"})
    with pytest.raises(UserError, match="varies stages, microbatches"):
        varied(part_of(*arms * 2, stages=[2, 2, 4, 4] * 2, microbatches=[4] * 4 + [8] * 4))


def test_of_two_settings_that_arms_cross_one_tells_lines_apart():
    arms = [(f"fw{f} bw{b}", f"minmax:{f}", f"minmax:{b}") for f in (2, 4, 8) for b in (2, 4)]
    found = varied(part_of(*arms))
    assert (found.label, list(found.ticks), found.family.nunique()) == ("forward bits", [2.0, 4.0, 8.0], 2)


@pytest.mark.parametrize(
    "arms",
    [
        [("FP32", "none", "none"), ("AQ", "delta(fixpoint:2)", "fixpoint:8")],
        [
            ("a", "fixpoint:2", "none"),
            ("b", "fixpoint:4", "none"),
            ("c", "topk:0.1", "none"),
            ("d", "topk:0.5", "none"),
        ],
    ],
)
def test_without_one_setting_the_axis_is_the_method(arms):
    found = varied(part_of(*arms))
    assert found.label == "method"
    assert sorted(found.ticks.values()) == sorted(label for label, *_ in arms)


def test_a_run_that_diverged_is_at_the_edge_and_its_place_has_no_mean():
    arms = [(f"DirectQ {b} bits", f"fixpoint:{b}", "none") for b in (1, 2, 4)]
    tables = part_of(*arms)
    lost = (tables["runs"]["arm"] == "DirectQ 1 bits") & (tables["runs"]["seed"] == 0)
    runs = tables["runs"].assign(state=tables["runs"]["state"].where(~lost, "diverged"))
    fig = made(value_by_setting.figures({"runs": runs}))
    ax = fig.axes[0]
    crosses = [line for line in ax.get_lines() if line.get_marker() == "x"]
    assert [list(line.get_xdata()) for line in crosses] == [[1.0]]
    assert crosses[0].get_ydata()[0] == value_by_setting.EDGE
    through = [line for line in ax.get_lines() if len(line.get_xdata()) == 2 and line.get_linestyle() != "None"]
    assert [list(line.get_xdata()) for line in through] == [[2.0, 4.0]]
    assert "1 run(s) diverged (at the edge)" in caption_of(fig)
