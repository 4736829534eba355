"""Training checkpoints: what comes back is what was saved; a kill, a full disk or a flipped bit costs one at most."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from thinpipe.harness import state as states
from thinpipe.harness import tensorfile
from thinpipe.harness.errors import UserError


def same(a, b) -> bool:
    """Equal in value, type and bits, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(type(x) is type(y) for x, y in zip(a, b, strict=True)) and all(
            same(a[key], b[key]) for key in a
        )  # fmt: skip
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return repr(a) == repr(b)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def saved(tmp_path: Path, state: dict, step: int = 40) -> dict:
    states.save(tmp_path, step, 0, 1, state)
    states.commit(tmp_path, step, 1)
    assert states.latest(tmp_path) == step
    return states.load(tmp_path, step, 0)


def training_state() -> dict:
    """What a rank really has: a module with buffers, Adam after steps, generators, and odd values."""
    torch.manual_seed(3)
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    for _ in range(3):
        module(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        "stages": {0: module.state_dict(), 3: {"weight": torch.randn(2, 2)}},
        "optimizer": optimizer.state_dict(),
        "rng": {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()},
        "memories": {"forward/0": {"ids": torch.arange(3), "shape": (4, 2), "rows": torch.randn(3, 8).bfloat16()}},
        "rows": [{"step": 1, "loss": 0.1 + 0.2, "grad_norm": None}, {"step": 2, "loss": float("nan")}],
    }


def test_a_training_state_comes_back_bit_for_bit(tmp_path):
    state = training_state()
    assert same(saved(tmp_path, state), {**state, "stages": {0: dict(state["stages"][0]), 3: state["stages"][3]}})


def test_generators_go_on_where_they_were(tmp_path):
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    back = saved(tmp_path, {"python": before[0], "numpy": before[1], "torch": before[2]})
    wanted = random.random(), np.random.random(), torch.rand(3)
    random.setstate(back["python"])
    np.random.set_state(back["numpy"])
    torch.set_rng_state(back["torch"])
    assert (random.random(), np.random.random()) == wanted[:2]
    assert torch.equal(torch.rand(3), wanted[2])


