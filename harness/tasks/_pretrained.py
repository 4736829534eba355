"""A Hugging Face tokenizer of one's own, from a folder or a hub, and texts in its tokens; these are kept in the cache.

`transformers` runs in a child process (it starts threads), where `run` is called. It may load a tokenizer with an
empty vocabulary and say nothing, so what it loaded is held against the files it comes from, and against the text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from thinpipe.harness.errors import UserError
from thinpipe.harness.tasks import _arrays, _bpe, _child, _hub, _rows
from thinpipe.harness.tasks._corpus import Corpus

# Part of the cache's file name: raise it when the same tokenizer and texts would give other tokens.
FORMAT = 1
# What of a folder a tokenizer may be made of: not its weights.
FILES = (".json", ".txt", ".model", ".tiktoken")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def tokenize(name: str, corpus: Corpus, vocab_size: int, cache_dir: Path) -> _bpe.Tokens:
    """The corpus as one stream of tokens of the tokenizer called `name`, without special tokens.

    Raises UserError for a tokenizer that is not there, is empty, or has more than `vocab_size` tokens."""
    path = cache_dir / f"tokens{FORMAT}-{_arrays.name(identity(name), corpus.sha256)}.npz"
    if not path.exists():
        texts = [corpus.text] if corpus.held_out is None else [corpus.text, corpus.held_out]
        _call(name, {"texts": texts, "pairs": None, "length": None, "path": str(path)})
    arrays = _arrays.read(path)
    size, digest = _checked(arrays, name, vocab_size)
    return _bpe.Tokens(arrays["ids0"], arrays.get("ids1"), size, "", digest)


def rows(
    name: str, texts: Sequence[str], pairs: Sequence[str] | None, *, length: int, vocab_size: int, cache_dir: Path
) -> _rows.Rows:
    """Each text, with its pair if there are pairs, in at most `length` tokens, special tokens included."""
    digest = _arrays.name(*texts, "", *(pairs or ()))
    path = cache_dir / f"rows{FORMAT}-{length}-{_arrays.name(identity(name), digest)}.npz"
    if not path.exists():
        job = {"texts": list(texts), "pairs": None if pairs is None else list(pairs), "length": length}
        _call(name, job | {"path": str(path)})
    arrays = _arrays.read(path)
    _checked(arrays, name, vocab_size)
    return _rows.of_arrays(arrays)


def save(name: str, folder: Path) -> None:
    """Write the tokenizer called `name` to `folder`, as `transformers` saves it."""
    _call(name, {"texts": [], "pairs": None, "length": None, "path": None, "target": str(folder)})


def identity(name: str) -> str:
    """What a cache is keyed by: the content of a folder's files, or a hub's name. UserError for neither."""
    assert name != "checkpoint", "whoever knows the model names the checkpoint's folder"
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _hub.hash_folder(folder, FILES)
    if HUB_NAME.fullmatch(name):
        return name
    raise UserError(f"task.tokenizer {name!r} is no folder, seen from {Path.cwd()}, and no name of a hub.")


def _call(name: str, job: dict[str, Any]) -> None:
    folder = Path(name).expanduser()
    job = {"source": str(folder) if folder.is_dir() else name, "target": None} | job
    if folder.is_dir():
        _child.call(__name__, job)
        return
    _hub.from_hub(
        __name__,
        job,
        missing=(
            f"task.tokenizer {name!r} is no folder, seen from {Path.cwd()}; as a name of a hub it is not in its cache "
            f"({_hub.hub_home()}; HF_HOME sets another), and the hub cannot be reached. Give a folder with "
            "tokenizer.json and tokenizer_config.json, or leave task.tokenizer out: one is then trained on the corpus."
        ),
    )


def _checked(arrays: dict[str, np.ndarray], name: str, vocab_size: int) -> tuple[int, str]:
    size = int(arrays["size"])
    if size > vocab_size:
        raise UserError(
            f"task.tokenizer {name!r} has {size} tokens, more than task.vocab_size {vocab_size}. Set task.vocab_size "
            f"to {size}, or to the model's if that is larger."
        )
    return size, arrays["sha256"].tobytes().decode()


# --- in the child ----------------------------------------


def run(
    *, source: str, texts: list[str], pairs: list[str] | None, length: int | None, path: str | None, target: str | None
) -> dict[str, Any]:
    """Tokenise `texts` into the file `path`; or save the tokenizer to the folder `target`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    size = _size(tokenizer, source)
    if target is not None:
        tokenizer.save_pretrained(target)
        return {"size": size}
    assert path is not None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    description = json.dumps(tokenizer.get_vocab(), sort_keys=True) if backend is None else backend.to_str()
    arrays = {"size": np.array(size), "sha256": _bpe.as_bytes(hashlib.sha256(description.encode()).hexdigest())}
    if length is None:
        for number, text in enumerate(texts):
            arrays[f"ids{number}"] = _stream(tokenizer, text, description if backend is not None else "")
        first, total = arrays["ids0"], len(arrays["ids0"])
    else:
        arrays |= _padded(tokenizer, source, texts, pairs, length)
        first, total = arrays["ids"], int(arrays["lengths"].sum())
    unknown = np.count_nonzero(first == tokenizer.unk_token_id) if tokenizer.unk_token_id is not None else 0
    if 2 * unknown > total:
        raise UserError(
            f"task.tokenizer {source!r} knows less than half of the text's tokens: it is another language's, or was "
            f"loaded wrongly (class {type(tokenizer).__name__}, {size} tokens)."
        )
    assert int(first.max(initial=0)) < size, f"{source} gives ids outside its vocabulary"
    _arrays.write(Path(path), arrays)
    return {"size": size}


