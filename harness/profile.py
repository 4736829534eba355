"""How long each block of a model takes: what a replay waits by, a simulation reckons with, and rho is worked out from.

    experiments/profiles/NAME.json, or a file that `thinpipe profile` wrote:

    forward_s, backward_s   seconds a block, one micro-batch of `microbatch_size` samples of `sequence_length` tokens;
                            the first block with the embedding, the last with the head and the loss
    optimizer_s             seconds a block, one optimizer step
    measured                false: stated, from what somebody published; `source` says from what

No torch here: planning needs profiles.

>>> load("v100-gpt2-xl").measured
False
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from thinpipe.harness import shipped
from thinpipe.harness.errors import UserError, near_miss

if TYPE_CHECKING:
    from thinpipe.harness.models.base import StagePart
    from thinpipe.harness.spec import ModelSpec, RunSpec

TIMES = ("forward_s", "backward_s", "optimizer_s")


class StageTimes(NamedTuple):
    """Seconds of one stage: forward and backward of one micro-batch, the optimizer of one step."""

    forward_s: float
    backward_s: float
    optimizer_s: float


@dataclass(frozen=True)
class Profile:
    """A profile as its file has it; see the module's text for the units. model: as `model_text` writes it."""

    name: str
    source: str
    measured: bool
    date: str
    machine: str
    model: str
    sequence_length: int
    microbatch_size: int
    recompute: bool
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    optimizer_s: tuple[float, ...]

    @property
    def blocks(self) -> int:
        return len(self.forward_s)

    def to_json(self) -> dict[str, Any]:
        """What its file holds."""
        return asdict(self) | {name: list(getattr(self, name)) for name in TIMES}


def load(name_or_path: str) -> Profile:
    """A profile by name, or by the path of its file. Raises UserError naming the file and what is wrong with it."""
    return parse(read(name_or_path), where=name_or_path)


def digest(name_or_path: str) -> str:
    """16 hex digits of a profile's content. Raises UserError where there is none."""
    return hashlib.sha256(read(name_or_path).encode()).hexdigest()[:16]


def read(name_or_path: str) -> str:
    """The text of a profile's file."""
    return shipped.read(name_or_path, "profiles", "profile", "`thinpipe profile` writes one")


@functools.cache
def parse(text: str, *, where: str = "profile") -> Profile:
    """The profile that a file's text holds. Raises UserError: an unknown or missing key, a time that cannot be one."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise UserError(f"profile {where} is no JSON: {error}") from None
    keys = [field.name for field in fields(Profile)]
    if not isinstance(data, dict):
        raise UserError(f"profile {where} must hold one JSON object.")
    for key in data:
        if key not in keys:
            raise UserError(f"profile {where}: unknown key {key!r}.{near_miss(key, keys)}")
    if missing := [key for key in keys if key not in data]:
        raise UserError(f"profile {where} lacks {', '.join(missing)}.")
    for key in ("sequence_length", "microbatch_size"):
        if not isinstance(data[key], int) or isinstance(data[key], bool) or data[key] < 1:
            raise UserError(f"profile {where}: {key} must be a whole number from 1, not {data[key]!r}.")
    for key in ("measured", "recompute"):
        if not isinstance(data[key], bool):
            raise UserError(f"profile {where}: {key} must be true or false, not {data[key]!r}.")
    times = {key: _seconds(data[key], f"profile {where}: {key}") for key in TIMES}
    if len({len(values) for values in times.values()}) != 1:
        raise UserError(f"profile {where}: {', '.join(TIMES)} must have a time for each block, all three.")
    return Profile(**{**data, **times})


def _seconds(values: Any, where: str) -> tuple[float, ...]:
    usable = isinstance(values, list) and values
    if not usable or not all(isinstance(v, int | float) and math.isfinite(v) and v >= 0 for v in values):
        raise UserError(f"{where} must be a list of seconds, a block each, none below 0.")
    return tuple(float(v) for v in values)


def stage_times(profile: Profile, parts: Sequence[StagePart], microbatch_size: int) -> list[StageTimes]:
    """Seconds of each stage. Another micro-batch size than the profile's scales forward and backward linearly.

    Raises UserError where the parts are not of a model of as many blocks.
    """
    count = parts[-1].blocks[-1] + 1
    if count != profile.blocks:
        raise UserError(f"profile {profile.name!r} has {profile.blocks} blocks, but the model has {count}.")
    scale = microbatch_size / profile.microbatch_size
    return [
        StageTimes(
            scale * sum(profile.forward_s[i] for i in part.blocks),
            scale * sum(profile.backward_s[i] for i in part.blocks),
            sum(profile.optimizer_s[i] for i in part.blocks),
        )
        for part in parts
    ]


def of_spec(profile: Profile, spec: RunSpec) -> list[StageTimes]:
    """Seconds of each stage of a run's pipeline. Raises UserError where the profile is of another model than the run's,
    or of another sequence length, or only one of the two recomputes."""
    from thinpipe.harness.models.base import resolve
    from thinpipe.harness.pipeline import partition

    asked = {
        "model": model_text(spec.model),
        "sequence_length": spec.task.sequence_length,
        "recompute": spec.train.recompute,
    }
    for key, value in asked.items():
        if (found := getattr(profile, key)) != value:
            raise UserError(
                f"profile {profile.name!r} does not fit the run: its {key} is {found!r}, the run's {value!r}. "
                "Choose another profile, or measure one: `thinpipe profile`."
            )
    parts = partition.split(resolve(spec.model, spec.task), spec.pipeline.stages, spec.pipeline.cuts)
    return stage_times(profile, parts, spec.microbatch_size)


def model_text(model: ModelSpec) -> str:
    """What profiles call a model.

    >>> from thinpipe.harness.spec import ModelSpec
    >>> model_text(ModelSpec(layers=6, width=64)), model_text(ModelSpec(preset="xl"))
    ('gpt2:tiny(layers=6, width=64)', 'gpt2:xl')
    """
    sizes = ("layers", "width", "heads")
    changed = ", ".join(f"{size}={getattr(model, size)}" for size in sizes if getattr(model, size) is not None)
    return f"{model.name}:{model.checkpoint or model.preset}" + (f"({changed})" if changed else "")


def write(profile: Profile, path: Path) -> None:
    """Write a profile as `load` reads it, a key a line."""
    from thinpipe.harness.store import explain_disk_full

    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in profile.to_json().items())
    with explain_disk_full(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        try:
            part.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
