"""The battery every model plug-in has to pass; plug-ins are found, not listed."""

from __future__ import annotations

import copy

import pytest
import torch

from thinpipe.harness import plugins
from thinpipe.harness.models import base
from thinpipe.harness.pipeline.partition import split
from thinpipe.harness.spec import ModelSpec, TaskSpec

TASK = TaskSpec(vocab_size=310, sequence_length=9)
PLUGINS = plugins.find("models")
PRESETS = [(name, preset) for name, plugin in PLUGINS.items() for preset in plugin.parameters["presets"]]


def total(shape: base.ModelShape) -> int:
    return sum(shape.parameters_per_block) + shape.parameters_embedding + shape.parameters_head


@pytest.fixture(params=sorted(PLUGINS), scope="module")
def plugin(request) -> plugins.Plugin:
    return PLUGINS[request.param]


@pytest.fixture(scope="module")
def spec(plugin) -> ModelSpec:
    """The plug-in's smallest preset, with three blocks."""
    specs = [ModelSpec(name=plugin.name, preset=preset, layers=3) for preset in plugin.parameters["presets"]]
    return min(specs, key=lambda spec: total(base.resolve(spec, TASK)))


def build(plugin, spec, num_stages: int, seed: int = 0) -> list[torch.nn.Module]:
    shape = base.resolve(spec, TASK)
    return [plugin.load().build(spec, shape, part, seed=seed) for part in split(shape, num_stages)]


def run(stages, rows: torch.Tensor) -> torch.Tensor:
    x = rows[:, :-1]
    for stage in stages:
        x = stage(x)
    return x


def rows() -> torch.Tensor:
    return torch.randint(TASK.vocab_size, (2, 10), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("name", "preset"), PRESETS)
def test_every_preset_resolves_and_can_be_cut_block_by_block(name, preset):
    shape = base.resolve(ModelSpec(name=name, preset=preset), TASK)
    assert shape.vocab_size == TASK.vocab_size
    assert len(shape.parameters_per_block) == shape.layers
    assert all(count > 0 for count in (*shape.parameters_per_block, shape.parameters_embedding))
    assert len(split(shape, shape.layers)) == shape.layers


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_declared_counts_are_the_parameters_of_each_stage(plugin, spec, num_stages):
    shape = base.resolve(spec, TASK)
    for stage, part in zip(build(plugin, spec, num_stages), split(shape, num_stages), strict=True):
        expected = sum(shape.parameters_per_block[block] for block in part.blocks)
        expected += shape.parameters_embedding * part.first + shape.parameters_head * part.last
        assert sum(p.numel() for p in stage.parameters()) == expected


@pytest.mark.parametrize("num_stages", [2, 3])
def test_any_number_of_stages_is_the_same_model(plugin, spec, num_stages):
    one, many = build(plugin, spec, 1), build(plugin, spec, num_stages)
    whole = dict(one[0].named_parameters())
    pieces = [pair for stage in many for pair in stage.named_parameters()]
    assert [name for name, _ in pieces] == list(whole), "names are the model's, in its order"
    for name, parameter in pieces:
        assert torch.equal(parameter, whole[name]), name
    loss = plugin.load().loss
    loss(run(one, rows()), rows()[:, 1:]).backward()
    loss(run(many, rows()), rows()[:, 1:]).backward()
    for name, parameter in pieces:
        assert parameter.grad is not None, f"{name} is used"
        assert torch.equal(parameter.grad, whole[name].grad), name


def test_a_stage_hands_on_hidden_and_ends_in_logits(plugin, spec):
    shape = base.resolve(spec, TASK)
    x = rows()[:, :-1]
    for index, stage in enumerate(build(plugin, spec, 3)):
        x = stage(x)
        assert x.dtype == torch.float32
        assert x.shape == (2, 9, shape.vocab_size if index == 2 else shape.width)
        assert torch.isfinite(x).all()


def test_training_mode_is_on_and_nothing_is_drawn_while_running(plugin, spec):
    """Dropout would differ at every visit of a sample, and between a forward and its recomputation."""
    stages = build(plugin, spec, 2)
    assert all(module.training for stage in stages for module in stage.modules())
    before = torch.get_rng_state()
    first = run(stages, rows())
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(run(stages, rows()), first)
    assert torch.equal(run([copy.deepcopy(stage).eval() for stage in stages], rows()), first)


def test_weights_follow_the_seed_and_leave_the_global_generator_alone(plugin, spec):
    before = torch.get_rng_state()
    first, again, other = (build(plugin, spec, 2, seed=seed) for seed in (4, 4, 5))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(run(first, rows()), run(again, rows()))
    assert not torch.equal(run(first, rows()), run(other, rows()))


def test_loss_is_a_mean_without_weights_and_leaves_out_padding_with_them(plugin, spec):
    loss = plugin.load().loss
    logits, targets = run(build(plugin, spec, 1), rows()), rows()[:, 1:]
    whole = loss(logits, targets)
    assert whole.shape == ()
    assert torch.isfinite(whole)
    halves = [loss(logits[i : i + 1], targets[i : i + 1]) for i in (0, 1)]
    assert whole.item() == pytest.approx(sum(halves).item() / 2, rel=1e-5)
    assert loss(logits, targets, torch.tensor([1.0, 0.0])).item() == pytest.approx(halves[0].item(), rel=1e-5)
