"""Training checkpoints: the whole state of every rank after a step, of which a kill at any moment leaves a usable one.

    RUN/checkpoints/step-00000040/rank3.safetensors   what rank 3 needs to go on: tensors, and `structure`, the JSON
                                                      that holds all else and says where each tensor belongs
                                  rank3.json          size and hash of that file
                                  complete.json       written last, by rank 0: every rank's size and hash

    every rank: save ─▶ barrier (the caller's) ─▶ rank 0: commit, prune      and on a restart: latest ─▶ load

A checkpoint without a whole complete.json, or with a file that is not as complete.json says, does not count.

State is plain: dict, list, tuple, str, int, float, bool, None, torch tensors, numpy arrays and scalars, nested as one
likes; all of it comes back as it was, bit for bit, tensors on the CPU. No code is stored, so none is run by loading.
`stages` of it, where it is there, is stage index -> `state_dict` of that stage's module: what `thinpipe merge` reads.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from thinpipe.harness import tensorfile
from thinpipe.harness.errors import UserError
from thinpipe.harness.store import write_json

FORMAT = 1
STRUCTURE = "structure"
STAGES = "stages"
STEP = re.compile(r"step-(\d{8})")
# Marks what JSON cannot say; a dict of the state that has this key is written as one of them.
KIND = "$"


def folder(run_dir: Path, step: int) -> Path:
    """Where the checkpoint taken after `step` optimizer steps lies."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


def rank_file(run_dir: Path, step: int, rank: int) -> Path:
    return folder(run_dir, step) / f"rank{rank}.safetensors"


def save(run_dir: Path, step: int, rank: int, world_size: int, state: Mapping[str, Any]) -> int:
    """Write one rank's state, synced to disk; returns its bytes. It counts once `commit` has been called.

    Tensors are written one after the other from where they are: no copy of the state is made. Raises UserError where
    the disk is full: then and after a kill, no complete checkpoint has changed. TypeError: something is not plain.
    """
    assert 0 <= rank < world_size, (rank, world_size)
    tensors: dict[str, torch.Tensor] = {}
    structure = json.dumps(_plain(state, "", tensors), allow_nan=False, separators=(",", ":"))
    tensors[STRUCTURE] = torch.frombuffer(bytearray(structure.encode()), dtype=torch.uint8)
    path = rank_file(run_dir, step, rank)
    with tensorfile.full_disk_explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    layouts = {name: tensorfile.layout(tensor) for name, tensor in tensors.items()}
    written = tensorfile.write(path, layouts, tensors.__getitem__)
    record = {"step": step, "rank": rank, "world_size": world_size, **_record(written)}
    with tensorfile.full_disk_explained(path):
        write_json(path.with_suffix(".json"), record)
    return written.num_bytes


def commit(run_dir: Path, step: int, world_size: int) -> None:
    """Make the checkpoint count; called by one rank once every rank has saved. Raises UserError where a rank has
    not, or the disk is full."""
    records = []
    for rank in range(world_size):
        path = rank_file(run_dir, step, rank)
        try:
            record = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
            mine = record["step"] == step and record["rank"] == rank and record["world_size"] == world_size
            whole = mine and record["bytes"] == path.stat().st_size
        except (OSError, ValueError, KeyError, TypeError):
            whole = False
        if not whole:
            raise UserError(
                f"rank {rank} has not saved step {step} where rank 0 looks for it ({path}). All ranks must write to "
                "one file system."
            )
        records.append({"bytes": record["bytes"], "xxh3_128": record["xxh3_128"]})
    done = {"format": FORMAT, "step": step, "world_size": world_size, "ranks": records}
    with tensorfile.full_disk_explained(folder(run_dir, step)):
        write_json(folder(run_dir, step) / "complete.json", done)


def latest(run_dir: Path, note: Callable[[str], None] = lambda text: None) -> int | None:
    """The newest step whose checkpoint is complete and undamaged, None where there is none. Every file of it has been
    read and compared. note: told of each newer one that does not count, and why."""
    for step in reversed(steps(run_dir)):
        wrong = _damage(run_dir, step)
        if wrong is None:
            return step
        note(f"the checkpoint of step {step} is passed over: {wrong}")
    return None


def require(run_dir: Path, step: int, world_size: int) -> None:
    """Raise UserError unless the checkpoint is complete, undamaged, and of so many ranks."""
    ranks = len(_usable(run_dir, step))
    if wrong := _damage(run_dir, step):
        raise _unusable(run_dir, step, wrong)
    if ranks != world_size:
        raise _unusable(run_dir, step, f"it is of {ranks} rank(s), not {world_size}")


def load(run_dir: Path, step: int, rank: int) -> dict[str, Any]:
    """One rank's state as it was saved. Raises UserError where the checkpoint is not complete or its file is not as
    it was written."""
    records, path = _usable(run_dir, step), rank_file(run_dir, step, rank)
    if rank >= len(records):
        raise UserError(f"{path.parent} is of {len(records)} ranks: there is no rank {rank}.")
    if wrong := _compare(path, records[rank]):
        raise _unusable(run_dir, step, wrong)
    with tensorfile.opened(path) as file:
        structure = json.loads(file.get_tensor(STRUCTURE).numpy().tobytes())
        # A mapped tensor would change with the file, and keep it in use.
        return _restored(structure, lambda name: file.get_tensor(name).clone())


