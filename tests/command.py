"""The command line as a process of its own, with a timing lock of its own: a test that times nothing need not wait for
whoever measures on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

_OWN_LOCK = """
import pathlib, sys
from thinpipe import cli
from thinpipe.harness import lock
lock.PATH = pathlib.Path(sys.argv.pop(1), "lock")
cli.main()
"""


def command(folder: Path, *arguments: str) -> list[str]:
    """What starts `thinpipe` with `arguments`; its lock lies in `folder`."""
    return [sys.executable, "-c", _OWN_LOCK, str(folder), *arguments]
