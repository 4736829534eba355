"""Figures from the synthetic experiment: what is drawn, what it says, and what is left out."""

import itertools

import matplotlib.colors
import numpy as np
import pandas as pd
import pytest
import synthetic
from drawing import caption_of, cell_texts, few, legend_of, made, only, with_runs, words
from drawing import drawn as drawn_one
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from thinpipe.harness import metrics, plugins
from thinpipe.harness.errors import UserError
from thinpipe.plots import _select as select
from thinpipe.plots import boundary_error, style

TIMING = ("throughput_vs_bandwidth", "bandwidth_vs_bits", "step_breakdown")
UNITS = {
    "throughput_vs_bandwidth": ["Mbit/s", "samples/s"],
    "loss_vs_step": ["(nat", "steps"],
    "loss_vs_time": ["(nat", "(s,", "Mbit/s"],
    "score_vs_step": ["held-out accuracy", "held-out Matthews", "held-out F1", "steps"],
    "bandwidth_vs_bits": ["Mbit/s", "(s)", "ratio"],
    "step_breakdown": ["Mbit/s", "(s)"],
    "boundary_error": ["|x|", "epoch"],
}
COMMON = [
    "FP32",
    "BF16",
    *(f"{family} {bits} bits" for family in ("DirectQ", "AQ-SGD") for bits in (2, 3, 4, 8)),
]


def load(name):
    return plugins.get("figures", name).load()


@pytest.fixture(scope="module")
def whole():
    return synthetic.results()[1]


@pytest.fixture(scope="module")
def tables(whole):
    """Without the part that is scored: one part trained, one timed."""
    return only(whole, lambda runs: runs["part"] != "classification")


@pytest.fixture(scope="module")
def drawn(whole, tables) -> dict[str, Figure]:
    """Each figure of the synthetic experiment."""
    given = {name: whole if name == "score_vs_step" else tables for name in UNITS}
    return {name: drawn_one(load(name).figures(given[name])) for name in UNITS}


@pytest.mark.parametrize("name", UNITS)
def test_times_rates_and_losses_carry_their_unit(drawn, name):
    text = " ".join(words(drawn[name]))
    for unit in UNITS[name]:
        assert unit in text


@pytest.mark.parametrize("name", UNITS)
def test_an_experiment_without_the_part_a_figure_needs_is_told_which(tables, name):
    measure = "timing" if name in TIMING else "convergence"
    rest = only(tables, lambda runs: runs["measure"] != measure)
    with pytest.raises(UserError, match=f"nothing to draw for 'synthetic'.*{measure}"):
        load(name).figures(rest)


def test_seeds_that_diverged_before_a_first_point_are_counted(tables):
    arm = "DirectQ fw2 bw8"
    ids = set(tables["runs"].query("arm == @arm")["run_id"])
    none = {name: frame[~frame["run_id"].isin(ids)] for name, frame in tables.items() if name != "runs"}
    runs = tables["runs"]
    lost = none | {"runs": runs.assign(state=runs["state"].where(runs["arm"] != arm, "diverged"))}
    for name in ("loss_vs_step", "loss_vs_time"):
        assert "3 run(s) diverged before a first point." in caption_of(made(load(name).figures(lost)))


def test_of_two_uncompressed_arms_the_first_is_the_measure(tables):
    runs = tables["runs"]
    twin = runs[runs["arm"] == "FP32"].assign(arm="FP32 replay", step_time_s=100.0, cell="twin")
    fig = drawn_one(load("bandwidth_vs_bits").figures({**tables, "runs": pd.concat([twin, runs])}))
    assert fig.axes[1].get_title().startswith("Speed-up over FP32 (")
    assert "1.00" in cell_texts(fig)


# --- the same method looks the same everywhere ---


