"""One boundary, one direction, one end: compressor, frames, receives posted ahead, counters.

         sender                                       receiver
    begin_step                                   begin_step: posts M receives into buffers of max_bytes
    send(i, x): encode ▸ seal ▸ isend  ── frame ──▶  receive(i): wait ▸ unseal ▸ decode
    finish_step: waits until all have left       finish_step: nothing is left to wait for

gloo moves bytes only into a posted receive, so posting ahead is what lets transfer overlap compute; a shorter frame
than the posted buffer is fine, a longer one would abort the receiver, so `seal` refuses it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from thinpipe.harness import frame
from thinpipe.harness.compression.base import Compressor, Context, Direction, Memory, Stateful
from thinpipe.harness.errors import CodecError, DivergedError, FrameError, PeerError
from thinpipe.harness.rate_control import Meter
from thinpipe.harness.recorder import Recorder, now


@dataclass(frozen=True)
class Policy:
    """How a channel watches itself. Every `digest_every` steps shared memories are compared, every `sample_every`
    steps (0 = never) the first micro-batch's error is measured; no wait lasts longer than `limit_s`."""

    digest_every: int = 8
    sample_every: int = 4
    limit_s: float = 300.0


@dataclass
class Traffic:
    """What one step sent. Bytes as in docs/numbers.md."""

    compressor: str
    messages: int = 0
    raw_bytes: int = 0
    payload_bytes: int = 0
    frame_bytes: int = 0
    samples: dict[str, float] = field(default_factory=dict)

    def add(self, other: Traffic) -> None:
        """Count another pass of the same step."""
        self.messages += other.messages
        self.raw_bytes += other.raw_bytes
        self.payload_bytes += other.payload_bytes
        self.frame_bytes += other.frame_bytes
        self.samples |= other.samples


