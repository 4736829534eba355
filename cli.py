"""thinpipe: one thin command a verb: parse, call, render. Nothing heavy is imported before a verb needs it.

Exit codes: 0 all done, 1 some runs failed (doctor: a required check), 2 a mistake that the message explains,
130 interrupted.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from thinpipe.harness.shell import (
    RESULTS,
    ExperimentArg,
    JsonOption,
    LimitOption,
    OnlyOption,
    ResultsOption,
    SetOption,
    SizeOption,
    command,
    files,
    guarded,
    show,
)
from thinpipe.harness.shell import results as results_verbs

app = typer.Typer(
    help="Measure what compressing pipeline-parallel training buys on slow networks, and what it costs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
net = typer.Typer(help="The emulated network by itself.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(net, name="net")


class _OrName(typer.core.TyperGroup):
    """A group that takes what is no verb of it for the NAME of its verb `show`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, args if args[0] in self.commands else ["show", *args])


codecs_ = typer.Typer(
    cls=_OrName,
    help="Codecs and memories: list them, show one (`codecs NAME`), measure some.",
    invoke_without_command=True,
    rich_markup_mode=None,
)
app.add_typer(codecs_, name="codecs")


@command(app, "doctor")
def doctor(results: ResultsOption = RESULTS, as_json: JsonOption = False) -> int:
    """Find out what this machine can do, and say what to do about the rest."""
    from thinpipe.harness import doctor, render

    found = doctor.checks(results)
    show(found, as_json, render.checks)
    return 0 if all(check["ok"] for check in found if check["required"]) else 1


