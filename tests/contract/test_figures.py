"""What every figure must hold to, on results that never ran (synthetic.py): plots/__init__.py says what that is.

A new figure is found by itself. The example of plots/__init__.py is one of those tested: its text is taken from
there, written to a file, and run. Figures of one run (PARAMETERS["per_run"]), and of what codecs make of tensors
(PARAMETERS["of_codecs"]), have no seeds and no methods: they are held to what is left.
"""

import atexit
import functools
import inspect
import math
import re
import sys
import tempfile
import textwrap
from pathlib import Path
from types import MappingProxyType

import pandas as pd
import pytest
import synthetic
from drawing import (
    all_diverged,
    caption_of,
    cell_texts,
    check_layout,
    drawn,
    few,
    hollow_marks,
    legend_of,
    made,
    only,
    with_runs,
    without_numbers,
    words,
)
from matplotlib.colors import to_hex

import thinpipe.plots
from thinpipe.harness import figures, plugins
from thinpipe.harness import tables as tables_module
from thinpipe.harness.errors import UserError
from thinpipe.plots import style

pytestmark = pytest.mark.filterwarnings("error")


def example() -> plugins.Plugin:
    """The figure written out in plots/__init__.py, as a plug-in of a file of its own."""
    found = re.search(r'^    """.*?(?=^\S|\Z)', inspect.getsource(thinpipe.plots), re.MULTILINE | re.DOTALL)
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    path = Path(folder.name) / "final_loss.py"
    path.write_text(textwrap.dedent(found.group()))
    sys.path.append(folder.name)
    return plugins.read("figures", path.stem, path.stem, path)


EVERY = {**plugins.find("figures"), "final_loss": example()}
PLUGINS = {name: plugin for name, plugin in EVERY.items() if not plugin.parameters}
RUN = ("timing", "AQ-SGD fw4 bw8", 30, 0)


@functools.cache
def tables_of(name):
    """What a figure is tested with: the parts of the experiment that it may draw as one, or a run of it."""
    if EVERY[name].parameters.get("of_codecs"):
        return {"rate_distortion": synthetic.measured()}
    if EVERY[name].parameters.get("of_simulation"):
        return {"predictions": synthetic.predicted()}
    store, whole = synthetic.results()
    if name not in PLUGINS:
        return tables_module.of_run(store, synthetic.spec_of(*RUN).run_id)
    parts = synthetic.parts_for(EVERY[name].load().COLUMNS)
    return only(whole, lambda runs: runs["part"].isin(parts))


@functools.cache
def whole_of(name):
    return drawn(EVERY[name].load().figures(tables_of(name)))


@pytest.fixture(params=sorted(PLUGINS))
def plugin(request):
    return PLUGINS[request.param]


@pytest.fixture(params=sorted(EVERY))
def either(request):
    """A figure of an experiment or of a run."""
    return EVERY[request.param]


@pytest.fixture
def tables(request):
    """Of the figure that is tested, or of those that harness/figures.py is tested with."""
    names = {"plugin", "either", "make", "whole"} & set(request.fixturenames)
    if not names:
        return tables_of("final_loss")
    return tables_of(request.getfixturevalue("either" if "either" in names else "plugin").name)


@pytest.fixture
def make(plugin):
    return plugin.load().figures


@pytest.fixture
def whole(plugin):
    """The figure of the whole experiment, drawn once for all tests: do not change it."""
    return whole_of(plugin.name)


def test_figures_of_one_run_and_of_an_experiment_are_told_apart():
    assert set(EVERY) > set(PLUGINS)
    found = plugins.find("figures")
    assert [n for n in found if figures.is_per_run(n) or figures.is_of_verb(n)] == sorted(set(EVERY) - set(PLUGINS))
    assert not [n for n in found if figures.is_per_run(n) and figures.is_of_verb(n)]


def test_the_module_says_what_it_reads_and_is_called_as_its_file(either, tables):
    module = either.load()
    assert either.name == module.NAME
    assert either.summary
    required = set(getattr(module, "REQUIRES", ("runs",)))
    assert required <= set(tables)
    every = {column for table in required for column in tables[table].columns}
    named = set(re.findall(r"[a-z_0-9]+", " ".join(re.findall(r"\(([^)]*)\)", module.COLUMNS))))
    assert named
    assert named <= every
    tables_named = r"\b(runs|steps|evals|transfers|spans|curves|rate_distortion|predictions) \("
    assert set(re.findall(tables_named, module.COLUMNS)) == required
    assert "spans" not in required or either.name not in PLUGINS, "an experiment's tables have no spans"


