"""A result set: what an experiment found, ready to be shown, exported and compared.

    results/<experiment>/               tables, figures; its runs below results/runs        ─┐
    results/reference/<experiment>/     tables/*.csv, claims.json, manifest.json: in git    ─┴▶ load ─▶ ResultSet
                                        ▲ save: small, no machine's paths (condense.py says what is left out)

Reading never creates anything.
"""

from __future__ import annotations

import functools
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinpipe.harness import condense, metrics
from thinpipe.harness.dotted import flat
from thinpipe.harness.errors import UserError
from thinpipe.harness.provenance import Provenance, of_runs
from thinpipe.harness.shards import replace
from thinpipe.harness.store import Store, read_json

if TYPE_CHECKING:
    import pandas as pd

    from thinpipe.harness.experiment import Experiment

#: A file that git keeps may have this many bytes.
MAX_BYTES = 1_000_000
CLAIMS, MANIFEST = "claims.json", "manifest.json"


@dataclass(frozen=True)
class ResultSet:
    """One experiment's results.

    tables: by name, columns and types as metrics.TABLES. claims: rows as claims.evaluate gives them. manifest: commit,
    date, size, machines, and what of `provenance` concerns all runs. settings: run_id -> every setting that is not the
    default, by dotted key. figures: names of those that belong to it, all that its tables fill when empty.
    figures_folder: SVGs drawn of these very tables, None where there are none. notes: what a reader must know about the
    set as such.
    """

    name: str
    title: str
    question: str
    tables: Mapping[str, pd.DataFrame]
    claims: Sequence[Mapping[str, Any]]
    manifest: Mapping[str, Any]
    settings: Mapping[str, Mapping[str, Any]]
    provenance: Provenance
    figures: tuple[str, ...] = ()
    figures_folder: Path | None = None
    notes: tuple[str, ...] = ()


def find(paths: Sequence[Path]) -> list[Path]:
    """The folders of result sets: each of `paths` that is one, and those that lie in it where it is not."""
    found: list[Path] = []
    for path in map(Path, paths):
        inside = [path] if _is_set(path) else [p for p in sorted(path.glob("*")) if p.is_dir() and _is_set(p)]
        if not inside:
            raise UserError(
                f"{path} holds no results: give results/EXPERIMENT, a folder that `thinpipe` has saved results in, or "
                "a folder of such folders."
            )
        found += [p for p in inside if p.resolve() not in {f.resolve() for f in found}]
    return found


def _is_set(path: Path) -> bool:
    return (path / "runs.json").is_file() or ((path / MANIFEST).is_file() and (path / "tables").is_dir())


def load(path: str | Path) -> ResultSet:
    """The result set in a folder: an experiment's results, or a saved set. UserError where it is damaged or none."""
    folder = Path(path)
    if (folder / "runs.json").is_file():
        return _of_experiment(folder)
    if not _is_set(folder):
        find([folder])
        raise UserError(f"{folder} holds several result sets: give one of the folders in it.")
    saved = read_json(folder / MANIFEST)
    needed = ("experiment", "title", "question", "settings", "own_settings", "provenance", "figures", "notes")
    if not isinstance(saved, dict) or any(name not in saved for name in needed):
        raise UserError(f"{folder / MANIFEST} is damaged: it lacks {', '.join(needed)}, or one of them.")
    shared, own = saved.pop("settings")["shared"], saved.pop("own_settings")
    tables = _read_csv(folder / "tables")
    return ResultSet(
        saved["experiment"],
        saved.pop("title"),
        saved.pop("question"),
        tables,
        _claims(folder / CLAIMS),
        saved,
        {run_id: {**shared, **own.get(run_id, {})} for run_id in tables["runs"]["run_id"]},
        Provenance.from_json(saved.pop("provenance")),
        tuple(saved.pop("figures")),
        notes=tuple(saved.pop("notes")),
    )


def _of_experiment(folder: Path) -> ResultSet:
    store = Store(folder.parent)
    name = folder.name
    listed = store.saved_runs(name)
    run_ids = list(dict.fromkeys(row["run_id"] for row in listed))
    ended = [run_id for run_id in run_ids if store.status(run_id) is not None]
    tables, notes = _read_parquet(folder / "tables")
    new = set(ended) - set(tables["runs"]["run_id"])
    if new:
        notes.append(f"{len(new)} run(s) have ended since these tables were built: `thinpipe tables {name}`.")
    if len(ended) < len(run_ids):
        notes.append(f"{len(run_ids) - len(ended)} of {len(run_ids)} run(s) have not ended.")
    asked = store.declaration(name)
    known = declared(name, asked)
    if known is not None and known.claims and not (folder / CLAIMS).exists():
        notes.append("Its claims have not been judged yet: `thinpipe claims` does.")
    provenance = of_runs(store, ended)
    return ResultSet(
        name,
        known.title if known else asked.get("title", name),
        known.question if known else asked.get("question", ""),
        tables,
        _claims(folder / CLAIMS),
        {"experiment": name, "size": known.size if known else None, **provenance.summary()},
        {run_id: flat(read_json(store.run_dir(run_id) / "run.json")["spec"]) for run_id in ended},
        provenance,
        tuple(known.figures) if known else (),
        _figures(folder / "figures", store, ended),
        tuple(notes),
    )


