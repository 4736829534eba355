"""The battery every task plug-in has to pass; plug-ins are found, not listed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from thinpipe.harness import fetch, metrics, plugins
from thinpipe.harness.errors import UserError
from thinpipe.harness.spec import TaskSpec
from thinpipe.harness.tasks import base

PLUGINS = plugins.find("tasks")
KINDS = ("lm", "classification", "images")
LABELS = 3
SIZES = {"vocab_size": 512, "sequence_length": 12, "num_sequences": 18, "num_eval_sequences": 5}


@pytest.fixture(params=sorted(PLUGINS), scope="module")
def plugin(request):
    return PLUGINS[request.param]


@pytest.fixture(scope="module")
def task(plugin):
    return plugin.load()


@pytest.fixture(scope="module")
def spec(plugin, tmp_path_factory) -> TaskSpec:
    """The task's first corpus that comes with a package; sentences of our own where there is none."""
    offline = [name for name, about in plugin.parameters["corpora"].items() if not {"fetch", "hub"} & set(about)]
    if offline:
        return TaskSpec(name=plugin.name, corpus=offline[0], **SIZES)
    path = tmp_path_factory.mktemp("own") / "own.csv"
    words = [hashlib.sha256(str(i).encode()).hexdigest()[: 4 + i % 9] for i in range(200)]
    rows = [f"{' '.join(words[i : i + 2 + i % 17])},{'abc'[i % LABELS]}" for i in range(150)]
    path.write_text("sentence,label\n" + "\n".join(rows))
    return TaskSpec(name=plugin.name, corpus=str(path), num_labels=LABELS, **SIZES)


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def dataset(task, spec, cache):
    return task.prepare(spec, cache)


def everything(task, samples, **how) -> list[torch.Tensor]:
    """What the task's batches hold of all samples."""
    batch = task.batch(samples, range(len(samples)), **how)
    return [batch.inputs, batch.targets, *(batch.side[name] for name in sorted(batch.side))]


def test_its_declaration_is_one_the_core_knows(plugin):
    assert plugin.parameters["kind"] in KINDS
    for name, about in plugin.parameters["corpora"].items():
        assert set(about) <= {"labels", "fetch", "hub"}, name
        assert (plugin.parameters["kind"] == "lm") == ("labels" not in about)
        if "fetch" in about:
            assert about["fetch"] in fetch.SOURCES


def test_as_many_samples_as_asked(dataset, spec):
    assert len(dataset.train) == spec.num_sequences
    assert len(dataset.held_out) == spec.num_eval_sequences
    assert dataset.vocab_size <= spec.vocab_size


def test_too_many_samples_are_refused(task, spec, cache):
    with pytest.raises(UserError, match="1000000 to train on"):
        task.prepare(spec.model_copy(update={"num_sequences": 1_000_000}), cache)
    with pytest.raises(UserError, match="1000000 held out"):
        task.prepare(spec.model_copy(update={"num_eval_sequences": 1_000_000}), cache)


def test_all_samples_where_no_number_is_asked(task, spec, dataset, cache):
    whole = task.prepare(spec.model_copy(update={"num_sequences": None}), cache)
    assert len(whole.train) > len(dataset.train)
    for one, other in zip(everything(task, whole.held_out), everything(task, dataset.held_out), strict=True):
        assert one.shape == other.shape


CHILD = """
import hashlib, os, sys
from pathlib import Path
from thinpipe.harness import plugins
from thinpipe.harness.spec import TaskSpec
spec = TaskSpec.model_validate_json(sys.argv[1])
task = plugins.get("tasks", spec.name).load()
data = task.prepare(spec, Path(sys.argv[2]))
digest = hashlib.sha256()
for samples in (data.train, data.held_out):
    batch = task.batch(samples, range(len(samples)), epoch=1)
    for part in (batch.inputs, batch.targets, *(batch.side[name] for name in sorted(batch.side))):
        digest.update(part.contiguous().numpy().tobytes())
started = {"datasets", "pyarrow", "transformers", "sklearn"} & set(sys.modules)
print(len(os.listdir("/proc/self/task")), sorted(started), digest.hexdigest())
"""


def test_another_process_has_the_same_data_and_keeps_no_thread(task, spec, dataset, tmp_path):
    for _ in range(2):
        again = task.prepare(spec, tmp_path)
        assert again.provenance == dataset.provenance
    digest = hashlib.sha256()
    for samples in (dataset.train, dataset.held_out):
        for part in everything(task, samples, epoch=1):
            digest.update(part.contiguous().numpy().tobytes())
    environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "7", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", CHILD, spec.model_dump_json(), str(tmp_path / "new")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.stdout.strip() == f"1 [] {digest.hexdigest()}", done.stderr


def test_no_held_out_sample_is_trained_on(task, dataset):
    train = {row.numpy().tobytes() for row in everything(task, dataset.train)[0]}
    assert not train & {row.numpy().tobytes() for row in everything(task, dataset.held_out)[0]}


def test_memory_holds_no_more_than_the_samples(dataset):
    for samples in (dataset.train, dataset.held_out):
        tensors = [samples] if isinstance(samples, torch.Tensor) else list(vars(samples).values())
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_provenance_is_plain_data_and_hashes_the_corpus(dataset):
    assert json.loads(json.dumps(dataset.provenance)) == dataset.provenance
    assert len(dataset.provenance["corpus_sha256"]) == 64


