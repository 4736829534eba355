"""Entropy coding of small whole numbers: the interface of rans.py for codecs. numpy arrays in and out.

    counts = count(symbols)
    length = encode(symbols, counts, out)       None where `out` is too short
    wide = decode(out[:length], symbols)        CodecError where that cannot be a stream of encode's

Symbols are int8, coded one by one with the frequencies of the message itself, which the stream holds. It is within a
few bytes of `ideal_bytes`. Symbol -128 (rans.WIDE) is dear, 8 bits more than its frequency asks: mark with it what has
no code and follows elsewhere. A stream has no length of its own: it is as long as what `decode` is given.
"""

from __future__ import annotations

import threading
import time

import numpy as np

from thinpipe.harness.compression.kernels import rans
from thinpipe.harness.errors import CodecError

_local = threading.local()


def scratch(count: int) -> np.ndarray:
    """Room for `count` symbols, this thread's own until its next call; kept, so that a step allocates nothing."""
    kept: np.ndarray | None = getattr(_local, "symbols", None)
    if kept is None or kept.size < count:
        kept = _local.symbols = np.empty(count, np.int8)
    return kept[:count]


def count(symbols: np.ndarray) -> np.ndarray:
    """How often each symbol occurs: int64 [256], a negative one at its value + 256."""
    counts = np.empty(256, np.int64)
    rans.count(symbols, counts)
    return counts


def ideal_bytes(counts: np.ndarray) -> float:
    """The entropy of what is coded and the side information, in bytes: table and escaped symbols.

    What `encode` adds to it comes from rounding frequencies, and two bytes for each of eight states.
    """
    size = int(counts.sum())
    lo, hi = rans.table_range(counts, size)
    coded = np.array([counts[s & 255] for s in range(lo, hi + 1)])
    escapes = size - int(coded.sum())
    shares = np.array([c for c in (escapes, *coded) if c > 0]) / size
    bits = -float((shares * np.log2(shares)).sum()) * size
    return bits / 8 + rans.table_size(counts, size) + escapes


def cost(counts: np.ndarray) -> float:
    """Bytes that `encode` will need for symbols with these counts at most; it may be up to 16 fewer."""
    return float(rans.cost(counts, int(counts.sum())))


def encode(symbols: np.ndarray, counts: np.ndarray, out: np.ndarray) -> int | None:
    """Write the stream of `symbols` (one or more) into `out` (uint8); its length, None where it would not fit."""
    return int(rans.encode(symbols, counts, out)) or None


def decode(payload: np.ndarray, symbols: np.ndarray) -> int:
    """Fill `symbols` from a stream of its exact length; returns how many are -128.

    Raises CodecError where the table does not add up, or not every byte is used to the last state's rest.
    """
    wide = int(rans.decode(payload, symbols))
    if wide < 0:
        raise CodecError("the payload is malformed: its entropy-coded part cannot be decoded")
    return wide


def warm_up() -> float:
    """Compile, or load from disk, all of rans.py, so that processes forked later need not; seconds it took."""
    start = time.perf_counter()
    x, view, symbols, counts = np.ones(64, np.float32), (1, 64, 1, 0, 0, 0), scratch(64), np.empty(256, np.int64)
    rms, step, out = np.empty(1), np.empty(1, np.float32), np.zeros(512, np.uint8)
    rans.measure(x, view, 64, rms)
    rans.scales(rms, 1.0, out[:2], step)
    rans.read_scales(out[:2], step)
    rans.quantise(x, step, view, np.float32(0.5), symbols, counts)
    rans.take_wide(symbols, x, out[:0])
    rans.put_wide(symbols, out[:0], x)
    length = encode(symbols, counts, out)
    decode(out[:length], symbols)
    rans.dequantise(symbols, step, view, x)
    rans.get_number(out[: rans.put_number(300, out)])
    ideal_bytes(counts)
    cost(counts)
    count(symbols)
    rans.sample(x, rms, view, 1, x.copy())
    rans.finest(x, np.float32(0.5), 1.0)
    return time.perf_counter() - start