def test_it_is_written_in_three_formats_and_the_same_tables_give_the_same_bytes(either, tables, tmp_path, monkeypatch):
    tables = few(tables) if either.name in PLUGINS else tables
    paths, absent = figures.draw_one(either, tables, tmp_path / "new")
    assert absent == []
    assert [p.name for p in paths] == [f"{either.name}.{kind}" for kind in ("png", "pdf", "svg")]
    starts = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}
    for path in paths:
        assert path.read_bytes().startswith(starts[path.suffix])
        assert path.stat().st_size > 5_000
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == sorted(p.name for p in paths)
    if either.name != "final_loss":
        # What a figure itself may do differently each time shows in its text; each format is tried with one figure.
        monkeypatch.setattr(style, "FORMATS", ("svg",))
    for again in figures.draw_one(either, tables, tmp_path / "again")[0]:
        assert (tmp_path / "new" / again.name).read_bytes() == again.read_bytes(), again.name


def test_the_caption_names_experiment_part_table_columns_and_seeds(whole):
    caption = caption_of(whole)
    assert re.search(rf"Experiment synthetic, part ({'|'.join(synthetic.PARTS)})\.", caption)
    assert re.search(r"tables? (runs|steps|transfers|evals) \(", caption)
    assert re.search(r"n = \d( to \d)? seeds", caption)
    assert "95 % Student t interval" in caption


def test_every_axis_is_labelled_and_nothing_is_clipped_or_overlaps(either):
    whole = whole_of(either.name)
    assert all(ax.get_xlabel() + ax.get_ylabel() + ax.get_title() for ax in whole.axes)
    check_layout(whole)


def test_the_caption_of_a_figure_of_one_run_names_the_run():
    for name in sorted(name for name in EVERY if EVERY[name].parameters.get("per_run")):
        whole = whole_of(name)
        caption = caption_of(whole)
        assert re.search(r"Experiment run, part run\. Source: tables? \w+ \(", caption)
        assert synthetic.spec_of(*RUN).run_id in " ".join(words(whole))


def test_the_figure_of_codecs_has_a_panel_a_model_and_kind_and_says_what_is_not_drawn():
    whole = whole_of("rate_distortion")
    assert [ax.get_title() for ax in whole.axes] == [
        f"{source}: {kind}" for source in ("gpt2", "resnet") for kind in ("activations", "activation gradients")
    ]
    assert set(legend_of(whole)) == {"fixpoint", "grid", "delta(fixpoint)", "relu(fixpoint)"}
    assert "Exact compressors are not drawn" in caption_of(whole)
    (line,) = [line for line in whole.axes[0].get_lines() if line.get_label() == "fixpoint"]
    elements = [4096 << boundary for boundary in range(3)]
    header = 3 * 512 / sum(elements)
    assert list(line.get_xdata()) == pytest.approx([bits + header for bits in (2, 4, 8)])
    looks = legend_of(whole)
    colours = [looks[name].get_color() for name in ("fixpoint", "delta(fixpoint)", "relu(fixpoint)", "grid")]
    assert colours[0] == colours[1] == colours[2] != colours[3]
    assert len({looks[name].get_marker() for name in looks}) == len(looks)
    exact = synthetic.measured().query("curve == 'none'")
    with pytest.raises(UserError, match="nothing to draw for rate_distortion: it needs"):
        EVERY["rate_distortion"].load().figures({"rate_distortion": exact})


def test_nothing_overlaps_in_the_figure_of_a_small_experiment(make, tables):
    arms = ("FP32", "AQ-SGD fw4 bw8")
    small = only(tables, lambda r: (r["seed"] == 0) & r["arm"].isin(arms) & (r["rate_mbit"] == 100))
    check_layout(drawn(make(with_runs(small, fidelity="cpu-bound"))))


