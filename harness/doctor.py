"""What this machine can do, and what to do about the rest: the network's own checks and those of the
harness."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinpipe.harness import lock, manifest
from thinpipe.harness.errors import UserError
from thinpipe.netem import probe

FREE_DISK_GIB = 2.0
FREE_MEMORY_GIB = 2.0
# Above this share of the cores busy with something else, timings suffer.
BUSY = 0.25
PYTHON = (3, 11)
NEEDED = ("torch", "transformers", "tokenizers", "numba", "pandas", "pyarrow", "matplotlib")

Check = dict[str, Any]


def checks(results: Path, network: Callable[[], list[probe.Check]] = probe.checks) -> list[Check]:
    """Findings as {name, ok, required, found, advice}; advice is empty where all is well."""
    found = [_check(c.name, c.ok, c.detail, c.remedy, required=c.required) for c in network()]
    return [
        *found,
        _python(),
        *map(_package, NEEDED),
        _cores(),
        _load(),
        _memory(),
        _disk(results),
        _timing_lock(),
    ]


def _check(name: str, ok: bool, found: str, advice: str, *, required: bool = True) -> Check:
    return {"name": name, "ok": ok, "required": required, "found": found, "advice": "" if ok else advice}


def _python() -> Check:
    ok = sys.version_info >= PYTHON
    return _check("python", ok, platform.python_version(), "use Python 3.11 or later")


def _package(name: str) -> Check:
    version = manifest.version(name)
    return _check(name, version is not None, version or "not installed", "install thinpipe again with its dependencies")


def _cores() -> Check:
    cores = len(os.sched_getaffinity(0))
    advice = "two stages need two cores to be timed well: shared cores flag runs as cpu-bound"
    return _check("cores", cores >= 2, f"{cores} usable", advice, required=False)


def _load() -> Check:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    advice = "other work is running: it disturbs timings, end it before a timed sweep"
    return _check("load", load < BUSY * cores, f"{load:.2f} (1 min) on {cores} cores", advice, required=False)


def _memory() -> Check:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) / 2**20
    advice = f"each rank takes about 1 GiB: have {FREE_MEMORY_GIB:g} GiB free"
    return _check("memory", free >= FREE_MEMORY_GIB, f"{free:.1f} GiB available", advice, required=False)


def _disk(results: Path) -> Check:
    folder = results.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / 2**30
    ok = free >= FREE_DISK_GIB and os.access(folder, os.W_OK)
    found = f"{free:.1f} GiB free for {results}" + ("" if os.access(folder, os.W_OK) else ", not writable")
    return _check("disk", ok, found, "free some space, or give another folder with --results", required=False)


def _timing_lock() -> Check:
    try:
        info = lock.holder()
    except UserError as error:
        return _check("timing lock", False, str(error), f"remove {lock.PATH}, or make it readable")
    if info is None:
        return _check("timing lock", True, "free", "")
    return _check("timing lock", False, lock.describe(info), "a sweep started now will wait for it", required=False)