@command(app, "list")
def list_(
    kind: Annotated[str | None, typer.Argument(metavar="[KIND]", help="Only this kind, e.g. codecs.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List experiments, compressors, models, tasks, figures and links."""
    from thinpipe.harness import render, views

    show(views.listing(kind), as_json, render.listing)


@command(app, "plan")
def plan(
    experiment: ExperimentArg,
    *,
    overrides: SetOption = None,
    size: SizeOption = None,
    results: ResultsOption = RESULTS,
    only: OnlyOption = None,
    limit: LimitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show an experiment's runs, their state and predicted time; execute nothing."""
    from thinpipe.harness import render, verbs, views

    made = verbs.planned(experiment, overrides, results, only=only, limit=limit, size=size)[2]
    show(views.plan(made), as_json, render.plan)


@command(app, "run")
def run(
    experiment: ExperimentArg,
    *,
    overrides: SetOption = None,
    size: SizeOption = None,
    results: ResultsOption = RESULTS,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Also repeat failed runs.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Repeat every chosen run, also finished ones.")] = False,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first failed run.")] = False,
    limit: LimitOption = None,
    only: OnlyOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be executed.")] = False,
    allow_unreached: Annotated[
        bool,
        typer.Option("--allow-unreached", help="Allow rates this machine does not carry; runs are flagged."),
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Execute what is not done yet, then write tables and figures. Ctrl-C is safe: run again to resume."""
    from thinpipe.harness import render, verbs, views

    loaded, store, made = verbs.planned(
        experiment, overrides, results, only=only, limit=limit, size=size, measure=not dry_run
    )
    if dry_run:
        show(views.plan(made, retry_failed=retry_failed, force=force), as_json, render.plan)
        return 0
    rows, figures, code = verbs.run(
        loaded,
        store,
        made,
        retry_failed=retry_failed,
        force=force,
        fail_fast=fail_fast,
        allow_unreached=allow_unreached,
    )
    show(rows, as_json, lambda data: render.cells(views.cells(data)))
    for name in figures:
        verbs.say(f"figure: {name}")
    return code


@command(app, "status")
def status(
    experiment: Annotated[str | None, typer.Argument(metavar="[EXPERIMENT]", help="Only this one.")] = None,
    size: SizeOption = None,
    results: ResultsOption = RESULTS,
    as_json: JsonOption = False,
) -> None:
    """Show how far each experiment is, also while a sweep runs."""
    from thinpipe.harness import render, verbs

    show(verbs.status(experiment, results, size), as_json, render.status)


@command(app, "show")
def show_run(
    run_id: Annotated[str, typer.Argument(metavar="RUN_ID", help="A run's id or the beginning of it.")],
    results: ResultsOption = RESULTS,
    as_json: JsonOption = False,
) -> None:
    """Show one run: settings asked for and in force, how it ended, last log lines."""
    from thinpipe.harness import render, views
    from thinpipe.harness.store import Store

    store = Store(results)
    show(views.run(store, views.find_run(store, run_id)), as_json, render.run)


@command(app, "tables")
def tables(
    experiment: ExperimentArg,
    size: SizeOption = None,
    results: ResultsOption = RESULTS,
    as_json: JsonOption = False,
) -> None:
    """Write an experiment's tables from its finished runs."""
    from thinpipe.harness import verbs

    show(verbs.tables(experiment, results, size), as_json, files)


@command(app, "plot")
def plot(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="[FIGURE]... EXPERIMENT", help="Figures (default: all), then experiment; or: trace RUN_ID."
        ),
    ],
    size: SizeOption = None,
    results: ResultsOption = RESULTS,
    as_json: JsonOption = False,
) -> None:
    """Draw an experiment's figures from its finished runs, or the trace of one run."""
    from thinpipe.harness import verbs

    *figures, experiment = names
    show(verbs.plot(experiment, results, figures, size), as_json, files)


@command(app, "trace")
def trace(
    run_id: Annotated[str, typer.Argument(metavar="RUN_ID", help="A run's id or the beginning of it.")],
    results: ResultsOption = RESULTS,
    as_json: JsonOption = False,
) -> None:
    """Write a finished run as a Chrome trace (for Perfetto or chrome://tracing): what each rank did when."""
    from thinpipe.harness import verbs

    show(verbs.trace(run_id, results), as_json, files)


@command(app, "fetch-data")
def fetch_data(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="What to fetch.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch data and weights that no Python package places, checked by hash; without a NAME, list them."""
    from thinpipe.harness import render, verbs

    show(verbs.fetch_data(names or []), as_json, render.fetched)


@command(app, "pretrain")
def pretrain(
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help="A known recipe.")] = None,
    *,
    overrides: SetOption = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Here instead of into the cache.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Again, though it is there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a small model once, to fine-tune from: model.checkpoint = "pretrained:RECIPE"; without one, list them."""
    from thinpipe.harness import render, verbs

    show(verbs.pretrain(recipe, overrides or [], out, force=force), as_json, render.pretrained)


@command(app, "partition")
def partition(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint's folder, or the name of one on a hub.")],
    *,
    stages: Annotated[int, typer.Option("--stages", metavar="N", help="Number of stages.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="A folder that is not there yet.")],
    cuts: Annotated[
        str | None, typer.Option("--cuts", metavar="I,J,...", help="Blocks that stages begin with.")
    ] = None,
    family: Annotated[str | None, typer.Option("--family", metavar="NAME", help="The model plug-in.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Cut a checkpoint into a file a stage, so that each rank reads its own part only."""
    from thinpipe.harness import render, verbs

    show(verbs.partition(model, stages, out, cuts, family), as_json, render.partitioned)


@command(app, "merge")
def merge(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What `partition` wrote, or a run's folder.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="A folder that is not there yet.")],
    as_json: JsonOption = False,
) -> None:
    """Make one checkpoint of a partition, or of a run's training checkpoint, that transformers loads."""
    from thinpipe.harness import render, verbs

    show(verbs.merge(folder, out), as_json, render.merged)


@codecs_.callback()
def codecs(
    context: typer.Context,
    presets: Annotated[bool, typer.Option("--presets", help="The published settings by name instead.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List every codec and memory: how it is written, bits an element, biased or not, what it keeps."""

    def verb() -> int:
        from thinpipe.harness import codecs, render

        show(codecs.presets() if presets else codecs.listing(), as_json, render.presets if presets else render.codecs)
        return 0

    if context.invoked_subcommand is None:
        raise typer.Exit(guarded(verb))


@command(codecs_, "show")
def codecs_show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A codec, a memory, or a preset.")],
    as_json: JsonOption = False,
) -> None:
    """Show one in full: parameters, ranges, defaults, source, what the contract suite holds it to."""
    from thinpipe.harness import codecs, render

    show(codecs.one(name), as_json, render.codec)


@command(codecs_, "measure")
def codecs_measure(
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="[SPEC]...", help="Compressors, e.g. 'delta(fixpoint:4)'.")
    ] = None,
    *,
    models: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="NAME", help="gpt2, deberta or resnet, trained for a moment; repeatable."),
    ] = None,
    tensor: Annotated[
        Path | None, typer.Option("--tensor", metavar="FILE", help="A .safetensors, .npy or .pt file instead.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Here instead of into results/codecs/.")
    ] = None,
    overrides: SetOption = None,
    pretrained: Annotated[
        bool, typer.Option("--pretrained", help="From weights and data that pretrain and fetch-data have placed.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Measure compressors on boundary tensors: bits, error, bias, speed; without a SPEC, all at several rates."""
    from thinpipe.harness import render, verbs, views

    found, code = verbs.codecs_measure(
        texts or [], models or [], tensor, out, overrides=overrides or [], pretrained=pretrained
    )
    show(found, as_json, lambda data: render.measured(views.measured(data["rows"])))
    for name in found["files"]:
        verbs.say(f"wrote {name}")
    return code


@app.command(
    "train", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False
)
def train(context: typer.Context) -> None:
    """AC-SGD's runner: one rank of one run, by AC-SGD's arguments (`thinpipe train --help`)."""

    def verb() -> int:
        from thinpipe.harness import acsgd

        return acsgd.main(context.args)

    raise typer.Exit(guarded(verb))


@command(net, "script")
def net_script(
    addresses: Annotated[list[str], typer.Argument(metavar="ADDRESS...", help="IPv4 address of each host, in order.")],
    host: Annotated[int, typer.Option("--host", metavar="I", help="Number of the host it is for, from 0.")] = 0,
    interface: Annotated[str, typer.Option("--interface", metavar="NAME", help="The host's interface.")] = "eth0",
    rate_mbit: Annotated[float | None, typer.Option("--rate-mbit", metavar="R", help="Rate of every link.")] = None,
) -> None:
    """Print what shapes one real host as a shell script: the same tc text that the lab runs."""
    from thinpipe.harness import verbs

    print(verbs.net_script(addresses, host, interface, rate_mbit), end="")


results_verbs.register(app)


def main() -> None:
    """The console script."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif hasattr(getattr(sys, name), "reconfigure"):
            getattr(sys, name).reconfigure(errors="backslashreplace")
    app()


if __name__ == "__main__":
    main()
