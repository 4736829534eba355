"""DeBERTa in stages: Hugging Face's model, bit for bit, with masks, positions and the convolution at any cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DebertaV2ForSequenceClassification, DebertaV2Model

from thinpipe.harness.errors import UserError
from thinpipe.harness.models import _dropout, base, deberta
from thinpipe.harness.pipeline.partition import split
from thinpipe.harness.spec import ModelSpec, TaskSpec

TASK = TaskSpec(name="classify", corpus="sentences", num_labels=3, vocab_size=320, sequence_length=21)
SPEC = ModelSpec(name="deberta", preset="micro", layers=5)
CONVOLUTION = ModelSpec(name="deberta", preset="xxlarge", layers=4, width=32, heads=2)
ABSOLUTE = ModelSpec(name="deberta", preset="minilm", layers=4, width=48, heads=4)
VARIANTS = {"v3": SPEC, "convolution": CONVOLUTION, "absolute": ABSOLUTE}
LENGTHS = (21, 9, 1, 14)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def shape_of(spec: ModelSpec = SPEC, **task) -> base.ModelShape:
    return base.resolve(spec, TASK.model_copy(update=task))


def stages_of(spec: ModelSpec, num_stages: int, *, seed: int = 0, recompute: bool = False, cuts=None, **task):
    shape = shape_of(spec, **task)
    parts = split(shape, num_stages, cuts)
    return [deberta.build(spec, shape, part, seed=seed, recompute=recompute) for part in parts]


def named(stages) -> dict[str, torch.nn.Parameter]:
    """Each name once: copies that stages share are those of the first."""
    found: dict[str, torch.nn.Parameter] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            found.setdefault(name, parameter)
    return found


def hugging_face(spec: ModelSpec, *, seed: int = 0) -> DebertaV2ForSequenceClassification:
    model = deberta.reference(spec, shape_of(spec))
    weights = {deberta.stored_names(n)[0]: p.detach() for n, p in named(stages_of(spec, 1, seed=seed)).items()}
    model.load_state_dict(weights, strict=True)
    return model.train()


def batch(number: int = 0, lengths=LENGTHS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sentences of these lengths, padded with any ids; their mask; their classes."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(TASK.vocab_size, (len(lengths), max(lengths)), generator=generator)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)).long()
    return ids, mask, torch.randint(3, (len(lengths),), generator=generator)


def forward_backward(stages, x, mask, y):
    """(logits, loss, boundary tensors, their gradients), handed over as values, as a pipeline does."""
    entries, outputs = [], []
    for stage in stages:
        outputs.append(stage(x, attention_mask=mask))
        x = outputs[-1].detach().requires_grad_()
        entries.append(x)
    loss = deberta.loss(outputs[-1], y)
    loss.backward()
    for output, entry in zip(outputs[-2::-1], entries[-2::-1], strict=True):
        output.backward(entry.grad)
    return outputs[-1].detach(), loss.detach(), [o.detach() for o in outputs[:-1]], [e.grad for e in entries[:-1]]


def train(parameters, step, steps: int = 4) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=3e-3)
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        losses.append(step(*batch(number)).item())
        optimizer.step()
    return losses


# --- one model, at any cut -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("spec", VARIANTS.values(), ids=VARIANTS)
def test_logits_and_gradients_are_bit_equal_to_hugging_face(spec, num_stages, recompute):
    stages, reference = stages_of(spec, num_stages, recompute=recompute), hugging_face(spec)
    x, mask, y = batch()
    logits, loss, _, _ = forward_backward(stages, x, mask, y)
    expected = reference(input_ids=x, attention_mask=mask).logits
    expected_loss = deberta.loss(expected, y)
    expected_loss.backward()
    assert torch.equal(logits, expected)
    assert torch.equal(loss, expected_loss.detach())
    theirs = dict(reference.named_parameters())
    assert {deberta.stored_names(name)[0] for name in named(stages)} == set(theirs)
    for stage in stages:
        for name, parameter in stage.named_parameters():
            like = theirs[deberta.stored_names(name)[0]]
            assert torch.equal(parameter, like), name
            if parameter.requires_grad:
                assert torch.equal(parameter.grad, like.grad), name


@pytest.mark.parametrize("cuts", [[1], [4], [2, 3], [1, 2, 3, 4]], ids=str)
def test_parameters_have_one_order_and_one_value_at_any_cut(cuts):
    one, many = stages_of(SPEC, 1), stages_of(SPEC, len(cuts) + 1, cuts=cuts)
    assert list(named(many)) == list(named(one))
    for name, parameter in named(one).items():
        assert torch.equal(named(many)[name], parameter), name


def test_the_loss_curve_is_bit_equal_at_every_cut_and_to_hugging_face_with_frozen_positions():
    reference = hugging_face(SPEC)
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_("rel_embeddings" not in name and "encoder.LayerNorm" not in name)

    def step(x, mask, y):
        loss = deberta.loss(reference(input_ids=x, attention_mask=mask).logits, y)
        loss.backward()
        return loss

    expected = train(reference.parameters(), step)
    assert len(set(expected)) == 4
    for count in (1, 2, 5):
        stages = stages_of(SPEC, count)
        parameters = [p for stage in stages for p in stage.parameters()]
        assert train(parameters, lambda *b, s=stages: forward_backward(s, *b)[1]) == expected


def test_the_convolution_belongs_to_the_first_block_and_takes_part():
    stages = stages_of(CONVOLUTION, 4)
    assert [any("conv" in name for name in dict(stage.named_parameters())) for stage in stages] == [True] + [False] * 3
    x, mask, _ = batch()
    before = stages[0](x, attention_mask=mask)
    with torch.no_grad():
        stages[0].encoder.conv.conv.bias += 1.0
    assert not torch.equal(stages[0](x, attention_mask=mask), before)


# --- what stages share ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [1, 3])
def test_frozen_positions_get_no_gradient(num_stages):
    stages = stages_of(SPEC, num_stages)
    forward_backward(stages, *batch())
    for stage in stages:
        assert stage.shared == {}
        frozen = {name for name, p in stage.named_parameters() if not p.requires_grad}
        assert frozen == {"encoder.rel_embeddings.weight", "encoder.LayerNorm.weight", "encoder.LayerNorm.bias"}
        assert all((p.grad is None) == (name in frozen) for name, p in stage.named_parameters())


@pytest.mark.parametrize("spec", VARIANTS.values(), ids=VARIANTS)
def test_summed_gradients_of_the_copies_are_the_whole_models(spec):
    summed = spec.model_copy(update={"shared": "summed"})
    stages, reference = stages_of(summed, 3), hugging_face(spec)
    x, mask, y = batch()
    forward_backward(stages, x, mask, y)
    deberta.loss(reference(input_ids=x, attention_mask=mask).logits, y).backward()
    theirs = dict(reference.named_parameters())
    keys = {name for name in named(stages) if name.startswith(("encoder.rel_", "encoder.LayerNorm"))}
    assert keys
    for key in keys:
        copies = [copy for stage in stages for copy in stage.shared[key]]
        assert len(copies) == 3
        total = torch.stack([copy.grad for copy in copies]).sum(dim=0)
        assert total.abs().max() > 0
        torch.testing.assert_close(total, theirs[f"deberta.{key}"].grad, rtol=1e-4, atol=1e-7)
    assert all(set(stage.shared) == keys for stage in stages)


# --- padding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", VARIANTS.values(), ids=VARIANTS)
def test_what_stands_in_the_padding_changes_nothing(spec):
    x, mask, y = batch()
    other = torch.where(mask.bool(), x, (x + 7) % TASK.vocab_size)
    first, second = stages_of(spec, 2), stages_of(spec, 2)
    logits, _, boundaries, gradients = forward_backward(first, x, mask, y)
    assert torch.equal(forward_backward(second, other, mask, y)[0], logits)
    for name, parameter in named(first).items():
        assert parameter.grad is None or torch.equal(named(second)[name].grad, parameter.grad), name
    padding = ~mask.bool()
    assert (boundaries[0][padding] == 0).all(), "padding crosses as zeros"
    assert (gradients[0][padding] == 0).all()
    assert (boundaries[0][~padding] != 0).any()

    noise = torch.where(padding.unsqueeze(-1), 100.0, boundaries[0])
    assert torch.equal(second[1](noise, attention_mask=mask), logits)
    for stage in (first[0], second[0]):
        stage.zero_grad()
    first[0](x, attention_mask=mask).backward(gradients[0])
    second[0](x, attention_mask=mask).backward(torch.where(padding.unsqueeze(-1), 100.0, gradients[0]))
    for name, parameter in first[0].named_parameters():
        assert parameter.grad is None or torch.equal(dict(second[0].named_parameters())[name].grad, parameter.grad)


@pytest.mark.parametrize("spec", VARIANTS.values(), ids=VARIANTS)
def test_more_padding_changes_nothing(spec):
    x, mask, y = batch(lengths=(9, 4, 1))
    stages = stages_of(spec, 2)
    logits = forward_backward(stages, x, mask, y)[0]
    wider = torch.nn.functional.pad(x, (0, 12), value=5), torch.nn.functional.pad(mask, (0, 12))
    torch.testing.assert_close(forward_backward(stages, *wider, y)[0], logits, rtol=1e-5, atol=1e-6)
    alone = forward_backward(stages, x[1:2, :4], mask[1:2, :4], y[1:2])[0]
    torch.testing.assert_close(alone, logits[1:2], rtol=1e-5, atol=1e-6)


def test_masks_of_any_type_are_the_same_mask():
    stage = stages_of(CONVOLUTION, 1)[0]
    x, mask, _ = batch()
    logits = stage(x, attention_mask=mask)
    for like in (mask.bool(), mask.float(), mask.int()):
        assert torch.equal(stage(x, attention_mask=like), logits)


# --- dropout -------------------------------------------------------------------------------------------------------


def dropped(num_stages: int, ids, *, step: int = 0, recompute: bool = False, spec=CONVOLUTION, **update):
    """Logits, and gradients by name."""
    spec = spec.model_copy(update={"dropout": 0.2, **update})
    stages = stages_of(spec, num_stages, recompute=recompute)
    _dropout.visit(ids, step)
    logits, _, _, _ = forward_backward(stages, *batch())
    return logits, {name: p.grad for name, p in named(stages).items()}


@pytest.mark.parametrize("spec", [CONVOLUTION, ABSOLUTE], ids=["convolution", "absolute"])
def test_dropout_is_the_same_at_any_cut_and_on_recomputation(spec):
    before = torch.get_rng_state()
    logits, gradients = dropped(1, (4, 5, 6, 7), spec=spec)
    assert torch.equal(torch.get_rng_state(), before)
    for count, recompute in ((1, True), (3, False), (4, True)):
        other, theirs = dropped(count, (4, 5, 6, 7), recompute=recompute, spec=spec)
        assert torch.equal(other, logits)
        for name, gradient in gradients.items():
            assert gradient is None or torch.equal(theirs[name], gradient), name


def test_dropout_is_keyed_by_sample_or_by_step_too():
    logits, _ = dropped(1, (4, 5, 6, 7))
    assert torch.equal(dropped(1, (4, 5, 6, 7), step=3)[0], logits)
    assert not torch.equal(dropped(1, (4, 5, 6, 8))[0][3], logits[3])
    each = dropped(1, (4, 5, 6, 7), dropout_masks="step")[0]
    assert not torch.equal(dropped(1, (4, 5, 6, 7), step=3, dropout_masks="step")[0], each)


def test_every_dropout_is_keyed_or_off():
    spec = SPEC.model_copy(update={"dropout": 0.2})
    stage = stages_of(spec, 1)[0]
    left = {n: m.p for n, m in stage.named_modules() if isinstance(m, torch.nn.Dropout)}
    assert set(left.values()) == {0.0}
    assert set(left) == {"pooler.dropout", *(f"encoder.layer.{i}.attention.self.pos_dropout" for i in range(5))}
    replaced = [n for n, m in stage.named_modules() if isinstance(m, _dropout.SampleDropout)]
    assert len(replaced) == 2 + 3 * 5, "embeddings and classifier; attention and two outputs of each block"


# --- sizes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", VARIANTS.values(), ids=VARIANTS)
def test_declared_counts_are_hugging_faces(spec):
    shape = shape_of(spec)
    total = sum(shape.parameters_per_block) + shape.parameters_embedding + shape.parameters_head
    with torch.device("meta"):
        assert sum(p.numel() for p in deberta.reference(spec, shape).parameters()) == total
    last = stages_of(spec, shape.layers)[-1]
    own = sum(p.numel() for name, p in last.named_parameters() if not name.startswith(deberta.SHARED))
    assert own == shape.parameters_per_block[-1] + shape.parameters_head


@pytest.mark.parametrize(
    ("preset", "vocab_size", "millions"), [("base", 128100, 184), ("large", 128100, 435), ("xxlarge", 128100, 1567)]
)
def test_published_sizes(preset, vocab_size, millions):
    """He et al.: v3-base 86 M + 98 M of embeddings, v3-large 304 M + 131 M, v2-xxlarge 1.5 G."""
    shape = shape_of(ModelSpec(name="deberta", preset=preset), vocab_size=vocab_size)
    total = sum(shape.parameters_per_block) + shape.parameters_embedding + shape.parameters_head
    assert total / 1e6 == pytest.approx(millions, rel=0.005)


@pytest.mark.parametrize("spec", [ModelSpec(name="deberta", preset="tiny"), ABSOLUTE], ids=["tiny", "absolute"])
def test_declared_kept_elements_are_nearly_the_real_ones(spec):
    shape, stage = shape_of(spec, sequence_length=48), stages_of(spec, 1, sequence_length=48)[0]
    own = {tensor.untyped_storage().data_ptr() for tensor in [*stage.parameters(), *stage.buffers()]}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x, mask, _ = batch(lengths=(48,) * 8)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = stage(x, attention_mask=mask)
    measured = sum(size for pointer, size in kept.items() if pointer not in own) / 4 / len(logits)
    declared = sum(shape.activations_per_block) + shape.activations_embedding + shape.activations_head
    assert declared == pytest.approx(measured, rel=0.05)


# --- weights -------------------------------------------------------------------------------------------------------


def test_random_weights_follow_hugging_faces_distribution_and_the_seed():
    before = torch.get_rng_state()
    ours, other = named(stages_of(CONVOLUTION, 2)), named(stages_of(CONVOLUTION, 2, seed=1))
    assert torch.equal(torch.get_rng_state(), before)
    theirs = DebertaV2ForSequenceClassification(deberta._config(CONVOLUTION, shape_of(CONVOLUTION)))
    for name, like in theirs.named_parameters():
        value = ours[name.removeprefix("deberta.")]
        if like.unique().numel() == 1:
            assert torch.equal(value, like), name
            continue
        assert not torch.equal(value, other[name.removeprefix("deberta.")]), name
        if like.numel() > 1000:
            assert value.std().item() == pytest.approx(like.std().item(), rel=0.1), name


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    """An encoder alone, as pretrained ones are published: no pooler, no classifier."""
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(3)
    config = deberta._config(CONVOLUTION, shape_of(CONVOLUTION))
    config.pad_token_id = 0
    DebertaV2Model(config).save_pretrained(folder)
    return folder


def test_a_pretrained_encoder_gets_a_head_of_the_seed(encoder):
    spec = ModelSpec(name="deberta", checkpoint=str(encoder))
    stored = load_file(encoder / base.WEIGHTS)
    heads = []
    for seed, count in ((0, 1), (0, 3), (1, 2)):
        weights = named(stages_of(spec, count, seed=seed))
        heads.append({name: weights.pop(name) for name in list(weights) if name.startswith(deberta.HEAD)})
        assert set(weights) == set(stored)
        assert all(torch.equal(value, stored[name]) for name, value in weights.items())
    assert all(torch.equal(heads[1][name], value) for name, value in heads[0].items())
    assert not torch.equal(heads[2]["classifier.weight"], heads[0]["classifier.weight"])
    assert heads[0]["classifier.weight"].std().item() == pytest.approx(0.02, rel=0.3)


def test_a_fine_tuned_checkpoint_is_loaded_whole_and_loads_in_transformers(tmp_path, encoder):
    whole = hugging_face(CONVOLUTION, seed=5)
    whole.save_pretrained(tmp_path)
    spec = ModelSpec(name="deberta", checkpoint=str(tmp_path))
    x, mask, y = batch()
    logits = forward_backward(stages_of(spec, 3), x, mask, y)[0]
    assert torch.equal(logits, whole(input_ids=x, attention_mask=mask).logits)
    loaded = DebertaV2ForSequenceClassification.from_pretrained(tmp_path).train()
    for module in loaded.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    assert torch.equal(loaded(input_ids=x, attention_mask=mask).logits, logits)
    with pytest.raises(UserError, match=r"classifier\.weight .*\(3, 32\).*\(2, 32\)"):
        stages_of(spec, 1, num_labels=2)


def test_only_the_head_may_be_missing(encoder, tmp_path):
    for path in encoder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    stored = load_file(encoder / base.WEIGHTS)
    del stored["encoder.conv.conv.bias"], stored["encoder.rel_embeddings.weight"]
    save_file(stored, tmp_path / base.WEIGHTS)
    spec = ModelSpec(name="deberta", checkpoint=str(tmp_path))
    shape = shape_of(spec)
    first, last = split(shape, 2)
    with pytest.raises(UserError, match=r"lacks 2 tensor"):
        deberta.build(spec, shape, first, seed=0)
    with pytest.raises(UserError, match=r"lacks 1 tensor.*encoder\.rel_embeddings\.weight"):
        deberta.build(spec, shape, last, seed=0)


def test_a_checkpoints_own_configuration_holds_but_for_dropout(encoder, tmp_path):
    for path in encoder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((encoder / "config.json").read_text())
    changed = {"layer_norm_eps": 0.5, "id2label": {"0": "no"}, "label2id": {"no": 0}, "hidden_dropout_prob": 0.3}
    (tmp_path / "config.json").write_text(json.dumps(config | changed))
    spec = ModelSpec(name="deberta", checkpoint=str(tmp_path))
    stage = stages_of(spec, 1)[0]
    assert stage.encoder.LayerNorm.eps == 0.5
    assert stage.classifier.out_features == 3
    assert {m.p for m in stage.modules() if isinstance(m, torch.nn.Dropout)} == {0.0}
