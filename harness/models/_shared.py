"""What several model families need in the module that a rank imports: seeded weights, losses, recomputation."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.initialization import no_init_weights


def seeded(components: Iterable[tuple[str, nn.Module]], seed: int, initialise: Callable[[nn.Module], None]) -> None:
    """Initialise each (key, component) by `component.apply(initialise)`, from a generator keyed by (seed, key).

    A stage then draws its own weights only, and any number of stages makes the same model, bit for bit: give each
    block, and each module before and after them, its name in the whole model as key. Two components with one key get
    the same draws (a head that starts as the embedding). The global generator is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        for key, component in components:
            digest = hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=8).digest()
            torch.default_generator.manual_seed(int.from_bytes(digest, "little"))
            component.apply(initialise)


def materialise(stage: nn.Module, initialise: Callable[[nn.Module], None] | None = None) -> None:
    """Give a stage built on the meta device memory on the CPU: parameters unset, buffers as `initialise` sets them.

    initialise: called on each module that holds buffers of its own (Hugging Face's `_init_weights` sets those of its
    families). A buffer that it leaves alone is caught, also one that no checkpoint stores.
    """
    stage.to_empty(device="cpu")
    holders = [module for module in stage.modules() if module._buffers]
    for module in holders:
        for buffer in module.buffers(recurse=False):
            buffer.fill_(_unset(buffer))
    if initialise is not None:
        with torch.random.fork_rng(devices=[]):
            for module in holders:
                initialise(module)
    for name, buffer in stage.named_buffers():
        unset = buffer.isnan() if buffer.is_floating_point() else buffer == _unset(buffer)
        assert not unset.any(), f"buffer {name} would be left uninitialised"


def _unset(buffer: torch.Tensor) -> float | int:
    return float("nan") if buffer.is_floating_point() else torch.iinfo(buffer.dtype).min


def unset(model_class: type, config: Any) -> nn.Module:
    """A whole Hugging Face model, its parameters unset, which takes no time; buffers are set, tied weights are tied."""
    with no_init_weights():
        model = model_class(config)
    model.tie_weights()
    return model


def call(block: nn.Module, *args: Any, recompute: bool, **kwargs: Any) -> Any:
    """block(*args, **kwargs); with `recompute` what it saves for its backward pass is made again there.

    Buffers that a forward pass changes (BatchNorm's running statistics) change once, not again on recomputation.
    Random numbers are not replayed: nothing in a stage may draw any (`_dropout` keys its masks).
    """
    if not (recompute and torch.is_grad_enabled()):
        return block(*args, **kwargs)
    return checkpoint(
        block,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (contextlib.nullcontext(), _buffers_kept(block)),
        **kwargs,
    )


class _buffers_kept:
    """Gives a block its buffers back as they were. May be entered again: a backward pass in two parts (zero-bubble
    schedules) recomputes twice."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block

    def __enter__(self) -> None:
        self.kept = [(buffer, buffer.clone()) for buffer in self.block.buffers()]

    def __exit__(self, *_: object) -> None:
        for buffer, value in self.kept:
            # Through .data: the buffer may be saved for a backward pass, which would refuse a changed one.
            buffer.data.copy_(value)


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Next-token cross-entropy in nats, a scalar. logits (mb, S, V) float; targets (mb, S) int64, shifted.

    Without weights: the mean over the micro-batch's tokens (training). With weights (mb,) float: the weighted
    *sum* over sequences of a sequence's mean; divided by the sum of all weights it is the mean of an
    evaluation whose padding has weight 0, however it was cut into micro-batches.
    """
    if weights is None:
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    tokens = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (tokens.view_as(targets).mean(dim=1) * weights).sum()


def class_loss(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Cross-entropy of classes in nats, a scalar. logits (mb, C) float; targets (mb,) int64.

    Without weights: the mean over the micro-batch (training). With weights (mb,) float: the weighted *sum* over
    samples, as `next_token_loss` has it.
    """
    if weights is None:
        return functional.cross_entropy(logits, targets)
    return (functional.cross_entropy(logits, targets, reduction="none") * weights).sum()
