"""A rank's connections: gloo groups over the shaped interface, and their bytes held against the kernel's.

    frames   the ranks of one pipeline: what its boundaries carry, and nothing else
    pipe     the same ranks: clip norms, gradients of shared weights
    data     the ranks that hold the same stages in every data group: averaged gradients
    world    all ranks: barriers

A group has TCP connections of its own, so each kind of traffic can be counted; all but frames is sync_bytes. On the
frame connections, for each peer:

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
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from thinpipe.harness import tcp
from thinpipe.harness.channel import Channel
from thinpipe.harness.data_traffic import Traffic
from thinpipe.harness.errors import RunError, UserError

_PROBE_BYTES = 64
# What a full queue on the sender's own host refuses, TCP counts as sent, and sends again later without calling it
# retransmitted.
_OVERFLOW = "; where the link's own queue overflowed, TCP counts that twice: raise network.queue_ms"


@dataclass
class Links:
    """The connections of one rank. rank: within its pipeline of `ranks`; fds: of each group's connections."""

    rank: int
    ranks: int
    groups: int
    frames: dist.ProcessGroup
    pipe: dist.ProcessGroup
    world: dist.ProcessGroup
    data: dist.ProcessGroup | None
    fds: dict[str, list[int]]
    addresses: list[str]  # own addresses used
    limit: timedelta
    ignore_port: int | None
    loopback_bytes: int | None  # None: the run goes over loopback, as asked
    added: tuple[int, int] = (0, 0)
    peers: dict[int, int] = field(default_factory=dict)  # neighbour's rank -> descriptor
    before: dict[int, tcp.Counters] = field(default_factory=dict)

    def barrier(self) -> None:
        dist.barrier(group=self.world)

    def subgroup(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """A group of these ranks of every pipeline, for an exchange of its own; None on a rank that is not in it.
        Every rank must call it, in the same order."""
        mine = None
        for start in range(0, self.ranks * self.groups, self.ranks):
            before = tcp.connections(ignore_port=self.ignore_port)
            made = dist.new_group([start + rank for rank in ranks], timeout=self.limit, backend="gloo")
            if made is not dist.GroupMember.NON_GROUP_MEMBER:
                mine = made
                grown = tcp.connections(ignore_port=self.ignore_port)
                self.fds["shared"] = [*self.fds.get("shared", []), *(fd for fd in grown if fd not in before)]
        return mine

    def probe(self, pairs: Sequence[tuple[int, int]]) -> None:
        """A message each way with each neighbour: which connection is whose, and what gloo adds to a message.

        pairs: the ranks of a pipeline that exchange frames, the same on every rank."""
        for pair in pairs:
            if self.rank in pair:
                peer, fd = self._exchange_probe(self.frames, "frames", self.rank, pair)
                self.peers[peer] = fd
        if not pairs and self.data is not None:
            place, size = dist.get_rank(self.data), dist.get_world_size(self.data)
            for low in range(size - 1):
                if place in (low, low + 1):
                    self._exchange_probe(self.data, "data", place, (low, low + 1))

    def _exchange_probe(self, group: dist.ProcessGroup, name: str, rank: int, pair: tuple[int, int]) -> tuple[int, int]:
        """(the other one's rank in `group`, the connection to it); notes what gloo added each way."""
        message = torch.zeros(_PROBE_BYTES, dtype=torch.uint8)
        low, high = pair
        peer = high if rank == low else low
        fd = -1
        for sends in (rank == low, rank != low):
            before = self._sent(name)
            if sends:
                dist.send(message, group=group, group_dst=peer, tag=2**20)
            else:
                dist.recv(message, group=group, group_src=peer, tag=2**20)
            fd, grown = self._grown(name, before, _PROBE_BYTES if sends else 1)
            sent, received = self.added
            self.added = (grown - _PROBE_BYTES, received) if sends else (sent, grown)
        return peer, fd

    def _sent(self, name: str) -> dict[int, int]:
        # On a busy machine even a probe may be sent twice.
        counters = {fd: tcp.read(fd) for fd in self.fds[name]}
        return {fd: c.bytes_sent - c.bytes_retrans for fd, c in counters.items()}

    def _grown(self, name: str, before: dict[int, int], least: int) -> tuple[int, int]:
        """The connection whose counter grew, and by how much, once it has settled."""
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline:
            tcp.drain(list(before), 10.0)
            grown = {fd: count - before[fd] for fd, count in self._sent(name).items() if count > before[fd]}
            if len(grown) == 1 and next(iter(grown.values())) >= least:
                return next(iter(grown.items()))
            time.sleep(0.001)
        raise RunError(f"rank {self.rank}: a probe message of {least} B did not show on exactly one connection")

    def start(self) -> None:
        """Counters are read from here."""
        self.before = {fd: tcp.read(fd) for fds in self.fds.values() for fd in fds}

    def settle(self, channels: Sequence[Channel], data: Traffic, limit_s: float) -> dict[str, Any]:
        """Wait until all has left, hold the frames against TCP's counters, and report them.

        data: what the exchange between data groups was to send. Raises RunError when a connection's bytes are not what
        the frames, or that, say, or when loopback carried anything.
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
                    f"{expected[peer]} B" + (_OVERFLOW if found > expected[peer] else "")
                )
        loopback = 0 if self.loopback_bytes is None else tcp.loopback_bytes() - self.loopback_bytes
        if loopback:
            raise RunError(f"rank {self.rank}: {loopback} B went over loopback, past the shaped link")
        sent = {
            name: sum(grown[fd].bytes_sent - grown[fd].bytes_retrans for fd in fds) for name, fds in self.fds.items()
        }
        due = data.on_the_wire(self.added)
        if sent.get("data", 0) != due:
            raise RunError(
                f"rank {self.rank}: TCP sent {sent.get('data', 0)} B between data groups, but the exchange's formula "
                f"gives {due} B" + (_OVERFLOW if sent.get("data", 0) > due else "")
            )
        return {
            "tcp_bytes": sum(c.bytes_sent for c in grown.values()),
            "segments": sum(c.segments_out for c in grown.values()),
            "retransmitted_bytes": sum(c.bytes_retrans for c in grown.values()),
            "sync_bytes": sum(count for name, count in sent.items() if name != "frames"),
            "data_bytes": sent.get("data", 0),
            "shared_bytes": sent.get("shared", 0),
            "gloo_added_bytes": sum(self.added),
        }


def join(rendezvous: str, interface: str, rank: int, world_size: int, limit_s: float, *, groups: int = 1) -> Links:
    """Join the run's process groups, bound to `interface`: `groups` pipelines of world_size / groups ranks each.

    rendezvous: a file all ranks see, or tcp://HOST:PORT of rank 0. Raises RunError when a connection is not on that
    interface: on one machine loopback would work, unshaped.
    """
    store, port = _store(rendezvous, rank, world_size, timedelta(seconds=limit_s))
    over_loopback = interface == "lo"
    # Rank 0 reaches its own rendezvous over loopback, and whatever else runs there is counted too: only in a lab, whose
    # hosts run nothing else, does the counter say anything.
    loopback = None if over_loopback or port is not None else tcp.loopback_bytes()
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    limit = timedelta(seconds=limit_s)
    ranks = world_size // groups
    fds: dict[str, list[int]] = {}
    taken: dict[int, tuple[str, str]] = {}

    def claim(name: str, size: int) -> None:
        """Note the connections that have just been made as the group's."""
        found = tcp.connections(ignore_port=port)
        new = [fd for fd in found if fd not in taken]
        if len(new) != size - 1:
            raise RunError(f"rank {rank}: expected {size - 1} connections of group {name}, found {len(new)}")
        if not over_loopback and any(_is_loopback(address) for fd in new for address in found[fd]):
            raise RunError(f"rank {rank}: gloo connected over loopback, not over {interface}")
        taken.update({fd: found[fd] for fd in new})
        fds.setdefault(name, []).extend(new)

    def form(name: str, members: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """The one of these groups that this rank is in."""
        mine = None
        for ranks in members:
            made = dist.new_group(list(ranks), timeout=limit, backend="gloo")
            if rank in ranks:
                mine = made
                claim(name, len(ranks))
        assert mine is not None
        return mine

    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    except (RuntimeError, dist.DistError) as error:
        raise RunError(
            f"rank {rank}: not all of {world_size} ranks came within {limit_s:.0f} s, or one came twice "
            f"({str(error).splitlines()[0]})"
        ) from error
    first = dist.distributed_c10d._get_default_group()
    pipelines = [range(start, start + ranks) for start in range(0, world_size, ranks)]
    data = None
    if groups == 1:
        claim("frames", world_size)
        frames, world = first, form("sync", pipelines)
        pipe = world
    else:
        claim("sync", world_size)
        world = first
        frames, pipe = form("frames", pipelines), form("sync", pipelines)
        data = form("data", [range(place, world_size, ranks) for place in range(ranks)])
    own = sorted({local for local, _ in taken.values()})
    return Links(rank % ranks, ranks, groups, frames, pipe, world, data, fds, own, limit, port, loopback)


def _store(rendezvous: str, rank: int, world_size: int, limit: timedelta) -> tuple[dist.Store, int | None]:
    if not rendezvous.startswith("tcp://"):
        return dist.FileStore(rendezvous, world_size), None
    where = urlsplit(rendezvous)
    if where.hostname is None or where.port is None:
        raise UserError(
            f"{rendezvous!r} is no rendezvous: give tcp://HOST:PORT, rank 0's address and a free port there"
        )
    try:
        # Rank 0 does not wait here: with a limit of its own the group's start says who is missing.
        store = dist.TCPStore(where.hostname, where.port, world_size, rank == 0, timeout=limit, wait_for_workers=False)
    except (RuntimeError, OSError) as error:
        if "EADDRINUSE" in str(error):
            raise UserError(f"rank {rank}: port {where.port} is in use; choose another for tcp://HOST:PORT") from error
        raise RunError(
            f"rank {rank}: no rendezvous at {rendezvous} within {limit.total_seconds():.0f} s "
            f"({str(error).splitlines()[0]}); rank 0 must run there, and its port be free and reachable"
        ) from error
    return store, where.port


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
