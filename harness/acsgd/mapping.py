"""Arguments -> RunSpec. Pure but for a checkpoint's config.json, which is read.

What only the data can say comes in by a second call: the training samples (an epoch's steps, so the length of the
warm-up) and the tokens of a tokenizer.

    run_spec(args)                                     to load the task by
    run_spec(args, num_samples=n, vocab_size=v)        what is run
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinpipe.harness import folders, plugins
from thinpipe.harness.acsgd.table import SETTINGS
from thinpipe.harness.compression import grammar
from thinpipe.harness.errors import UserError, near_miss
from thinpipe.harness.models import base as models
from thinpipe.harness.regimes import DIRECTIONS, Direction
from thinpipe.harness.spec import RunSpec, parse

# Axes of (micro-batch, sequence, width) that share a scale -> fixpoint's word for it.
SCALES = {(0, 1): "channel", (2,): "token", (0, 1, 2): "tensor"}
# Sizes AC-SGD's runners have where nothing else says them; layers are a stage's.
SIZES = {"layers": 4, "width": 768, "heads": 12}
KINDS = {"lm": "language_model", "classification": "classification"}
SUFFIXES = {".txt": "lm", ".csv": "classify", ".tsv": "classify", ".jsonl": "classify"}
# AC-SGD's name of a data set -> ours, where they differ.
ALIASES = {"wikitext": "wikitext-2"}
# Stands in for a tokenizer's size until it is loaded: no vocabulary is larger.
ANY_VOCABULARY = 2**24
ONLY_THE_LAST = 10**9
COMPRESSED_DP = "sharded_ps_compressed"


def run_spec(args: argparse.Namespace, *, num_samples: int | None = None, vocab_size: int | None = None) -> RunSpec:
    """The run that `args` describe. num_samples, vocab_size: of the task, where it has been loaded.

    Raises UserError, naming the arguments, for what cannot be run as asked.
    """
    refuse(args)
    batch = args.batch_size * args.gradient_accumulate_step * args.data_group_size
    data: dict[str, Any] = {
        "model": model(args),
        "task": task(args, vocab_size),
        "pipeline": {
            "stages": args.pipeline_group_size,
            "microbatches": args.batch_size // args.micro_batch_size,
            "schedule": args.pp_mode,
            "cuts": args.cuts,
        },
        "compression": compression(args),
        "data_parallel": data_parallel(args),
        "train": {
            "preset": None if args.preset == "none" else args.preset,
            "epochs": args.n_epochs,
            "max_steps_per_epoch": args.num_iters,
            "batch_size": batch,
            "accumulate": args.gradient_accumulate_step,
            "optimizer": args.optimizer,
            "lr": args.lr,
            "lr_schedule": args.lr_schedule,
            "warmup_steps": warmup_steps(args, num_samples),
            "autocast": args.autocast,
            "recompute": args.recompute,
            "evaluate_every": int(args.do_evaluation),
        },
        # To be saved at its end, training needs one checkpoint, after its last step: there is one, whatever `every` is.
        "checkpoint": {"every": args.checkpoint_every or (ONLY_THE_LAST if args.save_dir else None)},
        "trace": args.profiling == "tidy_profiling",
        "seed": args.seed,
        "measure": "full",
    }
    return parse(data, where="thinpipe train")


def refuse(args: argparse.Namespace) -> None:
    """Raise UserError for what no run can be: the arguments alone tell."""
    pipeline, groups = args.pipeline_group_size, args.data_group_size
    if args.world_size != pipeline * groups:
        raise UserError(
            f"--world-size {args.world_size} is not --pipeline-group-size {pipeline} x --data-group-size {groups} "
            f"= {pipeline * groups}: change one of them."
        )
    if args.rank >= args.world_size:
        raise UserError(f"--rank {args.rank} is none of the {args.world_size} ranks 0..{args.world_size - 1}.")
    if args.batch_size % args.micro_batch_size:
        raise UserError(
            f"--batch-size {args.batch_size} is no multiple of --micro-batch-size {args.micro_batch_size}: "
            "change one of them."
        )
    if args.use_cuda:
        raise UserError("--use-cuda true: ranks compute on the CPU here. Leave it out, or say false.")
    if args.dist_backend != "gloo":
        raise UserError(f"--dist-backend {args.dist_backend}: everything goes by gloo here. Leave it out, or say gloo.")
    if args.fp16:
        raise UserError(
            "--fp16 is not offered: AC-SGD's crashes, and did not scale the loss. For half-precision products say "
            "--autocast bf16, which needs no loss scaling."
        )


def model(args: argparse.Namespace) -> dict[str, Any]:
    """ModelSpec's data: a checkpoint as it is, or random weights of the sizes that are given."""
    name = family(args)
    common = {
        "name": name,
        "shared": args.shared,
        "dropout": args.dropout,
        "dropout_masks": args.dropout_masks,
    }
    if args.load_pretrained_model:
        if args.size is not None:
            raise UserError("--size has no effect on a checkpoint: leave it out, or say --load-pretrained-model false.")
        return common | {"checkpoint": args.model_name}
    presets = models.declaration(plugins.get("models", name))["presets"]
    if args.size is not None and args.size not in presets:
        raise UserError(f"unknown --size {args.size!r} of family {name!r}.{near_miss(args.size, presets)}")
    # Without --size only the number of positions is the preset's: the longest will do for most.
    preset = args.size or max(presets, key=lambda item: presets[item].get("positions", 0))
    sizes = {} if args.size else default_sizes(args, name, presets[preset])
    layers = None if args.num_layers is None else args.num_layers * args.pipeline_group_size
    given = {"layers": layers, "width": args.embedding_dim, "heads": args.num_heads}
    return common | {"preset": preset, **sizes, **{key: size for key, size in given.items() if size is not None}}


