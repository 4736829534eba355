"""What the command line's verbs do, without parsing or printing: each joins the parts it needs."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinpipe.harness import experiment as experiments
from thinpipe.harness import figures, lock, progress, sweep, views
from thinpipe.harness import plan as plans
from thinpipe.harness.errors import UserError
from thinpipe.harness.store import Store, explain_disk_full, rows

# Holds what an experiment's figures were last drawn from, all of them.
DRAWN = ".drawn"
# Where `codecs measure` writes unless told otherwise.
CODECS = Path("results") / "codecs"


def planned(
    source: str, overrides: Sequence[str] | None, results: Path, *, only: str | None, limit: int | None
) -> tuple[experiments.Experiment, Store, plans.Plan]:
    """An experiment, the store of its results, and its plan."""
    loaded = experiments.load(source, overrides or ())
    store = Store(results)
    return loaded, store, plans.make(loaded, store, only=only, limit=limit)


def run(
    loaded: experiments.Experiment,
    store: Store,
    made: plans.Plan,
    *,
    retry_failed: bool,
    force: bool,
    fail_fast: bool,
    allow_unreached: bool,
) -> tuple[list[dict[str, Any]], list[str], int]:
    """Sweep, then tables and figures; returns (the plan's runs with their numbers, figures drawn, exit
    code)."""
    reporter = progress.make()
    result = sweep.execute(
        made,
        store,
        functools.partial(_session, allow_unreached=allow_unreached),
        retry_failed=retry_failed,
        force=force,
        fail_fast=fail_fast,
        progress=reporter,
        accepted=lambda: _warn_of_others(store, loaded.name, store.save_runs(loaded)),
    )
    for line in closing(result):
        reporter.say(line)
    code = result.exit_code
    table: list[dict[str, Any]] = []
    drawn: list[str] = []
    if result.interrupted:
        try:
            table = _build(store, loaded.name)["runs"].to_dict("records")
        except UserError as error:
            say(f"thinpipe: {error}")
    else:
        try:
            ended = _ended(store, loaded.name)
            built = _build(store, loaded.name)
            table = built["runs"].to_dict("records")
            origin = _origin(ended)
            if origin != _drawn_from(store, loaded.name):
                drawn = _draw(store, loaded.name, built, origin=origin)
        except figures.UndrawnError as error:
            # A figure that breaks says nothing about the runs: their exit code stands.
            say(f"thinpipe: {error}")
            drawn = [str(path) for path in error.written]
        except UserError as error:
            # The runs are done all the same, and whoever asked must learn how they ended.
            say(f"thinpipe: {error}")
            code = sweep.EXIT_USER
    order = {views.use(row): index for index, row in enumerate(rows(loaded))}
    return sorted(views.runs(result.plan, table), key=lambda row: order[views.use(row)]), drawn, code


def _warn_of_others(store: Store, name: str, others: int) -> None:
    if others:
        say(
            f"{store.experiment_dir(name)} also lists {others} run(s) that this experiment does not declare: "
            "of other settings, or of an earlier form of the file. Tables and figures show them too. Keep "
            "variants apart with --set name=NAME, or delete its runs.json and run again: done runs are kept."
        )


def closing(result: sweep.Result) -> list[str]:
    """What to say when a sweep has ended: failures again, what is left and how to go on."""
    plan, counts = result.plan, result.plan.counts()
    lines = [f"failed: {entry.name} ({entry.run_id}): {entry.note}" for entry in result.failed]
    if lines:
        lines.append(f"{len(lines)} run(s) failed: `thinpipe show RUN_ID` says more, --retry-failed repeats them.")
    for state, why in (
        ("stale", "a plug-in's source has changed since"),
        ("foreign", "made on another machine"),
    ):
        if counts.get(state):
            how = f"repeat them with --force --only state={state}"
            lines.append(f"{counts[state]} run(s) are {state} ({why}): {how}.")
    pending = counts.get("pending", 0)
    if result.interrupted:
        lines.append(f"interrupted; {pending} run(s) are left, run the same command again to go on.")
    elif pending:
        lines.append(f"{pending} run(s) are left; run again to go on.")
    elif not result.executed:
        lines.append(f"nothing to do: no run of {plan.experiment} is left ({len(plan.entries)} finished).")
    return lines


def status(source: str | None, results: Path) -> list[dict[str, Any]]:
    """How far one experiment is, or all that have results."""
    store = Store(results)
    names = store.experiments() if source is None else [_name(source, store)]
    holder = lock.holder()
    return [views.status(store, name, holder) for name in names]


def tables(source: str, results: Path) -> dict[str, Any]:
    """Build the tables; returns {experiment, rows, files}."""
    store = Store(results)
    name = _name(source, store)
    built = _build(store, name)
    folder = store.experiment_dir(name) / "tables"
    files = [str(folder / f"{table}.{kind}") for table in built for kind in ("parquet", "csv")]
    return {"experiment": name, "rows": {table: len(frame) for table, frame in built.items()}, "files": files}


def plot(source: str, results: Path, names: Sequence[str]) -> dict[str, Any]:
    """Draw figures, all without `names`; returns {experiment, files}. `source` is a run for figures of one run."""
    store = Store(results)
    if any(figures.is_of_codecs(name) for name in names):
        raise UserError(f"{', '.join(names)}: what codecs make of tensors is drawn by `thinpipe codecs measure`")
    if any(figures.is_per_run(name) for name in names):
        return _plot_run(store, source, names)
    name = _name(source, store)
    ended = _ended(store, name)
    built = _build(store, name)
    try:
        files = _draw(store, name, built, names, origin=None if names else _origin(ended))
    except figures.UndrawnError as error:
        for path in error.written:
            say(f"figure: {path}")
        raise
    return {"experiment": name, "files": files}


def _plot_run(store: Store, prefix: str, names: Sequence[str]) -> dict[str, Any]:
    """Draw figures of one run, into its folder."""
    from thinpipe.harness import tables

    if others := [name for name in names if not figures.is_per_run(name)]:
        raise UserError(f"{', '.join(others)}: drawn of an experiment, {', '.join(set(names) - set(others))} of a run")
    run_id = views.find_run(store, prefix)
    built = tables.of_run(store, run_id)
    written, _ = figures.draw(built, store.run_dir(run_id) / "figures", names)
    return {"run_id": run_id, "files": [str(path) for path in written]}


def trace(prefix: str, results: Path) -> dict[str, Any]:
    """Write a run's trace.json; returns {run_id, events, files}."""
    from thinpipe.harness import tables
    from thinpipe.harness import trace as traces

    store = Store(results)
    run_id = views.find_run(store, prefix)
    spans = tables.of_run(store, run_id)["spans"]
    path = store.run_dir(run_id) / "trace.json"
    events = traces.write(path, spans, store.spec(run_id).pipeline.ranks)
    return {"run_id": run_id, "events": events, "files": [str(path)]}


