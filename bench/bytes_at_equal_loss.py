"""Fewer bytes for the same loss: our settings against the published ones, paired by seed.

    python bench/bytes_at_equal_loss.py [--json] [--models gpt2,resnet18] [--seeds 5] [--workers 2]

gpt2: fine-tuning of the pretrained small model on another text, 4 stages, 10 epochs, against AQ-SGD fw4 bw8 with one
uncompressed epoch of warm-up; and the same with a compressed first visit and no warm-up on both sides.
resnet18: a narrow ResNet18 on Fashion-MNIST, 4 stages, against TopK 10 % both ways.

All arms of a model share data, steps, schedule and seeds. bytes: every frame of training in both directions, headers,
first visits, warm-up and side information included. loss: mean training loss of the last epoch, compression on. A
setting holds where its loss is not worse by more than 1 %: the upper end of the one-sided 90 % interval of the paired
ratio is at most 1.01. The settings were chosen on seeds that are not used here (docs/log.md says which others were
tried). Numbers are those of emulate.run, which are a real run's, bit for bit. Takes about half an hour on two cores.

Needs once: thinpipe pretrain gpt2-tiny-shakespeare; thinpipe fetch-data fashion-mnist.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ[_name] = "1"

MARGIN = 0.01
FIRST_SEED = 11
BASES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model": {"checkpoint": "pretrained:gpt2-tiny-shakespeare"},
        "task": {
            "corpus": "wikipedia", "tokenizer": "checkpoint", "vocab_size": 2048, "sequence_length": 64,
            "num_sequences": 256, "num_eval_sequences": 64,
        },
        "pipeline": {"stages": 4, "microbatches": 4},
        "train": {
            "batch_size": 16, "epochs": 10, "lr": 1e-3, "clip_norm": 1.0, "warmup_steps": 16, "evaluate_every": 10,
        },
    },
    "resnet18": {
        "model": {"name": "resnet", "preset": "narrow"},
        "task": {"name": "image", "corpus": "fashion-mnist", "num_sequences": 1024, "num_eval_sequences": 512},
        "pipeline": {"stages": 4, "microbatches": 4},
        "train": {
            "batch_size": 64, "epochs": 8, "optimizer": "sgd", "lr": 0.05, "weight_decay": 5e-4, "clip_norm": 1.0,
            "warmup_steps": 16, "evaluate_every": 8,
        },
    },
}  # fmt: skip
Arm = tuple[str, str, int]
#: model -> comparison -> (published arm, ours): forward, backward, uncompressed epochs.
COMPARISONS: dict[str, dict[str, tuple[Arm, dict[str, Arm]]]] = {
    "gpt2": {
        "published": (
            ("delta(fixpoint:4)", "fixpoint:8", 1),
            {
                "fine": ("delta(grid:0.5, first=grid:0.1)", "grid:0.25", 0),
                "coarse": ("delta(grid:0.6, first=grid:0.2)", "grid:0.5(dead=0.15)", 0),
            },
        ),
        "compressed_first_visit": (
            ("delta(fixpoint:4, first=fixpoint:8)", "fixpoint:8", 0),
            {"coarse": ("delta(grid:0.6, first=grid:0.2)", "grid:0.5(dead=0.15)", 0)},
        ),
    },
    "resnet18": {
        "published": (
            ("topk:0.1", "topk:0.1", 0),
            {"fine": ("grid:1.0", "relu(grid:0.5)", 0), "coarse": ("grid:1.5", "relu(grid:1.0)", 0)},
        ),
    },
}


def train(model: str, arm: Arm, seed: int) -> dict[str, float]:
    """One run's last epoch: mean training loss, held-out loss and score; its bytes."""
    from thinpipe.harness import emulate, spec
    from thinpipe.harness.errors import DivergedError

    forward, backward, warmup = arm
    compression = {"forward": forward, "backward": backward, "warmup_epochs": warmup, "evaluation": "codec"}
    run = spec.parse({**BASES[model], "compression": compression, "seed": seed})
    try:
        found = emulate.run(run)
    except DivergedError:
        return {"loss": math.inf, "bytes": math.inf, "eval_loss": math.inf}
    epoch = len(found.losses) // run.train.epochs
    _, eval_loss, scores = found.evals[-1]
    return {
        "loss": sum(found.losses[-epoch:]) / epoch, "bytes": float(found.total_bytes()), "eval_loss": eval_loss,
        "forward_bits": found.bits("forward"), "backward_bits": found.bits("backward"), **scores,
    }  # fmt: skip


