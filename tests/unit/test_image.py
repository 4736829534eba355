"""Classification of pictures: corpora, folders, normalisation, augmentation."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from thinpipe.harness import fetch
from thinpipe.harness.errors import UserError
from thinpipe.harness.spec import TaskSpec
from thinpipe.harness.tasks import _pictures, base, image

SMALL = {"num_sequences": 20, "num_eval_sequences": 6}


def prepare(corpus: Path | str, cache: Path, **changes):
    return image.prepare(TaskSpec(name="image", corpus=str(corpus), **(SMALL | changes)), cache)


# --- corpora ----------------------------------------


def test_digits_are_scikit_learns_four_times_as_large(tmp_path):
    pictures = _pictures.read_pictures("digits", 10, tmp_path)
    expected = load_digits()
    assert pictures.pixels.shape == (1797, 1, 32, 32)
    assert np.array_equal(pictures.labels, expected.target)
    small = (expected.images * 255 // 16).astype(np.uint8)
    for down, right in ((0, 0), (3, 3), (1, 2)):
        assert np.array_equal(pictures.pixels[:, 0, down::4, right::4], small)
    assert list(tmp_path.iterdir()) == [], "nothing to keep"


@pytest.fixture
def fashion(tmp_path) -> Path:
    """A cache with fetched files of the real ones' form."""
    folder = tmp_path / "data" / "fashion-mnist"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name, count in zip(fetch.FASHION, (40, 40, 30, 30), strict=True):
        values = random.integers(1, 256, count * 784) if "images" in name else np.arange(count) % 10
        head = bytes(16 if "images" in name else 8)
        (folder / name).write_bytes(gzip.compress(head + values.astype(np.uint8).tobytes()))
    return tmp_path


def test_fashion_mnist_has_a_margin_and_a_test_split(fashion):
    dataset = prepare("fashion-mnist", fashion)
    assert dataset.train.pixels.shape == (20, 1, 32, 32)
    assert dataset.train.pixels[:, :, 2:30, 2:30].min() > 0
    assert dataset.train.pixels.to(torch.int64).sum() == dataset.train.pixels[:, :, 2:30, 2:30].to(torch.int64).sum()
    assert dataset.train.labels.tolist() == [i * 2 % 10 for i in range(20)], "every second of 40"
    assert dataset.held_out.labels.tolist() == [i * 5 % 10 for i in range(6)], "every fifth of 30"
    with pytest.raises(UserError, match=r"has 40 \+ 30 \(test split\) pictures, but 41 to train on"):
        prepare("fashion-mnist", fashion, num_sequences=41)


# --- folders ----------------------------------------


def picture(path: Path, level: int, size: int = 32, mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (size, size), level if mode == "L" else (level, 0, 255 - level)).save(path)


@pytest.fixture
def folder(tmp_path) -> Path:
    for part, count in (("train", 12), ("test", 4)):
        for number in range(count):
            for shift, name in enumerate(("cat", "dog")):
                picture(tmp_path / "own" / part / name / f"{number:03}.png", number * 10 + shift * 5)
    (tmp_path / "own" / "train" / "cat" / "notes.txt").write_text("not a picture")
    return tmp_path / "own"


def test_a_folder_with_train_and_test(folder, tmp_path):
    dataset = prepare(folder, tmp_path / "cache", num_labels=2, num_sequences=None)
    assert len(dataset.train) == 24
    assert dataset.train.labels.tolist() == [0] * 12 + [1] * 12
    assert dataset.train.pixels[:, 0, 0, 0].tolist() == [i * 10 for i in range(12)] + [i * 10 + 5 for i in range(12)]
    assert dataset.provenance["classes"] == ["cat", "dog"]
    assert dataset.provenance["held_out_labels"] == [3, 3]


def test_a_folder_of_classes_is_shuffled_and_cut(folder, tmp_path):
    dataset = prepare(folder / "train", tmp_path / "cache", num_labels=2, num_sequences=None)
    assert (len(dataset.train), len(dataset.held_out)) == (18, 6)
    levels = [*dataset.train.pixels[:, 0, 0, 0].tolist(), *dataset.held_out.pixels[:, 0, 0, 0].tolist()]
    assert sorted(levels) == sorted(i * 10 + s for i in range(12) for s in (0, 5))
    assert len(set(dataset.held_out.labels.tolist())) == 2


def test_other_sizes_and_grey_pictures_become_colour_of_32(tmp_path):
    for number in range(4):
        picture(tmp_path / "own" / "a" / f"{number}.png", number, size=48)
        picture(tmp_path / "own" / "b" / f"{number}.png", 100 + number, mode="L", size=8)
    dataset = prepare(tmp_path / "own", tmp_path / "cache", num_labels=2, num_sequences=None, num_eval_sequences=0)
    assert dataset.train.pixels.shape == (8, 3, 32, 32)
    grey = dataset.train.pixels[dataset.train.labels == 1]
    assert torch.equal(grey[:, 0], grey[:, 2])
    assert sorted(grey[:, 0, 9, 9].tolist()) == [100, 101, 102, 103]


def test_pictures_are_read_once_and_again_when_they_change(folder, tmp_path, monkeypatch):
    first = prepare(folder, tmp_path / "cache", num_labels=2)
    monkeypatch.setattr(_pictures, "_open", lambda file: pytest.fail("read again"))
    again = prepare(folder, tmp_path / "cache", num_labels=2)
    assert torch.equal(again.train.pixels, first.train.pixels)
    monkeypatch.undo()
    picture(folder / "train" / "cat" / "000.png", 77)
    changed = prepare(folder, tmp_path / "cache", num_labels=2)
    assert changed.train.pixels[0, 0, 0, 0] == 77
    assert changed.provenance["corpus_sha256"] != first.provenance["corpus_sha256"]


def test_what_is_wrong_with_a_folder_is_said(folder, tmp_path):
    cache = tmp_path / "cache"
    with pytest.raises(UserError, match=r"has 2 classes \(cat, dog\), not 3: set task\.num_labels to 2"):
        prepare(folder, cache, num_labels=3)
    with pytest.raises(UserError, match=r"task\.num_labels must say how many classes"):
        prepare(folder, cache)
    with pytest.raises(UserError, match="has no folders"):
        prepare(folder / "test" / "dog", cache, num_labels=2)
    (folder / "train" / "emu").mkdir()
    with pytest.raises(UserError, match="other classes: emu only in one"):
        prepare(folder, cache, num_labels=2)
    with pytest.raises(UserError, match="emu holds no pictures"):
        prepare(folder / "train", cache, num_labels=3)
    (folder / "train" / "emu" / "x.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    with pytest.raises(UserError, match=r"x\.png is no picture that can be read"):
        prepare(folder / "train", cache, num_labels=3)
    with pytest.raises(UserError, match=r"'digit' is neither.*Did you mean 'digits'"):
        prepare("digit", cache, num_labels=2)
    with pytest.raises(UserError, match="tokenizer has no effect"):
        prepare("digits", cache, tokenizer="x")


# --- batches ----------------------------------------


def test_training_pictures_have_mean_0_and_deviation_1(tmp_path):
    random = np.random.default_rng(1)
    for number in range(12):
        path = tmp_path / "own" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        values = random.integers(0, [256, 100, 1], (32, 32, 3))
        Image.fromarray(values.astype(np.uint8)).save(path)
    dataset = prepare(tmp_path / "own", tmp_path, num_labels=2, num_sequences=None, num_eval_sequences=2)
    inputs = image.batch(dataset.train, range(10)).inputs
    assert inputs.mean(dim=(0, 2, 3)).abs().max() < 1e-5
    assert torch.allclose(inputs.std(dim=(0, 2, 3), correction=0), torch.tensor([1.0, 1.0, 0.0]), atol=1e-5)
    pixels = dataset.train.pixels.numpy().astype(np.float64)
    assert np.allclose(image.moments(dataset.train.pixels.numpy())[0], pixels.mean(axis=(0, 2, 3)))


def test_augmentation_is_a_crop_of_the_padded_picture_flipped_or_not(tmp_path):
    plain, drawn = (prepare("digits", tmp_path, augment=augment).train for augment in ("none", "sample"))
    padded = torch.nn.functional.pad(plain.pixels, (4, 4, 4, 4))
    found = set()
    pictures = image.augmented(padded[:, :, 4:36, 4:36].repeat(20, 1, 1, 1), range(400))
    for number, one in enumerate(pictures):
        source = padded[number % 20]
        windows = {(y, x, 0): source[:, y : y + 32, x : x + 32] for y in range(9) for x in range(9)}
        windows |= {(y, x, 1): window.flip(-1) for (y, x, _), window in windows.items()}
        places = [place for place, window in windows.items() if torch.equal(one, window)]
        assert places, "some crop of it"
        found |= set(places)
    assert [{place[axis] for place in found} for axis in range(3)] == [set(range(9)), set(range(9)), {0, 1}]
    batch = image.batch(drawn, (3, 4), epoch=0)
    assert batch.ids == (3, 4)
    assert torch.equal(batch.inputs, image.batch(drawn, (3, 4), epoch=9).inputs), "for ever"
    scaled = (image.augmented(plain.pixels[[3, 4]], (3, 4)) - plain.mean[:, None, None]) / plain.deviation[
        :, None, None
    ]
    assert torch.equal(batch.inputs, scaled.expand(-1, 3, -1, -1)), "black comes in before it is normalised"


def test_variants_take_turns_and_are_spread(tmp_path):
    spec = TaskSpec(name="image", corpus="digits", augment="variant", variants=4, num_sequences=200)
    samples = image.prepare(spec, tmp_path).train
    turns = np.array([image.batch(samples, range(200), epoch=epoch).ids for epoch in range(8)])
    assert np.array_equal(turns // 4, np.tile(np.arange(200), (8, 1)))
    assert (np.diff(turns % 4, axis=0) % 4 == 1).all(), "the next one each epoch"
    assert np.bincount(turns[0] % 4).min() > 30
    assert turns.max() < base.num_identities(spec, 200)
    inputs = [image.batch(samples, (5,), epoch=epoch).inputs for epoch in range(5)]
    assert torch.equal(inputs[0], inputs[4])
    assert not torch.equal(inputs[0], inputs[1])
