"""RunSpec: one run, wholly described. Validated, frozen, with a canonical form that names it.

`run_id` is the hash of the canonical JSON (without checkpoint and trace) and of the VERSION of each plug-in it uses;
`train_id` leaves out network, measure, timing and the rate between data groups too: it names what the numbers of
training depend on, so runs that share it must share their loss curve.
Canonical JSON omits defaults, so a field added later, with a default that means "as before", changes no id.

>>> RunSpec().pipeline.stages
2
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from thinpipe.harness import plugins
from thinpipe.harness.compression_presets import PRESETS
from thinpipe.harness.errors import UserError, near_miss

# Parts of a run that change nothing it measures, so neither an id.
NO_NUMBERS = ("checkpoint", "trace")
RATIO = re.compile(r"rho:[0-9]+(\.[0-9]+)?")
# Schedules that compute the gradients of inputs and of weights apart.
SPLIT_BACKWARD = ("interleaved-zb", "zbv-zb", "dualpipev")


class Part(BaseModel):
    """Base of every part: frozen, no unknown keys, no infinities."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def setting(default: Any, meaning: str, unit: str = "", **limits: Any) -> Any:
    """A field with what docs/settings.md says of it. default `...`: it must be given; limits: of pydantic's Field."""
    return Field(default, description=meaning, json_schema_extra={"unit": unit}, **limits)


class ModelSpec(Part):
    """Which model, at which size. layers, width, heads override the preset; a checkpoint fixes its own sizes.

    Dropout is off unless asked for: an activation that differs at every visit is what a delta memory would have to
    send. `dropout_masks = "sample"` keys each mask by sample and place, so that a sample meets the same one each time.
    """

    name: str = setting("gpt2", "the model plug-in: `thinpipe list models`")
    preset: str = setting(
        "tiny", "a size by name, e.g. `micro`, `tiny` or `small` of gpt2; leave it out beside a checkpoint"
    )
    checkpoint: str | None = setting(
        None,
        "a local folder (config.json, *.safetensors, or what `thinpipe partition` wrote) or the name of a model "
        "on a hub; none = random weights",
    )
    layers: int | None = setting(None, "blocks; none = as the preset says", ge=1)
    width: int | None = setting(None, "elements of a token's activation; none = as the preset says", ge=8)
    heads: int | None = setting(None, "attention heads, which must divide the width; none = as the preset says", ge=1)
    shared: Literal["auto", "copies", "frozen", "summed"] = setting(
        "auto",
        "what becomes of a parameter that several stages use (a tied head, relative position embeddings): `copies` "
        "trained apart, `frozen` copies, or `summed` gradients (exact; costs an exchange every step); auto = the "
        "model's usual one: `thinpipe list models`",
    )
    dropout: float = setting(0.0, "probability of each dropout of the model", ge=0, lt=1)
    dropout_masks: Literal["sample", "step"] = setting(
        "sample", "whether a sample meets the same dropout masks at each visit, or others at each step"
    )


class TaskSpec(Part):
    """Data. The model's vocabulary is the task's, unless a checkpoint sets a larger one."""

    name: str = setting("lm", "the task plug-in: `thinpipe list tasks`")
    corpus: str = setting(
        "pydoc",
        "a data set the task knows (`thinpipe list tasks`), the path of one's own (lm: UTF-8 text; classify: CSV, TSV "
        "or JSONL; image: a folder with a folder a class), or a folder saved by `datasets`",
        min_length=1,
    )
    tokenizer: str | None = setting(
        None,
        "a folder or hub name of a Hugging Face tokenizer; `checkpoint` = the one beside model.checkpoint; none = "
        "trained on the corpus",
    )
    vocab_size: int = setting(
        1024, "size of the vocabulary trained on the corpus; beside a tokenizer at least its size", "tokens", ge=300
    )
    sequence_length: int = setting(64, "length of a sequence (image: no effect)", "tokens", ge=2)
    num_sequences: int | None = setting(256, "samples to train on; none = all there are", "samples", ge=1)
    num_eval_sequences: int = setting(64, "samples held out and evaluated on", "samples", ge=0)
    num_labels: int | None = setting(
        None, "classes of a classification; none = as the known data set has", "classes", ge=2, le=100_000
    )
    augment: Literal["none", "sample", "variant"] = setting(
        "none",
        "image: random crop and flip; `sample` draws once a sample, `variant` one of `variants` an epoch, each with an "
        "identity of its own for memories keyed by sample",
    )
    variants: int = setting(4, "augmented variants of a sample (augment = `variant`)", ge=2, le=64)