def compare(theirs: dict[int, dict], ours: dict[int, dict]) -> dict[str, Any]:
    """Paired by seed: ratios of bytes and losses, the one-sided 90 % interval's upper end, and whether it holds."""
    from thinpipe.harness import stats

    bytes_ratio = sum(o["bytes"] for o in ours.values()) / sum(t["bytes"] for t in theirs.values())
    losses = [{s: one["loss"] for s, one in arm.items()} for arm in (ours, theirs)]
    if not all(math.isfinite(v) for arm in losses for v in arm.values()):
        return {"bytes_ratio": bytes_ratio, "loss_ratio": None, "interval": None, "holds": False}
    # A two-sided 80 % interval ends where the one-sided 90 % one does.
    ratio = stats.paired_ratio(*losses, level=0.8)
    holds = ratio.high is not None and ratio.high <= 1 + MARGIN
    return {
        "bytes_ratio": bytes_ratio,
        "loss_ratio": ratio.mean,
        "interval": [ratio.low, ratio.high],
        "holds": bool(holds and bytes_ratio <= 0.5),
        "seeds": ratio.n,
    }


def mean(arm: dict[int, dict]) -> dict[str, float]:
    return {key: sum(one[key] for one in arm.values()) / len(arm) for key in next(iter(arm.values()))}


def measure(models: list[str], seeds: list[int], workers: int) -> dict[str, Any]:
    """Every arm and seed once, then the comparisons; `best` is the setting of fewest bytes that holds."""
    arms = {
        (model, arm)
        for model in models
        for theirs, ours in COMPARISONS[model].values()
        for arm in (theirs, *ours.values())
    }
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = {(m, a, s): pool.submit(train, m, a, s) for m, a in sorted(arms) for s in seeds}
        done = {key: job.result() for key, job in jobs.items()}

    def runs(model: str, arm: Arm) -> dict[int, dict]:
        return {seed: done[model, arm, seed] for seed in seeds}

    result: dict[str, Any] = {}
    for model in models:
        of_model: dict[str, Any] = {}
        for name, (theirs, ours) in COMPARISONS[model].items():
            found = {label: compare(runs(model, theirs), runs(model, arm)) for label, arm in ours.items()}
            best = min(found, key=lambda label: (not found[label]["holds"], found[label]["bytes_ratio"]))
            of_model[name] = {
                **found[best],
                "best": dict(zip(("forward", "backward", "warmup_epochs"), ours[best], strict=True)),
                "theirs": mean(runs(model, theirs)),
                "ours": mean(runs(model, ours[best])),
                "all": found,
            }
        result[model] = {**of_model["published"], **{k: v for k, v in of_model.items() if k != "published"}}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout, nothing else")
    parser.add_argument("--models", default="gpt2,resnet18")
    parser.add_argument("--seeds", type=int, default=5, help="how many, from a first one that no setting was chosen on")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    models = options.models.split(",")
    if unknown := [model for model in models if model not in BASES]:
        parser.error(f"unknown model {unknown[0]}; choose from {', '.join(BASES)}")
    if options.seeds < 2:
        parser.error("an interval needs two seeds or more")
    result = measure(models, list(range(FIRST_SEED, FIRST_SEED + options.seeds)), options.workers)
    if options.json:
        print(json.dumps(result, indent=2))
        return
    for model, found in result.items():
        for name, row in (
            ("published", found),
            *((k, v) for k, v in found.items() if isinstance(v, dict) and "best" in v),
        ):
            print(f"{model} / {name}: bytes {row['bytes_ratio']:.3f}, loss {row['loss_ratio']}, {row['interval']}, "
                  f"holds: {row['holds']}, {row['best']}")  # fmt: skip


if __name__ == "__main__":
    main()
