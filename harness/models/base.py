"""What every model family shares, known before torch is imported: its size, and the part a stage holds.

A model plug-in says in its literal `PARAMETERS`, so that planning costs no import:

    presets       name -> {layers, width, heads, positions}
    defaults      size -> polynomial, for a size that neither preset nor checkpoint gives
    counts        {block, embedding, head} -> polynomial: parameters of one block, before them, after all
    checkpoint    {model_type, layers, width, ...} -> the key of a Hugging Face config.json that holds it
    (polynomial: {"width*width": 4, "width": 9} is 4 width^2 + 9 width)

and defines, in the module that a rank imports:

    build(spec, shape, part, *, seed) -> torch.nn.Module     one stage
    loss(logits, targets, weights=None) -> scalar tensor
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinpipe.harness import plugins
from thinpipe.harness.errors import UserError, near_miss
from thinpipe.harness.spec import ModelSpec, TaskSpec

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
EXPECTED = f"Expected a local Hugging Face folder: config.json and {WEIGHTS} (or {INDEX} with its shards)."
OVERRIDES = ("layers", "width", "heads")


@dataclass(frozen=True)
class ModelShape:
    """The size of a model. positions: the longest sequence in tokens; parameters_*: numbers of parameters."""

    layers: int
    width: int
    heads: int
    vocab_size: int
    positions: int
    parameters_per_block: tuple[int, ...]
    parameters_embedding: int
    parameters_head: int


@dataclass(frozen=True)
class StagePart:
    """What stage `index` of `num_stages` holds: `blocks`, with what comes before (first), after (last)."""

    index: int
    num_stages: int
    blocks: range
    first: bool
    last: bool


def resolve(spec: ModelSpec, task: TaskSpec) -> ModelShape:
    """The shape of the model a run asks for: a preset with its overrides, or a checkpoint's config.json.

    Raises UserError for an unknown preset, sizes that do not fit together or with the task, and a checkpoint
    that is missing, incomplete, of another family, or at odds with an override.
    """
    declared = plugins.get("models", spec.name).parameters
    if spec.checkpoint is None:
        sizes = _preset_sizes(spec, declared["presets"]) | {"vocab_size": task.vocab_size}
    else:
        sizes = _checkpoint_sizes(spec, declared["checkpoint"])
    for name, polynomial in declared["defaults"].items():
        sizes.setdefault(name, _evaluate(polynomial, sizes))
    _check(sizes, task)
    counts = {part: _evaluate(polynomial, sizes) for part, polynomial in declared["counts"].items()}
    return ModelShape(
        layers=sizes["layers"],
        width=sizes["width"],
        heads=sizes["heads"],
        vocab_size=sizes["vocab_size"],
        positions=sizes["positions"],
        parameters_per_block=(counts["block"],) * sizes["layers"],
        parameters_embedding=counts["embedding"],
        parameters_head=counts["head"],
    )


def checkpoint_config(directory: Path) -> dict[str, Any]:
    """The config.json of a checkpoint. Raises UserError where there is none that can be read."""
    if not directory.is_dir():
        raise UserError(f"model.checkpoint {directory} is no directory. {EXPECTED}")
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"model.checkpoint {directory} has no config.json. {EXPECTED}") from None
    except ValueError as error:
        raise UserError(f"{directory / 'config.json'} is no JSON: {error}. Save the checkpoint again.") from None
    if not isinstance(config, dict):
        raise UserError(f"{directory / 'config.json'} holds no JSON object. Save the checkpoint again.")
    return config


def checkpoint_files(directory: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint, all of them present. Raises UserError otherwise."""
    if (directory / WEIGHTS).is_file():
        return (directory / WEIGHTS,)
    if not (directory / INDEX).is_file():
        pickled = sorted(path.name for path in directory.glob("*.bin"))
        hint = f" {pickled[0]} is pickled: load it with transformers and save_pretrained it." if pickled else ""
        raise UserError(f"model.checkpoint {directory} has no {WEIGHTS} and no {INDEX}. {EXPECTED}{hint}")
    try:
        names = sorted(set(json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{directory / INDEX} has no usable weight_map. Save the checkpoint again.") from None
    missing = [name for name in names if not (directory / name).is_file()]
    if missing or not names:
        raise UserError(
            f"{directory / INDEX} names {', '.join(missing) or 'no shard'}, not found beside it. {EXPECTED}"
        )
    return tuple(directory / name for name in names)


def _preset_sizes(spec: ModelSpec, presets: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    if spec.preset not in presets:
        raise UserError(f"unknown preset {spec.preset!r} of model {spec.name!r}.{near_miss(spec.preset, presets)}")
    overrides = {name: getattr(spec, name) for name in OVERRIDES}
    return dict(presets[spec.preset]) | {name: value for name, value in overrides.items() if value is not None}


def _checkpoint_sizes(spec: ModelSpec, keys: Mapping[str, str]) -> dict[str, int]:
    assert spec.checkpoint is not None
    directory = Path(spec.checkpoint).expanduser()
    config = checkpoint_config(directory)
    family = config.get("model_type")
    if family != keys["model_type"]:
        raise UserError(
            f"model.checkpoint {directory} is of family {family!r} (model_type), but model.name "
            f"{spec.name!r} needs {keys['model_type']!r}. Choose that family's model, or another checkpoint."
        )
    checkpoint_files(directory)
    if spec.preset != ModelSpec().preset:
        raise UserError(f"model.preset {spec.preset!r} has no effect beside model.checkpoint: leave one of them out.")
    sizes: dict[str, int] = {}
    for name, key in keys.items():
        # null stands for "the family's default" in these files, as a missing key does.
        if name == "model_type" or config.get(key) is None:
            continue
        if not isinstance(config[key], int) or config[key] < 1:
            raise UserError(f"{directory / 'config.json'}: {key} is {config[key]!r}, not a positive integer.")
        sizes[name] = config[key]
    missing = sorted({"layers", "width", "heads", "vocab_size", "positions"} - set(sizes))
    if missing:
        raise UserError(f"{directory / 'config.json'} lacks {', '.join(keys[name] for name in missing)}.")
    for name in OVERRIDES:
        if getattr(spec, name) not in (None, sizes[name]):
            raise UserError(
                f"model.{name} {getattr(spec, name)} contradicts model.checkpoint {directory}, whose "
                f"{keys[name]} is {sizes[name]}: a checkpoint fixes its own sizes, leave model.{name} out."
            )
    return sizes


def _check(sizes: Mapping[str, int], task: TaskSpec) -> None:
    width, heads = sizes["width"], sizes["heads"]
    if width % heads:
        raise UserError(
            f"model.width {width} cannot be divided among model.heads {heads}; "
            f"choose a width that is a multiple of {heads}."
        )
    if task.sequence_length > sizes["positions"]:
        raise UserError(
            f"task.sequence_length {task.sequence_length} is longer than the model's {sizes['positions']} "
            "positions; shorten it or choose a model with more."
        )
    if task.vocab_size > sizes["vocab_size"]:
        raise UserError(
            f"task.vocab_size {task.vocab_size} is more than the checkpoint's {sizes['vocab_size']} token "
            "ids; lower it, or use a checkpoint that was trained with this vocabulary."
        )


def _evaluate(polynomial: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    return sum(factor * math.prod(sizes[name] for name in term.split("*")) for term, factor in polynomial.items())
