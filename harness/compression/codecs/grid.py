"""A uniform grid around zero, entropy-coded: as many levels as the data has, at what they really cost."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from thinpipe.harness.compression.base import Codec, Context, Steered
from thinpipe.harness.compression.kernels import entropy, rans
from thinpipe.harness.compression.kernels.layout import layout
from thinpipe.harness.compression.tensors import dense, own_decoding, raise_if_diverged, relative_error
from thinpipe.harness.errors import CodecError

VERSION = 1
SUMMARY = "uniform quantiser that keeps zero, entropy-coded; step in RMS or chosen for a rate"
SOURCE = "Sullivan, 1996 (IEEE Trans. Inf. Theory 42(5)): entropy-coded scalar quantisation; rANS: Duda, 2013"
FORMULA = "min(value, 32) if by == 'rate' else log2(1 + 17.08 / value ** 2) / 2"
PARAMETERS = {
    "value": {"place": "argument", "type": "float", "min": 0.001, "max": 64.0},
    "by": {"type": "word", "choices": ["step", "rate"], "default": "step", "uses": {"step": ["steering"]}},
    "scale": {"type": "word", "choices": ["tensor", "token", "channel"], "default": "tensor"},
    "dead": {"type": "float", "min": 0.0, "max": 0.5, "default": 0.0},
}
# (1/2 + dead) steps, a step being at most VALUE max|x|, rounded to bf16 (2^-8) and computed in float32.
CONTRACT = {
    "grid:1.0": {"absolute": 0.503, "entropy": True},
    "grid:0.05": {"absolute": 0.0252, "entropy": True},
    "grid:0.5(scale=token, dead=0.2)": {"absolute": 0.352, "entropy": True},
    "grid:2.0(scale=channel)": {"absolute": 1.005, "entropy": True},
    "grid:1.5(by=rate)": {"norm": 1.0, "entropy": True},
    "grid:2.5(by=rate, scale=token, dead=0.5)": {"norm": 1.0, "entropy": True},
}
RAW, CODED = 0, 1
#: Elements looked at to guess the step for a rate.
SAMPLE = 4096


class EntropyCodedGrid(Codec, Steered):
    """level = sign(x) floor(|x| / step + 1/2 - dead), decoded = level x step.

    step: VALUE times the root mean square (RMS) of a scale's elements, in 2 bytes (bf16). dead: moves every threshold
    outwards, in steps, so that the zero bin is 1 + 2 dead wide: fewer bits for more error, the better bargain for
    heavy-tailed data at low rates; 0.5 is the well-known double-width zero bin.

    by=rate: VALUE is the bits an element the whole message may take. One factor for all RMS is searched for it, so
    that the length is within 2 % below; where the shape's side information alone takes more than half of that, the
    levels get the other half and the message is longer. Tensors of few non-zero values stay shorter.

    Levels beyond +-127, and what would not get shorter, are sent as float32, so nothing clips, and no message takes
    more than a byte above 4 an element. Coding is on the CPU: a tensor on a GPU is copied.

    multiplier: for rate control at the sender (budget.py): by=step takes VALUE x multiplier from the next message on;
    by=rate does not use it. The receiver needs not know: scales are sent as steps. mean_square: of the last tensor
    encoded (of its elements, averaged over scales), for the same purpose.
    """

    def __init__(self, *, value: float, by: str = "step", scale: str = "tensor", dead: float = 0.0) -> None:
        self.value, self.by_rate, self.scale = float(value), by == "rate", scale
        self.bias = np.float32(0.5 - dead)
        self.steers = not self.by_rate
        self.diagnostics: dict[str, float] = {}

    def encode(self, x: torch.Tensor, ctx: Context, out: torch.Tensor) -> int:
        if x.numel() == 0:
            return 0
        values = dense(x, ctx).cpu().view(-1).numpy()
        target = out[: self.max_bytes(ctx.shape)]
        written = target.numpy() if out.is_cpu else np.empty(target.numel(), np.uint8)
        total = self._write(values, ctx.shape, written)
        if not out.is_cpu:
            target[:total].copy_(torch.from_numpy(written[:total]))
        if self.diagnose:
            decoded = own_decoding(self, out[:total], ctx)
            self.diagnostics = {"rel_error": relative_error(dense(x, ctx).to(decoded.device), decoded)}
        return total

    def decode(self, payload: torch.Tensor, ctx: Context, out: torch.Tensor) -> torch.Tensor:
        source = payload.cpu().numpy()
        values = out if out.is_cpu else torch.empty(ctx.shape)
        if out.numel():
            self._read(source, ctx.shape, values.view(-1).numpy())
        elif source.size:
            raise CodecError(f"the payload is malformed: {source.size} B where 0 B are due")
        return out if values is out else out.copy_(values)

    def max_bytes(self, shape: tuple[int, ...]) -> int:
        count = math.prod(shape)
        return 1 + 4 * count if count else 0

    def ideal_bytes(self, x: torch.Tensor, ctx: Context) -> float:
        """Bytes of the levels' entropy and of the side information: form, scales, table, what is beyond the levels."""
        values, view = dense(x, ctx).cpu().view(-1).numpy(), _view(ctx.shape, self.scale)
        levels = self._levels(values, view, np.empty(2 * view.scales, np.uint8))
        coded = 1 + 2 * view.scales + 1 + 4 * levels.wide + entropy.ideal_bytes(levels.counts)
        return min(coded, 1.0 + 4 * values.size)

    def _write(self, x: np.ndarray, shape: tuple[int, ...], out: np.ndarray) -> int:
        view = _view(shape, self.scale)
        head = 1 + 2 * view.scales
        levels = self._levels(x, view, out[1:head] if out.size > head else np.empty(head - 1, np.uint8))
        total = _write_coded(levels, out)
        if total is None:
            out[0] = RAW
            out[1:] = x.view(np.uint8)
            return out.size
        return total

    def _levels(self, x: np.ndarray, view: _View, head: np.ndarray) -> _Levels:
        """Steps (stored in `head`), symbols and their counts."""
        assert 0 < self.multiplier < math.inf
        levels = _Levels(
            x,
            view,
            head,
            np.empty(view.scales),
            np.empty(view.scales, np.float32),
            entropy.scratch(x.size),
            np.empty(256, np.int64),
        )
        if not rans.measure(x, view.loops, x.size // view.scales, levels.rms):
            raise_if_diverged(math.inf)
        self.mean_square = float(np.mean(np.square(levels.rms)))
        if self.by_rate:
            self._search(levels)
        else:
            self._quantise(levels, self.value * self.multiplier)
        return levels

    def _quantise(self, to: _Levels, factor: float) -> None:
        rans.scales(to.rms, factor, to.head, to.step)
        rans.quantise(to.x, to.step, to.view.loops, self.bias, to.symbols, to.counts)

    def _search(self, to: _Levels) -> None:
        """Quantise for a rate: steps guessed from a sample, the guess corrected by what the whole tensor takes.

        Lengths are nearly monotone in the step: `fine` was too long and `coarse` fits.
        """
        x, view = to.x, to.view
        side = 2.0 + to.head.size + 4 * rans.LANES
        room = max(self.value / 8 * x.size, self.value / 16 * x.size + side)
        u = np.empty(min(x.size, SAMPLE), np.float32)
        rans.sample(x, to.rms, view.loops, x.size // u.size, u)
        bits, fine, coarse, by = (0.99 * room - side) * 8 / x.size, rans.FINEST, rans.COARSEST, math.inf
        for _ in range(12):
            guess = rans.finest(u, self.bias, bits)
            by = guess if fine < guess < coarse else (fine + coarse) / 2
            self._quantise(to, 2.0**by)
            needs = 2 + to.head.size + 4 * to.wide + entropy.cost(to.counts)
            if needs <= room:
                coarse = by
            else:
                fine = by
            if 0.98 * room <= needs <= room or coarse - fine < 0.005:
                break
            bits -= (needs - 0.99 * room) * 8 / x.size
        if by != coarse:
            self._quantise(to, 2.0**coarse)

    def _read(self, source: np.ndarray, shape: tuple[int, ...], out: np.ndarray) -> None:
        if source.size == 0 or source[0] not in (RAW, CODED):
            raise CodecError("the payload is malformed: it begins with no form of this codec")
        if source[0] == RAW:
            if source.size != 1 + 4 * out.size:
                raise CodecError(f"the payload is malformed: {source.size} B where {1 + 4 * out.size} B are due")
            out.view(np.uint8)[:] = source[1:]
            if not np.isfinite(out).all():
                raise CodecError("the payload is malformed: it holds a non-finite value")
            return
        view = _view(shape, self.scale)
        head = 1 + 2 * view.scales
        step = np.empty(view.scales, np.float32)
        if source.size <= head or not rans.read_scales(source[1:head], step):
            raise CodecError("the payload is malformed: a scale is missing or no encoder's")
        wide, size = rans.get_number(source[head:])
        start = head + size + 4 * wide
        if size == 0 or wide > out.size or start > source.size:
            raise CodecError("the payload is malformed: it is shorter than it says")
        symbols = entropy.scratch(out.size)
        if entropy.decode(source[start:], symbols) != wide:
            raise CodecError("the payload is malformed: values beyond the levels are missing or left over")
        rans.dequantise(symbols, step, view.loops, out)
        if wide and not rans.put_wide(symbols, source[head + size : start], out):
            raise CodecError("the payload is malformed: it holds a non-finite value")


class _Levels(NamedTuple):
    """What becomes of a tensor: filled by measure (rms, float64), scales (head, bytes; step, float32) and quantise
    (symbols, int8, this thread's scratch; counts, int64 [256])."""

    x: np.ndarray
    view: _View
    head: np.ndarray
    rms: np.ndarray
    step: np.ndarray
    symbols: np.ndarray
    counts: np.ndarray

    @property
    def wide(self) -> int:
        """How many are sent as they are."""
        return int(self.counts[rans.WIDE & 255])


def _write_coded(levels: _Levels, out: np.ndarray) -> int | None:
    """After the scales: how many are WIDE, these, the stream. None where it is not shorter than the raw form."""
    head, number = 1 + levels.head.size, np.empty(5, np.uint8)
    at = head + rans.put_number(levels.wide, number)
    start = at + 4 * levels.wide
    if start >= out.size:
        return None
    out[0], out[head:at] = CODED, number[: at - head]
    if levels.wide:
        rans.take_wide(levels.symbols, levels.x, out[at:start])
    length = entropy.encode(levels.symbols, levels.counts, out[start:])
    return None if length is None or start + length >= out.size else start + length


class _View(NamedTuple):
    """loops: how rans.py goes through the tensor; scales: how many there are."""

    loops: tuple[int, ...]
    scales: int


def _view(shape: tuple[int, ...], scale: str) -> _View:
    where = layout(shape, scale)
    if where.num_scales == 1:
        return _View((1, where.numel, 1, 0, 0, 0), 1)
    loops = (where.outer * where.middle, where.inner, where.middle, where.so, where.sm, where.si)
    return _View(loops, where.num_scales)
