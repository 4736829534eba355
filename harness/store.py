"""Where results lie, and when they count: `status.json` is written last, by atomic rename.

    <root>/runs/<run_id>/      run.json manifest.json rank*.jsonl rank*.log *.parquet status.json
    <root>/<experiment>/       runs.json (the ids it uses) declared.json (how it was asked for) tables/ figures/

A run without a whole status.json is not finished, whatever else lies in its folder, and is begun anew.

>>> Store(Path("results")).run_dir("0123456789ab").as_posix()
'results/runs/0123456789ab'
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinpipe.harness.errors import UserError
from thinpipe.harness.spec import RunSpec, parse

if TYPE_CHECKING:
    from thinpipe.harness.experiment import Experiment

STATES = ("done", "diverged", "failed")
# Every status.json has these.
STATUS_FIELDS = (
    "run_id",
    "state",
    "error",
    "detail",
    "started_at",
    "ended_at",
    "wall_s",
    "machine",
    "fidelity",
    "totals",
    "links",
    "run_queue_pct",
)
# A row of an experiment's runs.json: one use of a run.
# Where a run's folder keeps the state of its training (state.py).
CHECKPOINTS = "checkpoints"
ROW = ("run_id", "part", "arm", "cell", "seed")
DECLARATION = ("name", "title", "question", "source", "size", "overrides")
PROBE_BYTES = 1 << 20
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class DiskFullError(UserError):
    """Results cannot be written; what was finished stays, the rest can be resumed."""


@contextlib.contextmanager
def explain_disk_full(folder: Path) -> Iterator[None]:
    """Turn `no space left` into a message that says where and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise DiskFullError(
            f"the disk is full: cannot write below {folder} ({error.strerror}). Finished runs are kept, "
            "the one in progress will be begun anew. Free some space, or give another folder with --results, "
            "and run again."
        ) from error


def write_json(path: Path, data: Any) -> None:
    """Write `data` so that `path` holds either what it held before or all of it, also after a power cut."""
    with explain_disk_full(path.parent):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(data, file, indent=1, allow_nan=False)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            # mkstemp is private to its owner; results are to be read by others as any file is.
            os.chmod(name, 0o666 & ~_umask())
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise
        _sync_folder(path.parent)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(path: Path) -> Any:
    """Parsed content; UserError that names the file when it is missing or damaged."""
    try:
        return _loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"there is no {path}.") from None
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is damaged: {_first_line(error)}") from None


def read_spec(run_dir: Path) -> RunSpec:
    """The spec in the run.json of a run's folder; UserError when it is missing or damaged."""
    path = run_dir / "run.json"
    data = read_json(path)
    if not isinstance(data, dict) or not isinstance(data.get("spec"), dict):
        raise UserError(f"{path} is not the description of a run.")
    return parse(data["spec"], where=str(path))


def describe(spec: RunSpec, folder: Path) -> None:
    """Write what the run in `folder` is asked to be: run.json."""
    described = {"run_id": spec.run_id, "train_id": spec.train_id, "cell_id": spec.cell_id}
    write_json(folder / "run.json", {**described, "plugins": spec.plugin_versions(), "spec": spec.canonical()})


