"""Framed JSON over a stream socket: the control plane between a lab's client, its PID 1 and its processes.

A message is 4 bytes of length (big-endian) and UTF-8 JSON. Reads and writes never block: an event loop feeds
`fill` and `flush`; a plain caller uses `send` and `receive`, which wait within a limit.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import time
from typing import Any

MESSAGE_BYTES_MAX = 64 << 20
_READ_BYTES = 1 << 18
_LENGTH = struct.Struct(">I")


class Connection:
    """One end of a control socket. Not for several threads at once."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._in = bytearray()
        self._out = bytearray()
        self.eof = False
        self.received_bytes = 0

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def pending_bytes(self) -> int:
        """Bytes queued here that the socket has not taken."""
        return len(self._out)

    def queue(self, message: Any) -> None:
        """Append a message to what `flush` sends. Raises TypeError for what JSON cannot hold, ValueError for
        size."""
        body = json.dumps(message, separators=(",", ":")).encode()
        if len(body) > MESSAGE_BYTES_MAX:
            raise ValueError(f"control message of {len(body)} bytes; at most {MESSAGE_BYTES_MAX} (use a file)")
        self._out += _LENGTH.pack(len(body)) + body

    def flush(self) -> None:
        """Send what the socket takes now. A peer that is gone sets `eof` and drops the rest."""
        while self._out and not self.eof:
            try:
                sent = self._sock.send(memoryview(self._out)[: 1 << 20], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:
                self.eof = True
                return
            del self._out[:sent]

    def fill(self) -> None:
        """Read what is there now, at most one buffer; the end of the stream sets `eof`."""
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._in += data
        self.received_bytes += len(data)
        self.eof = self.eof or not data

    def pop(self) -> tuple[Any] | None:
        """The next whole message, boxed in a 1-tuple since a message may be null; None = not there yet."""
        if len(self._in) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._in)
        end = _LENGTH.size + length
        if len(self._in) < end:
            return None
        body = bytes(self._in[_LENGTH.size : end])
        del self._in[:end]
        return (json.loads(body),)

    def send(self, message: Any, timeout_s: float) -> None:
        """Send one message. Raises EOFError if the peer is gone, TimeoutError if it does not read."""
        self.queue(message)
        deadline = time.monotonic() + timeout_s
        self.flush()
        while self._out and not self.eof:
            if not _wait(self._sock, select.POLLOUT, deadline):
                raise TimeoutError(f"the peer took no control message within {timeout_s:g} s")
            self.flush()
        if self.eof:
            raise EOFError("the peer of the control socket is gone")

    def receive(self, timeout_s: float) -> Any:
        """The next message. Raises EOFError at the end of the stream, TimeoutError after timeout_s."""
        deadline = time.monotonic() + timeout_s
        while (boxed := self.pop()) is None:
            if self.eof:
                raise EOFError("the peer of the control socket is gone")
            if not _wait(self._sock, select.POLLIN, deadline):
                raise TimeoutError(f"no control message within {timeout_s:g} s")
            self.fill()
        return boxed[0]

    def shut(self) -> None:
        """End the stream for every holder of this socket, and close this one."""
        # The peer may have been first.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def _wait(sock: socket.socket, event: int, deadline: float) -> bool:
    poll = select.poll()
    poll.register(sock, event)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1e3))
