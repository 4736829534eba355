"""Data sets and tokenizers that `datasets` and `transformers` load, each in a child process; no hub is asked."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from thinpipe.harness.errors import UserError
from thinpipe.harness.spec import TaskSpec
from thinpipe.harness.tasks import _child, _hub, _pretrained, classify, image, lm

SIZES = {"vocab_size": 300, "sequence_length": 16, "num_sequences": 20, "num_eval_sequences": 4}
MAKE = """
import sys, datasets, numpy
from PIL import Image
def text(word, n):
    return {"text": [f"{word} {i} of many words, ünd more\\n" * 8 for i in range(n)]}
def pair(n):
    question, sentence = [f"is {i} even?" for i in range(n)], [f"{i} {'is' * (i % 2)}" for i in range(n)]
    return {"question": question, "sentence": sentence, "label": [i % 2 for i in range(n)], "idx": list(range(n))}
def picture(n):
    images = [Image.fromarray(numpy.full((16, 16, 3), i * 20, "uint8")) for i in range(n)]
    return {"img": images, "label": [i % 2 for i in range(n)]}
def both(make, second, *sizes):
    one, two = (datasets.Dataset.from_dict(make(n)) for n in sizes)
    return datasets.DatasetDict({"train": one, second: two})
root = sys.argv[1]
both(lambda n: text("train" if n > 9 else "test", n), "test", 30, 9).save_to_disk(root + "/texts")
both(pair, "validation", 200, 40).save_to_disk(root + "/pairs")
both(picture, "test", 8, 4).save_to_disk(root + "/pictures")
datasets.Dataset.from_dict({"words": ["a"]}).save_to_disk(root + "/words")
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Folders that `datasets` saved. It starts threads: never imported in this process."""
    folder = tmp_path_factory.mktemp("saved")
    subprocess.run([sys.executable, "-c", MAKE, str(folder)], check=True, capture_output=True, timeout=120)
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """Shared where a test asks for nothing to be new: a child takes seconds to import `transformers`."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory, cache) -> Path:
    """One that was trained on a text, saved beside a model's config.json."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    lm.save_tokenizer(TaskSpec(vocab_size=400), cache, folder)
    return folder


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    """A hub at a port of this machine where nobody listens, and an empty cache."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", *_hub.OFFLINE):
        monkeypatch.delenv(name, raising=False)


def test_a_saved_text_is_held_out_by_its_own_test_split(saved, tmp_path):
    spec = TaskSpec(corpus=str(saved / "texts"), **SIZES)
    dataset = lm.prepare(spec, tmp_path)
    decode = Tokenizer.from_str(np.load(next(tmp_path.glob("bpe*")))["tokenizer"].tobytes().decode()).decode
    assert dataset.train.shape == (20, 17)
    assert dataset.held_out.shape == (4, 17)
    assert "test" not in decode(dataset.train.flatten().tolist())
    held_out = decode(dataset.held_out.flatten().tolist())
    assert "test" in held_out
    assert "train" not in held_out
    assert torch.equal(lm.prepare(spec, tmp_path).train, dataset.train)


def test_saved_pairs_and_pictures_are_read(saved, tmp_path):
    spec = TaskSpec(name="classify", corpus=str(saved / "pairs"), num_labels=2, **SIZES)
    dataset = classify.prepare(spec, tmp_path)
    assert (len(dataset.train), len(dataset.held_out)) == (20, 4)
    assert dataset.train.labels.tolist() == [i * 10 % 2 for i in range(20)]
    row = dataset.train.ids[0]
    assert row[0] == 1
    assert (row == 2).sum() == 2, "question [SEP] sentence [SEP]"
    spec = TaskSpec(
        name="image", corpus=str(saved / "pictures"), num_labels=2, num_sequences=None, num_eval_sequences=4
    )
    pictures = image.prepare(spec, tmp_path)
    assert pictures.train.pixels.shape == (8, 3, 32, 32)
    assert pictures.train.pixels[:, 0, 5, 5].tolist() == [i * 20 for i in range(8)]


