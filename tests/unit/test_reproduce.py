"""`thinpipe reproduce`: which experiments, one plan of all, what is written at the end, and what a failure leaves."""

from __future__ import annotations

import json

import pytest
from fake_session import FakeSession
from typer.testing import CliRunner

from thinpipe import cli
from thinpipe.harness import experiment, figures, lock, reproduce, tables, verbs
from thinpipe.harness.errors import UserError
from thinpipe.harness.store import Store

COMMON = """
title = "t"
question = "q?"
seeds = [0, 1, 2]
base.model.preset = "micro"
base.task.sequence_length = 32
base.task.num_sequences = 32
base.pipeline.microbatches = 2
base.train.batch_size = 8
[size.check]
seeds = [0]
[size.cpu]
[size.paper]
base.model.preset = "xl"
[[arm]]
label = "FP32"
[[arm]]
label = "Q4"
compression.forward = "fixpoint:4"
[[part]]
name = "convergence"
"""
CLAIM = """
[[claim]]
name = "few bytes"
sentence = "Q4 sends fewer bytes."
source = "ours"
part = "convergence"
metric = "frame_bytes"
arm = "Q4"
other = "FP32"
relation = "<"
exact = true
"""
FILES = {
    "acsgd/F1": f'name = "acsgd-F1"\n{COMMON}',
    "acsgd/F2": f'name = "acsgd-F2"\n{COMMON}{CLAIM}',
    "rudakov/R1": f'name = "rudakov-R1"\n{COMMON.replace("fixpoint:4", "fixpoint:2")}',
    "alone": f'name = "alone"\n{COMMON}',
}


