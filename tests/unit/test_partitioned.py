"""Partition and merge: every stage has its own file, `transformers` reads either form, and nothing is lost between."""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    DebertaV2Model,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
)

from thinpipe.harness import folders, merged, partitioned, plugins, state, store
from thinpipe.harness.errors import UserError
from thinpipe.harness.models import base, gpt2
from thinpipe.harness.pipeline.partition import split
from thinpipe.harness.spec import ModelSpec, TaskSpec, parse

LAYERS = 5
SIZES = {"vocab_size": 320, "n_positions": 64, "n_embd": 32, "n_layer": LAYERS, "n_head": 2}
TASK = TaskSpec(vocab_size=320, sequence_length=12)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextlib.contextmanager
def largest_file(size: int):
    """What a full disk is to whoever writes: any user may set it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def random_weights(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Biases and norms as well: what starts as zero or one would hide a mix-up."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return model.eval()


def checkpoint(folder: Path, kind: str = "tied") -> Path:
    config = GPT2Config(**SIZES, tie_word_embeddings=kind != "untied", bos_token_id=None, eos_token_id=None)
    model = random_weights((GPT2Model if kind == "bare" else GPT2LMHeadModel)(config))
    if kind == "half":
        model = model.to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="100KB" if kind == "sharded" else "5GB")
    (folder / "vocab.json").write_text("{}")
    return folder


LAST = "stage-01-of-02.safetensors"
KINDS = ["tied", "untied", "bare", "half", "sharded"]


@pytest.fixture(params=KINDS)
def source(request, tmp_path) -> Path:
    return checkpoint(tmp_path / "source", request.param)


@pytest.fixture
def tied(tmp_path) -> Path:
    return checkpoint(tmp_path / "source")


def read(path: Path):
    return json.loads(path.read_text())


def logits(folder: Path) -> torch.Tensor:
    rows = torch.randint(320, (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(report.values()), report
        return model.eval()(rows).logits


def stages(folder: Path, num_stages: int, cuts=None) -> list[dict[str, torch.Tensor]]:
    """What each rank of a run has in memory."""
    spec = ModelSpec(checkpoint=str(folder))
    shape = base.resolve(spec, TASK)
    return [gpt2.build(spec, shape, part, seed=0).state_dict() for part in split(shape, num_stages, cuts)]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("num_stages", "cuts"), [(1, None), (3, (1, 4)), (LAYERS, None)])
def test_ranks_and_transformers_find_in_it_what_was_in_the_source(source, tmp_path, num_stages, cuts):
    out = tmp_path / "out"
    made = partitioned.partition(str(source), num_stages, out, cuts)
    assert made["fresh"] == made["unused"] == []
    assert torch.equal(logits(out), logits(source))
    for other in (1, 2, num_stages):
        assert all(map(same, stages(out, other), stages(source, other)))


def test_a_stage_finds_everything_in_its_own_file(source, tmp_path):
    out = tmp_path / "out"
    files = [row["file"] for row in partitioned.partition(str(source), 3, out)["files"]]
    assert files == [f"stage-0{i}-of-03.safetensors" for i in range(3)]
    ties = read(source / "config.json")["tie_word_embeddings"]
    for held, file in zip(stages(source, 3), files, strict=True):
        wanted = [gpt2._names(name, tied=ties) for name in held]
        places = partitioned.own_map(out, wanted)
        assert places is not None
        assert set(places.values()) == {file}
        assert set(places) == set(load_file(out / file))
        assert all(any(name in places for name in names) for names in wanted)


def test_a_rank_reads_its_own_file_only(source, tmp_path):
    """Whatever is in the others."""
    out = tmp_path / "out"
    files = [row["file"] for row in partitioned.partition(str(source), 3, out)["files"]]
    wanted, spec = stages(source, 3), ModelSpec(checkpoint=str(out))
    shape = base.resolve(spec, TASK)
    for part, own in zip(split(shape, 3), files, strict=True):
        kept = {name: (out / name).read_bytes() for name in files}
        for name in set(files) - {own}:
            (out / name).write_bytes(b"not a tensor file")
        assert same(gpt2.build(spec, shape, part, seed=0).state_dict(), wanted[part.index])
        for name, data in kept.items():
            (out / name).write_bytes(data)


def test_a_finer_cut_finds_its_file_and_a_coarser_one_has_to_ask_the_index(tied, tmp_path):
    partitioned.partition(str(tied), 2, tmp_path / "out")
    assert partitioned.own_map(tmp_path / "out", [("transformer.h.1.ln_1.bias", "h.1.ln_1.bias")]) is not None
    both = [("transformer.h.0.ln_1.bias",), ("transformer.h.4.ln_1.bias",)]
    assert partitioned.own_map(tmp_path / "out", both) is None
    assert partitioned.own_map(tied, both) is None, "no folder of ours"


def test_files_hold_the_types_they_came_in_and_each_stage_no_more_than_its_own(tmp_path):
    source, out = checkpoint(tmp_path / "source", "half"), tmp_path / "out"
    partitioned.partition(str(source), LAYERS, out)
    middle = load_file(out / "stage-02-of-05.safetensors")
    assert {tensor.dtype for tensor in middle.values()} == {torch.bfloat16}
    assert {name.split(".")[2] for name in middle} == {"2"}


def test_thinpipe_json_says_how_it_was_cut(tied, tmp_path):
    out = tmp_path / "out"
    made = partitioned.partition(str(tied), 3, out, (1, 4))
    about = read(out / "thinpipe.json")
    assert (about["model"], about["stages"], about["cuts"]) == ("gpt2", 3, [1, 4])
    assert about["shared"] == ["transformer.wte.weight"], "the last stage's head is the embedding"
    assert about["source"]["name"] == str(tied)
    assert set(about["source"]["sha256"]) == {"config.json", "model.safetensors"}
    assert [row["blocks"] for row in made["files"]] == [[0, 0], [1, 3], [4, 4]]
    assert (out / "config.json").read_bytes() == (tied / "config.json").read_bytes()
    assert (out / "vocab.json").read_text() == "{}"
    index = read(out / "model.safetensors.index.json")["weight_map"]
    assert index["transformer.wte.weight"] == "stage-00-of-03.safetensors"


def test_a_tied_checkpoint_that_stores_its_head_too(tmp_path):
    """Older checkpoints do; `transformers` ties the two where they are equal."""
    source = checkpoint(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    head = tensors["transformer.wte.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, source / "model.safetensors", metadata={"format": "pt"})
    partitioned.partition(str(source), 2, tmp_path / "out")
    assert torch.equal(logits(tmp_path / "out"), logits(source))
    assert all(map(same, stages(tmp_path / "out", 2), stages(source, 2)))
    assert merged.merge(tmp_path / "out", tmp_path / "back")["tied"] is True
    assert "lm_head.weight" not in load_file(tmp_path / "back" / "model.safetensors")
    assert torch.equal(logits(tmp_path / "back"), logits(source))


def test_merge_gives_the_checkpoint_back(source, tmp_path):
    partitioned.partition(str(source), 3, tmp_path / "out")
    merged.merge(tmp_path / "out", tmp_path / "back")
    assert torch.equal(logits(tmp_path / "back"), logits(source))
    assert all(map(same, stages(tmp_path / "back", 2), stages(source, 2)))
    assert read(tmp_path / "back" / "config.json") == read(source / "config.json")
    beside = {path.name for path in source.iterdir() if "safetensors" not in path.name}
    assert {path.name for path in (tmp_path / "back").iterdir()} == {*beside, "model.safetensors"}


def test_a_head_that_differs_from_the_embedding_unties_them(tied, tmp_path):
    partitioned.partition(str(tied), 2, tmp_path / "out")
    last = tmp_path / "out" / "stage-01-of-02.safetensors"
    tensors = load_file(last)
    tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight") + 1
    save_file(tensors, last, metadata={"format": "pt"})
    about = read(tmp_path / "out" / "thinpipe.json")
    about["files"][last.name] = sorted(tensors)
    (tmp_path / "out" / "thinpipe.json").write_text(json.dumps(about))
    assert merged.merge(tmp_path / "out", tmp_path / "back")["tied"] is False
    assert read(tmp_path / "back" / "config.json")["tie_word_embeddings"] is False
    rows = torch.randint(320, (1, 5), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
        hidden = model.transformer(rows).last_hidden_state
        assert torch.equal(model(rows).logits, hidden @ tensors["lm_head.weight"].T)


def test_copies_that_differ_cannot_be_merged(tied, tmp_path):
    partitioned.partition(str(tied), 2, tmp_path / "out")
    last = tmp_path / "out" / "stage-01-of-02.safetensors"
    tensors = load_file(last)
    tensors["transformer.wte.weight"][0, 0] *= -1
    save_file(tensors, last, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"different copies of transformer.wte.weight"):
        merged.merge(tmp_path / "out", tmp_path / "back")
    assert not (tmp_path / "back").exists()


# --- of a run --------------------------------------------------------------------------------------------------------


def trained(tmp_path: Path, num_stages: int, *, groups: int = 1, tie: bool = False) -> tuple[Path, GPT2LMHeadModel]:
    """A run's folder with a training checkpoint, and the whole model that its stages make up."""
    spec = parse(
        {
            "model": {"preset": "micro", "layers": LAYERS},
            "task": {"sequence_length": 12, "vocab_size": 320},
            "pipeline": {"stages": num_stages},
            "data_parallel": {"groups": groups},
        }
    )
    run_dir = store.Store(tmp_path / "results").begin(spec)
    shape = base.resolve(spec.model, spec.task)
    whole: dict[str, torch.Tensor] = {}
    for part in split(shape, num_stages):
        module = random_weights(gpt2.build(spec.model, shape, part, seed=0), seed=part.index)
        held = module.state_dict()
        if part.last and tie:
            held["lm_head.weight"] = whole.get("transformer.wte.weight", held.get("wte.weight"))
        whole |= {gpt2.stored_names(name)[0]: tensor for name, tensor in held.items()}
        for group in range(groups):
            rank = part.index + group * num_stages
            kept = {"stages": {part.index: held}, "optimizer": {"state": {0: torch.ones(3)}}, "step": 40}
            state.save(run_dir, 40, rank, spec.world_size, kept)
    state.commit(run_dir, 40, spec.world_size)
    reference = gpt2.reference(spec.model, shape)
    reference.load_state_dict(whole, strict=True)
    return run_dir, reference.eval()