def declared(name: str, asked: Mapping[str, Any]) -> Experiment | None:
    """The experiment whose results folder is called `name`: as it was asked for (store.declaration), else the one of
    that name that comes with the package. None where its file is gone, or is another's by now."""
    from thinpipe.harness import experiment, sizes

    if asked:
        try:
            found = experiment.load(asked["source"], asked["overrides"], asked["size"])
        except UserError:
            return None
        return found if found.name == name else None
    for source, text in experiment.builtin().items():
        own = tomllib.loads(text).get("name", "")
        if name == own:
            return experiment.load(source)
        size = name.removeprefix(f"{own}.")
        if size in sizes.SIZES and size != name:
            return experiment.load(source, size=size)
    return None


def _claims(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    data = read_json(path)
    if not isinstance(data, list) or not all(isinstance(row, dict) and {"claim", "state"} <= set(row) for row in data):
        raise UserError(f"{path} is damaged: it must be a list of claims, each with `claim` and `state`.")
    return data


def _figures(folder: Path, store: Store, ended: Sequence[str]) -> Path | None:
    """The folder of an experiment's figures, if all were drawn after the last of its runs had ended."""
    drawn = folder / ".drawn"
    if not drawn.exists():
        return None
    last = max(((store.run_dir(run_id) / "status.json").stat().st_mtime_ns for run_id in ended), default=0)
    return folder if drawn.stat().st_mtime_ns >= last else None


def _read_parquet(folder: Path) -> tuple[dict[str, pd.DataFrame], list[str]]:
    """(tables, notes) of an experiment's results folder."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from thinpipe.harness import shards
    from thinpipe.harness.tables import to_frame

    if not (folder / "runs.parquet").exists():
        raise UserError(f"{folder.parent} has no tables yet: `thinpipe tables {folder.parent.name}` builds them.")
    read = {}
    for path in sorted(folder.glob("*.parquet")):
        try:
            content = pq.read_table(path)
        except (pa.ArrowException, OSError) as error:
            reason = str(error).split("\n", 1)[0]
            raise UserError(
                f"{path} is damaged ({reason}): `thinpipe tables {folder.parent.name}` builds it anew."
            ) from None
        if path.stem not in metrics.TABLES or content.schema.names != shards.schema(path.stem).names:
            raise UserError(f"{path} is of another version: `thinpipe tables {folder.parent.name}` builds it anew.")
        read[path.stem] = to_frame(path.stem, content)
    return read, []


def _read_csv(folder: Path) -> dict[str, pd.DataFrame]:
    from thinpipe.harness import shards
    from thinpipe.harness.tables import to_frame

    read = {}
    for path in sorted(folder.glob("*.csv")):
        if path.stem not in metrics.TABLES:
            raise UserError(f"{path} is no table of this version.")
        try:
            rows = condense.from_csv(path.read_text(encoding="utf-8"), path.stem, str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read: {error}") from None
        read[path.stem] = to_frame(path.stem, shards.to_arrow(path.stem, rows))
    if "runs" not in read:
        raise UserError(f"{folder} has no runs.csv.")
    return read


def save(folder: str | Path, out: str | Path, *, commit: str | None = None) -> dict[str, Any]:
    """Write the small form of the result set in `folder` into `out`; returns {experiment, out, files: {name: bytes}}.

    commit: of the source the runs were made with, where their manifests do not say. UserError where a file would be
    over MAX_BYTES, or no commit is known.
    """
    files = contents(load(folder), commit)
    too_large = {name: len(text.encode()) for name, text in files.items() if len(text.encode()) > MAX_BYTES}
    if too_large:
        worst = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in too_large.items())
        raise UserError(
            f"{folder}: too large to be kept in git ({worst}; the limit is {MAX_BYTES / 1e6:g} MB a file). Use fewer "
            "seeds or evaluations, or give parts of the experiment files of their own."
        )
    out = Path(out)
    (out / "tables").mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        replace(out / name, functools.partial(Path.write_text, data=text, encoding="utf-8"))
    for old in (out / "tables").glob("*.csv"):
        if f"tables/{old.name}" not in files:
            old.unlink()
    return {
        "experiment": json.loads(files[MANIFEST])["experiment"],
        "out": str(out),
        "files": {name: len(text.encode()) for name, text in files.items()},
    }


def render(saved: Sequence[Mapping[str, Any]]) -> list[str]:
    """What `save` returned of several sets, a line each, for people."""
    return [f"{one['out']}: {sum(one['files'].values()) / 1e3:.0f} kB in {len(one['files'])} files" for one in saved]


def contents(found: ResultSet, commit: str | None = None) -> dict[str, str]:
    """The files of a saved set: their names and texts. Pure."""
    if commit is None and not found.manifest.get("commits"):
        raise UserError(f"{found.name}: its runs do not say what commit they were made with: give it (--commit).")
    small = condense.tables(found.tables)
    files = {
        f"tables/{name}.csv": condense.to_csv(frame, name, condense.without_paths) for name, frame in small.items()
    }
    shared, own = common(found.settings)
    manifest = {
        **found.manifest,
        **({"commits": [commit]} if commit else {}),
        "title": found.title,
        "question": found.question,
        "figures": list(found.figures),
        "notes": list(found.notes),
        "condensed": "steps and transfers: see docs/report.md, saved result sets",
        "settings": {"shared": shared},
        "own_settings": own,
        "provenance": found.provenance.to_json(),
    }
    files[MANIFEST] = _json(condense.without_paths(manifest))
    files[CLAIMS] = _json(condense.without_paths(list(found.claims)))
    return files


def common(settings: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """(settings that all runs share, run_id -> its other ones)."""
    runs = list(settings.values())
    first = runs[0] if runs else {}
    shared = {key: value for key, value in first.items() if all(key in run and run[key] == value for run in runs)}
    return shared, {run_id: {k: v for k, v in run.items() if k not in shared} for run_id, run in settings.items()}


def _json(data: Any) -> str:
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
