"""What several model families need in the module that a rank imports: seeded weights and the next-token loss."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn import functional


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