def test_a_saved_folder_without_the_columns_is_refused(saved, tmp_path):
    with pytest.raises(UserError, match="has the columns words, but is to have text"):
        lm.prepare(TaskSpec(corpus=str(saved / "words"), **SIZES), tmp_path)


def test_a_published_corpus_without_a_hub_fails_soon_and_says_what_to_do(no_hub, tmp_path):
    start = time.monotonic()
    with pytest.raises(UserError, match=r"'wikitext-2' is the published .* hub cannot be reached.*save_to_disk.*pydoc"):
        lm.prepare(TaskSpec(corpus="wikitext-2", **SIZES), tmp_path)
    assert time.monotonic() - start < 20, "the hub's own client tries for 25 s"
    assert not list(tmp_path.glob("*.npz"))


def test_a_tokenizer_of_no_folder_and_no_hub_is_refused(no_hub, tmp_path):
    with pytest.raises(UserError, match=r"'org/none' is no folder.*hub cannot be reached"):
        lm.prepare(TaskSpec(tokenizer="org/none", **SIZES), tmp_path)
    with pytest.raises(UserError, match=r"'/no/such/folder' is no folder, seen from .* and no name"):
        lm.prepare(TaskSpec(tokenizer="/no/such/folder", **SIZES), tmp_path)


def test_the_saved_tokenizer_is_the_one_that_was_trained(tokenizer, cache):
    spec = TaskSpec(vocab_size=400, sequence_length=16)
    own = lm.prepare(spec, cache)
    again = lm.prepare(spec.model_copy(update={"tokenizer": str(tokenizer)}), cache)
    assert again.vocab_size == 400
    assert torch.equal(again.train, own.train)
    assert torch.equal(again.held_out, own.held_out)


def test_a_vocabulary_too_small_for_the_tokenizer_names_its_size(tokenizer, cache):
    with pytest.raises(
        UserError, match=r"has 400 tokens, more than task\.vocab_size 399\. Set task\.vocab_size to 400"
    ):
        lm.prepare(TaskSpec(tokenizer=str(tokenizer), vocab_size=399), cache)


@pytest.mark.slow
def test_sentences_need_a_padding_token(tokenizer, tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("sentence,label\n" + "good one,1\nbad one,0\n" * 20)
    spec = TaskSpec(name="classify", corpus=str(path), num_labels=2, tokenizer=str(tokenizer), **SIZES)
    spec = spec.model_copy(update={"vocab_size": 400})
    with pytest.raises(UserError, match="has no padding token"):
        classify.prepare(spec, tmp_path)
    padded = tmp_path / "padded"
    padded.mkdir()
    (padded / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text()) | {"pad_token": "!"}
    (padded / "tokenizer_config.json").write_text(json.dumps(settings))
    dataset = classify.prepare(spec.model_copy(update={"tokenizer": str(padded), "sequence_length": 4}), tmp_path)
    assert dataset.train.ids.shape == (20, 4)
    assert int(dataset.train.lengths.min()) >= 2
    assert (dataset.train.ids[:, -1] == 0).any() == (dataset.train.lengths < 4).any()


def test_an_empty_vocabulary_is_noticed(tokenizer, tmp_path):
    """A class that does not know tokenizer.json makes a tokenizer with nothing in it, and says nothing."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "vocab.json").write_text(json.dumps({f"w{i}": i for i in range(500)}))
    (broken / "tokenizer_config.json").write_text('{"tokenizer_class": "DebertaV2Tokenizer"}')
    with pytest.raises(UserError):
        lm.prepare(TaskSpec(tokenizer=str(broken), vocab_size=600), tmp_path)
    assert not list(tmp_path.glob("tokens*"))


def test_what_a_child_says_comes_back(tmp_path):
    with pytest.raises(_child.NotThereError, match="'/none/at/all' failed"):
        _child.call(_hub.__name__, _hub._job("/none/at/all", None, [{"text": "text"}], ("test",), tmp_path / "x"))
    with pytest.raises(UserError, match="was ended after 0 s"):
        _child.call(_pretrained.__name__, {"source": "x"}, limit_s=0.01)