def test_nothing_overlaps_where_names_are_long(make, tables):
    one_seed = only(tables, lambda runs: runs["seed"] == 0)
    part = one_seed["runs"]["part"]
    check_layout(drawn(make(with_runs(one_seed, part=part + "-of-the-one-that-has-the-longest-name-of-all"))))


def test_methods_have_their_colour_and_marker(whole):
    for ax in whole.axes:
        for line in ax.get_lines():
            if line.get_label() in synthetic.ARMS:
                assert to_hex(line.get_color()) == style.method(line.get_label()).colour.lower()
    for label, entry in legend_of(whole).items():
        if label in synthetic.ARMS:
            assert to_hex(entry.get_color()) == style.method(label).colour.lower()
            assert entry.get_marker() == style.method(label).marker


def test_one_seed_is_said_to_have_no_interval(make, tables):
    fig = made(make(only(few(tables), lambda runs: runs["seed"] == 0)))
    assert "n = 1 seed: no interval" in caption_of(fig)


def test_two_parts_are_two_figures(plugin, make, tables, whole):
    tables = few(tables)
    runs = tables["runs"]
    twice = {**tables, "runs": pd.concat([runs, runs.assign(part="again-" + runs["part"])])}
    part = re.search(r"part (\w+)\.", caption_of(whole)).group(1)
    assert [stem for stem, _ in make(twice)] == [f"{plugin.name}.again-{part}", f"{plugin.name}.{part}"]


def test_a_part_that_cannot_be_drawn_keeps_no_other_from_it(plugin, tables, tmp_path, monkeypatch):
    monkeypatch.setattr(style, "FORMATS", ("png",))
    tables = few(tables)
    runs = tables["runs"]
    mixed = {"cell": runs["run_id"], "train_id": runs["run_id"], "seed": 0}
    both = {**tables, "runs": pd.concat([runs, runs.assign(part="mixed-" + runs["part"], **mixed)])}
    paths, absent = figures.draw_one(plugin, both, tmp_path)
    assert len(paths) == 1
    assert len(absent) == 1
    assert "different settings for arm" in absent[0]


def test_a_flagged_run_is_marked_and_explained(make, tables):
    flagged = made(make(with_runs(few(tables), fidelity="cpu-bound")))
    plain = made(make(with_runs(few(tables), fidelity="ok")))
    assert "flagged" in " ".join(words(flagged))
    assert "flagged" not in " ".join(words(plain))
    assert hollow_marks(flagged) + sum("*" in t for t in cell_texts(flagged)) > 0
    assert hollow_marks(plain) + sum("*" in t for t in cell_texts(plain)) == 0


def test_different_settings_are_never_averaged(make, tables):
    runs = tables["runs"]
    cell, train_id = runs["cell"].where(runs["seed"] != 1, "other"), runs["train_id"] + runs["state"]
    with pytest.raises(UserError, match=r"different settings for arm .*cannot share a line"):
        make(with_runs(tables, cell=cell, train_id=train_id, seed=0))


NOTHING = {
    "no runs": lambda tables: only(tables, lambda runs: runs["run_id"] == ""),
    "all failed": lambda tables: with_runs(tables, state="failed"),
    "all diverged in the first step": lambda tables: all_diverged(tables, steps=1),
    "all diverged in the second step": lambda tables: all_diverged(tables, steps=2),
    "all nan": lambda tables: without_numbers(tables, math.nan),
    "all inf": lambda tables: without_numbers(tables, math.inf),
}


