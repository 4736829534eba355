"""Language modelling on fixed-length blocks of one text.

    text -> tokens -> blocks of S + 1 tokens, in the text's order -> the last held out, the others trained on

A block gives S inputs and, shifted by one, S targets. Blocks do not overlap, so no held-out token is trained
on; a tail shorter than a block is dropped. Fewer training sequences than there are blocks are picked evenly
over the text: a text's beginning alone is another text. A corpus with a test split of its own is held out there:
blocks picked evenly over it.

The tokenizer is a byte-level BPE trained on the whole text (test split excepted), or one's own (`task.tokenizer`).
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from thinpipe.harness.errors import UserError
from thinpipe.harness.spec import TaskSpec
from thinpipe.harness.tasks import _choose, _pretrained
from thinpipe.harness.tasks._bpe import Tokens, tokenize
from thinpipe.harness.tasks._corpus import Corpus, read_corpus
from thinpipe.harness.tasks.base import Batch, Dataset, epoch_batches, evaluation_batches

__all__ = ["batch", "epoch_batches", "evaluation_batches", "prepare", "save_tokenizer"]

VERSION = 1
SUMMARY = "next-token prediction on blocks of a text: a known one, or one's own (UTF-8, JSONL, saved by `datasets`)"
SOURCE = "Radford et al. 2019 (byte-level BPE); Wang et al. 2022, arXiv 2206.01299 (fixed blocks, tail dropped)"
PARAMETERS = {
    "kind": "lm",
    "corpora": {
        "pydoc": {},
        "shakespeare": {},
        "wikipedia": {},
        "wikitext-2": {"hub": "Salesforce/wikitext"},
        "arxiv21": {"hub": "ds3lab/ac-sgd-arxiv21"},
    },
}


def prepare(spec: TaskSpec, cache_dir: Path) -> Dataset:
    """Sequences of S + 1 tokens as int64 rows: train (num_sequences, or all), held_out (num_eval_sequences).

    The same in every process. Tokens and tokenizer are kept below `cache_dir`. Starts no thread that outlives
    it. Raises UserError for a corpus or tokenizer that is missing, no text, or too small; settings that have no effect.
    """
    if spec.augment != "none":
        raise UserError(f"task.augment {spec.augment!r} has no effect on task {spec.name!r}: leave it out.")
    corpus = read_corpus(spec.corpus, cache_dir)
    tokens = _tokens(spec, corpus, cache_dir)
    length = spec.sequence_length + 1
    blocks = _blocks(tokens.ids, length)
    test = blocks if tokens.held_out is None else _blocks(tokens.held_out, length)
    what = f"blocks of {spec.sequence_length} + 1 tokens (task.sequence_length) at task.vocab_size {spec.vocab_size}"
    train, held_out = _choose.split(len(blocks), None if tokens.held_out is None else len(test), spec, what)
    return Dataset(
        train=torch.from_numpy(blocks[train].astype(np.int64)),
        held_out=torch.from_numpy(test[held_out].astype(np.int64)),
        vocab_size=tokens.size,
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


def _tokens(spec: TaskSpec, corpus: Corpus, cache_dir: Path) -> Tokens:
    if spec.tokenizer is None:
        return tokenize(corpus, spec.vocab_size, cache_dir)
    return _pretrained.tokenize(spec.tokenizer, corpus, spec.vocab_size, cache_dir)


def _blocks(ids: np.ndarray, length: int) -> np.ndarray:
    return ids[: len(ids) // length * length].reshape(-1, length)


def batch(
    samples: torch.Tensor, ids: Sequence[int], weights: Sequence[float] | None = None, *, epoch: int | None = None
) -> Batch:
    """Rows `ids` of `samples` (n, S + 1): inputs and targets int64 (B, S), targets one token ahead."""
    rows = samples[list(ids)]
    values = torch.ones(len(ids)) if weights is None else torch.tensor(weights, dtype=torch.float32)
    return Batch(tuple(ids), rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), values)


def save_tokenizer(spec: TaskSpec, cache_dir: Path, folder: Path) -> None:
    """Write the task's tokenizer to `folder` (made where missing) so that AutoTokenizer.from_pretrained loads it, also
    beside a model's config.json. Its size and its tokens of the corpus are checked by loading it."""
    folder.mkdir(parents=True, exist_ok=True)
    if spec.tokenizer is not None:
        _pretrained.save(spec.tokenizer, folder)
        return
    corpus = read_corpus(spec.corpus, cache_dir)
    tokens = tokenize(corpus, spec.vocab_size, cache_dir)
    (folder / "tokenizer.json").write_text(tokens.tokenizer, encoding="utf-8")
    # A model's own class (GPT2Tokenizer) would add tokens of its own to the vocabulary.
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    again = _pretrained.tokenize(str(folder), corpus, spec.vocab_size, cache_dir)
    assert again.size == tokens.size, f"saved {tokens.size} tokens, loaded {again.size}"
    assert np.array_equal(again.ids, tokens.ids), "the saved tokenizer gives other tokens"