@pytest.mark.parametrize(("num_stages", "groups"), [(1, 1), (2, 1), (3, 2)])
def test_a_runs_checkpoint_becomes_one_that_transformers_loads(tmp_path, num_stages, groups):
    run_dir, reference = trained(tmp_path, num_stages, groups=groups)
    made = merged.merge(run_dir, tmp_path / "back")
    assert (made["step"], made["transformers"]) == (40, None)
    rows = torch.randint(320, (2, 11))
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="sdpa").eval()
        assert torch.equal(model(rows).logits, reference(rows).logits)
    assert not torch.equal(model.lm_head.weight, model.transformer.wte.weight)
    config = read(tmp_path / "back" / "config.json")
    assert (config["tie_word_embeddings"], config["architectures"]) == (False, ["GPT2LMHeadModel"])


def test_what_merge_made_can_be_trained_on(tmp_path):
    run_dir, reference = trained(tmp_path, 2)
    merged.merge(run_dir, tmp_path / "back")
    held = {name: tensor for stage in stages(tmp_path / "back", 3) for name, tensor in stage.items()}
    assert same({gpt2.stored_names(name)[0]: tensor for name, tensor in held.items()}, reference.state_dict())


def test_a_run_without_a_checkpoint_says_how_to_get_one(tmp_path):
    run_dir, _ = trained(tmp_path, 2)
    with pytest.raises(UserError, match=r"step 20 cannot be used"):
        merged.merge(run_dir, tmp_path / "back", step=20)
    (state.folder(run_dir, 40) / "complete.json").unlink()
    with pytest.raises(UserError, match=r"no complete training checkpoint \(.*step 40 is passed over.*checkpoint.keep"):
        merged.merge(run_dir, tmp_path / "back")


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    run_dir, _ = trained(tmp_path, 2)
    described = read(run_dir / "run.json")
    described["spec"]["model"]["layers"] = LAYERS + 1
    (run_dir / "run.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match=r"is not of the model its run.json describes: transformer.h.5"):
        merged.merge(run_dir, tmp_path / "back")


def test_a_model_that_transformers_has_otherwise_is_written_and_said_to_be_so(tmp_path):
    spec = parse(
        {
            "model": {"name": "resnet", "preset": "narrow"},
            "task": {"name": "image", "corpus": "digits", "num_sequences": 32},
            "pipeline": {"stages": 2},
        }
    )
    run_dir = store.Store(tmp_path / "results").begin(spec)
    shape = base.resolve(spec.model, spec.task)
    plugin = plugins.get("models", "resnet").load()
    for part in split(shape, 2):
        module = plugin.build(spec.model, shape, part, seed=0)
        state.save(run_dir, 8, part.index, 2, {"stages": {str(part.index): module.state_dict()}})
    state.commit(run_dir, 8, 2)
    made = merged.merge(run_dir, tmp_path / "back")
    assert "embedder" in made["transformers"]
    assert made["tied"] is None
    reference = plugin.reference(spec.model, shape)
    reference.load_state_dict(load_file(tmp_path / "back" / "model.safetensors"), strict=True)
    assert read(tmp_path / "back" / "config.json")["model_type"] == "resnet"


# --- DeBERTa: what every stage holds ---------------------------------------------------------------------------------

SHARED = ["deberta.encoder.LayerNorm.bias", "deberta.encoder.LayerNorm.weight", "deberta.encoder.rel_embeddings.weight"]


def deberta(folder: Path, *, head: bool) -> Path:
    config = DebertaV2Config(
        vocab_size=320, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64, position_buckets=8, relative_attention=True, pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm", share_att_key=True, position_biased_input=False, type_vocab_size=0, num_labels=3,
        conv_kernel_size=3, conv_act="gelu", max_relative_positions=-1, pad_token_id=0,
    )  # fmt: skip
    random_weights((DebertaV2ForSequenceClassification if head else DebertaV2Model)(config)).save_pretrained(folder)
    return folder


def test_debertas_shared_parameters_are_in_every_file(tmp_path):
    source, out = deberta(tmp_path / "source", head=True), tmp_path / "out"
    made = partitioned.partition(str(source), 3, out)
    assert (made["model"], made["fresh"], made["unused"]) == ("deberta", [], [])
    assert read(out / "thinpipe.json")["shared"] == SHARED
    assert all(set(SHARED) <= set(load_file(out / row["file"])) for row in made["files"])
    merged.merge(out, tmp_path / "back")
    ids = torch.randint(1, 320, (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        models = [DebertaV2ForSequenceClassification.from_pretrained(f) for f in (source, out, tmp_path / "back")]
        first, *others = [model.eval()(ids).logits for model in models]
    assert first.shape == (2, 3)
    assert all(torch.equal(first, other) for other in others)


def test_an_encoder_without_a_head_is_cut_without_one(tmp_path):
    source, out = deberta(tmp_path / "source", head=False), tmp_path / "out"
    made = partitioned.partition(str(source), 2, out)
    assert made["fresh"] == ["classifier.bias", "classifier.weight", "pooler.dense.bias", "pooler.dense.weight"]
    last = load_file(out / "stage-01-of-02.safetensors")
    assert not any(name.startswith(("pooler", "classifier")) for name in last)
    places = partitioned.own_map(out, [(name,) for name in last])
    assert places is not None


# --- refusals --------------------------------------------------------------------------------------------------------


def test_nothing_is_overwritten(tied, tmp_path):
    (tmp_path / "out").mkdir()
    partitioned.partition(str(tied), 2, tmp_path / "out")
    for write in (
        lambda: partitioned.partition(str(tied), 2, tmp_path / "out"),
        lambda: merged.merge(tmp_path / "out", tied),
    ):
        with pytest.raises(UserError, match="is not empty"):
            write()
    with pytest.raises(UserError, match="is no folder"):
        merged.merge(tmp_path / "out", tied / "config.json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stages": LAYERS + 1}, "more than the model's 5 blocks"),
        ({"stages": 2, "cuts": (LAYERS,)}, "can begin with block 4 at the latest"),
        ({"stages": 3, "cuts": (2,)}, r"--cuts 2 does not give 3 stages"),
        ({"stages": 3, "cuts": (3, 3)}, r"--cuts 3,3 does not give 3 stages"),
        ({"stages": 2, "cuts": (0,)}, r"--cuts 0 does not give 2 stages"),
        ({"stages": 2, "name": "gtp2"}, "Did you mean 'gpt2'"),
        ({"stages": 2, "name": "resnet"}, "loads no checkpoints"),
    ],
)
def test_what_cannot_be_cut_is_refused_and_leaves_nothing(tied, tmp_path, arguments, message):
    with pytest.raises(UserError, match=message):
        partitioned.partition(str(tied), out=tmp_path / "out", **arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_another_family_is_named(tied, tmp_path):
    config = read(tied / "config.json")
    (tied / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    with pytest.raises(UserError, match=r"family 'mamba'.*known are: .*gpt2"):
        partitioned.partition(str(tied), 2, tmp_path / "out")
    with pytest.raises(UserError, match="family 'mamba'"):
        partitioned.partition(str(tied), 2, tmp_path / "out", name="gpt2")


def test_a_damaged_source_is_refused(tied, tmp_path):
    tensors = load_file(tied / "model.safetensors")
    del tensors["transformer.h.3.ln_1.bias"]
    save_file(tensors, tied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks 1 tensor\(s\) of this model: h.3.ln_1.bias"):
        partitioned.partition(str(tied), 2, tmp_path / "out")
    (tied / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        partitioned.partition(str(tied), 2, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda out: (out / "stage-01-of-02.safetensors").unlink(), "lacks stage-01-of-02.safetensors"),
        (lambda out: shutil.copy(out / LAST, out / "stage-02-of-03.safetensors"), "another cut"),
        (lambda out: shutil.copy(out / LAST, out / "stage-00-of-02.safetensors"), "another cut"),
        (lambda out: (out / "thinpipe.json").unlink(), "not written by `thinpipe partition`"),
        (lambda out: (out / "thinpipe.json").write_text("{}"), "damaged"),
        (lambda out: (out / "stage-00-of-02.safetensors").write_bytes(b"short"), "cannot be read as safetensors"),
        (lambda out: (out / "config.json").unlink(), "no config.json"),
    ],
)  # fmt: skip
def test_what_cannot_be_merged_is_refused_and_leaves_nothing(tied, tmp_path, spoil, message):
    partitioned.partition(str(tied), 2, tmp_path / "out")
    spoil(tmp_path / "out")
    with pytest.raises(UserError, match=message):
        merged.merge(tmp_path / "out", tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_a_step_is_of_a_run(tied, tmp_path):
    with pytest.raises(UserError, match="no run's folder"):
        merged.merge(tied, tmp_path / "back", step=3)


def test_a_full_disk_is_explained_and_leaves_nothing(tied, tmp_path):
    partitioned.partition(str(tied), 2, tmp_path / "cut")
    with largest_file(100_000):
        for write in (
            lambda: partitioned.partition(str(tied), 2, tmp_path / "out"),
            lambda: merged.merge(tmp_path / "cut", tmp_path / "out"),
        ):
            with pytest.raises(UserError, match="was not written: File too large"):
                write()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut", "source"]


# --- folders ---------------------------------------------------------------------------------------------------------


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    out = tmp_path / "deep" / "out"
    with pytest.raises(RuntimeError), folders.staged(out) as temporary:  # noqa: PT012
        (temporary / "half").write_text("")
        assert not out.exists()
        raise RuntimeError
    assert list(out.parent.iterdir()) == []
    with folders.staged(out) as temporary:
        (temporary / "whole").write_text("")
    assert [path.name for path in out.iterdir()] == ["whole"]
    assert list(out.parent.iterdir()) == [out]


KILLED = """
import sys, time
from pathlib import Path
from thinpipe.harness import folders
with folders.staged(Path(sys.argv[1])) as temporary:
    (temporary / "half").write_text("")
    print("there", flush=True)
    time.sleep(60)
"""


def test_what_a_killed_process_left_is_removed_by_the_next_and_a_living_ones_is_not(tmp_path):
    out = tmp_path / "out[1]"
    writer = subprocess.Popen([sys.executable, "-c", KILLED, str(out)], stdout=subprocess.PIPE)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"there\n"
        with pytest.raises(RuntimeError), folders.staged(out):
            raise RuntimeError
        assert len(list(tmp_path.iterdir())) == 1, "another's work in progress is left alone"
    finally:
        writer.kill()
        writer.wait(timeout=10)
    with folders.staged(out):
        pass
    assert list(tmp_path.iterdir()) == [out]


def test_a_place_that_cannot_be_written_is_explained(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"out cannot be made"), folders.staged(tmp_path / "file" / "out"):
        pass


def test_names_of_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("THINPIPE_CACHE", str(tmp_path))
    (tmp_path / "data" / "minilm").mkdir(parents=True)
    assert folders.resolve("fetched:minilm") == tmp_path / "data" / "minilm"
    assert folders.resolve("~/x") == Path.home() / "x"
    for name in ("fetched:other", "fetched:../data", "fetched:"):
        with pytest.raises(UserError, match="thinpipe fetch-data"):
            folders.resolve(name)


def test_resolving_imports_no_torch():
    code = "import sys; from thinpipe.harness import folders; folders.resolve('x'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
