"""What every model family shares, known before torch is imported: its size, and the part a stage holds.

A model plug-in says in its literal `PARAMETERS`, so that planning costs no import:

    kinds         what it can be trained on: kinds of task (`lm`, `classification`, `images`)
    presets       name -> {layers, width, heads, positions}; heads and positions only where the family has them
    blocks        (may be left out) a list with a table a block, size -> polynomial, where blocks differ; it then fixes
                  `layers`. Sizes named here may be used in the polynomials below
    counts        {block, embedding, head} -> polynomial: parameters of one block, before them, after all
    flops         {block, head} -> polynomial: multiply-adds of the forward pass of one sample
    activations   {block, embedding, head} -> polynomial: elements kept for the backward pass of one sample (fp32, no
                  dropout, no recomputation): what autograd saves, and the part's output, which a stage keeps as well;
                  without its input, which is the output of the part before or a channel's. The head's: with the loss
    boundary      {shape: [sizes], relu: whether it is a ReLU's output}: the tensor between two blocks, of one sample
    shared        what may become of parameters that several stages use, the usual one first (ModelSpec.shared)
    defaults      (may be left out) size -> polynomial, for a size that neither preset nor checkpoint gives
    checkpoint    (left out by a family that loads none) {model_type, layers, width, vocab_size, ...} -> the key of a
                  Hugging Face config.json that holds it; `model_type` -> the family's name there
    published     (may be left out) a hub's name of a checkpoint -> {preset, vocab_size}: its sizes, so that a run
                  with it can be planned where it is not at hand
    (polynomial: {"width*width": 4, "width": 9} is 4 width^2 + 9 width. Of the task: vocab_size, sequence_length,
    num_labels (0 where it has none), and lm: 1 where its kind is lm, else 0)

and defines, in the module that a rank imports:

    build(spec, shape, part, *, seed, recompute=False) -> torch.nn.Module       one stage, in float32, training mode
        its forward(x, **side): x the task's inputs on the first stage, else the boundary tensor; side: the task's
        per-sample extras (a mask), the same on every stage; returns the boundary tensor, or the output on the last.
        Its parameters and buffers carry the names they have in the whole model, cut at any place.
        Its `part`: the StagePart it was built for, read back before a run.
        Its `shared`: key -> list of its parameters that are copies of one (shape.shared "summed"), here or on other
        stages too; the trainer gives all copies of a key the sum of their gradients, and counts one of them in norms.
    loss(output, targets, weights=None) -> scalar tensor     the micro-batch's mean; with weights the weighted sum
    reference(spec, shape) -> transformers model             the whole model as Hugging Face builds it (no weights set)
    stored_names(name) -> tuple of str                       what checkpoints call a stage's parameter or buffer; the
                                                             first is what `reference` calls it

`_shared.py` has what several families need for these.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinpipe.harness import folders, plugins
from thinpipe.harness.errors import UserError, near_miss
from thinpipe.harness.spec import ModelSpec, TaskSpec
from thinpipe.harness.tasks import base as tasks

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
EXPECTED = f"Expected a local Hugging Face folder: config.json and {WEIGHTS} (or {INDEX} with its shards)."
# What a hub calls a model, with or without its owner; and the files of it that are of use here.
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt")
HUB_SECONDS = 5.0
OVERRIDES = ("layers", "width", "heads")
# What PARAMETERS may hold -> whether it must.
DECLARED = {
    "kinds": True,
    "presets": True,
    "blocks": False,
    "counts": True,
    "flops": True,
    "activations": True,
    "boundary": True,
    "shared": False,
    "defaults": False,
    "checkpoint": False,
    "published": False,
}
# The polynomials of these tables, and the parts each is about.
POLYNOMIALS = {
    "counts": ("block", "embedding", "head"),
    "flops": ("block", "head"),
    "activations": ("block", "embedding", "head"),
}
SIZES = ("layers", "width")
OPTIONAL_SIZES = ("heads", "positions")


@dataclass(frozen=True)
class ModelShape:
    """The size of a model. positions: the longest sequence in tokens (None: any); heads: None where a family has none;
    num_labels: classes (0: none); parameters_*: numbers of parameters; flops_*: multiply-adds of one sample's forward
    pass; activations_*: elements kept for the backward pass of one sample; boundaries: of one sample, after each block
    but the last; relu: whether these are a ReLU's output; shared: see ModelSpec, `auto` resolved ("" = it has none)."""

    kind: str
    layers: int
    width: int
    heads: int | None
    vocab_size: int
    positions: int | None
    num_labels: int
    parameters_per_block: tuple[int, ...]
    parameters_embedding: int
    parameters_head: int
    flops_per_block: tuple[int, ...]
    flops_head: int
    activations_per_block: tuple[int, ...]
    activations_embedding: int
    activations_head: int
    boundaries: tuple[tuple[int, ...], ...]
    relu: bool
    shared: str


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

    Raises UserError for an unknown preset, sizes that do not fit together or with the task, a model that cannot be
    trained on the task, and a checkpoint that is missing, incomplete, of another family, or at odds with an override.
    """
    declared = declaration(plugins.get("models", spec.name))
    kind = tasks.kind(task)
    if kind not in declared["kinds"]:
        raise UserError(
            f"model {spec.name!r} cannot be trained on task {task.name!r}, which is of kind {kind!r}: it takes "
            f"{', '.join(declared['kinds'])}. Choose another model or task."
        )
    blocks = declared.get("blocks")
    fixed = {} if blocks is None else {"layers": len(blocks)}
    published = _published_sizes(spec, declared)
    if spec.checkpoint is None:
        sizes = _preset_sizes(spec, declared["presets"], fixed) | {"vocab_size": task.vocab_size}
    elif published is not None:
        sizes = published
    elif "checkpoint" in declared:
        sizes = _checkpoint_sizes(spec, declared["checkpoint"]) | fixed
    else:
        raise UserError(
            f"model {spec.name!r} loads no checkpoints: leave model.checkpoint out, or choose another model."
        )
    sizes |= {"sequence_length": task.sequence_length, "num_labels": tasks.num_labels(task), "lm": int(kind == "lm")}
    where = f"model {spec.name!r}: PARAMETERS"
    for name, polynomial in declared.get("defaults", {}).items():
        if name not in sizes:
            sizes[name] = _evaluate(polynomial, sizes, f"{where}, defaults, {name}")
    if kind != "images":
        _check(sizes, task)
    each = [
        sizes | {name: _evaluate(p, sizes, f"{where}, blocks, {name}") for name, p in block.items()}
        for block in (blocks or [{}] * sizes["layers"])
    ]
    return ModelShape(
        kind=kind,
        layers=sizes["layers"],
        width=sizes["width"],
        heads=sizes.get("heads"),
        vocab_size=sizes["vocab_size"],
        positions=sizes.get("positions"),
        num_labels=sizes["num_labels"],
        boundaries=tuple(tuple(block[name] for name in declared["boundary"]["shape"]) for block in each[:-1]),
        relu=declared["boundary"]["relu"],
        shared=_shared(spec, declared),
        **_polynomials(declared, sizes, each, where),
    )


def _polynomials(
    declared: Mapping[str, Any], sizes: Mapping[str, int], each: Sequence[Mapping[str, int]], where: str
) -> dict[str, Any]:
    """parameters_*, flops_* and activations_* of a shape."""
    found: dict[str, Any] = {}
    for table, parts in POLYNOMIALS.items():
        name = "parameters" if table == "counts" else table
        for part in parts:
            at, polynomial = f"{where}, {table}, {part}", declared[table][part]
            if part == "block":
                found[f"{name}_per_block"] = tuple(_evaluate(polynomial, block, at) for block in each)
            else:
                found[f"{name}_{part}"] = _evaluate(polynomial, sizes, at)
    return found


def _shared(spec: ModelSpec, declared: Mapping[str, Any]) -> str:
    offered = declared.get("shared", [])
    if spec.shared == "auto":
        return offered[0] if offered else ""
    if spec.shared not in offered:
        raise UserError(
            f"model {spec.name!r} cannot have its shared parameters {spec.shared!r}; "
            f"model.shared may be {', '.join(['auto', *offered])}."
        )
    return spec.shared


def declaration(plugin: plugins.Plugin) -> Mapping[str, Any]:
    """A model plug-in's PARAMETERS. Raises UserError naming what is missing from it, or is none of the keys above."""
    where, declared = f"model {plugin.name!r}: PARAMETERS", plugin.parameters
    _keys(where, declared, [key for key, must in DECLARED.items() if must], DECLARED)
    for table, parts in POLYNOMIALS.items():
        _keys(f"{where}, {table}", declared[table], parts, parts)
    _keys(f"{where}, boundary", declared["boundary"], ("shape", "relu"), ("shape", "relu"))
    if not declared["presets"]:
        raise UserError(f"{where}, presets: there is none; add one, e.g. {{'tiny': {{'layers': 4, 'width': 128}}}}.")
    sizes = SIZES if "blocks" not in declared else ("width",)
    for name, preset in declared["presets"].items():
        _keys(f"{where}, preset {name!r}", preset, sizes)
    if "checkpoint" in declared:
        _keys(f"{where}, checkpoint", declared["checkpoint"], ("model_type", *sizes))
    for name, known in declared.get("published", {}).items():
        _keys(f"{where}, published {name!r}", known, ("preset", "vocab_size"), ("preset", "vocab_size"))
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


