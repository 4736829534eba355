"""The definition of the entropy-coded grid, in plain torch and Python. rans.py gives the same bytes, fast.

    rms     = sqrt(mean of x^2) over a scale's elements. Magnitudes are first rounded to integers of at most 2^15,
              x 2^(14 - e), 2^e being the power of two at or below max|x| (e at least -112): sums of their squares are
              exact in 64 bits, so every order of summation, on every device, gives the same RMS. The rounding adds
              at most 2^-28 / 12 of max|x|^2 to the mean square: 0.03 % of it if one of a million elements is all.
    step    = factor x rms in float64, rounded to float32 and to bf16 (nearest even); none where below 2^-126
    symbol  = sign(x) floor(|x| / step + bias) in float32; -128 where that is beyond +-127; 0 where there is no step
    decoded = symbol x step, at most the largest float32; x itself for -128

    payload = 1, steps (bf16), how many are -128, these as float32, the stream of the symbols (see rans.py);
              or 0, x as float32, where that is not longer

Of the coder: a state s takes a symbol of frequency f whose slots begin at b by s' = 4096 (s // f) + s % f + b, after
shedding its low 16 bits if s >= 2^20 f; states rest at 2^16.
"""

from __future__ import annotations

import struct
from collections import Counter
from itertools import accumulate

import torch

from thinpipe.harness.compression.kernels.layout import BF16_MAX, Layout
from thinpipe.harness.compression.kernels.reference import amax, spread
from thinpipe.harness.errors import CodecError

_LANES, _TOTAL, _RARE, _REST = 8, 4096, 16384, 1 << 16


