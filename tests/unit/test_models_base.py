"""What a model plug-in must declare, and what it may leave out; no torch is needed for any of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinpipe.harness import plugins
from thinpipe.harness.errors import UserError
from thinpipe.harness.models import base
from thinpipe.harness.spec import ModelSpec, TaskSpec

# A family without attention: neither heads nor a longest sequence, and no checkpoints.
BARE = {
    "presets": {"tiny": {"layers": 2, "width": 8}},
    "counts": {"block": {"width*width": 1}, "embedding": {"vocab_size*width": 1}, "head": {"width": 1}},
}
TASK = TaskSpec(vocab_size=300, sequence_length=5000)


@pytest.fixture
def declare(monkeypatch):
    """Make `gpt2` a plug-in with the given PARAMETERS."""

    def make(parameters) -> None:
        plugin = plugins.Plugin("models", "bare", "", Path(), 1, "", "", parameters, "")
        monkeypatch.setattr(plugins, "get", lambda kind, name: plugin)

    return make


def test_heads_positions_defaults_and_checkpoints_may_be_left_out(declare):
    declare(BARE)
    shape = base.resolve(ModelSpec(name="bare", layers=3), TASK)
    assert (shape.heads, shape.positions) == (None, None)
    assert (shape.parameters_per_block, shape.parameters_embedding, shape.parameters_head) == ((64,) * 3, 2400, 8)


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
        ({"checkpoint": {"model_type": "bare", "layers": "n"}}, r"checkpoint: width, vocab_size missing"),
    ],
)
def test_a_declaration_that_is_wrong_says_where(declare, changes, message):
    declare({key: value for key, value in {**BARE, **changes}.items() if value is not None})
    with pytest.raises(UserError, match=rf"model 'bare'.*{message}"):
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
