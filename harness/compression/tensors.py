"""Small things codecs and memories share: dense float32 views, a scan for magnitude, byte copies."""

from __future__ import annotations

import torch

from thinpipe.harness.compression.base import Compressor, Context
from thinpipe.harness.compression.kernels import cpu
from thinpipe.harness.errors import CodecError, DivergedError


def dense(x: torch.Tensor, ctx: Context) -> torch.Tensor:
    """`x` as contiguous float32 without a graph; itself where it is that already."""
    assert x.shape == ctx.shape, f"a tensor of {tuple(x.shape)} where the context says {ctx.shape}"
    if x.dtype == torch.float32 and not x.requires_grad and x.is_contiguous():
        return x
    return x.detach().to(torch.float32).contiguous()


def peak(x: torch.Tensor) -> float:
    """max|x| of a contiguous float32 tensor, 0 where empty, non-finite where any element is."""
    if x.numel() == 0:
        return 0.0
    if x.is_cpu:
        return cpu.peak(x.view(-1).numpy())
    largest = x.abs().max().item()
    return largest if bool(torch.isfinite(x).all()) else float("nan")


def require_finite(x: torch.Tensor) -> None:
    """Raise DivergedError where `x` (contiguous float32) holds NaN or infinity."""
    raise_if_diverged(peak(x))


def raise_if_diverged(largest: float) -> None:
    if not largest <= torch.finfo(torch.float32).max:
        raise DivergedError("the tensor to send holds a non-finite value (NaN or infinity)")


def require_length(payload: torch.Tensor, due: int) -> None:
    """Raise CodecError unless the payload has the one length it can have."""
    if payload.numel() != due:
        raise CodecError(f"the payload is malformed: {payload.numel()} B where {due} B are due")


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, flat, sharing its memory."""
    return x.view(-1).view(torch.uint8)


def relative_error(x: torch.Tensor, decoded: torch.Tensor) -> float:
    """|decoded - x| / |x| in the 2-norm; 0 where both are 0."""
    size = x.double().norm().item()
    error = (decoded.double() - x.double()).norm().item()
    return error / size if size else error


def own_decoding(
    compressor: Compressor, payload: torch.Tensor, ctx: Context, out: torch.Tensor | None = None
) -> torch.Tensor:
    """What the other end will make of `payload`, in `out` or a tensor of its own."""
    return compressor.decode(payload, ctx, torch.empty(ctx.shape, device=payload.device) if out is None else out)
