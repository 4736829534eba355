"""Lab: hosts with shaped links on this machine, and processes in them. Nothing of it survives, also after
SIGKILL.

>>> with Lab(Topology.mesh(2, LinkSpec(rate_mbit=100.0))) as lab:           # doctest: +SKIP
...     lab.spawn("rank0", 0, "package.module:function", {"rank": 0}, log=Path("rank0.log"))
...     lab.event(timeout_s=60.0)
Event(kind='exit', name='rank0', data=None, status=0)

A process of a lab is forked, not executed: what the process that called `start` has imported is there at
once. See namespaces for the processes in between, supervisor for the control protocol.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from thinpipe.netem.errors import NetemError
from thinpipe.netem.namespaces import launch
from thinpipe.netem.supervisor import serve
from thinpipe.netem.topology import Topology
from thinpipe.netem.wire import Connection

CLOSE_LIMIT_S = 5.0
REPLY_LIMIT_S = 30.0


@dataclass(frozen=True)
class Event:
    """kind "message": data is what process `name` sent. kind "exit": status is its exit code, or -signal."""

    kind: Literal["message", "exit"]
    name: str
    data: Any = None
    status: int | None = None


def start(topology: Topology) -> tuple[int, socket.socket]:
    """Fork a lab and return at once: (pid of its guard, control socket). `Lab.attach` takes them from there.

    The caller has to wait for the pid, and must be alive for as long as the lab. May be called from any
    thread.
    """
    user_namespace = os.geteuid() != 0
    return launch(lambda client: serve(client, topology, user_namespace=user_namespace))


class Lab:
    """A client's handle on one lab, a context manager. Not for several threads at once.

    info (JSON-able, once up): topology (id), hosts [{name, address, interface}], commands {ip, hosts {name:
    text}, tc {name: text}}, effective {name: what was read back}, user_namespace, kernel, iproute2.
    """

    def __init__(self, topology: Topology, *, limit_s: float = 30.0) -> None:
        self.topology = topology
        self.info: dict[str, Any] = {}
        self.pid = 0
        self._limit_s = limit_s
        self._guard: int | None = None
        self._connection: Connection | None = None
        self._events: deque[dict[str, Any]] = deque()
        self._used: set[str] = set()
        self._calls = itertools.count()

    def __enter__(self) -> Lab:
        """Start the lab and wait until its network is up, shaped and read back. Raises NetemError with the
        reason."""
        self._open(*start(self.topology))
        return self

    @classmethod
    def attach(cls, pid: int, sock: socket.socket, topology: Topology, *, limit_s: float = 30.0) -> Lab:
        """A lab that another process has started; waits and raises like `with Lab(...)`. Close it at the
        end."""
        lab = cls(topology, limit_s=limit_s)
        lab._open(pid, sock)
        return lab

    def _open(self, pid: int, sock: socket.socket) -> None:
        self.pid, self._connection = pid, Connection(sock)
        # Its starter may have waited for it already.
        with contextlib.suppress(ProcessLookupError):
            self._guard = os.pidfd_open(pid)
        try:
            ready = self._next(lambda event: event["event"] == "ready", self._limit_s, "the lab to come up")
            if ready is None:
                raise NetemError(f"the lab was not up within {self._limit_s:g} s; is the machine overloaded?")
        except BaseException:
            self.close()
            raise
        self.info = ready["info"]
        assert self.info["topology"] == self.topology.id, "attached to a lab of another topology"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the lab with all that runs in it; returns when its processes are gone. Safe to call again."""
        if self._connection is None:
            return
        self._connection.shut()
        self._connection = None
        if self._guard is None:
            return
        guard, self._guard = self._guard, None
        # While it builds its network it does not look at its socket.
        if not _ended(guard, CLOSE_LIMIT_S if self.info else 0.0):
            signal.pidfd_send_signal(guard, signal.SIGKILL)
            if not _ended(guard, CLOSE_LIMIT_S):
                raise NetemError(f"the lab's process {self.pid} survived SIGKILL for {CLOSE_LIMIT_S:g} s")
        os.close(guard)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def spawn(
        self,
        name: str,
        host: int,
        target: str,
        args: Mapping[str, Any],
        *,
        log: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Fork process `name` in host number `host`; it calls target "package.module:function" as f(control,
        **args).

        log: standard output and error are appended to it. env: added to its environment. Names are not
        reused. A log that cannot be opened, or a refused fork, is raised by the next call that waits.
        """
        if name in self._used:
            raise NetemError(f"process name {name!r} is taken in this lab; choose another")
        # The lab's working directory is that of whoever started it.
        path = None if log is None else str(Path(log).absolute())
        self._spawn(name, host, target, args, log=path, env=dict(env or {}), answer=False)

    def _spawn(self, name: str, host: int, target: str, args: Mapping[str, Any], **rest: Any) -> None:
        if not 0 <= host < len(self.topology.hosts):
            raise NetemError(f"host {host} of process {name!r} is not one of 0..{len(self.topology.hosts) - 1}")
        self._command(op="spawn", name=name, host=host, target=target, args=dict(args), **rest)
        self._used.add(name)

    def send(self, name: str, data: Any) -> None:
        """A JSON message to a process; lost, like any, if it has ended (its exit event tells)."""
        self._known(name)
        self._command(op="send", name=name, data=data)

    def kill(self, name: str, signal: int = signal.SIGKILL) -> None:
        """Send a signal to a process; nothing happens if it has ended."""
        self._known(name)
        self._command(op="kill", name=name, signal=int(signal))

    def event(self, timeout_s: float) -> Event | None:
        """The next message or exit of any spawned process, in order; None after timeout_s without one."""
        found = self._next(lambda event: event["event"] in {"message", "exit"}, timeout_s, "an event")
        if found is None:
            return None
        return Event(found["event"], found["name"], found.get("data"), found.get("status"))

    def call(self, host: int, target: str, args: Mapping[str, Any], *, timeout_s: float) -> Any:
        """Run f(control, **args) in a host and return its result (JSON); messages it sends are dropped.

        Raises NetemError with its error, or after timeout_s (the process is killed).
        """
        name = f"call-{next(self._calls)} {target}"
        self._spawn(name, host, target, args, log=None, env={}, answer=True)
        where = f"{target} on host {self.topology.hosts[host]}"
        kinds = self._until_exit(name, timeout_s)
        if kinds is None:
            self.kill(name)
            self._until_exit(name, CLOSE_LIMIT_S)
            raise NetemError(f"{where} did not return within {timeout_s:g} s")
        status = kinds["exit"]["status"]
        if "return" in kinds and status == 0:
            return kinds["return"]["data"]
        why = kinds["error"]["data"] if "error" in kinds else f"it ended with status {status} and no result"
        raise NetemError(f"{where} failed: {why}")

    def _until_exit(self, name: str, timeout_s: float) -> dict[str, dict[str, Any]] | None:
        """The last event of each kind of one process, up to its exit; None if that takes longer."""
        deadline = time.monotonic() + timeout_s
        kinds: dict[str, dict[str, Any]] = {}
        while "exit" not in kinds:
            event = self._next(lambda e: e.get("name") == name, deadline - time.monotonic(), name)
            if event is None:
                return None
            kinds[event["event"]] = event
        return kinds

    def counters(self) -> list[dict[str, Any]]:
        """Leaf qdisc counters of all hosts since the lab came up: host, destination (number of the host, None
        for what no filter matches and for hosts without any limit), bytes and packets (layer 2), drops,
        overlimits (of the class), backlog (bytes)."""
        return self._ask("counters")

    def loopback(self) -> list[dict[str, Any]]:
        """What went over each host's loopback, unshaped: host, bytes, packets."""
        return self._ask("loopback")

    def _ask(self, op: str) -> list[dict[str, Any]]:
        self._command(op=op)
        reply = self._next(lambda event: event["event"] == "reply", REPLY_LIMIT_S, op)
        if reply is None:
            raise NetemError(f"the lab did not answer {op} within {REPLY_LIMIT_S:g} s")
        return reply["data"]

    def _known(self, name: str) -> None:
        if name not in self._used:
            raise NetemError(f"no process {name!r} in this lab; there are: {', '.join(sorted(self._used)) or 'none'}")

    def _command(self, **command: Any) -> None:
        try:
            self._live().send(command, REPLY_LIMIT_S)
        except (EOFError, TimeoutError) as error:
            raise NetemError(f"the lab takes no commands: {error}") from error
        except TypeError as error:
            raise NetemError(f"{command['op']}: only JSON values can be sent: {error}") from error

    def _live(self) -> Connection:
        if self._connection is None:
            raise NetemError("this lab is not up: use it inside `with Lab(...)`, before close()")
        return self._connection

    def _next(self, wanted: Callable[[dict[str, Any]], bool], timeout_s: float, what: str) -> dict[str, Any] | None:
        """The first kept or coming event that is wanted, others kept in order. None after timeout_s."""
        for event in self._events:
            if wanted(event):
                self._events.remove(event)
                return event
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                event = self._live().receive(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                return None
            except EOFError:
                raise NetemError(f"the lab ended while waiting for {what}") from None
            if event["event"] == "failed":
                raise NetemError(event["reason"])
            if event["event"] == "refused":
                raise NetemError(f"the lab refused: {event['data']}")
            if wanted(event):
                return event
            self._events.append(event)


def _ended(process: int, timeout_s: float) -> bool:
    """Whether the process behind a pidfd (a child or not) has ended, or does so within timeout_s."""
    return bool(select.select([process], [], [], timeout_s)[0])
