"""RunSpec: one run, wholly described. Validated, frozen, with a canonical form that names it.

`run_id` is the hash of the canonical JSON and of the VERSION of each plug-in it uses; `train_id` leaves out network
and measure: it names what the numbers of training depend on, so runs that share it must share their loss curve.
Canonical JSON omits defaults, so a field added later, with a default that means "as before", changes no id.

>>> RunSpec().pipeline.stages
2
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from thinpipe.harness import plugins
from thinpipe.harness.errors import UserError, near_miss


class Part(BaseModel):
    """Base of every part: frozen, no unknown keys, no infinities."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelSpec(Part):
    """Which model, at which size. `checkpoint`: a local directory (config.json, *.safetensors), else random weights.

    layers, width, heads override the preset; the vocabulary comes from the task unless a checkpoint sets it.
    """

    name: str = "gpt2"
    preset: str = "tiny"
    checkpoint: str | None = None
    layers: int | None = Field(None, ge=1)
    width: int | None = Field(None, ge=8)
    heads: int | None = Field(None, ge=1)


class TaskSpec(Part):
    """Data. corpus: a name the task knows, or a path to a text file; lengths in tokens, counts in sequences."""

    name: str = "lm"
    corpus: str = "pydoc"
    vocab_size: int = Field(1024, ge=300)
    sequence_length: int = Field(64, ge=2)
    num_sequences: int | None = Field(256, ge=1)
    num_eval_sequences: int = Field(64, ge=0)


class PipelineSpec(Part):
    """stages: one rank and one host each. microbatches: pieces a batch is cut into."""

    stages: int = Field(2, ge=1, le=64)
    microbatches: int = Field(4, ge=1)
    schedule: Literal["gpipe"] = "gpipe"


class Rule(Part):
    """From epoch `from_epoch` on, at `boundary` (None = all), use this compressor; later rules win."""

    from_epoch: int = Field(0, ge=0)
    boundary: int | None = Field(None, ge=0)
    use: str


class CompressionSpec(Part):
    """What each direction uses: one compressor text or a list of rules. `warmup_epochs` is sugar for a first rule
    `none`. evaluation: `off` sends evaluation uncompressed, `codec` uses the inner codec without memory."""

    forward: str | tuple[Rule, ...] = "none"
    backward: str | tuple[Rule, ...] = "none"
    warmup_epochs: int = Field(0, ge=0)
    evaluation: Literal["off", "codec"] = "off"

    def rules(self, direction: Literal["forward", "backward"]) -> tuple[Rule, ...]:
        """The schedule of one direction, sugar resolved, in order of precedence (last match wins)."""
        value: str | tuple[Rule, ...] = getattr(self, direction)
        rules = (Rule(use=value),) if isinstance(value, str) else value
        if self.warmup_epochs == 0:
            return rules
        late = tuple(r.model_copy(update={"from_epoch": max(r.from_epoch, self.warmup_epochs)}) for r in rules)
        return (Rule(use="none"), *late)

    def compressor(self, direction: Literal["forward", "backward"], boundary: int, epoch: int) -> str:
        """The text of the compressor in force at one boundary in one epoch."""
        use = "none"
        for rule in self.rules(direction):
            if rule.from_epoch <= epoch and rule.boundary in (None, boundary):
                use = rule.use
        return use


class NetworkSpec(Part):
    """Every link of the run, both ways. rate_mbit None = not limited; delay one way. 1 Mbit = 10^6 bits at layer 2."""

    rate_mbit: float | None = Field(None, gt=0)
    delay_ms: float = Field(0.0, ge=0)
    jitter_ms: float = Field(0.0, ge=0)
    loss_pct: float = Field(0.0, ge=0, lt=100)
    queue_ms: float = Field(100.0, gt=0)
    mtu: int = Field(1500, ge=576, le=9000)
    congestion: str = "cubic"


