"""Data sets read by the `datasets` library: published ones, from a hub or its cache, and folders it saved.

`published` and `saved` give the columns of a training and a held-out split as plain lists and arrays, kept in an npz
file of the cache. The library itself runs in a child process, where `run` is called.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from thinpipe.harness.errors import UserError
from thinpipe.harness.tasks import _arrays, _child

# Part of the cache's file names: raise it when the same data set would give other columns.
FORMAT = 1
DOWNLOAD_LIMIT_S = 3600.0
# A hub that takes longer to answer than this counts as not there.
REACH_LIMIT_S = 3.0
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
Column = list[str] | np.ndarray
# Ways to name columns, ours -> its own; the first whose columns are all there counts.
Alternatives = Sequence[Mapping[str, str]]
SIDE = 32


@dataclass(frozen=True)
class Published:
    """A published data set. columns: ours -> its own, in a list of one; held_out: the split that is not trained on."""

    dataset: str
    config: str | None
    columns: Alternatives
    held_out: str

    def __str__(self) -> str:
        return f"{self.dataset} ({self.config})" if self.config else self.dataset


@dataclass(frozen=True, eq=False)
class Splits:
    """Columns by name: texts as a list, numbers as int64 (n,), pictures as uint8 (n, H, W, C). held_out: None where
    the data set has one split only."""

    train: dict[str, Column]
    held_out: dict[str, Column] | None


def published(name: str, source: Published, cache_dir: Path, *, offline_corpora: str) -> Splits:
    """The data set called `name`. Raises UserError where neither cache nor hub has it, naming `offline_corpora`."""
    path = cache_dir / f"hub{FORMAT}-{_arrays.name(source, json.dumps(source.columns), source.held_out)}.npz"
    if not path.exists():
        arguments = ", ".join(repr(part) for part in (source.dataset, source.config) if part)
        from_hub(
            __name__,
            _job(source.dataset, source.config, source.columns, (source.held_out,), path),
            missing=(
                f"task.corpus {name!r} is the published data set {source}. It is not in the cache of `datasets` "
                f"({hub_home()}; HF_HOME sets another), and its hub cannot be reached. Copy that cache here from a "
                'machine that has it; or save it there with python -c "from datasets import load_dataset as l; l('
                f"{arguments}).save_to_disk('FOLDER')\" and give the copied FOLDER as task.corpus; or take a corpus "
                f"that needs no network: {offline_corpora}."
            ),
        )
    return _splits(path)


def saved(folder: Path, columns: Alternatives, cache_dir: Path, *, held_out: Sequence[str]) -> tuple[Splits, str]:
    """A folder that `datasets` saved, and the sha256 of its files. held_out: split names, the first there is counts.

    Raises UserError for a folder it did not save, and columns that are missing."""
    digest = hash_folder(folder)
    path = cache_dir / f"saved{FORMAT}-{_arrays.name(digest, json.dumps(columns), *held_out)}.npz"
    if not path.exists():
        _child.call(__name__, _job(str(folder), None, columns, held_out, path))
    return _splits(path), digest


def is_saved(folder: Path) -> bool:
    """Whether `datasets` saved this folder."""
    return (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file()


def hash_folder(folder: Path, suffixes: Sequence[str] | None = None) -> str:
    """sha256 of the names and contents of all files below, or of those with one of `suffixes`."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        if suffixes is None or path.suffix.lower() in suffixes:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{path.relative_to(folder).as_posix()}\0{content}\n".encode())
    return digest.hexdigest()


def from_hub(module: str, job: Mapping[str, Any], *, missing: str) -> dict[str, Any]:
    """Run a job on what the hub's cache has, else on the hub; UserError `missing` where there is no hub to ask."""
    try:
        return _child.call(module, job)
    except _child.NotThereError as error:
        if any(os.environ.get(name, "0") not in ("", "0") for name in OFFLINE) or not reachable():
            raise UserError(missing) from error
    return _child.call(module, job, offline=False, limit_s=DOWNLOAD_LIMIT_S)


def reachable() -> bool:
    """Whether the hub, or the proxy in front of it, takes a connection: its own client would try for 25 s."""
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    parts = urllib.parse.urlsplit(urllib.request.getproxies().get("https") or endpoint)
    port = parts.port or (80 if parts.scheme == "http" else 443)
    try:
        with socket.create_connection((parts.hostname or "", port), timeout=REACH_LIMIT_S):
            return True
    except OSError:
        return False


def hub_home() -> Path:
    """Where the hub's libraries keep what they downloaded."""
    return Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")


def _job(source: str, config: str | None, columns: Alternatives, held_out: Sequence[str], path: Path) -> dict[str, Any]:
    chosen = {"columns": [dict(names) for names in columns], "held_out": list(held_out)}
    return {"source": source, "config": config, **chosen, "path": str(path)}


def _splits(path: Path) -> Splits:
    found: dict[str, dict[str, Column]] = {}
    arrays = _arrays.read(path)
    for key, array in arrays.items():
        split, column, what = key.split(":")
        if what == "bytes":
            found.setdefault(split, {})[column] = _arrays.unpack(array, arrays[f"{split}:{column}:ends"])
        elif what == "values":
            found.setdefault(split, {})[column] = array
    return Splits(found["train"], found.get("held_out"))


# --- in the child ----------------------------------------


def run(
    *, source: str, config: str | None, columns: list[dict[str, str]], held_out: list[str], path: str
) -> dict[str, Any]:
    """Load `source` and write its columns to `path`."""
    import datasets

    if Path(source).is_dir():
        loaded = datasets.load_from_disk(source)
    else:
        loaded = datasets.load_dataset(source, config)
    if not isinstance(loaded, dict):
        loaded = {"train": loaded}
    if "train" not in loaded:
        raise UserError(f"task.corpus {source!r} has no split `train`, only {', '.join(loaded)}. Rename one.")
    second = next((name for name in held_out if name in loaded), None)
    arrays: dict[str, np.ndarray] = {}
    for split, name in (("train", "train"), ("held_out", second)):
        if name is not None:
            arrays |= _columns(source, loaded[name], split, columns)
    _arrays.write(Path(path), arrays)
    return {}


def _columns(source: str, data: Any, split: str, alternatives: Alternatives) -> dict[str, np.ndarray]:
    names = next((one for one in alternatives if set(one.values()) <= set(data.column_names)), None)
    if names is None:
        wanted = "; or ".join(", ".join(one.values()) for one in alternatives)
        raise UserError(
            f"task.corpus {source!r} has the columns {', '.join(data.column_names)}, but is to have {wanted}. Rename "
            "some (rename_column) and save it again."
        )
    arrays: dict[str, np.ndarray] = {}
    for ours, theirs in names.items():
        values = data[theirs][:]
        if values and isinstance(values[0], str):
            arrays[f"{split}:{ours}:bytes"], arrays[f"{split}:{ours}:ends"] = _arrays.pack(values)
        elif values and hasattr(values[0], "convert"):
            arrays[f"{split}:{ours}:values"] = np.stack([picture(image) for image in values])
        else:
            arrays[f"{split}:{ours}:values"] = np.array(values, dtype=np.int64)
    return arrays


def picture(image: Any) -> np.ndarray:
    """A PIL image as uint8 (32, 32, 3), resized where it has another size."""
    from PIL import Image

    colour = image.convert("RGB")
    if colour.size != (SIDE, SIDE):
        colour = colour.resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    return np.asarray(colour, dtype=np.uint8)