def test_a_method_has_one_colour_in_every_figure(drawn):
    seen: dict[str, set] = {}
    for fig in drawn.values():
        for ax in fig.axes:
            for line in ax.get_lines():
                if line.get_label() in synthetic.ARMS:
                    seen.setdefault(line.get_label(), set()).add(to_hex(line.get_color()))
        for label, entry in legend_of(fig).items():
            if label in synthetic.ARMS:
                seen[label].add(to_hex(entry.get_color()))
                assert entry.get_marker() == style.method(label).marker
    assert set(seen) == set(synthetic.ARMS)
    for label, colours in seen.items():
        assert colours == {style.method(label).colour.lower()}, label
    assert len({next(iter(c)) for c in seen.values()}) == len(seen)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("AQ-SGD 4 bits", "AQ-SGD fw4 bw8"),
        ("AQ-SGD 2 bits", "aqsgd 2"),
        ("DirectQ 3 bits", "DirectQ fw3 bw8"),
        ("DirectQ 8 bits", "Direct quantisation 8"),
        ("FP32", "fp32"),
    ],
)
def test_spellings_of_a_method_look_alike(one, other):
    assert style.method(one)[1:4] == style.method(other)[1:4]


def test_looks_do_not_depend_on_what_else_is_drawn():
    assert style.methods(COMMON)[3] == style.methods(COMMON[::-1])[3]
    assert [m.label for m in style.methods(reversed(COMMON))] == COMMON


def test_variants_and_unknown_labels_are_told_apart_from_the_common_ones():
    plain, other = style.method("AQ-SGD fw3 bw8"), style.method("AQ-SGD fw3 bw6")
    assert (plain.colour, plain.marker) == (other.colour, other.marker)
    assert plain.dashes != other.dashes
    common = {style.method(label).colour for label in COMMON}
    for label in ("top-k 10 %", "EF21", "AQ-SGD 16 bits", "FP32 replay", "my method"):
        assert style.method(label).colour not in common
        assert style.method(label) == style.method(label)


