"""Plug-ins are found, never imported, until one is used.

A plug-in is one file; its name is the file's stem (with hyphens for underscores, for compressors). `VERSION` (int),
`SUMMARY` (str), `SOURCE` (str) and `PARAMETERS` (dict; what is in it, each kind says) are literals at the top of the
module, read from its syntax tree, so that listing and planning cost no import of torch. Third parties register modules
under the entry-point groups `thinpipe.codecs`, `thinpipe.memories`, `thinpipe.models`, `thinpipe.tasks`,
`thinpipe.figures`.

>>> find("codecs")["fixpoint"].version
1
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from thinpipe.harness.errors import UserError, near_miss

FOLDERS = {
    "codecs": "harness/compression/codecs",
    "memories": "harness/compression/memories",
    "models": "harness/models",
    "tasks": "harness/tasks",
    "figures": "plots",
}
# Every file of a plug-in folder is a plug-in, save these and those that begin with `_`, which plug-ins share.
NOT_PLUGINS = {"__init__", "style", "base"}
# In these kinds an underscore of the file's name is a hyphen of the plug-in's.
HYPHENATED = {"codecs", "memories"}
LITERALS = {"VERSION": int, "SUMMARY": str, "SOURCE": str, "PARAMETERS": dict}
# What some kinds may say besides (compression/__init__.py).
OPTIONAL = {"FORMULA": str, "UNBIASED": str, "STATE": str}
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Plugin:
    """One plug-in as its source describes it; `load()` imports it."""

    kind: str
    name: str
    module: str
    path: Path
    version: int
    summary: str
    source: str
    parameters: Mapping[str, Any]
    source_hash: str
    extra: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)


def find(kind: str) -> Mapping[str, Plugin]:
    """All plug-ins of `kind` by name. Raises UserError on a duplicate or a module without its literals."""
    return _find(kind)


def get(kind: str, name: str) -> Plugin:
    """The plug-in called `name`; UserError with the valid names and a near miss when there is none."""
    plugins = find(kind)
    if name not in plugins:
        raise UserError(f"unknown {kind.rstrip('s')} {name!r}.{near_miss(name, plugins)}")
    return plugins[name]


@functools.cache
def _find(kind: str) -> Mapping[str, Plugin]:
    folder = FOLDERS[kind]
    package = "thinpipe." + folder.replace("/", ".")
    found: dict[str, Plugin] = {}
    for path in sorted((ROOT / folder).glob("*.py")):
        if path.stem not in NOT_PLUGINS and not path.stem.startswith("_"):
            name = path.stem.replace("_", "-") if kind in HYPHENATED else path.stem
            found[name] = read(kind, name, f"{package}.{path.stem}", path)
    for entry in importlib.metadata.entry_points(group=f"thinpipe.{kind}"):
        if entry.name in found:
            raise UserError(
                f"two {kind} are called {entry.name!r}: {found[entry.name].path} and {entry.value}. "
                "Uninstall one or rename its entry point."
            )
        spec = _find_spec(entry)
        found[entry.name] = read(kind, entry.name, entry.value, spec)
    return MappingProxyType(found)


def _find_spec(entry: importlib.metadata.EntryPoint) -> Path:
    """The file of an entry point's module. Parents are imported by Python to find it, the module itself is not."""
    try:
        spec = importlib.util.find_spec(entry.value)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        raise UserError(f"entry point {entry.name!r} names {entry.value!r}, which is no module that can be found.")
    return Path(spec.origin)


def read(kind: str, name: str, module: str, path: Path) -> Plugin:
    """Read a plug-in's literals from its syntax tree without importing it."""
    text = path.read_text(encoding="utf-8")
    values: dict[str, Any] = {}
    try:
        tree = ast.parse(text, filename=str(path))
    except SyntaxError as error:
        raise UserError(f"{path} is no {kind.rstrip('s')} plug-in: {error.msg} (line {error.lineno}).") from None
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            target, value = node.target.id, node.value
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            target, value = node.targets[0].id, node.value
        else:
            continue
        if target in LITERALS or target in OPTIONAL:
            values[target] = _literal(path, target, value)
    missing = sorted(set(LITERALS) - set(values))
    if missing:
        raise UserError(f"{path.name} is no {kind.rstrip('s')} plug-in: it lacks the literal(s) {', '.join(missing)}.")
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Plugin(
        kind, name, module, path, values["VERSION"], values["SUMMARY"], values["SOURCE"], values["PARAMETERS"], digest,
        MappingProxyType({key: values[key] for key in OPTIONAL if key in values}),
    )  # fmt: skip


def _literal(path: Path, target: str, node: ast.expr) -> Any:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        raise UserError(f"{path.name}: {target} must be a literal, it is read without importing the file.") from None
    wanted = (LITERALS | OPTIONAL)[target]
    if not isinstance(value, wanted):
        raise UserError(f"{path.name}: {target} must be a {wanted.__name__}, not {type(value).__name__}.")
    return value
