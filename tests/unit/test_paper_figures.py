"""The figures of the papers: what they show, on made-up tables, and which of them each experiment asks for."""

import itertools

import pandas as pd
import pytest
import synthetic
from drawing import caption_of, made, only

from thinpipe.harness import condense, experiment, figures, plugins
from thinpipe.plots import activation_change, bytes_by_link, memory_state, speed_up, style

EXPERIMENTS = [*experiment.group("acsgd"), *experiment.group("rudakov")]
AQ = "AQ-SGD fw4 bw8"


@pytest.fixture(scope="module")
def tables():
    return synthetic.results()[1]


def of_part(tables, part):
    return only(tables, lambda runs: runs["part"] == part)


def line_of(ax, label):
    (line,) = [line for line in ax.get_lines() if line.get_label() == label]
    return line


# --- which figure each experiment asks for ---


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_names_one_to_three_figures_of_experiments(name):
    names = experiment.load(name, size="cpu").figures
    assert 1 <= len(names) <= 3
    assert not [figure for figure in names if figures.is_per_run(figure) or figures.is_of_verb(figure)]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_no_two_methods_of_a_part_look_alike_where_only_their_looks_tell_them_apart(name):
    found = experiment.load(name, size="cpu")
    if found.figures == ("value_by_setting",):
        return
    by_part: dict[str, set[str]] = {}
    for cell in found.cells():
        by_part.setdefault(cell.part, set()).add(cell.arm)
    for labels in by_part.values():
        for one, other in itertools.combinations(style.methods(labels), 2):
            assert one[1:4] != other[1:4], (one.label, other.label)


# --- activation_change ---


def test_activations_and_their_changes_are_means_of_sampled_steps_of_the_forward_direction():
    rows = [
        ("a", 0, "forward", 4.0, None), ("a", 1, "forward", 3.0, 0.6), ("a", 1, "forward", 5.0, 0.2),
        ("a", 1, "backward", 9.0, 9.0), ("b", 1, "forward", 4.0, None),
    ]  # fmt: skip
    names = ["run_id", "epoch", "direction", "mean_abs", "mean_abs_change"]
    found = activation_change.by_epoch(pd.DataFrame(rows, columns=names).assign(boundary=0))
    assert set(found["run_id"]) == {"a"}, "a run without a memory has no changes"
    assert list(found["mean_abs"]) == [4.0, 4.0]
    assert list(found["mean_abs_change"].dropna()) == pytest.approx([0.4])


def test_each_method_has_a_line_of_activations_and_a_lower_one_of_changes(tables):
    fig = made(activation_change.figures(of_part(tables, "convergence")))
    (ax,) = fig.axes
    assert ax.get_yscale() == "log"
    activations, changes = [line for line in ax.get_lines() if line.get_label() == AQ]
    assert list(activations.get_ydata()) == pytest.approx([0.8] * synthetic.EPOCHS)
    assert len(changes.get_ydata()) == synthetic.EPOCHS - 1
    assert all(change < 0.8 for change in changes.get_ydata())
    assert activations.is_dashed()
    assert not changes.is_dashed()


# --- speed_up ---


def test_a_whole_training_is_bounded_by_its_uncompressed_epochs():
    assert speed_up.whole(6.8, 10, 1) == pytest.approx(4.3, abs=0.01)
    assert speed_up.whole(8.5, 10, 1) == pytest.approx(4.9, abs=0.05)
    assert speed_up.whole(1e9, 10, 2) == pytest.approx(5.0)
    assert speed_up.whole(8.0, 1, 2) == 1.0


def test_speed_ups_are_of_measured_steps_and_the_stated_ones_stand_apart(tables):
    timing = of_part(tables, "timing")
    fig = made(speed_up.figures(timing))
    first, *axes = fig.axes
    assert [ax.get_title() for ax in axes] == ["10 Mbit/s", "30 Mbit/s", "100 Mbit/s"]
    runs = timing["runs"].query("rate_mbit == 10 and state == 'done'").pivot(index="seed", columns="arm")["step_time_s"]
    s = (runs["FP32"] / runs[AQ]).prod() ** (1 / len(runs))
    at = speed_up.EPOCHS.index(speed_up.MARKED)
    assert line_of(axes[0], AQ).get_ydata()[at] == pytest.approx(speed_up.whole(s, speed_up.MARKED, 1))
    assert [line.get_ydata()[0] for line in first.get_lines() if line.get_gid() == "stated"] == [4.9, 4.3]
    assert not [line for line in first.get_lines() if line.get_label() in synthetic.ARMS]
    assert "timed runs declare none" in caption_of(fig)
    declared = {**timing, "runs": timing["runs"].assign(warmup_epochs=2)}
    fig = made(speed_up.figures(declared))
    assert "W = 2 uncompressed epoch(s)." in caption_of(fig)