# Machado, Oliveira & Fernandes 2009, severity 1, on linear RGB.
DEFICIENT = {
    "none": np.eye(3),
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritan": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.9505, 1.0, 1.089])


def lab(colour, vision):
    rgb = np.array(matplotlib.colors.to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(DEFICIENT[vision]) @ linear, 0, 1)
    scaled = TO_XYZ @ seen / WHITE
    f = np.where(scaled > 0.008856, np.cbrt(scaled), 7.787 * scaled + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("vision", DEFICIENT)
def test_methods_are_told_apart_by_every_eye(vision):
    for one, other in itertools.combinations(style.methods(COMMON), 2):
        distance = np.linalg.norm(lab(one.colour, vision) - lab(other.colour, vision))
        # Where only the colour differs it must differ clearly; where the marker does too, visibly.
        assert distance > (18 if one.marker == other.marker else 6), (one.label, other.label, distance)


# --- what each figure says ---


def test_training_and_held_out_loss_are_never_confused(drawn):
    for name in ("loss_vs_step", "loss_vs_time"):
        wanted = itertools.cycle([("training loss", "held-out"), ("held-out loss", "training loss")])
        for ax, (ours, theirs) in zip(drawn[name].axes, wanted, strict=False):
            assert ours in ax.get_title().lower()
            assert ours in ax.get_ylabel()
            assert theirs not in (ax.get_title() + ax.get_ylabel()).lower()


def test_loss_panels_hold_the_numbers_of_their_tables(tables):
    ((_, fig),) = load("loss_vs_step").figures(tables)
    run = tables["runs"].query("arm == 'FP32' and part == 'convergence'")["run_id"]
    steps, evals = tables["steps"], tables["evals"]
    train = steps[steps["run_id"].isin(run)].groupby("epoch")["train_loss"].mean()
    held_out = evals[evals["run_id"].isin(run)].groupby("epoch")["eval_loss"].mean()
    for ax, expected in zip(fig.axes, (train, held_out), strict=True):
        (line,) = [x for x in ax.get_lines() if x.get_label() == "FP32"]
        assert list(line.get_ydata()) == pytest.approx(list(expected))
        ends = synthetic.STEPS_PER_EPOCH * np.arange(1, synthetic.EPOCHS + 1)
        assert list(line.get_xdata()) == list(ends)


def test_a_run_that_made_the_model_worse_shows_where_it_began(tables):
    """The dotted line is the uncompressed runs' first loss, and only there where a curve ends above it."""
    runs = few(tables)["runs"]
    for first, lines in ((99.0, 0), (0.5, 1)):
        started = with_runs(few(tables), initial_train_loss=[first + (row == "none") for row in runs["forward"]])
        fig = made(load("loss_vs_step").figures(started))
        dotted = [[line for line in ax.get_lines() if line.get_linestyle() == ":"] for ax in fig.axes]
        assert [len(found) for found in dotted] == [lines, 0]
        assert ("before any update" in caption_of(fig)) == bool(lines)
        if lines:
            assert set(dotted[0][0].get_ydata()) == {1.5}


def test_score_panels_hold_the_numbers_of_their_tables_and_no_other_part_is_in_the_way(whole, drawn):
    run = whole["runs"].query("arm == 'FP32' and part == 'classification'")["run_id"]
    evals = whole["evals"][whole["evals"]["run_id"].isin(run)]
    assert "part classification" in caption_of(drawn["score_vs_step"])
    assert [ax.get_title() for ax in drawn["score_vs_step"].axes] == ["Accuracy", "Matthews correlation", "F1"]
    for ax, score in zip(drawn["score_vs_step"].axes, metrics.SCORES, strict=True):
        (line,) = [x for x in ax.get_lines() if x.get_label() == "FP32"]
        assert list(line.get_ydata()) == pytest.approx(list(evals.groupby("epoch")[score].mean()))
        assert list(line.get_xdata()) == sorted(set(evals["step"]))


def test_a_score_that_no_run_has_gets_no_panel_and_without_any_there_is_no_figure(whole, tables):
    accuracy = {**whole, "evals": whole["evals"].assign(matthews=np.nan, f1=np.nan)}
    assert [ax.get_title() for ax in drawn_one(load("score_vs_step").figures(accuracy)).axes] == ["Accuracy"]
    for value in (np.nan, np.inf):
        bare = {**whole, "evals": whole["evals"].assign(**dict.fromkeys(metrics.SCORES, value))}
        for given in (bare, tables):
            with pytest.raises(UserError, match="it needs a classification that was evaluated"):
                load("score_vs_step").figures(given)


def test_what_was_not_timed_has_the_time_of_its_own_steps_without_evaluation(tables):
    ((_, fig),) = load("loss_vs_time").figures({**tables, "curves": tables["curves"].head(0)})
    run = tables["runs"].query("arm == 'FP32' and part == 'convergence'")["run_id"]
    steps = tables["steps"].query("rank == 1")
    total = steps[steps["run_id"].isin(run)].groupby("run_id")["step_time_s"].sum().mean()
    for ax in fig.axes:
        (line,) = [x for x in ax.get_lines() if x.get_label() == "FP32"]
        assert line.get_xdata()[-1] == pytest.approx(total)


def test_a_diverged_seed_ends_the_mean_and_is_marked(drawn):
    for name in ("loss_vs_step", "loss_vs_time"):
        fig = drawn[name]
        assert style.DIVERGED in legend_of(fig)
        lines = {x.get_label(): x for x in fig.axes[0].get_lines()}
        # Diverged in the fourth epoch: three whole ones.
        assert len(lines["DirectQ fw2 bw8"].get_xdata()) == 3
        assert len(lines["FP32"].get_xdata()) == synthetic.EPOCHS
        assert "A mean ends with the first of its seeds" in caption_of(fig)


def test_throughput_is_the_mean_over_seeds_and_leaves_foreign_and_failed_out(tables, drawn):
    fig = drawn["throughput_vs_bandwidth"]
    runs = tables["runs"].query("measure == 'timing' and state == 'done'")
    (ax,) = fig.axes
    assert ax.get_xscale() == "log"
    for arm in synthetic.ARMS:
        (line,) = [x for x in ax.get_lines() if x.get_label() == arm]
        expected = runs[runs["arm"] == arm].groupby("rate_mbit")["samples_per_s"].mean()
        assert list(line.get_ydata()) == pytest.approx(list(expected))
        assert list(line.get_xdata()) == pytest.approx(synthetic.RATES, rel=0.1)
    assert "Left out: 1 failed, 1 foreign run(s)." in caption_of(fig)


@pytest.mark.parametrize("name", TIMING)
def test_foreign_runs_never_enter_a_timing_figure(tables, name):
    runs = tables["runs"]
    foreign = with_runs(tables, state=runs["state"].where(runs["measure"] != "timing", "foreign"))
    with pytest.raises(UserError, match="on this machine"):
        load(name).figures(foreign)
    # A foreign run with an absurd time changes nothing.
    absurd = with_runs(tables, step_time_s=runs["step_time_s"].where(runs["state"] != "foreign", 1e6))
    ((_, one),), ((_, other),) = load(name).figures(tables), load(name).figures(absurd)
    assert [ax.get_ylim() for ax in one.axes] == [ax.get_ylim() for ax in other.axes]
    assert cell_texts(one) == cell_texts(other)


def test_an_unlimited_link_stands_right_of_all_rates(tables):
    runs = tables["runs"]
    unlimited = with_runs(tables, rate_mbit=runs["rate_mbit"].where(runs["rate_mbit"] != 30))
    ((_, fig),) = load("throughput_vs_bandwidth").figures(unlimited)
    ticks = [t.get_text() for t in fig.axes[0].get_xticklabels()]
    assert ticks == ["10", "100", "no limit"]
    for name in ("bandwidth_vs_bits", "step_breakdown"):
        ((_, fig),) = load(name).figures(unlimited)
        assert "no limit" in [t.get_text() for t in fig.axes[0].get_yticklabels()] + [a.get_title() for a in fig.axes]


@pytest.mark.parametrize("rate", [30, None])
def test_throughput_at_one_rate_stands_in_the_middle_and_no_marker_is_cut(tables, rate):
    at_one = only(tables, lambda runs: runs["rate_mbit"] == 30)
    level = at_one["runs"]["samples_per_s"].where(at_one["runs"]["samples_per_s"].isna(), 100.0)
    at_one = with_runs(at_one, rate_mbit=float("nan") if rate is None else 30.0, samples_per_s=level)
    ((_, fig),) = load("throughput_vs_bandwidth").figures(at_one)
    (ax,) = fig.axes
    x = 1.0 if rate is None else rate
    assert ax.get_xlim() == pytest.approx((x / 2, 2 * x))
    assert ax.get_ylim() == pytest.approx((0, 110.0))


def test_throughput_has_room_above_its_highest_mark(tables, drawn):
    (ax,) = drawn["throughput_vs_bandwidth"].axes
    runs = tables["runs"].query("measure == 'timing' and state == 'done'")
    assert ax.get_ylim()[0] == 0
    assert ax.get_ylim()[1] >= 1.1 * runs["samples_per_s"].max()
    assert ax.get_xlim()[0] < synthetic.RATES[0] < synthetic.RATES[-1] < ax.get_xlim()[1]


def test_the_heat_maps_hold_step_time_and_paired_speed_up(tables, drawn):
    upper, lower = drawn["bandwidth_vs_bits"].axes
    runs = tables["runs"].query("measure == 'timing' and state == 'done' and rate_mbit == 10")
    times = runs.groupby("arm")["step_time_s"].mean()
    arms = [m.label for m in style.methods(synthetic.ARMS)]
    assert list(np.asarray(upper.images[0].get_array())[0]) == pytest.approx([times[a] for a in arms])
    wide = runs.pivot(index="seed", columns="arm", values="step_time_s")
    ratios = np.log(wide.rdiv(wide["FP32"], axis=0)).mean().pipe(np.exp)
    assert list(np.asarray(lower.images[0].get_array())[0]) == pytest.approx([ratios[a] for a in arms])
    assert "Speed-up over FP32" in lower.get_title()
    assert [t.get_text() for t in lower.get_xticklabels()] == arms


def test_without_an_uncompressed_arm_there_is_no_speed_up_and_the_caption_says_so(tables):
    ((_, fig),) = load("bandwidth_vs_bits").figures(only(tables, lambda runs: runs["arm"] != "FP32"))
    assert len(fig.axes) == 1
    assert "No uncompressed arm" in caption_of(fig)


def test_the_stacks_add_up_to_the_four_parts(tables, drawn):
    runs = tables["runs"].query("measure == 'timing' and state == 'done' and rate_mbit == 10 and arm == 'FP32'")
    bars = [p for p in drawn["step_breakdown"].axes[0].patches if p.get_x() < 0.4]
    expected = [runs[column].mean() for column in ("compute_s", "codec_s", "wait_s", "idle_s")]
    assert [b.get_height() for b in bars] == pytest.approx(expected)
    legend = " ".join(legend_of(drawn["step_breakdown"]))
    assert all(word in legend for word in ("compute", "codec", "wait", "idle"))


def test_step_breakdown_without_spans_says_what_is_missing(tables):
    with pytest.raises(UserError, match="timing runs with spans"):
        load("step_breakdown").figures(with_runs(tables, wait_s=np.nan))


def test_boundary_error_by_hand():
    rows = [
        {"rel_error": 0.1, "mean_abs": 2.0, "mean_abs_change": 1.0},
        {"rel_error": 0.3, "mean_abs": 2.0, "mean_abs_change": 0.2},
        {"rel_error": None, "mean_abs": None, "mean_abs_change": None},
    ]
    same = {"run_id": "r", "epoch": 1, "boundary": 0, "direction": "forward"}
    (found,) = boundary_error.by_epoch(pd.DataFrame([same | row for row in rows])).to_dict("records")
    assert found["rel_error"] == pytest.approx(0.2)
    assert found["change"] == pytest.approx(1.2 / 4.0)


def test_boundary_error_draws_what_is_compressed_only(drawn):
    fig = drawn["boundary_error"]
    assert "FP32" not in legend_of(fig)
    titles = {ax.get_title().replace("\n", " ") for ax in fig.axes}
    assert titles == {"boundary 0, forward (activation)", "boundary 0, backward (activation gradient)"}
    change = {x.get_label() for x in fig.axes[2].get_lines()} & set(synthetic.ARMS)
    assert change == {"AQ-SGD fw4 bw8", "AQ-SGD fw2 bw8"}
    (line,) = [x for x in fig.axes[2].get_lines() if x.get_label() == "AQ-SGD fw4 bw8"]
    assert list(np.diff(line.get_ydata()) < 0) == [True] * (synthetic.EPOCHS - 2)


def test_a_bar_of_two_seeds_spans_both_and_of_three_is_their_interval():
    assert select.bar([1.0, 3.0]) == (2.0, 1.0, 3.0, 2)
    three = select.bar([1.0, 2.0, 3.0])
    assert three.low == pytest.approx(2.0 - 4.30265 / 3**0.5, rel=1e-5)
    assert np.isnan(select.bar([5.0]).low)
    two = select.ratio_bar({0: 2.0, 1: 8.0, 5: 1.0}, {0: 1.0, 1: 2.0, 6: 1.0})
    assert two == (pytest.approx(8**0.5), 2.0, 4.0, 2)
    assert select.ratio_bar({0: 1.0}, {1: 1.0}) is None