class PipelineSpec(Part):
    """How the model is cut, and a batch with it."""

    stages: int = setting(
        2, "pieces of the model; one rank and one host each, unless stages_per_rank says more", ge=1, le=64
    )
    microbatches: int = setting(4, "equal pieces a batch is cut into", ge=1)
    schedule: Literal["gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zb", "zbv-zb", "dualpipev"] = (
        setting(
            "gpipe",
            "order of the micro-batches, by torch.distributed.pipelining: `gpipe` all forward, then all backward; "
            "those after `1f1b` need stages_per_rank of 2 or more",
        )
    )
    stages_per_rank: int = setting(1, "stages a rank holds (interleaved and V-shaped schedules)", ge=1, le=16)
    cuts: tuple[int, ...] | None = setting(
        None,
        "the blocks that stages 1, 2, ... begin with; none = balanced by estimated time, head and embedding counted",
    )

    @property
    def ranks(self) -> int:
        """Ranks of one pipeline."""
        return self.stages // self.stages_per_rank


class DataParallelSpec(Part):
    """Whole pipelines side by side, each on samples of its own; world size = ranks of a pipeline x groups."""

    groups: int = setting(1, "pipelines", ge=1, le=64)
    exchange: Literal["none", "fp16", "bf16", "powersgd", "quantized-adam"] = setting(
        "none",
        "how gradients are averaged between the groups: in full, by DDP's fp16, bf16 or PowerSGD hook, or AC-SGD's "
        "quantised momentum (`quantized-adam`: after compression.warmup_epochs)",
    )
    bits: int = setting(8, "quantized-adam: bits of an exchanged momentum", "bit", ge=2, le=8)
    matrix_rank: int = setting(2, "powersgd: rank of the approximation", ge=1, le=64)
    rate_mbit: float | None = setting(
        None, "rate of the links inside a data group; none = network.rate_mbit", "Mbit/s", ge=0.1, le=40_000
    )


class Rule(Part):
    """From epoch `from_epoch` on, at `boundary`, use this compressor; of rules that apply, the last one wins."""

    from_epoch: int = setting(0, "the first epoch it holds in, counted from 0", "epochs", ge=0)
    boundary: int | None = setting(None, "0 = between stages 0 and 1; left out = every boundary", ge=0)
    use: str = setting(..., "the compressor")


