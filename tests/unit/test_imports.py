"""The import rules of docs/architecture.md, read from the syntax tree."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(p for folder in ("harness", "netem", "plots", "experiments") for p in (ROOT / folder).rglob("*.py"))
FILES.append(ROOT / "cli.py")
# What figures may use of the harness: pure functions of numbers and tables, and the error of people.
FOR_PLOTS = {"errors", "stats", "timeline"}
HEAVY = ("torch", "transformers", "numba", "pyarrow", "datasets")
# The only modules that may import one of these as they are imported themselves: what a rank runs, and tables. A new
# module may not, until it is named here; listing and planning have to stay quick.
HEAVY_FOLDERS = ("harness/compression/codecs/", "harness/compression/kernels/", "harness/compression/memories/")
HEAVY_MODULES = {
    "acsgd/control", "capture", "channel", "compression/base", "compression/blocked", "compression/disk",
    "compression/halves", "compression/hosted", "compression/keys", "compression/masked", "compression/row_memory",
    "compression/rows", "compression/tensors", "compression/warm_up", "data_parallel", "emulate", "gradients",
    "library", "links", "measure", "merged", "models/_dropout", "models/_minilm", "models/_shared", "models/_weights",
    "models/deberta", "models/gpt2", "models/resnet", "partitioned", "pipeline/schedules", "pipeline/stage",
    "profiling", "quantized_adam", "rank_state", "replay", "shards", "state", "tables", "tasks/classify",
    "tasks/image", "tasks/lm", "tensorfile", "train", "worker",
}  # fmt: skip


def imports(path: Path, *, top_only: bool) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_only else list(ast.walk(tree))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: absolute imports only"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def starts(names: set[str], *prefixes: str) -> set[str]:
    return {n for n in names if any(n == p or n.startswith(p + ".") for p in prefixes)}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_layers(path):
    relative = path.relative_to(ROOT).as_posix()
    every = imports(path, top_only=False)
    if relative.startswith("netem/"):
        assert not starts(every, "thinpipe.harness", "thinpipe.plots", "torch"), "netem imports nothing of ours"
    if relative.startswith("plots/"):
        assert not starts(every, "torch", "thinpipe.netem"), "plots read tables only"
        used = {name.split(".")[2] for name in starts(every, "thinpipe.harness") if name.count(".") >= 2}
        assert used <= FOR_PLOTS, "plots read tables only: nothing of the harness that reads files or knows of runs"
    if relative.startswith(("harness/pipeline/", "harness/compression/")) or relative == "harness/channel.py":
        bad = starts(every, "thinpipe.harness.launch", "thinpipe.harness.store", "thinpipe.netem")
        assert not bad, "the data path knows nothing of launching, storing or the network's making"


@pytest.mark.parametrize("name", sorted(FOR_PLOTS))
def test_what_plots_use_of_the_harness_is_pure(name):
    path = ROOT / "harness" / f"{name}.py"
    every = imports(path, top_only=False)
    assert not starts(every, "torch", "pyarrow", "pandas", "pathlib", "os", "io", "subprocess")
    assert {n.split(".")[2] for n in starts(every, "thinpipe.harness") if n.count(".") >= 2} <= FOR_PLOTS


def heavy(path: Path) -> bool:
    return bool(starts(imports(path, top_only=True), *HEAVY))


def may_be_heavy(path: Path) -> bool:
    relative = path.relative_to(ROOT).as_posix()
    return relative.startswith(HEAVY_FOLDERS) or relative.removeprefix("harness/").removesuffix(".py") in HEAVY_MODULES


@pytest.mark.parametrize("path", [p for p in FILES if not may_be_heavy(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_only_what_a_rank_runs_imports_torch(path):
    assert not heavy(path), "import it inside the function that needs it, or name the module in HEAVY_MODULES"


def test_no_module_is_named_heavy_that_is_not():
    assert [name for name in sorted(HEAVY_MODULES) if not heavy(ROOT / "harness" / f"{name}.py")] == []


def test_listing_and_planning_import_no_torch():
    code = (
        "import sys; from thinpipe.harness import spec, plugins, experiment, plan, sweep, store;"
        "from thinpipe.harness.compression import grammar;"
        "spec.parse({'compression': {'forward': 'delta(fixpoint:4)'}}).run_id;"
        "bad = {'torch', 'numba', 'transformers', 'pyarrow', 'datasets'} & set(sys.modules);"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