class Channel:
    """One end of one direction of one boundary.

    peer: the other end's rank in `group`; compressors: text -> instance for every text the schedule may name, built
    by the caller; shape: of one micro-batch's tensor; sends: which end this is.
    """

    def __init__(
        self,
        *,
        boundary: int,
        direction: Direction,
        sends: bool,
        rank: int,
        peer: int,
        group: dist.ProcessGroup | None,
        compressors: Mapping[str, Compressor],
        shape: tuple[int, ...],
        microbatches: int,
        seed: int,
        recorder: Recorder,
        policy: Policy = Policy(),
    ):
        self.boundary, self.direction, self.sends = boundary, direction, sends
        self.rank, self.peer, self.group = rank, peer, group
        self.compressors = dict(compressors)
        self.shape, self.seed, self.recorder, self.policy = shape, seed, recorder, policy
        size = frame.HEADER_BYTES + max(c.max_bytes(shape) for c in self.compressors.values())
        self._buffers = [torch.zeros(size, dtype=torch.uint8) for _ in range(microbatches)]
        self._views = [buffer.numpy().data for buffer in self._buffers]
        self._decoded = [] if sends else [torch.zeros(shape) for _ in range(microbatches)]
        self._forward: Channel | None = None
        #: What this end sends is noted here; what a backward message says of an activation's weight, there.
        self.meter: Meter | None = None
        self.informs: Meter | None = None
        self._works: list[Any] = []
        # A tag a micro-batch: some schedules send them in another order than they were numbered in.
        self._tag = (2 * boundary + (direction == "backward")) * microbatches
        self.offset = 0  # number of the first micro-batch in what is recorded: a step may be several passes
        self.messages = self.bytes = 0  # of the whole run, evaluation included: held against the kernel's counters

    @property
    def uses_peer(self) -> bool:
        """Whether any of its compressors codes gradients by the help of the forward tensor."""
        return any(compressor.uses_peer for compressor in self.compressors.values())

    def take_peer_from(self, forward: Channel) -> None:
        """`forward` is this boundary's other direction, on the same rank: what it decoded, or, where it sends, what
        the other end decodes, is this one's Context.peer, micro-batch by micro-batch."""
        self._forward = forward
        if forward.sends and not forward._decoded:
            forward._decoded = [torch.zeros(self.shape) for _ in forward._buffers]

    def begin_step(
        self, step: int, ids: Sequence[tuple[int, ...]], *, training: bool, use: str, watch: Sequence[str] = ()
    ) -> None:
        """Start a step: `ids[i]` are micro-batch i's samples, `use` the compressor's text, `watch` the texts of
        memories that are not in use yet and must take note of what crosses. The receiving end posts its receives."""
        assert not self._works, "finish_step was not called"
        assert len(ids) == len(self._buffers), "as many micro-batches as buffers"
        self._step, self._ids, self._training = step, ids, training
        self._active = self.compressors[use]
        self._watch = [c for text in watch if isinstance(c := self.compressors[text], Memory)] if training else []
        self.traffic = Traffic(use)
        self._received = 0
        if training and isinstance(self._active, Memory):
            self._active.prefetch([self._context(i) for i in range(len(ids))])
        every = self.policy.sample_every
        self._sampled = training and every > 0 and step % every == 0
        if not self.sends:
            self._works = [
                dist.irecv(buffer, group=self.group, tag=self._tag + i, group_src=self.peer)
                for i, buffer in enumerate(self._buffers)
            ]

    def send(self, i: int, x: torch.Tensor) -> None:
        """Encode micro-batch `i`'s tensor (float32, self.shape), frame it and hand it to the network."""
        start = now()
        ctx, active = self._context(i), self._active
        digest = self._digest(i)
        active.diagnose = self._sampled and i == 0
        with self._naming(i):
            body = self._buffers[i][frame.HEADER_BYTES :]
            # What the other end will hold is worked out only for those who ask: gradients' codecs, watching memories.
            decoded = self._decoded[i] if self._decoded else torch.empty(self.shape) if self._watch else None
            if decoded is not None and self._training:
                n = active.encode_decoded(x, ctx, body, decoded)
                for memory in self._watch:
                    memory.observe(decoded, ctx)
            else:
                n = active.encode(x, ctx, body)
            if self.meter is not None and self._training:
                self.meter.sent(active, x.numel(), n)
            total = frame.seal(self._views[i], self._header(i, digest), n)
            if active.diagnose:
                self.traffic.samples = {"mean_abs": float(x.abs().mean()), **active.diagnostics}
        end = now()
        self._works.append(
            dist.isend(self._buffers[i][:total], group=self.group, tag=self._tag + i, group_dst=self.peer)
        )
        self.recorder.span("encode", start, end, self.offset + i, self.direction, boundary=self.boundary)
        self.recorder.span("send", end, now(), self.offset + i, self.direction, boundary=self.boundary)
        self._count(x.numel(), n, total)

    def receive(self, i: int) -> torch.Tensor:
        """Wait for micro-batch `i`'s frame, check and decode it. The tensor is valid until the next step's receive."""
        start = now()
        self._wait(self._works[i], i)
        arrived = now()
        digest = self._digest(i)
        with self._naming(i):
            length, theirs = frame.unseal(self._views[i], self._header(i, None))
            if theirs is not None and digest != theirs:
                raise FrameError(f"the two ends' memories differ (digest {theirs:#x} sent, {digest} here)")
            payload = self._buffers[i][frame.HEADER_BYTES : frame.HEADER_BYTES + length]
            ctx = self._context(i)
            x = self._active.decode(payload, ctx, self._decoded[i])
            check_decoded(x, self._active)
            for memory in self._watch:
                memory.observe(x, ctx)
            if self.informs is not None:
                self.informs.matters(float(x.square().mean()))
        self.recorder.span("wait_receive", start, arrived, self.offset + i, self.direction, boundary=self.boundary)
        self.recorder.span("decode", arrived, now(), self.offset + i, self.direction, boundary=self.boundary)
        self.messages += 1
        self.bytes += frame.HEADER_BYTES + length
        self._received += 1
        return x

    def finish_step(self) -> Traffic:
        """Wait until everything sent has left; what the step sent is returned (nothing at a receiving end)."""
        if self.sends:
            start = now()
            for i, work in enumerate(self._works):
                self._wait(work, i)
            self.recorder.span("wait_send", start, now(), -1, self.direction, boundary=self.boundary)
        else:
            assert self._received == len(self._works), "a posted receive was never taken"
        self._works = []
        return self.traffic

    def digests(self) -> dict[str, str]:
        """Digest of each shared state this end holds, by channel and text."""
        return {
            f"{self.direction}/{self.boundary} {text}": f"{compressor.digest():016x}"
            for text, compressor in self.compressors.items()
            if isinstance(compressor, Stateful) and compressor.state == "shared"
        }

    def _context(self, i: int) -> Context:
        return Context(
            shape=self.shape,
            step=self._step,
            microbatch=i,
            boundary=self.boundary,
            direction=self.direction,
            sample_ids=self._ids[i],
            training=self._training,
            seed=self.seed,
            peer=self._forward._decoded[i] if self._forward and self._active.uses_peer else None,
        )

    def _header(self, i: int, digest: int | None) -> frame.Header:
        return frame.Header(
            backward=self.direction == "backward",
            evaluation=not self._training,
            boundary=self.boundary,
            microbatch=i,
            step=self._step,
            compressor=frame.compressor_id(self._active.name),
            dtype="float32",
            shape=self.shape,
            ids_hash=frame.ids_hash(self._ids[i]),
            digest=digest,
        )

    def _digest(self, i: int) -> int | None:
        """The shared memory's digest before message `i` where this step compares it; equal at both ends by then."""
        due = i == 0 and self._training and self._step % self.policy.digest_every == 0
        if due and isinstance(self._active, Stateful) and self._active.state == "shared":
            return self._active.digest()
        return None

    def _count(self, elements: int, payload: int, total: int) -> None:
        self.traffic.messages += 1
        self.traffic.raw_bytes += 4 * elements
        self.traffic.payload_bytes += payload
        self.traffic.frame_bytes += total
        self.messages += 1
        self.bytes += total

    def _where(self, i: int) -> str:
        mode = "" if self._training else " (evaluation)"
        return f"rank {self.rank}, boundary {self.boundary} {self.direction}, step {self._step}{mode}, micro-batch {i}"

    @contextmanager
    def _naming(self, i: int):
        try:
            yield
        except (CodecError, DivergedError, FrameError) as error:
            raise type(error)(f"{self._where(i)}: {error}") from error

    def _wait(self, work: Any, i: int) -> None:
        try:
            work.wait(timedelta(seconds=self.policy.limit_s))
        except RuntimeError as error:
            verb = "send to" if self.sends else "receive from"
            raise PeerError(
                f"{self._where(i)}: the {verb} rank {self.peer} did not complete within {self.policy.limit_s:.0f} s "
                f"or its process ended ({str(error).splitlines()[0]})"
            ) from error


def check_decoded(x: torch.Tensor, compressor: Compressor) -> None:
    """Raise CodecError when a decoded tensor holds a non-finite value: the sender checked that its input did not.

    The sum is finite only if every element is (overflow of a finite sum is settled by the slower look).
    """
    if not math.isfinite(x.sum().item()) and not bool(torch.isfinite(x).all()):
        raise CodecError(
            f"{compressor.name} decoded a non-finite value from finite input; use a compressor with a wider range"
        )
