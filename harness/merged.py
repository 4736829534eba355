"""One Hugging Face checkpoint out of what the stages have: of a partitioned folder, or of a run's training checkpoint.

A head is tied to the embedding only where the two are equal, bit for bit, and the model's config ties them; otherwise
both are stored and the config says so, so that `transformers` computes what the stages computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from thinpipe.harness import folders, plugins, state, store, tensorfile
from thinpipe.harness.cache import cache_folder
from thinpipe.harness.errors import UserError
from thinpipe.harness.models import base as models
from thinpipe.harness.partitioned import (
    TIES,
    Stored,
    about,
    copy_beside,
    reference_model,
    source_folder,
    tied_pairs,
    write_json,
    write_tensors,
)
from thinpipe.harness.spec import RunSpec


def merge(source: Path, out: Path, step: int | None = None) -> dict[str, Any]:
    """Write the checkpoint of `source`, a partitioned folder or a run's folder, to `out`: config.json,
    model.safetensors and the tokenizer. step: which of a run's checkpoints; None = the newest.

    Returns {out, model, step, tensors, bytes, tied, transformers: None, or why transformers cannot load it as it is}.
    Raises UserError for a folder that is neither, files that are missing, damaged or of another cut, an `out` that is
    there already, and a full disk; `out` is then not made.
    """
    with folders.staged(out) as temporary:
        return {"out": str(out), **fill(source, temporary, step)}


def fill(source: Path, folder: Path, step: int | None = None) -> dict[str, Any]:
    """`merge` into an empty folder that is there; returns the same but for `out`."""
    if (source / "run.json").is_file():
        return _merge_run(source, folder, step)
    if step is not None:
        raise UserError(f"--step chooses among a run's checkpoints, but {source} is no run's folder: leave it out.")
    return _merge_partition(source, folder)


def _merge_partition(source: Path, folder: Path) -> dict[str, Any]:
    said = about(source)
    files = [source / name for name in said["files"]]
    if missing := [path.name for path in files if not path.is_file()]:
        raise UserError(
            f"{source} lacks {', '.join(missing)}: every stage's file is needed. Copy it there, or partition again."
        )
    if others := sorted({path.name for path in source.glob("stage-*-of-*.safetensors")} - set(said["files"])):
        raise UserError(f"{source} also holds {', '.join(others)}, of another cut. Remove what does not belong there.")
    held = []
    for path in files:
        tensors = {name: Stored(path, name, layout) for name, layout in tensorfile.layouts_of(path).items()}
        if sorted(tensors) != said["files"][path.name]:
            raise UserError(f"{path} does not hold what thinpipe.json says: it is of another cut. Partition again.")
        held.append(tensors)
    config = models.checkpoint_config(source)
    tensors, tied = _settled(_one_of_each(held, "the stages' files"), said["tied"])
    if tied is False:
        config[TIES] = False
    written = write_tensors(folder / models.WEIGHTS, tensors)
    write_json(folder / "config.json", config)
    copy_beside(source, folder)
    return _result(said["model"], None, tensors, written, tied=tied, transformers=None)


def _merge_run(source: Path, folder: Path, step: int | None) -> dict[str, Any]:
    spec = store.read_spec(source)
    notes: list[str] = []
    chosen = state.latest(source, notes.append) if step is None else step
    if chosen is None:
        why = f" ({'; '.join(notes)})" if notes else ""
        raise UserError(
            f"{source} has no complete training checkpoint{why}. Run it with checkpoint.every, and with "
            "checkpoint.keep = true if it is to stay there when the run is done."
        )
    plugin = plugins.get("models", spec.model.name).load()
    shape = models.resolve(spec.model, spec.task)
    held = _stages(source, chosen, spec, plugin.stored_names)
    reference = reference_model(plugin, spec.model, shape)
    ties = tied_pairs(reference, reference.config)
    tensors, tied = _settled(_one_of_each(held, f"the stages of step {chosen}"), ties)
    _require_whole(reference, tensors, source, set(ties))
    if tied is False:
        setattr(reference.config, TIES, False)
    written = write_tensors(folder / models.WEIGHTS, tensors)
    write_json(folder / "config.json", _config(reference))
    _save_tokenizer(spec, folder)
    differs = _at_odds_with_transformers(reference, tensors)
    return _result(spec.model.name, chosen, tensors, written, tied=tied, transformers=differs)


def _stages(source: Path, step: int, spec: RunSpec, stored_names: Any) -> list[dict[str, Stored]]:
    """The tensors of each stage in a run's checkpoint, by Hugging Face's names: of the first data group, whose ranks
    hold what all others hold."""
    found: dict[int, dict[str, Stored]] = {}
    state.require(source, step, spec.world_size)
    for rank in range(spec.pipeline.ranks):
        path = state.rank_file(source, step, rank)
        for place, layout in tensorfile.layouts_of(path).items():
            if place.startswith(f"{state.STAGES}/"):
                _, index, name = place.split("/", 2)
                found.setdefault(int(index), {})[stored_names(name)[0]] = Stored(path, place, layout)
    assert sorted(found) == list(range(spec.pipeline.stages)), f"{source}: stages {sorted(found)}"
    return [found[index] for index in sorted(found)]


def _one_of_each(held: Iterable[Mapping[str, Stored]], where: str) -> dict[str, Stored]:
    """All tensors, each once. Raises UserError where copies of one differ: no single model has them all."""
    tensors: dict[str, Stored] = {}
    for stage in held:
        for name, stored in stage.items():
            if name in tensors and not equal(tensors[name], stored):
                raise UserError(
                    f"{where} hold different copies of {name}: trained apart, they cannot become one model. Train "
                    'with model.shared "frozen" or "summed", whichever the model offers.'
                )
            tensors.setdefault(name, stored)
    return tensors


def equal(one: Stored, other: Stored) -> bool:
    """Whether two stored tensors are the same, bit for bit."""
    if one.layout != other.layout:
        return False
    with tensorfile.opened(one.path) as first, tensorfile.opened(other.path) as second:
        pair = [file.get_tensor(stored.name) for file, stored in ((first, one), (second, other))]
        return torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in pair))


def _settled(tensors: dict[str, Stored], ties: Mapping[str, str]) -> tuple[dict[str, Stored], bool | None]:
    """(tensors to store, whether the head is tied; None where nothing could be): a tied head is not stored."""
    heads = [head for head, embedding in ties.items() if {head, embedding} <= set(tensors)]
    if not all(equal(tensors[head], tensors[ties[head]]) for head in heads):
        return tensors, False
    return {name: stored for name, stored in tensors.items() if name not in heads}, True if ties else None


def _require_whole(reference: Any, tensors: Mapping[str, Stored], source: Path, heads: set[str]) -> None:
    """Raise UserError unless these are the tensors of the model that the run's spec describes."""
    due = {name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()}
    wrong = [name for name, shape in due.items() if name in tensors and tensors[name].layout.shape != shape]
    wrong += sorted(set(due) - set(tensors) - heads) + sorted(set(tensors) - set(due))
    if wrong:
        shown = ", ".join(wrong[:5]) + (", ..." if len(wrong) > 5 else "")
        raise UserError(f"the checkpoint of {source} is not of the model its run.json describes: {shown} differ.")


