"""Errors that people see. Each message says what was wrong and what to do about it.

`UserError` is for anything a person can fix in a spec, an experiment or on the machine (exit code 2).
The others end one run, with the state that the store keeps for it; an `assert` anywhere is our own bug.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something a person asked for cannot be done as asked; nothing was changed."""


class RunError(Exception):
    """One run ended badly. `state` is what status.json records for it."""

    state = "failed"


class DivergedError(RunError):
    """Training itself became non-finite: a finding about the method, not a fault of the run."""

    state = "diverged"


class CodecError(RunError):
    """A codec or memory broke its contract, e.g. decoded a non-finite value from finite input."""


class OverflowedError(CodecError, DivergedError):
    """A value that training made is finite, but beyond the format it was asked to cross in: published code would have
    gone on with infinities. A finding about the method and its format; the message names a wider one."""

    state = "diverged"


class PeerError(RunError):
    """A peer did not send or take what was due: what a rank sees of another rank's end, seldom the cause itself."""


class FrameError(RunError):
    """A frame did not arrive as sent, or is not the one the receiver expects."""


def near_miss(name: str, valid: Iterable[str]) -> str:
    """` Did you mean 'x'? Valid: a, b, c.` - the tail of every unknown-name message."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{hint} Valid: {', '.join(names) or '(none)'}."
