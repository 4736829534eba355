"""`thinpipe codecs measure --model`: boundaries of a real training, captured once."""

import json

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from thinpipe import cli
from thinpipe.harness import capture

pytestmark = pytest.mark.e2e

SMALL = (
    "model.preset=micro", "pipeline.stages=2", "train.epochs=3", "task.vocab_size=320", "task.sequence_length=32",
    "task.num_sequences=16", "train.batch_size=8",
)  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("THINPIPE_CACHE", str(tmp_path / "cache"))


def test_two_compressors_on_a_models_boundaries_and_the_second_call_trains_nothing(tmp_path, monkeypatch):
    words = [
        "codecs",
        "measure",
        "delta(fixpoint:4)",
        "fixpoint:4",
        "--model",
        "gpt2",
        "--json",
        "--out",
        str(tmp_path),
    ]
    words += [part for setting in SMALL for part in ("--set", setting)]
    first = CliRunner().invoke(cli.app, words)
    assert first.exit_code == 0, first.stderr
    monkeypatch.setattr(capture, "_trained", lambda spec: pytest.fail("trained again"))
    again = CliRunner().invoke(cli.app, words)
    assert again.exit_code == 0, again.stderr
    rows = json.loads(again.stdout)["rows"]
    assert [row["rel_error"] for row in rows] == [row["rel_error"] for row in json.loads(first.stdout)["rows"]]
    found = {(row["compressor"], row["kind"]): row for row in rows}
    assert set(found) == {
        (text, kind) for text in ("delta(fixpoint:4)", "fixpoint:4") for kind in ("activation", "gradient")
    }
    elements = 4 * 32 * 32
    for row in rows:
        assert (row["messages"], row["elements"], row["source"]) == (4, 4 * elements, "gpt2")
        assert row["payload_bytes"] == 4 * (elements // 2 + 2 * 32)
    assert found["delta(fixpoint:4)", "activation"]["first_visit_bits"] > 32
    # What a sample changes by between two visits is much less than what it is.
    error = {key: row["error_db"] for key, row in found.items()}
    assert error["delta(fixpoint:4)", "activation"] < error["fixpoint:4", "activation"] - 6
    assert len(pd.read_csv(tmp_path / "rate_distortion.csv")) == 4
    assert (tmp_path / "rate_distortion.png").is_file()


def test_what_is_captured_is_what_a_stage_is_given():
    """The first stage's output on the samples of the first messages, and the gradient that autograd has there."""
    spec = capture.spec_of("gpt2", [*SMALL[:-2], "task.num_sequences=8", "train.batch_size=8", "train.epochs=1"])
    tensors = capture._trained(spec)
    from thinpipe.harness import plugins, worker
    from thinpipe.harness.models import base
    from thinpipe.harness.pipeline import partition

    shape, model = base.resolve(spec.model, spec.task), plugins.get("models", "gpt2").load()
    halves = [model.build(spec.model, shape, p, seed=spec.seed) for p in partition.split(shape, 2)]
    data = worker.prepare(spec)
    for i, ids in enumerate(tensors["ids"][0].tolist()):
        batch = data.task.batch(data.dataset.train, ids, epoch=0)
        middle = halves[0](batch.inputs)
        middle.retain_grad()
        model.loss(halves[1](middle), batch.targets).backward()
        assert torch.equal(tensors["activation.0"][0, i], middle.detach())
        assert torch.equal(tensors["gradient.0"][0, i], middle.grad)