def test_a_batch_has_rows_identities_and_weights(task, plugin, dataset, spec):
    batch = task.batch(dataset.train, (2, 0, 2))
    assert batch.ids == (2, 0, 2)
    if plugin.parameters["kind"] == "images":
        assert batch.inputs.shape == (3, 3, 32, 32)
        assert batch.inputs.dtype == torch.float32
    else:
        assert batch.inputs.shape == (3, spec.sequence_length)
        assert batch.inputs.dtype == torch.int64
        assert int(batch.inputs.max()) < dataset.vocab_size
    assert batch.targets.shape == (batch.inputs.shape if plugin.parameters["kind"] == "lm" else (3,))
    assert batch.targets.dtype == torch.int64
    for part in (batch.inputs, batch.targets, *batch.side.values()):
        assert torch.equal(part[0], part[2])
        assert part.is_contiguous()
    assert batch.weights.dtype == torch.float32
    assert batch.weights.tolist() == [1.0, 1.0, 1.0]
    assert task.batch(dataset.train, (1, 2), (1.0, 0.0)).weights.tolist() == [1.0, 0.0]


def test_sentences_have_a_mask_of_their_tokens(task, plugin, dataset, spec):
    batch = task.batch(dataset.train, range(len(dataset.train)))
    if plugin.parameters["kind"] != "classification":
        assert not batch.side
        return
    mask = batch.side["attention_mask"]
    assert mask.shape == (len(dataset.train), spec.sequence_length)
    assert mask.dtype == torch.int64
    assert torch.equal(mask, mask.sort(dim=1, descending=True).values), "padding is on the right"
    assert set(mask.unique().tolist()) == {0, 1}
    assert int(mask.sum(dim=1).min()) >= 2


def test_class_numbers_are_below_the_number_of_labels(task, plugin, dataset, spec):
    if plugin.parameters["kind"] == "lm":
        assert base.num_labels(spec) == 0
        return
    targets = everything(task, dataset.train)[1]
    assert set(targets.tolist()) <= set(range(base.num_labels(spec)))
    assert len(set(targets.tolist())) > 1


def test_a_wrong_number_of_labels_is_refused(task, plugin, spec, cache):
    wrong = spec.model_copy(update={"num_labels": base.num_labels(spec) + 2})
    with pytest.raises(UserError, match="num_labels"):
        base.num_labels(wrong) if plugin.parameters["kind"] == "lm" else task.prepare(wrong, cache)


def test_predictions_and_scores(task, plugin):
    if plugin.parameters["kind"] == "lm":
        assert not hasattr(task, "score"), "a text is scored by its loss"
        return
    output = torch.tensor([[0.1, 2.0, -1.0], [3.0, 0.0, 0.0], [0.0, 0.1, 0.2]])
    predictions = task.predict(output)
    assert predictions.tolist() == [1, 0, 2]
    scores = task.score(predictions, torch.tensor([1, 0, 1]))
    assert set(scores) <= set(metrics.SCORES)
    assert scores["accuracy"] == pytest.approx(2 / 3)
    assert all(type(value) is float for value in scores.values())


def test_batches_follow_seed_and_epoch(task):
    def order(seed, epoch):
        return task.epoch_batches(18, 4, seed=seed, epoch=epoch)

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)
    assert [len(ids) for ids in order(0, 0)] == [4] * 4
    padded = task.evaluation_batches(5, 4)
    assert [len(ids) for ids, _ in padded] == [4, 4]
    assert sum(sum(weights) for _, weights in padded) == 5


@pytest.mark.parametrize("augment", ["sample", "variant"])
def test_identities_fit_and_stand_for_one_input_each(task, spec, cache, augment):
    """A memory keyed by identity has to meet the same input at each visit."""
    chosen = spec.model_copy(update={"augment": augment, "variants": 3})
    if PLUGINS[spec.name].parameters["kind"] != "images":
        with pytest.raises(UserError, match=r"task\.augment .* has no effect"):
            task.prepare(chosen, cache)
        return
    samples = task.prepare(chosen, cache).train
    limit, seen = base.num_identities(chosen, len(samples)), {}
    for epoch in range(7):
        batch = task.batch(samples, range(len(samples)), epoch=epoch)
        assert len(set(batch.ids)) == len(samples)
        for name, picture in zip(batch.ids, batch.inputs, strict=True):
            assert 0 <= name < limit
            assert torch.equal(seen.setdefault(name, picture), picture)
    assert len(seen) == limit, "every identity comes up"
    evaluated = task.batch(samples, (3, 1))
    assert evaluated.ids == (3, 1)
    plain = task.prepare(spec, cache).train
    assert torch.equal(evaluated.inputs, task.batch(plain, (3, 1), epoch=2).inputs), "no augmentation in evaluation"


def test_an_unknown_corpus_is_refused(task, spec, cache):
    wrong = spec.model_copy(update={"corpus": "no-such-corpus", "num_labels": base.num_labels(spec) or None})
    with pytest.raises(UserError, match="no-such-corpus"):
        task.prepare(wrong, cache)


def test_what_is_to_be_fetched_says_how(task, plugin, cache, monkeypatch):
    for name, about in plugin.parameters["corpora"].items():
        if "fetch" in about:
            source = fetch.SOURCES[about["fetch"]]
            monkeypatch.setitem(fetch.SOURCES, source.name, dataclasses.replace(source, system=None))
            with pytest.raises(UserError, match=f"thinpipe fetch-data {source.name}"):
                task.prepare(TaskSpec(name=plugin.name, corpus=name, **SIZES), cache)
