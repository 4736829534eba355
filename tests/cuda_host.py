"""The text of the CUDA kernels built for this machine's CPU, where a loop plays the threads, one after the other.

One lane is a whole warp there, so what a warp does together is done by its one thread. The compiler is that of the
`ziglang` package, as a fresh machine may have none.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from thinpipe.harness.compression.kernels import cuda_device

PRELUDE = """
#define __global__
#define __device__
#define __forceinline__ inline
#define LANES 1u
struct Index { unsigned x, y, z; };
static Index blockIdx, blockDim, threadIdx;
struct alignas(16) float4 { float x, y, z, w; };
static inline float4 make_float4(float x, float y, float z, float w) { float4 v = {x, y, z, w}; return v; }
static inline int __float_as_int(float value) { return __builtin_bit_cast(int, value); }
static inline float __int_as_float(int bits) { return __builtin_bit_cast(float, bits); }
template <class T> static inline T atomicMax(T* at, T value) { T old = *at; if (value > old) *at = value; return old; }
static inline int atomicOr(int* at, int value) { int old = *at; *at = old | value; return old; }
static inline int __shfl_xor_sync(unsigned, int value, unsigned) { return value; }
#define rintf __builtin_rintf
#define floorf __builtin_floorf
#define ceilf __builtin_ceilf
"""
RUNNER = """
extern "C" void run_{name}(unsigned grid_x, unsigned block_x, {declared}) {{
    blockDim.x = block_x;
    for (blockIdx.x = 0; blockIdx.x < grid_x; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < block_x; threadIdx.x++) {name}({names});
}}
"""
SIGNATURE = re.compile(r"^KERNEL (\w+)\(([^)]*)\)", re.M)
CTYPES: dict[type, Any] = {np.uint32: ctypes.c_uint32, np.int32: ctypes.c_int32, np.float32: ctypes.c_float}


def kernels() -> dict[str, str]:
    """Name and parameters of each kernel."""
    return dict(SIGNATURE.findall(cuda_device.source()))


def build(folder: Path) -> Path:
    """A shared library with a function run_KERNEL for each kernel; nothing is written outside `folder`."""
    runners = []
    for name, parameters in kernels().items():
        names = ", ".join(re.findall(r"(\w+)\s*(?:,|$)", parameters))
        runners.append(RUNNER.format(name=name, declared=parameters, names=names))
    text, library = folder / "kernels.cpp", folder / "kernels.so"
    text.write_text(PRELUDE + cuda_device.source() + "".join(runners))
    # Without the C library, which the compiler would first have to build. What traps is what a GPU would not do as a
    # CPU does: unaligned access, a shift or a conversion out of range.
    flags = [
        "-shared", "-fPIC", "-nostdlib", "-O1", "-std=c++17", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off",
        "-fno-strict-aliasing", "-fsanitize=undefined,float-cast-overflow", "-fsanitize-trap=all",
        "-Wall", "-Wextra", "-Werror",
    ]  # fmt: skip
    caches = {f"ZIG_{which}_CACHE_DIR": str(folder / which.lower()) for which in ("GLOBAL", "LOCAL")}
    command = [sys.executable, "-m", "ziglang", "cc", *flags, str(text), "-o", str(library)]
    done = subprocess.run(
        command, env={**os.environ, **caches}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return library


class Host:
    """A cuda_device.Launcher on this CPU; checks that arguments are what the kernel declares."""

    lanes = 1

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._parameters = {name: text.split(",") for name, text in kernels().items()}
        self.launched: list[str] = []

    def arrays(self, *tensors: torch.Tensor) -> list[np.ndarray]:
        return [tensor.view(-1).numpy() for tensor in tensors]

    def run(self, kernel: str, threads: int, *arguments: Any) -> None:
        declared = self._parameters[kernel]
        assert len(declared) == len(arguments), kernel
        given: list[Any] = []
        for parameter, argument in zip(declared, arguments, strict=True):
            if isinstance(argument, np.ndarray):
                assert "*" in parameter, (kernel, parameter)
                given.append(ctypes.c_void_p(argument.ctypes.data))
            else:
                wanted = {"u32": np.uint32, "int": np.int32, "float": np.float32}[parameter.split()[0]]
                assert type(argument) is wanted, (kernel, parameter)
                given.append(CTYPES[wanted](argument.item()))
        self.launched.append(kernel)
        blocks = -(-threads // cuda_device.THREADS)
        self._library[f"run_{kernel}"](ctypes.c_uint(blocks), ctypes.c_uint(cuda_device.THREADS), *given)

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[Host]:
        """What stands in for cuda_device.on."""
        assert device.type == "cpu"
        yield self
