"""Language modelling on fixed-length blocks of one text, in the tokens of a BPE trained on it.

    text -> tokens -> blocks of S + 1 tokens, in the text's order -> the last held out, the others trained on

A block gives S inputs and, shifted by one, S targets. Blocks do not overlap, so no held-out token is trained
on; a tail shorter than a block is dropped. Fewer training sequences than there are blocks are picked evenly
over the text: a text's beginning alone is another text. The tokenizer is trained on the whole text.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from thinpipe.harness.errors import UserError
from thinpipe.harness.spec import TaskSpec
from thinpipe.harness.tasks._bpe import tokenize
from thinpipe.harness.tasks._corpus import read_corpus
from thinpipe.harness.tasks.base import Batch, Dataset, epoch_batches, evaluation_batches

__all__ = ["batch", "choose", "epoch_batches", "evaluation_batches", "prepare"]

VERSION = 1
SUMMARY = "next-token prediction on blocks of a text: pydoc, shakespeare, or the path of a UTF-8 file"
SOURCE = "Radford et al. 2019 (byte-level BPE); Wang et al. 2022, arXiv 2206.01299 (fixed blocks, tail dropped)"
PARAMETERS = {"corpora": ["pydoc", "shakespeare"]}


def prepare(spec: TaskSpec, cache_dir: Path) -> Dataset:
    """Sequences of S + 1 tokens as int64 rows: train (num_sequences, or all), held_out (num_eval_sequences).

    The same in every process. Tokens and tokenizer are kept below `cache_dir`. Starts no thread that outlives
    it. Raises UserError for a corpus that is missing, no text, or too small.
    """
    corpus = read_corpus(spec.corpus)
    tokens = tokenize(corpus, spec.vocab_size, cache_dir)
    length = spec.sequence_length + 1
    train, held_out = choose(len(tokens.ids) // length, spec)
    blocks = tokens.ids[: len(tokens.ids) // length * length].reshape(-1, length)
    return Dataset(
        train=torch.from_numpy(blocks[train].astype(np.int64)),
        held_out=torch.from_numpy(blocks[held_out].astype(np.int64)),
        vocab_size=spec.vocab_size,
        provenance={
            "corpus": corpus.name,
            "corpus_sha256": corpus.sha256,
            "characters": len(corpus.text),
            "tokens": len(tokens.ids),
            "tokenizer_sha256": tokens.sha256,
            "blocks": len(blocks),
            "python": platform.python_version(),
        },
    )


def choose(num_blocks: int, spec: TaskSpec) -> tuple[np.ndarray, np.ndarray]:
    """Which of a text's blocks are trained on and which are held out: ascending, disjoint int64 indices."""
    available = num_blocks - spec.num_eval_sequences
    wanted = available if spec.num_sequences is None else spec.num_sequences
    if wanted > available or available < 1:
        raise UserError(
            f"task.corpus {spec.corpus!r} has {num_blocks} blocks of {spec.sequence_length} + 1 tokens at "
            f"task.vocab_size {spec.vocab_size}, but {max(wanted, 1)} to train on (task.num_sequences) and "
            f"{spec.num_eval_sequences} held out (task.num_eval_sequences) are asked for. Lower one of them "
            "or task.sequence_length, or take a larger text."
        )
    return np.arange(wanted) * available // wanted, np.arange(available, num_blocks)


def batch(samples: torch.Tensor, ids: Sequence[int], weights: Sequence[float] | None = None) -> Batch:
    """Rows `ids` of `samples` (n, S + 1): inputs and targets int64 (B, S), targets one token ahead."""
    rows = samples[list(ids)]
    values = torch.ones(len(ids)) if weights is None else torch.tensor(weights, dtype=torch.float32)
    return Batch(tuple(ids), rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), values)