class TrainSpec(Part):
    """Optimisation. AdamW, linear warm-up then linear decay to 0 over epochs x steps an epoch."""

    epochs: int = Field(12, ge=1)
    max_steps: int | None = Field(None, ge=1)
    batch_size: int = Field(16, ge=1)
    lr: float = Field(3e-3, gt=0)
    warmup_steps: int = Field(20, ge=0)
    weight_decay: float = Field(0.01, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    clip_norm: float | None = Field(1.0, gt=0)
    evaluate_every: int = Field(1, ge=0)


class TimingSpec(Part):
    """A timing run cycles `batches` fixed batches: one unmeasured pass, then `passes` measured ones."""

    batches: int = Field(4, ge=1, le=4)
    passes: int = Field(3, ge=1)


class RunSpec(Part):
    """One run. See the parts for units; see docs/formats.md for the file it is stored in."""

    model: ModelSpec = ModelSpec()
    task: TaskSpec = TaskSpec()
    pipeline: PipelineSpec = PipelineSpec()
    compression: CompressionSpec = CompressionSpec()
    network: NetworkSpec = NetworkSpec()
    train: TrainSpec = TrainSpec()
    timing: TimingSpec = TimingSpec()
    seed: int = Field(0, ge=0, lt=2**32)
    measure: Literal["convergence", "timing", "full"] = "convergence"

    @field_validator("compression")
    @classmethod
    def _known_compressors(cls, value: CompressionSpec) -> CompressionSpec:
        from thinpipe.harness.compression import grammar

        for direction in ("forward", "backward"):
            for rule in value.rules(direction):
                grammar.check(rule.use)
        return value

    @model_validator(mode="after")
    def _consistent(self) -> RunSpec:
        batch, pieces = self.train.batch_size, self.pipeline.microbatches
        if batch % pieces:
            raise ValueError(
                f"train.batch_size {batch} cannot be cut into pipeline.microbatches {pieces} equal pieces; "
                f"choose a multiple of {pieces}"
            )
        count = self.task.num_sequences
        if count is not None and count < batch:
            raise ValueError(f"task.num_sequences {count} is less than one batch (train.batch_size {batch})")
        for direction in ("forward", "backward"):
            for rule in self.compression.rules(direction):
                if rule.boundary is not None and rule.boundary >= self.pipeline.stages - 1:
                    raise ValueError(
                        f"compression.{direction} names boundary {rule.boundary}, but {self.pipeline.stages} stages "
                        f"have boundaries 0..{self.pipeline.stages - 2}"
                    )
        return self

    @property
    def steps_per_epoch(self) -> int | None:
        """Full batches in an epoch (the incomplete last one is left out), None where the corpus decides."""
        count = self.task.num_sequences
        return None if count is None else count // self.train.batch_size

    def plugin_versions(self) -> dict[str, int]:
        """VERSION of each plug-in the run uses, by `kind/name`."""
        from thinpipe.harness.compression import grammar

        used = {f"models/{self.model.name}", f"tasks/{self.task.name}"}
        for direction in ("forward", "backward"):
            for rule in self.compression.rules(direction):
                used |= grammar.plugins_used(rule.use)
        pairs = (name.split("/") for name in sorted(used))
        return {f"{kind}/{name}": plugins.get(kind, name).version for kind, name in pairs}

    def canonical(self, *, exclude: tuple[str, ...] = ()) -> dict[str, Any]:
        """The spec as plain data without defaults: what is hashed, stored and shown."""
        data = self.model_dump(mode="json", exclude_defaults=True)
        return {key: value for key, value in data.items() if key not in exclude}

    @property
    def run_id(self) -> str:
        """12 hex digits that name this run."""
        return _digest(self.canonical(), self.plugin_versions())

    @property
    def train_id(self) -> str:
        """12 hex digits that name what the loss curve depends on: all but network, measure and timing."""
        return _digest(self.canonical(exclude=("network", "measure", "timing")), self.plugin_versions())

    @property
    def cell_id(self) -> str:
        """12 hex digits that name everything but the seed: the runs of a cell share it."""
        return _digest({"cell": self.canonical(exclude=("seed",))}, self.plugin_versions())

    @property
    def network_id(self) -> str:
        """12 hex digits that name the network: calibrations are kept by it."""
        return _digest({"hosts": self.pipeline.stages, **self.network.model_dump(mode="json")}, {})


def parse(data: Mapping[str, Any], *, where: str = "run") -> RunSpec:
    """Build a RunSpec from plain data. Raises UserError naming each wrong key, with a near miss."""
    try:
        return RunSpec.model_validate(dict(data))
    except ValidationError as error:
        raise UserError(f"{where}: " + "; ".join(_explain(item) for item in error.errors())) from None
    except UserError as error:  # of a compressor's text: pydantic passes on what is no ValueError
        raise UserError(f"{where}: {error}") from None


def _explain(item: Any) -> str:
    location = [str(part) for part in item["loc"]]
    if item["type"] == "extra_forbidden":
        return f"unknown key {'.'.join(location)!r}.{near_miss(location[-1], _fields(location[:-1]))}"
    # A union's branches appear in the location; they say nothing to a reader.
    shown = ".".join(part for part in location if not part.startswith(("tuple[", "str")))
    message = item["msg"].removeprefix("Value error, ")
    return f"{shown}: {message}" if shown else message


def _fields(location: list[str]) -> list[str]:
    part: Any = RunSpec
    for name in location:
        field = part.model_fields.get(name) if hasattr(part, "model_fields") else None
        part = field.annotation if field is not None else Rule
    return list(part.model_fields) if hasattr(part, "model_fields") else []


def _digest(data: Mapping[str, Any], versions: Mapping[str, int]) -> str:
    text = json.dumps({"spec": data, "plugins": versions}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
