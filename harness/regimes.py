"""Which compressor is in force where and when, from a run's rules. Pure; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from thinpipe.harness.compression import grammar
from thinpipe.harness.spec import RunSpec

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


@dataclass(frozen=True)
class Regime:
    """What one epoch uses: by (direction, boundary) the compressor in force and the memories that only watch."""

    use: dict[tuple[Direction, int], str]
    watch: dict[tuple[Direction, int], tuple[str, ...]]


def regime(spec: RunSpec, epoch: int) -> Regime:
    """The compressors of one training epoch, canonical texts. A memory that comes into force later watches."""
    use: dict[tuple[Direction, int], str] = {}
    watch: dict[tuple[Direction, int], tuple[str, ...]] = {}
    for direction in DIRECTIONS:
        for boundary in range(spec.pipeline.stages - 1):
            active = grammar.canonical(spec.compression.compressor(direction, boundary, epoch))
            later = {
                grammar.canonical(rule.use)
                for rule in spec.compression.rules(direction)
                if rule.from_epoch > epoch and rule.boundary in (None, boundary)
            }
            use[direction, boundary] = active
            watch[direction, boundary] = tuple(sorted(later - {active}))
    return Regime(use, watch)


def evaluation_regime(spec: RunSpec, epoch: int) -> Regime:
    """Evaluation: nothing, or the inner codecs of the epoch's compressors; memories are never touched."""
    training = regime(spec, epoch)
    off = spec.compression.evaluation == "off"
    return Regime({key: "none" if off else grammar.inner(text) for key, text in training.use.items()}, {})


def texts(spec: RunSpec, direction: Direction, boundary: int) -> set[str]:
    """Every compressor one channel may be asked for."""
    rules = [r for r in spec.compression.rules(direction) if r.boundary in (None, boundary)]
    named = {grammar.canonical(rule.use) for rule in rules} | {"none"}
    return named | {grammar.inner(text) for text in named}


def every_text(spec: RunSpec) -> set[str]:
    """Every compressor that any channel of the run may be asked for."""
    boundaries = range(spec.pipeline.stages - 1)
    return set().union(*(texts(spec, direction, boundary) for direction in DIRECTIONS for boundary in boundaries))


def last_change(spec: RunSpec) -> int:
    """The epoch from which on no rule changes anything any more."""
    return max(rule.from_epoch for direction in DIRECTIONS for rule in spec.compression.rules(direction))


def final_epoch(spec: RunSpec) -> int:
    """The epoch whose compressors a run ends with: a timing run has the last ones in force throughout."""
    return last_change(spec) if spec.measure == "timing" else spec.train.epochs - 1
