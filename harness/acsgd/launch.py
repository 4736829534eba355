"""One rank of a run, in this process.

arguments -> task loaded -> RunSpec -> checked -> folder -> worker, with this process's own control -> exit code
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinpipe.harness.acsgd import interface, mapping
from thinpipe.harness.acsgd.notes import notes
from thinpipe.harness.errors import UserError
from thinpipe.harness.launch.local import ENVIRONMENT
from thinpipe.harness.spec import RunSpec
from thinpipe.harness.store import CHECKPOINTS, Store, describe

TRACES = Path("trace_json")
# The user's own: a model or data set may come from a hub.
NOT_SET = {"HF_HUB_OFFLINE"}


def run(args: argparse.Namespace) -> int:
    """Run rank --rank to its end. Returns the exit code. Raises UserError for what is refused before the start."""
    # Before torch is imported: it reads them once.
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in NOT_SET})
    for note in notes(args):
        print(f"thinpipe: note: {note}.", file=sys.stderr)
    name = _interface(args.dist_url) if args.world_size > 1 else "lo"
    spec = settle(args, together=name == "lo")
    if args.save_dir is not None:
        from thinpipe.harness import folders

        folders.require_free(Path(args.save_dir))
    store = Store(Path(args.results))
    begin(store, spec, args.rank)
    return _work(args, spec, store, name)


def settle(args: argparse.Namespace, *, together: bool) -> RunSpec:
    """The run, checked against checkpoint, data and memory. Loads the task, which the worker then finds loaded.

    together: whether all ranks are on this machine, and so share its memory."""
    from thinpipe.harness import check, memory, worker
    from thinpipe.harness.models import base as models

    first = mapping.run_spec(args)
    mapping.refuse_other_sizes(args, models.resolve(first.model, first.task))
    data = worker.prepare(first).dataset
    spec = mapping.run_spec(args, num_samples=len(data.train), vocab_size=data.vocab_size)
    mapping.refuse_small_cache(args, len(data.train))
    if together:
        check.check(spec)
        return spec
    check.check(spec, available_bytes=sys.maxsize)
    refuse_large(args.rank, memory.predict(spec, len(data.train))[args.rank].total)
    return spec


def refuse_large(rank: int, needed: int) -> None:
    """Raise UserError where this machine has not the bytes that its rank needs."""
    import psutil

    from thinpipe.harness import memory

    free = psutil.virtual_memory().available
    if needed > free * (1 - memory.RESERVE):
        raise UserError(
            f"rank {rank} needs {needed / 2**30:.2f} GiB, but {free / 2**30:.2f} GiB are free here, of which "
            f"{memory.RESERVE:.0%} are left alone. Use more stages, --recompute true, or smaller batches."
        )


def _interface(dist_url: str) -> str:
    import psutil

    local = {name: [one.address for one in addresses] for name, addresses in psutil.net_if_addrs().items()}
    return interface.choose(dist_url, os.environ, local)


def begin(store: Store, spec: RunSpec, rank: int) -> Path:
    """The run's folder with its run.json, and of an earlier attempt nothing of this rank's but what it goes on from.

    Ranks come in any order and at any time, so each makes what it needs and removes its own; rank 0 the rest.
    """
    folder = store.run_dir(spec.run_id)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {folder}: {error.strerror}. Give another with --results.") from None
    goes_on = any((folder / CHECKPOINTS).glob("*/complete.json"))
    mine = [] if goes_on else [folder / f"rank{rank}.jsonl"]
    common = ("status.json", "manifest.json", "trace.json") if rank == 0 else ()
    for path in (*mine, *folder.glob(f"*.rank{rank}.parquet"), *(folder / name for name in common)):
        path.unlink(missing_ok=True)
    describe(spec, folder)
    return folder


def _work(args: argparse.Namespace, spec: RunSpec, store: Store, name: str) -> int:
    from thinpipe.harness import runner, worker
    from thinpipe.harness.acsgd.control import Control

    limit_s = args.limit or runner.stall_limit_s(spec)
    started, written = _tracing(args, spec, store.run_dir(spec.run_id))
    control = Control(
        spec=spec,
        store=store,
        rank=args.rank,
        limit_s=limit_s,
        say=lambda line: print(line, flush=True),
        started=started,
        artifacts=written,
        finally_=lambda: _save(args, spec, store.run_dir(spec.run_id)),
    )
    os.environ |= {"RANK": str(args.rank), "WORLD_SIZE": str(args.world_size)}
    try:
        worker.main(control, str(store.run_dir(spec.run_id)), args.dist_url, name, limit_s)
    except SystemExit:
        assert control.failure is not None
        print(
            f"thinpipe: rank {args.rank}: the run {control.failure['state']}: {control.failure['error']}",
            file=sys.stderr,
        )
        return 1
    return 0


def _tracing(args: argparse.Namespace, spec: RunSpec, run_dir: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    """(called when training begins, called when all is measured)."""
    from thinpipe.harness.models import base as models

    path = TRACES / mapping.trace_name(args, models.resolve(spec.model, spec.task).width)
    if args.profiling == "no-profiling":
        return (lambda: None), (lambda: None)
    try:
        path.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make ./{path.parent}: {error.strerror}. Say --profiling no-profiling.") from None
    if args.profiling == "tidy_profiling":
        return (lambda: None), (lambda: _write_trace(path, run_dir / f"spans.rank{args.rank}.parquet", spec))
    import torch

    profiler: Any = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def export() -> None:
        profiler.stop()
        profiler.export_chrome_trace(str(path))

    return profiler.start, export


def _write_trace(path: Path, spans: Path, spec: RunSpec) -> None:
    import pandas as pd

    from thinpipe.harness import trace

    trace.write(path, pd.read_parquet(spans), spec.pipeline.ranks)


def _save(args: argparse.Namespace, spec: RunSpec, run_dir: Path) -> None:
    """Write the trained model where --save-dir says; drop the checkpoint it was read from, as a sweep does."""
    if args.save_dir is not None:
        from thinpipe.harness import merged

        merged.merge(run_dir, Path(args.save_dir))
    if spec.checkpoint.every is not None:
        from thinpipe.harness import state

        state.clear(run_dir)