def default_sizes(args: argparse.Namespace, name: str, preset: Mapping[str, int]) -> dict[str, int]:
    """Sizes of random weights that nobody gave: of --model-name's config.json, else those of AC-SGD's runners."""
    config = _config(args.model_name)
    if config is None:
        defaults = SIZES | {"layers": SIZES["layers"] * args.pipeline_group_size}
        return {key: size for key, size in defaults.items() if key in preset}
    keys = plugins.get("models", name).parameters.get("checkpoint", {})
    return {key: config[keys[key]] for key in SIZES if config.get(keys.get(key)) is not None}


def family(args: argparse.Namespace) -> str:
    """The model plug-in: --family, or whose config.json it is, or whose name --model-name begins with."""
    known = plugins.find("models")
    if args.family is not None:
        if args.family not in known:
            raise UserError(f"unknown --family {args.family!r}.{near_miss(args.family, known)}")
        return args.family
    config = _config(args.model_name)
    if config is not None:
        types = {plugin.parameters.get("checkpoint", {}).get("model_type"): name for name, plugin in known.items()}
        found = types.get(config.get("model_type"))
        what = f"{args.model_name}: its config.json is of model_type {config.get('model_type')!r}"
    else:
        last = args.model_name.rstrip("/").rpartition("/")[2].lower()
        found = max((name for name in known if last.startswith(name)), key=len, default=None)
        what = f"--model-name {args.model_name!r} is no folder, and begins with no family's name"
    if found is None:
        raise UserError(f"{what}. Say --family: {', '.join(sorted(known))}.")
    return found


def task(args: argparse.Namespace, vocab_size: int | None = None) -> dict[str, Any]:
    """TaskSpec's data: the data set by AC-SGD's name, by ours, or by its path."""
    name, corpus = data_set(args)
    declared = plugins.get("tasks", name).parameters["kind"]
    kind = KINDS.get(declared, declared)
    if args.task_type not in (None, kind):
        raise UserError(f"--task-type {args.task_type} does not fit --task-name {args.task_name}, which is {kind}.")
    tokenizer = args.tokenizer_name
    if args.load_pretrained_model and tokenizer in (None, args.model_name):
        tokenizer = "checkpoint"
    size = args.vocab_size or vocabulary(args)
    if size is None and tokenizer is not None:
        # A tokenizer's size is known once it has been loaded.
        size = vocab_size or ANY_VOCABULARY
    return {
        "name": name,
        "corpus": corpus,
        "tokenizer": tokenizer,
        **({} if size is None else {"vocab_size": size}),
        "sequence_length": args.seq_length,
        "num_sequences": args.num_sequences,
        "num_eval_sequences": args.num_eval_sequences,
        "num_labels": args.num_labels,
    }