@pytest.mark.parametrize("change", NOTHING.values(), ids=NOTHING)
def test_tables_with_nothing_to_draw_are_told_so(plugin, tables, tmp_path, change):
    with pytest.raises(UserError, match=r"nothing to draw for .*: it needs .*"):
        figures.draw_one(plugin, change(tables), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("change", ["diverged", "failed", "nan"])
def test_a_method_without_numbers_does_not_keep_others_from_being_drawn(make, tables, change):
    tables = few(tables, "DirectQ fw2 bw8")
    if change == "nan":
        bare = without_numbers(tables, math.nan)
    else:
        bare = all_diverged(tables, steps=1) if change == "diverged" else with_runs(tables, state="failed")
    ids = set(tables["runs"].loc[tables["runs"]["arm"] == "DirectQ fw2 bw8", "run_id"])
    mixed = {}
    for name, frame in tables.items():
        theirs = bare[name][bare[name]["run_id"].isin(ids)].astype(frame.dtypes)
        mixed[name] = pd.concat([frame[~frame["run_id"].isin(ids)], *([theirs] if len(theirs) else [])])
    fig = drawn(make(mixed))
    check_layout(fig)
    if change == "failed":
        part = re.search(r"part (\w+)\.", caption_of(fig)).group(1)
        runs = mixed["runs"]
        failed = (runs["state"] == "failed") & (runs["part"] == part)
        assert f"Left out: {failed.sum()} failed" in caption_of(fig)


def test_one_run_alone_is_drawn(make, tables):
    """Both parts, one method, one network and one seed."""
    alone = only(tables, lambda r: (r["seed"] == 0) & (r["arm"] == "AQ-SGD fw4 bw8") & (r["rate_mbit"] == 100))
    check_layout(drawn(make(alone)))


# --- harness/figures.py: what happens around them ---

BROKEN = """
VERSION = 1
SUMMARY = "breaks"
SOURCE = "here"
PARAMETERS = {}


def figures(tables):
    return tables["runs"]["no_such_column"]
"""


@pytest.fixture
def register(monkeypatch, tmp_path):
    """Adds figure modules, by name and text, to those that are found."""

    monkeypatch.setattr(style, "FORMATS", ("png",))

    def add(**texts):
        found = {name: EVERY[name] for name in ("bandwidth_vs_bits", "final_loss")}
        monkeypatch.syspath_prepend(tmp_path)
        for name, text in texts.items():
            path = tmp_path / f"{name}.py"
            path.write_text(text)
            monkeypatch.delitem(sys.modules, name, raising=False)
            found[name] = plugins.read("figures", name, name, path)
        monkeypatch.setattr(plugins, "_find", lambda kind: MappingProxyType(found) if kind == "figures" else {})
        return tmp_path / "figures"

    return add


def test_all_figures_are_drawn_and_one_without_data_is_skipped(register, tables):
    folder = register()
    timing = only(few(tables), lambda runs: runs["measure"] == "timing")
    written, skipped = figures.draw(timing, folder)
    assert {path.stem for path in written} == {"bandwidth_vs_bits"}
    assert list(skipped) == ["final_loss"]
    with pytest.raises(figures.UndrawnError, match="no figure final_loss: nothing to draw") as caught:
        figures.draw(timing, folder, ["final_loss", "bandwidth_vs_bits"])
    assert {path.stem for path in caught.value.written} == {"bandwidth_vs_bits"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BROKEN, r"KeyError: 'no_such_column' \(.*a_broken_one\.py, line 9\)"),
        (BROKEN.replace("figures", "figure"), "neither figures.* nor draw"),
        ("import no_such_module\n" + BROKEN, "No module named 'no_such_module'"),
        (BROKEN + 'REQUIRES = ("spans",)\n', r"do not exist: \['spans'\]"),
        (BROKEN.replace('tables["runs"]["no_such_column"]', '[("loss_vs_step", None)]'), "names are 'a_broken_one'"),
        (BROKEN.replace('["no_such_column"]', ""), "ValueError"),
    ],
)
def test_a_figure_that_breaks_is_named_and_the_others_are_drawn(register, tables, text, message):
    folder = register(a_broken_one=text)
    with pytest.raises(figures.UndrawnError, match=f"no figure a_broken_one: .*{message}") as caught:
        figures.draw(few(tables), folder)
    assert {path.stem for path in caught.value.written} == {"bandwidth_vs_bits", "final_loss"}


def test_a_figure_may_write_its_own_files(register, tables):
    text = """
def draw(tables, out_dir):
    (out_dir / "a.txt").write_text("a")
    return [out_dir / "a.txt"]
"""
    folder = register(own=BROKEN + text)
    assert figures.draw(tables, folder, ["own"]) == ([folder / "a.txt"], {})


def test_a_new_figure_or_a_changed_one_has_other_sources(register):
    register()
    before = figures.sources()
    register(own=BROKEN)
    added = figures.sources()
    register(own=BROKEN + "\n")
    assert set(before) < set(added)
    assert added != figures.sources()
    assert any(line.startswith("style.py ") for line in before)