def checkpoint_folder(name: str) -> Path:
    """The folder of a checkpoint: itself where `name` is one, one of ours for `pretrained:` or `fetched:`, else what a
    hub has under that name.

    A hub is asked for what is not in its local cache already, and has to answer within HUB_SECONDS; with
    HF_HUB_OFFLINE=1 it is not asked. Raises UserError where neither gives a folder.
    """
    folder = folders.resolve(name)
    if folder.is_dir():
        return folder
    if HUB_NAME.fullmatch(name) is None:
        raise UserError(f"model.checkpoint {name} is no directory. {EXPECTED}")
    return _from_hub(name)


def _here(name: str) -> Path | None:
    """The whole checkpoint of this name in the hub's local cache, or the folder of that name; nobody is asked."""
    from huggingface_hub import errors

    if Path(name).is_dir():
        return Path(name)
    # The cache may hold parts alone, e.g. what its tokenizer needed.
    with contextlib.suppress(errors.LocalEntryNotFoundError, UserError):
        folder = Path(_ask(name)(local_files_only=True))
        checkpoint_files(folder)
        return folder
    return None


def _ask(name: str) -> Callable[..., str]:
    # Imported here: it takes half a second, and planning with a local folder or none needs no hub.
    import huggingface_hub

    return functools.partial(huggingface_hub.snapshot_download, name, allow_patterns=list(HUB_FILES))


