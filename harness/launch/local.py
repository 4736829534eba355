"""Ranks on this machine: each in a network namespace of its own, forked from a server that has imported torch."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from thinpipe.harness.errors import RunError, UserError
from thinpipe.harness.launch.base import topology_to_json
from thinpipe.harness.spec import RunSpec
from thinpipe.netem.lab import Lab
from thinpipe.netem.topology import Topology

WORKER = "thinpipe.harness.worker:main"
STARTED_LIMIT_S = 120.0
# Reading and tokenising a large text, or compiling the kernels, the first time.
PREPARED_LIMIT_S = 1800.0
# One thread a rank, always: two lose several times their gain as soon as anything else runs on the machine.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


class LocalLauncher:
    """Holds the fork server of a sweep. fresh=True starts every rank as a new interpreter instead (to compare)."""

    def __init__(self, *, fresh: bool = False):
        self.fresh = fresh
        self._server: subprocess.Popen[bytes] | None = None
        self._start()

    def _start(self) -> None:
        mine, theirs = socket.socketpair()
        self._sock = mine
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-m", "thinpipe.harness.launch._forkserver", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=os.environ | ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # the terminal's signals are ours to handle, not the server's
            )

    def check(self, spec: RunSpec) -> None:
        """Refuse a run that cannot work, and prepare what its ranks will share (data, compiled kernels)."""
        self._ask({"check": spec.canonical()}, PREPARED_LIMIT_S)

    def lab(self, topology: Topology) -> contextlib.AbstractContextManager[Lab]:
        """The hosts of one run, up and shaped."""
        reply, fds = self._ask({"lab": topology_to_json(topology)})
        (fd,) = fds
        return contextlib.closing(Lab.attach(reply["pid"], socket.socket(fileno=fd), topology))

    def start_rank(self, lab: Lab, rank: int, world_size: int, args: dict[str, Any], log: Path) -> None:
        """Start `rank` on host `rank`."""
        target = "thinpipe.harness.launch.local:exec_worker" if self.fresh else WORKER
        env = ENVIRONMENT | {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
        lab.spawn(f"rank{rank}", rank, target, args, log=log, env=env)

    def close(self) -> None:
        """End the fork server; with its socket closed every lab it started ends too."""
        self._sock.close()
        if self._server is None:
            return
        try:
            self._server.wait(5.0)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait(5.0)
        self._server = None

    def _ask(self, request: dict[str, Any], limit_s: float = STARTED_LIMIT_S) -> tuple[dict[str, Any], list[int]]:
        if self._server is None:
            self._start()
        data = json.dumps(request).encode()
        self._sock.settimeout(limit_s)
        try:
            self._sock.sendall(len(data).to_bytes(8, "little") + data)
            head, fds, _, _ = socket.recv_fds(self._sock, 8, 1)
            body = self._sock.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL) if head else b""
            if not body:
                raise ConnectionError("it ended; its error is above")
        except OSError as error:
            # Its next answer might be to this question: a new server is started for the next one.
            late = isinstance(error, TimeoutError)
            self.close()
            why = f"did not answer within {limit_s:.0f} s" if late else f"is gone: {error}"
            raise RunError(f"the fork server {why}") from error
        reply = json.loads(body)
        if reply["error"] is not None:
            if "detail" in reply:
                raise RunError(f"{reply['error']}\n{reply['detail']}")
            raise UserError(reply["error"])
        return reply, list(fds)


def exec_worker(control: Any, **args: Any) -> None:
    """Replace this forked process by a new interpreter that runs the worker: nothing is inherited but the pipe."""
    os.set_inheritable(control.fileno(), True)
    command = [sys.executable, "-P", "-m", "thinpipe.harness.launch.local", str(control.fileno()), json.dumps(args)]
    os.execv(sys.executable, command)


def _exec_main() -> None:
    from thinpipe.harness import worker
    from thinpipe.netem.child import Control
    from thinpipe.netem.wire import Connection

    control = Control(Connection(socket.socket(fileno=int(sys.argv[1]))))
    worker.main(control, **json.loads(sys.argv[2]))


if __name__ == "__main__":
    _exec_main()
