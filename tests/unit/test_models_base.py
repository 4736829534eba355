"""What a model plug-in must declare, and what it may leave out; no torch is needed for any of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from thinpipe.harness import plugins
from thinpipe.harness.errors import UserError
from thinpipe.harness.models import base
from thinpipe.harness.spec import ModelSpec, TaskSpec

# A family without attention: neither heads nor a longest sequence, and no checkpoints.
BARE = {
    "kinds": ["lm"],
    "presets": {"tiny": {"layers": 2, "width": 8}},
    "counts": {"block": {"width*width": 1}, "embedding": {"vocab_size*width": 1}, "head": {"width": 1}},
    "flops": {"block": {"width": 3}, "head": {"width": 1}},
    "activations": {"block": {"width": 2}, "embedding": {"width": 1}, "head": {"lm*vocab_size": 2, "lm": -1}},
    "boundary": {"shape": ["sequence_length", "width"], "relu": False},
}
TASK = TaskSpec(vocab_size=300, sequence_length=5000)


@pytest.fixture
def declare(monkeypatch):
    """Make `gpt2` a plug-in with the given PARAMETERS."""

    def make(parameters) -> None:
        plugin, get = plugins.Plugin("models", "bare", "", Path(), 1, "", "", parameters, ""), plugins.get
        monkeypatch.setattr(plugins, "get", lambda kind, name: plugin if kind == "models" else get(kind, name))

    return make


def test_heads_positions_defaults_and_checkpoints_may_be_left_out(declare):
    declare(BARE)
    shape = base.resolve(ModelSpec(name="bare", layers=3), TASK)
    assert (shape.heads, shape.positions) == (None, None)
    assert (shape.parameters_per_block, shape.parameters_embedding, shape.parameters_head) == ((64,) * 3, 2400, 8)
    assert (shape.flops_per_block, shape.flops_head) == ((24,) * 3, 8)
    assert (shape.activations_per_block, shape.activations_embedding, shape.activations_head) == ((16,) * 3, 8, 599)
    assert shape.boundaries == ((5000, 8),) * 2
    assert shape.shared == ""


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ModelSpec(name="bare", checkpoint="somewhere"), r"model 'bare' loads no checkpoints: leave model\.checkpoint"),
        (ModelSpec(name="bare", heads=2), r"model 'bare' has no heads: leave model\.heads out"),
    ],
)
def test_what_a_family_does_not_have_is_refused(declare, spec, message):
    declare(BARE)
    with pytest.raises(UserError, match=message):
        base.resolve(spec, TASK)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"presets": None}, r"PARAMETERS: presets missing"),
        ({"presets": {}}, r"presets: there is none; add one"),
        ({"presets": {"tiny": {"layers": 2}}}, r"preset 'tiny': width missing"),
        ({"counts": None}, r"PARAMETERS: counts missing"),
        ({"counts": {"block": {}, "embedding": {}}}, r"counts: head missing"),
        ({"counts": {**BARE["counts"], "haed": {}}}, r"counts: unknown key 'haed'\. Did you mean 'head'\?"),
        ({"counts": {**BARE["counts"], "head": {"widht": 1}}}, r"counts, head: no size is called 'widht'.*'width'"),
        ({"defaults": {"inner": {"heads": 4}}}, r"defaults, inner: no size is called 'heads'"),
        ({"preset": {}}, r"unknown key 'preset'\. Did you mean 'presets'\?"),
        ({"checkpoint": {"model_type": "bare", "layers": "n"}}, r"checkpoint: width missing"),
    ],
)
def test_a_declaration_that_is_wrong_says_where(declare, changes, message):
    declare({key: value for key, value in {**BARE, **changes}.items() if value is not None})
    with pytest.raises(UserError, match=rf"model 'bare'.*{message}"):
        base.resolve(ModelSpec(name="bare"), TASK)


def test_blocks_that_differ_are_counted_by_themselves(declare):
    blocks = [{"channels": {"width": 1}}, {"channels": {"width": 2}}, {"channels": {"width": 4}}]
    counts = {**BARE["counts"], "block": {"channels*channels": 1}}
    presets = {"tiny": {"width": 8}}
    boundary = {"shape": ["channels"], "relu": True}
    declare({**BARE, "blocks": blocks, "counts": counts, "presets": presets, "boundary": boundary})
    shape = base.resolve(ModelSpec(name="bare"), TASK)
    assert (shape.layers, shape.parameters_per_block) == (3, (64, 256, 1024))
    assert (shape.boundaries, shape.relu) == (((8,), (16,)), True)
    with pytest.raises(UserError, match=r"model 'bare' has no layers: leave model\.layers out"):
        base.resolve(ModelSpec(name="bare", layers=3), TASK)


def test_what_becomes_of_shared_parameters_is_the_familys_to_offer(declare):
    declare({**BARE, "shared": ["frozen", "summed"]})
    assert base.resolve(ModelSpec(name="bare"), TASK).shared == "frozen"
    assert base.resolve(ModelSpec(name="bare", shared="summed"), TASK).shared == "summed"
    with pytest.raises(UserError, match=r"cannot have its shared parameters 'copies'.*auto, frozen, summed"):
        base.resolve(ModelSpec(name="bare", shared="copies"), TASK)


def test_a_model_is_refused_on_a_kind_of_task_it_does_not_take(declare):
    declare({**BARE, "kinds": ["images"]})
    with pytest.raises(UserError, match=r"cannot be trained on task 'lm', which is of kind 'lm': it takes images"):
        base.resolve(ModelSpec(name="bare"), TASK)


def test_a_checkpoint_of_a_family_without_heads(declare, tmp_path):
    keys = {"model_type": "bare", "layers": "n", "width": "d", "vocab_size": "v"}
    declare({**BARE, "checkpoint": keys})
    (tmp_path / base.WEIGHTS).touch()
    (tmp_path / "config.json").write_text('{"model_type": "bare", "n": 5, "d": 16, "v": 400}')
    spec = ModelSpec(name="bare", checkpoint=str(tmp_path))
    shape = base.resolve(spec, TASK)
    assert (shape.layers, shape.width, shape.vocab_size, shape.heads) == (5, 16, 400, None)
    with pytest.raises(UserError, match="has no heads"):
        base.resolve(spec.model_copy(update={"heads": 4}), TASK)


# --- hubs ----------------------------------------

ASK = """
import sys, time
from thinpipe.harness.errors import UserError
from thinpipe.harness.models import base
assert not {"torch", "transformers"} & set(sys.modules)
start = time.monotonic()
try:
    print("found", base.checkpoint_folder("somebody/gpt2"))
