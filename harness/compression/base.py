"""The contracts of a codec and of a memory, and the context both are given.

    x ──encode(x, ctx, out)──▶ out[:n] ──wire──▶ decode(payload, ctx, out) ──▶ tensor of ctx.shape

Both ends hold an instance of the same compressor, made from the same text (grammar.py). A codec has no state
between messages. A memory wraps a codec and keeps state between visits: `shared` (both ends hold the same and
update it from decoded values only) or `sender` (the receiver holds nothing).

Buffers are given by the caller, so that nothing is allocated on the path of a step: `encode` writes into the
first bytes of a uint8 tensor of at least `max_bytes(shape)` and says how many it wrote; `decode` fills a float32
tensor. Side information (scales, codebooks) comes first in the payload, then the codes.
"""

from __future__ import annotations

import hashlib
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Context:
    """What both ends know about a message without being told.

    shape: of the tensor, first axis = sample; dtype: of the tensor handed to encode and back from decode;
    sample_ids: one int per row of the first axis, the row's identity in the data set (() = unknown: a memory keyed
    by sample refuses); seed: of the run; peer: this micro-batch's decoded forward tensor, where it exists.
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
        ids = tuple(self.sample_ids[i] for i in index)
        return replace(self, shape=(len(index), *self.shape[1:]), sample_ids=ids, peer=None)


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

    @abstractmethod
    def max_bytes(self, shape: tuple[int, ...]) -> int:
        """The most bytes `encode` may write for a tensor of `shape`, whatever it holds."""

    def num_bytes(self, shape: tuple[int, ...]) -> int | None:
        """The exact payload length where it follows from the shape alone, else None."""
        return None


class Codec(Compressor):
    """A stateless compressor. Subclasses take their argument and options as keyword arguments."""


class Memory(Compressor):
    """A compressor that keeps state between messages, around an inner codec."""

    codec: Compressor

    @abstractmethod
    def observe(self, decoded: torch.Tensor, ctx: Context) -> None:
        """Take note of a message that crossed by another compressor (warm-up): `decoded` is what both ends hold."""

    @abstractmethod
    def state_bytes(self, num_samples: int, shape: tuple[int, ...]) -> int:
        """Bytes one end will hold for `num_samples` samples in messages of `shape`; checked before a run starts."""

    @abstractmethod
    def digest(self) -> int:
        """64-bit digest of the shared state, equal at both ends whenever their states are equal; cheap to keep."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on after a restart (tensors and plain values)."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
