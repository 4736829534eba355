"""A frame: 64 header bytes and the payload, exactly as they cross the link in one message.

    offset  0  u16 magic      2  u8 version   3  u8 flags (bit 0 backward, bit 1 evaluation, bit 2 digest valid)
            4  u16 boundary   6  u16 microbatch          8  u32 step        12  u32 compressor (hash of its text)
           16  u8 dtype      17  u8 ndim     18  u16 0  20  u32 payload length
           24  u64 hash of the sample ids   32  u64 digest of the sender's shared memory
           40  u64 XXH3-64 of every other byte of the frame
           48  4 x u32 shape                64  payload: side information, then codes

Little-endian. Everything a receiver could disagree about is in the header, so a mismatch is named, not decoded.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from functools import lru_cache

import xxhash

from thinpipe.harness.errors import FrameError

HEADER_BYTES = 64
MAGIC = 0x7468
VERSION = 1
MAX_PAYLOAD = 2**32 - 1
DTYPES = ("float32", "float16", "bfloat16")
_LAYOUT = struct.Struct("<HBBHHIIBBHIQQQ4I")
_CHECKSUM = slice(40, 48)
assert _LAYOUT.size == HEADER_BYTES


@dataclass(frozen=True)
class Header:
    """What a frame says of its payload. digest None = not compared in this frame."""

    backward: bool
    evaluation: bool
    boundary: int
    microbatch: int
    step: int
    compressor: int
    dtype: str
    shape: tuple[int, ...]
    ids_hash: int
    digest: int | None = None


@lru_cache(maxsize=256)
def compressor_id(text: str) -> int:
    """32-bit id of a compressor's canonical text."""
    return xxhash.xxh3_64_intdigest(text.encode()) & 0xFFFFFFFF


@lru_cache(maxsize=4096)
def ids_hash(ids: tuple[int, ...]) -> int:
    """64-bit hash of the sample ids of a message, order included."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(ids)}q", *ids))


def seal(buffer: memoryview, header: Header, payload_bytes: int) -> int:
    """Write the header into `buffer[:64]`, before the payload that is there already; return the frame's length.

    Raises FrameError when the frame would not fit the buffer (the receiver posted one of the same size, and a longer
    message would abort it) or a field its place.
    """
    total = HEADER_BYTES + payload_bytes
    if not 0 <= payload_bytes <= MAX_PAYLOAD or total > len(buffer):
        raise FrameError(f"a payload of {payload_bytes} B does not fit the posted {len(buffer) - HEADER_BYTES} B")
    if not 1 <= len(header.shape) <= 4:
        raise FrameError(f"a frame carries tensors of 1 to 4 dimensions, not {len(header.shape)}")
    flags = header.backward | header.evaluation << 1 | (header.digest is not None) << 2
    shape = (*header.shape, 0, 0, 0)[:4]
    _LAYOUT.pack_into(
        buffer, 0, MAGIC, VERSION, flags, header.boundary, header.microbatch, header.step, header.compressor,
        DTYPES.index(header.dtype), len(header.shape), 0, payload_bytes, header.ids_hash, header.digest or 0, 0, *shape,
    )  # fmt: skip
    buffer[_CHECKSUM] = _checksum(buffer, total).to_bytes(8, "little")
    return total


def unseal(buffer: memoryview, expected: Header) -> tuple[int, int | None]:
    """Check the frame at the start of `buffer` against `expected` (its digest is not compared here).

    Returns (payload length, sender's digest or None). Raises FrameError naming the first thing that differs.
    """
    if len(buffer) < HEADER_BYTES:
        raise FrameError(f"{len(buffer)} B cannot hold a frame")
    (
        magic, version, flags, boundary, microbatch, step, compressor, dtype, ndim, _, length, ids, digest, checksum,
        *shape,
    ) = _LAYOUT.unpack_from(buffer)  # fmt: skip
    if magic != MAGIC or version != VERSION:
        raise FrameError(f"not a frame of version {VERSION} (magic {magic:#06x}, version {version}): corrupted")
    total = HEADER_BYTES + length
    if total > len(buffer) or not 1 <= ndim <= 4 or dtype >= len(DTYPES):
        raise FrameError(f"the header is corrupted (length {length}, {ndim} dimensions, dtype {dtype})")
    if _checksum(buffer, total) != checksum:
        raise FrameError("the checksum does not match: the frame was corrupted on its way")
    found = Header(
        bool(flags & 1), bool(flags & 2), boundary, microbatch, step, compressor, DTYPES[dtype],
        tuple(shape[:ndim]), ids,
    )  # fmt: skip
    for field in fields(Header):
        want, got = getattr(expected, field.name), getattr(found, field.name)
        if field.name != "digest" and want != got:
            raise FrameError(f"{_SAYS.get(field.name, field.name)}: expected {want}, the frame has {got}")
    return length, digest if flags & 4 else None


_SAYS = {
    "ids_hash": "the two ends disagree about the samples of this micro-batch (hash of sample ids)",
    "compressor": "the two ends disagree about the compressor (hash of its text)",
}


def _checksum(buffer: memoryview, total: int) -> int:
    state = xxhash.xxh3_64(buffer[: _CHECKSUM.start])
    state.update(buffer[_CHECKSUM.stop : total])
    return state.intdigest()
