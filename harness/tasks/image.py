"""Classification of pictures of 32 x 32, normalised by the mean and deviation of what is trained on.

    corpus -> fixed shuffle -> the last held out, the others trained on, picked evenly

A corpus with a test split of its own is held out there, picked evenly too. Grey pictures have three equal channels.

Augmentation (a crop from a margin of 4, and a flip) is drawn from what a memory knows a sample by, so that a sample
looks the same whenever that identity comes again:

    sample     one draw a sample, for ever
    variant    `variants` draws a sample, each with an identity of its own; an epoch takes the next one
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from thinpipe.harness.errors import UserError
from thinpipe.harness.spec import TaskSpec
from thinpipe.harness.tasks import _choose, base
from thinpipe.harness.tasks._pictures import SIDE, read_pictures
from thinpipe.harness.tasks.base import Batch, Dataset, epoch_batches, evaluation_batches

__all__ = ["Samples", "batch", "epoch_batches", "evaluation_batches", "predict", "prepare", "score"]

VERSION = 1
SUMMARY = "classification of 32 x 32 pictures: digits, Fashion-MNIST, CIFAR-10, or one's own folder of them"
SOURCE = "Krizhevsky 2009 (CIFAR-10; crop and flip as usual for it); Xiao et al. 2017 (Fashion-MNIST)"
PARAMETERS = {
    "kind": "images",
    "corpora": {
        "digits": {"labels": 10},
        "fashion-mnist": {"labels": 10, "fetch": "fashion-mnist"},
        "cifar10": {"labels": 10, "hub": "uoft-cs/cifar10"},
    },
}
MARGIN = 4


@dataclass(frozen=True, eq=False)
class Samples:
    """pixels: uint8 (n, C, 32, 32), C 1 or 3; labels: int64 (n,); mean, deviation: float32 (C,), of pixels 0..255;
    augment, variants: as in the TaskSpec."""

    pixels: torch.Tensor
    labels: torch.Tensor
    mean: torch.Tensor
    deviation: torch.Tensor
    augment: str
    variants: int

    def __len__(self) -> int:
        return len(self.labels)


def prepare(spec: TaskSpec, cache_dir: Path) -> Dataset:
    """`Samples` to train on (num_sequences, or all) and held out (num_eval_sequences), the same in every process.

    Raises UserError for a corpus that is missing, damaged or too small, and classes that are not task.num_labels."""
    if spec.tokenizer is not None:
        raise UserError(f"task.tokenizer has no effect on task {spec.name!r}: leave it out.")
    pictures = read_pictures(spec.corpus, base.num_labels(spec), cache_dir)
    count, apart = len(pictures.labels), pictures.num_train
    if apart is None:
        order = _choose.shuffled(count)
        train, held_out = (order[chosen] for chosen in _choose.split(count, None, spec, "pictures"))
    else:
        train, held_out = _choose.split(apart, count - apart, spec, "pictures")
        held_out = held_out + apart
    mean, deviation = moments(pictures.pixels[train])
    values = (torch.from_numpy(mean), torch.from_numpy(deviation), spec.augment, spec.variants)
    parts = [
        Samples(torch.from_numpy(pictures.pixels[chosen]), torch.from_numpy(pictures.labels[chosen]), *values)
        for chosen in (train, held_out)
    ]
    return Dataset(
        train=parts[0],
        held_out=parts[1],
        vocab_size=0,
        provenance={
            "corpus": pictures.name,
            "corpus_sha256": pictures.sha256,
            "pictures": count,
            "classes": pictures.classes,
            "train_labels": np.bincount(pictures.labels[train], minlength=len(pictures.classes)).tolist(),
            "held_out_labels": np.bincount(pictures.labels[held_out], minlength=len(pictures.classes)).tolist(),
            "mean": [round(float(value), 4) for value in mean],
            "deviation": [round(float(value), 4) for value in deviation],
        },
    )


def moments(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each channel of uint8 (n, C, H, W), float32 (C,); a constant channel has 1.

    From counts of the 256 values: exact, and no copy of the pictures as floats."""
    counts = np.stack([np.bincount(pixels[:, c].ravel(), minlength=256) for c in range(pixels.shape[1])])
    values, total = np.arange(256), counts.sum(axis=1)
    mean = counts @ values / total
    variance = counts @ values**2 / total - mean**2
    deviation = np.sqrt(np.maximum(variance, 0))
    return mean.astype(np.float32), np.where(deviation > 0, deviation, 1).astype(np.float32)


def batch(
    samples: Samples, ids: Sequence[int], weights: Sequence[float] | None = None, *, epoch: int | None = None
) -> Batch:
    """Samples `ids`: inputs float32 (B, 3, 32, 32), targets int64 (B,). Augmented in training (`epoch`) only: then
    `Batch.ids` are ids x variants + variant where there are variants, as `base.num_identities` counts them."""
    chosen = list(ids)
    pixels, identities = samples.pixels[chosen], tuple(ids)
    if epoch is not None and samples.augment != "none":
        if samples.augment == "variant":
            identities = tuple(identity(i, epoch, samples.variants) for i in ids)
        pixels = augmented(pixels, identities)
    scaled = (pixels.to(torch.float32) - samples.mean[:, None, None]) / samples.deviation[:, None, None]
    values = torch.ones(len(ids)) if weights is None else torch.tensor(weights, dtype=torch.float32)
    inputs = scaled.expand(-1, 3, -1, -1).contiguous()
    return Batch(identities, inputs, samples.labels[chosen], values)


def identity(sample: int, epoch: int, variants: int) -> int:
    """What a memory knows the sample's variant of this epoch by; samples do not all change to the same one at once."""
    return sample * variants + int(epoch + _hash(np.array([sample]))[0] % variants) % variants


def augmented(pixels: torch.Tensor, identities: Sequence[int]) -> torch.Tensor:
    """Each picture of uint8 (B, C, 32, 32) moved by up to 4 pixels each way, black coming in, and flipped or not, as
    its identity says."""
    bits = _hash(np.array(identities) + 2**32)
    places = 2 * MARGIN + 1
    draws = (bits % places, bits // places % places, bits // places**2 % 2)
    down, right, flip = (torch.from_numpy(draw.astype(np.int64)) for draw in draws)
    along = torch.arange(SIDE)
    rows = down[:, None] + along
    columns = right[:, None] + torch.where(flip[:, None] == 1, SIDE - 1 - along, along)
    padded = torch.nn.functional.pad(pixels, (MARGIN,) * 4)
    first, channels = torch.arange(len(pixels))[:, None, None, None], torch.arange(pixels.shape[1])[:, None, None]
    return padded[first, channels, rows[:, None, :, None], columns[:, None, None, :]]


def _hash(numbers: np.ndarray) -> np.ndarray:
    """uint64 that look random, of integers: the mixing function of SplitMix64 (Steele et al. 2014)."""
    z = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def predict(output: torch.Tensor) -> torch.Tensor:
    """Class numbers int64 (B,) of logits (B, num_labels)."""
    return output.argmax(dim=-1)


def score(predictions: Any, targets: Any) -> dict[str, float]:
    """Accuracy of class numbers (n,), as scikit-learn has it."""
    from sklearn import metrics

    return {"accuracy": float(metrics.accuracy_score(np.asarray(targets), np.asarray(predictions)))}
