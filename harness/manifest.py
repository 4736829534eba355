"""What a run ran on: machine, versions, source revision, plug-ins. Stored beside the results as
manifest.json.

No torch here: the planner asks for `machine_id` to tell runs of this machine from those of another.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from thinpipe.harness import folders, plugins, profile
from thinpipe.harness.errors import UserError
from thinpipe.harness.spec import RunSpec
from thinpipe.netem import tools as netem_tools
from thinpipe.netem.errors import NetemError

COMMAND_LIMIT_S = 5.0
# What a run is made with.
SOURCES = ("harness", "netem", "plots", "experiments", "cli.py", "__init__.py", "pyproject.toml")


@functools.cache
def machine() -> dict[str, Any]:
    """What of this machine bears on timing. No host name: it names a machine without describing it."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "kernel": platform.release(),
        "architecture": platform.machine(),
    }


@functools.cache
def machine_id() -> str:
    """12 hex digits, the same as long as the machine's cpu, cores, memory and kernel are."""
    text = json.dumps(machine(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def collect(spec: RunSpec) -> dict[str, Any]:
    """The manifest of a run about to start. Values that cannot be found out are None."""
    return {
        "machine_id": machine_id(),
        "machine": {**machine(), "cores_allowed": len(os.sched_getaffinity(0)), "os": _os_name()},
        "load_at_start": list(os.getloadavg()),
        "python": platform.python_version(),
        "versions": versions(),
        "tools": tools(),
        "source": source(),
        "plugins": plugin_hashes(spec),
        "inputs": input_hashes(spec),
        **({"profile": profile.load(spec.profile).to_json()} if spec.profile else {}),
    }


def input_hashes(spec: RunSpec) -> dict[str, str]:
    """Hash of each file that the spec names (corpus, checkpoint, profile): a run_id holds the name, not the content.

    Of each file its size and its first MiB are hashed: enough to notice another file, cheap enough for a plan.
    """
    corpus = Path(spec.task.corpus).expanduser()
    named = sorted(corpus.glob("*"))[:64] if corpus.is_dir() else [corpus]
    if spec.model.checkpoint is not None:
        folder = _folder(spec.model.checkpoint)
        named += [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    if spec.task.tokenizer not in (None, "checkpoint"):
        named += sorted(_folder(spec.task.tokenizer).glob("*token*.json"))
    hashes = {f"profile {spec.profile}": profile.digest(spec.profile)} if spec.profile else {}
    for path in named:
        if path.is_file():
            with path.open("rb") as file:
                digest = hashlib.sha256(str(path.stat().st_size).encode())
                digest.update(file.read(1 << 20))
            hashes[str(path)] = digest.hexdigest()[:16]
    return hashes


def _folder(text: str) -> Path:
    """What a checkpoint or tokenizer names; nothing that can be looked at where it is not on this machine."""
    try:
        return folders.resolve(text).expanduser()
    except UserError:
        return Path(text)


def plugin_hashes(spec: RunSpec) -> dict[str, dict[str, Any]]:
    """{"kind/name": {"version", "source_hash"}} of each plug-in the run uses, as its source is now."""
    hashes = {}
    for key in spec.plugin_versions():
        plugin = plugins.get(*key.split("/", 1))
        hashes[key] = {"version": plugin.version, "source_hash": plugin.source_hash}
    return hashes


@functools.cache
def versions() -> dict[str, str | None]:
    """Installed version of thinpipe and of each distribution it requires; None = not installed."""
    names = ["thinpipe"]
    for requirement in importlib.metadata.requires("thinpipe") or []:
        found = re.match(r"[A-Za-z0-9._-]+", requirement)
        if found and "extra ==" not in requirement:
            names.append(found.group())
    return {name: version(name) for name in names}


def version(distribution: str) -> str | None:
    """The installed version of a distribution, without importing it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def tools() -> dict[str, str | None]:
    """What tc and ip say their version is."""
    return {name: _tool_version(name) for name in ("tc", "ip")}


def source() -> dict[str, Any] | None:
    """Commit and cleanness of the source when it is a git checkout, else None (an installed package)."""
    if not (plugins.ROOT / ".git").exists():
        return None
    # The folder may belong to another user than the one who runs; reading a commit id is safe then too.
    git = ["git", "-c", "safe.directory=*", "-C", str(plugins.ROOT)]
    # What is not in git counts where it could be a plug-in; a folder of results beside the packages is no change.
    changes = _output([*git, "status", "--porcelain", "--", *SOURCES])
    return {
        "commit": _output([*git, "rev-parse", "HEAD"]),
        "dirty": None if changes is None else bool(changes),
    }


def _tool_version(name: str) -> str | None:
    try:
        return netem_tools.run([name, "-V"]).strip()
    except NetemError:
        return None


def _output(command: list[str]) -> str | None:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, env=environment, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_model() -> str:
    for line in _lines("/proc/cpuinfo"):
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return platform.processor() or "unknown"


def _os_name() -> str:
    for line in _lines("/etc/os-release"):
        if line.startswith("PRETTY_NAME="):
            return line.partition("=")[2].strip().strip('"')
    return platform.system()


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
