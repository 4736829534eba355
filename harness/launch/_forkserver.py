"""The fork server: one process that has imported torch and the model, and forks a lab for each run.

So a run costs a fork, not an import, and nothing survives from one run to the next: every rank is a fork of this
process as it was after `check`. It stays single-threaded (a threaded process cannot be forked safely, nor enter a user
namespace). Requests come as JSON over one socket; a lab's control socket goes back over it (SCM_RIGHTS). It ends, and
with it every lab, when that socket closes.

    {"check": spec}      -> {"error": null | text}
    {"lab": hosts, links} -> {"pid": n} + descriptor
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from typing import Any

from thinpipe.harness.errors import UserError

REAP_EVERY_S = 0.2  # ended labs are collected this often


def serve(sock: socket.socket) -> None:
    """Answer requests until the other end closes."""
    for module in ("torch", "torch.distributed.pipelining", "thinpipe.harness.worker"):
        __import__(module)
    while True:
        readable, _, _ = select.select([sock], [], [], REAP_EVERY_S)
        _reap()
        if not readable:
            continue
        head = sock.recv(8, socket.MSG_WAITALL)
        if len(head) < 8:
            return
        request = json.loads(sock.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL))
        _answer(sock, request)


def _answer(sock: socket.socket, request: dict[str, Any]) -> None:
    reply: dict[str, Any] = {"error": None}
    handed: list[socket.socket] = []
    try:
        if "check" in request:
            from thinpipe.harness import check, spec

            check.check(spec.parse(request["check"]))
        else:
            from thinpipe.harness.launch.base import topology_from_json
            from thinpipe.netem import lab

            reply["pid"], control = lab.start(topology_from_json(request["lab"]))
            handed.append(control)
    except UserError as error:
        reply["error"] = str(error)
    except Exception as error:
        reply |= {"error": f"{type(error).__name__}: {error}", "detail": traceback.format_exc()}
    data = json.dumps(reply).encode()
    socket.send_fds(sock, [len(data).to_bytes(8, "little")], [s.fileno() for s in handed])
    sock.sendall(data)
    for control in handed:
        control.close()


def _reap() -> None:
    """Collect ended labs; the processes inside a lab are its own."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the client's to handle; it then closes the socket
    with socket.socket(fileno=int(sys.argv[1])) as sock, contextlib.suppress(ConnectionError):
        serve(sock)
    os._exit(0)  # at once: nothing here needs the interpreter's slow farewell


if __name__ == "__main__":
    main()
