"""Result sets: loaded from an experiment's folder, saved small, loaded again; what is condensed and what is kept."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import synthetic
from made_sets import LINKS, blank, frame, made, run
from typer.testing import CliRunner

from thinpipe import cli
from thinpipe.harness import condense, metrics, provenance, resultset
from thinpipe.harness.errors import UserError
from thinpipe.plots import _curves, boundary_error

CLAIM = {"experiment": "synthetic", "claim": "c", "state": "holds", "value": 0.5, "source": "/home/someone/notes.txt"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Results of the synthetic experiment, with a claim, and a manifest in one run that names this machine's paths."""
    store, _ = synthetic.results()
    root = tmp_path_factory.mktemp("results")
    shutil.copytree(store.root, root, dirs_exist_ok=True)
    (root / "synthetic" / "claims.json").write_text(json.dumps([CLAIM]))
    run_id = store.saved_runs("synthetic")[0]["run_id"]
    network = {"topology": {"links": [[0, 1, {"rate_mbit": 30.0, "delay_ms": 0.0}]]}, "calibration": [LINKS[0]]}
    manifest = {
        "machine_id": "a" * 12,
        "machine": {"cpu": "a CPU", "cores": 2},
        "source": {"commit": "c" * 40, "dirty": True},
        "inputs": {"/home/someone/corpus.txt": "0123"},
        "network": network,
    }
    (root / "runs" / run_id / "manifest.json").write_text(json.dumps(manifest))
    return root / "synthetic"


