"""A stage's tensors from safetensors files: the right ones, into the right memory, and no other bytes read."""

from __future__ import annotations

import functools
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from thinpipe.harness import partitioned
from thinpipe.harness.errors import UserError
from thinpipe.harness.models import _weights, base, gpt2
from thinpipe.harness.models._shared import unset
from thinpipe.harness.pipeline.partition import split
from thinpipe.harness.spec import ModelSpec, TaskSpec


class Small(nn.Module):
    """Parameters of several ranks, a persistent and a passing buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("passing", torch.full((2,), 7.0), persistent=False)
        for tensor in (*self.parameters(), *self.buffers()):
            if tensor is not self.passing:
                tensor.detach().fill_(-1)


def stored(dtype=torch.float32) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    sizes = {"line.weight": (3, 5), "line.bias": (3,), "empty": (0, 4)}
    sizes |= {f"norm.{name}": (3,) for name in ("weight", "bias", "running_mean", "running_var")}
    values = {name: torch.randn(size, generator=draw).to(dtype) for name, size in sizes.items()}
    return values | {"norm.num_batches_tracked": torch.tensor(12)}


def same(name: str) -> tuple[str, ...]:
    return (f"model.{name}", name)


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, folder / base.WEIGHTS)
    return folder / base.WEIGHTS


def test_parameters_and_persistent_buffers_are_filled_in_place(tmp_path):
    write(tmp_path, stored())
    module = Small()
    addresses = {name: value.data_ptr() for name, value in module.state_dict().items()}
    assert _weights.load(module, tmp_path, same) == frozenset()
    for name, value in stored().items():
        assert torch.equal(module.state_dict()[name], value), name
    assert {name: value.data_ptr() for name, value in module.state_dict().items()} == addresses
    assert torch.equal(module.passing, torch.full((2,), 7.0)), "what is not saved is not looked for"


def test_the_first_name_that_is_stored_counts(tmp_path):
    write(tmp_path, stored() | {"model.line.bias": torch.zeros(3)})
    module = Small()
    _weights.load(module, tmp_path, same)
    assert torch.equal(module.line.bias, torch.zeros(3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types_are_converted_piece_by_piece(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(_weights, "PIECE", 32)  # 4 to 16 elements of 15
    write(tmp_path, stored(dtype))
    module = Small()
    _weights.load(module, tmp_path, same)
    for name, value in stored(dtype).items():
        wanted = module.state_dict()[name]
        assert torch.equal(wanted, value.to(wanted.dtype)), name


def test_only_files_with_a_wanted_tensor_are_opened(tmp_path):
    tensors = stored()
    (tmp_path / "other.safetensors").write_bytes(b"no such file")
    save_file({"line.weight": tensors.pop("line.weight")}, tmp_path / "a.safetensors")
    save_file(tensors, tmp_path / "b.safetensors")
    names = {"line.weight": "a.safetensors", "h.0": "other.safetensors", **dict.fromkeys(tensors, "b.safetensors")}
    (tmp_path / base.INDEX).write_text(json.dumps({"weight_map": names}))
    module = Small()
    _weights.load(module, tmp_path, same)
    assert torch.equal(module.line.weight, stored()["line.weight"])
    (tmp_path / base.INDEX).write_text(json.dumps({"weight_map": {**names, "line.bias": "a.safetensors"}}))
    with pytest.raises(UserError, match=r"line\.bias of .*a\.safetensors is named by the index, but not in the file"):
        _weights.load(module, tmp_path, same)


def test_a_stage_of_a_partitioned_checkpoint_reads_its_own_file_alone(tmp_path):
    """The tied head of the last stage is stored with the first stage too, where the index has it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=320, n_positions=32, n_embd=16, n_layer=3, n_head=2, bos_token_id=None, eos_token_id=None
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "whole")
    partitioned.partition(str(tmp_path / "whole"), 3, tmp_path / "cut")
    files = base.checkpoint_files(tmp_path / "cut")
    assert len(files) == 3

    def states(folder: Path) -> list[dict[str, torch.Tensor]]:
        spec = ModelSpec(checkpoint=str(folder))
        shape = base.resolve(spec, TaskSpec(vocab_size=320, sequence_length=16))
        build = functools.partial(gpt2.build, spec, shape, seed=0)
        found = []
        for part in split(shape, 3):
            for index, path in enumerate(files):
                if folder.name == "cut" and index != part.index:
                    path.write_bytes(b"")
            found.append(build(part).state_dict())
            for path in files:
                path.write_bytes(contents[path])
        return found

    contents = {path: path.read_bytes() for path in files}
    for own, expected in zip(states(tmp_path / "cut"), states(tmp_path / "whole"), strict=True):
        assert list(own) == list(expected)
        assert all(torch.equal(own[name], expected[name]) for name in own)


def test_optional_tensors_may_be_absent_but_must_fit(tmp_path):
    tensors = {name: value for name, value in stored().items() if not name.startswith("line.")}
    write(tmp_path, tensors)
    module = Small()
    with pytest.raises(UserError, match=r"lacks 2 tensor\(s\) of this model: line\.weight, line\.bias\. Choose"):
        _weights.load(module, tmp_path, same)
    absent = _weights.load(module, tmp_path, same, optional=("line.weight", "line.bias"))
    assert absent == {"line.weight", "line.bias"}
    assert torch.equal(module.line.bias, torch.full((3,), -1.0))
    assert torch.equal(module.norm.running_mean, stored()["norm.running_mean"])
    write(tmp_path, stored() | {"line.bias": torch.zeros(4)})
    with pytest.raises(UserError, match=r"line\.bias of .* has shape \(4,\), this model needs \(3,\)"):
        _weights.load(module, tmp_path, same, optional=("line.bias",))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool])
