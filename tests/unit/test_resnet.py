"""ResNet18 in stages: Hugging Face's model behind a 3x3 stem, bit for bit, and BatchNorm's statistics with it."""

from __future__ import annotations

import pytest
import torch

from thinpipe.harness.errors import UserError
from thinpipe.harness.models import base, resnet
from thinpipe.harness.pipeline.partition import split
from thinpipe.harness.spec import ModelSpec, TaskSpec

TASK = TaskSpec(name="image", corpus="pictures", num_labels=10)
SPEC = ModelSpec(name="resnet", preset="narrow")
PUBLISHED = [2, 4, 6]
CUTS = [[], PUBLISHED, [1], [3, 7], [1, 2, 3, 4, 5, 6, 7]]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def shape_of(spec: ModelSpec = SPEC) -> base.ModelShape:
    return base.resolve(spec, TASK)


def stages_of(cuts: list[int], *, seed: int = 0, recompute: bool = False) -> list[torch.nn.Module]:
    parts = split(shape_of(), len(cuts) + 1, cuts)
    return [resnet.build(SPEC, shape_of(), part, seed=seed, recompute=recompute) for part in parts]


def state(stages: list[torch.nn.Module]) -> dict[str, torch.Tensor]:
    pairs = [pair for stage in stages for pair in stage.state_dict().items()]
    assert len(dict(pairs)) == len(pairs), "no name belongs to two stages"
    return dict(pairs)


def gradients(stages: list[torch.nn.Module]) -> dict[str, torch.Tensor]:
    return {name: p.grad for stage in stages for name, p in stage.named_parameters()}


def hugging_face(seed: int = 0) -> torch.nn.Module:
    model = resnet.reference(SPEC, shape_of())
    weights = {resnet.stored_names(name)[0]: value.clone() for name, value in state(stages_of([], seed=seed)).items()}
    model.load_state_dict(weights, strict=True)
    return model.train()


def batch(number: int = 0, count: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(count, 3, 32, 32, generator=generator), torch.randint(10, (count,), generator=generator)


def run(stages: list[torch.nn.Module], x: torch.Tensor) -> list[torch.Tensor]:
    outputs = []
    for stage in stages:
        x = stage(x)
        outputs.append(x)
    return outputs


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_two_steps_are_bit_equal_to_hugging_face_at_any_cut(cuts, recompute):
    stages, reference = stages_of(cuts, recompute=recompute), hugging_face()
    optimizers = [
        torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1, momentum=0.9)
        for modules in (stages, [reference])
    ]
    for number in (0, 1):
        x, y = batch(number)
        logits, expected = run(stages, x)[-1], reference(x).logits
        assert torch.equal(logits, expected)
        resnet.loss(logits, y).backward()
        resnet.loss(expected, y).backward()
        theirs = dict(reference.named_parameters())
        for name, gradient in gradients(stages).items():
            assert torch.equal(gradient, theirs[resnet.stored_names(name)[0]].grad), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    buffers = reference.state_dict()
    for name, value in state(stages).items():
        assert torch.equal(value, buffers[resnet.stored_names(name)[0]]), name


@pytest.mark.parametrize("recompute", [False, True])
def test_statistics_advance_once_a_microbatch_and_not_in_evaluation(recompute):
    stages = stages_of(PUBLISHED, recompute=recompute)
    norm = stages[1].blocks["2"].layer[0].normalization
    mean = torch.zeros_like(norm.running_mean)
    norm.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().mean(dim=(0, 2, 3))))
    for number in (0, 1, 2):
        seen: list[torch.Tensor] = []
        x, y = batch(number)
        resnet.loss(run(stages, x)[-1], y).backward()
        assert len(seen) == (2 if recompute else 1), "the hook sees each computation"
        mean = 0.9 * mean + 0.1 * seen[0]
    assert int(norm.num_batches_tracked) == 3
    torch.testing.assert_close(norm.running_mean, mean, rtol=1e-5, atol=1e-6)

    before = {name: value.clone() for name, value in state(stages).items()}
    for stage in stages:
        stage.eval()
    x, _ = batch(3)
    with torch.no_grad():
        whole, alone = run(stages, x)[-1], run(stages, x[:1])[-1]
    torch.testing.assert_close(alone, whole[:1])
    assert all(torch.equal(value, before[name]) for name, value in state(stages).items())


