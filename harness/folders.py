"""Folders that a text names, and how one appears whole or not at all. Knows no torch.

    pretrained:NAME    what `thinpipe pretrain NAME` made, in the cache
    fetched:NAME       what `thinpipe fetch-data NAME` placed, in the cache
    anything else      a path

>>> resolve("checkpoints/mine").as_posix()
'checkpoints/mine'
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from thinpipe.harness.cache import cache_folder
from thinpipe.harness.errors import UserError

PRETRAINED, FETCHED = "pretrained:", "fetched:"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def resolve(text: str) -> Path:
    """The folder (or file) that `text` names. A plain path is not looked at: it may be missing, or the name of a model
    on a hub. Raises UserError where `pretrained:` or `fetched:` names what is unknown or not there yet."""
    if text.startswith(PRETRAINED):
        from thinpipe.harness import pretrain

        return pretrain.folder(text.removeprefix(PRETRAINED))
    if text.startswith(FETCHED):
        name = text.removeprefix(FETCHED)
        folder = cache_folder() / "data" / name
        if not NAME.fullmatch(name) or not folder.is_dir():
            raise UserError(f"{text!r} is not there. Get it with: thinpipe fetch-data {name}")
        return folder
    return Path(text).expanduser()


@contextlib.contextmanager
def staged(out: Path) -> Iterator[Path]:
    """An empty folder to fill, which becomes `out` where the block ends well and is removed where it does not.

    `out` must not exist, or be an empty folder; UserError otherwise. It lies beside `out` until then; one left by a
    process that was killed is removed by the next that writes the same folder.
    """
    out = Path(os.path.abspath(out))
    require_free(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(out)
        temporary = Path(tempfile.mkdtemp(dir=out.parent, prefix=_prefix(out)))
    except OSError as error:
        raise UserError(f"{out} cannot be made: {error.strerror}. Choose another folder.") from None
    # Held as long as this process lives and works on it: without the lock the folder is nobody's.
    handle = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        temporary.chmod(0o777 & ~_umask())
        yield temporary
        require_free(out)
        os.fsync(handle)
        os.rename(temporary, out)
        sync(out.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(handle)


def require_free(out: Path) -> None:
    """Raise UserError where `out` is there already, save as an empty folder: nothing is ever overwritten."""
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        what = "is not empty" if out.is_dir() else "is no folder"
        raise UserError(f"{out} {what}. Choose another folder, or remove it first.")


def sync(folder: Path) -> None:
    """Make the names in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _prefix(out: Path) -> str:
    return f".{out.name}.partial-"


def _remove_abandoned(out: Path) -> None:
    for path in out.parent.glob(f"{glob.escape(_prefix(out))}*"):
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(handle)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
