"""A rank's connections: two gloo groups over the shaped interface, and their bytes held against the kernel's.

Frames have a group, and so TCP connections, of their own; everything else (clip norms, barriers) uses the other and
is counted as sync_bytes. On the frame connections, for each peer:

    bytes_sent - retransmitted = frames + SENT x messages sent + RECEIVED x messages received

SENT and RECEIVED are what gloo adds to a message (its header and announcement at the sender, its answer at the
receiver); they are measured at the start of each run, with a message each way.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from thinpipe.harness import tcp
from thinpipe.harness.channel import Channel
from thinpipe.harness.errors import RunError

_PROBE_BYTES = 64


@dataclass
class Links:
    """The connections of one rank. fds: of frames and of the rest."""

    rank: int
    world_size: int
    frames: dist.ProcessGroup
    sync: dist.ProcessGroup
    frame_fds: dict[int, str]  # descriptor -> peer address
    sync_fds: list[int]
    addresses: list[str]  # own addresses used
    loopback_bytes: int
    added: tuple[int, int] = (0, 0)
    peers: dict[int, int] = field(default_factory=dict)  # neighbour's rank -> descriptor
    before: dict[int, tcp.Counters] = field(default_factory=dict)

    def barrier(self) -> None:
        dist.barrier(group=self.sync)

    def probe(self) -> None:
        """A message each way with each neighbour: which connection is whose, and what gloo adds to a message."""
        message = torch.zeros(_PROBE_BYTES, dtype=torch.uint8)
        for low in range(self.world_size - 1):
            if self.rank not in (low, low + 1):
                continue
            peer = low + 1 if self.rank == low else low
            for sends in (self.rank == low, self.rank != low):
                before = self._sent()
                if sends:
                    dist.send(message, group=self.frames, group_dst=peer, tag=2**20)
                else:
                    dist.recv(message, group=self.frames, group_src=peer, tag=2**20)
                fd, grown = self._grown(before, _PROBE_BYTES if sends else 1)
                self.peers[peer] = fd
                sent, received = self.added
                self.added = (grown - _PROBE_BYTES, received) if sends else (sent, grown)

    def _sent(self) -> dict[int, int]:
        return {fd: tcp.read(fd).bytes_sent for fd in self.frame_fds}

    def _grown(self, before: dict[int, int], least: int) -> tuple[int, int]:
        """The connection whose counter grew, and by how much, once it has settled."""
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline:
            tcp.drain(list(before), 10.0)
            grown = {fd: count - before[fd] for fd, count in self._sent().items() if count > before[fd]}
            if len(grown) == 1 and next(iter(grown.values())) >= least:
                return next(iter(grown.items()))
            time.sleep(0.001)
        raise RunError(f"rank {self.rank}: a probe message of {least} B did not show on exactly one connection")

    def start(self) -> None:
        """Counters are read from here."""
        self.before = {fd: tcp.read(fd) for fd in (*self.frame_fds, *self.sync_fds)}

    def settle(self, channels: Sequence[Channel], limit_s: float) -> dict[str, Any]:
        """Wait until all has left, hold the frames against TCP's counters, and report them.

        Raises RunError when a connection's bytes are not what the frames say, or when loopback carried anything.
        """
        tcp.drain(list(self.before), limit_s)
        grown = {fd: tcp.read(fd) - before for fd, before in self.before.items()}
        expected: dict[int, int] = defaultdict(int)
        sent_extra, received_extra = self.added
        for channel in channels:
            extra = sent_extra if channel.sends else received_extra
            expected[channel.peer] += channel.messages * extra + (channel.bytes if channel.sends else 0)
        for peer, fd in self.peers.items():
            found = grown[fd].bytes_sent - grown[fd].bytes_retrans
            if found != expected[peer]:
                raise RunError(
                    f"rank {self.rank} to {peer}: TCP sent {found} B, but frames and gloo's additions are "
                    f"{expected[peer]} B"
                )
        loopback = tcp.loopback_bytes() - self.loopback_bytes
        if loopback:
            raise RunError(f"rank {self.rank}: {loopback} B went over loopback, past the shaped link")
        return {
            "tcp_bytes": sum(c.bytes_sent for c in grown.values()),
            "segments": sum(c.segments_out for c in grown.values()),
            "retransmitted_bytes": sum(c.bytes_retrans for c in grown.values()),
            "sync_bytes": sum(grown[fd].bytes_sent for fd in self.sync_fds),
            "gloo_added_bytes": sum(self.added),
        }


def join(rendezvous: str, interface: str, rank: int, world_size: int, limit_s: float) -> Links:
    """Join the run's process groups through a file store, bound to `interface`.

    Raises RunError when a connection is not on that interface: on one machine loopback would work, unshaped.
    """
    loopback = tcp.loopback_bytes()
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    store = dist.FileStore(rendezvous, world_size)
    limit = timedelta(seconds=limit_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    frames = dist.distributed_c10d._get_default_group()
    first = tcp.connections()
    sync = dist.new_group(list(range(world_size)), timeout=limit, backend="gloo")
    after = tcp.connections()
    own = sorted({local for local, _ in after.values()})
    if any(address.startswith("127.") or address == "::1" for pair in after.values() for address in pair):
        raise RunError(f"rank {rank}: gloo connected over loopback ({own}), not over {interface}")
    if len(first) != world_size - 1 or len(after) != 2 * (world_size - 1):
        raise RunError(f"rank {rank}: expected {world_size - 1} connections a group, found {len(first)}, {len(after)}")
    frame_fds = {fd: peer for fd, (_, peer) in first.items()}
    return Links(rank, world_size, frames, sync, frame_fds, [fd for fd in after if fd not in first], own, loopback)
