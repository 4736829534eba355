"""Arrays kept between runs: one npz file, in place by one rename, its name made of what it depends on.

Processes that find none at the same time each make the same file, and the last one stays.
"""

from __future__ import annotations

import hashlib
import uuid
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from thinpipe.harness.errors import UserError


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Raises UserError where the file cannot be written; nothing half-done stays."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"cannot write the cache {path}: {error.strerror}. Make room, or make it writable.") from None
    finally:
        with suppress(OSError):
            temporary.unlink()


def read(path: Path) -> dict[str, np.ndarray]:
    """Raises UserError where the file is damaged."""
    try:
        with np.load(path, allow_pickle=False) as data:
            return {name: data[name] for name in data.files}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"the cache {path} cannot be read ({error}). Delete it, run again.") from None


def name(*parts: object) -> str:
    """16 hex digits for what a file depends on.

    >>> name("a", 1) == name("a", "1"), name("a", "b") == name("ab")
    (True, False)
    """
    return hashlib.sha256("\0".join(str(part) for part in parts).encode()).hexdigest()[:16]


def pack(texts: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
    """Texts as (their UTF-8 bytes one after the other, uint8; where each ends, int64)."""
    encoded = [text.encode() for text in texts]
    ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
    return np.frombuffer(b"".join(encoded), dtype=np.uint8), ends


def unpack(data: np.ndarray, ends: np.ndarray) -> list[str]:
    """What `pack` took."""
    whole = data.tobytes()
    starts = [0, *ends.tolist()]
    return [whole[start:end].decode() for start, end in zip(starts, ends.tolist(), strict=False)]