@pytest.fixture
def papers(monkeypatch, tmp_path):
    """Three experiments of two papers; runs are written, not executed, and no figure is drawn."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lock, "PATH", tmp_path / "lock")
    monkeypatch.setattr(experiment, "builtin", lambda: FILES)
    monkeypatch.setattr(figures, "draw", lambda *_, **__: ([], {}))
    fake = FakeSession()
    monkeypatch.setattr(verbs, "session", lambda **_: fake)
    return fake


def thinpipe(*args):
    return CliRunner().invoke(cli.app, [str(arg) for arg in args])


def test_all_experiments_of_a_paper_in_one_sweep_to_one_page(papers, tmp_path):
    shown = thinpipe("reproduce", "acsgd", "--size", "check", "--json")
    assert shown.exit_code == 0, shown.output
    # F1 and F2 declare the same two runs: each is executed once.
    assert len(papers.ran) == len(set(papers.ran)) == 2
    for name in ("acsgd-F1.check", "acsgd-F2.check"):
        assert set(Store(tmp_path / "results").declaration(name)) == {
            "name", "title", "question", "source", "size", "overrides",
        }  # fmt: skip
        assert (tmp_path / "results" / name / "tables" / "runs.csv").exists()
    claims = json.loads((tmp_path / "results" / "acsgd-F2.check" / "claims.json").read_text())
    assert [claim["state"] for claim in claims] == ["fails"]  # the fake sends as much in every arm
    page = (tmp_path / "results" / "acsgd.check.html").read_text()
    assert "Q4 sends fewer bytes." in page
    assert thinpipe("claims", "--json").exit_code == 1
    assert thinpipe("reproduce", "acsgd", "--size", "check").exit_code == 0
    assert len(papers.ran) == 2


def test_both_papers_and_only_some_ids(papers):
    assert [e.name for e in reproduce.chosen("all", "cpu")] == ["acsgd-F1.cpu", "acsgd-F2.cpu", "rudakov-R1.cpu"]
    assert [e.name for e in reproduce.chosen("all", "check", ["F2", "R*"])] == ["acsgd-F2.check", "rudakov-R1.check"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("acsdg", "check", ()), ["acsdg", "Did you mean 'acsgd'?"]),
        (("acsgd", "chek", ()), ["unknown size 'chek'", "check"]),
        (("acsgd", "check", ("F9",)), ["F9", "F1"]),
    ],
)
def test_what_there_is_not_is_refused_with_words(papers, args, words):
    with pytest.raises(UserError) as refused:
        reproduce.chosen(*args)
    assert all(word in str(refused.value) for word in words)


def test_what_the_runs_start_from_is_prepared_once(papers, monkeypatch):
    made, fetched = [], []
    monkeypatch.setattr(verbs, "pretrain", lambda name, *_, **__: made.append(name))
    monkeypatch.setattr(verbs, "fetch_data", fetched.extend)
    files = {name: text.replace('preset = "micro"', 'checkpoint = "pretrained:RECIPE"') for name, text in FILES.items()}
    files = {name: f'needs = ["fetch-data fashion-mnist"]\n{text}' for name, text in files.items()}
    recipes = [
        "gpt2-tiny-shakespeare-brief",
        "gpt2-tiny-shakespeare",
        "gpt2-tiny-shakespeare-brief",
        "gpt2-tiny-shakespeare",
    ]
    files = {name: text.replace("RECIPE", recipe) for (name, text), recipe in zip(files.items(), recipes, strict=True)}
    monkeypatch.setattr(experiment, "builtin", lambda: files)
    reproduce.prepare(reproduce.chosen("all", "cpu"), lambda _: None)
    assert made == recipes[:2]
    assert fetched == ["fashion-mnist"]


def test_an_interrupted_reproduction_goes_on(papers, tmp_path):
    def interrupt():
        if len(papers.ran) == 1:
            raise KeyboardInterrupt

    papers.before = interrupt
    interrupted = thinpipe("reproduce", "acsgd", "--size", "check")
    assert interrupted.exit_code == 130
    assert "no claims" not in interrupted.output
    assert not (tmp_path / "results" / "acsgd.check.html").exists()
    papers.before = lambda: None
    assert thinpipe("reproduce", "acsgd", "--size", "check").exit_code == 0
    assert len(set(papers.ran)) == 2
    assert (tmp_path / "results" / "acsgd.check.html").exists()


def test_a_failed_run_is_the_exit_code_and_keeps_no_page_back(papers, tmp_path):
    papers.fail = ("fixpoint:4",)
    assert thinpipe("reproduce", "acsgd", "--size", "check").exit_code == 1
    assert (tmp_path / "results" / "acsgd.check.html").exists()


def test_tables_that_break_in_one_experiment_keep_the_others(papers, tmp_path, monkeypatch):
    whole = tables.build

    def broken(store, name):
        if name == "acsgd-F1.check":
            raise UserError("a shard is missing")
        return whole(store, name)

    monkeypatch.setattr(tables, "build", broken)
    shown = thinpipe("reproduce", "acsgd", "--size", "check")
    assert shown.exit_code == 1
    assert "acsgd-F1.check: a shard is missing" in shown.stderr
    assert (tmp_path / "results" / "acsgd-F2.check" / "claims.json").exists()
    assert (tmp_path / "results" / "acsgd.check.html").exists()


def test_a_dry_run_of_the_papers_own_size_plans_and_a_run_is_refused(papers, tmp_path):
    planned = thinpipe("reproduce", "all", "--size", "paper", "--dry-run", "--json")
    assert planned.exit_code == 0, planned.output
    assert len(json.loads(planned.stdout)["runs"]) == 3 * 3  # FP32 is shared by all three
    refused = thinpipe("reproduce", "all", "--size", "paper")
    assert refused.exit_code == 2
    assert "cluster" in refused.stderr
    assert not papers.ran
    assert not (tmp_path / "results").exists()


def test_claims_whose_file_is_gone_keep_nobody_from_the_others(papers, tmp_path, monkeypatch):
    assert thinpipe("reproduce", "acsgd", "--size", "check").exit_code == 0
    monkeypatch.setattr(experiment, "builtin", lambda: {k: v for k, v in FILES.items() if k != "acsgd/F1"})
    shown = thinpipe("claims", "--json")
    assert "acsgd-F1.check" in shown.stderr
    assert [claim["claim"] for claim in json.loads(shown.stdout)] == ["few bytes"]
    assert thinpipe("claims", "acsgd-F1.check").exit_code == 2


def test_a_claim_that_is_declared_no_more_leaves_no_verdict(papers, tmp_path, monkeypatch):
    assert thinpipe("reproduce", "acsgd", "--size", "check").exit_code == 0
    verdict = tmp_path / "results" / "acsgd-F2.check" / "claims.json"
    assert verdict.exists()
    monkeypatch.setattr(experiment, "builtin", lambda: {**FILES, "acsgd/F2": f'name = "acsgd-F2"\n{COMMON}'})
    assert thinpipe("reproduce", "acsgd", "--size", "check").exit_code == 0
    assert not verdict.exists()
