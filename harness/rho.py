"""rho: how long a micro-batch's boundary tensors take to cross, for each second that computing it takes. Pure but for
`resolve`.

    rho = 2 t_m / (t_f + t_b)      t_m   one float32 message of the widest boundary, on a link of the run's rate
                                   t_f, t_b   forward and backward of one micro-batch on the slowest stage

It carries a regime from one machine to another: a rate that is slow for a V100 is fast for a processor. A setting
`network.rate = "rho:4.1"` asks for the rate that gives it here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from thinpipe.harness import manifest, predict, profile
from thinpipe.harness.errors import UserError
from thinpipe.harness.profile import Profile
from thinpipe.harness.spec import NetworkSpec, RunSpec
from thinpipe.netem.link import segmented_bytes

if TYPE_CHECKING:
    from thinpipe.harness.experiment import Cell, Experiment
    from thinpipe.harness.store import Store

FILE = "rho.json"
# Rates are kept to as many digits: more would say nothing, and a rate is part of a run's name.
DIGITS = 4

ProfileOf = Callable[[RunSpec], Profile]


def ratio(spec: RunSpec, found: Profile, rate_mbit: float) -> float:
    """rho of a run whose links have this rate. Raises UserError where the profile does not fit the run."""
    return 2 * _message_bits(spec) / (rate_mbit * 1e6) / compute_s(spec, found)


def rate_mbit(spec: RunSpec, found: Profile, rho: float) -> float:
    """The rate at which a run has this rho, to DIGITS digits. Raises UserError where no link can have that rate."""
    rate = float(f"{2 * _message_bits(spec) / (rho * compute_s(spec, found)) / 1e6:.{DIGITS}g}")
    lowest, highest = 0.1, 40_000
    if not lowest <= rate <= highest:
        raise UserError(
            f"network.rate 'rho:{rho:g}' would take links of {rate:g} Mbit/s; rates go from {lowest:g} to {highest:g}: "
            "choose another rho"
        )
    return rate


def compute_s(spec: RunSpec, found: Profile) -> float:
    """Forward and backward of one micro-batch on the stage where they take longest."""
    return max(stage.forward_s + stage.backward_s for stage in profile.of_spec(found, spec))


def from_forward_ratio(theirs: float, backward_per_forward: float = 3.0) -> float:
    """rho as here, of a ratio t_m / t_f. The default is of a backward pass that recomputes the forward one.

    >>> from_forward_ratio(4.1)
    2.05
    """
    return 2 * theirs / (1 + backward_per_forward)


def of_run(spec: RunSpec) -> float | None:
    """rho of a run that is resolved: as it was asked for, or by the profile it replays; None where nobody knows."""
    rate = spec.network.rate_mbit
    if spec.network.rho is not None or rate is None or spec.profile is None or spec.pipeline.stages == 1:
        return spec.network.rho
    return ratio(spec, profile.load(spec.profile), rate)


def _message_bits(spec: RunSpec) -> float:
    """Bits of one float32 message on the wire, headers of segments included."""
    return 8 * segmented_bytes(4 * predict.elements(spec), spec.network.mtu)


# --- once an experiment ---------------------------------------------------------------------------------------------


def resolve(experiment: Experiment, store: Store, profile_of: ProfileOf | None = None) -> Experiment:
    """The experiment with network.rate_mbit beside each network.rate that is a ratio.

    A replay's rate follows from its profile. Other runs need one measured here, with `profile_of`, once an experiment
    and machine: it is kept in results/<experiment>/rho.json, and taken from there afterwards. Without `profile_of`
    (planning) nothing is measured or written, and what is not known yet is left as it was.
    """
    if all(spec.network.rate is None for cell in experiment.cells() for _, spec in cell.runs):
        return experiment
    path = store.experiment_dir(experiment.name) / FILE
    kept = _Kept(_read(path), profile_of)
    parts = tuple(
        replace(part, cells=tuple(_resolved_cell(cell, kept) for cell in part.cells)) for part in experiment.parts
    )
    if profile_of is not None and kept.rates:
        _write(path, kept)
    return replace(experiment, parts=parts)


class _Kept:
    """What rho.json holds: profiles measured here, by `profile_key`; rates: what was worked out, for people."""

    def __init__(self, profiles: Mapping[str, Profile], profile_of: ProfileOf | None):
        self.profiles, self.profile_of = dict(profiles), profile_of
        self.rates: dict[str, dict[str, Any]] = {}

    def of(self, spec: RunSpec) -> Profile | None:
        if spec.profile is not None:
            return profile.load(spec.profile)
        key = profile_key(spec)
        if key not in self.profiles and self.profile_of is not None:
            self.profiles[key] = self.profile_of(spec)
        return self.profiles.get(key)


def profile_key(spec: RunSpec) -> str:
    """Names what the times of a model's blocks on this machine depend on: runs that agree in it share a profile."""
    parts = {
        "machine": manifest.machine_id(),
        "model": spec.model.model_dump(mode="json"),
        "task": {key: getattr(spec.task, key) for key in ("name", "sequence_length", "vocab_size", "num_labels")},
        "microbatch_size": spec.microbatch_size,
        "recompute": spec.train.recompute,
        "autocast": spec.train.autocast,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _resolved_cell(cell: Cell, kept: _Kept) -> Cell:
    runs = tuple((seed, _resolved(spec, kept)) for seed, spec in cell.runs)
    return replace(cell, runs=runs, cell_id=runs[0][1].cell_id)


def _resolved(spec: RunSpec, kept: _Kept) -> RunSpec:
    rho, given = spec.network.rho, spec.network.rate_mbit
    if rho is None or (found := kept.of(spec)) is None:
        return spec
    rate = rate_mbit(spec, found, rho)
    if given not in (None, rate):
        raise UserError(
            f"network.rate_mbit {given:g} and network.rate {spec.network.rate!r} are both set, but the ratio gives "
            f"{rate:g} Mbit/s here: leave one of them out"
        )
    kept.rates[f"{rho:g}/{found.name}/{spec.pipeline.stages}/{spec.microbatch_size}"] = {
        "rho": rho,
        "rate_mbit": rate,
        "profile": spec.profile or profile_key(spec),
        "stages": spec.pipeline.stages,
        "microbatch_size": spec.microbatch_size,
    }
    network = NetworkSpec(**{**spec.network.model_dump(), "rate_mbit": rate})
    return spec.model_copy(update={"network": network})


def _read(path: Any) -> dict[str, Profile]:
    from thinpipe.harness import store

    if not path.exists():
        return {}
    data = store.read_json(path)
    try:
        return {key: profile.parse(json.dumps(value), where=str(path)) for key, value in data["profiles"].items()}
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{path} is no record of rates: delete it, and they are worked out anew.") from None


def _write(path: Any, kept: _Kept) -> None:
    from thinpipe.harness import store

    path.parent.mkdir(parents=True, exist_ok=True)
    profiles = {key: found.to_json() for key, found in kept.profiles.items()}
    store.write_json(path, {"profiles": profiles, "rates": list(kept.rates.values())})
