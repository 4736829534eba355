"""A checkpoint cut into one file a stage, so that a rank reads its own file and no other.

    DIR/stage-00-of-04.safetensors ...    every tensor of that stage, by Hugging Face's names, in the types they came in
        config.json, tokenizer files      the checkpoint's own
        model.safetensors.index.json      tensor -> the first file that holds it: to `transformers` the folder is a
                                          checkpoint in shards
        thinpipe.json                     how it was cut, and what each file holds

What several stages need is in the file of each: DeBERTa's embeddings of relative positions, and of GPT-2 the token
embedding, which is the last stage's head where the checkpoint ties the two.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from thinpipe.harness import folders, plugins, tensorfile
from thinpipe.harness.errors import UserError
from thinpipe.harness.models import base as models
from thinpipe.harness.pipeline.partition import split
from thinpipe.harness.spec import ModelSpec, TaskSpec

FORMAT = 1
ABOUT = "thinpipe.json"
# The key of config.json that ties a head to the embedding; families without a head to tie have none.
TIES = "tie_word_embeddings"
# What belongs to a checkpoint besides its weights and config.json.
BESIDE = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "merges.txt", "vocab.txt", "spm.model", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model",
    "preprocessor_config.json", "generation_config.json", "LICENSE", "LICENSE.txt", "LICENSE.md",
)  # fmt: skip
# Heads by the names of Hugging Face's classes, and the kind of task they are for.
KINDS = {"ForSequenceClassification": "classification", "ForImageClassification": "images", "LMHead": "lm"}


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint: in which file, under which name, of what type and shape."""

    path: Path
    name: str
    layout: tensorfile.Layout


def partition(
    model: str, stages: int, out: Path, cuts: Sequence[int] | None = None, name: str | None = None
) -> dict[str, Any]:
    """Cut the checkpoint `model` (a folder, `pretrained:NAME`, or a hub's name) into `stages` files below `out`.

    cuts: the blocks that stages 1, 2, ... begin with; None = as a run on the longest sequences would cut it. name: the
    model plug-in; None = the one that config.json asks for. Needs the memory of one stage. Returns {out, model, stages,
    cuts, files: [{file, blocks, tensors, bytes}], fresh: tensors that the checkpoint lacks and a run starts at random,
    unused: tensors of it that the model does not have}.

    Raises UserError for a checkpoint that is missing, incomplete, damaged or of no known family, cuts that are none, an
    `out` that is there already, and a full disk; `out` is then not made.
    """
    folder = source_folder(model)
    folders.require_free(out)
    if cuts is not None and (len(cuts) != stages - 1 or list(cuts) != sorted(set(cuts)) or min(cuts, default=1) < 1):
        raise UserError(
            f"--cuts {','.join(map(str, cuts))} does not give {stages} stages: it takes {stages - 1} rising numbers "
            "of blocks, the first at least 1."
        )
    spec, task = _spec(folder, name)
    shape = models.resolve(spec, task)
    parts = split(shape, stages, cuts)
    plugin = plugins.get("models", spec.name).load()
    # Building a stage checks that the checkpoint has what it needs, in the right shapes.
    names = [list(plugin.build(spec, shape, part, seed=0).state_dict()) for part in parts]
    stored = stored_tensors(folder)
    ties = _ties(plugin, spec, shape, folder)
    contents, fresh = _contents(names, plugin.stored_names, stored, ties)
    starts = [part.blocks.start for part in parts]
    with folders.staged(out) as temporary:
        files = _write_stages(temporary, contents)
        for row, part in zip(files, parts, strict=True):
            row["blocks"] = [part.blocks.start, part.blocks.stop - 1]
        copy_beside(folder, temporary, ("config.json", *BESIDE))
        write_json(temporary / models.INDEX, _index(contents))
        held = {_file(index, stages): sorted(tensors) for index, tensors in enumerate(contents)}
        cut = {"format": FORMAT, "model": spec.name, "stages": stages, "cuts": starts[1:], "shared": _shared(contents)}
        origin = {"source": {"name": model, "sha256": _hashes(folder)}}
        write_json(temporary / ABOUT, cut | {"tied": ties, "files": held} | origin)
    used = {tensor.name for tensors in contents for tensor in tensors.values()}
    return {
        "out": str(out), "model": spec.name, "stages": stages, "cuts": starts[1:], "files": files,
        "fresh": sorted(fresh), "unused": sorted(set(stored) - used),
    }  # fmt: skip