# --- bytes_by_link ---


def test_bytes_are_of_the_last_epoch_a_step_and_the_same_on_condensed_tables(tables):
    part = of_part(tables, "convergence")
    runs = part["runs"].query("state == 'done'")
    found = bytes_by_link.by_link(part["transfers"], runs)
    run_id = runs.loc[runs["arm"] == AQ, "run_id"].iloc[0]
    own = found[found["run_id"] == run_id].set_index("link")["bytes"]
    bits = {"0 forward": 4, "0 backward": 8}
    frame = {link: synthetic.M * (synthetic.RAW_BYTES * b // 32 + synthetic.HEADER) for link, b in bits.items()}
    assert dict(own) == frame, "the first epoch, in full, is not in it"
    small = bytes_by_link.by_link(condense.transfers(part["transfers"]), runs)
    pd.testing.assert_frame_equal(found, small, check_dtype=False)


def test_what_data_groups_exchange_is_a_link_of_its_own(tables):
    part = of_part(tables, "convergence")
    runs = part["runs"].query("state == 'done'").assign(data_bytes=lambda runs: 1000 * runs["steps"])
    found = bytes_by_link.by_link(part["transfers"], runs)
    assert set(found.loc[found["link"] == bytes_by_link.DATA, "bytes"]) == {1000.0}
    fig = made(bytes_by_link.figures({**part, "runs": runs}))
    ticks = [label.get_text() for label in fig.axes[0].get_xticklabels()]
    assert ticks == ["0 forward", "0 backward", bytes_by_link.DATA]
    assert "uncompressed ones too" in caption_of(fig)


# --- memory_state ---


def test_what_memories_keep_is_drawn_against_the_samples_visited(tables):
    part = of_part(tables, "convergence")
    fig = made(memory_state.figures(part))
    (ax,) = fig.axes
    num = 16 * synthetic.STEPS_PER_EPOCH
    line = line_of(ax, AQ)
    assert list(line.get_xdata()) == [num]
    assert list(line.get_ydata()) == [2 * num * synthetic.RAW_BYTES // 8]
    assert "Without a memory: FP32, BF16, DirectQ fw2 bw8, DirectQ fw4 bw8." in caption_of(fig)


# --- saved result sets ---


@pytest.mark.parametrize("name", ["activation_change", "bytes_by_link", "memory_state"])
def test_figures_of_trainings_are_the_same_on_condensed_tables(name, tables):
    part = of_part(tables, "convergence")
    small = only(condense.tables(tables), lambda runs: runs["part"] == "convergence")
    figure = plugins.get("figures", name).load()
    whole, condensed = (made(figure.figures(t)) for t in (part, small))
    for one, other in zip(whole.axes, condensed.axes, strict=True):
        for a, b in zip(one.get_lines(), other.get_lines(), strict=True):
            assert list(a.get_xdata()) == pytest.approx(list(b.get_xdata()))
            assert list(a.get_ydata()) == pytest.approx(list(b.get_ydata()), nan_ok=True)


# --- value_by_setting, throughput_by_setting ---


def test_arms_that_differ_in_nothing_but_their_evaluation_have_a_line_each(tables):
    part = of_part(tables, "classification")
    runs = part["runs"].query("arm in ['DirectQ fw4 bw8', 'DirectQ fw2 bw8']")
    off = runs.assign(arm=runs["arm"] + ", inference off", train_id="off" + runs["train_id"], final_accuracy=0.25)
    both = {**part, "runs": pd.concat([runs, off])}
    fig = made(plugins.get("figures", "value_by_setting").load().figures(both))
    (ax,) = [ax for ax in fig.axes if ax.get_ylabel() == "final held-out accuracy"]
    lines = [list(line.get_ydata()) for line in ax.get_lines() if len(line.get_ydata()) == 2]
    assert [0.25, 0.25] in lines
    assert len(lines) == 2


def test_throughput_is_drawn_against_what_axes_vary(tables):
    timing = of_part(tables, "timing")
    runs = timing["runs"][timing["runs"]["rate_mbit"] == 100]
    twice = pd.concat([runs, runs.assign(microbatches=8, cell="8" + runs["cell"], samples_per_s=1.0)])
    fig = made(plugins.get("figures", "throughput_by_setting").load().figures({**timing, "runs": twice}))
    (ax,) = fig.axes
    line = line_of(ax, AQ)
    assert ax.get_xlabel() == "microbatches"
    assert list(line.get_xdata()) == [4.0, 8.0]
    assert line.get_ydata()[1] == 1.0