class CompressionSpec(Part):
    """What crosses the boundaries instead of the tensors: one compressor a direction, or rules."""

    preset: str | None = setting(
        None,
        "published settings by name (`thinpipe codecs --presets`) in place of forward and backward; warmup_epochs and "
        "evaluation hold where they are set beside it",
    )
    forward: str | tuple[Rule, ...] = setting("none", "what activations cross by")
    backward: str | tuple[Rule, ...] = setting("none", "what activation gradients cross by")
    warmup_epochs: int = setting(
        0, "uncompressed epochs at the start; sugar for a first rule `none`, the others starting later", "epochs", ge=0
    )
    evaluation: Literal["off", "codec"] = setting(
        "off", "how evaluations cross: uncompressed, or by the codecs in force without their memory"
    )
    budget_bits: float | None = setting(
        None,
        "payload of a training step, both directions and all boundaries together, kept by steering the steps of grid "
        "codecs; none = they stay as written",
        "bits an element",
        gt=0,
        le=32,
    )
    budget_by: Literal["error", "sensitivity"] = setting(
        "error",
        "what the budget is shared out by: relative errors alike everywhere, or errors of activations by the squared "
        "gradient there",
    )

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        """Put what a preset says in its place: nothing of the name is left, so a run's id does not know of it."""
        if not isinstance(data, Mapping) or data.get("preset") is None:
            return data
        name = data["preset"]
        if not isinstance(name, str) or name not in PRESETS:
            raise ValueError(f"preset: unknown preset {name!r}.{near_miss(str(name), PRESETS)}")
        if own := [key for key in ("forward", "backward") if key in data]:
            raise ValueError(f"preset {name!r} says what crosses: leave it out, or {' and '.join(own)}")
        return {**PRESETS[name].settings(), **data, "preset": None}

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
    rate: str | None = setting(
        None,
        "`rho:X`: the rate at which moving a micro-batch's boundary tensors (float32, both ways) takes X times as long "
        "as computing it; worked out once an experiment, and then stands in rate_mbit beside it",
    )
    delay_ms: float = setting(
        0.0, "one-way delay added to a link (not built yet: a run with it is refused)", "ms", ge=0, le=10_000
    )
    jitter_ms: float = setting(0.0, "spread of the delay (not built yet)", "ms", ge=0, le=10_000)
    loss_pct: float = setting(0.0, "packets dropped at random (not built yet)", "%", ge=0, lt=100)
    queue_ms: float = setting(100.0, "length of a link's queue, as time at its rate", "ms", gt=0, le=60_000)
    mtu: int = setting(1500, "largest IP packet", "B", ge=576, le=9000)
    congestion: str = setting(
        "cubic", "TCP congestion control, as the kernel calls it", pattern=r"^[a-z][a-z0-9_]{1,14}$"
    )

    @field_validator("rate")
    @classmethod
    def _a_ratio(cls, value: str | None) -> str | None:
        if value is not None and (RATIO.fullmatch(value) is None or float(value.removeprefix("rho:")) == 0):
            raise ValueError(f"{value!r} is no ratio above 0: write it as rho:X, e.g. rho:2.5")
        return value

    @property
    def rho(self) -> float | None:
        """The ratio that `rate` asks for; None where the rate is given as such."""
        return None if self.rate is None else float(self.rate.removeprefix("rho:"))

    @property
    def is_resolved(self) -> bool:
        """Whether it is known how fast a link is to be."""
        return self.rate is None or self.rate_mbit is not None

    def link(self) -> dict[str, Any]:
        """What shapes a link: two networks that agree in it are one."""
        return self.model_dump(mode="json", exclude={"rate"})


# What AC-SGD's code does: micro-batch losses are not divided by their number, and each stage clips by its own norm.
TRAIN_PRESETS: dict[str, dict[str, Any]] = {
    "acsgd": {"loss_scaling": "sum", "clip_scope": "stage", "clip_norm": 1.0, "weight_decay": 0.01},
}


class TrainSpec(Part):
    """Optimisation: the learning rate rises linearly over `warmup_steps`, then follows its schedule.

    It reaches 0 at the end of the steps that are planned: epochs x steps an epoch, or `max_steps` where that is less
    (a shorter run is another schedule, not a piece of the longer one), or `lr_epochs`; in a timing run at the end of
    its passes. A warm-up longer than the run is shortened to the run less its last step.
    """

    preset: Literal["acsgd"] | None = setting(
        None, "fills in loss_scaling, clip_scope, clip_norm and weight_decay as a published system has them"
    )
    epochs: int = setting(12, "passes over the training sequences (timing runs: no effect)", "epochs", ge=1, le=10_000)
    max_steps: int | None = setting(
        None, "end after this many optimizer steps; none = at the last epoch's end", "steps", ge=1, le=10_000_000
    )
    max_steps_per_epoch: int | None = setting(
        None, "end each epoch after this many optimizer steps; none = when its samples are through", "steps", ge=1
    )
    batch_size: int = setting(
        16, "samples of an optimizer step: all micro-batches, passes and data groups together", "samples", ge=1
    )
    accumulate: int = setting(
        1, "passes through the pipeline an optimizer step is summed over, each of batch_size / accumulate", ge=1
    )
    optimizer: Literal["adamw", "sgd"] = setting("adamw", "the optimizer")
    lr: float = setting(3e-3, "the largest learning rate, at the end of the warm-up", gt=0)
    lr_schedule: Literal["linear", "cosine", "constant"] = setting(
        "linear", "how the learning rate falls to 0, if it does"
    )
    lr_epochs: int | None = setting(
        None,
        "epochs the schedule is laid out for (T_max), though the run may end earlier; none = the run's",
        "epochs",
        ge=1,
    )
    lr_update: Literal["step", "epoch"] = setting("step", "how often the schedule moves on")
    warmup_steps: int = setting(20, "steps over which the learning rate rises from 0", "steps", ge=0)
    weight_decay: float = setting(0.01, "adamw: on matrices only; sgd: on all, as torch's", ge=0)
    beta1: float = setting(0.9, "AdamW's", ge=0, lt=1)
    beta2: float = setting(0.999, "AdamW's", ge=0, lt=1)
    eps: float = setting(1e-8, "AdamW's", gt=0)
    momentum: float = setting(0.9, "momentum of SGD", ge=0, lt=1)
    clip_norm: float | None = setting(1.0, "largest norm of the gradient; none = not clipped", gt=0)
    clip_scope: Literal["global", "stage"] = setting("global", "the norm of all stages together, or of each by itself")
    loss_scaling: Literal["mean", "sum"] = setting(
        "mean", "whether a step's gradient is the mean or the sum of its micro-batches'"
    )
    autocast: Literal["none", "bf16"] = setting(
        "none", "`bf16`: matrix products in bfloat16; parameters, loss and boundary tensors stay float32"
    )
    recompute: bool = setting(
        False, "recompute a block's activations in the backward pass; codecs run once all the same"
    )
    evaluate_every: int = setting(1, "evaluate after so many epochs, and after the last; 0 = never", "epochs", ge=0)

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("preset") in TRAIN_PRESETS:
            return {**TRAIN_PRESETS[data["preset"]], **data}
        return data


