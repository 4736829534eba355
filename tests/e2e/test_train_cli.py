"""`thinpipe train`, a process a rank on loopback: AC-SGD's own example, only paths and sizes changed, and failures."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest
from common_train import EXAMPLE, make_checkpoint, make_text

from thinpipe.harness import steps, store, worker
from thinpipe.harness.state import latest

pytestmark = pytest.mark.e2e

LIMIT_S = 240
LAYERS, WIDTH, LENGTH, BATCH = 2, 32, 16, 8
VOCABULARY = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A GPT-2 of two blocks with its tokenizer, and a text of 24 training and 8 held-out sequences."""
    root = tmp_path_factory.mktemp("train")
    text = make_text(root / "corpus.txt")
    make_checkpoint(root / "checkpoints" / "gpt2-tiny", text, layers=LAYERS, width=WIDTH, positions=LENGTH)
    return root


def start(folder, rank, port, **changes):
    """One rank in `folder`, by the example's words; changes: argument -> another value, None = left out."""
    values = EXAMPLE | {"--rank": rank, "--dist-url": f"tcp://127.0.0.1:{port}"} | changes
    words = [str(word) for pair in values.items() if pair[1] is not None for word in pair]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "THINPIPE_CACHE": str(folder / "cache")}
    return subprocess.Popen(
        [sys.executable, "-m", "thinpipe.cli", "train", *words],
        cwd=folder, env=os.environ | offline, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process):
    """(exit code, standard output, standard error)."""
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


def status(folder):
    (path,) = folder.glob("results/runs/*/status.json")
    return json.loads(path.read_text()), path.parent


def rows(run, table):
    return pd.concat([pd.read_parquet(path) for path in sorted(run.glob(f"{table}.rank*.parquet"))])


@pytest.fixture(scope="module")
def example(folder, free_port):
    ranks = [start(folder, rank, free_port) for rank in (0, 1)]
    ended = [finish(process) for process in ranks]
    assert [code for code, _, _ in ended] == [0, 0], [err for _, _, err in ended]
    return ended


@pytest.fixture(scope="module")
def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_the_published_example_trains(folder, example):
    told, run = status(folder)
    assert told["state"] == "done", told["error"]
    taken = rows(run, "steps")
    losses = taken.dropna(subset=["train_loss"]).sort_values("step")["train_loss"].tolist()
    assert len(losses) == 6, "two epochs of three steps: num-iters is no smaller"
    assert losses == pytest.approx([math.log(VOCABULARY)] * 6, abs=0.1), "random weights, and a small learning rate"
    rates = taken.drop_duplicates("step").sort_values("step")["lr"].tolist()
    thirds = [1, 2, 3, 3, 2, 1]  # an epoch of steps up, then down to 0
    assert rates == pytest.approx([5e-5 * part / 3 for part in thirds])
    assert rows(run, "evals")["epoch"].tolist() == [1, 2]


def test_its_first_loss_is_that_of_transformers_on_the_same_checkpoint(folder, example, monkeypatch):
    import torch
    from transformers import GPT2LMHeadModel

    monkeypatch.chdir(folder)  # the run's paths are relative, as the example's
    monkeypatch.setenv("THINPIPE_CACHE", str(folder / "cache"))
    _, run = status(folder)
    spec = store.read_spec(run)
    data = worker.prepare(spec)
    first = steps.plan(spec, len(data.dataset.train), data.task.epoch_batches)[0]
    batch = data.task.batch(data.dataset.train, first.batches[0][0], epoch=0)
    model = GPT2LMHeadModel.from_pretrained("checkpoints/gpt2-tiny").eval()
    with torch.no_grad():
        logits = model(batch.inputs).logits
    truth = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    found = rows(run, "steps").query("step == 0")["train_loss"].dropna().item()
    assert found == pytest.approx(truth.item(), rel=1e-5)


def test_after_the_warm_up_every_frame_has_the_published_bytes(folder, example):
    _, run = status(folder)
    sent = rows(run, "transfers").groupby(["epoch", "direction"])
    number = LENGTH * WIDTH  # elements of a micro-batch of one sample
    for epoch, direction, compressor, each in (
        (0, "forward", "none", 4 * number),
        (0, "backward", "none", 4 * number),
        (1, "forward", "delta(fixpoint:4(preset=acsgd), cache=fp16)", number // 2 + 2 * WIDTH),
        (1, "backward", "fixpoint:8(preset=acsgd)", number + 2 * WIDTH),
    ):
        found = sent.get_group((epoch, direction))
        assert set(found["compressor"]) == {compressor}
        assert set(found["payload_bytes"]) == {BATCH * each}


def test_what_the_ranks_print(example):
    (_, first, noted), (_, last, _) = example
    assert "average step time: " in first
    assert "over 5 steps, the first left out" in first
    assert "rank 0 step 6/6: " in first
    assert "{'loss': " not in first
    assert last.count("{'loss': ") == 6
    assert last.count("'perplexity': ") == 2
    assert noted == "thinpipe: note: --cuda-id has no effect: ranks compute on the CPU: there is no GPU to choose.\n"


def test_a_cache_too_small_is_an_error_before_the_start(folder):
    changes = {"--max-activation-cache-size": 23, "--results": "none-here"}
    code, out, err = finish(start(folder, 0, 1, **changes))
    assert (code, out) == (2, "")
    assert "needs a row for each of 24 training samples. Say --max-activation-cache-size 24" in err
    assert not (folder / "none-here").exists()


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_others_and_the_run_goes_on_from_its_checkpoint(folder, example, free_port):
    """Bit for bit: the parameters at the end are those of a run that was not cut short."""
    changes = {"--results": "cut", "--checkpoint-every": 2, "--limit": 20, "--num-iters": 10_000_000}
    whole, _ = status(folder)
    ranks = [start(folder, rank, free_port, **changes) for rank in (0, 1)]
    runs = folder / "cut" / "runs"
    deadline = time.monotonic() + LIMIT_S
    while not any(latest(run) for run in runs.glob("*")):
        assert time.monotonic() < deadline
        assert ranks[1].poll() is None, finish(ranks[1])
        time.sleep(0.02)
    ranks[1].send_signal(signal.SIGKILL)
    struck = time.monotonic()
    code, _, err = finish(ranks[0])
    assert code == 1
    assert "rank 0: the run failed: " in err
    assert time.monotonic() - struck < 20 + 15
    finish(ranks[1])
    (path,) = runs.glob("*/status.json")
    assert json.loads(path.read_text())["state"] == "failed"

    ended = [finish(process) for process in [start(folder, rank, free_port, **changes) for rank in (0, 1)]]
    assert [code for code, _, _ in ended] == [0, 0], [err for _, _, err in ended]
    assert "goes on from the checkpoint after step " in ended[0][1]
    assert "rank 0 step 1/6" not in ended[0][1]
    again = json.loads(path.read_text())
    assert (again["state"], again["parameters"]) == ("done", whole["parameters"])
