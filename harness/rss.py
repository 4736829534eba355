"""What memory a process has needed: its peak of anonymous memory over what it had when the work began.

Pages of files (libraries, a mapped checkpoint) are not counted: they are shared, can be dropped at any time, and a
forked process maps those its parent had anew, one by one. The kernel keeps a high-water mark of all resident pages
only (VmHWM, proc(5)); the pages of files are subtracted as they stand at the end. They grow in a process's first
moments and hardly after, and a training's peak comes again in every step, so the mark is one of a later step.
"""

from __future__ import annotations

from pathlib import Path

# Written there, it sets the high-water mark back to what is resident now.
RESET = "5"
PROC = Path("/proc/self")


def start() -> int:
    """Bytes of anonymous memory now, which `peak` is to be given. Forgets the high-water mark: imports have theirs."""
    (PROC / "clear_refs").write_text(RESET)
    return _status()["RssAnon"]


def peak(before: int) -> int:
    """Most bytes of anonymous memory since `start`, over what it returned. To be called while the work's last step is
    still resident; at least what there is now."""
    status = _status()
    most = status["VmHWM"] - status["RssFile"] - status["RssShmem"]
    return max(most, status["RssAnon"]) - before


def _status() -> dict[str, int]:
    """The fields of /proc/self/status that are sizes, in bytes."""
    fields = (line.split() for line in (PROC / "status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in fields if len(words) == 3 and words[2] == "kB"}