def _size(tokenizer: Any, source: str) -> int:
    """Ids are below this. Raises UserError where files beside the tokenizer say that it has more tokens."""
    vocabulary = tokenizer.get_vocab()
    size = max(len(tokenizer), max(vocabulary.values(), default=-1) + 1)
    stored = 0
    folder = Path(source)
    if (folder / "tokenizer.json").is_file():
        model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
        stored = len(model["vocab"])
    elif (folder / "vocab.json").is_file():
        stored = len(json.loads((folder / "vocab.json").read_text(encoding="utf-8")))
    if size < stored or len(vocabulary) <= len(tokenizer.get_added_vocab()):
        raise UserError(
            f"task.tokenizer {source!r} was loaded with {size} tokens, but its files hold {stored or 'more'}: its "
            "tokenizer_config.json or config.json names the wrong class. Save it again with save_pretrained."
        )
    return size


def _stream(tokenizer: Any, text: str, description: str) -> np.ndarray:
    """The whole text; in pieces, which is faster and smaller, only where that is sure to change no token."""
    parts = [text]
    if description:
        before = json.loads(description)
        split = before["pre_tokenizer"] or {}
        if before["normalizer"] is None and split.get("type") == "ByteLevel":
            exact = split.get("use_regex", True) and not split.get("add_prefix_space")
            parts = list(_bpe.pieces(text)) if exact else parts
    ids = [tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"] for part in parts]
    return np.concatenate([np.array(part, dtype=np.int32) for part in ids])


def _padded(
    tokenizer: Any, source: str, texts: list[str], pairs: list[str] | None, length: int
) -> dict[str, np.ndarray]:
    if tokenizer.pad_token_id is None:
        raise UserError(f"task.tokenizer {source!r} has no padding token, which sentences need. Take another one.")
    tokenizer.padding_side = "right"
    whole = tokenizer(texts, pairs, verbose=False)["input_ids"]
    cut = tokenizer(texts, pairs, truncation=True, max_length=length, padding="max_length", verbose=False)
    ids, mask = np.array(cut["input_ids"], dtype=np.int32), np.array(cut["attention_mask"], dtype=np.int32)
    assert ids.shape == (len(texts), length), f"{source} gives rows of {ids.shape}"
    lengths = mask.sum(axis=1, dtype=np.int32)
    assert np.array_equal(mask, np.arange(length) < lengths[:, None]), f"{source} pads on the left"
    truncated = sum(len(row) > length for row in whole)
    return {"ids": ids, "lengths": lengths, "truncated": np.array(truncated)}
