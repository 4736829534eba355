"""Figures from the synthetic experiment: what is drawn, what it says, and what is left out."""

import itertools
import re

import matplotlib.colors
import numpy as np
import pandas as pd
import pytest
import synthetic
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from thinpipe.harness import plugins
from thinpipe.harness.errors import UserError
from thinpipe.plots import _select as select
from thinpipe.plots import boundary_error, style

FIGURES = sorted(plugins.find("figures"))
TIMING = ("throughput_vs_bandwidth", "bandwidth_vs_bits", "step_breakdown")
CONVERGENCE = ("loss_vs_step", "loss_vs_time", "boundary_error")
COMMON = [
    "FP32",
    "BF16",
    *(f"{family} {bits} bits" for family in ("DirectQ", "AQ-SGD") for bits in (2, 3, 4, 8)),
]


def load(name):
    return plugins.get("figures", name).load()


@pytest.fixture(scope="module")
def tables():
    return synthetic.results()[1]


def render(name, tables) -> Figure:
    """A figure as it is saved: laid out and drawn."""
    ((stem, fig),) = load(name).figures(tables)
    assert stem == name
    FigureCanvasAgg(fig).draw()
    return fig


@pytest.fixture(scope="module")
def drawn(tables) -> dict[str, Figure]:
    """Each figure of the synthetic experiment."""
    return {name: render(name, tables) for name in FIGURES}


def with_runs(tables, **columns):
    return {**tables, "runs": tables["runs"].assign(**columns)}


def only(tables, keep):
    return {**tables, "runs": tables["runs"][keep(tables["runs"])]}


def caption_of(fig):
    (text,) = [t.get_text() for t in fig.texts if t.get_gid() == "caption"]
    return text.replace("\n", " ")


def legend_of(fig):
    return {} if not fig.legends else {t.get_text(): h for t, h in _entries(fig.legends[0])}


def _entries(legend):
    return zip(legend.get_texts(), legend.legend_handles, strict=True)


def words(fig):
    axes = [t for ax in fig.axes for t in (ax.get_title(), ax.get_xlabel(), ax.get_ylabel())]
    return [*axes, *legend_of(fig), fig.get_suptitle(), caption_of(fig)]


# --- every figure ---


def test_the_six_figures_are_found():
    assert set(FIGURES) == {*TIMING, *CONVERGENCE}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_written_in_three_formats(tables, tmp_path, name):
    paths = load(name).draw(tables, tmp_path / "new")
    assert [p.name for p in paths] == [f"{name}.{kind}" for kind in ("png", "pdf", "svg")]
    starts = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}
    for path in paths:
        assert path.read_bytes().startswith(starts[path.suffix])
        assert path.stat().st_size > 5_000
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == sorted(p.name for p in paths)


def test_the_same_tables_give_the_same_bytes(tables, tmp_path):
    module = load("throughput_vs_bandwidth")
    for first, second in zip(module.draw(tables, tmp_path / "a"), module.draw(tables, tmp_path / "b"), strict=True):
        assert first.read_bytes() == second.read_bytes(), first.name


@pytest.mark.parametrize("name", FIGURES)
def test_a_caption_names_experiment_part_table_columns_and_seeds(drawn, name):
    caption = caption_of(drawn[name])
    part = "timing" if name in TIMING else "convergence"
    assert f"Experiment synthetic, part {part}." in caption
    assert re.search(r"tables? (runs|steps|transfers) \(", caption)
    assert re.search(r"n = \d( to \d)? seeds", caption)
    assert "95 % Student t interval" in caption


@pytest.mark.parametrize("name", FIGURES)
def test_columns_a_caption_names_exist(tables, name):
    module = load(name)
    assert set(module.REQUIRES) <= set(tables)
    every = {column for table in module.REQUIRES for column in tables[table].columns}
    named = set(re.findall(r"[a-z_]+", " ".join(re.findall(r"\(([^)]*)\)", module.COLUMNS))))
    assert named <= every
    assert set(re.findall(r"\b(runs|steps|evals|transfers) \(", module.COLUMNS)) == set(module.REQUIRES)


@pytest.mark.parametrize("name", FIGURES)
def test_every_axis_is_labelled_and_times_and_losses_carry_their_unit(drawn, name):
    for ax in drawn[name].axes:
        labels = ax.get_xlabel() + ax.get_ylabel() + ax.get_title()
        assert labels
    text = " ".join(words(drawn[name]))
    units = {
        "throughput_vs_bandwidth": ["Mbit/s", "samples/s"],
        "loss_vs_step": ["(nat", "steps"],
        "loss_vs_time": ["(nat", "(s,", "Mbit/s"],
        "bandwidth_vs_bits": ["Mbit/s", "(s)", "ratio"],
        "step_breakdown": ["Mbit/s", "(s)"],
        "boundary_error": ["|x|", "epoch"],
    }
    for unit in units[name]:
        assert unit in text


