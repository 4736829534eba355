"""The CUDA kernels where there is no GPU: NVRTC compiles them, and their text, built for this CPU, gives the bytes of
the reference. What only a GPU can show (launches, streams, DLPack) is in test_cuda_kernels.py."""

from __future__ import annotations

import ctypes
import importlib.util
import math
import random
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cuda_host
import pytest
import torch

from thinpipe.harness.compression.kernels import cuda, cuda_blocks, cuda_device, reference, reference_blocks
from thinpipe.harness.compression.kernels.layout import Grid, layout
from thinpipe.harness.compression.kernels.reference_blocks import Blocks, MinMax
from thinpipe.harness.errors import CodecError, DivergedError, UserError

# Odd sizes and tails, single elements, runs and columns longer than a thread's share, 1 to 5 dimensions.
SHAPES = [
    (0, 4, 8), (1,), (7,), (3, 7), (2, 5, 9), (1, 1, 2049), (5, 30, 13), (4, 16, 32), (2, 3, 5, 7), (3, 2, 1, 1),
    (2, 3, 25, 25), (2, 2, 3, 2, 5),
]  # fmt: skip
SCALES = ["channel", "token", "tensor"]
GRIDS = {
    "nearest": Grid(1),
    "stochastic": Grid(1, stochastic=True),
    "symmetric": Grid(1, symmetric=True),
    "symmetric, stochastic": Grid(1, symmetric=True, stochastic=True),
    "published": Grid(1, published=True, eps=1e-6),
    "eps": Grid(1, eps=1e-3),
}
# At 1 bit the symmetric grid's only level would be 0: the grammar refuses it.
EVERY = [(k, s, b) for k in GRIDS for s in SCALES for b in range(1, 9) if b > 1 or not GRIDS[k].symmetric]
KEY, GUARD = 0xFEDCBA9876543210, -1.2345e38


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cuda_host.build(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def host(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[cuda_host.Host]:
    """cuda.py works on this CPU."""
    device = cuda_host.Host(library)
    monkeypatch.setattr(cuda_device, "on", device.on)
    return device


def grid_of(kind: str, bits: int) -> Grid:
    base = GRIDS[kind]
    return Grid(bits, base.symmetric, base.stochastic, base.published, base.eps)


def tensor(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Normal values of very different size by channel, with zeros, ties and one outlier."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if x.numel() > 4:
        x *= torch.logspace(-6, 0, shape[-1])
        flat = x.view(-1)
        flat[:: max(2, x.numel() // 3)] = 0.0
        flat[x.numel() // 2] *= 1e4
        flat[1] = -flat[3]
    return x


def both(x: torch.Tensor, scale: str, grid: Grid, key: int = KEY, offset: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """(payload of the kernels, of the reference); the first written between guard bytes, at some byte offset."""
    where = layout(tuple(x.shape), scale)
    size = grid.num_bytes(where)
    room, plain = torch.full((size + 16,), 0xAB, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    ours = room[offset : offset + size]
    assert cuda.encode(x, where, grid, key, ours) == size
    assert reference.encode(x, where, grid, key, plain) == size
    assert bool((room[:offset] == 0xAB).all() and (room[offset + size :] == 0xAB).all()), "wrote beside the payload"
    return ours, plain


@pytest.mark.parametrize(("kind", "scale", "bits"), EVERY)
def test_bytes_and_values_are_those_of_the_reference(host: cuda_host.Host, kind: str, scale: str, bits: int) -> None:
    grid = grid_of(kind, bits)
    for number, shape in enumerate(SHAPES):
        x = tensor(shape, seed=len(shape) * bits)
        ours, plain = both(x, scale, grid, offset=number % 8)
        assert torch.equal(ours, plain), shape
        room, expected = torch.full((x.numel() + 8,), GUARD), torch.zeros(shape)
        out = room[number % 4 : number % 4 + x.numel()].view(shape)
        assert cuda.decode(ours, layout(shape, scale), grid, out) is out
        reference.decode(plain, layout(shape, scale), grid, expected)
        assert torch.equal(out.view(torch.int32), expected.view(torch.int32)), shape
        assert int((room == GUARD).sum()) == 8, "wrote beside its tensor"


def test_random_shapes_scales_and_keys(host: cuda_host.Host) -> None:
    pick = random.Random(5)
    for _ in range(80):
        shape = tuple(pick.choice([1, 2, 3, 5, 8, 17, 33]) for _ in range(pick.randint(1, 5)))
        grid = grid_of(pick.choice(list(GRIDS)), pick.randint(2, 8))
        x, scale = tensor(shape, pick.getrandbits(30)), pick.choice(SCALES)
        ours, plain = both(x, scale, grid, pick.getrandbits(64), pick.randrange(16))
        assert torch.equal(ours, plain), (shape, scale, grid)


@pytest.mark.parametrize("published", [False, True])
def test_scales_of_every_exponent(host: cuda_host.Host, published: bool) -> None:
    """Each channel has one element, so the head is the scale rule applied to |x|: subnormals, ties and ends too."""
    patterns = torch.randint(0, 0x7F800000, (60_000,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    edges = torch.arange(0, 0x7F80, dtype=torch.int32) << 16
    half_ties = torch.arange(0x0E00, 0x47800, dtype=torch.int32) << 12
    values = torch.cat([patterns, edges, edges + 1, edges + 0x7FFF, half_ties]).view(torch.float32)
    values = values[values < 65519.0] if published else values
    grid = Grid(4, published=published, eps=1e-6 if published else 0.0)
    ours, plain = both(values.view(1, -1), "channel", grid)
    assert torch.equal(ours, plain)
    out, expected = torch.zeros(1, values.numel()), torch.zeros(1, values.numel())
    cuda.decode(ours, layout((1, values.numel()), "channel"), grid, out)
    reference.decode(plain, layout((1, values.numel()), "channel"), grid, expected)
    assert torch.equal(out, expected)


def test_subnormal_elements_beside_a_tiny_scale(host: cuda_host.Host) -> None:
    """They reach half a level and more at 8 bits, which a device that flushed them to zero would miss."""
    x = torch.linspace(0, 2.0**-118, 3001).view(1, 1, -1)
    ours, plain = both(x, "tensor", Grid(8))
    assert torch.equal(ours, plain)
    small = x.view(-1)[x.view(-1) < torch.finfo(torch.float32).tiny]
    codes, _ = reference.open_payload(ours, layout((1, 1, 3001), "tensor"), Grid(8))
    assert small.numel() > 5
    assert bool(torch.equal(codes[: small.numel()], torch.full_like(small, 128, dtype=torch.uint8)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", ["nearest", "stochastic", "published"])
def test_a_non_finite_value_anywhere_is_found(host: cuda_host.Host, bad: float, scale: str, kind: str) -> None:
    shape, grid = (3, 5, 67), grid_of(kind, 4)
    where = layout(shape, scale)
    for at in (0, 1, 66, 67, 500, 3 * 5 * 67 - 1):
        x = torch.randn(shape)
        x.view(-1)[at] = bad
        with pytest.raises(DivergedError):
            cuda.encode(x, where, grid, 0, torch.zeros(grid.num_bytes(where), dtype=torch.uint8))


def test_a_scale_beyond_fp16_is_refused(host: cuda_host.Host) -> None:
    x, grid = torch.ones(2, 3, 5), grid_of("published", 4)
    where = layout((2, 3, 5), "channel")
    out = torch.zeros(grid.num_bytes(where), dtype=torch.uint8)
    for value, fine in ((65519.0, True), (65520.0, False), (1e30, False)):
        x[1, 2, 3] = value
        if fine:
            assert torch.equal(*both(x, "channel", grid))
        else:
            with pytest.raises(CodecError, match="made a non-finite value"):
                cuda.encode(x, where, grid, 0, out)


@pytest.mark.parametrize("kind", ["nearest", "published"])
def test_a_malformed_payload_is_refused(host: cuda_host.Host, kind: str) -> None:
    shape, grid = (2, 3, 5), grid_of(kind, 3)
    where = layout(shape, "channel")
    good = bytes(both(torch.randn(shape), "channel", grid)[0].tolist())
    high = {"nearest": 0x7F80, "published": 0x7C00}[kind]
    variants = {
        "short": good[:-1],
        "long": good + b"\0",
        "infinite scale": high.to_bytes(2, "little") + good[2:],
        "NaN scale": good[:8] + (high + 1).to_bytes(2, "little") + good[10:],
        "negative scale": b"\x00\x80" + good[2:],
        **{f"padding bit {i}": good[:-1] + bytes([good[-1] | 1 << i]) for i in range(-30 * 3 % 8)},
    }
    for name, bad in variants.items():
        payload = torch.frombuffer(bytearray(bad), dtype=torch.uint8)
        with pytest.raises(CodecError, match="malformed"):
            cuda.decode(payload, where, grid, torch.zeros(shape))
        assert name


def test_the_symmetric_grid_has_no_lowest_code(host: cuda_host.Host) -> None:
    where, grid = layout((1, 1, 5000), "tensor"), Grid(4, symmetric=True)
    bad, _ = both(torch.randn(1, 1, 5000), "tensor", grid)
    bad[-7] &= 0x0F
    with pytest.raises(CodecError, match="malformed"):
        cuda.decode(bad, where, grid, torch.zeros(1, 1, 5000))


def test_more_elements_than_32_bits_count_is_refused(host: cuda_host.Host) -> None:
    where = layout((2**20, 2**11), "tensor")
    with pytest.raises(UserError, match="at most"):
        cuda.encode(torch.zeros(1), where, Grid(4), 0, torch.zeros(1, dtype=torch.uint8))


# ---- block quantisers -------------------------------------------------------------------------------------------

BLOCKS = [
    *(Blocks(bits, block, "bf16") for bits, block in enumerate((32, 64, 128, 8, 24, 64, 512), start=2)),
    *(Blocks(bits, 64, scale) for bits, scale in ((4, "fp32"), (5, "fp16"), (6, "e8m0"))),
    *(Blocks(bits, 32, scale, affine=True) for bits, scale in ((2, "bf16"), (3, "fp16"), (8, "fp32"), (4, "e8m0"))),
    Blocks(2, 64, "bf16", stochastic=True),
    Blocks(4, 128, "fp16", stochastic=True),
    Blocks(3, 32, "bf16", affine=True, stochastic=True),
    Blocks(4, 64, "bf16", "nf4"),
    Blocks(4, 32, "e8m0", "e2m1"),
    Blocks(8, 128, "bf16", "e4m3"),
    Blocks(8, 64, "fp32", "e4m3"),
]  # fmt: skip
RANGES = [*(MinMax(bits) for bits in range(1, 9)), MinMax(3, 1), MinMax(2, 7), MinMax(5, 32), MinMax(4, 2048)]
SIZES = [0, 1, 8, 65, 511, 1031]
How = Blocks | MinMax


def named(how: How) -> str:
    return "-".join(str(value) for value in vars(how).values())


def encode_both(x: torch.Tensor, how: How, key: int = KEY, offset: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """(payload of the kernels, of the reference); the first written between guard bytes, at some byte offset."""
    size = how.num_bytes(x.numel())
    room, plain = torch.full((size + 16,), 0xAB, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    ours = room[offset : offset + size]
    if isinstance(how, Blocks):
        lengths = cuda_blocks.encode(x, how, key, ours), reference_blocks.encode(x, how, key, plain)
    else:
        lengths = cuda_blocks.encode_minmax(x, how, ours), reference_blocks.encode_minmax(x, how, plain)
    assert lengths == (size, size)
    assert bool((room[:offset] == 0xAB).all() and (room[offset + size :] == 0xAB).all()), "wrote beside the payload"
    return ours, plain


def decode_both(payload: torch.Tensor, how: How, shape: tuple[int, ...], offset: int = 0) -> list[torch.Tensor]:
    """The values, or nothing where a decoder raised CodecError: (of the kernels, of the reference)."""
    count = math.prod(shape)
    room, found = torch.full((count + 8,), GUARD), []
    outs = [room[offset : offset + count].view(shape), torch.zeros(shape)]
    pairs = (cuda_blocks, reference_blocks)
    for module, out in zip(pairs, outs, strict=True):
        decode: Any = module.decode if isinstance(how, Blocks) else module.decode_minmax
        try:
            assert decode(payload, how, out) is out
            found.append(out.view(torch.int32))
        except CodecError:
            found.append(torch.zeros(0))
    assert bool((room[:offset] == GUARD).all() and (room[offset + count :] == GUARD).all()), "wrote beside its tensor"
    return found


def inputs(size: int, seed: int) -> list[torch.Tensor]:
    """Ordinary values of very different size, and what is hard: one sign, a constant, signed zeros, both ends of
    float32's range, subnormal numbers."""
    x = tensor((size,), seed)
    tiny = x * 2.0**-128
    ends = torch.where(x > 0, 3.0e38, -3.0e38) * x.sign().abs()
    return [x, x.abs(), -x.abs(), torch.full((size,), 0.3), -torch.zeros(size), ends, tiny, x * 2.0**-117]


@pytest.mark.parametrize("how", [*BLOCKS, *RANGES], ids=named)
def test_blocks_are_those_of_the_reference(host: cuda_host.Host, how: How) -> None:
    """Where the reference refuses a scale, which only these two kinds may make it do, the kernels say the same."""
    may_refuse, done = isinstance(how, Blocks) and how.scale in ("fp16", "e8m0"), 0
    for number, size in enumerate(SIZES):
        for x in inputs(size, number):
            try:
                ours, plain = encode_both(x, how, offset=number % 8)
            except CodecError as error:
                assert may_refuse
                with pytest.raises(CodecError, match=re.escape(str(error))):
                    reference_blocks.encode(x, how, KEY, torch.zeros(how.num_bytes(size), dtype=torch.uint8))
                continue
            assert torch.equal(ours, plain), (size, x)
            values, expected = decode_both(ours, how, (size,), number % 4)
            assert torch.equal(values, expected), (size, x)
            done += 1
    assert done >= len(SIZES) * 7


@pytest.mark.parametrize("how", [*BLOCKS, *RANGES], ids=named)
def test_any_bytes_are_decoded_alike_or_refused_alike(host: cuda_host.Host, how: How) -> None:
    generator, refused = torch.Generator().manual_seed(1), 0
    for _ in range(60):
        shape = (int(torch.randint(1, 200, (), generator=generator)),)
        payload = torch.randint(0, 256, (how.num_bytes(shape[0]),), dtype=torch.uint8, generator=generator)
        values, expected = decode_both(payload, how, shape)
        assert torch.equal(values, expected), shape
        refused += values.numel() == 0
    assert refused
    assert [found.numel() for found in decode_both(payload[1:], how, shape)] == [0, 0]


@pytest.mark.parametrize("how", [*BLOCKS, *RANGES], ids=named)
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_value_in_any_block_is_found(host: cuda_host.Host, how: How, bad: float) -> None:
    for at in (0, 1, 63, 64, 300, 600):
        x = torch.randn(601)
        x[at] = bad
        with pytest.raises(DivergedError):
            encode_both(x, how)


@pytest.mark.parametrize("scale", ["fp32", "bf16", "fp16", "e8m0"])
@pytest.mark.parametrize("element", ["uniform", "e4m3"])
def test_block_scales_of_every_exponent(host: cuda_host.Host, scale: str, element: str) -> None:
    """One value in each block, so the head is the scale rule applied to it: subnormals, ties and ends too."""
    patterns = torch.randint(0, 0x7F800000, (3_000,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    edges = torch.arange(0, 0x7F80, 16, dtype=torch.int32) << 16
    halves = torch.arange(0x0E00, 0x47800, 60, dtype=torch.int32) << 12
    values = torch.cat([patterns, edges, edges + 1, edges + 0x7FFF, halves, halves + 1]).view(torch.float32)
    values = values[values <= reference_blocks.LARGEST_SPAN.get(scale, reference_blocks.FLOAT_MAX)]
    x = torch.zeros(values.numel(), 8)
    x[:, 3] = values
    ours, plain = encode_both(x, Blocks(8, 8, scale, element))
    assert torch.equal(ours, plain)
    assert torch.equal(*decode_both(ours, Blocks(8, 8, scale, element), tuple(x.shape)))


@pytest.mark.parametrize("how", BLOCKS, ids=named)
def test_ties_between_levels(host: cuda_host.Host, how: Blocks) -> None:
    """A scale that makes the factor 1 where it can be kept, every level, every halfway point and its neighbours."""
    if how.element == "uniform":
        points = torch.arange(-how.top, how.top + 1, 0.5)
    else:
        levels = torch.tensor(reference_blocks.levels(how.element)).nan_to_num().unique()
        points = torch.cat([levels, (levels[1:] + levels[:-1]) * 0.5])
    near = [points, *(points.nextafter(torch.tensor(way)) for way in (-1e9, 1e9))]
    values = torch.cat(near).clamp(points.min(), points.max())
    x = torch.zeros(-(-values.numel() // (how.block - 2)), how.block)
    x[:, 0], x[:, 1] = points.max(), points.min()
    padded = torch.nn.functional.pad(values, (0, x[:, 2:].numel() - values.numel()))
    x[:, 2:] = padded.view(len(x), -1)
    ours, plain = encode_both(x, how)
    assert torch.equal(ours, plain)


def test_values_beyond_float32_are_its_largest(host: cuda_host.Host) -> None:
    """No encoder writes such a payload; what is decoded from it is finite nevertheless."""
    how = Blocks(8, 32, "fp32", affine=True)
    head = torch.full((1,), reference_blocks.FLOAT_MAX).view(torch.uint8)
    for zero, code in ((0, 255), (255, 0)):
        payload = torch.cat([head, torch.tensor([zero] + 32 * [code], dtype=torch.uint8)])
        values, expected = decode_both(payload, how, (32,))
        assert torch.equal(values, expected)
        assert bool((values.view(torch.float32).abs() == reference_blocks.FLOAT_MAX).all())


def test_every_kernel_runs_here(host: cuda_host.Host) -> None:
    """None is left that only a GPU would run."""
    for shape, scale in (((2, 3, 8), "channel"), ((2, 3, 8), "token")):
        payload, _ = both(torch.randn(shape), scale, Grid(4))
        cuda.decode(payload, layout(shape, scale), Grid(4), torch.zeros(shape))
    for how in (BLOCKS[0], RANGES[0]):
        decode_both(encode_both(torch.randn(40), how)[0], how, (40,))
    assert set(host.launched) == set(cuda_host.kernels())
    assert cuda_device.source().count("\nKERNEL ") == len(cuda_host.kernels()), "all signatures are read"


def test_every_kernel_file_is_compiled_and_travels_in_a_wheel() -> None:
    folder = Path(cuda_device.__file__).parent
    assert {path.name for path in folder.glob("*.cu")} == set(cuda_device.FILES)
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"]["thinpipe.harness.compression.kernels"] == ["*.cu"]


# ---- NVRTC ------------------------------------------------------------------------------------------------------

NOT_ROUNDED = r"\b(fma|mad)(\.\w+)*\.f32|\.approx|\bdiv\.full"


class Nvrtc:
    """NVIDIA's compiler out of its wheel; it needs neither a driver nor a GPU."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("nvidia")
        assert spec is not None
        assert spec.submodule_search_locations is not None
        found = [p for root in spec.submodule_search_locations for p in Path(root).glob("*/lib/libnvrtc.so.*")]
        assert found, "the dev extra installs nvidia-cuda-nvrtc"
        self.library = ctypes.CDLL(str(found[0]))

    def compile(self, text: str, *options: str) -> tuple[int, str, str]:
        """(status, log, PTX)."""
        program = ctypes.c_void_p()
        assert self.library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"thinpipe.cu", 0, None, None) == 0
        try:
            array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            status = self.library.nvrtcCompileProgram(program, len(options), array)
            return status, self._text(program, "ProgramLog"), self._text(program, "PTX") if status == 0 else ""
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, what: str) -> str:
        size = ctypes.c_size_t()
        assert self.library[f"nvrtcGet{what}Size"](program, ctypes.byref(size)) == 0
        buffer = ctypes.create_string_buffer(size.value)
        assert self.library[f"nvrtcGet{what}"](program, buffer) == 0
        return buffer.value.decode()


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    return Nvrtc()


@pytest.mark.parametrize("architecture", ["compute_80", "compute_90"])
def test_nvrtc_compiles_every_kernel_and_rounds_each_operation(nvrtc: Nvrtc, architecture: str) -> None:
    status, log, ptx = nvrtc.compile(cuda_device.source(), *cuda_device.OPTIONS, f"--gpu-architecture={architecture}")
    assert status == 0, log
    assert log.strip() == "", "no warnings"
    entries = set(re.findall(r"\.entry (\w+)\(", ptx))
    assert entries == set(cuda_host.kernels())
    assert ".ftz" not in ptx, "subnormal numbers are kept"
    assert not re.search(NOT_ROUNDED, ptx), "no contraction, no approximation"
    assert "div.rn.f32" in ptx


def test_the_check_of_ptx_see_what_they_are_for(nvrtc: Nvrtc) -> None:
    fast = ("--std=c++17", "--use_fast_math", "--gpu-architecture=compute_90")
    text = 'extern "C" __global__ void f(float* x) { x[0] = x[1] / x[2] + x[3] * x[4]; }'
    status, _, ptx = nvrtc.compile(text, *fast)
    assert status == 0
    assert ".ftz" in ptx
    assert re.search(NOT_ROUNDED, ptx)
    status, log, _ = nvrtc.compile("KERNEL", "--gpu-architecture=compute_90")
    assert status != 0
    assert "error" in log


# ---- where CuPy is missing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "extra"), [("12.8", "cuda12"), ("13.0", "cuda13")])
def test_without_cupy_the_extra_is_named(version: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(torch.version, "cuda", version)
    with pytest.raises(UserError, match=rf"thinpipe\[{extra}\]"), cuda_device.on(torch.device("cuda", 0)):
        pass


def test_a_compiler_that_refuses_is_quoted() -> None:
    class Refused(Exception):
        pass

    def refuse(program: int, options: tuple[str, ...]) -> None:
        assert options == (*cuda_device.OPTIONS, "--gpu-architecture=sm_90")
        raise Refused("invalid value")

    destroyed: list[int] = []
    old = SimpleNamespace(
        NVRTCError=Refused,
        createProgram=lambda text, name, headers, names: 7,
        compileProgram=refuse,
        getProgramLog=lambda program: "sm_90 is unknown",
        destroyProgram=destroyed.append,
    )
    with pytest.raises(UserError, match="sm_90 is unknown"):
        cuda_device.compiled(old, "90")
    assert destroyed == [7]