def own_map(directory: Path, wanted: Iterable[Sequence[str]]) -> dict[str, str] | None:
    """Tensor -> file, all of them the one file of a partitioned folder that holds everything wanted; None where the
    folder is none, or was cut otherwise: its index then says where each tensor is.

    wanted: of each tensor that is needed the names it may be stored under.
    """
    if not (directory / ABOUT).is_file():
        return None
    files, groups = about(directory)["files"], [set(names) for names in wanted]
    for name, held in files.items():
        if all(group.intersection(held) for group in groups):
            return dict.fromkeys(held, name)
    return None


def about(directory: Path) -> dict[str, Any]:
    """thinpipe.json of a partitioned folder. Raises UserError where it is missing or damaged."""
    path = directory / ABOUT
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        usable = data["format"] == FORMAT and len(data["files"]) == data["stages"] and isinstance(data["tied"], dict)
        usable &= all(Path(name).name == name and isinstance(held, list) for name, held in data["files"].items())
    except FileNotFoundError:
        raise UserError(f"{directory} was not written by `thinpipe partition`: it has no {ABOUT}.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        usable = False
    if not usable:
        raise UserError(f"{path} is damaged, or of another version. Partition the checkpoint again.")
    return data


def source_folder(model: str) -> Path:
    """The folder of a checkpoint that a person named. Raises UserError where there is none."""
    named = folders.resolve(model)
    return named if named.is_dir() else models.checkpoint_folder(model)


def _spec(folder: Path, name: str | None) -> tuple[ModelSpec, TaskSpec]:
    """The model as a run would ask for it, and a task that fits it."""
    config = models.checkpoint_config(folder)
    name = name or _family(folder, config)
    declared = plugins.get("models", name).parameters
    heads = [kind for head in config.get("architectures") or [] for end, kind in KINDS.items() if end in head]
    kind = next((kind for kind in heads if kind in declared["kinds"]), declared["kinds"][0])
    tasks = [key for key, plugin in plugins.find("tasks").items() if plugin.parameters["kind"] == kind]
    if not tasks:
        raise UserError(f"model {name!r} is for tasks of kind {kind!r}, and there is none: `thinpipe list tasks`.")
    classes = len(config.get("id2label") or ()) or config.get("num_labels", 2)
    labels = {} if kind == "lm" else {"num_labels": max(2, classes)}
    # The tokenizer is the checkpoint's: its vocabulary is not held against a task's.
    asked = {"corpus": str(folder), "tokenizer": "checkpoint", "sequence_length": _longest(config, declared)}
    return ModelSpec(name=name, checkpoint=str(folder)), TaskSpec(name=tasks[0], **asked, **labels)


def _family(folder: Path, config: Mapping[str, Any]) -> str:
    """The model plug-in that loads checkpoints of this model_type. Raises UserError where none does."""
    found = plugins.find("models").items()
    loads = {p.parameters["checkpoint"]["model_type"]: key for key, p in found if "checkpoint" in p.parameters}
    if config.get("model_type") not in loads:
        raise UserError(
            f"{folder} is of family {config.get('model_type')!r} (model_type in config.json); known are: "
            f"{', '.join(sorted(loads))}."
        )
    return loads[config["model_type"]]


def _longest(config: Mapping[str, Any], declared: Mapping[str, Any]) -> int:
    """The longest sequence a checkpoint takes: what blocks and head cost beside each other depends on the length."""
    positions = config.get(declared.get("checkpoint", {}).get("positions"))
    return positions if isinstance(positions, int) and positions >= 2 else 2


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint by name, from the headers of its files. Raises UserError as these are damaged."""
    found: dict[str, Stored] = {}
    for path in models.checkpoint_files(folder):
        for name, layout in tensorfile.layouts_of(path).items():
            found.setdefault(name, Stored(path, name, layout))
    return found


def tied_pairs(reference: torch.nn.Module, config: Any) -> dict[str, str]:
    """Head -> the embedding that `config` ties it to, by Hugging Face's names."""
    pairs = getattr(type(reference), "_tied_weights_keys", None) or {}
    return dict(pairs) if getattr(config, TIES, False) else {}


def reference_model(plugin: Any, spec: ModelSpec, shape: models.ModelShape) -> Any:
    """Hugging Face's whole model, with no memory for its weights."""
    with torch.device("meta"):
        return plugin.reference(spec, shape)


def _ties(plugin: Any, spec: ModelSpec, shape: models.ModelShape, folder: Path) -> dict[str, str]:
    """The tied pairs of a checkpoint; none where its config.json unties them."""
    reference = reference_model(plugin, spec, shape)
    return tied_pairs(reference, type(reference.config).from_dict(models.checkpoint_config(folder)))


def _contents(
    names: Sequence[Sequence[str]], stored_names: Any, stored: Mapping[str, Stored], ties: Mapping[str, str]
) -> tuple[list[dict[str, Stored]], set[str]]:
    """What each stage's file is to hold, by Hugging Face's names, and what no file of the checkpoint has."""
    found: dict[str, Stored] = {}
    missing: set[str] = set()
    for name in {name for held in names for name in held}:
        candidates = stored_names(name)
        tensor = next((stored[candidate] for candidate in candidates if candidate in stored), None)
        if tensor is None:
            missing.add(candidates[0])
        else:
            found[candidates[0]] = tensor
    contents = []
    for held in names:
        wanted = [stored_names(name)[0] for name in held]
        wanted += [ties[name] for name in wanted if name in ties]
        contents.append({name: found[name] for name in wanted if name in found})
    return contents, {name for name in missing if ties.get(name) not in found}


def _write_stages(folder: Path, contents: Sequence[Mapping[str, Stored]]) -> list[dict[str, Any]]:
    rows = []
    for index, held in enumerate(contents):
        name = _file(index, len(contents))
        written = write_tensors(folder / name, held)
        rows.append({"file": name, "tensors": len(held), "bytes": written.num_bytes})
    return rows


def write_tensors(path: Path, tensors: Mapping[str, Stored]) -> tensorfile.Written:
    """A safetensors file of tensors that lie in others: one after the other is read and written."""
    with contextlib.ExitStack() as stack:
        paths = {tensor.path for tensor in tensors.values()}
        files = {source: stack.enter_context(tensorfile.opened(source)) for source in paths}
        layouts = {name: tensor.layout for name, tensor in tensors.items()}
        return tensorfile.write(path, layouts, lambda name: files[tensors[name].path].get_tensor(tensors[name].name))


def copy_beside(source: Path, target: Path, names: Iterable[str] = BESIDE) -> list[str]:
    """Copy what belongs to a checkpoint besides its weights; returns the names of what was there."""
    there = [name for name in names if (source / name).is_file()]
    for name in there:
        with tensorfile.full_disk_explained(target / name):
            shutil.copyfile(source / name, target / name)
    return there


def write_json(path: Path, data: Any) -> None:
    """A file in a folder that nobody sees yet, on disk when this returns."""
    with tensorfile.full_disk_explained(path), path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(data, indent=2, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _file(index: int, stages: int) -> str:
    return f"stage-{index:02d}-of-{stages:02d}.safetensors"


def _index(contents: Sequence[Mapping[str, Stored]]) -> dict[str, Any]:
    places: dict[str, str] = {}
    for index, held in enumerate(contents):
        for name in held:
            places.setdefault(name, _file(index, len(contents)))
    sizes = {name: tensor.layout.num_bytes for held in contents for name, tensor in held.items()}
    return {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(places.items()))}


def _shared(contents: Sequence[Mapping[str, Stored]]) -> list[str]:
    """Names that several stages' files hold."""
    names = [name for held in contents for name in held]
    return sorted({name for name in names if names.count(name) > 1})


def _hashes(folder: Path) -> dict[str, str]:
    """sha256 of the files that the stages were made from."""
    hashes = {}
    for path in (folder / "config.json", *models.checkpoint_files(folder)):
        with path.open("rb") as file:
            hashes[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes
