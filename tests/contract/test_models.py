"""The battery every model plug-in has to pass, on every kind of task it takes; plug-ins are found, not listed."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from thinpipe.harness import plugins
from thinpipe.harness.errors import UserError
from thinpipe.harness.models import _dropout, base
from thinpipe.harness.pipeline.partition import split
from thinpipe.harness.spec import ModelSpec, TaskSpec

PLUGINS = plugins.find("models")
KINDS = [(name, kind) for name, plugin in PLUGINS.items() for kind in plugin.parameters["kinds"]]
PRESETS = [(*case, preset) for case in KINDS for preset in PLUGINS[case[0]].parameters["presets"]]
# Parameters of a preset whose one pass is quick enough to look at what it keeps.
SMALL = 30e6
PAD = 0
# What a family without dropout says when it is asked for some.
NO_DROPOUT = "has no dropout"


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Case:
    """A model on a kind of task. spec: its smallest preset, with three blocks where their number is free."""

    plugin: plugins.Plugin
    task: TaskSpec
    spec: ModelSpec

    @property
    def shape(self) -> base.ModelShape:
        return base.resolve(self.spec, self.task)

    @property
    def cuts(self) -> list[int]:
        """Numbers of stages to try: all there can be, or of many a few."""
        layers = self.shape.layers
        return sorted({1, 2, 3, layers // 2, layers - 1, layers} & set(range(1, layers + 1)))

    def changed(self, **changes) -> Case:
        return Case(self.plugin, self.task, self.spec.model_copy(update=changes))

    def build(self, num_stages: int, *, seed: int = 0, recompute: bool = False) -> list[torch.nn.Module]:
        build, shape = self.plugin.load().build, self.shape
        parts = split(shape, num_stages)
        return [build(self.spec, shape, part, seed=seed, recompute=recompute) for part in parts]

    @property
    def refused(self) -> str:
        """Why the plug-in does not build it, "" where it does."""
        try:
            self.build(1)
        except UserError as error:
            return str(error)
        return ""


@dataclass(frozen=True)
class Inputs:
    """A micro-batch as a task of some kind makes it."""

    x: torch.Tensor
    targets: torch.Tensor
    side: dict[str, torch.Tensor] = field(default_factory=dict)

    def row(self, index: int) -> Inputs:
        rows = slice(index, index + 1)
        return Inputs(self.x[rows], self.targets[rows], {name: value[rows] for name, value in self.side.items()})


def task_of(kind: str) -> TaskSpec:
    tasks = plugins.find("tasks")
    name = next((name for name, plugin in tasks.items() if plugin.parameters["kind"] == kind), None)
    assert name is not None, f"no task is of kind {kind}"
    corpus = next(iter(tasks[name].parameters["corpora"]))
    return TaskSpec(name=name, corpus=corpus, vocab_size=310, sequence_length=9)


def total(shape: base.ModelShape) -> int:
    return sum(shape.parameters_per_block) + shape.parameters_embedding + shape.parameters_head


@pytest.fixture(params=KINDS, ids="-".join, scope="module")
def case(request) -> Case:
    name, kind = request.param
    plugin, task = PLUGINS[name], task_of(kind)
    free = {"layers": 3} if "blocks" not in plugin.parameters else {}
    specs = [ModelSpec(name=name, preset=preset, **free) for preset in plugin.parameters["presets"]]
    return Case(plugin, task, min(specs, key=lambda spec: total(base.resolve(spec, task))))


def inputs(shape: base.ModelShape, task: TaskSpec, count: int = 3) -> Inputs:
    draw, length = torch.Generator().manual_seed(0), task.sequence_length
    if shape.kind == "images":
        x = torch.randn(count, 3, 32, 32, generator=draw)
        return Inputs(x, torch.randint(shape.num_labels, (count,), generator=draw))
    rows = torch.randint(PAD + 1, shape.vocab_size, (count, length + 1), generator=draw)
    if shape.kind == "lm":
        return Inputs(rows[:, :-1], rows[:, 1:])
    lengths = torch.tensor([length, *range(2, count + 1)])
    mask = (torch.arange(length) < lengths.unsqueeze(1)).long()
    targets = torch.randint(shape.num_labels, (count,), generator=draw)
    return Inputs(rows[:, :-1] * mask + PAD * (1 - mask), targets, {"attention_mask": mask})


def run(stages, given: Inputs, *, ids=None, step: int = 0) -> torch.Tensor:
    x = given.x
    _dropout.visit(tuple(range(len(x))) if ids is None else ids, step)
    for stage in stages:
        x = stage(x, **given.side)
    return x


def train(case: Case, stages, given: Inputs) -> tuple[torch.Tensor, dict[str, list[torch.Tensor | None]]]:
    """Output, and each parameter's gradients, one a stage that holds it."""
    output = run(stages, given)
    case.plugin.load().loss(output, given.targets).backward()
    gradients: dict[str, list[torch.Tensor | None]] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            gradients.setdefault(name, []).append(parameter.grad)
    return output.detach(), gradients


def assert_same(one: dict[str, list[torch.Tensor | None]], many: dict[str, list[torch.Tensor | None]]) -> None:
    """The same gradients, bit for bit; to rounding where a parameter has copies, whose sum is another order."""
    assert list(one) == list(many), "names are the model's, in its order"
    for name, (expected,) in one.items():
        if expected is None:
            assert all(copy is None for copy in many[name]), name
        elif len(many[name]) == 1:
            assert torch.equal(many[name][0], expected), name
        else:
            torch.testing.assert_close(sum(many[name]), expected, rtol=1e-4, atol=1e-7, msg=name)


def states(stages) -> dict[str, torch.Tensor]:
    """The merged model; copies of one parameter must be equal."""
    merged: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, value in stage.state_dict().items():
            assert torch.equal(merged.setdefault(name, value), value), f"copies of {name} differ"
    return merged


@pytest.mark.parametrize(("name", "kind", "preset"), PRESETS)
def test_every_preset_resolves_and_can_be_cut_block_by_block(name, kind, preset):
    task = task_of(kind)
    shape = base.resolve(ModelSpec(name=name, preset=preset), task)
    assert shape.kind == kind
    assert len(shape.parameters_per_block) == shape.layers
    assert len(shape.boundaries) == shape.layers - 1
    assert all(count > 0 for count in (*shape.parameters_per_block, shape.parameters_embedding, *shape.flops_per_block))
    assert len(split(shape, shape.layers)) == shape.layers


def test_declared_counts_are_the_parameters_of_each_stage(case):
    shape = case.shape
    for num_stages in case.cuts:
        seen: set[str] = set()
        for stage, part in zip(case.build(num_stages), split(shape, num_stages), strict=True):
            expected = sum(shape.parameters_per_block[block] for block in part.blocks)
            expected += shape.parameters_embedding * part.first + shape.parameters_head * part.last
            own = {name: p for name, p in stage.named_parameters() if name not in seen}
            assert sum(p.numel() for p in own.values()) == expected, f"stage {part.index} of {num_stages}"
            seen |= set(own)


@pytest.mark.parametrize("shared", ["copies", "frozen", "summed"])
def test_any_number_of_stages_is_the_same_model(case, shared):
    case = case.changed(shared=shared)
    if shared not in case.plugin.parameters.get("shared", []):
        with pytest.raises(UserError, match=f"cannot have its shared parameters '{shared}'"):
            base.resolve(case.spec, case.task)
        case = case.changed(shared="auto")
    if case.refused:
        # A family whose shared parameters are of another kind of task.
        assert "has no effect" in case.refused
        return
    one = case.build(1)
    given = inputs(case.shape, case.task)
    before = {name: value.clone() for name, value in states(one).items()}
    output, gradients = train(case, one, given)
    for num_stages in case.cuts[1:]:
        many = case.build(num_stages)
        for name, value in states(many).items():
            assert torch.equal(value, before[name]), name
        again, found = train(case, many, given)
        assert torch.equal(again, output)
        assert_same(gradients, found)
        for name, value in states(many).items():
            assert torch.equal(value, states(one)[name]), f"{name} after training forward"


def test_every_parameter_that_can_be_trained_is_used(case):
    stages = case.build(1)
    _, gradients = train(case, stages, inputs(case.shape, case.task))
    trained = {name for name, p in stages[0].named_parameters() if p.requires_grad}
    assert {name for name, (gradient,) in gradients.items() if gradient is not None} == trained


@pytest.mark.parametrize("shared", ["copies", "frozen", "summed"])
def test_shared_lists_the_copies_of_a_key_alone(case, shared):
    """Several stages, or one stage twice, hold each key; copies start equal, whatever the cut."""
    case = case.changed(shared=shared)
    if shared not in case.plugin.parameters.get("shared", []) or case.refused:
        return
    for num_stages in case.cuts:
        stages = case.build(num_stages)
        found: dict[str, list[torch.Tensor]] = {}
        for stage in stages:
            own = {id(p) for p in stage.parameters()}
            for key, copies in stage.shared.items():
                assert all(id(parameter) in own and parameter.requires_grad for parameter in copies), key
                found.setdefault(key, []).extend(copies)
        assert bool(found) == (shared == "summed")
        for key, copies in found.items():
            assert num_stages == 1 or len(copies) > 1, key
            assert all(torch.equal(parameter, copies[0]) for parameter in copies), key


def test_a_stage_hands_on_the_declared_tensor_and_ends_in_an_output(case):
    shape = case.shape
    given = inputs(shape, case.task)
    x = given.x
    outputs = {"lm": (case.task.sequence_length, shape.vocab_size)}.get(shape.kind, (shape.num_labels,))
    for stage, sizes in zip(case.build(shape.layers), (*shape.boundaries, outputs), strict=True):
        x = stage(x, **given.side)
        assert x.dtype == torch.float32
        assert tuple(x.shape) == (3, *sizes)
        assert torch.isfinite(x).all()
        if shape.relu and sizes is not outputs:
            assert x.min() == 0, "declared to be a ReLU's output"


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_training_mode_is_on_and_nothing_is_drawn_while_running(case, dropout):
    """What is drawn differs at every visit of a sample, and between a forward and its recomputation."""
    case = case.changed(dropout=dropout)
    if case.refused:
        assert NO_DROPOUT in case.refused
        return
    stages = case.build(2, recompute=True)
    assert all(module.training for stage in stages for module in stage.modules())
    given = inputs(case.shape, case.task)
    before = torch.get_rng_state()
    first, _ = train(case, stages, given)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(run(stages, given).detach(), first)


def test_recomputation_gives_the_same_gradients_and_buffers(case):
    for dropout in (0.0, 0.2):
        changed = case.changed(dropout=dropout)
        if changed.refused:
            assert NO_DROPOUT in changed.refused
            continue
        stages, again = changed.build(2), changed.build(2, recompute=True)
        given = inputs(case.shape, case.task)
        output, gradients = train(changed, stages, given)
        assert kept(again, given) < kept(changed.build(2), given), "it keeps less"
        again = changed.build(2, recompute=True)
        same, found = train(changed, again, given)
        assert torch.equal(same, output)
        for name, values in gradients.items():
            assert all(
                (a is None and b is None) or torch.equal(a, b) for a, b in zip(values, found[name], strict=True)
            ), name
        for name, value in states(stages).items():
            assert torch.equal(value, states(again)[name]), f"{name} changes once, not on recomputation too"


def test_dropout_masks_are_the_samples_own_for_every_cut(case):
    case = case.changed(dropout=0.2)
    if case.refused:
        assert NO_DROPOUT in case.refused
        return
    one = case.build(1)
    given = inputs(case.shape, case.task)
    output, gradients = train(case, one, given)
    for num_stages in case.cuts[1:]:
        again, found = train(case, case.build(num_stages), given)
        assert torch.equal(again, output)
        assert_same(gradients, found)
    assert not torch.equal(run(case.changed(dropout=0.0).build(1), given), output)
    assert torch.equal(run(one, given, step=7), output), "a sample meets its masks again"
    assert not torch.equal(run(one, given, ids=(0, 1, 5))[2], output[2])
    alone = run(one, given.row(2), ids=(2,))
    torch.testing.assert_close(alone[0], output[2], rtol=1e-4, atol=1e-5)
    stepwise = case.changed(dropout_masks="step").build(1)
    assert torch.equal(run(stepwise, given, step=1), run(stepwise, given, step=1))
    assert not torch.equal(run(stepwise, given, step=1), run(stepwise, given, step=2))


