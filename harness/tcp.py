"""Kernel counters of this process's TCP connections: what really left, so that frames can be held against it.

gloo owns its sockets; each is found among this process's file descriptors and asked for TCP_INFO (tcp(7), struct
tcp_info of linux/tcp.h; fields after byte 104 need Linux 4.19 or newer).
"""

from __future__ import annotations

import os
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from thinpipe.harness.errors import RunError

_UNACKED, _SEGS_OUT, _NOTSENT, _BYTES_SENT, _BYTES_RETRANS = 24, 136, 144, 200, 208
_FULL = 216


@dataclass(frozen=True)
class Counters:
    """bytes_sent: payload bytes handed to IP, retransmissions included; bytes_retrans: those; segments_out: with or
    without payload; pending: bytes not yet sent or not yet acknowledged (in segments for the latter)."""

    bytes_sent: int
    bytes_retrans: int
    segments_out: int
    pending: int

    def __sub__(self, other: Counters) -> Counters:
        return Counters(
            self.bytes_sent - other.bytes_sent,
            self.bytes_retrans - other.bytes_retrans,
            self.segments_out - other.segments_out,
            self.pending,
        )


def connections(*, ignore_port: int | None = None) -> dict[int, tuple[str, str]]:
    """Connected TCP sockets of this process: fd -> (local address, peer address). ignore_port: leave out those of the
    server at this port (a rendezvous)."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with _borrow(int(name)) as sock:
            if sock is not None:
                (local, own_port, *_), (peer, peer_port, *_) = sock.getsockname(), sock.getpeername()
                if ignore_port not in (own_port, peer_port):
                    found[int(name)] = (local, peer)
    return found


def read(fd: int) -> Counters:
    """TCP_INFO of one connection."""
    with _borrow(fd) as sock:
        if sock is None:
            raise RunError(f"the connection on descriptor {fd} was closed while the run was still measured")
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(info) < _FULL:
        raise RunError("this kernel's TCP_INFO has no byte counters; Linux 4.19 or newer is needed")
    (unacked,) = struct.unpack_from("<I", info, _UNACKED)
    (segments,) = struct.unpack_from("<I", info, _SEGS_OUT)
    (notsent,) = struct.unpack_from("<I", info, _NOTSENT)
    sent, retrans = struct.unpack_from("<QQ", info, _BYTES_SENT)
    return Counters(sent, retrans, segments, notsent + unacked)


def drain(fds: list[int], limit_s: float) -> None:
    """Wait until nothing is left to send or to be acknowledged on any of `fds`. Raises RunError after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while any(read(fd).pending for fd in fds):
        if time.monotonic() > deadline:
            raise RunError(f"bytes were still on their way {limit_s:.0f} s after the last step")
        time.sleep(0.002)


def loopback_bytes() -> int:
    """Bytes sent over `lo` in this process's network namespace."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == "lo":
            return int(rest.split()[8])
    return 0


class _borrow:
    """A connected TCP socket on a copy of `fd`, or None where fd is something else."""

    def __init__(self, fd: int):
        self.sock: socket.socket | None = None
        try:
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                return
            sock = socket.socket(fileno=os.dup(fd))
        except OSError:
            return
        if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
            try:
                sock.getpeername()
                self.sock = sock
                return
            except OSError:
                pass
        sock.close()

    def __enter__(self) -> socket.socket | None:
        return self.sock

    def __exit__(self, *_: object) -> None:
        if self.sock is not None:
            self.sock.close()