def root_mean_square(x: torch.Tensor, where: Layout) -> torch.Tensor:
    """float64 [num_scales] of x (float32, where.numel elements, one or more). Raises DivergedError as `amax` does."""
    exponent = ((amax(x, where).view(torch.int32) >> 23) - 127).clamp(min=-112)
    factor = ((14 - exponent + 127) << 23).view(torch.float32)
    values = x.reshape(where.outer, where.middle, where.inner)
    squares = (values * spread(factor, where)).round().to(torch.int64).square()
    axes = [axis for axis, stride in enumerate((where.so, where.sm, where.si)) if stride == 0]
    total = (squares.sum(dim=axes) if axes else squares).reshape(-1)
    mean = total.double() / torch.full((), where.numel // where.num_scales, dtype=torch.float64)
    return mean.sqrt() / factor.double()


def steps(rms: torch.Tensor, factor: float) -> torch.Tensor:
    """bf16 [num_scales], 0 for none."""
    wanted = (factor * rms).clamp(max=BF16_MAX)
    return torch.where(wanted < 2.0**-126, 0.0, wanted.float()).to(torch.bfloat16)


def quantise(x: torch.Tensor, step: torch.Tensor, where: Layout, bias: float) -> torch.Tensor:
    """int8 symbols, flat; `step` as `steps` gives it."""
    values = x.reshape(where.outer, where.middle, where.inner)
    divisor = spread(torch.where(step > 0, step.float(), torch.inf), where)
    level = (values.abs() / divisor + torch.full((), bias)).clamp(max=128.0).floor()
    signed = torch.where(values < 0, -level, level).to(torch.int64).view(-1)
    return torch.where(signed.abs() > 127, -128, signed).to(torch.int8)


def dequantise(symbols: torch.Tensor, step: torch.Tensor, where: Layout, wide: torch.Tensor) -> torch.Tensor:
    """float32, flat; `wide`: the values of the symbols -128, in order."""
    level = symbols.view(where.outer, where.middle, where.inner).float() * spread(step.float(), where)
    largest = torch.finfo(torch.float32).max
    return level.clamp(-largest, largest).view(-1).masked_scatter(symbols == -128, wide)


def encode(x: torch.Tensor, where: Layout, factor: float, bias: float) -> bytes:
    """The payload of x (float32, one element or more) with steps of `factor` RMS."""
    step = steps(root_mean_square(x, where), factor)
    symbols = quantise(x, step, where, bias)
    wide = x.reshape(-1)[symbols == -128]
    coded = b"\1" + _raw(step) + number(wide.numel()) + _raw(wide) + encode_symbols(symbols.tolist())
    return coded if len(coded) < 1 + 4 * x.numel() else b"\0" + _raw(x)


def _raw(x: torch.Tensor) -> bytes:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


# ---- symbols, as Python numbers ---------------------------------------------------------------------------------


def number(value: int) -> bytes:
    """7 bits a byte, lowest first, the eighth set where more follow."""
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + number(rest) if rest else bytes([low])


def table(symbols: list[int]) -> tuple[int, int, list[int]]:
    """(lo, hi, frequencies of the escape and of lo..hi).

    lo..hi spans the symbols but -128, without those at its ends that make up less than 1 in 16384. Frequencies are
    4096 count / size to the nearest, at least 1 for what occurs; the first of the largest gets what is missing to
    4096, and what is too much is taken from the largest, one by one. No one gets all: where lo and hi are the same,
    it and the escape have a slot each at least.
    """
    size, count = len(symbols), Counter(symbols)
    kept = sorted(count.keys() - {-128}) or [0]
    while kept[0] < kept[-1] and count[kept[0]] * _RARE < size:
        kept.pop(0)
    while kept[0] < kept[-1] and count[kept[-1]] * _RARE < size:
        kept.pop()
    lo, hi = kept[0], kept[-1]
    inside = [count[s] for s in range(lo, hi + 1)]
    counts = [size - sum(inside), *inside]
    needed = [1 if c or lo == hi else 0 for c in counts]
    frequency = [max(n, (c * _TOTAL + size // 2) // size) for n, c in zip(needed, counts, strict=True)]
    missing = _TOTAL - sum(frequency)
    frequency[frequency.index(max(frequency))] += max(0, missing)
    for _ in range(-missing):
        frequency[frequency.index(max(frequency))] -= 1
    return lo, hi, frequency


def encode_symbols(symbols: list[int]) -> bytes:
    """The stream of one symbol or more, each -128..127."""
    lo, hi, frequency = table(symbols)
    start = [0, *accumulate(frequency)]
    states, words = [_REST] * _LANES, []
    for i in reversed(range(len(symbols))):
        t = symbols[i] - lo + 1 if lo <= symbols[i] <= hi else 0
        state = states[i % _LANES]
        if state >= frequency[t] << 20:
            words.append(state & 0xFFFF)
            state >>= 16
        states[i % _LANES] = state // frequency[t] * _TOTAL + state % frequency[t] + start[t]
    escapes = [s for s in symbols if not lo <= s <= hi]
    head = struct.pack("bb", lo, hi) + b"".join(map(number, frequency)) + number(len(escapes))
    return head + struct.pack(f"<{len(escapes)}b{len(words)}H{_LANES}I", *escapes, *words, *states)


def decode_symbols(payload: bytes, size: int) -> list[int]:
    """`size` symbols from their stream. Raises CodecError where it is none."""
    try:
        return _decode_symbols(payload, size)
    except (IndexError, ValueError, struct.error):
        raise CodecError("the payload is malformed: its entropy-coded part cannot be decoded") from None


def _decode_symbols(payload: bytes, size: int) -> list[int]:
    lo, hi = struct.unpack_from("bb", payload)
    if not -127 <= lo <= hi:
        raise ValueError
    frequency, rest = [], payload[2:]
    for _ in range(hi - lo + 2):
        value, rest = _take_number(rest)
        frequency.append(value)
    escapes, rest = _take_number(rest)
    if sum(frequency) != _TOTAL or max(frequency) == _TOTAL or escapes > size:
        raise ValueError
    escaped, rest, end = list(struct.unpack_from(f"{escapes}b", rest)), rest[escapes:], len(rest) - escapes
    words = list(struct.unpack(f"<{(end - 4 * _LANES) // 2}H", rest[: end - 4 * _LANES]))
    states = list(struct.unpack(f"<{_LANES}I", rest[end - 4 * _LANES :]))
    if min(states) < _REST:
        raise ValueError
    slots = [t for t, f in enumerate(frequency) for _ in range(f)]
    start, symbols = [0, *accumulate(frequency)], []
    for i in range(size):
        state = states[i % _LANES]
        t = slots[state % _TOTAL]
        state = frequency[t] * (state // _TOTAL) + state % _TOTAL - start[t]
        states[i % _LANES] = state << 16 | words.pop() if state < _REST else state
        symbols.append(lo + t - 1 if t else escaped.pop(0))
    if words or escaped or states != [_REST] * _LANES:
        raise ValueError
    return symbols


def _take_number(source: bytes) -> tuple[int, bytes]:
    value = 0
    for at in range(5):
        value |= (source[at] & 127) << 7 * at
        if source[at] < 128:
            if at and not source[at]:
                raise ValueError
            return value, source[at + 1 :]
    raise ValueError
