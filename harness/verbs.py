"""What the command line's verbs do, without parsing or printing: each joins the parts it needs."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinpipe.harness import experiment as experiments
from thinpipe.harness import figures, lock, outputs, progress, sweep, views
from thinpipe.harness import plan as plans
from thinpipe.harness.errors import UserError
from thinpipe.harness.outputs import say
from thinpipe.harness.store import Store, explain_disk_full, rows

# Where `codecs measure` writes unless told otherwise.
CODECS = Path("results") / "codecs"


def planned(
    source: str,
    overrides: Sequence[str] | None,
    results: Path,
    *,
    only: str | None,
    limit: int | None,
    size: str | None = None,
    measure: bool = False,
) -> tuple[experiments.Experiment, Store, plans.Plan]:
    """An experiment, the store of its results, and its plan. measure: profile this machine where a rate that is asked
    for as a ratio needs it and it is not known yet."""
    store = Store(results)
    loaded = resolved(experiments.load(source, overrides or (), size), store, measure=measure)
    _name_unasked(loaded)
    return loaded, store, plans.make(loaded, store, only=only, limit=limit)


def _name_unasked(experiment: experiments.Experiment) -> None:
    for why in experiment.unasked.values():
        say(f"not asked with --set: {why}")


def resolved(experiment: experiments.Experiment, store: Store, *, measure: bool) -> experiments.Experiment:
    """The experiment with the rates of its links, where they are asked for as ratios."""
    from thinpipe.harness import rho

    return rho.resolve(experiment, store, _profile_here if measure else None)


def _profile_here(spec: Any) -> Any:
    from thinpipe.harness import profiling

    say("measuring how long this machine computes a micro-batch, for the rates asked for as ratios")
    return profiling.profile_run(spec)


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
        functools.partial(session, allow_unreached=allow_unreached),
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
            table = outputs.build(store, loaded.name)["runs"].to_dict("records")
        except UserError as error:
            say(f"thinpipe: {error}")
    else:
        try:
            table = outputs.refresh(store, loaded, drawn)["runs"].to_dict("records")
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
        left = f"{pending} run(s) are left" + (f", {counts['failed']} failed" if counts.get("failed") else "")
        lines.append(f"interrupted; {left}; run the same command again to go on.")
    elif pending:
        lines.append(f"{pending} run(s) are left; run again to go on.")
    elif not result.executed:
        lines.append(f"nothing to do: no run of {plan.experiment} is left ({_finished(counts)}).")
    return lines


def _finished(counts: Mapping[str, int]) -> str:
    """
    >>> _finished({"done": 7, "failed": 1})
    '7 done, 1 failed'
    """
    return ", ".join(f"{number} {state}" for state, number in counts.items())


def status(source: str | None, results: Path, size: str | None = None) -> list[dict[str, Any]]:
    """How far one experiment is, or all that have results."""
    store = Store(results)
    names = store.experiments() if source is None else [_name(source, store, size)]
    holder = lock.holder()
    return [views.status(store, name, holder) for name in names]


def tables(source: str, results: Path, size: str | None = None) -> dict[str, Any]:
    """Build the tables; returns {experiment, rows, files}."""
    store = Store(results)
    name = _name(source, store, size)
    built = outputs.build(store, name)
    folder = store.experiment_dir(name) / "tables"
    files = [str(folder / f"{table}.{kind}") for table in built for kind in ("parquet", "csv")]
    return {"experiment": name, "rows": {table: len(frame) for table, frame in built.items()}, "files": files}


def plot(source: str, results: Path, names: Sequence[str], size: str | None = None) -> dict[str, Any]:
    """Draw figures; returns {experiment, files}. `source` is a run for figures of one run.

    Without `names`: those that the experiment declares, or all; what was drawn of others before is removed.
    """
    store = Store(results)
    if any(figures.is_of_simulation(name) for name in names):
        raise UserError(f"{', '.join(names)}: predictions are drawn by `thinpipe simulate {source} --against`")
    if any(figures.is_of_codecs(name) for name in names):
        raise UserError(f"{', '.join(names)}: what codecs make of tensors is drawn by `thinpipe codecs measure`")
    if any(figures.is_per_run(name) for name in names):
        return _plot_run(store, source, names)
    name = _name(source, store, size)
    ended = outputs.ended(store, name)
    built = outputs.build(store, name)
    wanted = names or outputs.figures_of(store, name)
    noted = None if names else outputs.origin([*wanted, *ended])
    try:
        files = outputs.draw(store, name, built, wanted, noted=noted, optional=not names)
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


def session(*, allow_unreached: bool) -> Any:
    """What runs are executed by."""
    from thinpipe.harness.runner import Session

    return Session(allow_unreached=allow_unreached)


def _name(source: str, store: Store, size: str | None = None) -> str:
    """The name of an experiment given as `run` takes it, or of one that only has results."""
    if source not in store.experiments():
        return experiments.load(source, size=size).name
    _require_size(source, size, store.declaration(source))
    return source


def _require_size(source: str, size: str | None, asked: Mapping[str, Any]) -> None:
    """Results are of one size: another one that is asked for must not be answered with them."""
    if asked and size is not None and size != (of := asked.get("size")):
        raise UserError(
            f"results {source!r} are of {'no size' if of is None else f'size {of}'}, not of size {size}. Leave --size "
            "out, or name the experiment instead."
        )


def claims(sources: Sequence[str], results: Path, size: str | None = None) -> list[dict[str, Any]]:
    """Evaluate the claims of experiments, all that have results without `sources`; claims.json is written anew."""
    store = Store(results)
    found = []
    for name in sources or store.experiments():
        try:
            experiment = resolved(_declared(name, store, size), store, measure=False)
        except UserError as error:
            if sources:
                raise
            # Its file is gone or has changed: that keeps nobody from the others.
            say(f"thinpipe: {name}: {error}")
            continue
        _name_unasked(experiment)
        if not experiment.claims:
            if sources:
                say(f"{experiment.name} declares no claim")
            continue
        if not store.saved_runs(experiment.name):
            raise UserError(f"no run of {experiment.name!r} is in {results}: `thinpipe run` it first.")
        found += outputs.judge(store, experiment, outputs.build(store, experiment.name))
    return found


def _declared(source: str, store: Store, size: str | None) -> experiments.Experiment:
    """An experiment given as `run` takes it, or by the name of its results, then as it was asked for."""
    asked = store.declaration(source) if source in store.experiments() else {}
    if not asked:
        return experiments.load(source, size=size)
    _require_size(source, size, asked)
    return experiments.load(asked["source"], asked["overrides"], asked["size"])