def check_layout(fig):
    """Nothing outside the figure, and neither panels, legend, title nor caption over one another."""
    renderer = fig.canvas.get_renderer()  # drawn with Agg
    panels = [ax.get_tightbbox(renderer) for ax in fig.axes]
    boxes = panels + [legend.get_window_extent(renderer) for legend in fig.legends]
    boxes += [t.get_window_extent(renderer) for t in fig.texts]
    for box in boxes:
        assert box.x0 >= fig.bbox.x0 - 1
        assert box.y0 >= fig.bbox.y0 - 1
        assert box.x1 <= fig.bbox.x1 + 1
        assert box.y1 <= fig.bbox.y1 + 1
    for one, other in itertools.combinations(boxes, 2):
        shared = Bbox.intersection(one, other)
        assert shared is None or min(shared.width, shared.height) < 2, (one, other)


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_is_clipped_and_nothing_overlaps(drawn, name):
    check_layout(drawn[name])


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_overlaps_in_the_figure_of_a_small_experiment(tables, name):
    small = only(
        tables,
        lambda runs: (runs["seed"] == 0) & runs["arm"].isin(("FP32", "AQ-SGD fw4 bw8")) & (runs["rate_mbit"] == 100),
    )
    check_layout(render(name, with_runs(small, fidelity="cpu-bound")))


@pytest.mark.parametrize("name", FIGURES)
def test_an_experiment_without_the_part_a_figure_needs_is_told_which(tables, tmp_path, name):
    measure = "timing" if name in TIMING else "convergence"
    rest = only(tables, lambda runs: runs["measure"] != measure)
    with pytest.raises(UserError, match=f"{name}: nothing to draw for 'synthetic'.*{measure}"):
        load(name).draw(rest, tmp_path)
    empty = only(tables, lambda runs: runs["run_id"] == "")
    with pytest.raises(UserError, match="nothing to draw"):
        load(name).draw(empty, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", FIGURES)
def test_different_settings_are_never_averaged(tables, tmp_path, name):
    runs = tables["runs"]
    mixed = with_runs(
        tables,
        cell=runs["cell"].where(runs["seed"] != 1, "other"),
        train_id=runs["train_id"] + runs["state"],
        seed=0,
    )
    with pytest.raises(UserError, match=r"different settings for arm .*cannot share a line"):
        load(name).draw(mixed, tmp_path)


@pytest.mark.parametrize("name", FIGURES)
def test_one_seed_is_drawn_and_said_to_have_no_interval(tables, name):
    alone = only(tables, lambda runs: runs["seed"] == 0)
    ((_, fig),) = load(name).figures(alone)
    assert "n = 1 seed: no interval" in caption_of(fig)


@pytest.mark.parametrize("name", FIGURES)
def test_two_parts_are_two_figures(tables, name):
    runs = tables["runs"]
    twice = {**tables, "runs": pd.concat([runs, runs.assign(part="again-" + runs["part"])])}
    part = "timing" if name in TIMING else "convergence"
    assert [stem for stem, _ in load(name).figures(twice)] == [f"{name}.again-{part}", f"{name}.{part}"]


@pytest.mark.parametrize("name", FIGURES)
def test_a_flagged_run_is_marked_and_explained(tables, name):
    marked = with_runs(tables, fidelity="cpu-bound")
    plain = with_runs(tables, fidelity="ok")
    ((_, fig),), ((_, other),) = load(name).figures(marked), load(name).figures(plain)
    if name == "bandwidth_vs_bits":
        assert all("*" in t for t in cell_texts(fig))
        assert not any("*" in t for t in cell_texts(other))
        assert "flagged" in caption_of(fig)
        assert "flagged" not in caption_of(other)
        return
    assert style.FLAGGED in legend_of(fig)
    assert style.FLAGGED not in legend_of(other)
    assert hollow_marks(fig) > 0
    assert hollow_marks(other) == 0


def hollow_marks(fig):
    lines = [line for ax in fig.axes for line in ax.get_lines()]
    return sum(line.get_marker() != "None" and to_hex(line.get_markerfacecolor()) == "#ffffff" for line in lines)


def cell_texts(fig):
    return [t.get_text() for ax in fig.axes for t in ax.texts if t.get_size() > 6]


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
        first, second = drawn[name].axes
        for ax, ours, theirs in (
            (first, "training loss", "held-out"),
            (second, "held-out loss", "training loss"),
        ):
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


def test_time_is_the_sum_of_step_times_without_evaluation(tables):
    ((_, fig),) = load("loss_vs_time").figures(tables)
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
def test_foreign_runs_never_enter_a_timing_figure(tables, tmp_path, name):
    runs = tables["runs"]
    foreign = with_runs(tables, state=runs["state"].where(runs["measure"] != "timing", "foreign"))
    with pytest.raises(UserError, match="on this machine"):
        load(name).draw(foreign, tmp_path)
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


def test_step_breakdown_without_spans_says_what_is_missing(tables, tmp_path):
    with pytest.raises(UserError, match="timing runs with spans"):
        load("step_breakdown").draw(with_runs(tables, wait_s=np.nan), tmp_path)


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
