"""Sending only what the forward tensor (Context.peer) has a value for: positions both ends know without being told.

A CPU tensor is worked on by compiled loops, one on a GPU where it is.
"""

from __future__ import annotations

import numpy as np
import torch

from thinpipe.harness.compression.base import Context
from thinpipe.harness.compression.kernels import select
from thinpipe.harness.errors import CodecError


def peer_of(ctx: Context, name: str) -> torch.Tensor:
    """The forward tensor, contiguous float32 of the message's shape; CodecError where none was given."""
    if ctx.peer is None:
        raise CodecError(f"{name} codes a gradient by the help of the forward tensor, and none was given")
    assert ctx.peer.shape == ctx.shape
    return ctx.peer.detach().to(torch.float32).contiguous()


def count(peer: torch.Tensor) -> int:
    """Elements that are not zero."""
    return select.count_nonzero(_patterns(peer)) if peer.is_cpu else int(torch.count_nonzero(peer))


def pick(x: torch.Tensor, peer: torch.Tensor) -> torch.Tensor:
    """x (contiguous float32) where `peer` is not zero, row-major, 1-D."""
    if not x.is_cpu:
        return x[peer != 0]
    found = count(peer)
    values = torch.empty(found + 1)
    select.gather_where(_patterns(x), _patterns(peer), _patterns(values))
    return values[:found]


def room(peer: torch.Tensor) -> torch.Tensor:
    """A buffer for what `place` is to put back: 1-D, one value for each element of `peer` that is not zero, on its
    device."""
    # Not cut from a larger one on a GPU, where nothing reads past the end.
    found = count(peer)
    return torch.empty(found + 1, device=peer.device)[:found]


def place(values: torch.Tensor, peer: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out = values where `peer` is not zero, else 0; `values` is a buffer of `room`."""
    if not out.is_cpu:
        out.zero_()
        out[peer != 0] = values
        return out
    whole = values.as_strided((values.numel() + 1,), (1,))
    select.scatter_where(_patterns(whole), _patterns(peer), _patterns(out))
    return out


def _patterns(x: torch.Tensor) -> np.ndarray:
    return x.view(-1).numpy().view(np.int32)
