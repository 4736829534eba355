"""How much memory each rank of a run will need, from its spec alone. Pure; imports no torch. Formulas: docs/numbers.md.

A rank's peak is over what its process has after its imports (rss.py measures the same). It comes in a backward pass:

    forward of n micro-batches        backward of the first      of the others
               ______________    ___
             _/              \\__/   \\___            n = micro-batches in flight (the schedule)
          __/                           \\___        a unit (head, block, embeddings) that is passed frees what it
    _____/                                           kept and leaves its gradients
    parameters, optimizer, buffers, caches: all the time

glibc's malloc takes tensors of up to 32 MiB from its heap, which does not shrink where something lies above a hole,
and gives larger ones pages of their own, which go back at once. So the peak is the heap's highest and its holes, and
the most that large tensors take, whether or not both come together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from thinpipe.harness import plugins
from thinpipe.harness.compression import grammar
from thinpipe.harness.errors import UserError
from thinpipe.harness.models import base as models
from thinpipe.harness.models.base import ModelShape, StagePart
from thinpipe.harness.pipeline import partition, placement
from thinpipe.harness.predict import steps
from thinpipe.harness.regimes import DIRECTIONS
from thinpipe.harness.spec import RunSpec, TaskSpec
from thinpipe.harness.tasks import base as tasks

FLOAT = 4
HEADER = 64
# Measured: what code paths met for the first time, gloo and Python's objects take; and holes in the heap, as shares of
# what one micro-batch keeps (of what it makes anew where that is recomputed) and of gradients and optimizer's state.
FIXED_BYTES = 8 * 2**20
HOLES_KEPT, HOLES_ANEW, HOLES_STATE = 0.8, 1.5, 0.2
# With dropout: copies of the attention weights (heads x tokens x tokens) that a block keeps, and that it needs besides.
DROPOUT_KEPT, DROPOUT_HOLES = 2.25, 10
SPAN_BYTES = 500
# Measured: scikit-learn, which the last stage imports to score its first evaluation.
SCORING_BYTES = 57 * 2**20
# glibc's DEFAULT_MMAP_THRESHOLD_MAX.
LARGE_BYTES = 32 * 2**20
# The largest tensor of what a block keeps, and of its parameters: the backward pass needs their gradients besides.
TENSOR, MATRIX = 1 / 4, 1 / 3
# A run keeps this share of the free memory for everything else.
RESERVE = 0.1
# Copies of the gradients that each exchange keeps: buckets, and momenta or errors.
EXCHANGES = {"none": 1, "fp16": 1, "bf16": 1, "powersgd": 3, "quantized-adam": 2}
CACHE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "none": 4}
# Of rows on disk, as many messages' are in RAM at once, at most (compression/disk.py).
DISK_MESSAGES = 4


@dataclass(frozen=True)
class Prediction:
    """Bytes of one rank at its peak, by what they are for; `activations` with what the backward pass needs besides
    them; `buffers`: frames and decoded tensors; `scoring`: of a classification's evaluations; `other`: holes in the
    heap, spans, and what every process takes."""

    rank: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    caches: int
    scoring: int
    other: int

    @property
    def parts(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "rank"}

    @property
    def total(self) -> int:
        return sum(self.parts.values())


class Unit(NamedTuple):
    """A head, a block or the embeddings: its parameters and what it keeps for the backward pass of a micro-batch, of
    these the largest, what its backward pass needs besides, and holes that its forward pass leaves. Elements."""

    parameters: int
    kept: int
    matrix: int
    tensor: int
    besides: int
    holes: int

    def held(self, *, large: bool) -> tuple[int, int]:
        """(parameters, kept) of which the largest are, or are not, LARGE_BYTES."""
        return (
            self.parameters if (FLOAT * self.matrix > LARGE_BYTES) is large else 0,
            self.kept if (FLOAT * self.tensor > LARGE_BYTES) is large else 0,
        )


def predict(spec: RunSpec, num_samples: int | None = None) -> list[Prediction]:
    """Each rank's peak, ranks ascending. num_samples: of the training data; None = as the spec says."""
    shape = models.resolve(spec.model, spec.task)
    parts = partition.split(shape, spec.pipeline.stages, spec.pipeline.cuts)
    samples = _samples(spec, num_samples)
    pipeline = [_rank(spec, shape, parts, place, samples) for place in range(spec.pipeline.ranks)]
    return [Prediction(rank, **pipeline[rank % spec.pipeline.ranks].parts) for rank in range(spec.world_size)]


