"""The machine-wide timing lock: never two timed runs at once on one machine.

`flock` on one file that root and ordinary users share. The kernel releases it when its holder dies, however
it dies; the file itself stays, and says who holds it."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from thinpipe.harness.errors import UserError

# Not tempfile.gettempdir(): TMPDIR may differ from user to user, and the lock is one a machine.
PATH = Path("/tmp/thinpipe-timing.lock")
POLL_S = 0.25
REMIND_S = 60.0
LIMIT_S = 7 * 24 * 3600.0


@contextlib.contextmanager
def hold(experiment: str, results: Path, say: Callable[[str], None], *, limit_s: float | None = None) -> Iterator[None]:
    """Hold the lock; wait for it as long as `limit_s` (default LIMIT_S), saying for whom, at once and every
    minute.

    Raises UserError when the limit is reached or the lock file cannot be used.
    """
    limit_s = LIMIT_S if limit_s is None else limit_s
    handle = _open(PATH)
    try:
        _wait(handle, say, limit_s)
        info = {
            "pid": os.getpid(),
            "user": _user(),
            "experiment": experiment,
            "results": str(results.resolve()),
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(info).encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(handle, 0)
            # Said aloud, since a forked child may hold a copy of the descriptor past our close.
            fcntl.flock(handle, fcntl.LOCK_UN)
    finally:
        os.close(handle)


def holder() -> dict[str, Any] | None:
    """Who holds the lock (pid, user, experiment, results, started_at), None when nobody does."""
    try:
        handle = os.open(PATH, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"cannot read the timing lock {PATH}: {error.strerror}.") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(handle)
    else:
        fcntl.flock(handle, fcntl.LOCK_UN)
        return None
    finally:
        os.close(handle)


def describe(info: dict[str, Any]) -> str:
    """`process 12 (user ann, experiment quickstart, since ...)`."""
    if not info:
        return "a process that has not said its name yet"
    return (
        f"process {info.get('pid')} (user {info.get('user')}, experiment {info.get('experiment')}, "
        f"since {info.get('started_at')})"
    )


def _wait(handle: int, say: Callable[[str], None], limit_s: float) -> None:
    start = time.monotonic()
    said: float | None = None
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        now = time.monotonic()
        info = _read(handle)
        if now - start >= limit_s:
            raise UserError(
                f"waited {limit_s:.0f} s for the timing lock {PATH}, held by {describe(info)}. "
                "Run again when it has ended."
            )
        # A holder writes its name just after it has the lock; `holder()` in another process takes it for an
        # instant.
        if (info and said is None) or now - (said or start) >= REMIND_S:
            say(f"waiting for the timing lock: {describe(info)} is measuring on this machine")
            said = now
        time.sleep(min(POLL_S, limit_s))


def _open(path: Path) -> int:
    """Open the lock file for reading and writing, making it for everyone where it does not exist.

    In a sticky folder O_CREAT on a file of another user is refused (fs.protected_regular), also for root, so
    it is used only to make the file."""
    for _ in range(100):
        try:
            handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            try:
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            except FileExistsError:
                continue
            except OSError as error:
                raise UserError(f"cannot make the timing lock {path}: {error.strerror}.") from None
            os.fchmod(handle, 0o666)
        except PermissionError:
            # Its maker is between open and fchmod, or the file was not made by us.
            time.sleep(0.01)
            continue
        except OSError as error:
            raise UserError(f"cannot use the timing lock {path}: {error.strerror}. Remove it.") from None
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise UserError(f"the timing lock {path} is not a plain file. Remove it.")
        return handle
    raise UserError(f"cannot open the timing lock {path}: it must be readable and writable for everyone (chmod 666).")


def _read(handle: int) -> dict[str, Any]:
    try:
        data = json.loads(os.pread(handle, 4096, 0))
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
