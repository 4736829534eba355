"""safetensors files, written tensor by tensor: one tensor is in memory at a time, and the file is whole or not there.

The format (github.com/huggingface/safetensors): 8 bytes little-endian length of the header, the header (JSON: name ->
dtype, shape, where its bytes are), then the tensors' bytes with no gap. Any reader of safetensors reads these files.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from thinpipe.harness.errors import UserError
from thinpipe.harness.folders import sync

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {code: dtype for dtype, code in CODES.items()}
# A full disk, an exceeded quota, or a file larger than the user's limit.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Layout:
    """dtype and shape of a tensor that is yet to be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Written:
    """num_bytes: of the whole file. xxh3_128: hash of its bytes, 32 hex digits."""

    num_bytes: int
    xxh3_128: str


def layout(tensor: torch.Tensor) -> Layout:
    return Layout(tensor.dtype, tuple(tensor.shape))


def write(path: Path, layouts: Mapping[str, Layout], read: Callable[[str], torch.Tensor]) -> Written:
    """Write the tensors of `layouts` to `path`, asking `read` for each by name. Synced, by atomic rename.

    Raises UserError where the disk is full; then, and after a kill at any moment, `path` is as it was before.
    """
    # Falling sizes of an element keep every tensor aligned to its own.
    names = sorted(layouts, key=lambda name: (-layouts[name].dtype.itemsize, name))
    temporary = path.with_name(f".{path.name}.partial")
    digest, total = xxhash.xxh3_128(), 0
    with full_disk_explained(path):
        try:
            with temporary.open("wb") as file:
                for piece in _pieces(names, layouts, read):
                    file.write(piece)
                    digest.update(piece)
                    total += len(piece)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        sync(path.parent)
    return Written(total, digest.hexdigest())


def _pieces(
    names: list[str], layouts: Mapping[str, Layout], read: Callable[[str], torch.Tensor]
) -> Iterator[memoryview]:
    """The bytes of the file: its header, then each tensor."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in names:
        stop = start + layouts[name].num_bytes
        code = CODES[layouts[name].dtype]
        header[name] = {"dtype": code, "shape": list(layouts[name].shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in names:
        tensor = read(name)
        assert layout(tensor) == layouts[name], f"{name} is {layout(tensor)}, announced was {layouts[name]}"
        flat = tensor.detach().cpu().contiguous().view(-1)
        yield memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def hash_file(path: Path) -> Written:
    """Size and hash of a file, as `write` gave them. Raises OSError."""
    digest, total = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
            total += len(piece)
    return Written(total, digest.hexdigest())


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """safetensors' handle of a file; UserError where it is missing, damaged or cut short."""
    try:
        handle = safe_open(path, framework="pt")
    except FileNotFoundError:
        raise UserError(f"there is no {path}.") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read as safetensors: {error}. Write it again.") from None
    with handle as file:
        yield file


def layouts_of(path: Path) -> dict[str, Layout]:
    """What a file holds, read from its header alone; UserError as `opened`."""
    with opened(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        found = {name: (piece.get_dtype(), tuple(piece.get_shape())) for name, piece in slices.items()}
    if unknown := sorted({code for code, _ in found.values()} - set(DTYPES)):
        raise UserError(f"{path} holds tensors of type {unknown[0]}, which is not supported: save it as floats.")
    return {name: Layout(DTYPES[code], shape) for name, (code, shape) in found.items()}


@contextlib.contextmanager
def full_disk_explained(path: Path) -> Iterator[None]:
    """Turn `no space left` into a message that says where, and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise UserError(
            f"{path} was not written: {error.strerror}. What was there before is untouched; free some space "
            "(or raise the limit), then try again."
        ) from None