def fits(spec: RunSpec, num_samples: int | None = None, available_bytes: int | None = None) -> None:
    """Raise UserError where the ranks of a run, all on this machine, need more than it has free (None: asked of it)."""
    found = predict(spec, num_samples)
    needed = sum(one.total for one in found)
    free = _available() if available_bytes is None else available_bytes
    allowed = int(free * (1 - RESERVE))
    if needed <= allowed:
        return
    most = max(found, key=lambda one: one.total)
    parts = sorted(most.parts.items(), key=lambda part: -part[1])
    shown = ", ".join(f"{name} {_gib(size)}" for name, size in parts if size > most.total / 100)
    raise UserError(
        f"the ranks of this run need {_gib(needed)} GiB together, but only {_gib(allowed)} GiB of the free "
        f"{_gib(free)} GiB may be used. Rank {most.rank} needs most, {_gib(most.total)} GiB: {shown}. "
        f"{_advice(spec, found)}"
    )


# --- one rank ---


def _rank(spec: RunSpec, shape: ModelShape, parts: Sequence[StagePart], place: int, samples: int) -> Prediction:
    own = placement.stages_of(place, spec.pipeline)
    units = {stage: _units(spec, shape, parts[stage]) for stage in own}
    parameters = sum(unit.parameters for mine in units.values() for unit in mine)
    # Averaging between data groups keeps the gradients a second time, in buckets, and some exchanges their errors.
    grouped = spec.data_parallel.groups > 1
    copies = EXCHANGES[spec.data_parallel.exchange] if grouped else 0
    state = 2 if spec.train.optimizer == "adamw" else 1 if spec.train.momentum else 0
    heap, large = (max(_peak(spec, units, stage, place, large=large) for stage in own) for large in (False, True))
    every = [unit for mine in units.values() for unit in mine]
    in_heap = sum(unit.held(large=False)[0] for unit in every)
    holes = sum(unit.holes for unit in every) + int(HOLES_STATE * (1 + state) * in_heap)
    buffers = _buffers(spec, shape, parts, own)
    return Prediction(
        rank=place,
        parameters=FLOAT * parameters,
        gradients=FLOAT * parameters * (1 + copies),
        optimizer=FLOAT * state * parameters,
        activations=FLOAT * max(0, heap + large - parameters),
        buffers=buffers,
        caches=_caches(spec, shape, parts, own, samples),
        scoring=SCORING_BYTES if _scores(spec, shape) and spec.pipeline.stages - 1 in own else 0,
        other=FIXED_BYTES + FLOAT * holes + _records(spec, len(own)),
    )


def _scores(spec: RunSpec, shape: ModelShape) -> bool:
    evaluates = spec.measure != "timing" and spec.train.evaluate_every and spec.task.num_eval_sequences
    return bool(evaluates) and shape.kind != "lm"