def prune(run_dir: Path, keep: int = 1) -> None:
    """Delete all but the newest `keep` complete checkpoints, and incomplete ones older than these. Called after
    `commit`, by the rank that called it."""
    assert keep >= 1
    found = steps(run_dir)
    complete = [step for step in found if (folder(run_dir, step) / "complete.json").is_file()]
    if len(complete) >= keep:
        for step in found:
            if step < complete[-keep]:
                _remove(folder(run_dir, step))


def clear(run_dir: Path) -> None:
    """Delete all checkpoints of a run: it is done."""
    for step in steps(run_dir):
        _remove(folder(run_dir, step))
    shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)


def steps(run_dir: Path) -> list[int]:
    """Steps of all checkpoints, complete or not, ascending."""
    names = [STEP.fullmatch(path.name) for path in (run_dir / "checkpoints").glob("step-*")]
    return sorted(int(name.group(1)) for name in names if name)


def _remove(path: Path) -> None:
    # First of all it stops counting: a removal cut short must not leave what looks complete.
    (path / "complete.json").unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _record(written: tensorfile.Written) -> dict[str, Any]:
    return {"bytes": written.num_bytes, "xxh3_128": written.xxh3_128}


def _complete(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """The ranks' records of complete.json. Raises ValueError saying what is wrong with it."""
    path = folder(run_dir, step) / "complete.json"
    try:
        done = json.loads(path.read_text(encoding="utf-8"))
        ranks = [{"bytes": int(record["bytes"]), "xxh3_128": str(record["xxh3_128"])} for record in done["ranks"]]
        right = done["format"] == FORMAT and done["step"] == step and 0 < len(ranks) == done["world_size"]
    except FileNotFoundError:
        raise ValueError(f"it was not finished (there is no {path})") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error})") from None
    if not right:
        raise ValueError(f"{path} is of another step or format")
    return ranks


def _usable(run_dir: Path, step: int) -> list[dict[str, Any]]:
    try:
        return _complete(run_dir, step)
    except ValueError as error:
        raise _unusable(run_dir, step, str(error)) from None


def _unusable(run_dir: Path, step: int, why: str) -> UserError:
    return UserError(f"the checkpoint of step {step} cannot be used: {why}. Delete {folder(run_dir, step)}.")


def _damage(run_dir: Path, step: int) -> str | None:
    """What is wrong with a checkpoint, None where nothing is."""
    try:
        records = _complete(run_dir, step)
    except ValueError as error:
        return str(error)
    found = (_compare(rank_file(run_dir, step, rank), record) for rank, record in enumerate(records))
    return next((wrong for wrong in found if wrong), None)


def _compare(path: Path, record: Mapping[str, Any]) -> str | None:
    """What is wrong with a rank's file, None where nothing is."""
    try:
        if path.stat().st_size != record["bytes"]:
            return f"{path} has {path.stat().st_size} B, not {record['bytes']} B"
        if _record(tensorfile.hash_file(path)) != record:
            return f"{path} is not as it was written (its hash differs)"
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return None


def _plain(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """`value` as JSON data; its tensors are added to `tensors`, by the place they have in it."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {KIND: "float", "value": repr(value)}
    if isinstance(value, torch.Tensor):
        return {KIND: "tensor", "value": _add(tensors, where, value)}
    if isinstance(value, np.ndarray | np.generic):
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return {KIND: kind, "value": _add(tensors, where, torch.from_numpy(np.array(value, order="C")))}
    if isinstance(value, list | tuple):
        items = [_plain(item, f"{where}/{index}", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {KIND: "tuple", "value": items}
    if isinstance(value, dict):
        pairs = [(key, _plain(item, f"{where}/{key}".lstrip("/"), tensors)) for key, item in value.items()]
        if all(type(key) is str for key in value) and KIND not in value:
            return dict(pairs)
        return {KIND: "dict", "value": [[_plain(key, where, tensors), item] for key, item in pairs]}
    raise TypeError(f"a checkpoint cannot hold {type(value).__name__} (at {where or 'the top'}): it is no plain data")


def _add(tensors: dict[str, torch.Tensor], where: str, tensor: torch.Tensor) -> str:
    name = where
    # Two places read alike where a key holds a slash, or is 1 here and "1" there.
    while name in tensors or name == STRUCTURE:
        name += "'"
    tensors[name] = tensor
    return name


def _restored(data: Any, read: Callable[[str], torch.Tensor]) -> Any:
    """The inverse of `_plain`."""
    if isinstance(data, list):
        return [_restored(item, read) for item in data]
    if not isinstance(data, dict):
        return data
    if KIND not in data:
        return {key: _restored(item, read) for key, item in data.items()}
    kind, value = data[KIND], data["value"]
    if kind == "float":
        return float(value)
    if kind == "tensor":
        return read(value)
    if kind == "array":
        return read(value).numpy()
    if kind == "scalar":
        return read(value).numpy()[()]
    if kind == "tuple":
        return tuple(_restored(item, read) for item in value)
    assert kind == "dict", kind
    return {_restored(key, read): _restored(item, read) for key, item in value}
