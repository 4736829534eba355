"""Sentences, or pairs of them, as rows of tokens of one length."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from thinpipe.harness.tasks import _arrays, _bpe

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Part of the cache's file name: raise it when the same sentences and sizes would give other rows.
FORMAT = 1
# Their ids are their places here.
SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")


@dataclass(frozen=True, eq=False)
class Rows:
    """ids: int32 (n, S), padded on the right; lengths: int32 (n,), tokens of each row; truncated: how many texts were
    longer; size: of the vocabulary; sha256 names the tokenizer."""

    ids: np.ndarray
    lengths: np.ndarray
    truncated: int
    size: int
    sha256: str


def of_arrays(arrays: dict[str, np.ndarray]) -> Rows:
    """What a cache's file holds."""
    digest = arrays["sha256"].tobytes().decode()
    return Rows(arrays["ids"], arrays["lengths"], int(arrays["truncated"]), int(arrays["size"]), digest)


def trained(
    texts: Sequence[str],
    pairs: Sequence[str] | None,
    *,
    num_train: int,
    name: str,
    vocab_size: int,
    length: int,
    cache_dir: Path,
) -> Rows:
    """Rows `[CLS] text [SEP]` or `[CLS] text [SEP] pair [SEP]` in the tokens of a lower-case byte-level BPE of exactly
    `vocab_size`, trained on the first `num_train` texts and their pairs; the longer of a pair is cut first.

    Raises UserError when they, of the corpus `name`, are too small for that vocabulary."""
    key = _arrays.name(num_train, *texts, "", *(pairs or ()))
    path = cache_dir / f"sentences{FORMAT}-{vocab_size}-{length}-{key}.npz"
    if not path.exists():
        with _bpe.without_threads():
            seen = [*texts[:num_train], *(pairs or ())[:num_train]]
            what = f"{name!r} ({len(seen)} sentences)"
            tokenizer = _bpe.train_on(seen, vocab_size, what=what, special=SPECIAL, lowercase=True)
            _arrays.write(path, _encode(tokenizer, texts, pairs, length))
    rows = of_arrays(_arrays.read(path))
    assert rows.size == vocab_size, f"{path} holds {rows.size} tokens, not {vocab_size}"
    return rows


def _encode(
    tokenizer: Tokenizer, texts: Sequence[str], pairs: Sequence[str] | None, length: int
) -> dict[str, np.ndarray]:
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[(token, SPECIAL.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    digest = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length, pad_id=0, pad_token="[PAD]")
    found = tokenizer.encode_batch(list(texts) if pairs is None else list(zip(texts, pairs, strict=True)))
    return {
        "ids": np.array([one.ids for one in found], dtype=np.int32),
        "lengths": np.array([sum(one.attention_mask) for one in found], dtype=np.int32),
        "truncated": np.array(sum(bool(one.overflowing) for one in found)),
        "size": np.array(tokenizer.get_vocab_size()),
        "sha256": _bpe.as_bytes(digest),
    }
