"""The contracts of a codec and of a memory, and the context both are given.

    x ──encode(x, ctx, out)──▶ out[:n] ──wire──▶ decode(payload, ctx, out) ──▶ tensor of ctx.shape

Both ends hold an instance of the same compressor, made from the same text (grammar.py). Most codecs have no state
between messages; one that has (a fitted codebook) is `Stateful`. A memory wraps a codec and keeps state between
visits: `shared` (both ends hold the same and update it from decoded values only) or `sender` (the receiver holds
nothing).

Buffers are given by the caller, so that nothing is allocated on the path of a step: `encode` writes into the
first bytes of a uint8 tensor of at least `max_bytes(shape)` and says how many it wrote; `decode` fills a float32
tensor. Side information (scales, codebooks) comes first in the payload, then the codes.
"""

from __future__ import annotations

import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Context:
    """What both ends know about a message without being told.

    shape: of the tensor, first axis = sample; dtype: of the tensor handed to encode and back from decode;
    sample_ids: one int per row of the first axis, the row's identity in the data set (() = unknown: a memory keyed
    by sample refuses); seed: of the run; peer: what this micro-batch's forward message was decoded to, float32 of the
    same shape and equal at both ends; given to backward compressors whose `uses_peer` is set, else None.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    step: int = 0
    microbatch: int = 0
    boundary: int = 0
    direction: Direction = "forward"
    sample_ids: tuple[int, ...] = ()
    training: bool = True
    seed: int = 0
    peer: torch.Tensor | None = None

    def key(self, purpose: str = "") -> int:
        """A 64-bit key for a counter-based generator: the same at both ends, on a rerun and on recomputation."""
        head = struct.pack("<qqqq", self.seed, self.step, self.microbatch, self.boundary)
        text = f"{self.direction}/{self.training}/{purpose}".encode()
        return int.from_bytes(hashlib.blake2b(head + text, digest_size=8).digest(), "little")

    def rows(self, index: list[int]) -> Context:
        """The context of some rows of this message: a memory splits seen from unseen samples."""
        ids = tuple(self.sample_ids[i] for i in index) if self.sample_ids else ()
        peer = None if self.peer is None else self.peer[index]
        return replace(self, shape=(len(index), *self.shape[1:]), sample_ids=ids, peer=peer)


class Steered:
    """What a codec is besides whose bytes can be steered at the sender (harness/rate_control.py); its text says so by
    `uses: steering`. It codes in steps of value x multiplier, in units of the message's own RMS, and a payload says all
    that a receiver needs."""

    value: float
    multiplier: float = 1.0
    #: Of the last message encoded: the mean of its squares.
    mean_square: float = 0.0
    #: Whether this instance's options let it be steered.
    steers: bool = True


class Compressor(ABC):
    """What a channel holds: a codec, or a memory around one. `name` is the canonical text (grammar.py)."""

    name: str
    #: none: nothing kept. shared: equal at both ends, compared by digest. sender: kept by the sender only.
    state: ClassVar[Literal["none", "shared", "sender"]] = "none"
    #: Set by the channel on sampled steps: `encode` then fills `diagnostics` with what it knows of
    #: rel_error (|decoded - x| / |x|), clip_fraction, mean_abs_change (mean |x - last visit's decoded value|,
    #: over rows seen before). Costs time; off otherwise.
    diagnose: bool = False
    diagnostics: dict[str, float]
    #: Whether it reads Context.peer. A wrapper has it of what it wraps.
    uses_peer: bool = False

    def steered(self) -> list[Steered]:
        """The codecs in it whose bytes can be steered, through wrappers and memories."""
        if isinstance(self, Steered):
            return [self] if self.steers else []
        inside = getattr(self, "codec", None)
        return inside.steered() if isinstance(inside, Compressor) else []

    @abstractmethod
    def encode(self, x: torch.Tensor, ctx: Context, out: torch.Tensor) -> int:
        """Write the payload of `x` (float, ctx.shape, any strides) into `out` (uint8, 1-D); return its length.

        Raises DivergedError when x holds a non-finite value (state is left as it was).
        """

    @abstractmethod
    def decode(self, payload: torch.Tensor, ctx: Context, out: torch.Tensor) -> torch.Tensor:
        """Fill `out` (float32, contiguous, ctx.shape) from `payload` (uint8, 1-D, its exact length); return `out`.

        Raises CodecError when the payload cannot be one of this compressor's: never reads out of bounds.
        """

    def encode_decoded(self, x: torch.Tensor, ctx: Context, out: torch.Tensor, decoded: torch.Tensor) -> int:
        """`encode`, and fill `decoded` (float32, ctx.shape) with what the other end will make of the payload.

        Bytes and state are those of `encode`. A memory overrides it: its `decode` would move its state twice.
        """
        total = self.encode(x, ctx, out)
        self.decode(out[:total], ctx, decoded)
        return total

    @abstractmethod
    def max_bytes(self, shape: tuple[int, ...]) -> int:
        """The most bytes `encode` may write for a tensor of `shape`, whatever it holds."""

    def num_bytes(self, shape: tuple[int, ...]) -> int | None:
        """The exact payload length where it follows from the shape alone, else None."""
        return None


class Codec(Compressor):
    """A compressor of single messages. Subclasses take their argument and options as keyword arguments.

    One that keeps something between messages is `Stateful` too, with state = "shared". It takes no part in
    evaluation: messages of ctx.training False neither use nor change what is kept. Decoding one's own payload
    right after `encode` changes nothing, since memories and diagnosis do that.
    """


class Stateful(ABC):
    """What has to be saved with a checkpoint."""

    @abstractmethod
    def digest(self) -> int:
        """64-bit digest of the shared state, equal at both ends whenever their states are equal; cheap to keep."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on after a restart (tensors and plain values)."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""


class Memory(Compressor, Stateful):
    """A compressor that keeps state between messages, around an inner codec (whose state, if any, it saves too)."""

    codec: Any

    @abstractmethod
    def observe(self, decoded: torch.Tensor, ctx: Context) -> None:
        """Take note of a message that crossed by another compressor (warm-up): `decoded` is what both ends hold."""

    @abstractmethod
    def state_bytes(self, num_samples: int, shape: tuple[int, ...], microbatches: int = 1) -> int:
        """Bytes one end will hold in RAM for `num_samples` samples in messages of `shape`, `microbatches` of them a
        step. (A run is refused by harness/memory.py's forecast of it, which imports no torch.)"""

    def prefetch(self, contexts: Sequence[Context]) -> None:
        """These messages come next, in this order: rows that lie on disk may be read ahead. Nothing by default."""