def _from_hub(name: str) -> Path:
    import huggingface_hub
    from huggingface_hub import constants

    if (folder := _here(name)) is not None:
        return folder
    reason = "HF_HUB_OFFLINE is set, so no hub was asked"
    if not constants.HF_HUB_OFFLINE:
        try:
            # The download itself would wait for a silent hub without a limit.
            huggingface_hub.HfApi().repo_info(name, timeout=HUB_SECONDS)
            return Path(_ask(name)(etag_timeout=HUB_SECONDS))
        except Exception as error:  # whatever its HTTP stack raises: the files did not come
            reason = f"{constants.ENDPOINT} did not give it ({type(error).__name__}: {error})".split("\n")[0]
    raise UserError(
        f"model.checkpoint {name} is no directory here, no checkpoint in the hub's local cache, and {reason}. Give the "
        f"path of a local folder, or download {name} where there is a network and copy it. {EXPECTED}"
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


def weight_map(directory: Path) -> dict[str, str] | None:
    """Tensor name -> file name, as a checkpoint's index says; None where it is one file. Raises UserError."""
    if (directory / WEIGHTS).is_file():
        return None
    if not (directory / INDEX).is_file():
        pickled = sorted(path.name for path in directory.glob("*.bin"))
        hint = f" {pickled[0]} is pickled: load it with transformers and save_pretrained it." if pickled else ""
        raise UserError(f"model.checkpoint {directory} has no {WEIGHTS} and no {INDEX}. {EXPECTED}{hint}")
    try:
        found = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
        # A name with a folder in it could lead anywhere.
        usable = all(isinstance(name, str) and name and Path(name).name == name for name in found.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        usable = False
    if not usable:
        raise UserError(f"{directory / INDEX} has no usable weight_map. Save the checkpoint again.")
    return found


def checkpoint_files(directory: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint, all of them present. Raises UserError otherwise."""
    index = weight_map(directory)
    names = [WEIGHTS] if index is None else sorted(set(index.values()))
    missing = [name for name in names if not (directory / name).is_file()]
    if missing or not names:
        raise UserError(
            f"{directory / INDEX} names {', '.join(missing) or 'no shard'}, not found beside it. {EXPECTED}"
        )
    return tuple(directory / name for name in names)


def _preset_sizes(
    spec: ModelSpec, presets: Mapping[str, Mapping[str, int]], fixed: Mapping[str, int]
) -> dict[str, int]:
    if spec.preset not in presets:
        raise UserError(f"unknown preset {spec.preset!r} of model {spec.name!r}.{near_miss(spec.preset, presets)}")
    sizes = dict(presets[spec.preset])
    overrides = {name: getattr(spec, name) for name in OVERRIDES if getattr(spec, name) is not None}
    if unknown := [name for name in overrides if name not in sizes]:
        raise UserError(f"model {spec.name!r} has no {unknown[0]}: leave model.{unknown[0]} out.")
    return sizes | overrides | dict(fixed)


def _published_sizes(spec: ModelSpec, declared: Mapping[str, Any]) -> dict[str, int] | None:
    """Sizes of a checkpoint that is published, or that a recipe makes, and is not here: so that a run with it can be
    planned without it. Else None."""
    if spec.checkpoint is not None and spec.checkpoint.startswith(folders.PRETRAINED):
        from thinpipe.harness import pretrain

        recipe = pretrain.unmade(spec.checkpoint.removeprefix(folders.PRETRAINED))
        if recipe is None or recipe.model.name != spec.name:
            return None
        return _preset_sizes(recipe.model, declared["presets"], {}) | {"vocab_size": recipe.task.vocab_size}
    known = declared.get("published", {}).get(spec.checkpoint)
    if known is None or _here(str(spec.checkpoint)) is not None:
        return None
    return {**declared["presets"][known["preset"]], "vocab_size": known["vocab_size"]}


def _checkpoint_sizes(spec: ModelSpec, keys: Mapping[str, str]) -> dict[str, int]:
    assert spec.checkpoint is not None
    directory = checkpoint_folder(spec.checkpoint)
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
    if task.tokenizer is None and task.vocab_size > sizes["vocab_size"]:
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
