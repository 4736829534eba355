"""What every task shares: the data set it prepares, a batch, and which samples each step takes.

A task plug-in defines

    prepare(spec, cache_dir) -> Dataset                   the same on every rank, in every process
    batch(samples, ids, weights=None) -> Batch            rows of `train` or `held_out` as a model takes them
    epoch_batches, evaluation_batches                     the ones below, unless it has an order of its own

Ranks agree on every batch without a message: ids follow from seed and epoch alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples of a task, one a row. provenance: what the data was, as plain JSON data, for the manifest."""

    train: torch.Tensor
    held_out: torch.Tensor
    vocab_size: int
    provenance: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Batch:
    """ids: rows of the data set, a sample's identity for a memory. weights: float32 (B,), 0 for padding."""

    ids: tuple[int, ...]
    inputs: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor


def epoch_batches(num_samples: int, batch_size: int, *, seed: int, epoch: int) -> list[tuple[int, ...]]:
    """The batches of one epoch: a permutation keyed by (seed, epoch), cut up, without an incomplete last one.

    Philox's raw words are fixed by its definition (Salmon et al. 2011), where numpy's `permutation` may
    change between releases; sorting them gives the permutation.

    >>> epoch_batches(5, 2, seed=0, epoch=0)
    [(0, 2), (1, 4)]
    """
    words = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(num_samples)
    order = np.argsort(words, kind="stable").tolist()
    return [tuple(order[i : i + batch_size]) for i in range(0, num_samples - batch_size + 1, batch_size)]


def evaluation_batches(num_samples: int, batch_size: int) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """All samples in order, as (ids, weights): the last batch is filled up with its last sample, weight 0.

    >>> evaluation_batches(3, 2)
    [((0, 1), (1.0, 1.0)), ((2, 2), (1.0, 0.0))]
    """
    batches = []
    for start in range(0, num_samples, batch_size):
        ids = tuple(range(start, min(start + batch_size, num_samples)))
        padding = batch_size - len(ids)
        batches.append((ids + ids[-1:] * padding, (1.0,) * len(ids) + (0.0,) * padding))
    return batches
