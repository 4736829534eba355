"""By the command line: pretrain, partition, fine-tune from the parts, merge, and load the result in `transformers`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from command import command
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from runs import small
from thinpipe import cli
from thinpipe.harness.spec import TaskSpec
from thinpipe.harness.tasks import lm

pytestmark = [pytest.mark.lab, pytest.mark.e2e]

# A model of seconds: the recipe's ways, at another size.
SMALL = {
    "model.preset": "micro", "task.corpus": "pydoc", "task.vocab_size": 320, "task.sequence_length": 32,
    "task.num_eval_sequences": 20, "train.max_steps": 60, "train.warmup_steps": 6, "checkpoint.every": 20,
}  # fmt: skip
PRETRAIN = ["pretrain", "gpt2-tiny-shakespeare", *(f"--set={key}={value}" for key, value in SMALL.items())]


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "THINPIPE_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}


def thinpipe(cache: Path, *arguments: str) -> dict:
    done = subprocess.run(
        command(cache, *arguments, "--json"),
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(cache),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def base(cache, tmp_path_factory) -> Path:
    """A pretrained model."""
    folder = tmp_path_factory.mktemp("made") / "base"
    thinpipe(cache, *PRETRAIN, "--out", str(folder))
    return folder


def held_out_loss(folder: Path, task: TaskSpec, cache: Path) -> float:
    """The mean next-token loss that `transformers` finds in a folder, on what the run held out."""
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    rows = lm.prepare(task, cache).held_out
    with torch.no_grad():
        logits = model.eval()(rows[:, :-1]).logits
    return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()


def test_a_pretrained_model_is_the_one_its_recipe_says(base, cache):
    recipe = json.loads((base / "recipe.json").read_text())
    assert recipe["steps"] == 60
    assert recipe["final_train_loss"] < 5.0, "it learned something"
    task = TaskSpec(**recipe["spec"]["task"])
    assert held_out_loss(base, task, cache) == pytest.approx(recipe["eval_loss"], abs=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(base)
    assert len(tokenizer) == 320
    assert tokenizer.decode(tokenizer("a for-loop")["input_ids"]) == "a for-loop"
    assert not list((cache / "pretrained" / ".runs" / "runs").iterdir()), "nothing of the run is left"


@pytest.mark.slow
def test_an_interrupted_one_goes_on_and_ends_as_if_it_had_not_been(base, cache, tmp_path):
    begun = subprocess.Popen(
        command(cache, *PRETRAIN, "--out", str(tmp_path / "again")), stderr=subprocess.PIPE, env=environment(cache)
    )
    try:
        deadline = time.monotonic() + 300
        saved = cache / "pretrained" / ".runs" / "runs"
        while not list(saved.glob("*/checkpoints/*/complete.json")) and begun.poll() is None:
            assert time.monotonic() < deadline, "no checkpoint was written"
            time.sleep(0.01)
        begun.send_signal(signal.SIGINT)
        _, said = begun.communicate(timeout=60)
    finally:
        begun.kill()
    assert begun.returncode == 130, said
    assert b"goes on from the last training checkpoint" in said
    assert list(tmp_path.iterdir()) == []
    thinpipe(cache, *PRETRAIN, "--out", str(tmp_path / "again"))
    same = (base / "model.safetensors").read_bytes() == (tmp_path / "again" / "model.safetensors").read_bytes()
    assert same, "bit for bit"


def test_partition_fine_tune_merge_and_load(base, cache, trained, tmp_path, monkeypatch):
    monkeypatch.setenv("THINPIPE_CACHE", str(cache))
    cut = thinpipe(cache, "partition", str(base), "--stages", "2", "--out", str(tmp_path / "cut"))
    assert [row["file"] for row in cut["files"]] == ["stage-00-of-02.safetensors", "stage-01-of-02.safetensors"]
    spec = small(
        model={"checkpoint": str(tmp_path / "cut"), "layers": None, "width": None, "heads": None},
        task={"tokenizer": "checkpoint", "vocab_size": 320, "sequence_length": 32},
        checkpoint={"every": 10, "keep": True},
    )
    trained.status(spec)
    run_dir = trained.store.run_dir(spec.run_id)
    merged = thinpipe(cache, "merge", str(run_dir), "--out", str(tmp_path / "merged"))
    assert (merged["step"], merged["tied"], merged["transformers"]) == (20, None, None)
    last = trained.rows(spec, "evals").sort_values("step").iloc[-1]
    task = spec.task.model_copy(update={"tokenizer": str(tmp_path / "merged")})
    assert held_out_loss(tmp_path / "merged", task, cache) == pytest.approx(last["eval_loss"], abs=1e-4)
    assert held_out_loss(tmp_path / "cut", task, cache) > last["eval_loss"] + 0.01, "fine-tuning changed it"


def test_mistakes_are_explained(base, cache, tmp_path, monkeypatch):
    monkeypatch.setenv("THINPIPE_CACHE", str(cache))
    for arguments, message in [
        (["pretrain", "gpt2-tiny-shakespear"], "Did you mean 'gpt2-tiny-shakespeare'"),
        (["pretrain", "gpt2-tiny-shakespeare", "--set=train.max_steps=9"], "give its folder with --out"),
        ([*PRETRAIN, "--out", str(base)], "is not empty"),
        (["partition", str(base), "--stages", "3", "--out", str(tmp_path / "x")], "more than the model's 2 blocks"),
        (["partition", str(base), "--stages", "2", "--cuts", "a", "--out", str(tmp_path / "x")], "--cuts 'a'"),
        (["partition", str(tmp_path / "no/such/place"), "--stages", "2", "--out", str(tmp_path / "x")], "no directory"),
        (["merge", str(base), "--out", str(tmp_path / "x")], "not written by `thinpipe partition`"),
    ]:
        done = CliRunner().invoke(cli.app, arguments)
        assert done.exit_code == 2, done.stderr
        assert message in done.stderr
    assert list(tmp_path.iterdir()) == []