def _config(reference: Any) -> dict[str, Any]:
    """config.json as `save_pretrained` would write it."""
    reference.config.architectures = [type(reference).__name__]
    reference.config.dtype = "float32"
    # Said even where it is the class's default: whoever reads the file alone must know.
    ties = {name: getattr(reference.config, name) for name in [TIES] if hasattr(reference.config, name)}
    return {**reference.config.to_diff_dict(), **ties}


def _at_odds_with_transformers(reference: Any, tensors: Mapping[str, Stored]) -> str | None:
    """Why `from_pretrained` would not give this model: a family that deviates from Hugging Face's own."""
    with torch.device("meta"):
        theirs = {name: tuple(tensor.shape) for name, tensor in type(reference)(reference.config).state_dict().items()}
    wrong = [name for name, stored in tensors.items() if theirs.get(name) != stored.layout.shape]
    if not wrong:
        return None
    return (
        f"{type(reference).__name__} has {wrong[0]} otherwise: build the model with the plug-in's `reference`, then "
        "load model.safetensors into it"
    )


def _save_tokenizer(spec: RunSpec, folder: Path) -> None:
    """Put the run's tokenizer beside the weights, where its task has one."""
    module, task = plugins.get("tasks", spec.task.name).load(), spec.task
    if task.tokenizer == "checkpoint":
        task = task.model_copy(update={"tokenizer": str(source_folder(spec.model.checkpoint or ""))})
    if hasattr(module, "save_tokenizer"):
        module.save_tokenizer(task, cache_folder(), folder)


def _result(
    model: str,
    step: int | None,
    tensors: Mapping[str, Stored],
    written: tensorfile.Written,
    *,
    tied: bool | None,
    transformers: str | None,
) -> dict[str, Any]:
    kept = {"tensors": len(tensors), "bytes": written.num_bytes, "tied": tied}
    return {"model": model, "step": step, **kept, "transformers": transformers}
