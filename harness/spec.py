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


def setting(default: Any, meaning: str, unit: str = "", **limits: Any) -> Any:
    """A field with what docs/settings.md says of it. default `...`: it must be given; limits: of pydantic's Field."""
    return Field(default, description=meaning, json_schema_extra={"unit": unit}, **limits)


class ModelSpec(Part):
    """Which model, at which size. layers, width, heads override the preset; a checkpoint fixes its own sizes."""

    name: str = setting("gpt2", "the model plug-in: `thinpipe list models`")
    preset: str = setting(
        "tiny", "a size by name, e.g. `micro`, `tiny` or `small` of gpt2; leave it out beside a checkpoint"
    )
    checkpoint: str | None = setting(None, "a local folder (config.json, *.safetensors); none = random weights")
    layers: int | None = setting(None, "blocks; none = as the preset says", ge=1)
    width: int | None = setting(None, "elements of a token's activation; none = as the preset says", ge=8)
    heads: int | None = setting(None, "attention heads, which must divide the width; none = as the preset says", ge=1)


class TaskSpec(Part):
    """Data. The model's vocabulary is the task's, unless a checkpoint sets a larger one."""

    name: str = setting("lm", "the task plug-in: `thinpipe list tasks`")
    corpus: str = setting(
        "pydoc", "a text the task knows (`pydoc`, `shakespeare`) or the path of a UTF-8 file", min_length=1
    )
    vocab_size: int = setting(1024, "size of the vocabulary trained on the corpus", "tokens", ge=300)
    sequence_length: int = setting(64, "length of a sequence", "tokens", ge=2)
    num_sequences: int | None = setting(256, "sequences to train on; none = all there are", "sequences", ge=1)
    num_eval_sequences: int = setting(64, "sequences held out and evaluated on", "sequences", ge=0)


class PipelineSpec(Part):
    """How the model is cut, and a batch with it."""

    stages: int = setting(2, "pieces of the model: one rank and one host each", ge=1, le=64)
    microbatches: int = setting(4, "equal pieces a batch is cut into", ge=1)
    schedule: Literal["gpipe"] = setting("gpipe", "order of the micro-batches: all forward, then all backward")


class Rule(Part):
    """From epoch `from_epoch` on, at `boundary`, use this compressor; of rules that apply, the last one wins."""

    from_epoch: int = setting(0, "the first epoch it holds in, counted from 0", "epochs", ge=0)
    boundary: int | None = setting(None, "0 = between stages 0 and 1; left out = every boundary", ge=0)
    use: str = setting(..., "the compressor")


class CompressionSpec(Part):
    """What crosses the boundaries instead of the tensors: one compressor a direction, or rules."""

    forward: str | tuple[Rule, ...] = setting("none", "what activations cross by")
    backward: str | tuple[Rule, ...] = setting("none", "what activation gradients cross by")
    warmup_epochs: int = setting(
        0, "uncompressed epochs at the start; sugar for a first rule `none`, the others starting later", "epochs", ge=0
    )
    evaluation: Literal["off", "codec"] = setting(
        "off", "how evaluations cross: uncompressed, or by the codecs in force without their memory"
    )

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
    """Every link of the run, both ways. 1 Mbit = 10^6 bits, counted at layer 2 (Ethernet, IP and TCP headers too)."""

    rate_mbit: float | None = setting(None, "rate of a link; none = not limited", "Mbit/s", ge=0.1, le=40_000)
    delay_ms: float = setting(0.0, "one-way delay added to a link", "ms", ge=0, le=10_000)
    jitter_ms: float = setting(0.0, "spread of the delay", "ms", ge=0, le=10_000)
    loss_pct: float = setting(0.0, "packets dropped at random", "%", ge=0, lt=100)
    queue_ms: float = setting(100.0, "length of a link's queue, as time at its rate", "ms", gt=0, le=60_000)
    mtu: int = setting(1500, "largest IP packet", "B", ge=576, le=9000)
    congestion: str = setting(
        "cubic", "TCP congestion control, as the kernel calls it", pattern=r"^[a-z][a-z0-9_]{1,14}$"
    )


class TrainSpec(Part):
    """Optimisation: AdamW; the learning rate rises linearly over `warmup_steps`, then falls linearly to 0.

    It reaches 0 at the end of the steps that are planned: epochs x steps an epoch, or `max_steps` where that is less
    (a shorter run is another schedule, not a piece of the longer one); in a timing run at the end of its passes. A
    warm-up longer than the run is shortened to the run less its last step.
    """

    epochs: int = setting(12, "passes over the training sequences (timing runs: no effect)", "epochs", ge=1, le=10_000)
    max_steps: int | None = setting(
        None, "end after this many optimizer steps; none = at the last epoch's end", "steps", ge=1, le=10_000_000
    )
    batch_size: int = setting(16, "sequences of an optimizer step, all micro-batches together", "sequences", ge=1)
    lr: float = setting(3e-3, "the largest learning rate, at the end of the warm-up", gt=0)
    warmup_steps: int = setting(20, "steps over which the learning rate rises from 0", "steps", ge=0)
    weight_decay: float = setting(0.01, "AdamW's, on matrices only", ge=0)
    beta1: float = setting(0.9, "AdamW's", ge=0, lt=1)
    beta2: float = setting(0.999, "AdamW's", ge=0, lt=1)
    eps: float = setting(1e-8, "AdamW's", gt=0)
    clip_norm: float | None = setting(1.0, "largest global norm of the gradient; none = not clipped", gt=0)
    evaluate_every: int = setting(1, "evaluate after so many epochs, and after the last; 0 = never", "epochs", ge=0)


class TimingSpec(Part):
    """A timing run cycles `batches` fixed batches: one unmeasured pass, then `passes` measured ones."""

    batches: int = setting(4, "batches it cycles", ge=1, le=4)
    passes: int = setting(3, "measured passes over them", ge=1, le=1_000)


class RunSpec(Part):
    """One run. See the parts for units and docs/settings.md for all of them in one table.

    measure says what a run is for:

        convergence  a loss curve: seeded epochs, evaluations, boundary errors sampled every 4 steps; its step times
                     are kept, but figures of timing leave it out
        timing       step times: a few fixed batches again and again, nothing sampled, no evaluation, no loss reported
        full         a convergence run whose step times count as well: figures of timing show it too
    """

    model: ModelSpec = ModelSpec()
    task: TaskSpec = TaskSpec()
    pipeline: PipelineSpec = PipelineSpec()
    compression: CompressionSpec = CompressionSpec()
    network: NetworkSpec = NetworkSpec()
    train: TrainSpec = TrainSpec()
    timing: TimingSpec = TimingSpec()
    seed: int = setting(0, "seed of weights, data order and stochastic rounding; listed in `seeds`", ge=0, lt=2**32)
    measure: Literal["convergence", "timing", "full"] = setting(
        "convergence", "what the run is for: its loss curve, its step times, or both at once"
    )

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
                self._comes_into_force(direction, rule)
        return self

    def _comes_into_force(self, direction: Literal["forward", "backward"], rule: Rule) -> None:
        """Refuse a rule that begins after the run's end: its arm would be another method than its label says."""
        from thinpipe.harness.compression import grammar

        epochs = self.planned_epochs
        # A timing run has its last rules in force throughout.
        if self.measure == "timing" or rule.from_epoch < epochs:
            return
        for boundary in range(self.pipeline.stages - 1):
            last = self.compression.compressor(direction, boundary, epochs - 1)
            if rule.boundary in (None, boundary) and grammar.canonical(last) != grammar.canonical(rule.use):
                raise ValueError(
                    f"compression.{direction}: {rule.use!r} is to come into force in epoch {rule.from_epoch} (counted "
                    f"from 0, compression.warmup_epochs included), but the run ends after {epochs} epoch(s) "
                    "(train.epochs, train.max_steps). Let it begin earlier, or train longer"
                )

    @property
    def steps_per_epoch(self) -> int | None:
        """Full batches in an epoch (the incomplete last one is left out), None where the corpus decides."""
        count = self.task.num_sequences
        return None if count is None else count // self.train.batch_size

    @property
    def planned_epochs(self) -> int:
        """Epochs that a convergence run begins: `epochs`, or fewer where `max_steps` is known to end it earlier."""
        limit, each = self.train.max_steps, self.steps_per_epoch
        return self.train.epochs if limit is None or each is None else min(self.train.epochs, -(-limit // each))

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

    def is_run(self, run_id: str, versions: Mapping[str, int]) -> bool:
        """Whether `run_id` names this spec with plug-ins of these versions."""
        return _digest(self.canonical(), versions) == run_id

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
