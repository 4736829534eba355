"""What is made of an experiment's runs: tables, figures, claims, each whole or not at all."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from thinpipe.harness import figures
from thinpipe.harness.store import Store, explain_disk_full, read_json, write_json

if TYPE_CHECKING:
    from thinpipe.harness.experiment import Experiment

# Holds what an experiment's figures were last drawn from, all of them.
DRAWN = ".drawn"
CLAIMS = "claims.json"


def refresh(store: Store, experiment: Experiment, drawn: list[str]) -> dict[str, Any]:
    """Tables, claims.json, and the experiment's figures unless nothing has changed; returns the tables.

    drawn: the files of figures are added to it. A figure that breaks is said, and the others are kept.
    """
    name = experiment.name
    lines = ended(store, name)
    built = build(store, name)
    judge(store, experiment, built)
    now = origin([*experiment.figures, *lines])
    if now != drawn_from(store, name):
        try:
            drawn += draw(store, name, built, experiment.figures, noted=now, optional=True)
        except figures.UndrawnError as error:
            # A figure that breaks says nothing about the runs.
            say(f"thinpipe: {error}")
            drawn += [str(path) for path in error.written]
    return built


def judge(store: Store, experiment: Experiment, built: dict[str, Any]) -> list[dict[str, Any]]:
    """Evaluate an experiment's claims and keep them in its claims.json; where it has none, there is no such file."""
    path = store.experiment_dir(experiment.name) / CLAIMS
    if not experiment.claims:
        path.unlink(missing_ok=True)
        return []
    from thinpipe.harness.claims import evaluate

    found = evaluate(experiment, built)
    write_json(path, found)
    return found


def build(store: Store, name: str) -> dict[str, Any]:
    """Write an experiment's tables; returns them as frames."""
    from thinpipe.harness import tables

    with explain_disk_full(store.experiment_dir(name)):
        return tables.build(store, name)


def claims(store: Store, name: str) -> list[dict[str, Any]]:
    """What claims.json of an experiment holds; none without one."""
    path = store.experiment_dir(name) / CLAIMS
    return read_json(path) if path.exists() else []


def ended(store: Store, name: str) -> list[str]:
    """A line a run of an experiment, with when it ended. Taken before its tables are built: a run that ends in
    between, in another sweep, is then drawn next time."""
    lines = []
    for row in store.saved_runs(name):
        try:
            at: int | None = (store.run_dir(row["run_id"]) / "status.json").stat().st_mtime_ns
        except FileNotFoundError:
            at = None
        lines.append(json.dumps([row, at], sort_keys=True))
    return lines


def origin(lines: Sequence[str]) -> str:
    """A hash of what figures are made from: their sources, and the runs as `ended` gives them."""
    return hashlib.sha256("\n".join([*figures.sources(), *lines]).encode()).hexdigest()


def drawn_from(store: Store, name: str) -> str | None:
    """The `origin` of the figures that there are; None before all were drawn."""
    try:
        return (store.experiment_dir(name) / "figures" / DRAWN).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def figures_of(store: Store, name: str) -> tuple[str, ...]:
    """The figures that an experiment with results declares; none where it is to be drawn in all that there are."""
    from thinpipe.harness import resultset

    known = resultset.declared(name, store.declaration(name))
    return known.figures if known else ()


def draw(
    store: Store,
    name: str,
    built: dict[str, Any],
    names: Sequence[str] = (),
    *,
    noted: str | None,
    optional: bool = False,
) -> list[str]:
    """Draw, and say what was skipped. noted: an `origin`, kept once all figures are drawn, and then figures that are
    there and were not drawn now are removed; optional: of `names`, those that the tables do not fill are skipped."""
    folder = store.experiment_dir(name) / "figures"
    skipped: dict[str, str] = {}
    try:
        with explain_disk_full(folder):
            written, skipped = figures.draw(built, folder, names, optional=optional)
            if noted is not None:
                folder.mkdir(parents=True, exist_ok=True)
                figures.remove_others(folder, written)
                (folder / DRAWN).write_text(noted, encoding="utf-8")
    except figures.UndrawnError as error:
        skipped = error.skipped
        raise
    finally:
        for figure, why in skipped.items():
            say(f"no figure {figure}: {why}")
    return [str(path) for path in written]


def say(message: str) -> None:
    """To people, not to programs that read our output."""
    print(message, file=sys.stderr, flush=True)