def test_quantised_tensors_are_refused(tmp_path, dtype):
    write(tmp_path, stored() | {"line.bias": torch.ones(3).to(dtype)})
    with pytest.raises(UserError, match=r"line\.bias of .* is .*: quantised checkpoints are not supported"):
        _weights.load(Small(), tmp_path, same)


def header(path: Path, change) -> None:
    """Write the file's header again, changed; the tensors stay as they are."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    said = json.loads(data[8 : 8 + length])
    text = change(said)
    text = text if isinstance(text, bytes) else json.dumps(said if text is None else text).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def entry(**changes):
    return lambda said: said["line.weight"].update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda said: b"{", "its header is damaged"),
        (lambda said: b"[" * 100_000, "its header is damaged"),
        (lambda said: b"\xff\xfe", "its header is damaged"),
        (lambda said: [1], "its header is damaged"),
        (entry(data_offsets=[0]), "its entry in the header is damaged"),
        (entry(data_offsets=[0, "60"]), "its entry in the header is damaged"),
        (entry(data_offsets=[-60, 0]), "its entry in the header is damaged"),
        (entry(shape=[3, 5.0]), "its entry in the header is damaged"),
        (entry(shape=7), "its entry in the header is damaged"),
        (entry(dtype=["F32"]), "its entry in the header is damaged"),
        (lambda said: said.update({"line.weight": None}), "its entry in the header is damaged"),
        (lambda said: said.update({"line.weight": 5}), "its entry in the header is damaged"),
        (entry(shape=[3, 10**18]), "does not lie in the file"),
        (entry(data_offsets=[0, 64]), "does not lie in the file"),
        (entry(data_offsets=[2**62, 2**62 + 60]), "does not lie in the file"),
        (entry(dtype="F64"), "does not lie in the file"),
    ],
)
def test_headers_are_not_trusted(tmp_path, change, message):
    header(write(tmp_path, stored()), change)
    with pytest.raises(UserError, match=rf"{message}.*Save the checkpoint again"):
        _weights.load(Small(), tmp_path, same)


@pytest.mark.parametrize("length", [0, 7, 8, 2**40, 2**63])
def test_a_length_that_the_file_does_not_have_is_refused_before_memory_is_taken(tmp_path, length):
    (tmp_path / base.WEIGHTS).write_bytes(struct.pack("<Q", length)[: max(length, 1) if length < 8 else 8])
    with pytest.raises(UserError, match=r"cannot be read as safetensors"):
        _weights.load(Small(), tmp_path, same)


def test_a_file_cut_off_at_any_place_is_refused(tmp_path):
    path = write(tmp_path, stored())
    whole = path.read_bytes()
    for length in (0, 3, 8, 9, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"cannot be read"):
            _weights.load(Small(), tmp_path, same)
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError):
        _weights.load(Small(), tmp_path, same)


MEASURE = """
import json, sys
from pathlib import Path
from thinpipe.harness.models import base, gpt2
from thinpipe.harness.pipeline.partition import split
from thinpipe.harness.spec import ModelSpec, TaskSpec

def kib(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

before = kib("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
spec = ModelSpec(checkpoint=sys.argv[1])
shape = base.resolve(spec, TaskSpec(vocab_size=320))
stage = gpt2.build(spec, shape, split(shape, 4)[1], seed=0)
peak = kib("VmHWM")
share = sum(p.numel() * p.element_size() for p in stage.parameters()) / 1024
print(json.dumps({"share": share, "peak": peak - before, "files": len(base.checkpoint_files(Path(sys.argv[1])))}))
"""


@pytest.mark.parametrize(
    ("dtype", "shard"), [(torch.float32, "10GB"), (torch.bfloat16, "15MB")], ids=["one-file", "half-precision-shards"]
)
def test_a_rank_needs_little_more_memory_than_its_share(tmp_path, dtype, shard):
    """Architecture: at most 1.3 x the stage's own share over what its imports took."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=320, n_positions=64, n_embd=768, n_layer=4, n_head=4)
    unset(GPT2LMHeadModel, config).to(dtype).save_pretrained(tmp_path, max_shard_size=shard)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["files"] == 1 or found["files"] > 3
    assert found["share"] > 25_000
    assert found["share"] < found["peak"] <= 1.3 * found["share"], found


def test_what_was_written_elsewhere_is_read_here(tmp_path):
    """The header is parsed here: held against the format's own reader."""
    path = write(tmp_path, stored(torch.float64))
    module = Small().double()
    _weights.load(module, tmp_path, same)
    for name, value in load_file(path).items():
        assert torch.equal(module.state_dict()[name], value), name


def test_a_file_that_is_cut_off_is_found_from_its_header_alone(tmp_path):
    from safetensors.torch import save_file

    from thinpipe.harness.models._weights import verify

    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(64), "b": torch.ones(3, 5)}, path)
    verify(tmp_path)
    whole = path.read_bytes()
    for rest in (whole[:-1], whole[:40], b"", b"not a tensor file at all"):
        path.write_bytes(rest)
        with pytest.raises(UserError, match=r"model\.safetensors"):
            verify(tmp_path)
