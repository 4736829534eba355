"""Small models that are trained once, to be fine-tuned from: `model.checkpoint = "pretrained:NAME"`.

A recipe is a run like any other, of one stage and without a network. What it made lies in the cache, under the name of
the recipe and the run's id, so that a changed recipe (or plug-in) is another model:

    <cache>/pretrained/NAME-RUN_ID/    config.json model.safetensors tokenizer.json tokenizer_config.json recipe.json

An interrupted one goes on from its last training checkpoint when the same command is given again.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinpipe.harness import folders, manifest, plan, progress, sweep
from thinpipe.harness.cache import cache_folder
from thinpipe.harness.errors import UserError, near_miss
from thinpipe.harness.experiment import Experiment, expand
from thinpipe.harness.spec import RunSpec
from thinpipe.harness.store import Store, read_json

# name -> (what it is good for, settings of its run). A vocabulary of 2048 bytes and pairs reads any text.
_SHAKESPEARE = {
    "model.preset": "tiny",
    "task.corpus": "shakespeare",
    "task.vocab_size": 2048,
    "task.num_sequences": "none",
    "task.num_eval_sequences": 256,
    "train.epochs": 1,
    "train.max_steps": 1500,
    "train.warmup_steps": 100,
    "checkpoint.every": 100,
}
RECIPES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gpt2-tiny-shakespeare": (
        "GPT-2 tiny (4 x 128) on Shakespeare's plays: minutes on one core; to fine-tune on another text",
        _SHAKESPEARE,
    ),
    "gpt2-tiny-shakespeare-brief": (
        "the same, stopped after a fifth of the steps: about a minute; what experiments of size check start from",
        {**_SHAKESPEARE, "train.max_steps": 300},
    ),
}
# What makes any run a recipe's: one process, whose weights stay when it is done.
FIXED = {
    "pipeline.stages": 1,
    "pipeline.microbatches": 1,
    "network.rate_mbit": "none",
    "checkpoint.keep": True,
}
RECIPE = "recipe.json"


def unmade(name: str) -> RunSpec | None:
    """The training of a recipe whose model was not made yet, so that runs with it can be planned; None where it is
    there, or there is no such recipe."""
    if name not in RECIPES:
        return None
    spec = _spec(_experiment(name))
    return None if (_place(name, spec) / RECIPE).is_file() else spec


def folder(name: str) -> Path:
    """Where the model of a recipe lies. Raises UserError where it was not made yet, or there is no such recipe."""
    path = _place(name, _spec(_experiment(name)))
    if not (path / RECIPE).is_file():
        raise UserError(f"{folders.PRETRAINED}{name} was not made yet. Make it with: thinpipe pretrain {name}")
    return path


def listing() -> list[dict[str, Any]]:
    """The recipes: name, summary, path (None: not made yet)."""
    rows = []
    for name, (summary, _) in RECIPES.items():
        path = _place(name, _spec(_experiment(name)))
        rows.append({"name": name, "summary": summary, "path": str(path) if path.is_dir() else None})
    return rows


def pretrain(
    recipe: str, overrides: Sequence[str] = (), out: Path | None = None, *, force: bool = False
) -> dict[str, Any]:
    """Train the model of `recipe`, into the cache or to `out`; what is in the cache already is left, unless `force`.

    overrides: "a.b=v" texts as `--set` takes them; what they make is another model, so it needs an `out`. Returns what
    recipe.json says, with its path. Raises UserError for an unknown recipe, a run that failed, an `out` that is there,
    and a full disk; KeyboardInterrupt where it was interrupted, and can go on.
    """
    if overrides and out is None:
        raise UserError(f"--set makes another model than pretrained:{recipe} is known as: give its folder with --out.")
    experiment = _experiment(recipe, overrides)
    spec = _spec(experiment)
    target = _place(recipe, spec) if out is None else out
    if out is not None:
        folders.require_free(out)
    elif target.is_dir() and not force:
        return {"path": str(target), **read_json(target / RECIPE)}
    run_dir = _train(experiment, spec, force=force)
    if out is None:
        shutil.rmtree(target, ignore_errors=True)
    described = _export(recipe, spec, run_dir, target)
    shutil.rmtree(run_dir)
    return {"path": str(target), **described}


def _experiment(name: str, overrides: Sequence[str] = ()) -> Experiment:
    """A recipe as an experiment of one run."""
    if name not in RECIPES:
        raise UserError(f"there is no recipe {name!r}.{near_miss(name, RECIPES)}")
    summary, settings = RECIPES[name]
    arm = {"label": name, **FIXED}
    data = {"name": f"pretrain-{name}", "title": summary, "base": settings, "part": [{"name": "run", "arm": [arm]}]}
    experiment = expand(data, overrides, where=f"recipe {name}")
    if len([None for cell in experiment.cells() for _ in cell.runs]) != 1:
        raise UserError("a recipe is one run: give one seed, e.g. --set seeds=[1].")
    return experiment


def _spec(experiment: Experiment) -> RunSpec:
    ((_, spec),) = next(experiment.cells()).runs
    return spec


def _place(name: str, spec: RunSpec) -> Path:
    return cache_folder() / "pretrained" / f"{name}-{spec.run_id}"


def _train(experiment: Experiment, spec: RunSpec, *, force: bool) -> Path:
    """Execute the run, or what is left of it; returns its folder."""
    from thinpipe.harness.runner import Session

    store = Store(cache_folder() / "pretrained" / ".runs")
    reporter = progress.make()
    made = plan.make(experiment, store)
    session = functools.partial(Session, calibrated=False)
    result = sweep.execute(made, store, session, retry_failed=True, force=force, progress=reporter)
    if result.interrupted:
        reporter.say("interrupted; the same command goes on from the last training checkpoint.")
        raise KeyboardInterrupt
    status = store.status(spec.run_id)
    if status is None or status["state"] != "done":
        raise UserError(f"the model was not made: {status and status['error']}. See {store.run_dir(spec.run_id)}.")
    return store.run_dir(spec.run_id)


def _export(recipe: str, spec: RunSpec, run_dir: Path, target: Path) -> dict[str, Any]:
    """The model and how it came about, in a folder of its own; returns what recipe.json says."""
    from thinpipe.harness import merged, partitioned

    about = read_json(run_dir / "manifest.json")
    described = {
        "recipe": recipe,
        "run_id": spec.run_id,
        "spec": spec.canonical(),
        "plugins": spec.plugin_versions(),
        "versions": manifest.versions(),
        "data": about["effective"]["rank0"]["data"],
        **_results(run_dir),
    }
    with folders.staged(target) as temporary:
        merged.fill(run_dir, temporary)
        partitioned.write_json(temporary / RECIPE, described)
    return described


def _results(run_dir: Path) -> dict[str, Any]:
    """How good it became: the last of each value that the run wrote down."""
    rows = [json.loads(line) for line in (run_dir / "rank0.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if row["table"] == "steps"]
    evals = [row for row in rows if row["table"] == "evals"]
    found = {"steps": len(steps), "final_train_loss": steps[-1]["train_loss"]}
    return found | {name: evals[-1][name] if evals else None for name in ("eval_loss", "perplexity")}