class Store:
    """The results folder `root`. Reading never creates anything."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        if self.root.exists() and not self.root.is_dir():
            raise UserError(f"{self.root} is no folder; give another with --results.")

    def run_dir(self, run_id: str) -> Path:
        return self.root / "runs" / run_id

    def experiment_dir(self, name: str) -> Path:
        return self.root / name

    def begin(self, spec: RunSpec, *, afresh: bool = False) -> Path:
        """A folder for a run, holding its run.json and nothing of an earlier attempt, finished or not: but for its
        checkpoints, which the run goes on from, unless `afresh`, and the lines its ranks had written."""
        folder = self.run_dir(spec.run_id)
        # The status goes first: a removal cut short must not leave a run that says it is finished.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            (folder / "status.json").unlink()
        if folder.exists() and (afresh or not (folder / CHECKPOINTS).is_dir()):
            shutil.rmtree(folder)
        for path in sorted(folder.glob("*")) if folder.exists() else ():
            if path.is_file() and not path.name.startswith("rank"):
                path.unlink()
        with explain_disk_full(folder):
            self._make(folder)
        describe(spec, folder)
        return folder

    def _make(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno in NO_SPACE:
                raise
            raise UserError(
                f"cannot make the results folder {folder}: {error.strerror}. Give another with --results."
            ) from None

    def finish(self, run_id: str, status: Mapping[str, Any]) -> None:
        """Write status.json, the last file of a run; from then on the run is finished."""
        status = {**status, "run_id": run_id}
        missing = [name for name in STATUS_FIELDS if name not in status]
        assert not missing, f"status of {run_id} lacks {missing}"
        assert status["state"] in STATES, status["state"]
        write_json(self.run_dir(run_id) / "status.json", status)

    def status(self, run_id: str) -> dict[str, Any] | None:
        """How a run ended, None while it has not."""
        return self.read_status(run_id)[0]

    def read_status(self, run_id: str) -> tuple[dict[str, Any] | None, str | None]:
        """(status, what is wrong with status.json). A damaged one counts as not finished and is explained."""
        path = self.run_dir(run_id) / "status.json"
        try:
            data = _loads(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None, None
        except (ValueError, OSError) as error:
            return None, f"{path} is damaged ({_first_line(error)}): the run counts as not finished"
        if not _is_status(data) or data["run_id"] != run_id:
            return None, f"{path} is not the status of this run: the run counts as not finished"
        return data, None

    def begun(self, run_id: str) -> bool:
        """Whether a run was begun: it is running, or was cut short, unless it has a status."""
        return (self.run_dir(run_id) / "run.json").exists()

    def spec(self, run_id: str) -> RunSpec:
        """What a run was asked to be. UserError where its folder holds the description of another run."""
        path = self.run_dir(run_id) / "run.json"
        spec = read_spec(path.parent)
        if read_json(path).get("run_id") != run_id or not spec.is_run(run_id, read_json(path).get("plugins") or {}):
            raise UserError(f"{path} describes another run than its folder. Delete the folder, then run again.")
        return spec

    def manifest(self, run_id: str) -> dict[str, Any]:
        """The run's manifest.json, empty where it has none yet."""
        path = self.run_dir(run_id) / "manifest.json"
        data = read_json(path) if path.exists() else {}
        parts = ("plugins", "inputs", "requested", "effective", "network")
        if not isinstance(data, dict) or not all(isinstance(data.get(part, {}), dict) for part in parts):
            raise UserError(f"{path} is damaged: it is not a manifest of ours.")
        return data

    def run_ids(self) -> list[str]:
        """Ids of all runs begun in this folder."""
        return sorted(path.parent.name for path in self.root.glob("runs/*/run.json"))

    def experiments(self) -> list[str]:
        """Names of the experiments that have results here."""
        return sorted(path.parent.name for path in self.root.glob("*/runs.json"))

    def saved_runs(self, name: str) -> list[dict[str, Any]]:
        """The rows of an experiment's runs.json: run_id, part, arm, cell, seed. Empty where there is none."""
        path = self.experiment_dir(name) / "runs.json"
        if not path.exists():
            return []
        data = read_json(path)
        if not isinstance(data, list) or not all(_is_row(row) for row in data):
            raise UserError(
                f"{path} is damaged. Delete it and `thinpipe run` the experiment again: done runs are kept."
            )
        return data

    def save_runs(self, experiment: Experiment) -> int:
        """Add an experiment's runs to its runs.json; return how many it held that `experiment` does not
        declare.

        Rows are only ever added, under a lock, so that two sweeps that split an experiment lose none of each
        other's."""
        folder = self.experiment_dir(experiment.name)
        with explain_disk_full(folder):
            self._make(folder)
            with (folder / ".runs.lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                saved = self.saved_runs(experiment.name)
                ours = rows(experiment)
                known = {_identity(row) for row in ours}
                others = [row for row in saved if _identity(row) not in known]
                if others + ours != saved:
                    write_json(folder / "runs.json", others + ours)
                asked = declaration(experiment)
                if asked != self.declaration(experiment.name):
                    write_json(folder / "declared.json", asked)
        return len(others)

    def declaration(self, name: str) -> dict[str, Any]:
        """The declared.json of an experiment: name, title, question, and how it was asked for (source, size,
        overrides). Empty where there is none."""
        path = self.experiment_dir(name) / "declared.json"
        data = read_json(path) if path.exists() else {}
        if not isinstance(data, dict) or not set(data) <= set(DECLARATION):
            raise UserError(
                f"{path} is damaged. Delete it and `thinpipe run` the experiment again: done runs are kept."
            )
        return data

    def check_space(self) -> None:
        """Raise DiskFullError when a megabyte more cannot be written; found by writing it."""
        with explain_disk_full(self.root), tempfile.TemporaryFile(dir=self.root) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())


def _loads(text: bytes) -> Any:
    """JSON as we write it: no NaN, and no nesting that only damage explains."""

    def refuse(name: str) -> Any:
        raise ValueError(f"it holds {name}")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _is_status(data: Any) -> bool:
    """Whether parsed JSON is a status.json of ours: every field, each of its type."""
    if not isinstance(data, dict) or not set(STATUS_FIELDS) <= set(data) or data["state"] not in STATES:
        return False
    texts = all(isinstance(data[name], str) for name in ("run_id", "started_at", "ended_at", "machine"))
    maybe = all(data[name] is None or isinstance(data[name], str) for name in ("error", "detail"))
    parts = all(isinstance(data[name], dict) for name in ("fidelity", "totals", "links"))
    queue = data["run_queue_pct"]
    numbers = _number(data["wall_s"]) and (queue is None or _number(queue))
    return texts and maybe and parts and numbers


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_row(row: Any) -> bool:
    """Whether parsed JSON is a row of runs.json: ids that can only lie below runs/."""
    return (
        isinstance(row, dict)
        and set(ROW) <= set(row)
        and all(isinstance(row[name], str) for name in ("run_id", "part", "arm", "cell"))
        and re.fullmatch(r"[0-9a-f]{12}", row["run_id"]) is not None
        and isinstance(row["seed"], int)
    )


def rows(experiment: Experiment) -> list[dict[str, Any]]:
    """One row for each use of a run in an experiment, as runs.json keeps them."""
    return [
        {"run_id": spec.run_id, "part": cell.part, "arm": cell.arm, "cell": cell.cell_id, "seed": seed}
        for cell in experiment.cells()
        for seed, spec in cell.runs
    ]


def declaration(experiment: Experiment) -> dict[str, Any]:
    """What declared.json keeps of an experiment."""
    kept = {key: getattr(experiment, key) for key in DECLARATION}
    return {**kept, "overrides": list(experiment.overrides)}


def _identity(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["run_id"], row["part"], row["arm"]


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
