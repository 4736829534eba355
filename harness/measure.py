"""What compressors make of tensors: bits an element as coded, error, bias and speed, as the table rate_distortion.

A codec is given the messages of the last visit; what keeps something between messages is given those of all visits, in
the order in which a run sends them, and measured on the last visit, when it has settled.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from thinpipe.harness import codecs, figures, frame, plugins, shards, tables
from thinpipe.harness.capture import Stream
from thinpipe.harness.compression import grammar
from thinpipe.harness.compression.base import Context
from thinpipe.harness.errors import RunError, UserError

TABLE = "rate_distortion"
#: Times a message is coded for its speed, where coding it again changes nothing.
REPEATS = 3
#: Message keys over which what depends on them is averaged.
DRAWS = 8
#: What is measured when nothing is named, of the codecs that there are; others are measured by their example.
USUAL: Mapping[str, tuple[str, ...]] = {
    "fixpoint": tuple(f"fixpoint:{bits}" for bits in (2, 3, 4, 6, 8)),
    "minmax": tuple(f"minmax:{bits}" for bits in (2, 4, 6, 8)),
    "blockwise": tuple(f"blockwise:{bits}" for bits in (2, 3, 4, 6, 8)),
    "grid": tuple(f"grid:{step}" for step in (2.0, 1.0, 0.5, 0.25, 0.1)),
    "topk": tuple(
        f"topk:{share}{options}"
        for options in ("", "(values=blockwise:4)", "(mask=forward)")
        for share in (0.02, 0.1, 0.3, 0.5)
    ),
    "randk": ("randk:0.1", "randk:0.5"),
    "kmeans": tuple(f"kmeans:{bits}" for bits in (2, 3, 4)),
    "lowrank": tuple(f"lowrank:{rank}" for rank in (2, 8, 32)),
    "hadamard": tuple(f"hadamard(blockwise:{bits})" for bits in (2, 3, 4, 6)),
    "relu": tuple(f"relu({codec})" for codec in ("blockwise:2", "blockwise:4", "grid:1.0", "grid:0.5", "grid:0.1")),
    "delta": tuple(f"delta({codec})" for codec in ("fixpoint:2", "fixpoint:4", "grid:2.0", "grid:1.0", "grid:0.5")),
    "ef": tuple(f"ef(topk:{share}, key=sample)" for share in (0.02, 0.1, 0.3)),
    "ef21": tuple(f"ef21(topk:{share}, key=sample)" for share in (0.02, 0.1, 0.3)),
    "ef-mixed": ("ef-mixed(topk:0.1, key=sample)",),
}


def usual() -> list[str]:
    """The texts that are measured when none is named: each codec and memory that there is, at several rates."""
    found = [plugin for kind in codecs.KINDS for plugin in plugins.find(kind).values()]
    texts = [text for plugin in found for text in USUAL.get(plugin.name, (codecs.example(plugin),))]
    return list(dict.fromkeys(grammar.canonical(text) for text in texts))


def run(
    streams: Sequence[Stream], texts: Sequence[str], say: Callable[[str], None]
) -> tuple[list[dict[str, Any]], list[str]]:
    """(rows of the table, what failed and why) of every compressor on every stream that it is made for.

    No texts: the usual ones. A text that is named and fits no stream is a UserError. A tensor that a codec refuses
    (a value beyond its range) has no row.
    """
    torch.set_num_threads(1)
    named = [grammar.canonical(text) for text in texts]
    rows, failed = [], []
    for text in named or usual():
        why = {stream: misfit(text, stream) for stream in streams}
        if named and all(why.values()):
            raise UserError(f"{text} {next(iter(why.values()))}")
        for stream in [stream for stream in streams if why[stream] is None]:
            try:
                rows.append(one(stream, text))
            except RunError as error:
                failed.append(f"{text} on {stream.source}, {stream.tensor}: {error}")
        say(text)
    return rows, failed


def misfit(text: str, stream: Stream) -> str | None:
    """Why a compressor cannot be measured on a stream; None where it can."""
    uses = grammar.uses(text)
    if "peer" in uses and stream.peer is None:
        return "codes gradients by the help of activations: it needs a model's gradients (--model)"
    if "relu" in uses and not stream.relu:
        return "needs boundaries that are a ReLU's output, as those of --model resnet are"
    if grammar.inner(text) != text and len(stream.ids) < 2:
        return "needs several visits of the same samples, which a file does not have: use --model"
    return None


def one(stream: Stream, text: str) -> dict[str, Any]:
    """The row of a compressor (canonical text) on a stream. Raises RunError where it refuses a message."""
    ends, error = _Ends(stream, text), _Error()
    last = len(stream.ids) - 1
    keeps = grammar.state(text) != "none"
    sent: dict[int, int] = {}
    for visit in range(0 if keeps else last, last + 1):
        for i in range(len(stream.ids[visit])):
            decoded = ends.send(visit, i)
            sent[visit] = sent.get(visit, 0) + ends.length
            if visit == last:
                error.add(*stream.used(visit, i, decoded))
    systematic, draws = (error, 1) if keeps else _systematic(ends, last)
    messages, elements = len(stream.ids[last]), stream.values[last].numel()
    framed = {visit: payload + messages * frame.HEADER_BYTES for visit, payload in sent.items()}
    return {
        "source": stream.source,
        "tensor": stream.tensor,
        "kind": stream.kind,
        "boundary": stream.boundary,
        "compressor": text,
        "curve": curve(text),
        "codec": innermost(text),
        "messages": messages,
        "elements": elements,
        "payload_bytes": sent[last],
        "frame_bytes": framed[last],
        "payload_bits": 8 * sent[last] / elements,
        "bits_per_element": 8 * framed[last] / elements,
        "first_visit_bits": 8 * framed[0] / elements if keeps else None,
        "rel_error": error.relative,
        "error_db": 20 * math.log10(error.relative) if error.relative else None,
        "bias": systematic.bias,
        "systematic_error": systematic.relative,
        "draws": draws,
        "encode_melem_s": ends.speed(ends.encode_s),
        "decode_melem_s": ends.speed(ends.decode_s),
    }


def curve(text: str) -> str:
    """The canonical text without what follows colons: its rate, whatever that is.

    >>> curve("delta(fixpoint:4(scale=token), cache=fixpoint:8)")
    'delta(fixpoint(scale=token), cache=fixpoint)'
    """
    return re.sub(r":[^(),]+", "", text)


def innermost(text: str) -> str:
    """The name of the codec inside every memory and wrapper.

    >>> innermost("delta(hadamard(fixpoint:4), cache=bf16)")
    'fixpoint'
    """
    node = grammar.parse(text)
    while node.items:
        node = node.items[0]
    return node.name


def partner(text: str) -> str:
    """What activations cross by where gradients cross by `text`: the same, choosing for itself.

    >>> partner("topk:0.1(mask=forward, values=bf16)")
    'topk:0.1(values=bf16)'
    """
    own = re.sub(r"mask=forward(, )?", "", text).replace(", )", ")").replace("()", "")
    return grammar.canonical(own)


def write(rows: Sequence[Mapping[str, Any]], out: Path) -> list[Path]:
    """The table as parquet and CSV and its figure, in the folder `out`; what was written. Raises figures.UndrawnError,
    which has those names too, where there is nothing to draw."""
    frames = tables.write(out, {TABLE: shards.to_arrow(TABLE, rows)})
    written = [out / f"{TABLE}.{kind}" for kind in ("parquet", "csv")]
    try:
        return (
            written
            + figures.draw(frames, out, [n for n in sorted(plugins.find("figures")) if figures.is_of_codecs(n)])[0]
        )
    except figures.UndrawnError as error:
        error.written[:0] = written
        raise


class _Ends:
    """A sender and a receiver of one compressor, with buffers as a channel has them."""

    def __init__(self, stream: Stream, text: str) -> None:
        self.stream, self.shape = stream, tuple(stream.values.shape[2:])
        samples = {sample for visit in stream.ids for message in visit for sample in message}
        self.sender, self.receiver = (grammar.build(text, len(samples)) for _ in range(2))
        self.buffer = torch.zeros(self.sender.max_bytes(self.shape), dtype=torch.uint8)
        self.out = torch.zeros(self.shape)
        self.peer = grammar.build(partner(text)) if partner(text) != text else None
        self.encode_s: list[float] = []
        self.decode_s: list[float] = []
        self.length = 0

    def send(self, visit: int, i: int, draw: int = 0) -> torch.Tensor:
        """Code message `i` of a visit, with another key for another draw; what was decoded, valid until the next."""
        stream = self.stream
        ctx = Context(
            self.shape,
            step=visit + draw * len(stream.ids),
            microbatch=i,
            boundary=stream.boundary or 0,
            direction="backward" if stream.kind == "gradient" else "forward",
            sample_ids=stream.ids[visit][i],
        )
        if self.sender.uses_peer:
            ctx = replace(ctx, peer=self._crossed(ctx))
        start = time.perf_counter()
        self.length = self.sender.encode(stream.values[visit, i], ctx, self.buffer)
        middle = time.perf_counter()
        self.receiver.decode(self.buffer[: self.length], ctx, self.out)
        self.encode_s.append(middle - start)
        self.decode_s.append(time.perf_counter() - middle)
        return self.out

    def _crossed(self, ctx: Context) -> torch.Tensor:
        """What the activations of this message were decoded to."""
        assert self.stream.peer is not None
        x = self.stream.peer[ctx.step % len(self.stream.ids), ctx.microbatch]
        if self.peer is None:
            return x
        buffer, decoded = torch.zeros(self.peer.max_bytes(self.shape), dtype=torch.uint8), torch.zeros(self.shape)
        self.peer.encode_decoded(x, replace(ctx, direction="forward"), buffer, decoded)
        return decoded

    def speed(self, seconds: Sequence[float]) -> float:
        return math.prod(self.shape) / statistics.median(seconds) / 1e6


class _Error:
    """Sums over elements: the error squared and signed, x squared and absolute."""

    def __init__(self) -> None:
        self.error = self.square = self.signed = self.size = 0.0

    def add(self, x: torch.Tensor, decoded: torch.Tensor) -> None:
        exact = x.double()
        difference = decoded.double() - exact
        self.error += float(difference.square().sum())
        self.square += float(exact.square().sum())
        self.signed += float(difference.sum())
        self.size += float(exact.abs().sum())

    @property
    def relative(self) -> float:
        return math.sqrt(self.error / self.square if self.square else self.error)

    @property
    def bias(self) -> float:
        return self.signed / self.size if self.size else self.signed


def _systematic(ends: _Ends, visit: int) -> tuple[_Error, int]:
    """The error of the mean over draws, and their number: one where the bytes do not depend on the message's key.

    Codes every message REPEATS times at least, for its speed.
    """
    found, stream, draws = _Error(), ends.stream, 1
    for i in range(len(stream.ids[visit])):
        first = ends.send(visit, i).clone()
        if i == 0 and not torch.equal(ends.send(visit, i, 1), first):
            draws = DRAWS
        others = [ends.send(visit, i, draw).double() for draw in range(1, max(draws, REPEATS))]
        mean = torch.stack([first.double(), *others]).mean(0) if draws > 1 else first
        found.add(*stream.used(visit, i, mean))
    return found, draws
