"""Where a memory's rows lie: in RAM, or in a mapped file of which a few messages' rows are resident at a time.

    expect      the messages of a step, in order      ─▶ helper: read the first one's rows in
    begin       message i is worked on now            ─▶ helper: read the next one's rows in
    end         its rows are as they are to stay      ─▶ helper: unmap them, have them written back

The file never has a name, so nothing is left of it when its process ends, however it ends. All of it is allocated
before it is mapped: a write into a hole on a full disk would kill the process (SIGBUS). The helper, one thread for all
files of a process, gives the kernel hints and touches no data: what is computed does not depend on it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import queue
import shutil
import tempfile
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from thinpipe.harness.errors import CodecError, UserError

#: Messages whose rows are resident at once, at most: the one at hand, the next, and those not yet written back.
WINDOW = 4
_BEHIND = WINDOW - 2
# A disk that writes a few messages' rows no faster than this has failed.
LIMIT_S = 120.0
# Linux 5.14; not among Python's constants.
_POPULATE_WRITE = 23


class Ram:
    """Rows in a tensor; nothing to read ahead."""

    on_disk = False

    def grow(self, data: torch.Tensor, kept: int, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
        """A tensor of `shape` and data's type, whose first `kept` rows are those of `data`."""
        grown = torch.empty(shape, dtype=data.dtype, device=device)
        if kept:
            grown[:kept] = data[:kept]
        return grown

    def expect(self, messages: Sequence[Callable[[], Iterable[int]]]) -> None:
        """These messages come next; each gives its rows' places when asked."""

    def begin(self, number: int) -> None:
        """Message `number` of those expected is worked on from now on."""

    def end(self, places: Iterable[int]) -> None:
        """Rows at these places will not be needed soon."""

    def lend(self) -> None:
        """All rows are about to be read by somebody else, before the next message."""


class Disk(Ram):
    """Rows in a mapped file in `folder` (None: the system's folder for temporary files)."""

    on_disk = True

    def __init__(self, folder: Path | None) -> None:
        self._folder = Path(tempfile.gettempdir()) if folder is None else Path(folder)
        self._file: IO[bytes] | None = None
        self._map: mmap.mmap | None = None
        self._row = 0
        self._messages: list[Callable[[], Iterable[int]]] = []
        self._pending: set[int] = set()
        self._behind: deque[threading.Event] = deque()
        self._written: list[tuple[int, int]] = []
        self._lent = False

    def grow(self, data: torch.Tensor, kept: int, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
        self._row = shape[1] * data.itemsize
        size = max(1, shape[0] * self._row)
        try:
            self._file = self._file or tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - lives as long as this
            os.posix_fallocate(self._file.fileno(), 0, size)
        except OSError as error:
            raise UserError(self._refusal(size, error)) from error
        # The old mapping goes when the last view of it does.
        self._map = mmap.mmap(self._file.fileno(), size)
        flat = torch.from_numpy(np.frombuffer(self._map, np.uint8))
        return flat[: shape[0] * self._row].view(data.dtype).view(shape)

    def expect(self, messages: Sequence[Callable[[], Iterable[int]]]) -> None:
        self._messages, self._pending = list(messages), set(range(len(messages)))
        self._fetch(0)

    def begin(self, number: int) -> None:
        self._fetch(number)
        # Whichever way a schedule goes through its micro-batches, a neighbour is next.
        if self._pending:
            self._fetch(min(self._pending, key=lambda other: abs(other - number)))

    def end(self, places: Iterable[int]) -> None:
        ranges, file, mapping, again = self._ranges(places), self._file, self._map, self._written
        if not ranges:
            return
        assert file is not None
        assert mapping is not None
        if self._lent:
            ranges, self._lent = [(0, len(mapping))], False

        def release() -> None:
            _advise(mapping, ranges, mmap.MADV_DONTNEED)
            # Begins to write these; drops from the page cache those begun last time, which are written by now.
            for start, size in again + ranges:
                os.posix_fadvise(file.fileno(), start, size, os.POSIX_FADV_DONTNEED)

        self._written = ranges
        self._behind.append(_ask(release))
        # A disk slower than the training must not fill the RAM meanwhile.
        while len(self._behind) > _BEHIND:
            if not self._behind.popleft().wait(LIMIT_S):
                raise CodecError(
                    f"the disk under {self._folder} took no rows of a memory for {LIMIT_S:.0f} s: is it still there? "
                    "Use another folder or store=ram"
                )

    def lend(self) -> None:
        self._lent = True

    def _fetch(self, number: int) -> None:
        if number not in self._pending:
            return
        self._pending.discard(number)
        ranges, mapping = self._ranges(self._messages[number]()), self._map

        def fetch() -> None:
            if not _advise(mapping, ranges, _POPULATE_WRITE):
                _advise(mapping, ranges, mmap.MADV_WILLNEED)

        if ranges:
            _ask(fetch)

    def _ranges(self, places: Iterable[int]) -> list[tuple[int, int]]:
        """(start, bytes) of the pages these rows lie on, adjoining ones as one."""
        found: list[tuple[int, int]] = []
        page = mmap.PAGESIZE
        for place in sorted(set(places)):
            start, stop = place * self._row // page * page, -(-(place + 1) * self._row // page) * page
            if found and start <= found[-1][0] + found[-1][1]:
                start = found.pop()[0]
            if stop > start:
                found.append((start, stop - start))
        return found

    def _refusal(self, size: int, error: OSError) -> str:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return f"no file for a memory's rows can be made in {self._folder}: {error.strerror}"
        free = shutil.disk_usage(self._folder).free
        return (
            f"a memory's rows need {size / 2**30:.2f} GiB in {self._folder}, which cannot be had ({error.strerror}; "
            f"{free / 2**30:.2f} GiB are free): make room, choose a smaller cache (cache=), fewer samples, or store=ram"
        )


# --- the helper ---

_tasks: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] | None = None
_owner = 0


def _ask(task: Callable[[], None]) -> threading.Event:
    """Have the helper do `task`; the event is set when it is done. Made on first use: a fork keeps no threads."""
    global _tasks, _owner
    if _tasks is None or _owner != os.getpid():
        _tasks, _owner = queue.SimpleQueue(), os.getpid()
        threading.Thread(target=_help, args=(_tasks,), name="rows on disk", daemon=True).start()
    done = threading.Event()
    _tasks.put((task, done))
    return done


def _help(tasks: queue.SimpleQueue[Any]) -> None:
    while True:
        task, done = tasks.get()
        try:
            task()
        except Exception:  # a hint that failed changes nothing; a helper that ended would be waited for
            traceback.print_exc()
        finally:
            done.set()
            # Or the last file would stay until there is another task.
            del task, done


def _advise(mapping: mmap.mmap | None, ranges: Sequence[tuple[int, int]], advice: int) -> bool:
    """madvise these bytes; whether the kernel took it. mmap's own method would hold the interpreter meanwhile."""
    assert mapping is not None
    base = np.frombuffer(mapping, np.uint8).ctypes.data
    return all(_libc.madvise(base + start, size, advice) == 0 for start, size in ranges)


_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