def data_set(args: argparse.Namespace) -> tuple[str, str]:
    """(task plug-in, corpus)."""
    wanted = ALIASES.get(args.task_name, args.task_name)
    known = {corpus: task for task, plugin in plugins.find("tasks").items() for corpus in plugin.parameters["corpora"]}
    if wanted in known:
        return known[wanted], wanted
    path = Path(wanted).expanduser()
    if not path.exists():
        raise UserError(
            f"--task-name {args.task_name!r} is neither a known data set nor a path, seen from {Path.cwd()}."
            f"{near_miss(wanted, [*known, *ALIASES])}"
        )
    by_type = {"language_model": "lm", "classification": "classify"}
    name = by_type[args.task_type] if args.task_type else SUFFIXES.get(path.suffix.lower())
    if name is None:
        raise UserError(f"--task-name {wanted}: say --task-type language_model or classification beside this path.")
    return name, str(path)


def vocabulary(args: argparse.Namespace) -> int | None:
    """Tokens of the checkpoint's vocabulary, None without a checkpoint."""
    if not args.load_pretrained_model:
        return None
    return models.checkpoint_config(models.checkpoint_folder(args.model_name)).get("vocab_size")


def compression(args: argparse.Namespace) -> dict[str, Any]:
    """CompressionSpec's data. A warm-up that would end after the run is refused, as nothing would be compressed."""
    if compresses(args) and args.warmup_epochs >= args.n_epochs:
        raise UserError(
            f"--warmup-epochs {args.warmup_epochs} of --n-epochs {args.n_epochs} leaves nothing compressed: train "
            "longer, warm up less, or say --forward-compress-method none --backward-compress-method none."
        )
    return {
        **{direction: compressor(args, direction) for direction in DIRECTIONS},
        "warmup_epochs": args.warmup_epochs if compresses(args) else 0,
        "evaluation": args.evaluation,
    }


def compresses(args: argparse.Namespace) -> bool:
    """Whether anything is compressed once the warm-up is over."""
    uses = {grammar.canonical(compressor(args, direction)) for direction in DIRECTIONS}
    return uses != {"none"} or data_parallel(args)["exchange"] == "quantized-adam"


def compressor(args: argparse.Namespace, direction: Direction) -> str:
    """The compressor's text of one direction."""

    def value(name: str) -> Any:
        return getattr(args, f"{direction}_{name}")

    method, own = value("compress_method"), getattr(args, direction)
    if own is not None:
        if f"--{direction}-compress-method" in args.given:
            raise UserError(f"--{direction} and --{direction}-compress-method say two things: leave one of them out.")
        grammar.check(own)
        return own
    if method == "none":
        return "none"
    if direction == "backward" and method != "fixpoint":
        raise UserError(
            f"--backward-compress-method {method}: a delta of gradients would need each sample's own earlier gradient; "
            "AC-SGD accepts it and takes whatever its buffer last held. Say none or fixpoint."
        )
    if value("scale_method") != "max":
        raise UserError(f"--{direction}-scale-method {value('scale_method')}: only max is offered here.")
    if value("scale_dims") not in SCALES:
        shown = "; ".join(" ".join(map(str, dims)) for dims in SCALES)
        given = " ".join(map(str, value("scale_dims")))
        raise UserError(f"--{direction}-scale-dims {given} is not offered here. Valid: {shown}.")
    published = args.preset == "acsgd"
    codec = fixpoint(value("bits"), published, SCALES[value("scale_dims")])
    if method == "fixpoint":
        return codec
    cache = "fp16" if published else "bf16"
    if method == "delta-lowbits":
        cache = fixpoint(args.forward_bits_act, published)
    return grammar.canonical(f"delta({codec}, cache={cache})")


def fixpoint(bits: int, published: bool, scale: str = "channel") -> str:
    return grammar.canonical(f"fixpoint:{bits}(preset={'acsgd' if published else 'none'}, scale={scale})")


