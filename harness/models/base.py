"""What every model family shares, known before torch is imported: its size, and the part a stage holds.

A model plug-in says in its literal `PARAMETERS`, so that planning costs no import:

    presets       name -> {layers, width, heads, positions}; heads and positions only where the family has them
    counts        {block, embedding, head} -> polynomial: parameters of one block, before them, after all
    defaults      (may be left out) size -> polynomial, for a size that neither preset nor checkpoint gives
    checkpoint    (left out by a family that loads none) {model_type, layers, width, vocab_size, ...} -> the key of a
                  Hugging Face config.json that holds it; `model_type` -> the family's name there
    (polynomial: {"width*width": 4, "width": 9} is 4 width^2 + 9 width; vocab_size and every size may be named)

and defines, in the module that a rank imports:

    build(spec, shape, part, *, seed) -> torch.nn.Module     one stage
    loss(logits, targets, weights=None) -> scalar tensor     the micro-batch's mean; with weights the weighted sum

`_shared.py` has what several families need for these: seeded weights, the next-token loss.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
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
PARTS = ("block", "embedding", "head")
# What PARAMETERS may hold -> whether it must.
DECLARED = {"presets": True, "counts": True, "defaults": False, "checkpoint": False}
SIZES = ("layers", "width")
OPTIONAL_SIZES = ("heads", "positions")


@dataclass(frozen=True)
class ModelShape:
    """The size of a model. positions: the longest sequence in tokens (None: any); heads: None where a family has none;
    parameters_*: numbers of parameters."""

    layers: int
    width: int
    heads: int | None
    vocab_size: int
    positions: int | None
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
    declared = declaration(plugins.get("models", spec.name))
    if spec.checkpoint is None:
        sizes = _preset_sizes(spec, declared["presets"]) | {"vocab_size": task.vocab_size}
    elif "checkpoint" in declared:
        sizes = _checkpoint_sizes(spec, declared["checkpoint"])
    else:
        raise UserError(
            f"model {spec.name!r} loads no checkpoints: leave model.checkpoint out, or choose another model."
        )
    for name, polynomial in declared.get("defaults", {}).items():
        if name not in sizes:
            sizes[name] = _evaluate(polynomial, sizes, f"model {spec.name!r}: PARAMETERS, defaults, {name}")
    _check(sizes, task)
    counts = {
        part: _evaluate(polynomial, sizes, f"model {spec.name!r}: PARAMETERS, counts, {part}")
        for part, polynomial in declared["counts"].items()
    }
    return ModelShape(
        layers=sizes["layers"],
        width=sizes["width"],
        heads=sizes.get("heads"),
        vocab_size=sizes["vocab_size"],
        positions=sizes.get("positions"),
        parameters_per_block=(counts["block"],) * sizes["layers"],
        parameters_embedding=counts["embedding"],
        parameters_head=counts["head"],
    )


def declaration(plugin: plugins.Plugin) -> Mapping[str, Any]:
    """A model plug-in's PARAMETERS. Raises UserError naming what is missing from it, or is none of the keys above."""
    where, declared = f"model {plugin.name!r}: PARAMETERS", plugin.parameters
    _keys(where, declared, [key for key, must in DECLARED.items() if must], DECLARED)
    _keys(f"{where}, counts", declared["counts"], PARTS, PARTS)
    if not declared["presets"]:
        raise UserError(f"{where}, presets: there is none; add one, e.g. {{'tiny': {{'layers': 4, 'width': 128}}}}.")
    for name, sizes in declared["presets"].items():
        _keys(f"{where}, preset {name!r}", sizes, SIZES)
    if "checkpoint" in declared:
        _keys(f"{where}, checkpoint", declared["checkpoint"], ("model_type", *SIZES, "vocab_size"))
    return declared


def _keys(where: str, data: Any, required: Iterable[str], valid: Iterable[str] | None = None) -> None:
    """Refuse a table without its required keys, or with a key that is none of `valid` (None: any)."""
    if not isinstance(data, Mapping):
        raise UserError(f"{where}: must be a dict, not {data!r}.")
    for key in data:
        if valid is not None and key not in valid:
            raise UserError(f"{where}: unknown key {key!r}.{near_miss(key, valid)}")
    if missing := [key for key in required if key not in data]:
        raise UserError(f"{where}: {', '.join(missing)} missing; harness/models/base.py says what each key means.")


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
    sizes = dict(presets[spec.preset])
    overrides = {name: getattr(spec, name) for name in OVERRIDES if getattr(spec, name) is not None}
    if unknown := [name for name in overrides if name not in sizes]:
        raise UserError(f"model {spec.name!r} has no {unknown[0]}: leave model.{unknown[0]} out.")
    return sizes | overrides


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
    required = {*SIZES, "vocab_size", *OPTIONAL_SIZES} & set(keys)
    missing = sorted(required - set(sizes))
    if missing:
        raise UserError(f"{directory / 'config.json'} lacks {', '.join(keys[name] for name in missing)}.")
    for name in OVERRIDES:
        asked = getattr(spec, name)
        if asked is not None and name not in sizes:
            raise UserError(f"model {spec.name!r} has no {name}: leave model.{name} out.")
        if asked not in (None, sizes.get(name)):
            raise UserError(
                f"model.{name} {asked} contradicts model.checkpoint {directory}, whose "
                f"{keys[name]} is {sizes[name]}: a checkpoint fixes its own sizes, leave model.{name} out."
            )
    return sizes


def _check(sizes: Mapping[str, int], task: TaskSpec) -> None:
    width, heads, positions = sizes["width"], sizes.get("heads"), sizes.get("positions")
    if heads is not None and width % heads:
        raise UserError(
            f"model.width {width} cannot be divided among model.heads {heads}; "
            f"choose a width that is a multiple of {heads}."
        )
    if positions is not None and task.sequence_length > positions:
        raise UserError(
            f"task.sequence_length {task.sequence_length} is longer than the model's {positions} "
            "positions; shorten it or choose a model with more."
        )
    if task.vocab_size > sizes["vocab_size"]:
        raise UserError(
            f"task.vocab_size {task.vocab_size} is more than the checkpoint's {sizes['vocab_size']} token "
            "ids; lower it, or use a checkpoint that was trained with this vocabulary."
        )


def _evaluate(polynomial: Mapping[str, int], sizes: Mapping[str, int], where: str) -> int:
    total = 0
    for term, factor in polynomial.items():
        for name in term.split("*"):
            if name not in sizes:
                raise UserError(f"{where}: no size is called {name!r}.{near_miss(name, sizes)}")
        total += factor * math.prod(sizes[name] for name in term.split("*"))
    return total
