"""A byte-level BPE trained on a text, and the text in its tokens; both kept in a cache.

One file holds both, named by what they depend on. Nothing here leaves a thread behind (a process with threads may
not be forked into ranks).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from thinpipe.harness.errors import UserError
from thinpipe.harness.tasks import _arrays
from thinpipe.harness.tasks._corpus import Corpus

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Part of the cache's file name: raise it when the same corpus and size would give other tokens.
FORMAT = 1
# Encoding 5 MB in one call takes 1 GB, and twice as long as in pieces of this many characters.
PIECE = 65_536
# The byte-level pre-tokenizer starts a new word here, whatever stands around it: cutting changes no token.
CUT = re.compile(r"(?<=\S)(?=[ \r\n])")


@dataclass(frozen=True, eq=False)
class Tokens:
    """ids: int32 (n,), the text; held_out: int32 (m,), the corpus' own held-out text, if it has one. size: of the
    vocabulary; tokenizer: its JSON in Hugging Face's format, empty where it is not ours; sha256 names the tokenizer."""

    ids: np.ndarray
    held_out: np.ndarray | None
    size: int
    tokenizer: str
    sha256: str


def tokenize(corpus: Corpus, vocab_size: int, cache_dir: Path) -> Tokens:
    """The corpus in the tokens of a BPE of exactly `vocab_size`, trained on its text: from the cache, if there.

    Raises UserError when the text is too small for that vocabulary or the cache cannot be used.
    """
    path = cache_dir / f"bpe{FORMAT}-{vocab_size}-{corpus.sha256[:16]}.npz"
    if not path.exists():
        with without_threads():
            tokenizer = train(corpus, vocab_size)
            arrays = {"ids": encode(tokenizer, corpus.text), "tokenizer": as_bytes(tokenizer.to_str())}
            if corpus.held_out is not None:
                arrays["held_out"] = encode(tokenizer, corpus.held_out)
        _arrays.write(path, arrays)
    return _read(path, vocab_size)


def train(corpus: Corpus, vocab_size: int) -> Tokenizer:
    """Train the BPE on a text. It starts from the 256 bytes, so that every text has tokens and none is unknown."""
    return train_on(pieces(corpus.text), vocab_size, what=f"{corpus.name!r} ({len(corpus.text)} characters)")


def train_on(
    texts: Iterable[str], vocab_size: int, *, what: str, special: Iterable[str] = (), lowercase: bool = False
) -> Tokenizer:
    """Train a BPE of exactly `vocab_size` on several texts; `special` tokens have the first ids. UserError where they
    are too few, naming `what`."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=list(special), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    reached = tokenizer.get_vocab_size()
    if reached != vocab_size:
        raise UserError(
            f"task.corpus {what} is too small for task.vocab_size {vocab_size}: it gives {reached} tokens. Lower "
            "task.vocab_size or take a larger text."
        )
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """The token ids of `text`, int32 (n,)."""
    parts = [np.array(tokenizer.encode(piece).ids, dtype=np.int32) for piece in pieces(text)]
    return np.concatenate(parts)


def pieces(text: str, size: int = PIECE) -> Iterator[str]:
    """Cut a text into pieces of at least `size` characters, where that changes no token."""
    start = 0
    while start < len(text):
        cut = CUT.search(text, start + size)
        stop = cut.start() if cut else len(text)
        yield text[start:stop]
        start = stop


@contextmanager
def without_threads() -> Iterator[None]:
    """The tokenizers library reads this switch whenever it could start its thread pool."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def as_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), dtype=np.uint8)


def _read(path: Path, vocab_size: int) -> Tokens:
    arrays = _arrays.read(path)
    try:
        ids, text = arrays["ids"], arrays["tokenizer"].tobytes()
        vocabulary = len(json.loads(text)["model"]["vocab"])
    except (KeyError, ValueError) as error:
        raise UserError(f"the cache {path} cannot be read ({error}). Delete it, run again.") from None
    # A tokenizer loaded the wrong way has an empty vocabulary and says nothing.
    assert vocabulary == vocab_size, f"{path} holds {vocabulary} tokens, not {vocab_size}"
    assert 0 <= ids.min() <= ids.max() < vocab_size, f"{path} holds ids outside its vocabulary"
    return Tokens(ids, arrays.get("held_out"), vocab_size, text.decode(), hashlib.sha256(text).hexdigest())
