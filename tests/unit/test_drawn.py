"""When `run` and `plot` draw figures, and what they say and return when one breaks."""

import json
import os
import sys
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
import synthetic

from thinpipe.harness import figures, outputs, plan, plugins, resultset, sweep, verbs
from thinpipe.harness.errors import UserError
from thinpipe.harness.store import Store

TEXT = """
VERSION = 1
SUMMARY = "writes its name"
SOURCE = "here"
PARAMETERS = {}


def draw(tables, out_dir):
    (out_dir / "NAME.txt").write_text("drawn")
    return [out_dir / "NAME.txt"]
"""
BROKEN = TEXT.replace("return", "return 1 / 0,")


@pytest.fixture
def found(monkeypatch, tmp_path):
    """Sets which figures there are, by name and text."""
    real = plugins._find
    modules = tmp_path / "modules"
    modules.mkdir()
    monkeypatch.syspath_prepend(modules)

    def set_to(**texts):
        plugs = {}
        for name, text in texts.items():
            path = modules / f"{name}.py"
            path.write_text(text.replace("NAME", name))
            # A file changed within a second would be taken from the cache.
            os.utime(path, (0, len(list(modules.iterdir())) + 100 * len(text)))
            monkeypatch.delitem(sys.modules, name, raising=False)
            plugs[name] = plugins.read("figures", name, name, path)
        monkeypatch.setattr(plugins, "_find", lambda kind: MappingProxyType(plugs) if kind == "figures" else real(kind))

    return set_to


@pytest.fixture
def store(tmp_path):
    """An experiment whose results are one run."""
    store = synthetic.build(tmp_path / "results", parts=("convergence",))
    listed = store.experiment_dir("synthetic") / "runs.json"
    listed.write_text(json.dumps(store.saved_runs("synthetic")[:1]))
    return store


def draw_if_new(store: Store) -> list[str] | None:
    """What `run` does once its sweep has ended: the names drawn, None where nothing was to do."""
    origin = outputs.origin(outputs.ended(store, "synthetic"))
    if origin == outputs.drawn_from(store, "synthetic"):
        return None
    return [Path(name).stem for name in outputs.draw(store, "synthetic", {"runs": None}, noted=origin)]


def test_figures_are_drawn_again_when_one_is_new_or_changed(store, found):
    found(first_one=TEXT)
    assert draw_if_new(store) == ["first_one"]
    assert draw_if_new(store) is None
    found(first_one=TEXT, second_one=TEXT)
    assert draw_if_new(store) == ["first_one", "second_one"]
    found(first_one=TEXT, second_one=TEXT + "# changed\n")
    assert draw_if_new(store) == ["first_one", "second_one"]
    assert draw_if_new(store) is None


def test_figures_are_drawn_again_when_a_run_ended_or_was_renamed(store, found):
    found(only_one=TEXT)
    assert draw_if_new(store) == ["only_one"]
    (row,) = store.saved_runs("synthetic")
    status = store.run_dir(row["run_id"]) / "status.json"
    status.write_text(status.read_text())
    assert draw_if_new(store) == ["only_one"]
    (store.experiment_dir("synthetic") / "runs.json").write_text(json.dumps([row | {"arm": "another label"}]))
    assert draw_if_new(store) == ["only_one"]
    assert draw_if_new(store) is None


def test_what_an_experiment_declares_is_drawn_and_what_it_no_longer_does_is_removed(store, found, monkeypatch):
    found(first_one=TEXT, second_one=TEXT)
    folder = store.experiment_dir("synthetic") / "figures"
    verbs.plot("synthetic", store.root, ())
    (folder / "second_one.part.txt").write_text("of two parts")
    (folder / "mine.txt").write_text("kept")
    monkeypatch.setattr(resultset, "declared", lambda *_: SimpleNamespace(figures=("first_one",)))
    assert verbs.plot("synthetic", store.root, ())["files"] == [str(folder / "first_one.txt")]
    assert {path.name for path in folder.glob("*.txt")} == {"first_one.txt", "mine.txt"}
    verbs.plot("synthetic", store.root, ["second_one"])
    assert (folder / "second_one.txt").exists()


def test_a_picture_that_can_no_longer_be_drawn_is_removed(store, found):
    refusing = (
        TEXT.replace("draw(", "unused(")
        + """

from thinpipe.harness.errors import UserError


def figures(tables):
    raise UserError("several settings are mixed")
"""
    )
    found(first_one=TEXT)
    folder = store.experiment_dir("synthetic") / "figures"
    folder.mkdir()
    for name in ("first_one.png", "mine.png"):
        (folder / name).touch()
    found(first_one=refusing)
    assert draw_if_new(store) == []
    assert [path.name for path in folder.glob("*.png")] == ["mine.png"]


def test_plot_names_a_broken_figure_and_draws_the_others(store, found, capsys):
    found(good_one=TEXT, odd_one=BROKEN)
    with pytest.raises(UserError, match="no figure odd_one: it broke with ZeroDivisionError"):
        verbs.plot("synthetic", store.root, ())
    folder = store.experiment_dir("synthetic") / "figures"
    assert f"figure: {folder / 'good_one.txt'}" in capsys.readouterr().err
    # It is not taken for drawn: the next `run` says so again.
    assert outputs.drawn_from(store, "synthetic") is None
    assert verbs.plot("synthetic", store.root, ["good_one"])["files"] == [str(folder / "good_one.txt")]


@pytest.mark.parametrize("text", [BROKEN, TEXT])
def test_a_broken_figure_changes_no_exit_code_of_a_sweep(store, found, monkeypatch, capsys, text):
    found(good_one=TEXT, odd_one=text)
    loaded = SimpleNamespace(name="synthetic", cells=tuple, claims=(), figures=())
    monkeypatch.setattr(Store, "save_runs", lambda self, experiment: 0)
    made = plan.Plan("synthetic", ())
    monkeypatch.setattr(sweep, "execute", lambda *args, **options: sweep.Result(made))
    flags = dict.fromkeys(("retry_failed", "force", "fail_fast", "allow_unreached"), False)
    drawn, code = verbs.run(loaded, store, made, **flags)[1:]
    assert code == 0
    said = capsys.readouterr().err
    assert ("no figure odd_one: it broke with ZeroDivisionError: division by zero (" in said) == (text is BROKEN)
    assert [Path(name).stem for name in drawn] == ["good_one", "odd_one"][: 1 if text is BROKEN else 2]


def test_a_figure_that_cannot_be_saved_is_named(store, found, tmp_path):
    found(good_one=TEXT)
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(figures.UndrawnError, match=r"no figure good_one: it broke with .*taken"):
        figures.draw({"runs": None}, tmp_path / "taken")


def test_a_figure_without_data_is_said_and_taken_for_drawn(store, found, capsys):
    why = 'raise __import__("thinpipe.harness.errors").harness.errors.UserError("nothing to draw")'
    found(bare_one=TEXT.replace('(out_dir / "NAME.txt").write_text("drawn")', why))
    assert draw_if_new(store) == []
    assert "no figure bare_one: nothing to draw" in capsys.readouterr().err
    assert draw_if_new(store) is None
