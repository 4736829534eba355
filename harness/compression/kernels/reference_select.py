"""What select.py, rotate.py and levels.py compute, written out in plain torch and Python: the definition, for tests.

Same positions, bytes and bits; slow.
"""

from __future__ import annotations

import math

import torch

_WORD = 0xFFFFFFFF


def largest(x: torch.Tensor, k: int, drop: bool) -> list[int]:
    """Flat positions, ascending, of the k largest magnitudes but zeros of each row of `x` (2-D); see select.largest."""
    found: list[int] = []
    for g, row in enumerate(x.abs()):
        order = torch.sort(row, descending=True, stable=True).indices
        kept = order[:k]
        if drop and k < len(order):
            kept = kept[row[kept] > row[order[k]]]
        found += (kept[row[kept] > 0].sort().values + g * x.shape[1]).tolist()
    return found


def draw(count: int, k: int, key: int) -> list[int]:
    """k of 0..count-1, ascending: position i where a counter-based uniform number is below wanted / left."""
    found: list[int] = []
    for i in range(count):
        uniform = _mix(_mix(i ^ (key & _WORD)) ^ (key >> 32))
        if uniform * (count - i) >> 32 < k - len(found):
            found.append(i)
    return found


def _mix(h: int) -> int:
    h = (h ^ (h >> 16)) * 0x85EBCA6B & _WORD
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & _WORD
    return h ^ (h >> 16)


def bitmap(positions: list[int], count: int) -> bytes:
    """One bit a position of 0..count-1, the first in the lowest bit."""
    bits = ["0"] * count
    for place in positions:
        bits[place] = "1"
    return _bytes("".join(bits))


def packed(positions: list[int], block: int = 64) -> bytes:
    """Gaps in blocks: a byte that says how many bits each takes, then these, lowest bit first."""
    gaps = _gaps(positions)
    blocks = [gaps[first : first + block] for first in range(0, len(gaps), block)]
    widths = [max(part).bit_length() for part in blocks]
    return b"".join(
        bytes([width]) + _bytes("".join(_low_first(gap, width) for gap in part))
        for width, part in zip(widths, blocks, strict=True)
    )


def rice(positions: list[int], parameter: int) -> bytes:
    """Each gap as gap >> parameter zeros, a one, and its lowest bits, the lowest first."""
    return _bytes("".join("0" * (g >> parameter) + "1" + _low_first(g, parameter) for g in _gaps(positions)))


def rotate(x: torch.Tensor, signs: torch.Tensor, inverse: bool, chosen: list[bool]) -> torch.Tensor:
    """x (flat float32) with its chosen tiles rotated; see rotate.py. signs: +-1 / sqrt(block)."""
    block, out = signs.numel(), x.clone()
    for t, is_chosen in enumerate(chosen):
        if is_chosen:
            tile = x[t * block : (t + 1) * block] * (signs.abs() if inverse else signs)
            for stage in range(round(math.log2(block))):
                pairs = tile.view(-1, 2, 1 << stage)
                tile = torch.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), 1).view(-1)
            out[t * block : (t + 1) * block] = torch.where(signs > 0, tile, -tile) if inverse else tile
    return out


def stand_out(x: torch.Tensor, block: int, tau: float) -> list[bool]:
    """Of each whole tile whether its largest magnitude is more than tau times the second largest."""
    tiles = x[: x.numel() // block * block].view(-1, block).abs()
    top = tiles.topk(2, dim=1).values
    return (top[:, 0] > tau * top[:, 1]).tolist()


def nearest(x: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Number of the nearest of the ascending `levels` (float32), the upper one half-way between two."""
    middles = ((levels[1:].double() + levels[:-1].double()) / 2).float()
    return torch.bucketize(x, middles, right=True)


def _gaps(positions: list[int]) -> list[int]:
    return [place - before - 1 for before, place in zip([-1, *positions], positions, strict=False)]


def _low_first(number: int, width: int) -> str:
    return format(number, f"0{width}b")[::-1][:width]


def _bytes(bits: str) -> bytes:
    """Bits as bytes, the first bit the lowest of the first byte."""
    return bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))
