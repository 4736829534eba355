"""A byte budget for a whole step, shared out over boundaries and directions by what their errors matter.

Minimises the sum of weight x squared error over all channels, a channel being one boundary and direction, subject to
the bytes of a step. At high rates that is reverse water-filling (Cover and Thomas, Elements of Information Theory,
10.3.3): the same weight x step^2 in every channel, and next to nothing for one whose weight x variance is below that.
A uniform grid with steps of s times the root mean square (RMS) has an error near s^2 / 12 of the variance and takes
about log2(1 + 17.08 / s^2) / 2 bits an element if what it codes is normal; each channel's measured bytes say by what
factor its data differ. So one number, the level, decides all steps, and the budget decides the level. Wrong guesses
are put right by the next step's measurement.

harness/rate_control.py gathers the numbers of all channels after each step: all ranks get the same answer.
`elements`, `bytes` are sums over the step's micro-batches, `mean_square` is the mean of codec.mean_square over them.
All micro-batches of a channel share one step in units of each message's own RMS, so a message of small values gets a
small step. Only senders need the answer: a payload says its steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from thinpipe.harness.errors import UserError

#: Steps, in RMS, that are ever given: near 11 bits, and next to nothing.
FINEST, COARSEST = 2.0**-9, 16.0
#: A step changes by at most this factor at a time, since measured bytes say little about one far away.
_PACE = 4.0
#: The share of a deviation, as a ratio of bytes, that one step sets out to put right.
_DAMPING = 0.75
#: A channel whose bytes are far from what normal data would take is trusted no further than this.
_ODD = 20.0


@dataclass(frozen=True)
class Observation:
    """One channel's last step.

    elements: coded; mean_square: of these (the variance, for values about zero); bytes: sent, frames not included;
    step: in units of the RMS.
    """

    elements: int
    mean_square: float
    bytes: float
    step: float


@dataclass(frozen=True)
class Budget:
    """bytes_per_step: for all channels of `share` together.

    weights: importance of a squared error in a channel, e.g. the mean squared gradient of the loss with respect to
    what it carries; in any unit, one for all, none negative; 0 gets the least there is. A channel not named has 1 /
    mean_square, so that relative errors count; name all of them or none to compare like with like.
    """

    bytes_per_step: float
    weights: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        if not 0 < self.bytes_per_step < math.inf:
            raise UserError(f"the byte budget of a step is {self.bytes_per_step}; it must be a positive number")
        for name, weight in self.weights.items():
            if not 0 <= weight < math.inf:
                raise UserError(f"the weight of channel {name!r} is {weight}; it must be 0 or a positive number")

    def share(self, seen: Mapping[str, Observation]) -> dict[str, float]:
        """The next step of each channel, in its RMS: within a factor 4 of the last one, FINEST..COARSEST.

        A channel that held only zeros keeps its step. Where no choice meets the budget, what comes nearest.
        """
        urgency = {name: self._urgency(name, one) for name, one in seen.items()}
        fixed = sum(one.bytes for name, one in seen.items() if urgency[name] is None)

        def steps(level: float) -> dict[str, float]:
            return {name: _step(one, urgency[name], level) for name, one in seen.items()}

        # Part of the way, in proportion: data other than normal answers more strongly at low rates than foreseen.
        sent = fixed + sum(predicted(one, one.step) for name, one in seen.items() if urgency[name] is not None)
        aim = self.bytes_per_step * (sent / self.bytes_per_step) ** (1 - _DAMPING)
        # Beyond these levels all channels are at one end of what they may change to.
        low, high = -400.0, 400.0
        for _ in range(60):
            level = (low + high) / 2
            chosen = steps(level)
            total = fixed + sum(predicted(seen[n], s) for n, s in chosen.items() if urgency[n] is not None)
            low, high = (level, high) if total > aim else (low, level)
        return steps(high)

    def _urgency(self, name: str, one: Observation) -> float | None:
        """log2 of weight x variance; -inf where nothing matters, None where nothing was coded."""
        if not one.elements or not one.mean_square:
            return None
        weight = self.weights.get(name)
        if weight == 0:
            return -math.inf
        return 0.0 if weight is None else math.log2(weight) + math.log2(one.mean_square)


def predicted(one: Observation, step: float) -> float:
    """Bytes the channel would have taken with another step."""
    normal = one.elements * _bits(one.step) / 8
    return min(max(one.bytes / normal, 1 / _ODD), _ODD) * one.elements * _bits(step) / 8


def _bits(step: float) -> float:
    """Bits an element of normal data; at small steps the differential entropy less log2(step)."""
    return math.log2(1 + 17.08 / step**2) / 2


def _step(one: Observation, urgency: float | None, level: float) -> float:
    """The step at which weight x error an element is 2^level: step^2 weight variance = 2^level."""
    if urgency is None:
        return one.step
    wanted = 2.0 ** min(max((level - urgency) / 2, -60.0), 60.0)
    paced = min(max(wanted, one.step / _PACE), one.step * _PACE)
    return min(max(paced, FINEST), COARSEST)