@pytest.mark.parametrize(
    "value",
    [
        {1: torch.ones(1), "1": torch.zeros(2)},
        {(0, "forward"): 1, None: 2},
        {"$": "tensor", "value": "nothing of ours"},
        {"a/b": {"c": torch.ones(2)}, "a": {"b/c": torch.zeros(3)}},
        {"structure": torch.ones(2)},
        [float("inf"), -float("inf"), -0.0, 1e-320, 0.1, 2**70, True, "ü\n\0", [], (), {}, ((1,), [2])],
        torch.tensor(2.5),
        torch.empty(0, 3, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.arange(12).view(3, 4).t(),
        torch.tensor([float("nan"), 1.0]).half(),
        np.arange(3, dtype=np.uint32),
        np.float64(0.1),
        np.array(7, dtype=np.int16),
    ],
    ids=repr,
)
def test_every_plain_value_comes_back(tmp_path, value):
    assert same(saved(tmp_path, {"value": value})["value"], value)


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", torch.nn.Linear(1, 1), Path("x")], ids=type)
def test_what_is_no_plain_data_is_refused_with_its_place(tmp_path, value):
    with pytest.raises(TypeError, match=r"at here/1"):
        states.save(tmp_path, 1, 0, 1, {"here": [0, value]})
    assert states.latest(tmp_path) is None


def test_a_loaded_tensor_is_its_own(tmp_path):
    back = saved(tmp_path, {"x": torch.zeros(1000)})
    states.rank_file(tmp_path, 40, 0).write_bytes(b"\xff" * 5000)
    assert not back["x"].any()


def test_a_parameter_is_saved_without_its_graph(tmp_path):
    back = saved(tmp_path, {"x": torch.nn.Parameter(torch.ones(2))})["x"]
    assert torch.equal(back, torch.ones(2))
    assert not back.requires_grad


def test_it_counts_once_every_rank_has_saved_and_rank_0_said_so(tmp_path):
    assert states.latest(tmp_path) is None
    states.save(tmp_path, 40, 0, 2, {"rank": 0})
    with pytest.raises(UserError, match="rank 1 has not saved step 40"):
        states.commit(tmp_path, 40, 2)
    states.save(tmp_path, 40, 1, 2, {"rank": 1})
    notes: list[str] = []
    assert states.latest(tmp_path, notes.append) is None
    assert "step 40 is passed over" in notes[0]
    assert "not finished" in notes[0]
    with pytest.raises(UserError, match="not finished"):
        states.load(tmp_path, 40, 0)
    states.commit(tmp_path, 40, 2)
    assert states.latest(tmp_path) == 40
    states.require(tmp_path, 40, 2)
    with pytest.raises(UserError, match=r"of 2 rank\(s\), not 4"):
        states.require(tmp_path, 40, 4)
    assert [states.load(tmp_path, 40, rank) for rank in (0, 1)] == [{"rank": 0}, {"rank": 1}]
    with pytest.raises(UserError, match="no rank 2"):
        states.load(tmp_path, 40, 2)


def test_another_worlds_file_is_not_committed(tmp_path):
    states.save(tmp_path, 40, 0, 2, {})
    with pytest.raises(UserError, match="rank 0 has not saved"):
        states.commit(tmp_path, 40, 1)


def complete(tmp_path: Path, *steps: int) -> None:
    for step in steps:
        states.save(tmp_path, step, 0, 1, {"step": step, "x": torch.full((50,), float(step))})
        states.commit(tmp_path, step, 1)


@pytest.mark.parametrize("name", ["rank0.safetensors", "complete.json"])
def test_any_damage_is_found_and_an_older_one_used(tmp_path, name):
    complete(tmp_path, 20, 40)
    path = states.folder(tmp_path, 40) / name
    data = path.read_bytes()
    places = range(0, len(data), 7) if name == "rank0.safetensors" else range(1, len(data) - 2)
    for place in places:
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        usable = states.latest(tmp_path)
        # White space and names of complete.json may change without a change of what it says.
        assert usable == 20 or (name == "complete.json" and states.load(tmp_path, 40, 0)["step"] == 40), place
    for length in (0, 1, len(data) // 2, len(data) - 3):
        path.write_bytes(data[:length])
        assert states.latest(tmp_path) == 20, length
    notes: list[str] = []
    path.unlink()
    assert states.latest(tmp_path, notes.append) == 20
    assert len(notes) == 1
    assert "step 40" in notes[0]
    with pytest.raises(UserError, match="cannot be used"):
        states.load(tmp_path, 40, 0)


def test_a_flipped_bit_is_refused_by_load_too(tmp_path):
    complete(tmp_path, 40)
    path = states.rank_file(tmp_path, 40, 0)
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)
    for refuses in (lambda: states.load(tmp_path, 40, 0), lambda: states.require(tmp_path, 40, 1)):
        with pytest.raises(UserError, match=r"hash differs.*Delete .*step-00000040"):
            refuses()


def test_prune_keeps_the_newest_complete_ones_and_what_is_being_written(tmp_path):
    complete(tmp_path, 10, 20, 40)
    states.save(tmp_path, 30, 0, 1, {})
    states.save(tmp_path, 50, 0, 1, {})
    states.prune(tmp_path, keep=2)
    assert states.steps(tmp_path) == [20, 30, 40, 50]
    states.prune(tmp_path)
    assert states.steps(tmp_path) == [40, 50]
    assert states.latest(tmp_path) == 40
    states.clear(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_prune_never_leaves_nothing(tmp_path):
    states.save(tmp_path, 30, 0, 1, {})
    states.save(tmp_path, 50, 0, 1, {})
    states.prune(tmp_path)
    assert states.steps(tmp_path) == [30, 50]


def test_a_removal_cut_short_leaves_nothing_that_counts(tmp_path, monkeypatch):
    complete(tmp_path, 20, 40)

    def killed(path, **_):
        raise KeyboardInterrupt

    monkeypatch.setattr(states.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        states.prune(tmp_path)
    with pytest.raises(UserError, match="not finished"):
        states.load(tmp_path, 20, 0)
    assert states.latest(tmp_path) == 40


def test_saving_the_same_step_again_replaces_it(tmp_path):
    complete(tmp_path, 20, 40)
    states.save(tmp_path, 40, 0, 1, {"again": True})
    assert states.latest(tmp_path) == 20, "half of the old and half of the new is neither"
    states.commit(tmp_path, 40, 1)
    assert states.load(tmp_path, 40, 0) == {"again": True}


def write(run_dir: Path, step: int, size: int) -> None:
    """What the ranks of a run do when a checkpoint is due."""
    for rank in (0, 1):
        states.save(run_dir, step, rank, 2, {"step": step, "rank": rank, "x": torch.full((size,), float(step))})
    states.commit(run_dir, step, 2)
    states.prune(run_dir)


def require_usable(run_dir: Path, size: int) -> int:
    step = states.latest(run_dir)
    assert step is not None, "no usable checkpoint is left"
    for rank in (0, 1):
        loaded = states.load(run_dir, step, rank)
        assert (loaded["step"], loaded["rank"]) == (step, rank)
        assert torch.equal(loaded["x"], torch.full((size,), float(step)))
    return step


def forked(work: Callable[[], None]) -> int:
    """Run `work` in a process of its own, which ends with it; returns its id."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


def test_a_death_before_any_change_of_the_disk_leaves_a_usable_one(tmp_path):
    """Every time a file is opened, renamed or removed is tried as the last thing that did not happen any more."""
    kinds = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree")
    write(tmp_path / "start", 20, 100)
    left, died = set(), True
    for last in range(1, 200):
        run_dir = tmp_path / str(last)
        shutil.copytree(tmp_path / "start", run_dir)

        def work(run_dir=run_dir, last=last):
            seen = 0

            def count(event: str, _: object) -> None:
                nonlocal seen
                seen += event in kinds
                if seen == last:
                    os._exit(9)

            sys.addaudithook(count)
            write(run_dir, 40, 100)

        died = os.waitstatus_to_exitcode(os.waitpid(forked(work), 0)[1]) == 9
        left.add(require_usable(run_dir, 100))
        if not died:
            break
        write(run_dir, 40, 100)
        assert states.steps(run_dir) == [40], "whoever comes next clears up"
    assert not died
    assert last > 20
    assert left == {20, 40}


def test_a_kill_at_any_moment_leaves_a_usable_one(tmp_path):
    chance, begun = random.Random(7), time.monotonic()
    write(tmp_path, 1, 100_000)
    taken, steps, deadline = time.monotonic() - begun, [1], begun + 120
    while len(steps) < 20 or steps[-1] < 4:
        assert time.monotonic() < deadline, f"writers got no further than {steps}"
        begin = steps[-1] + 1

        def work(begin=begin):
            for step in range(begin, begin + 1000):
                write(tmp_path, step, 100_000)

        child = forked(work)
        time.sleep(chance.uniform(0, 3 * taken))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        steps.append(require_usable(tmp_path, 100_000))
    assert steps == sorted(steps)


def test_a_full_disk_is_explained_and_leaves_the_older_one(tmp_path):
    complete(tmp_path, 20)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(UserError, match=r"rank0.safetensors was not written: .*free some space"):
            states.save(tmp_path, 40, 0, 1, {"x": torch.ones(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert states.latest(tmp_path) == 20
    assert not any(states.folder(tmp_path, 40).iterdir()), "nothing half-written is left"


def test_the_file_is_one_that_safetensors_reads(tmp_path):
    state = training_state()
    states.save(tmp_path, 1, 0, 1, state)
    stored = load_file(states.rank_file(tmp_path, 1, 0))
    assert torch.equal(stored["stages/0/0.weight"], state["stages"][0]["0.weight"])
    assert torch.equal(stored["memories/forward/0/rows"], state["memories"]["forward/0"]["rows"])


def test_a_tensor_of_another_layout_than_announced_is_our_own_bug(tmp_path):
    layouts = {"x": tensorfile.Layout(torch.float32, (2,))}
    with pytest.raises(AssertionError, match="announced"):
        tensorfile.write(tmp_path / "f.safetensors", layouts, lambda name: torch.zeros(3))
    assert list(tmp_path.iterdir()) == []


def test_every_type_is_written_as_safetensors_reads_it(tmp_path):
    tensors = {f"t{i}": torch.arange(5).to(dtype) for i, dtype in enumerate(tensorfile.CODES)}
    tensors |= {"empty": torch.empty(0, 4), "scalar": torch.tensor(1.5), "bytes": torch.arange(3, dtype=torch.uint8)}
    layouts = {name: tensorfile.layout(tensor) for name, tensor in tensors.items()}
    path = tmp_path / "f.safetensors"
    written = tensorfile.write(path, layouts, tensors.__getitem__)
    assert written == tensorfile.hash_file(path)
    assert written.num_bytes == path.stat().st_size
    assert tensorfile.layouts_of(path) == layouts
    assert all(same(tensor, tensors[name]) for name, tensor in load_file(path).items())
    size = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + size])
    for name, layout in layouts.items():
        assert (8 + size + header[name]["data_offsets"][0]) % layout.dtype.itemsize == 0, name
