"""PID 1 of a lab: builds the network, then forks, feeds, watches and reaps its processes until its client is
gone.

Client -> PID 1: {"op": "spawn" | "send" | "kill" | "counters" | "loopback", ...}. PID 1 -> client: {"event":
"ready" | "failed" | "message" | "return" | "error" | "exit" | "reply" | "refused", ...}. What a process sent
before it ended is passed on before its exit.
"""

from __future__ import annotations

import os
import select
import socket
from dataclasses import dataclass
from typing import Any

from thinpipe.netem import child, network
from thinpipe.netem.errors import NetemError
from thinpipe.netem.topology import Topology
from thinpipe.netem.wire import Connection

# A client that does not read holds up the processes that talk, not this loop's memory.
BACKLOG_BYTES_MAX = 4 << 20
# Orphans of our processes have no pidfd here; they are reaped at the latest after this.
REAP_INTERVAL_S = 1.0


@dataclass
class Process:
    """One live child: `descriptor` is its pidfd."""

    pid: int
    descriptor: int
    connection: Connection


class Supervisor:
    """The event loop."""

    def __init__(self, client: Connection, topology: Topology) -> None:
        self._client = client
        self._topology = topology
        self._processes: dict[str, Process] = {}

    def run(self) -> None:
        """Serve until the client is gone."""
        while not self._client.eof:
            for descriptor, _ in self._poll():
                self._serve(descriptor)
            self._reap()
            self._client.flush()

    def _poll(self) -> list[tuple[int, int]]:
        poll = select.poll()
        poll.register(self._client, select.POLLIN | (select.POLLOUT if self._client.pending_bytes else 0))
        listen = self._client.pending_bytes < BACKLOG_BYTES_MAX
        for process in self._processes.values():
            poll.register(process.descriptor, select.POLLIN)
            events = select.POLLIN if listen else 0
            events |= select.POLLOUT if process.connection.pending_bytes else 0
            if events and not process.connection.eof:
                poll.register(process.connection, events)
        return poll.poll(REAP_INTERVAL_S * 1e3)

    def _serve(self, descriptor: int) -> None:
        if descriptor == self._client.fileno():
            self._client.fill()
            while (boxed := self._client.pop()) is not None:
                self._obey(boxed[0])
            return
        for name, process in self._processes.items():
            if descriptor == process.connection.fileno():
                process.connection.flush()
                process.connection.fill()
                self._pass_on(name, process)

    def _pass_on(self, name: str, process: Process) -> None:
        while (boxed := process.connection.pop()) is not None:
            ((kind, data),) = boxed[0].items()
            self._client.queue({"event": kind, "name": name, "data": data})

    def _obey(self, command: dict[str, Any]) -> None:
        try:
            match command.pop("op"):
                case "spawn":
                    self._spawn(**command)
                case "send":
                    if (process := self._processes.get(command["name"])) is not None:
                        process.connection.queue(command["data"])
                        process.connection.flush()
                case "kill":
                    if (process := self._processes.get(command["name"])) is not None:
                        os.kill(process.pid, command["signal"])
                case "counters":
                    self._client.queue({"event": "reply", "data": network.counters(self._topology)})
                case "loopback":
                    self._client.queue({"event": "reply", "data": network.loopback(self._topology)})
        except (NetemError, OSError) as error:
            self._client.queue({"event": "refused", "name": command.get("name"), "data": str(error)})

    def _spawn(
        self,
        *,
        name: str,
        host: int,
        target: str,
        args: dict[str, Any],
        log: str | None,
        env: dict[str, str],
        answer: bool,
    ) -> None:
        descriptor = None
        if log is not None:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            child.main(
                theirs,
                self._topology.hosts[host],
                target=target,
                args=args,
                log=descriptor,
                env=env,
                answer=answer,
            )
        theirs.close()
        if descriptor is not None:
            os.close(descriptor)
        self._processes[name] = Process(pid, os.pidfd_open(pid), Connection(ours))

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for name, process in self._processes.items():
                if process.pid == pid:
                    self._bury(name, process, os.waitstatus_to_exitcode(status))
                    break

    def _bury(self, name: str, process: Process, status: int) -> None:
        # A grandchild may hold the socket open, so there need not be an end of the stream.
        before = -1
        while not process.connection.eof and before != (before := process.connection.received_bytes):
            process.connection.fill()
        self._pass_on(name, process)
        process.connection.shut()
        os.close(process.descriptor)
        del self._processes[name]
        self._client.queue({"event": "exit", "name": name, "status": status})


def serve(client: Connection, topology: Topology, *, user_namespace: bool) -> None:
    """Body of PID 1: network up, "ready", event loop; returns when the client is gone."""
    client.queue({"event": "ready", "info": network.build(topology, user_namespace=user_namespace)})
    client.flush()
    Supervisor(client, topology).run()
