"""CuPy's side of the GPU kernels: compile them for a device, hand tensors over, launch on torch's current stream.

CuPy is imported when the first CUDA tensor arrives, not before. The text goes through NVRTC here and not through
RawModule, which appends `-ftz=true` to any options: subnormal numbers would become zero, and bytes differ from the
CPU's. Tensors are shared through DLPack, nothing is copied.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from thinpipe.harness.errors import UserError

FILES = ("common.cu", "fixpoint.cu", "blocks.cu")
#: Each operation rounded by itself, as IEEE says and the reference does: no contraction to fused multiply-add, exact
#: division, subnormal numbers kept.
OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
THREADS = 256


def source() -> str:
    """The text of every kernel: one translation unit, with no #include."""
    return "\n".join((Path(__file__).parent / name).read_text() for name in FILES)


class Launcher(Protocol):
    """What cuda.py needs of a device; tests have one that runs the same text on the CPU."""

    #: Threads of a warp.
    lanes: int

    def arrays(self, *tensors: torch.Tensor) -> list[Any]:
        """Contiguous tensors as flat arrays of the device, sharing their memory."""

    def run(self, kernel: str, threads: int, *arguments: Any) -> None:
        """Launch `threads` threads, rounded up to blocks of THREADS; arguments are arrays and numpy scalars."""


class _Gpu:
    lanes = 32

    def __init__(self, cupy: Any, module: Any) -> None:
        self._cupy, self._module = cupy, module

    def arrays(self, *tensors: torch.Tensor) -> list[Any]:
        return [self._cupy.from_dlpack(tensor.view(-1)) for tensor in tensors]

    def run(self, kernel: str, threads: int, *arguments: Any) -> None:
        self._module.get_function(kernel)((-(-threads // THREADS),), (THREADS,), arguments)


@contextlib.contextmanager
def on(device: torch.device) -> Iterator[Launcher]:
    """Launch on `device` and torch's current stream of it. Raises UserError where it is no CUDA device, or CuPy is
    missing."""
    if device.type != "cuda":
        raise UserError(f"a tensor on {device} cannot be compressed there: move it to the CPU or to a CUDA device")
    cupy = _cupy()
    index = torch.cuda.current_device() if device.index is None else device.index
    stream = torch.cuda.current_stream(index)
    with cupy.cuda.Device(index), _as_cupy(cupy, stream, index):
        yield _Gpu(cupy, _module(index))


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        major = (torch.version.cuda or "13").split(".")[0]
        raise UserError(
            f"compressing a CUDA tensor needs CuPy, which cannot be imported ({error}): "
            f"pip install 'thinpipe[cuda{major}]'"
        ) from error
    return cupy


def _as_cupy(cupy: Any, stream: Any, index: int) -> Any:
    # The first is deprecated where there is the second, which CuPy 13 lacks.
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(stream)
    return cupy.cuda.ExternalStream(stream.cuda_stream, index)


@functools.lru_cache(maxsize=64)
def _module(index: int) -> Any:
    """The kernels on device `index`, which is the current one; takes a second or more, once a process."""
    cupy = _cupy()
    module = cupy.cuda.Module()
    module.load(compiled(cupy.cuda.nvrtc, cupy.cuda.Device(index).compute_capability))
    return module


def compiled(nvrtc: Any, capability: str) -> bytes:
    """Machine code for a compute capability ("90") by cupy.cuda.nvrtc."""
    program = nvrtc.createProgram(source(), "thinpipe.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*OPTIONS, f"--gpu-architecture=sm_{capability}"))
        return nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise UserError(
            f"NVRTC cannot compile the kernels for sm_{capability} ({error}); is CUDA older?\n{log}"
        ) from error
    finally:
        nvrtc.destroyProgram(program)


def scalars(*values: int) -> list[np.uint32]:
    """Whole numbers as kernels take them."""
    return [np.uint32(value) for value in values]
