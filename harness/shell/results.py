"""Verbs about results and papers: reproduce, claims, report, export, save, compare, profile, simulate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

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
    show,
)

PAGE = Path("report.html")


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
    from thinpipe.harness import render, verbs, views
    from thinpipe.harness import reproduce as reproduction
    from thinpipe.harness.claims import render as render_claims
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
    if as_json or outcome.page:
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
    from thinpipe.harness import verbs
    from thinpipe.harness.claims import render as render_claims

    found = verbs.claims(experiments or [], results, size)
    show(found, as_json, render_claims.render)
    return int(any(claim["state"] == "fails" for claim in found))


def report(
    paths: Annotated[
        list[Path], typer.Argument(metavar="RESULTS...", help="Folders of experiments' results, or a folder of them.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The page.")] = PAGE,
    as_json: JsonOption = False,
) -> None:
    """Write results as one self-contained page: claims, figures, sortable tables, manifests, links, CSV."""
    from thinpipe.harness import report as page
    from thinpipe.harness.store import explain_disk_full

    with explain_disk_full(out.parent):
        found = page.report(paths, out)
    show(found, as_json, lambda data: print(data["out"]))


def export(
    path: Annotated[Path, typer.Argument(metavar="RESULTS", help="The folder of an experiment's results.")],
    *,
    latex: Annotated[bool, typer.Option("--latex", help="A table for LaTeX, with booktabs.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="A table for Markdown.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Comma-separated values.")] = False,
    claims: Annotated[bool, typer.Option("--claims", help="The claims instead of the arms.")] = False,
    columns: Annotated[
        list[str] | None, typer.Option("--column", metavar="NAME", help="A column of the runs table; repeatable.")
    ] = None,
) -> None:
    """Print arms x metrics, means with intervals over seeds, or the claims, as LaTeX, Markdown or CSV."""
    from thinpipe.harness import export as exporting
    from thinpipe.harness.errors import UserError

    asked = [name for name, on in (("latex", latex), ("markdown", markdown), ("csv", csv)) if on]
    if len(asked) != 1:
        raise UserError("say one of --latex, --markdown, --csv.")
    print(exporting.export(path, asked[0], columns or (), claims=claims), end="")


def save(
    paths: Annotated[
        list[Path], typer.Argument(metavar="RESULTS...", help="Folders of experiments' results, or a folder of them.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the folders of the saved sets go.")] = RESULTS
    / "reference",
    *,
    commit: Annotated[
        str | None, typer.Option("--commit", metavar="HASH", help="Of the source, where the runs do not say.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Save results in a small form to be kept in git: tables as CSV, claims, manifest."""
    from thinpipe.harness import resultset
    from thinpipe.harness.store import explain_disk_full

    with explain_disk_full(out):
        found = [resultset.save(path, out / path.name, commit=commit) for path in resultset.find(paths)]
    show(found, as_json, lambda sets: print("\n".join(resultset.render(sets))))


def compare(
    left: Annotated[Path, typer.Argument(metavar="A", help="The folder of an experiment's results.")],
    right: Annotated[Path, typer.Argument(metavar="B", help="Another, of the same experiment or settings.")],
    *,
    metrics: Annotated[
        list[str] | None, typer.Option("--metric", metavar="NAME", help="A column of the runs table; repeatable.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two result sets, paired by seed: the effect with its interval; better, worse or undecided."""
    from thinpipe.harness import compare as comparing

    found = comparing.compare(left, right, metrics or comparing.METRICS)
    show(found, as_json, lambda data: print(comparing.render(data)))


def profile(
    experiment: ExperimentArg,
    *,
    overrides: SetOption = None,
    size: SizeOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write it here, for `profile = FILE` of a replay.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how long each block of an experiment's model computes here: what compute = "replay" waits by."""
    from thinpipe.harness import experiment as experiments
    from thinpipe.harness import profile as profiles
    from thinpipe.harness import profiling, verbs

    spec = profiling.of_experiment(experiments.load(experiment, overrides or (), size))
    found = profiling.profile_run(spec)
    if out is not None:
        profiles.write(found, out)
        verbs.say(f"wrote {out}")
    show(found.to_json(), as_json, lambda _: print(profiling.render(found)))


def simulate(
    experiment: ExperimentArg,
    *,
    overrides: SetOption = None,
    size: SizeOption = None,
    results: ResultsOption = RESULTS,
    profile: Annotated[
        str | None, typer.Option("--profile", metavar="NAME", help="Compute as this profile says, not the cell's own.")
    ] = None,
    stages: Annotated[
        int | None, typer.Option("--stages", metavar="N", help="As many stages, of a model as much deeper.")
    ] = None,
    wan: Annotated[
        str | None, typer.Option("--wan", metavar="NAME", help="Links between regions, e.g. ten-regions.")
    ] = None,
    best_order: Annotated[
        bool, typer.Option("--best-order", help="Put stages into regions in the best order that a search finds.")
    ] = False,
    against: Annotated[
        bool, typer.Option("--against", help="Hold predictions against the experiment's own replays.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Predict step time, bubble and link use of an experiment's cells, also of those this machine cannot run."""
    from thinpipe.harness import experiment as experiments
    from thinpipe.harness import verbs
    from thinpipe.harness.simulation import report
    from thinpipe.harness.store import Store

    store = Store(results)
    found = verbs.resolved(experiments.load(experiment, overrides or (), size), store, measure=False)
    setting = report.setting(profile, stages, wan, best_order=best_order)
    data = report.against(found, store, setting) if against else report.predict(found, setting)
    show(data, as_json, report.render)
    return int(against and not data["against"]["holds"])


VERBS: dict[str, Callable[..., int | None]] = {
    "reproduce": reproduce,
    "claims": claims,
    "report": report,
    "export": export,
    "save": save,
    "compare": compare,
    "profile": profile,
    "simulate": simulate,
}
