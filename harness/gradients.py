"""Gradients between the backward pass and the optimizer: divided, summed where weights are shared, clipped.

    backward: summed over micro-batches (and averaged between data groups, by DDP)
    finish:   / micro-batches  ▸  shared weights summed over the stages that hold them  ▸  norms gathered  ▸  clipped

Per-parameter norms of all stages are gathered in model order, so that clipping is bit-equal to one process. A shared
weight enters the norm once.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from thinpipe.harness.errors import DivergedError
from thinpipe.harness.links import Links
from thinpipe.harness.recorder import Recorder, now
from thinpipe.harness.spec import TrainSpec


@dataclass
class StageGradients:
    """The trainable parameters of one stage, in order; shared: key -> those that other stages hold too (or that are
    held twice here)."""

    stage: int
    named: Sequence[tuple[str, torch.nn.Parameter]]
    shared: Mapping[str, Sequence[torch.nn.Parameter]] = field(default_factory=dict)


def clip_coefficient(norms: torch.Tensor, clip: float) -> tuple[float, torch.Tensor]:
    """(global norm, factor <= 1) from per-parameter norms in model order; as torch.nn.utils.clip_grad_norm_."""
    total = torch.linalg.vector_norm(norms)
    return float(total), torch.clamp(clip / (total + 1e-6), max=1.0)


class Gradients:
    """The gradients of one rank's stages. links: None for a run of one rank."""

    def __init__(self, stages: Sequence[StageGradients], spec: TrainSpec, links: Links | None, recorder: Recorder):
        self.stages, self.spec, self.links, self.recorder = stages, spec, links, recorder
        mine = [(s.stage, len(s.named), {key: len(held) for key, held in s.shared.items()}) for s in stages]
        everyone = [mine]
        if links is not None and links.ranks > 1:
            everyone = [None] * links.ranks  # type: ignore[list-item]
            dist.all_gather_object(everyone, mine, group=links.pipe)
        held_at: dict[str, dict[int, int]] = {}
        for rank, held in enumerate(everyone):
            for stage, _, keys in held:
                for key in keys:
                    held_at.setdefault(key, {})[stage] = rank
        first = {key: min(by_stage) for key, by_stage in held_at.items()}
        #: key -> the group of the ranks that hold it, None where one rank holds them all.
        self.shared_groups: dict[str, dist.ProcessGroup | None] = {}
        for key, by_stage in sorted(held_at.items()):
            ranks = sorted(set(by_stage.values()))
            group = links.subgroup(ranks) if links is not None and len(ranks) > 1 else None
            if any(key in s.shared for s in stages):
                self.shared_groups[key] = group
        # A shared weight enters the norm once: as the first of the first stage that holds it.
        extra = {
            id(p) for s in stages for key, held in s.shared.items() for p in held[1 if s.stage == first[key] else 0 :]
        }
        self._normed = [[p for _, p in s.named if id(p) not in extra] for s in stages]
        self._counts = [
            [(stage, count - sum(n - (stage == first[key]) for key, n in keys.items())) for stage, count, keys in held]
            for held in everyone
        ]
        size = max(sum(count for _, count in counts) for counts in self._counts)
        self._mine = torch.zeros(size)
        self._all = [torch.zeros(size) for _ in self._counts]
        self._since = 0.0

    def finish(self, pieces: int) -> float | None:
        """Make the gradients ready for the optimizer; `pieces`: micro-batches they are summed over. Returns the norm
        before clipping (of all stages, or the largest where each stage clips by its own), None when not clipped.

        Raises DivergedError when the norm is not finite.
        """
        self._since = now()
        gradients = [[_gradient(name, p) for name, p in stage.named] for stage in self.stages]
        if self.spec.loss_scaling == "mean" and pieces > 1:
            for gradient in (g for of_stage in gradients for g in of_stage):
                gradient.div_(pieces)
        self._sum_shared()
        norm = None if self.spec.clip_norm is None else self._clip(gradients, self.spec.clip_norm)
        self.recorder.span("optimizer", self._since, now())
        return norm

    def _sum_shared(self) -> None:
        for key, group in self.shared_groups.items():
            held = [_gradient(key, p) for stage in self.stages for p in stage.shared.get(key, ())]
            total = held[0]
            for gradient in held[1:]:
                total.add_(gradient)
            if group is not None:
                with self._exchange():
                    dist.all_reduce(total, group=group)
            for gradient in held[1:]:
                gradient.copy_(total)

    def _clip(self, gradients: Sequence[Sequence[torch.Tensor]], clip: float) -> float:
        norms = [[torch.linalg.vector_norm(_gradient("", p)) for p in of_stage] for of_stage in self._normed]
        if self.spec.clip_scope == "stage":
            found = [clip_coefficient(_stack(of_stage), clip) for of_stage in norms]
        else:
            together = _stack([norm for of_stage in norms for norm in of_stage])
            found = [clip_coefficient(self._gather(together), clip)] * len(norms)
        norm = max(total for total, _ in found)
        if not all(math.isfinite(total) for total, _ in found):
            raise DivergedError(f"the gradient norm became {norm} at step {self.recorder.step}")
        for of_stage, (_, factor) in zip(gradients, found, strict=True):
            for gradient in of_stage:
                gradient.mul_(factor)
        return norm

    def _gather(self, norms: torch.Tensor) -> torch.Tensor:
        """Norms of all stages of the pipeline, in model order."""
        if self.links is None or self.links.ranks == 1:
            return norms
        self._mine[: len(norms)] = norms
        with self._exchange():
            dist.all_gather(self._all, self._mine, group=self.links.pipe)
        parts: dict[int, torch.Tensor] = {}
        for row, counts in zip(self._all, self._counts, strict=True):
            at = 0
            for stage, count in counts:
                parts[stage] = row[at : at + count]
                at += count
        return torch.cat([parts[stage] for stage in sorted(parts)])

    @contextlib.contextmanager
    def _exchange(self) -> Iterator[None]:
        """Time between ranks, taken out of the optimizer's."""
        start = now()
        self.recorder.span("optimizer", self._since, start)
        yield
        self._since = now()
        self.recorder.span("sync", start, self._since)


def _stack(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(norms)) if norms else torch.zeros(0)


def _gradient(name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None, f"{name} got no gradient"
    return parameter.grad
