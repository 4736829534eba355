"""A byte budget for each training step, kept by steering the steps of the codecs that can be steered.

    Meter         what one sending channel coded in a step; the channel fills it
    RateControl   after each step: meters of all ranks of the pipeline ▸ compression/budget.py ▸ next multipliers

Every rank gets the same numbers and works out the same answer; a receiver needs nothing of it. The exchange is five
numbers a channel, and counts as sync_bytes. What cannot be steered (fixpoint, first visits) is paid for first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from thinpipe.harness.compression.base import Compressor, Steered
from thinpipe.harness.compression.budget import Budget, Observation
from thinpipe.harness.spec import CompressionSpec

#: name -> (elements, bytes, mean square of what was coded, step in RMS or 0, importance of a squared error)
Seen = dict[str, tuple[int, int, float, float, float]]
Gather = Callable[[Seen], list[Seen]]


@dataclass
class Meter:
    """One sending channel's step so far.

    codecs: those steered in what it sent last; importance: sum over messages of the mean squared gradient of what it
    sent, as far as that is known (activations).
    """

    name: str
    elements: int = 0
    bytes: int = 0
    squares: float = 0.0
    coded: int = 0
    importance: float = 0.0
    valued: int = 0
    codecs: Sequence[Steered] = ()

    def sent(self, compressor: Compressor, elements: int, payload_bytes: int) -> None:
        """Take note of a message just encoded by `compressor`."""
        self.elements += elements
        self.bytes += payload_bytes
        self.codecs = compressor.steered()
        for codec in self.codecs:
            if codec.mean_square > 0:
                self.squares += codec.mean_square
                self.coded += 1
                codec.mean_square = 0.0  # a message of first visits alone leaves it

    def matters(self, mean_square_gradient: float) -> None:
        """The gradient of a message sent, from which its errors' weight follows."""
        self.importance += mean_square_gradient
        self.valued += 1

    def take(self) -> tuple[int, int, float, float, float]:
        """This step's numbers; the next one starts from nothing."""
        step = self.codecs[0].value * self.codecs[0].multiplier if self.coded else 0.0
        found = (
            self.elements,
            self.bytes,
            self.squares / max(1, self.coded),
            step,
            self.importance / max(1, self.valued),
        )
        self.elements = self.bytes = self.coded = self.valued = 0
        self.squares = self.importance = 0.0
        return found


class RateControl:
    """The meters of this rank's sending channels. gather: all ranks' numbers, this rank's among them."""

    def __init__(self, spec: CompressionSpec, meters: Sequence[Meter], gather: Gather) -> None:
        assert spec.budget_bits is not None
        self.bits, self.by_sensitivity = spec.budget_bits, spec.budget_by == "sensitivity"
        self.meters, self.gather = meters, gather

    def after_step(self) -> None:
        """Set the multipliers for the next step from what this one sent."""
        seen: Seen = {}
        for one in self.gather({meter.name: meter.take() for meter in self.meters}):
            seen |= one
        steered = {
            name: Observation(n, square, sent, step) for name, (n, sent, square, step, _) in seen.items() if step
        }
        if not steered:
            return
        allowed = self.bits / 8 * sum(numbers[0] for numbers in seen.values())
        fixed = sum(numbers[1] for name, numbers in seen.items() if name not in steered)
        # What cannot be steered may take all there is: the rest then gets the least.
        budget = Budget(max(allowed - fixed, 1.0), self._weights(steered, seen))
        steps = budget.share(steered)
        for meter in self.meters:
            if meter.name in steps:
                for codec in meter.codecs:
                    codec.multiplier = steps[meter.name] / codec.value

    def _weights(self, steered: Mapping[str, Observation], seen: Seen) -> dict[str, float]:
        """By sensitivity: activations by the squared gradient there, scaled so that together they count as much as
        by their relative errors; gradients by those."""
        known = {name: seen[name][4] for name in steered if seen[name][4] > 0}
        if not self.by_sensitivity or not known:
            return {}
        elements = sum(steered[name].elements for name in known)
        scale = elements / sum(w * steered[n].mean_square * steered[n].elements for n, w in known.items())
        return {name: known[name] * scale if name in known else 1 / one.mean_square for name, one in steered.items()}

    def state_dict(self) -> dict[str, float]:
        """Multipliers in force, by channel."""
        return {meter.name: meter.codecs[0].multiplier for meter in self.meters if meter.codecs}

    def load_state_dict(self, state: Mapping[str, float], compressors: Mapping[str, Sequence[Compressor]]) -> None:
        """Restore what `state_dict` gave. compressors: those of each channel, by the meters' names."""
        for meter in self.meters:
            for compressor in compressors[meter.name]:
                for codec in compressor.steered() if meter.name in state else ():
                    codec.multiplier = state[meter.name]
