"""The fused CPU kernels give the bytes, values and errors of the plain torch reference, bit for bit."""

from __future__ import annotations

import importlib.util
import itertools
import random

import numba
import numpy as np
import pytest
import torch

from thinpipe.harness.compression.kernels import cpu, fused, reference
from thinpipe.harness.compression.kernels.layout import SAFE, Grid, layout
from thinpipe.harness.compression.rows import CASTS
from thinpipe.harness.errors import CodecError, DivergedError

# Odd sizes and tails, single elements, several blocks, inner axes longer than a block, 1 to 5 dimensions.
SHAPES = [
    (0, 4, 8), (3, 0, 5), (1,), (7,), (1, 1, 1), (3, 7), (2, 5, 9), (1, 1, 4097), (3, 2, 2049), (5, 300, 13),
    (4, 16, 128), (2, 3, 5, 7), (3, 2, 1, 1), (1, 16, 9, 9), (2, 3, 50, 50), (2, 2, 3, 2, 5),
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


def both(x: torch.Tensor, scale: str, grid: Grid, key: int = 0x0123456789ABCDEF) -> tuple[bytes, bytes]:
    where = layout(tuple(x.shape), scale)
    size = grid.num_bytes(where)
    ours, plain = torch.full((size + 9,), 0xAB, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    assert cpu.encode(x.numpy(), where, grid, key, ours.numpy()) == size
    assert reference.encode(x, where, grid, key, plain) == size
    assert bool((ours[size:] == 0xAB).all()), "wrote past the payload"
    return ours[:size].numpy().tobytes(), plain.numpy().tobytes()


# At 1 bit the symmetric grid's only level would be 0: the grammar refuses it.
EVERY = [(k, s, b) for k in GRIDS for s in SCALES for b in range(1, 9) if b > 1 or not GRIDS[k].symmetric]


@pytest.mark.parametrize(("kind", "scale", "bits"), EVERY)
def test_bytes_and_values_are_those_of_the_reference(kind: str, scale: str, bits: int) -> None:
    grid = grid_of(kind, bits)
    for shape in SHAPES:
        x = tensor(shape, seed=len(shape) * bits)
        ours, plain = both(x, scale, grid)
        assert ours == plain, shape
        where = layout(shape, scale)
        payload = torch.frombuffer(bytearray(ours), dtype=torch.uint8) if ours else torch.empty(0, dtype=torch.uint8)
        out, expected = torch.full(shape, 7.0), torch.full(shape, 8.0)
        cpu.decode(payload.numpy(), where, grid, out.numpy())
        reference.decode(payload, where, grid, expected)
        assert torch.equal(out, expected) or x.numel() == 0, shape


def test_random_shapes_scales_and_keys() -> None:
    pick = random.Random(5)
    for _ in range(150):
        shape = tuple(pick.choice([1, 2, 3, 5, 8, 17, 33]) for _ in range(pick.randint(1, 5)))
        kind = pick.choice(list(GRIDS))
        grid = grid_of(kind, pick.randint(2, 8))
        ours, plain = both(tensor(shape, pick.getrandbits(30)), pick.choice(SCALES), grid, pick.getrandbits(64))
        assert ours == plain, (shape, grid)


@pytest.mark.parametrize("published", [False, True])
def test_scales_of_every_exponent(published: bool) -> None:
    """Each channel has one element, so the head is the scale rule applied to |x|: subnormals, ties and ends too."""
    patterns = torch.randint(0, 0x7F800000, (60_000,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    edges = torch.arange(0, 0x7F80, dtype=torch.int32) << 16
    half_ties = torch.arange(0x0E00, 0x47800, dtype=torch.int32) << 12
    values = torch.cat([patterns, edges, edges + 1, edges + 0x7FFF, half_ties]).view(torch.float32)
    values = values[values < 65519.0] if published else values
    grid = Grid(4, published=published, eps=1e-6 if published else 0.0)
    ours, plain = both(values.view(1, -1), "channel", grid)
    assert ours == plain


def change_by_reference(
    x: torch.Tensor, m: torch.Tensor, scale: str, grid: Grid, key: int
) -> tuple[bytes, torch.Tensor, torch.Tensor]:
    """(payload, sums, new rows) of x - m, all in plain torch."""
    where = layout(tuple(x.shape), scale)
    payload = torch.zeros(grid.num_bytes(where), dtype=torch.uint8)
    old = m.float().view(x.shape)
    reference.encode(x - old, where, grid, key, payload)
    value = old + reference.decode(payload, where, grid, torch.empty(x.shape))
    return payload.numpy().tobytes(), value, value.to(m.dtype).view(m.shape)


def patterns(rows: torch.Tensor) -> np.ndarray:
    """As the kernels take them, sharing their memory."""
    kind = {torch.bfloat16: np.uint16, torch.float16: np.int16, torch.float32: np.float32}[rows.dtype]
    return rows.view(torch.uint8).numpy().view(kind)


@pytest.mark.parametrize("kept", list(CASTS))
@pytest.mark.parametrize(("kind", "scale"), list(itertools.product(GRIDS, SCALES)))
def test_changes_move_the_rows_as_the_reference_does(kind: str, scale: str, kept: str) -> None:
    for shape, bits in [
        ((3, 5, 9), 3),
        ((2, 33, 64), 4),
        ((4, 7), 2),
        ((2, 3, 5, 5), 7),
        ((2, 1, 2500), 8),
        ((1, 1, 1), 5),
    ]:
        grid = grid_of(kind, bits)
        where, row = layout(shape, scale), int(np.prod(shape[1:]))
        table = tensor((9, row), seed=3).to(CASTS[kept])
        message = tensor((shape[0] + 2, *shape[1:]), seed=4)
        index = np.arange(shape[0])[::-1].astype(np.int64) + 1
        slots = np.random.default_rng(0).permutation(9)[: shape[0]].astype(np.int64)
        wanted = change_by_reference(message[index.copy()], table[slots], scale, grid, 99)
        ends = [patterns(table.clone()) for _ in range(2)]
        payload, out = np.zeros(grid.num_bytes(where), np.uint8), np.zeros((shape[0], row), np.float32)
        done = cpu.encode_change(message.view(-1, row).numpy(), index, ends[0], slots, where, grid, 99, payload)
        largest = cpu.decode_change(payload, ends[1], slots, where, grid, out)
        assert payload.tobytes() == wanted[0], shape
        assert np.array_equal(out, wanted[1].view(-1, row).numpy())
        expected = table.clone()
        expected[slots] = wanted[2]
        for end in ends:
            assert np.array_equal(end.view(np.uint8), patterns(expected).view(np.uint8))
        assert done == (payload.size, largest)
        assert largest == float(wanted[1].abs().max())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("scale", SCALES)
def test_a_non_finite_value_anywhere_is_found_before_anything_moves(bad: float, scale: str) -> None:
    shape = (3, 5, 67)
    where, grid = layout(shape, scale), Grid(4)
    for at in (0, 1, 66, 67, 500, 3 * 5 * 67 - 1):
        x = torch.randn(shape)
        x.view(-1)[at] = bad
        out = np.zeros(grid.num_bytes(where), np.uint8)
        with pytest.raises(DivergedError):
            cpu.encode(x.numpy(), where, grid, 0, out)
        with pytest.raises(DivergedError):
            reference.encode(x, where, grid, 0, torch.from_numpy(out))
        m = np.zeros((3, 5 * 67), np.uint16)
        with pytest.raises(DivergedError):
            cpu.encode_change(x.view(3, -1).numpy(), np.arange(3), m, np.arange(3), where, grid, 0, out)
        assert not m.any()


def test_every_fp16_pattern_is_read_and_every_tie_rounded_as_torch_does() -> None:
    """Rows of every pattern there may be, subnormal ones too, moved by up to 8 steps of every power of two."""
    every = torch.arange(-0x8000, 0x8000, dtype=torch.int32).to(torch.int16).view(torch.float16)
    every = every[every.float().abs() < SAFE["fp16"]].view(1, -1)
    where, grid, slot = layout(tuple(every.shape), "tensor"), Grid(4, symmetric=True), np.zeros(1, np.int64)
    change = (torch.arange(every.numel()) % 15 - 7.0).view(1, -1)
    payload, sums = np.zeros(grid.num_bytes(where), np.uint8), np.zeros(tuple(every.shape), np.float32)
    ties = 0
    for step in (0.0, *(2.0**k for k in range(-30, 10))):
        cpu.encode((change * step).numpy(), where, grid, 0, payload)
        rows = every.clone()
        cpu.decode_change(payload, patterns(rows), slot, where, grid, sums)
        wanted = every.float() + change * step
        assert torch.equal(torch.from_numpy(sums), wanted)
        assert torch.equal(rows, wanted.to(torch.float16))
        other = 2 * wanted - rows.float()
        ties += int(((other != wanted) & (other.to(torch.float16).float() == other)).sum())
    assert ties > 10_000


@pytest.mark.parametrize("kept", list(CASTS))
def test_rows_stay_put_where_a_sum_could_overflow(kept: str) -> None:
    where, grid = layout((1, 1, 4), "channel"), Grid(4)
    m, out = patterns(torch.zeros((1, 4), dtype=CASTS[kept])), np.zeros(10, np.uint8)
    x = np.full((1, 4), SAFE[kept], np.float32)
    assert cpu.encode_change(x, np.zeros(1, np.int64), m, np.zeros(1, np.int64), where, grid, 0, out) is None
    cpu.encode(x, where, grid, 0, out)
    assert cpu.decode_change(out, m, np.zeros(1, np.int64), where, grid, x) is None
    assert not m.any()


@pytest.mark.parametrize("kind", ["nearest", "published"])
def test_a_malformed_payload_is_refused_by_both(kind: str) -> None:
    shape, grid = (2, 3, 5), grid_of(kind, 3)
    where = layout(shape, "channel")
    good, _ = both(torch.randn(shape), "channel", grid)
    high = {"nearest": 0x7F80, "published": 0x7C00}[kind]
    variants = {
        "short": good[:-1],
        "long": good + b"\0",
        "infinite scale": high.to_bytes(2, "little") + good[2:],
        "NaN scale": (high + 1).to_bytes(2, "little") + good[2:],
        "negative scale": b"\x00\x80" + good[2:],
        "padding": good[:-1] + bytes([good[-1] | 1]),
    }
    for name, bad in variants.items():
        payload = torch.frombuffer(bytearray(bad), dtype=torch.uint8)
        with pytest.raises(CodecError):
            cpu.decode(payload.numpy(), where, grid, np.zeros(shape, np.float32))
        with pytest.raises(CodecError):
            reference.decode(payload, where, grid, torch.zeros(shape))
        assert name


def test_the_symmetric_grid_has_no_lowest_code() -> None:
    where, grid = layout((1, 1, 5000), "tensor"), Grid(4, symmetric=True)
    good, _ = both(torch.randn(1, 1, 5000), "tensor", grid)
    bad = torch.frombuffer(bytearray(good), dtype=torch.uint8)
    bad[-7] &= 0x0F
    with pytest.raises(CodecError):
        cpu.decode(bad.numpy(), where, grid, np.zeros((1, 1, 5000), np.float32))
    with pytest.raises(CodecError):
        reference.decode(bad, where, grid, torch.zeros(1, 1, 5000))


def test_copy_and_peak() -> None:
    x = np.array([1.0, -3.5, 2.0], np.float32)
    target = np.zeros(13, np.uint8)
    assert cpu.copy(x, target[1:]) == 3.5
    assert target[1:].tobytes() == x.tobytes()
    assert cpu.peak(x) == 3.5
    assert np.isnan(cpu.peak(np.array([1, np.nan, 2], np.float32)))
    assert np.isinf(cpu.peak(np.array([1, -np.inf, 2], np.float32)))


def test_warm_up_compiles_all_that_is_used() -> None:
    """A rank that compiled during a step would be timed doing so: no call adds a signature after warm_up."""
    cpu.warm_up()
    entries = (fused.encode, fused.decode, fused.copy, fused.peak)
    before = [len(entry.signatures) for entry in entries]
    for kind, scale in itertools.product(GRIDS, SCALES):
        both(torch.randn(2, 3, 5).transpose(0, 1).contiguous(), scale, grid_of(kind, 3))
    test_copy_and_peak()
    assert [len(entry.signatures) for entry in entries] == before


def test_without_a_folder_to_keep_compiled_code_it_compiles_anyway(tmp_path, monkeypatch) -> None:
    source = "def double(x):\n    return 2 * x\n"
    (tmp_path / "module.py").write_text(source)
    (tmp_path / "__pycache__").write_text("a file, so no folder can be made")
    monkeypatch.setenv("HOME", str(tmp_path / "module.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "module.py"))
    spec = importlib.util.spec_from_file_location("module", tmp_path / "module.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(RuntimeError, match="no locator"):
        numba.njit(cache=True)(module.double)
    assert fused._entry(module.double)(21) == 42
