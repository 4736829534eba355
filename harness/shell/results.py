"""Verbs about results and papers: reproduce, claims, report, export, compare, profile, simulate."""

from __future__ import annotations

from typing import Annotated

import typer

from thinpipe.harness.shell import (
    RESULTS,
    JsonOption,
    LimitOption,
    OnlyOption,
    ResultsOption,
    SizeOption,
    command,
    show,
)


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    for name, verb in VERBS.items():
        command(app, name)(verb)


def reproduce(
    paper: Annotated[str, typer.Argument(metavar="PAPER", help="acsgd, rudakov or all.")],
    size: Annotated[str, typer.Option("--size", metavar="SIZE", help="check, cpu or paper.")] = "check",
    *,
    results: ResultsOption = RESULTS,
    experiments: Annotated[
        list[str] | None, typer.Option("--experiment", metavar="ID", help="Only these, e.g. F3*; repeatable.")
    ] = None,
    only: OnlyOption = None,
    limit: LimitOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be executed, and how long.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Also repeat failed runs.")] = False,
    allow_unreached: Annotated[
        bool,
        typer.Option("--allow-unreached", help="Allow rates this machine does not carry; runs are flagged."),
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Reproduce a paper: plan, run, tabulate, draw, check claims, write a page. Interrupted, it resumes."""
    from thinpipe.harness import render, render_claims, verbs, views
    from thinpipe.harness import reproduce as reproduction
    from thinpipe.harness.store import Store

    store = Store(results)
    found = reproduction.chosen(paper, size, experiments or ())
    if not dry_run:
        reproduction.refuse_paper_size(found)
        reproduction.prepare(found, verbs.say)
    found = [verbs.resolved(experiment, store, measure=not dry_run) for experiment in found]
    made = reproduction.planned(found, store, f"{paper}.{size}", only=only, limit=limit)
    if dry_run:
        show(views.plan(made, retry_failed=retry_failed), as_json, render.plan)
        return 0
    outcome = reproduction.run(found, store, made, retry_failed=retry_failed, allow_unreached=allow_unreached)
    show(outcome.claims, as_json, render_claims.render)
    for name in outcome.figures:
        verbs.say(f"figure: {name}")
    if outcome.page:
        verbs.say(f"page: {outcome.page}")
    return outcome.exit_code


def claims(
    experiments: Annotated[
        list[str] | None, typer.Argument(metavar="[EXPERIMENT]...", help="Default: all that have results.")
    ] = None,
    *,
    size: SizeOption = None,
    results: ResultsOption = RESULTS,
    as_json: JsonOption = False,
) -> int:
    """Check the claims of experiments against their runs: holds, fails or undecided. Exit code 1 if one fails."""
    from thinpipe.harness import render_claims, verbs

    found = verbs.claims(experiments or [], results, size)
    show(found, as_json, render_claims.render)
    return int(any(claim["state"] == "fails" for claim in found))


VERBS = {"reproduce": reproduce, "claims": claims}