def test_statistics_are_saved_and_loaded_with_the_weights():
    trained = stages_of(PUBLISHED)
    run(trained, batch()[0])
    fresh = stages_of(PUBLISHED, seed=1)
    for stage, other in zip(fresh, trained, strict=True):
        stage.load_state_dict(other.state_dict(), strict=True)
    for stage in [*fresh, *trained]:
        stage.eval()
    x = batch(1)[0]
    assert torch.equal(run(fresh, x)[-1], run(trained, x)[-1])
    assert not torch.equal(run(fresh, x)[-1], run([stage.eval() for stage in stages_of(PUBLISHED)], x)[-1])


def test_boundaries_are_relu_outputs_of_the_declared_shapes():
    shape = shape_of()
    assert shape.relu
    outputs = run(stages_of([1, 2, 3, 4, 5, 6, 7]), batch()[0])
    for output, expected in zip(outputs[:-1], shape.boundaries, strict=True):
        assert tuple(output.shape[1:]) == expected
        assert output.detach().min() == 0.0, "a ReLU clips something, and nothing is below"
    assert outputs[-1].shape == (4, 10)


def test_the_published_model_and_its_boundaries():
    """Rudakov et al. 2023: 114,688 elements a sample over three boundaries; ResNet18 in CIFAR form: 11.17 M."""
    shape = shape_of(ModelSpec(name="resnet", preset="resnet18"))
    assert shape.layers == 8
    published = [shape.boundaries[cut - 1] for cut in PUBLISHED]
    assert published == [(64, 32, 32), (128, 16, 16), (256, 8, 8)]
    total = sum(shape.parameters_per_block) + shape.parameters_embedding + shape.parameters_head
    assert total == 11_173_962
    with torch.device("meta"):
        model = resnet.reference(ModelSpec(name="resnet", preset="resnet18"), shape)
    assert sum(p.numel() for p in model.parameters()) == total


def test_declared_multiply_adds_and_kept_elements_are_the_real_ones():
    shape = shape_of()
    stage = stages_of([])[0]
    flops = []
    for module in stage.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(lambda m, _, y: flops.append(m.weight.numel() * y[0, 0].numel()))
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    own = {p.untyped_storage().data_ptr() for p in stage.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = stage(batch()[0])
    assert sum(flops) == sum(shape.flops_per_block)
    measured = sum(size for pointer, size in kept.items() if pointer not in own) / 4 / len(logits)
    declared = sum(shape.activations_per_block) + shape.activations_embedding + shape.activations_head
    assert declared == pytest.approx(measured, rel=0.02)


def test_random_weights_follow_hugging_faces_distribution_and_the_seed():
    theirs = resnet.ResNetForImageClassification(resnet._config(shape_of()))
    theirs.resnet.embedder = resnet._stem(theirs.config)
    theirs.apply(theirs._init_weights)
    expected = theirs.state_dict()
    before = torch.get_rng_state()
    ours, other = state(stages_of(PUBLISHED)), state(stages_of(PUBLISHED, seed=1))
    assert torch.equal(torch.get_rng_state(), before)
    for name, value in ours.items():
        like = expected[resnet.stored_names(name)[0]]
        if like.numel() < 2 or like.unique().numel() == 1:
            assert torch.equal(value, like), name
            continue
        assert not torch.equal(value, other[name]), name
        if like.numel() > 1000:
            assert value.std().item() == pytest.approx(like.std().item(), rel=0.1), name
    assert not torch.equal(ours["blocks.0.layer.0.convolution.weight"], ours["blocks.1.layer.0.convolution.weight"])


def test_dropout_and_other_kinds_of_task_are_refused():
    shape = shape_of()
    with pytest.raises(UserError, match="has no dropout"):
        resnet.build(SPEC.model_copy(update={"dropout": 0.1}), shape, split(shape, 1)[0], seed=0)
    with pytest.raises(UserError, match="has no layers"):
        base.resolve(SPEC.model_copy(update={"layers": 4}), TASK)
    with pytest.raises(UserError, match="cannot be trained on task 'lm'"):
        base.resolve(SPEC, TaskSpec())