def test_evaluation_drops_nothing_out(case):
    plain = [stage.eval() for stage in case.build(1)]
    case = case.changed(dropout=0.3)
    if case.refused:
        assert NO_DROPOUT in case.refused
        return
    stages = [stage.eval() for stage in case.build(1)]
    given = inputs(case.shape, case.task)
    torch.testing.assert_close(run(stages, given), run(plain, given), rtol=1e-4, atol=1e-5)


def test_weights_follow_the_seed_and_leave_the_global_generator_alone(case):
    given = inputs(case.shape, case.task)
    before = torch.get_rng_state()
    first, again, other = (case.build(2, seed=seed) for seed in (4, 4, 5))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(run(first, given), run(again, given))
    assert not torch.equal(run(first, given), run(other, given))


def test_loss_is_a_mean_without_weights_and_leaves_out_padding_with_them(case):
    loss = case.plugin.load().loss
    given = inputs(case.shape, case.task)
    output, targets = run(case.build(1), given)[:2], given.targets[:2]
    whole = loss(output, targets)
    assert whole.shape == ()
    assert torch.isfinite(whole)
    halves = [loss(output[i : i + 1], targets[i : i + 1]) for i in (0, 1)]
    assert whole.item() == pytest.approx(sum(halves).item() / 2, rel=1e-5)
    assert loss(output, targets, torch.tensor([1.0, 0.0])).item() == pytest.approx(halves[0].item(), rel=1e-5)
    assert loss(output, targets, torch.tensor([1.0, 1.0])).item() == pytest.approx(2 * whole.item(), rel=1e-5)


def test_the_merged_model_is_hugging_faces(case):
    module, given = case.plugin.load(), inputs(case.shape, case.task)
    stages = case.build(case.cuts[-1])
    run(stages, given)  # statistics of a training pass, where there are any, are part of the model
    theirs = module.reference(case.spec, case.shape)
    renamed = {module.stored_names(name)[0]: value for name, value in states(stages).items()}
    assert len(renamed) == len(states(stages)), "two tensors have one name"
    loaded = theirs.load_state_dict(renamed, strict=False)
    assert not loaded.unexpected_keys
    assert set(loaded.missing_keys) <= set(getattr(theirs, "all_tied_weights_keys", {}))
    if case.shape.kind == "classification":
        theirs.config.pad_token_id = PAD
    named = {"pixel_values": given.x} if case.shape.kind == "images" else {"input_ids": given.x}
    for training in (False, True):
        expected = theirs.train(training)(**named, **given.side).logits
        found = run([stage.train(training) for stage in stages], given)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def kept(stages, given: Inputs, loss=None) -> list[float]:
    """Elements of 4 bytes that each stage keeps for its backward pass beside its input from a boundary, its parameters
    and buffers: storages that autograd saves, whole and once each, and the output."""
    x, found = given.x, []
    _dropout.visit(tuple(range(len(x))), 0)
    for index, stage in enumerate(stages):
        saved: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor, saved=saved) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        source = x.detach().requires_grad_(x.is_floating_point() and index > 0)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            x = stage(source, **given.side)
            if loss is not None and index == len(stages) - 1:
                loss(x, given.targets)
        pack(x)
        for tensor in (*stage.parameters(), *stage.buffers(), *([source] if index else [])):
            saved.pop(tensor.untyped_storage().data_ptr(), None)
        found.append(sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) / 4)
    return found


@pytest.mark.parametrize(("name", "kind", "preset"), PRESETS)
def test_declared_activations_are_what_is_kept_within_a_tenth(name, kind, preset):
    task = task_of(kind).model_copy(update={"sequence_length": 48})
    case = Case(PLUGINS[name], task, ModelSpec(name=name, preset=preset))
    shape = case.shape
    if total(shape) > SMALL:
        return
    for num_stages in (1, shape.layers):
        found = kept(case.build(num_stages), inputs(shape, task, 1), case.plugin.load().loss)
        for elements, part in zip(found, split(shape, num_stages), strict=True):
            expected = sum(shape.activations_per_block[block] for block in part.blocks)
            expected += shape.activations_embedding * part.first + shape.activations_head * part.last
            assert elements == pytest.approx(expected, rel=0.1), f"stage {part.index} of {num_stages}"