def fetch_data(names: Sequence[str]) -> list[dict[str, Any]]:
    """Fetch `names` into the cache, or list what there is to fetch."""
    from thinpipe.harness import fetch
    from thinpipe.harness.cache import cache_folder

    rows = fetch.fetch(names, cache_folder(), say) if names else fetch.listing(cache_folder())
    return [{**row, "path": str(row["path"]) if row["path"] else None} for row in rows]


def codecs_measure(
    texts: Sequence[str],
    families: Sequence[str],
    tensor: Path | None,
    out: Path | None,
    *,
    overrides: Sequence[str],
    pretrained: bool,
) -> tuple[dict[str, Any], int]:
    """Measure compressors on boundary tensors; returns ({out, files, failed, rows}, exit code)."""
    from thinpipe.harness.compression import grammar

    if (tensor is None) == (not families):
        raise UserError("say what to measure on: --model NAME (gpt2, deberta, resnet; repeatable) or --tensor FILE.")
    if tensor is not None and (overrides or pretrained):
        raise UserError("--set and --pretrained say how a model is trained: they have no effect beside --tensor.")
    for text in texts:
        grammar.check(text)
    from thinpipe.harness import capture, measure

    families = list(dict.fromkeys(families))
    folder = out or CODECS / ("+".join(families) if tensor is None else tensor.stem)
    _require_writable(folder)
    if tensor is not None:
        streams = capture.read(tensor)
    else:
        specs = {name: capture.spec_of(name, overrides, pretrained=pretrained) for name in families}
        streams = [stream for name, spec in specs.items() for stream in capture.capture(name, spec, say)]
    rows, failed = measure.run(streams, texts, lambda text: say(f"measured {text}"))
    for line in failed:
        say(f"thinpipe: {line}")
    try:
        with explain_disk_full(folder):
            files = measure.write(rows, folder)
    except figures.UndrawnError as error:
        say(f"thinpipe: {error}")
        files = error.written
    return {"out": str(folder), "files": [str(path) for path in files], "failed": failed, "rows": rows}, int(
        bool(failed)
    )