class CheckpointSpec(Part):
    """Training checkpoints. They change no number, so no id either."""

    every: int | None = setting(
        None,
        "save the whole state of training after so many steps; a run that was killed goes on from the last",
        "steps",
        ge=1,
    )
    keep: bool = setting(False, "keep the last checkpoint when the run is done")


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
    data_parallel: DataParallelSpec = DataParallelSpec()
    train: TrainSpec = TrainSpec()
    timing: TimingSpec = TimingSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    trace: bool = setting(False, "also write the run as a Chrome trace, `trace.json` in its folder; changes no id")
    seed: int = setting(0, "seed of weights, data order and stochastic rounding; listed in `seeds`", ge=0, lt=2**32)
    measure: Literal["convergence", "timing", "full"] = setting(
        "convergence", "what the run is for: its loss curve, its step times, or both at once"
    )
    compute: Literal["real", "replay"] = setting(
        "real",
        "`replay`: stages wait as long as a profile says instead of computing, and tensors of the real shape cross the "
        "links; timing runs only",
    )
    profile: str | None = setting(
        None,
        "the seconds that a replay waits by: a profile that comes with thinpipe, or the path of one that "
        "`thinpipe profile` wrote",
        min_length=1,
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
        self._whole_pieces()
        self._whole_stages()
        self._used_settings()
        self._replayable()
        count, batch = self.task.num_sequences, self.train.batch_size
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
                self._stands_where_it_may(direction, rule)
        return self

    def _whole_pieces(self) -> None:
        parts = {
            "pipeline.microbatches": self.pipeline.microbatches,
            "train.accumulate": self.train.accumulate,
            "data_parallel.groups": self.data_parallel.groups,
        }
        total = math.prod(parts.values())
        if self.train.batch_size % total:
            shown = " x ".join(f"{name} {value}" for name, value in parts.items() if value > 1)
            raise ValueError(
                f"train.batch_size {self.train.batch_size} cannot be cut into {shown} equal pieces; "
                f"choose a multiple of {total}"
            )

    def _whole_stages(self) -> None:
        pipe = self.pipeline
        if pipe.stages % pipe.stages_per_rank:
            raise ValueError(
                f"pipeline.stages {pipe.stages} cannot be shared out, pipeline.stages_per_rank "
                f"{pipe.stages_per_rank} each; choose a multiple of it"
            )
        several = pipe.schedule not in ("gpipe", "1f1b")
        if several != (pipe.stages_per_rank > 1):
            need = "needs pipeline.stages_per_rank of 2 or more" if several else "has one stage a rank"
            raise ValueError(f"pipeline.schedule {pipe.schedule!r} {need}, not {pipe.stages_per_rank}")
        self._schedulable(pipe)
        if pipe.cuts is not None and (
            len(pipe.cuts) != pipe.stages - 1
            or list(pipe.cuts) != sorted(set(pipe.cuts))
            or min(pipe.cuts, default=1) < 1
        ):
            raise ValueError(
                f"pipeline.cuts {list(pipe.cuts)} does not give {pipe.stages} stages: it takes "
                f"{pipe.stages - 1} rising numbers of blocks, the first at least 1"
            )

    def _schedulable(self, pipe: PipelineSpec) -> None:
        """What the schedules of torch.distributed.pipelining ask for; they would say so when a rank has started."""
        name, pieces = pipe.schedule, pipe.microbatches
        if name in ("zbv-zb", "dualpipev") and pipe.stages_per_rank != 2:
            raise ValueError(f"pipeline.schedule {name!r} has two stages a rank: set pipeline.stages_per_rank to 2")
        if name in ("1f1b", "dualpipev") and pieces < pipe.stages:
            raise ValueError(
                f"pipeline.schedule {name!r} needs a micro-batch a stage: set pipeline.microbatches, now {pieces}, to "
                f"{pipe.stages} or more"
            )
        rounds = max(1, pieces // pipe.ranks)
        if name in ("interleaved-1f1b", "interleaved-zb") and pieces % rounds:
            raise ValueError(
                f"pipeline.schedule {name!r} takes micro-batches in rounds of at least one a rank: "
                f"pipeline.microbatches {pieces} is not {rounds} equal rounds; choose a multiple of {pipe.ranks}"
            )

    def _used_settings(self) -> None:
        """Refuse what would have no effect: it was meant to have one.

        What arms of one experiment share is let through where another arm may use it: bits of an exchange, momentum,
        warm-up epochs of compression, passes of a timing run.
        """
        train, parallel = self.train, self.data_parallel
        if parallel.groups == 1:
            for name in ("exchange", "rate_mbit"):
                if getattr(parallel, name) != type(parallel).model_fields[name].default:
                    raise ValueError(f"data_parallel.{name} has no effect with one group; set data_parallel.groups")
        if parallel.exchange == "quantized-adam":
            if train.optimizer != "adamw":
                raise ValueError(
                    'data_parallel.exchange "quantized-adam" is a form of Adam: set train.optimizer "adamw"'
                )
            if not self.compression.warmup_epochs:
                raise ValueError(
                    'data_parallel.exchange "quantized-adam" takes its frozen second moment from the warm-up: '
                    "set compression.warmup_epochs to 1 or more"
                )
            if self.model.shared == "summed":
                raise ValueError(
                    'data_parallel.exchange "quantized-adam" rounds the copies of a shared weight apart: '
                    'set model.shared to "copies" or "frozen", or choose another exchange'
                )
        if parallel.exchange == "powersgd" and self.measure == "timing" and self.timing.batches < 2:
            raise ValueError(
                'data_parallel.exchange "powersgd" sends the first two steps in full, and the unmeasured pass has only '
                "one: set timing.batches to 2 or more"
            )
        if self.model.shared == "summed" and train.clip_scope == "stage" and train.clip_norm is not None:
            raise ValueError(
                'train.clip_scope "stage" scales the copies of a shared weight apart: set model.shared to "copies" or '
                '"frozen", or train.clip_scope "global"'
            )
        acts = {
            "train.lr_epochs": (train.lr_schedule != "constant", 'on train.lr_schedule "constant"'),
            "train.lr_update": (train.lr_schedule != "constant", 'on train.lr_schedule "constant"'),
            "train.clip_scope": (train.clip_norm is not None or train.preset is not None, "without train.clip_norm"),
            "task.variants": (self.task.augment == "variant", 'without task.augment "variant"'),
            "model.dropout_masks": (self.model.dropout > 0, "without model.dropout"),
            "compression.budget_by": (self.compression.budget_bits is not None, "without compression.budget_bits"),
            "checkpoint.keep": (self.checkpoint.every is not None, "without checkpoint.every"),
        }
        if self.compression.budget_bits is not None and not self._steers():
            raise ValueError(
                "compression.budget_bits has no effect where no grid codec with by=step is in use: write one, or leave "
                "the budget out"
            )
        for name, (does, why) in acts.items():
            part, _, key = name.partition(".")
            value = getattr(self, part)
            if not does and getattr(value, key) != type(value).model_fields[key].default:
                raise ValueError(f"{name} has no effect {why}; leave it out")

    def _replayable(self) -> None:
        """Refuse what a replay cannot do, a profile without one, and a ratio where nothing crosses."""
        if self.network.rate is not None and self.pipeline.stages == 1:
            raise ValueError("network.rate has no effect with one stage: nothing crosses a link")
        if self.compute == "real":
            if self.profile is not None:
                raise ValueError('profile has no effect without compute "replay"; leave it out')
            return
        if self.profile is None:
            raise ValueError('compute "replay" waits by a profile: set profile, e.g. "v100-gpt2-xl", or a file\'s path')
        wrong = {
            f"measure {self.measure!r}": self.measure != "timing" and 'it trains nothing: set measure "timing"',
            "data_parallel.groups": self.data_parallel.groups > 1
            and "it has no gradients to exchange between groups: replay one group, or simulate several",
            f"pipeline.schedule {self.pipeline.schedule!r}": self.pipeline.schedule in SPLIT_BACKWARD
            and "a profile does not say how long the two halves of a backward pass take: choose another schedule",
            "train.autocast": self.train.autocast != "none" and "nothing is computed: leave it out",
        }
        for what, why in wrong.items():
            if why:
                raise ValueError(f'compute "replay" goes with no {what}: {why}')

    def _steers(self) -> bool:
        """Whether any compressor's step can be steered."""
        from thinpipe.harness.compression import grammar

        used = {r.use for d in ("forward", "backward") for r in self.compression.rules(d)}  # type: ignore[arg-type]
        return any(grammar.is_steered(text) for text in used)

    def _stands_where_it_may(self, direction: Literal["forward", "backward"], rule: Rule) -> None:
        """Refuse a compressor that asks for what is not there (grammar.uses)."""
        from thinpipe.harness.compression import grammar

        asked = grammar.uses(rule.use)
        if "peer" in asked and direction == "forward":
            raise ValueError(
                f"compression.forward {rule.use!r} codes by the help of the forward tensor, so it is for gradients: "
                "use it in compression.backward"
            )
        declared = plugins.get("models", self.model.name).parameters["boundary"]
        if "relu" in asked and not declared.get("relu", False):
            raise ValueError(
                f"compression.backward {rule.use!r} leaves out gradients where a ReLU's output is zero, and the "
                f"boundaries of model {self.model.name!r} carry no such output: leave relu(...) away"
            )

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
        if count is None:
            return None
        groups = self.data_parallel.groups
        steps = count // groups // (self.train.batch_size // groups)
        return min(steps, self.train.max_steps_per_epoch or steps)

    @property
    def world_size(self) -> int:
        """Ranks, and so hosts: pipelines side by side."""
        return self.pipeline.ranks * self.data_parallel.groups

    @property
    def microbatch_size(self) -> int:
        """Samples of one micro-batch."""
        pieces = self.pipeline.microbatches * self.train.accumulate * self.data_parallel.groups
        return self.train.batch_size // pieces

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
        return _digest(self.canonical(exclude=NO_NUMBERS), self.plugin_versions())

    def is_run(self, run_id: str, versions: Mapping[str, int]) -> bool:
        """Whether `run_id` names this spec with plug-ins of these versions."""
        return _digest(self.canonical(exclude=NO_NUMBERS), versions) == run_id

    @property
    def train_id(self) -> str:
        """12 hex digits that name what the loss curve depends on: all but network, measure and timing."""
        left_out = ("network", "measure", "timing", *NO_NUMBERS)
        data = self.canonical(exclude=left_out)
        parallel = {key: value for key, value in data.pop("data_parallel", {}).items() if key != "rate_mbit"}
        return _digest({**data, **({"data_parallel": parallel} if parallel else {})}, self.plugin_versions())

    @property
    def cell_id(self) -> str:
        """12 hex digits that name everything but the seed: the runs of a cell share it."""
        return _digest({"cell": self.canonical(exclude=("seed", *NO_NUMBERS))}, self.plugin_versions())

    @property
    def network_id(self) -> str:
        """12 hex digits that name the network: calibrations are kept by it."""
        groups, rate = self.data_parallel.groups, self.data_parallel.rate_mbit
        data = {} if groups == 1 else {"groups": groups, "data_rate_mbit": rate}
        return _digest({"hosts": self.world_size, **data, **self.network.link()}, {})


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