def data_parallel(args: argparse.Namespace) -> dict[str, Any]:
    """DataParallelSpec's data. With one group a mode has nothing to do, as in AC-SGD."""
    exchange = args.exchange
    if exchange is not None and "--dp-mode" in args.given:
        raise UserError("--exchange and --dp-mode say two things: leave one of them out.")
    if exchange is None and args.dp_mode == COMPRESSED_DP and args.data_group_size > 1:
        exchange = "quantized-adam"
    data = {"groups": args.data_group_size, "exchange": exchange or "none"}
    return data | ({"bits": args.dp_bits} if exchange == "quantized-adam" else {})


def steps_per_epoch(args: argparse.Namespace, num_samples: int) -> int:
    """Optimizer steps of an epoch: full ones, at most --num-iters. Raises UserError where there is none."""
    each = args.batch_size * args.gradient_accumulate_step
    steps = num_samples // args.data_group_size // each
    if not steps:
        raise UserError(
            f"{num_samples} training samples do not fill one step of --batch-size {args.batch_size} x "
            f"--gradient-accumulate-step {args.gradient_accumulate_step} x --data-group-size {args.data_group_size}: "
            "lower one of them."
        )
    return min(steps, args.num_iters)


def warmup_steps(args: argparse.Namespace, num_samples: int | None) -> int:
    if args.warmup_steps is not None:
        return args.warmup_steps
    return 0 if num_samples is None else steps_per_epoch(args, num_samples)


def refuse_small_cache(args: argparse.Namespace, num_samples: int) -> None:
    """Raise UserError where a delta cache of --max-activation-cache-size rows cannot hold a data group's samples."""
    needed = num_samples // args.data_group_size
    if uses_cache(args) and needed > args.max_activation_cache_size:
        raise UserError(
            f"--max-activation-cache-size {args.max_activation_cache_size} is too small: the delta cache needs a row "
            f"for each of {needed} training samples. Say --max-activation-cache-size {needed}, or train on fewer "
            "(--num-sequences)."
        )


def uses_cache(args: argparse.Namespace) -> bool:
    return any(
        name.startswith("memories/")
        for direction in DIRECTIONS
        for name in grammar.plugins_used(compressor(args, direction))
    )


def refuse_other_sizes(args: argparse.Namespace, shape: models.ModelShape) -> None:
    """Raise UserError where the sizes given are not those of the checkpoint, naming the right ones."""
    if not args.load_pretrained_model:
        return
    stages, where = args.pipeline_group_size, f"{args.model_name} has"
    if args.num_layers is not None and args.num_layers * stages != shape.layers:
        fits = f"say --num-layers {shape.layers // stages}" if shape.layers % stages == 0 else "leave it out"
        raise UserError(
            f"--num-layers {args.num_layers} is a stage's: x --pipeline-group-size {stages} = "
            f"{args.num_layers * stages} blocks, but {where} {shape.layers}; {fits}."
        )
    for name, given, right in (
        ("--embedding-dim", args.embedding_dim, shape.width),
        ("--num-heads", args.num_heads, shape.heads),
    ):
        if given not in (None, right):
            raise UserError(f"{name} {given}, but {where} {right}: say {name} {right}, or leave it out.")


def trace_name(args: argparse.Namespace, width: int) -> str:
    """The file name of a rank's trace, as AC-SGD forms it (also for DeBERTa it begins with gpt3)."""
    mode = f"_{args.dp_mode}" if args.data_group_size > 1 else ""
    return (
        f"gpt3_{args.pp_mode}{mode}_b{args.batch_size}_{args.micro_batch_size}_l{args.seq_length}_m{width}_w{args.world_size}"
        f"_p{args.pipeline_group_size}_{args.gradient_accumulate_step}_d{args.data_group_size}_{args.rank}"
        f"_{args.profiling}_{args.trace_postfix}.json"
    )


def explain(message: str) -> str:
    """`message` with the argument beside each setting it names."""
    named = {key: name for name, key in SETTINGS.items() if re.search(rf"\b{re.escape(key)}\b", message)}
    if not named:
        return message
    return message + "\nHere " + ", ".join(f"{key} is {name}" for key, name in sorted(named.items())) + "."


def _config(name: str) -> dict[str, Any] | None:
    """The config.json of a folder, None where `name` is no folder that has one."""
    folder = folders.resolve(name)
    return models.checkpoint_config(folder) if (folder / "config.json").is_file() else None
