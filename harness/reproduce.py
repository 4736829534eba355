"""`thinpipe reproduce`: all experiments of a paper by one command, from nothing to a page.

    load at a size -> prepare data and weights -> plan -> run -> tables, figures, claims of each -> one page

A run that several experiments share is executed once. Interrupted, it goes on where it was: finished runs, and what
training checkpoints hold, are kept.
"""

from __future__ import annotations

import fnmatch
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinpipe.harness import experiment as experiments
from thinpipe.harness import folders, outputs, progress, sizes, sweep, verbs
from thinpipe.harness import plan as plans
from thinpipe.harness.errors import UserError, near_miss
from thinpipe.harness.experiment import Experiment
from thinpipe.harness.store import DiskFullError, Store, explain_disk_full

PAPERS = ("acsgd", "rudakov")
ALL = "all"
PAPER_SIZE = "paper"


@dataclass
class Outcome:
    """What a reproduction came to. page: of all its experiments, None when it was interrupted before."""

    claims: list[dict[str, Any]] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)
    page: Path | None = None
    exit_code: int = sweep.EXIT_DONE


def chosen(what: str, size: str, patterns: Sequence[str] = ()) -> list[Experiment]:
    """The experiments of a paper, or of both (`all`), at a size; patterns: only ids like these (F3*, T2).

    Raises UserError on an unknown paper, size or id, and where an experiment's file is wrong.
    """
    if what not in (*PAPERS, ALL):
        raise UserError(f"there is nothing to reproduce called {what!r}.{near_miss(what, (*PAPERS, ALL))}")
    if size not in sizes.SIZES:
        raise UserError(f"unknown size {size!r}.{near_miss(size, sizes.SIZES)}")
    names = [name for paper in (PAPERS if what == ALL else (what,)) for name in experiments.group(paper)]
    ids = {name: name.partition("/")[2] for name in names}
    for pattern in patterns:
        if not fnmatch.filter(ids.values(), pattern):
            raise UserError(f"no experiment of {what} is called {pattern!r}.{near_miss(pattern, ids.values())}")
    kept = [name for name in names if not patterns or any(fnmatch.fnmatchcase(ids[name], p) for p in patterns)]
    return [experiments.load(name, size=size) for name in kept]


def prepare(found: Sequence[Experiment], say: Callable[[str], None]) -> None:
    """Fetch what the experiments say they need and pretrain the models their runs start from, where not there yet."""
    for verb, name in dict.fromkeys(need for experiment in found for need in experiment.needs):
        say(f"preparing: {verb} {name}")
        verbs.fetch_data([name])
    specs = (spec for experiment in found for cell in experiment.cells() for _, spec in cell.runs)
    for checkpoint in dict.fromkeys(spec.model.checkpoint or "" for spec in specs):
        if checkpoint.startswith(folders.PRETRAINED):
            recipe = checkpoint.removeprefix(folders.PRETRAINED)
            say(f"preparing: pretrain {recipe}")
            verbs.pretrain(recipe, (), None, force=False)


def refuse_paper_size(found: Sequence[Experiment]) -> None:
    """Raise UserError where it is a cluster's work that is asked for."""
    if any(experiment.size == PAPER_SIZE for experiment in found):
        raise UserError(
            f"size {PAPER_SIZE!r} is the published models at their published settings, for a cluster of graphics "
            "cards, and there is no launcher for one yet: --dry-run plans it, --size cpu is this machine's form of it."
        )


def planned(
    found: Sequence[Experiment], store: Store, name: str, *, only: str | None = None, limit: int | None = None
) -> plans.Plan:
    """One plan of all; a size that is for a cluster is planned like any other."""
    return plans.join(found, store, name, only=only, limit=limit)


def run(
    found: Sequence[Experiment],
    store: Store,
    made: plans.Plan,
    *,
    retry_failed: bool = False,
    allow_unreached: bool = False,
) -> Outcome:
    """Execute the plan, then write what follows from it. `found` as resolved: rates of links known."""
    reporter = progress.make()
    result = sweep.execute(
        made,
        store,
        lambda: verbs.session(allow_unreached=allow_unreached),
        retry_failed=retry_failed,
        progress=reporter,
        accepted=lambda: _accept(found, store),
    )
    for line in verbs.closing(result):
        reporter.say(line)
    outcome = Outcome(exit_code=result.exit_code)
    if not result.interrupted:
        finish(found, store, made.experiment, outcome)
    return outcome


def _accept(found: Sequence[Experiment], store: Store) -> None:
    for experiment in found:
        store.save_runs(experiment)


def finish(found: Sequence[Experiment], store: Store, name: str, outcome: Outcome) -> None:
    """Tables, figures and claims of each experiment, and the page. What breaks is said; the rest is written."""
    from thinpipe.harness import report

    there: list[Path] = []
    for experiment in found:
        outputs.say(f"{experiment.name}: tables, claims, figures")
        try:
            outputs.refresh(store, experiment, outcome.figures)
        except Exception as error:
            if isinstance(error, DiskFullError):
                raise
            text = str(error) if isinstance(error, UserError) else traceback.format_exc()
            outputs.say(f"thinpipe: {experiment.name}: {text}")
            outcome.exit_code = max(outcome.exit_code, sweep.EXIT_FAILED)
            continue
        outcome.claims += outputs.claims(store, experiment.name)
        there.append(store.experiment_dir(experiment.name))
    if there:
        outcome.page = store.root / f"{name}.html"
        with explain_disk_full(store.root):
            report.report(there, outcome.page)