except UserError as error:
    print(f"{time.monotonic() - start:.1f}", error)
assert not {"torch", "transformers"} & set(sys.modules)
"""


def ask(cache: Path, **environment: str) -> str:
    """What a fresh process answers: huggingface_hub reads its settings at import."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_") and "proxy" not in key.lower()}
    done = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, text=True, timeout=60, check=True, cwd=cache,
        env={**kept, "HF_HOME": str(cache), **environment},
    )  # fmt: skip
    return done.stdout.strip()


def test_without_a_hub_a_hub_name_fails_at_once_and_says_what_to_do(tmp_path):
    found = ask(tmp_path, HF_HUB_OFFLINE="1")
    assert float(found.split()[0]) < 5
    assert "somebody/gpt2 is no directory here" in found
    assert "HF_HUB_OFFLINE is set" in found
    assert "Give the path of a local folder" in found


def test_a_hub_that_does_not_answer_is_waited_for_a_few_seconds_only(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = ask(tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert base.HUB_SECONDS - 1 < float(found.split()[0]) < 3 * base.HUB_SECONDS, found
    assert "http://127.0.0.1:" in found
    assert "did not give it" in found


def test_a_hub_that_cannot_be_reached_fails_at_once(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    found = ask(tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{port}")
    assert float(found.split()[0]) < base.HUB_SECONDS, found
    assert "did not give it" in found


def test_what_the_hubs_cache_has_is_used_without_a_hub(tmp_path):
    """Laid out as huggingface_hub keeps it: refs name a commit, snapshots hold its files."""
    root, commit = tmp_path / "hub" / "models--somebody--gpt2", "0" * 40
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    snapshot = root / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert "did not give it" in ask(tmp_path, HF_ENDPOINT="http://127.0.0.1:9"), "parts of a checkpoint are none"
    (snapshot / base.WEIGHTS).touch()
    assert ask(tmp_path, HF_ENDPOINT="http://127.0.0.1:9") == f"found {snapshot}"


def test_a_path_is_never_looked_up_at_a_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "_from_hub", pytest.fail)
    assert base.checkpoint_folder(str(tmp_path)) == tmp_path
    for name in ("/nowhere/at/all", "./gpt2", "../gpt2", "~/gpt2", "a/b/c", "a b"):
        with pytest.raises(UserError, match="is no directory"):
            base.checkpoint_folder(name)


@pytest.mark.parametrize("names", [{"a": "../a.safetensors"}, {"a": "/etc/a"}, {"a": 5}, {"a": ""}, ["a"], None])
def test_an_index_that_is_none_or_leads_elsewhere_is_refused(tmp_path, names):
    (tmp_path / base.INDEX).write_text(json.dumps({"weight_map": names}))
    with pytest.raises(UserError, match="has no usable weight_map"):
        base.checkpoint_files(tmp_path)


def test_a_published_checkpoint_that_is_not_here_is_planned_by_its_preset():
    spec = ModelSpec(name="gpt2", checkpoint="openai-community/gpt2-xl")
    by_name = base.resolve(spec, TaskSpec(sequence_length=1024))
    by_preset = base.resolve(ModelSpec(name="gpt2", preset="xl"), TaskSpec(sequence_length=1024, vocab_size=50257))
    assert by_name == by_preset
    assert by_name.layers == 48
