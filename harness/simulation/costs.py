"""What a simulation takes from measurements: a message's bytes, seconds to code it, and the seconds nothing else names.

Codecs      (compressor, shape) -> bytes and seconds: from the spans of runs where there are any, else timed here
overheads   of spans of replays, whose compute is known: what is left between, around and after it
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from thinpipe.harness import regimes
from thinpipe.harness.compression import grammar
from thinpipe.harness.models.base import resolve
from thinpipe.harness.pipeline import partition
from thinpipe.harness.simulation.model import Overheads, Times
from thinpipe.harness.spec import RunSpec

if TYPE_CHECKING:
    import pandas as pd

Shape = tuple[int, ...]
Key = tuple[str, str, Shape]  # canonical text, direction, shape of a message
# What a step's spans between its first and its last computation are.
INSIDE = ("forward_compute", "backward_compute", "encode", "decode", "wait_receive")
#: Times a message is coded: the first ones are not counted.
WARM, REPEATS = 2, 5


class Coded(NamedTuple):
    """One message after its first visit: payload bytes, seconds to encode and frame, to check and decode."""

    payload_bytes: int
    encode_s: float
    decode_s: float


@dataclass(frozen=True)
class Constants:
    """Seconds beside compute, codec and transfer: `overheads`, and a round of the exchange of norms without the link's
    delay. The defaults are stated, not measured: about what replays show on two idle cores. `report.against`
    fits them to runs."""

    overheads: Overheads = field(default_factory=lambda: Overheads(action_s=0.00045, message_s=0.0002, step_s=0.0015))
    sync_round_s: float = 0.0004


class Codecs:
    """What messages cost. measured: (encode, decode) seconds that take the place of what would be timed here."""

    def __init__(self, measured: Mapping[Key, tuple[float, float]] | None = None) -> None:
        self.measured = dict(measured or {})
        self._here: dict[Key, Coded] = {}

    def of(self, text: str, direction: str, shape: Shape) -> Coded:
        key = grammar.canonical(text), direction, tuple(shape)
        if key not in self._here:
            self._here[key] = time_codec(*key, timed=key not in self.measured)
        found = self._here[key]
        return Coded(found.payload_bytes, *self.measured[key]) if key in self.measured else found


def time_codec(text: str, direction: str, shape: Shape, *, timed: bool = True) -> Coded:
    """Code matching values here, on one thread, as the two ends of a channel do: medians over REPEATS messages."""
    import torch

    from thinpipe.harness import frame, measure
    from thinpipe.harness.compression.base import Context
    from thinpipe.harness.replay import values

    torch.set_num_threads(1)
    sender, receiver = (grammar.build(text, shape[0]) for _ in range(2))
    fixed = grammar.build(grammar.inner(text)).num_bytes(shape)
    if not timed and fixed is not None:
        return Coded(fixed, 0.0, 0.0)
    name = frame.compressor_id(text)
    ids = tuple(range(shape[0]))
    buffer = torch.zeros(frame.HEADER_BYTES + sender.max_bytes(shape), dtype=torch.uint8)
    view, out = buffer.numpy().data, torch.zeros(shape)
    crossed = grammar.build(measure.partner(text)) if sender.uses_peer else None
    payload, encodes, decodes = 0, [], []
    for visit in range(WARM + REPEATS):
        peer = None if crossed is None else _decoded(crossed, values(shape, "forward").of(visit, 0), shape)
        ctx = Context(shape, step=visit, direction=direction, sample_ids=ids, peer=peer)  # type: ignore[arg-type]
        header = frame.Header(direction == "backward", False, 0, 0, visit, name, "float32", shape, frame.ids_hash(ids))
        x = values(shape, direction).of(visit, 0)
        start = time.perf_counter()
        payload = sender.encode(x, ctx, buffer[frame.HEADER_BYTES :])
        frame.seal(view, header, payload)
        middle = time.perf_counter()
        frame.unseal(view, header)
        receiver.decode(buffer[frame.HEADER_BYTES : frame.HEADER_BYTES + payload], ctx, out)
        out.sum().item()
        encodes.append(middle - start)
        decodes.append(time.perf_counter() - middle)
    return Coded(payload, statistics.median(encodes[WARM:]), statistics.median(decodes[WARM:]))


def _decoded(codec: Any, x: Any, shape: Shape) -> Any:
    """What the other end makes of an activation: what codecs of gradients are helped by."""
    import torch

    from thinpipe.harness.compression.base import Context

    out = torch.zeros(shape)
    codec.encode_decoded(x, Context(shape, sample_ids=tuple(range(shape[0]))), _buffer(codec, shape), out)
    return out


def _buffer(codec: Any, shape: Shape) -> Any:
    import torch

    return torch.zeros(codec.max_bytes(shape), dtype=torch.uint8)


# --- from the spans of runs -----------------------------------------------------------------------------------------


def message_shapes(spec: RunSpec) -> list[Shape]:
    """The shape of one message over each boundary."""
    shape = resolve(spec.model, spec.task)
    parts = partition.split(shape, spec.pipeline.stages, spec.pipeline.cuts)
    return [(spec.microbatch_size, *shape.boundaries[part.blocks[-1]]) for part in parts[:-1]]


def of_runs(runs: Iterable[tuple[RunSpec, pd.DataFrame]]) -> dict[Key, tuple[float, float]]:
    """(encode, decode) seconds of each kind of message that runs have coded: the median over runs of a run's median
    message. spans: the rows of a run's measured steps, columns as metrics.SPANS."""
    seen: dict[Key, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for spec, spans in runs:
        shapes, last = message_shapes(spec), regimes.final_epoch(spec)
        coded = spans[spans["phase"].isin(("encode", "decode"))]
        seconds = (coded["end_s"] - coded["start_s"]).groupby([coded["phase"], coded["direction"], coded["boundary"]])
        for (phase, direction, boundary), median in seconds.median().items():
            text = grammar.canonical(spec.compression.compressor(direction, int(boundary), last))
            seen[text, direction, shapes[int(boundary)]][phase == "decode"].append(float(median))
    return {
        key: (statistics.median(encode), statistics.median(decode))
        for key, (encode, decode) in seen.items()
        if encode and decode
    }


class Residue(NamedTuple):
    """Of one run's measured steps, medians over ranks and steps, seconds: around an action, around a step, and a round
    of the exchange of norms, of the rank that came to it last."""

    action_s: float
    step_s: float
    sync_round_s: float


def residue(spec: RunSpec, times: Sequence[Times], steps: pd.DataFrame, spans: pd.DataFrame) -> Residue:
    """What a replay's steps take beside what is known of them: waits by the profile (`times`, a stage each), codecs,
    and the time a rank waits for frames. One stage a rank; steps, spans: of the measured steps."""
    actions, rest = [], []
    syncs: dict[int, list[float]] = defaultdict(list)
    whole = steps.set_index(["rank", "step"])[["step_time_s", "sync_s"]]
    for (rank, step), own in spans.assign(took=spans["end_s"] - spans["start_s"]).groupby(["rank", "step"]):
        took = own.groupby("phase")["took"].sum()
        inside = own[own["phase"].isin(INSIDE)]
        extent = inside["end_s"].max() - inside["start_s"].min()
        pieces = spec.pipeline.microbatches * spec.train.accumulate
        known = pieces * (times[rank].forward_s + times[rank].backward_s)
        known += sum(took.get(phase, 0.0) for phase in INSIDE[2:])
        step_time, sync = whole.loc[(rank, step)]
        actions.append((extent - known) / (2 * pieces))
        rest.append(step_time - extent - sync - took.get("wait_send", 0.0) - times[rank].optimizer_s)
        syncs[step].append(sync)
    rounds = max(1, spec.pipeline.ranks - 1)
    last = statistics.median(min(found) for found in syncs.values())
    return Residue(float(statistics.median(actions)), float(statistics.median(rest)), float(last) / rounds)


def latencies(spans: pd.DataFrame, transfer_s: Mapping[tuple[str, int], float]) -> Iterator[float]:
    """Of each step's first frame over each boundary, both ways, that its receiver had to wait for: seconds from its
    hand-over until the receiver went on, less those of the transfer over an idle link (by direction and boundary)."""
    keys = ["step", "direction", "boundary", "microbatch"]
    sent = spans[spans["phase"] == "send"].set_index(keys)["start_s"].sort_index()
    taken = spans[spans["phase"] == "wait_receive"].set_index(keys)[["start_s", "end_s"]]
    for (step, direction, boundary), own in sent.groupby(level=[0, 1, 2]):
        waited = taken.loc[(step, direction, boundary, own.idxmin()[3])]
        if waited["start_s"] < own.min():
            yield float(waited["end_s"] - own.min()) - transfer_s[direction, int(boundary)]


def fitted(found: Sequence[Residue], late: Sequence[float]) -> Constants:
    """The constants of several runs: medians, none below 0."""
    action, step, sync = (max(0.0, statistics.median(column)) for column in zip(*found, strict=True))
    return Constants(Overheads(action, max(0.0, statistics.median(late)), step), sync)
