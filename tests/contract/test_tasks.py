"""The battery every task plug-in has to pass; plug-ins are found, not listed."""

from __future__ import annotations

import json

import pytest
import torch

from thinpipe.harness import plugins
from thinpipe.harness.errors import UserError
from thinpipe.harness.spec import TaskSpec

PLUGINS = plugins.find("tasks")


@pytest.fixture(params=sorted(PLUGINS), scope="module")
def task(request):
    return PLUGINS[request.param].load()


@pytest.fixture(scope="module")
def spec(task) -> TaskSpec:
    """The task's first corpus: the one that needs nothing installed."""
    plugin = PLUGINS[task.__name__.rpartition(".")[2]]
    corpus = plugin.parameters["corpora"][0]
    return TaskSpec(
        name=plugin.name,
        corpus=corpus,
        vocab_size=512,
        sequence_length=12,
        num_sequences=18,
        num_eval_sequences=5,
    )


@pytest.fixture(scope="module")
def dataset(task, spec, tmp_path_factory):
    return task.prepare(spec, tmp_path_factory.mktemp("cache"))


def test_as_many_samples_as_asked(dataset, spec):
    assert len(dataset.train) == spec.num_sequences
    assert len(dataset.held_out) == spec.num_eval_sequences
    assert dataset.vocab_size <= spec.vocab_size


def test_a_second_cache_and_a_warm_cache_give_the_same_data(task, spec, dataset, tmp_path):
    for _ in range(2):
        again = task.prepare(spec, tmp_path)
        assert torch.equal(again.train, dataset.train)
        assert torch.equal(again.held_out, dataset.held_out)
        assert again.provenance == dataset.provenance


def test_no_held_out_sample_is_trained_on(dataset):
    train = {tuple(row) for row in dataset.train.tolist()}
    assert not train & {tuple(row) for row in dataset.held_out.tolist()}


def test_memory_holds_no_more_than_the_samples(dataset):
    for samples in (dataset.train, dataset.held_out):
        assert samples.untyped_storage().nbytes() == samples.numel() * samples.element_size()


def test_provenance_is_plain_data_and_hashes_the_text(dataset):
    assert json.loads(json.dumps(dataset.provenance)) == dataset.provenance
    assert len(dataset.provenance["corpus_sha256"]) == 64


def test_a_batch_has_rows_identities_and_weights(task, dataset, spec):
    batch = task.batch(dataset.train, (2, 0, 2))
    assert batch.ids == (2, 0, 2)
    assert batch.inputs.shape == (3, spec.sequence_length)
    assert batch.inputs.dtype == torch.int64
    assert int(batch.inputs.max()) < dataset.vocab_size
    assert torch.equal(batch.inputs[0], batch.inputs[2])
    assert torch.equal(batch.targets[0], batch.targets[2])
    assert batch.weights.dtype == torch.float32
    assert batch.weights.tolist() == [1.0, 1.0, 1.0]


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


def test_an_unknown_corpus_is_refused(task, spec, tmp_path):
    wrong = spec.model_copy(update={"corpus": "no-such-corpus"})
    with pytest.raises(UserError, match="no-such-corpus"):
        task.prepare(wrong, tmp_path)