def _units(spec: RunSpec, shape: ModelShape, part: StagePart) -> list[Unit]:
    """What a stage is made of, in the order of its backward pass."""
    size, found = spec.microbatch_size, []
    if spec.compute == "replay":
        # A copy of the gradient it hands on; what it copies is the same for all ranks, and of the process they left.
        crossing = 0 if part.first else size * math.prod(shape.boundaries[part.blocks[0] - 1])
        return [_unit(0, 0, 0, crossing, crossing)]
    if part.last:
        kept, weights = size * shape.activations_head, shape.parameters_head
        # Gradients of the loss and of the output, then that of the matrix, when the first two are gone.
        found.append(_unit(weights, kept, weights, kept // 2, max(kept, weights)))
    found += [_block(spec, shape, block) for block in reversed(part.blocks)]
    if part.first:
        kept, weights = size * shape.activations_embedding, shape.parameters_embedding
        found.append(_unit(weights, kept, weights, kept, weights))
    return found


def _unit(parameters: int, kept: int, matrix: int, tensor: int, besides: int) -> Unit:
    small = FLOAT * tensor <= LARGE_BYTES
    return Unit(parameters, kept, matrix, tensor, besides, int(HOLES_KEPT * kept) if small else 0)


def _block(spec: RunSpec, shape: ModelShape, block: int) -> Unit:
    size, weights = spec.microbatch_size, shape.parameters_per_block[block]
    whole = size * shape.activations_per_block[block]
    tensor, matrix = int(TENSOR * whole), int(MATRIX * weights)
    attention = size * (shape.heads or 0) * spec.task.sequence_length**2 if spec.model.dropout else 0
    whole += int(DROPOUT_KEPT * attention)
    made = _unit(weights, whole, matrix, tensor, tensor + matrix)
    made = made._replace(holes=made.holes + DROPOUT_HOLES * attention)
    if not spec.train.recompute:
        return made
    # Its output alone is kept. The rest is made anew: in the holes that it left in the heap, or in pages of their own.
    kept = size * math.prod(shape.boundaries[min(block, len(shape.boundaries) - 1)]) if shape.boundaries else 0
    if FLOAT * tensor > LARGE_BYTES:
        return made._replace(kept=kept, besides=whole + tensor + matrix)
    return made._replace(kept=kept, holes=int(HOLES_ANEW * whole) + DROPOUT_HOLES * attention)


def _records(spec: RunSpec, stages: int) -> int:
    """Spans, which a rank keeps until its end: of a stage's two passes and four channel ends a micro-batch."""
    each = stages * spec.pipeline.microbatches * spec.train.accumulate * (2 + 2 * 4) + 6
    return SPAN_BYTES * each * steps(spec)


def in_flight(spec: RunSpec, place: int) -> float:
    """Micro-batches whose activations the stages of a pipeline's rank hold at once, at most, on average over its stages
    (the schedules of torch.distributed.pipelining).

    >>> [in_flight(RunSpec(pipeline={"schedule": "1f1b", "stages": 3}, train={"batch_size": 4}), r) for r in range(3)]
    [3.0, 2.0, 1.0]
    """
    pipe = spec.pipeline
    ranks, each = pipe.ranks, pipe.stages_per_rank
    most = {
        "1f1b": ranks - place,
        "interleaved-1f1b": (each - 1) * ranks + 2 * (ranks - 1 - place) + 1,
        "interleaved-zb": each * ranks,
        "zbv-zb": 2 * ranks,
        "dualpipev": 2 * ranks + 1,
    }.get(pipe.schedule, math.inf)
    return min(float(pipe.microbatches), most / each)


def _peak(spec: RunSpec, units: Mapping[int, Sequence[Unit]], stage: int, place: int, *, large: bool) -> int:
    """Most elements of activations and gradients a rank has in its heap, or large, when `stage` is in a backward pass
    and all hold what they may: the first such pass (no gradients yet), or a later one (all)."""
    flight = in_flight(spec, place)
    steady = spec.pipeline.microbatches > flight
    every = [unit.held(large=large) for mine in units.values() for unit in mine]
    first = flight * sum(kept for _, kept in every)
    gradients = sum(parameters for parameters, _ in every)
    later = first + gradients - (0 if steady else sum(unit.held(large=large)[1] for unit in units[stage]))
    highest = max(first, gradients)
    for unit in units[stage]:
        parameters, kept = unit.held(large=large)
        besides = unit.besides if (FLOAT * max(unit.matrix, unit.tensor) > LARGE_BYTES) is large else 0
        highest = max(highest, first + besides)
        first += parameters - kept
        if flight > 1 or steady:
            highest = max(highest, later + besides)
            later -= kept
    return math.ceil(highest)


def _buffers(spec: RunSpec, shape: ModelShape, parts: Sequence[StagePart], own: Iterable[int]) -> int:
    """Frames of all micro-batches at both ends, and what is decoded from them."""
    between, total = placement.boundaries(spec.pipeline), 0
    for stage in own:
        for boundary in {stage - 1, stage} & set(between):
            tensor = FLOAT * spec.microbatch_size * math.prod(shape.boundaries[parts[boundary].blocks[-1]])
            rules = [rule for rule in spec.compression.rules("backward") if rule.boundary in (None, boundary)]
            # A frame each way, one of them decoded; the sender decodes its own where gradients are coded by its help.
            decoded = 1 + (boundary == stage and any("peer" in grammar.uses(rule.use) for rule in rules))
            total += spec.pipeline.microbatches * (2 * (tensor + HEADER) + decoded * tensor)
    return total


# --- caches ---


def _samples(spec: RunSpec, num_samples: int | None) -> int:
    """Identities that the memories of one pipeline meet."""
    count = num_samples or spec.task.num_sequences or TaskSpec().num_sequences or 1
    if spec.measure == "timing":
        count = min(count, spec.timing.batches * spec.train.batch_size)
    return tasks.num_identities(spec.task, -(-count // spec.data_parallel.groups))


def _caches(spec: RunSpec, shape: ModelShape, parts: Sequence[StagePart], own: Iterable[int], samples: int) -> int:
    total = 0
    for stage, direction in itertools.product(own, DIRECTIONS):
        for boundary in {stage - 1, stage} & set(placement.boundaries(spec.pipeline)):
            message = (spec.microbatch_size, *shape.boundaries[parts[boundary].blocks[-1]])
            sends = (boundary == stage) == (direction == "forward")
            rules = [rule for rule in spec.compression.rules(direction) if rule.boundary in (None, boundary)]
            for text in {grammar.canonical(rule.use) for rule in rules}:
                if sends or grammar.state(text) != "sender":
                    total += state_bytes(text, samples, message, spec.pipeline.microbatches)
    return total


def state_bytes(text: str, samples: int, message: Sequence[int], microbatches: int) -> int:
    """Bytes that a memory keeps in RAM at one end, or at the sender's where only that keeps any; 0 of a codec.
    message: shape of a micro-batch's tensor; microbatches: of a step. A memory without an option `cache` counts as if
    it kept float32, one without `key` as if it kept a row of each sample."""
    node = grammar.parse(text)
    found = plugins.find("memories").get(node.name)
    if found is None:
        return 0

    def option(name: str, otherwise: str) -> grammar.Node:
        default = found.parameters.get(name, {}).get("default", otherwise)
        return node.options.get(name) or grammar.parse(default)

    rows = {"slot": microbatches * message[0], "batch": 1}.get(option("key", "sample").name, samples)
    if option("store", "ram").name == "disk":
        rows = min(rows, DISK_MESSAGES * message[0])
    return rows * _row_bytes(option("cache", "fp32"), message[1:])


def _row_bytes(cache: grammar.Node, sample: Sequence[int]) -> int:
    """Bytes of a row. sample: shape of its tensor."""
    elements = math.prod(sample)
    if cache.name in CACHE_BYTES:
        return CACHE_BYTES[cache.name] * elements
    # Codes, and a scale of 2 B a channel; or a token, where the cache says so.
    scales = math.prod(sample[:-1]) if cache.options.get("scale", cache).name == "token" else sample[-1]
    return math.ceil(elements * grammar.estimate(_text(cache)) / 8) + 2 * scales


def _text(node: grammar.Node) -> str:
    inside = [*map(_text, node.items), *(f"{key}={_text(value)}" for key, value in node.options.items())]
    argument = f":{node.argument}" if node.argument else ""
    return node.name + argument + (f"({', '.join(inside)})" if inside else "")


# --- what people are told ---


def _available() -> int:
    import psutil

    return psutil.virtual_memory().available


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"


def _advice(spec: RunSpec, found: Sequence[Prediction]) -> str:
    """What to lower: of what takes most, over all ranks."""
    total = {name: sum(one.parts[name] for one in found) for name in found[0].parts}
    most = max(total, key=lambda name: total[name])
    if most == "caches":
        return (
            f"Lower task.num_sequences ({spec.task.num_sequences}), task.sequence_length or the width, or choose a "
            "smaller cache, e.g. delta(..., cache=fixpoint:4), or keep it on disk: store=disk."
        )
    if most in ("activations", "buffers"):
        return (
            f"Lower train.batch_size ({spec.train.batch_size}) or task.sequence_length, raise train.accumulate, or set "
            'train.recompute or pipeline.schedule "1f1b".'
        )
    return "Choose a smaller model (model.preset, layers, width), or task.vocab_size; sgd keeps less than adamw."
