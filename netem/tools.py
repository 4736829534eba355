"""Running ip and tc. Subprocesses, not a netlink library: the text run is the text shown, hashed and kept."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import Any

from thinpipe.netem.errors import NetemError

COMMAND_LIMIT_S = 15.0
# The usual PATH of an ordinary user has no sbin.
SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"


def find(tool: str) -> str:
    """Full path of a tool. Raises NetemError naming the package to install."""
    path = shutil.which(tool, path=f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}")
    if path is None:
        raise NetemError(f"`{tool}` was not found: install the package iproute2 (Debian, Ubuntu, Fedora: iproute2)")
    return path


def run(argv: list[str], text: str | None = None) -> str:
    """Run one tool to its end and give its standard output; `text` goes to its standard input.

    Raises NetemError with the command, what the tool said, and the offending line of a batch where it names
    one.
    """
    shown = " ".join(argv)
    try:
        done = subprocess.run(
            [find(argv[0]), *argv[1:]],
            input=text,
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NetemError(f"`{shown}` did not end within {COMMAND_LIMIT_S:g} s") from None
    except OSError as error:
        raise NetemError(f"`{shown}` could not be started: {error}") from error
    if done.returncode:
        said = " / ".join(done.stderr.split("\n")).strip(" /") or "nothing"
        raise NetemError(f"`{shown}` failed with status {done.returncode}; it said: {said}{_line(text, said)}")
    return done.stdout


def run_json(argv: list[str]) -> Any:
    """`run`, its output read as JSON (ip and tc print nothing at all for an empty list)."""
    text = run(argv)
    try:
        return json.loads(text or "[]")
    except json.JSONDecodeError as error:
        raise NetemError(f"`{' '.join(argv)}` printed no JSON ({error}); iproute2 5.0 or later is needed") from None


def _line(text: str | None, said: str) -> str:
    number = said.rpartition("Command failed -:")[2].split(" ")[0]
    if text is None or not number.isdigit():
        return ""
    return f" (line {number}: {text.splitlines()[int(number) - 1]})"
