"""A stage's own tensors from a checkpoint's safetensors files, each read straight into the memory it is used from.

The files are parsed here: mapping one into memory would count a tensor twice, once as the file's page and once as the
parameter, and a rank is to need little more than its own share. Only files that hold a wanted tensor are opened.

    file = 8 bytes: length of the header, little-endian | header: JSON, name -> {dtype, shape, data_offsets} | tensors
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinpipe.harness.errors import UserError
from thinpipe.harness.models.base import WEIGHTS, checkpoint_files, weight_map
from thinpipe.harness.partitioned import own_map

# The format's own limit; a longer header is a damaged length.
LONGEST_HEADER = 100_000_000
# Bytes converted at a time, where the stored type is another.
PIECE = 1 << 18
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INTEGERS = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
AGAIN = "Save the checkpoint again."


@dataclass(frozen=True)
class Entry:
    """A tensor in a file. start: of its bytes, from the file's beginning."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    def __str__(self) -> str:
        return f"{self.name} of {self.path}"


@dataclass(frozen=True)
class Header:
    """What a file says it holds. size: of the whole file, data: where its tensors begin; both in bytes."""

    path: Path
    tensors: Mapping[str, Any]
    data: int
    size: int

    @classmethod
    def read(cls, path: Path) -> Header:
        """Raises UserError where the file has no header that can be read."""
        with _open(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, LONGEST_HEADER):
                raise UserError(f"{path} cannot be read as safetensors: it is cut off, or something else. {AGAIN}")
            text = bytearray(length)
            _fill(file, memoryview(text), str(path))
        try:
            tensors = json.loads(text)
        except (ValueError, RecursionError):
            tensors = None
        if not isinstance(tensors, dict):
            raise UserError(f"{path} cannot be read as safetensors: its header is damaged. {AGAIN}")
        tensors.pop("__metadata__", None)
        return cls(path, tensors, 8 + length, size)

    def entry(self, name: str) -> Entry:
        """One of its tensors, whose place is checked against its shape and the file's size. Raises UserError."""
        what = f"{name} of {self.path}"
        if name not in self.tensors:
            raise UserError(f"{what} is named by the index, but not in the file. {AGAIN}")
        try:
            said = self.tensors[name]
            text, shape, (start, stop) = said["dtype"], tuple(said["shape"]), said["data_offsets"]
            plain = isinstance(text, str) and all(type(n) is int and n >= 0 for n in (*shape, start, stop))
        except (TypeError, KeyError, ValueError):
            plain = False
        if not plain:
            raise UserError(f"{what} cannot be read: its entry in the header is damaged. {AGAIN}")
        if text not in FLOATS and text not in INTEGERS:
            raise UserError(f"{what} is {text}: quantised checkpoints are not supported, save it as floats.")
        dtype = FLOATS.get(text) or INTEGERS[text]
        if stop - start != math.prod(shape) * dtype.itemsize or self.data + stop > self.size:
            raise UserError(f"{what} cannot be read: it does not lie in the file as the header says. {AGAIN}")
        return Entry(self.path, name, dtype, shape, self.data + start)


def verify(directory: Path) -> None:
    """Raise UserError where a file of a checkpoint is cut off or damaged, from the headers alone."""
    for path in checkpoint_files(directory):
        header = Header.read(path)
        for name in header.tensors:
            header.entry(name)


def load(
    module: nn.Module,
    directory: Path,
    stored_names: Callable[[str], tuple[str, ...]],
    *,
    optional: Collection[str] = (),
) -> frozenset[str]:
    """Fill the parameters and persistent buffers of `module` from a checkpoint, in place; the optional ones it lacks.

    stored_names: a name in the module -> what a checkpoint may call it; the first that is there counts.
    optional: names that may be absent, and then stay as they are (a new head); a stored one must still fit.
    Stored float types become the module's. Raises UserError for tensors that are absent, of another shape or
    quantised, and files that are truncated or damaged.
    """
    wanted = module.state_dict()
    candidates = {name: stored_names(name) for name in wanted}
    # Of a folder cut into stages the stage's own file holds all it needs; the index names each tensor once only.
    index = own_map(directory, [names for name, names in candidates.items() if name not in optional])
    places, files = _places(directory, candidates, index or weight_map(directory))
    missing = [name for name in wanted if name not in places]
    if required := [name for name in missing if name not in optional]:
        shown = ", ".join(required[:5]) + (", ..." if len(required) > 5 else "")
        raise UserError(
            f"model.checkpoint {directory} lacks {len(required)} tensor(s) of this model: {shown}. Choose a checkpoint "
            "of this very model, or other sizes."
        )
    for path, header in files.items():
        with _open(path) as file:
            for name, (place, stored) in places.items():
                if place == path:
                    _read(file, header.entry(stored), wanted[name])
    return frozenset(missing)


def _places(
    directory: Path, candidates: Mapping[str, tuple[str, ...]], index: Mapping[str, str] | None
) -> tuple[dict[str, tuple[Path, str]], dict[Path, Header]]:
    """Where each wanted tensor is: name -> (file, its name there); and the headers of those files."""
    headers: dict[Path, Header] = {}
    if index is None:
        headers[directory / WEIGHTS] = single = Header.read(directory / WEIGHTS)
        index = dict.fromkeys(single.tensors, WEIGHTS)
    places: dict[str, tuple[Path, str]] = {}
    for name, stored_names in candidates.items():
        stored = next((candidate for candidate in stored_names if candidate in index), None)
        if stored is not None:
            path = directory / index[stored]
            places[name] = (path, stored)
            if path not in headers:
                headers[path] = Header.read(path)
    return places, headers


def _open(path: Path) -> FileIO:
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None


def _fill(file: FileIO, memory: memoryview, what: str) -> None:
    """Read until `memory` is full: one read may give less, and never gives more than 2 GiB."""
    done = 0
    while done < len(memory):
        count = file.readinto(memory[done:])
        if not count:
            raise UserError(f"{what} cannot be read: the file ends too early. {AGAIN}")
        done += count


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data


@torch.no_grad()
def _read(file: FileIO, stored: Entry, target: torch.Tensor) -> None:
    """Fill `target`, a contiguous tensor on the CPU, with a stored one of the same shape and kind of type."""
    if stored.shape != tuple(target.shape):
        raise UserError(f"{stored} has shape {stored.shape}, this model needs {tuple(target.shape)}.")
    if stored.dtype.is_floating_point != target.dtype.is_floating_point:
        raise UserError(f"{stored} is {stored.dtype}: quantised checkpoints are not supported, save it as floats.")
    flat = target.view(-1)
    file.seek(stored.start)
    if stored.dtype == target.dtype:
        _fill(file, _bytes(flat), str(stored))
        return
    piece = torch.empty(PIECE // stored.dtype.itemsize, dtype=stored.dtype)
    for part in flat.split(len(piece)):
        _fill(file, _bytes(piece[: len(part)]), str(stored))
        part.copy_(piece[: len(part)])
