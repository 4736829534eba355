"""A process of a lab, from its fork to its end: enters its host, then calls one function."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from thinpipe.netem.errors import NetemError
from thinpipe.netem.namespaces import detach_files, die_with_parent, enter, reset_signals
from thinpipe.netem.wire import Connection

SEND_LIMIT_S = 60.0


class Control:
    """What a spawned function gets first: JSON messages to and from the lab's client."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, data: Any) -> None:
        """Send a message; any thread may. Raises EOFError if the lab is gone, TimeoutError after 60 s."""
        self._post({"message": data})

    def receive(self, timeout_s: float) -> Any:
        """The client's next message. Raises EOFError if the lab is gone, TimeoutError after timeout_s."""
        return self._connection.receive(timeout_s)

    def fileno(self) -> int:
        """Descriptor of the pipe to the lab, e.g. to hand it to a program this process becomes."""
        return self._connection.fileno()

    def _post(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._connection.send(message, SEND_LIMIT_S)


def resolve(target: str) -> Callable[..., Any]:
    """The function behind "package.module:function". Raises NetemError saying which part is wrong."""
    module, _, name = target.partition(":")
    if not module or not name:
        raise NetemError(f"target {target!r} must read 'package.module:function'")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise NetemError(f"target {target!r}: the module cannot be imported: {error}") from error
    if not callable(function := getattr(found, name, None)):
        raise NetemError(f"target {target!r}: the module has no function {name!r}")
    return function


def main(
    sock: socket.socket,
    host: str,
    *,
    target: str,
    args: Mapping[str, Any],
    log: int | None,
    env: Mapping[str, str],
    answer: bool,
) -> NoReturn:
    """Run in the child right after the fork; never returns. Exit status: 0, SystemExit's, or 1 for an
    exception.

    An exception's traceback goes to the log. With `answer`, PID 1 also gets {"return": result} or {"error":
    text}.
    """
    status = 1
    try:
        _settle(sock, host, log)
        os.environ.update(env)
        status = _call(Control(Connection(sock)), target, args, answer)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
        status = 1
    finally:
        os._exit(status)


def _settle(sock: socket.socket, host: str, log: int | None) -> None:
    die_with_parent()
    if os.getppid() != 1:
        os._exit(1)
    reset_signals()
    if log is not None:
        os.dup2(log, 1)
        os.dup2(log, 2)
    detach_files({sock.fileno()})
    with open(f"/run/netns/{host}") as there:
        enter(there.fileno())
    # The inherited objects may be anything (a test runner's capture); these two write where 1 and 2 point.
    sys.stdout, sys.stderr = _text(1), _text(2)


def _text(descriptor: int) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)


def _call(control: Control, target: str, args: Mapping[str, Any], answer: bool) -> int:
    try:
        result = resolve(target)(control, **args)
        if answer:
            control._post({"return": result})
        return 0
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        traceback.print_exc()
        if answer:
            with contextlib.suppress(EOFError, TimeoutError):
                control._post({"error": f"{type(error).__name__}: {error}"})
        return 1