@pytest.fixture(scope="module")
def saved(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("saved")
    return resultset.save(folder, out), out


def test_an_experiments_folder_is_loaded(folder):
    found = resultset.load(folder)
    assert found.name == "synthetic"
    assert found.claims == [CLAIM]
    assert set(found.settings) == set(found.tables["runs"]["run_id"])
    assert found.manifest["commits"] == ["c" * 40]
    assert found.manifest["dirty"]
    assert found.notes == ("1 of 90 run(s) have not ended.",)
    first = found.tables["runs"]["run_id"][0]
    assert found.provenance.of(first)["links"][0]["measured_rate_mbit"] == 29.7
    assert found.settings[first]["network.rate_mbit"] == 100


def test_a_saved_set_comes_back(folder, saved):
    before, after = resultset.load(folder), resultset.load(saved[1])
    assert (after.name, after.title, after.question, after.notes) == (
        before.name,
        before.title,
        before.question,
        before.notes,
    )
    assert after.settings == before.settings
    for name in ("runs", "evals"):
        pd.testing.assert_frame_equal(after.tables[name], before.tables[name], rtol=1e-6, check_index_type=False)
    assert list(after.tables) == sorted(before.tables)
    assert after.provenance.runs == before.provenance.runs


def test_figures_of_a_saved_set_show_the_same(folder, saved):
    before, after = resultset.load(folder), resultset.load(saved[1])
    runs = before.tables["runs"]
    trained = runs[runs["measure"] == "convergence"]
    whole, small = (_curves.curves(one.tables, "training", trained) for one in (before, after))
    assert whole.keys() == small.keys()
    for run_id, curve in whole.items():
        last = trained.loc[trained["run_id"] == run_id, "state"].iloc[0] == "diverged"
        kept = curve.iloc[:-1] if last else curve  # the epoch it broke off in has no whole number of bins
        pd.testing.assert_frame_equal(small[run_id].iloc[: len(kept)], kept, rtol=1e-5, check_dtype=False)
    errors = [boundary_error.by_epoch(one.tables["transfers"]) for one in (before, after)]
    kept_ids = set(trained["run_id"])
    whole_errors = errors[0][errors[0]["run_id"].isin(kept_ids)].reset_index(drop=True)
    joined = whole_errors.merge(errors[1], on=["run_id", "epoch", "boundary", "direction"], suffixes=("", "_small"))
    assert len(joined) == len(whole_errors) > 100
    for column in ("rel_error", "change"):
        left, right = joined[column], joined[f"{column}_small"]
        pd.testing.assert_series_equal(left, right, rtol=1e-5, check_names=False)


def test_a_saved_set_is_small_and_names_no_folder(saved):
    answer, out = saved
    assert set(answer["files"]) >= {"claims.json", "manifest.json", "tables/runs.csv", "tables/steps.csv"}
    for name, size in answer["files"].items():
        text = (out / name).read_text()
        assert len(text.encode()) == size < resultset.MAX_BYTES
        assert "/home" not in text
        assert str(out.parent) not in text
    assert json.loads((out / "claims.json").read_text())[0]["source"] == "notes.txt"
    assert "corpus.txt" in (out / "manifest.json").read_text()


def test_the_command_saves_each_set_under_its_name(folder, tmp_path):
    out = tmp_path / "kept"
    shown = CliRunner().invoke(cli.app, ["save", str(folder.parent), "--out", str(out), "--json"])
    assert shown.exit_code == 0, shown.output
    (answer,) = json.loads(shown.stdout)
    assert answer["experiment"] == "synthetic"
    assert resultset.load(out / "synthetic").claims == [{**CLAIM, "source": "notes.txt"}]
    said = CliRunner().invoke(cli.app, ["save", str(folder), "--out", str(out)]).stdout
    assert said.startswith(f"{out / 'synthetic'}: ")
    assert "kB in" in said


def test_saving_again_replaces(folder, saved, tmp_path):
    shutil.copytree(saved[1], tmp_path / "out")
    (tmp_path / "out" / "tables" / "spans.csv").write_text("stale")
    resultset.save(folder, tmp_path / "out", commit="d" * 40)
    assert resultset.load(tmp_path / "out").manifest["commits"] == ["d" * 40]
    assert not (tmp_path / "out" / "tables" / "spans.csv").exists()


def test_saving_that_breaks_off_leaves_whole_files(folder, saved, tmp_path, monkeypatch):
    out = tmp_path / "out"
    shutil.copytree(saved[1], out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}

    def fail(path, data, encoding):
        path.write_bytes(data[: len(data) // 2].encode())
        raise OSError("power cut")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(OSError, match="power cut"):
        resultset.save(folder, out, commit="e" * 40)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_what_is_too_large_is_refused(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(resultset, "MAX_BYTES", 1000)
    with pytest.raises(UserError, match=r"too large to be kept in git \(.*runs.csv"):
        resultset.save(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_set_without_a_commit_is_refused():
    found = made([run(1)])
    with pytest.raises(UserError, match="do not say what commit"):
        resultset.contents(replace(found, manifest={"experiment": "made"}))


def test_sets_are_found_in_a_folder_of_them(folder, saved, tmp_path):
    assert resultset.find([folder.parent]) == [folder]
    assert resultset.find([folder, folder.parent, saved[1]]) == [folder, saved[1]]
    with pytest.raises(UserError, match="holds no results"):
        resultset.find([tmp_path])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("manifest.json", "{}", "damaged: it lacks"),
        ("claims.json", "[1]", "must be a list of claims"),
        ("tables/runs.csv", "a,b\n", "other columns"),
        ("tables/odd.csv", "a,b\n", "no table of this version"),
    ],
)
def test_a_damaged_set_says_what_is_wrong(saved, tmp_path, name, text, message):
    shutil.copytree(saved[1], tmp_path / "out")
    (tmp_path / "out" / name).write_text(text)
    with pytest.raises(UserError, match=message):
        resultset.load(tmp_path / "out")


def test_figures_older_than_a_run_are_not_taken(folder):
    drawn = folder / "figures" / ".drawn"
    drawn.parent.mkdir(exist_ok=True)
    drawn.write_text("")
    assert resultset.load(folder).figures_folder == drawn.parent
    os.utime(drawn, (0, 0))
    assert resultset.load(folder).figures_folder is None


def test_an_experiment_of_the_package_gives_title_and_figures():
    known = resultset.declared("quickstart", {})
    assert known is not None
    assert known.title != "quickstart"
    assert resultset.declared("no-such-experiment", {}) is None


def test_an_experiment_of_ones_own_is_the_file_it_was_asked_for_by(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\ntitle = "My own"\n[[part]]\nname = "p"\narm = [{label = "FP32"}]\n')
    asked = {"source": str(file), "overrides": ["train.epochs=3"], "size": None}
    known = resultset.declared("mine", asked)
    assert known is not None
    assert known.title == "My own"
    assert resultset.declared("another", asked) is None
    file.unlink()
    assert resultset.declared("mine", asked) is None


# --- condensing ---


def test_steps_are_joined_within_an_epoch_and_lose_no_mean():
    rows = [
        {
            **blank("steps"),
            "run_id": "a" * 12,
            "rank": rank,
            "step": step,
            "epoch": step // 12,
            "measured": step >= 12,
            "t_s": step + 1.0,
            "step_time_s": 1.0,
            "train_loss": float(step) if rank else None,
        }
        for step in range(24)
        for rank in range(2)
    ]
    small = condense.steps(frame("steps", rows))
    assert list(small["step"]) == [2, 5, 8, 11, 14, 17, 20, 23]
    assert list(small["t_s"]) == [3, 6, 9, 12, 15, 18, 21, 24]
    assert set(small["step_time_s"]) == {3.0}
    assert small.groupby("epoch")["train_loss"].mean().to_list() == [5.5, 17.5]
    assert set(small["rank"]) == {1}


def test_transfers_keep_every_byte():
    rows = [
        {**blank("transfers"), "run_id": "a" * 12, "step": step, "frame_bytes": 100 + step, "messages": 4}
        | {"direction": "forward", "compressor": "none", "rel_error": 0.5 if step == 2 else None}
        for step in range(4)
    ]
    small = condense.transfers(frame("transfers", rows))
    assert small[["step", "frame_bytes", "messages", "rel_error"]].to_numpy().tolist() == [[3, 406, 16, 0.5]]


def test_csv_comes_back_as_it_was():
    row = run(
        1, step_time_s=0.1234567, arm='a "b", c\nd', rate_mbit=None, frame_bytes=2**53, final_eval_loss=float("inf")
    )
    text = condense.to_csv(frame("runs", [row]), "runs")
    assert condense.from_csv(text, "runs", "here") == [row]


@pytest.mark.parametrize(("value", "message"), [("x", "line 2, is damaged"), ('1"', "line 2")])
def test_a_damaged_csv_names_its_line(value, message):
    text = condense.to_csv(frame("evals", []), "evals") + ",".join([value] * (len(metrics.TABLES["evals"]))) + "\n"
    with pytest.raises(UserError, match=message):
        condense.from_csv(text, "evals", "here")


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("/somewhere/.cache/x/y.txt", "y.txt"),
        ("gpt2:/home/me/model", "gpt2:model"),
        ("cannot read ~/a/b.toml: gone", "cannot read b.toml: gone"),
        ("10/30 and a/b", "10/30 and a/b"),
        ("samples/s", "samples/s"),
        ("none / fixpoint:4", "none / fixpoint:4"),
    ],
)
def test_paths_are_cut_and_nothing_else(text, kept):
    assert condense.without_paths([text]) == [kept]


def test_links_that_were_not_measured_are_told_apart():
    rows = provenance.link_rows({"topology": {"links": [[0, 1, {"rate_mbit": 5.0}]]}})
    assert rows[0]["rate_mbit"] == 5.0
    assert rows[0]["measured_rate_mbit"] is None
    assert provenance.link_rows({}) == []
