"""Compile, or load from disk, the kernels that compressors need, so that processes forked later find them.

python -m thinpipe.harness.compression.warm_up      every codec and memory there is, once an installation
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from thinpipe.harness import plugins
from thinpipe.harness.compression import grammar
from thinpipe.harness.compression.base import Context
from thinpipe.harness.compression.kernels import cpu

SHAPE = (2, 3, 40)


def warm_up(texts: Iterable[str]) -> float:
    """Take one small message through each compressor, twice, for what memories do later; seconds it took."""
    start = time.perf_counter()
    cpu.warm_up()
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    for text in texts:
        sender, receiver = grammar.build(text), grammar.build(text)
        out = torch.zeros(sender.max_bytes(SHAPE), dtype=torch.uint8)
        # One value alone: as many as any ratio of mask=forward lets through.
        peer = torch.zeros(SHAPE)
        peer[0, 0, 0] = 1.0
        for step in range(2):
            ctx = Context(SHAPE, step=step, sample_ids=(0, 1), peer=peer if sender.uses_peer else None)
            length = sender.encode(x + step, ctx, out)
            receiver.decode(out[:length], ctx, torch.empty(SHAPE))
    return time.perf_counter() - start


def every_text() -> list[str]:
    """What the plug-ins' CONTRACTs name."""
    found = [plugin for kind in ("codecs", "memories") for plugin in plugins.find(kind).values()]
    return [text for plugin in found for text in plugin.load().CONTRACT]


if __name__ == "__main__":
    print(f"{warm_up(every_text()):.0f} s")
