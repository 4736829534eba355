"""Dropout whose masks are keyed, not drawn: the same for any cut of the model and again on recomputation.

A row's mask follows from (seed, the layer's name in the whole model, the sample's id), and from the step too where
every step is to have masks of its own. It does not depend on the row's neighbours in the micro-batch, so neither on how
a batch is cut. With `masks = "sample"` a sample meets the same masks at each visit: a delta memory then sends what
training changed, not what dropout did.

The core says which micro-batch is next by `visit`, before its forward pass and again before its backward pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import nn

# Philox's words are cut into pieces of 16 bits, one an element; keeping is decided by this many levels.
LEVELS = 1 << 16

_ids: tuple[int, ...] = ()
_step = 0


def visit(ids: Sequence[int], step: int) -> None:
    """Say whose forward or backward pass comes next. ids: the micro-batch's sample ids, a row each; step: >= 0."""
    global _ids, _step
    _ids, _step = tuple(ids), step


class SampleDropout(nn.Module):
    """Dropout of x (mb, ...) float, row i by the mask of sample ids[i] of the last `visit`; identity in evaluation.

    p: as asked for; what is dropped is p rounded to 1 / 65536, and what is kept is scaled by that, so that the
    expectation is exact. Raises AssertionError where x does not have a row for each sample.
    """

    def __init__(self, p: float, *, name: str, seed: int, masks: Literal["sample", "step"]) -> None:
        super().__init__()
        assert 0 < p < 1, p
        self.p, self.name, self.per_step = p, name, masks == "step"
        self._threshold = min(max(round(p * LEVELS), 1), LEVELS - 1)
        digest = hashlib.blake2b(f"{seed}/dropout/{name}".encode(), digest_size=8).digest()
        self._key = int.from_bytes(digest, "little")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        assert len(_ids) == x.shape[0], f"{self.name}: {x.shape[0]} rows for {len(_ids)} samples; visit() comes first"
        kept = torch.from_numpy(self._kept(x[0].numel())).view(x.shape).to(x.device)
        # The saved mask is a byte an element; a scaled one would be as large as x.
        return x * kept * (LEVELS / (LEVELS - self._threshold))

    def _kept(self, count: int) -> np.ndarray:
        """What is kept of each row: (mb, count) bool."""
        kept = np.empty((len(_ids), count), dtype=np.bool_)
        # The step goes into a word of the counter that a row's own words never reach.
        counter = [0, 1 + _step if self.per_step else 0, 0, 0]
        for row, sample in zip(kept, _ids, strict=True):
            stream = np.random.Philox(counter=counter, key=np.array([self._key, sample], dtype=np.uint64))
            pieces = stream.random_raw(-(-count // 4)).astype("<u8", copy=False).view("<u2")
            np.greater_equal(pieces[:count], self._threshold, out=row)
        return kept

    def extra_repr(self) -> str:
        return f"p={self.p}, name={self.name!r}, masks={'step' if self.per_step else 'sample'}"


def swap(module: nn.Module, *, masks: Literal["sample", "step"], seed: int, prefix: str = "") -> None:
    """Replace every nn.Dropout(p > 0) inside `module` by a SampleDropout, in place.

    prefix: the module's own name in the whole model, with its dot. Layers keep their names there, which key the masks.
    """
    found = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Dropout) and layer.p > 0]
    for name, layer in found:
        parent, _, last = name.rpartition(".")
        replacement = SampleDropout(layer.p, name=prefix + name, seed=seed, masks=masks)
        setattr(module.get_submodule(parent), last, replacement.train(layer.training))