def _require_writable(folder: Path) -> None:
    """Raise UserError, before the minutes that measuring takes, where nothing could be written there."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"{folder} cannot be written: {there} is no folder, or is not yours to write in.")


def partition(model: str, stages: int, out: Path, cuts: str | None, family: str | None) -> dict[str, Any]:
    """Cut a checkpoint into a file a stage."""
    from thinpipe.harness import partitioned

    try:
        at = None if cuts is None else [int(part) for part in cuts.split(",")]
    except ValueError:
        raise UserError(
            f"--cuts {cuts!r}: give the blocks that stages 1, 2, ... begin with, e.g. --cuts 3,6,9"
        ) from None
    return partitioned.partition(model, stages, out, at, family)


def merge(folder: Path, out: Path) -> dict[str, Any]:
    """One checkpoint of a partition or of a run's training checkpoint."""
    from thinpipe.harness import merged

    return merged.merge(folder, out)


def pretrain(recipe: str | None, overrides: Sequence[str], out: Path | None, *, force: bool) -> Any:
    """Train the model of a recipe, unless it is there; without one, list the recipes."""
    from thinpipe.harness import pretrain as pretraining

    if recipe is None:
        return pretraining.listing()
    return pretraining.pretrain(recipe, overrides, out, force=force)


def net_script(addresses: list[str], host: int, interface: str, rate_mbit: float | None) -> str:
    """A shell script that shapes one host of a mesh of real ones."""
    from thinpipe.netem import script
    from thinpipe.netem.link import LinkSpec
    from thinpipe.netem.topology import Topology

    mesh = Topology.mesh(len(addresses), LinkSpec(rate_mbit=rate_mbit))
    return script.render(mesh, host, interface=interface, addresses=addresses)


def say(message: str) -> None:
    """To people, not to programs that read our output."""
    print(message, file=sys.stderr, flush=True)


def _session(*, allow_unreached: bool) -> Any:
    from thinpipe.harness.runner import Session

    return Session(allow_unreached=allow_unreached)


def _build(store: Store, name: str) -> dict[str, Any]:
    from thinpipe.harness import tables

    with explain_disk_full(store.experiment_dir(name)):
        return tables.build(store, name)


def _ended(store: Store, name: str) -> list[str]:
    """A line a run of an experiment, with when it ended. Taken before its tables are built: a run that ends in
    between, in another sweep, is then drawn next time."""
    lines = []
    for row in store.saved_runs(name):
        try:
            ended: int | None = (store.run_dir(row["run_id"]) / "status.json").stat().st_mtime_ns
        except FileNotFoundError:
            ended = None
        lines.append(json.dumps([row, ended], sort_keys=True))
    return lines


def _origin(ended: Sequence[str]) -> str:
    """A hash of what figures are made from: their sources, and the runs as `_ended` gives them."""
    return hashlib.sha256("\n".join([*figures.sources(), *ended]).encode()).hexdigest()


def _drawn_from(store: Store, name: str) -> str | None:
    """The `_origin` of the figures that there are; None before all were drawn."""
    try:
        return (store.experiment_dir(name) / "figures" / DRAWN).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _draw(
    store: Store, name: str, built: dict[str, Any], names: Sequence[str] = (), *, origin: str | None
) -> list[str]:
    """Draw, and say what was skipped; `origin`, when not None, is noted once all figures are drawn."""
    folder = store.experiment_dir(name) / "figures"
    skipped: dict[str, str] = {}
    try:
        with explain_disk_full(folder):
            written, skipped = figures.draw(built, folder, names)
            if origin is not None:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / DRAWN).write_text(origin, encoding="utf-8")
    except figures.UndrawnError as error:
        skipped = error.skipped
        raise
    finally:
        for figure, why in skipped.items():
            say(f"no figure {figure}: {why}")
    return [str(path) for path in written]


def _name(source: str, store: Store) -> str:
    """The name of an experiment given as `run` takes it, or of one that only has results."""
    return source if source in store.experiments() else experiments.load(source).name
