"""What every task shares: the data set it prepares, a batch, and which samples each step takes.

A task plug-in says in its literal `PARAMETERS`, so that planning costs no import:

    kind          what its batches are: `lm` (token ids; targets one token ahead), `classification` (token ids, a mask
                  as side; class numbers) or `images` (float32 (3, 32, 32); class numbers)
    corpora       name -> {"labels": number of classes (absent: none), "fetch": name for `thinpipe fetch-data`, "hub":
                  name of a published data set, read through `datasets`} (neither: comes with a package)

and defines

    prepare(spec, cache_dir) -> Dataset                   the same on every rank, in every process; leaves no thread
    batch(samples, ids, weights=None, *, epoch=None) -> Batch    rows of `train` or `held_out` as a model takes them;
                                                          epoch: of training (augmentation), None in evaluation
    epoch_batches, evaluation_batches                     the ones below, unless it has an order of its own
    predict(output) -> tensor                             (may be left out) what of a model's output is scored, a row
                                                          a sample
    score(predictions, targets) -> {name: float}          (may be left out) metrics.SCORES of a whole evaluation

Ranks agree on every batch without a message: ids follow from seed and epoch alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from thinpipe.harness import plugins
from thinpipe.harness.errors import UserError
from thinpipe.harness.spec import TaskSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples of a task. provenance: what the data was, as plain JSON data, for the manifest. vocab_size: token ids are
    below it, it is at most the task's (images: 0).

    train, held_out: whatever the task's `batch` takes, with a length: one sample a row.
    """

    train: Any
    held_out: Any
    vocab_size: int
    provenance: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Batch:
    """ids: a sample's identity for a memory, below num_identities(spec). weights: float32 (B,), 0 for padding.

    side: name -> tensor (B, ...), what every stage's forward takes besides its input (attention_mask: (B, S), 1 =
    token, 0 = padding).
    """

    ids: tuple[int, ...]
    inputs: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    side: Mapping[str, torch.Tensor] = field(default_factory=dict)


def kind(task: TaskSpec) -> str:
    """What the task's batches are: lm, classification or images."""
    return plugins.get("tasks", task.name).parameters["kind"]


def num_labels(task: TaskSpec) -> int:
    """Classes of the task, 0 where it has none. Raises UserError where neither the corpus nor the spec says."""
    declared = plugins.get("tasks", task.name).parameters
    if declared["kind"] == "lm":
        if task.num_labels is not None:
            raise UserError(f"task.num_labels has no effect on task {task.name!r}: leave it out.")
        return 0
    known = declared["corpora"].get(task.corpus, {}).get("labels")
    if known is None and task.num_labels is None:
        raise UserError(
            f"task.num_labels must say how many classes {task.corpus!r} has; task {task.name!r} knows: "
            f"{', '.join(declared['corpora'])}."
        )
    if task.num_labels is not None and known not in (None, task.num_labels):
        raise UserError(f"task.num_labels is {task.num_labels}, but {task.corpus!r} has {known}: leave it out.")
    return known or task.num_labels or 0


def num_identities(task: TaskSpec, num_samples: int) -> int:
    """Identities that `num_samples` samples have for a memory: each augmented variant is one of its own."""
    return num_samples * (task.variants if task.augment == "variant" else 1)


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
