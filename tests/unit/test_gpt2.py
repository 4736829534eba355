"""GPT-2 in stages: one model, bit for bit, however many stages it has, and the one Hugging Face has."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

from thinpipe.harness.errors import UserError
from thinpipe.harness.models import _dropout, base, gpt2
from thinpipe.harness.pipeline.partition import split
from thinpipe.harness.spec import ModelSpec, TaskSpec

TASK = TaskSpec(vocab_size=320, sequence_length=21)
SPEC = ModelSpec(preset="micro", layers=5)
STAGES = [1, 2, 3, 4]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def stages_of(spec: ModelSpec, num_stages: int, seed: int = 0) -> list[torch.nn.Module]:
    shape = base.resolve(spec, TASK)
    return [gpt2.build(spec, shape, part, seed=seed) for part in split(shape, num_stages)]


def named(stages: list[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    pairs = [pair for stage in stages for pair in stage.named_parameters()]
    assert len(dict(pairs)) == len(pairs), "no name belongs to two stages"
    return dict(pairs)


def hf_name(name: str) -> str:
    return name if name.startswith("lm_head") else f"transformer.{name}"


def hugging_face(spec: ModelSpec, *, tied: bool = False, seed: int = 0) -> GPT2LMHeadModel:
    """Hugging Face's model with the weights of ours."""
    shape = base.resolve(spec, TASK)
    config = GPT2Config(
        vocab_size=shape.vocab_size, n_positions=shape.positions, n_embd=shape.width, n_layer=shape.layers,
        n_head=shape.heads, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False,
        activation_function="gelu_pytorch_tanh",
        bos_token_id=None, eos_token_id=None, tie_word_embeddings=tied, attn_implementation="sdpa",
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    weights = {hf_name(name): p.detach() for name, p in named(stages_of(spec, 1, seed)).items()}
    model.load_state_dict(weights, strict=True)
    return model.train()


def tokens(count: int = 3, seed: int = 1) -> torch.Tensor:
    return torch.randint(TASK.vocab_size, (count, 22), generator=torch.Generator().manual_seed(seed))


def forward_backward(stages: list[torch.nn.Module], rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits, loss) of a batch; gradients cross a boundary as values, the way a pipeline hands them over."""
    x, ends = rows[:, :-1], []
    for stage in stages:
        x = stage(x)
        ends.append(x)
        x = x.detach().requires_grad_()
        ends.append(x)
    logits = ends[-2]
    loss = gpt2.loss(logits, rows[:, 1:])
    loss.backward()
    for output, entry in zip(ends[-4::-2], ends[-3::-2], strict=True):
        output.backward(entry.grad)
    return logits.detach(), loss.detach()


def curve(parameters: list[torch.nn.Parameter], step, steps: int = 5) -> list[float]:
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        losses.append(step(tokens(seed=number)).item())
        optimizer.step()
    return losses


def test_the_partition_under_test_is_uneven():
    parts = split(base.resolve(SPEC, TASK), 3)
    assert sorted(len(part.blocks) for part in parts) != [1, 1, 1]
    assert sum(len(part.blocks) for part in parts) == 5


@pytest.mark.parametrize("num_stages", STAGES[1:])
def test_weights_logits_and_gradients_are_bit_equal_to_one_stage(num_stages):
    one, many = stages_of(SPEC, 1), stages_of(SPEC, num_stages)
    logits, loss = forward_backward(one, tokens())
    logits_many, loss_many = forward_backward(many, tokens())
    assert list(named(many)) == list(named(one)), "the model's order of parameters"
    assert torch.equal(logits_many, logits)
    assert torch.equal(loss_many, loss)
    for name, parameter in named(one).items():
        assert torch.equal(named(many)[name], parameter), name
        assert parameter.grad is not None, name
        assert torch.equal(named(many)[name].grad, parameter.grad), name


@pytest.mark.parametrize("num_stages", STAGES)
def test_logits_and_gradients_are_bit_equal_to_hugging_face(num_stages):
    stages, reference = stages_of(SPEC, num_stages), hugging_face(SPEC)
    rows = tokens()
    logits, loss = forward_backward(stages, rows)
    expected = reference(rows[:, :-1]).logits
    expected_loss = gpt2.loss(expected, rows[:, 1:])
    expected_loss.backward()
    assert torch.equal(logits, expected)
    assert torch.equal(loss, expected_loss.detach())
    theirs = dict(reference.named_parameters())
    assert [hf_name(name) for name in named(stages)] == list(theirs)
    for name, parameter in named(stages).items():
        assert torch.equal(parameter.grad, theirs[hf_name(name)].grad), name


def test_the_loss_curve_is_bit_equal_at_every_stage_count_and_to_hugging_face():
    reference = hugging_face(SPEC)

    def step(rows):
        loss = gpt2.loss(reference(rows[:, :-1]).logits, rows[:, 1:])
        loss.backward()
        return loss

    expected = curve(list(reference.parameters()), step)
    assert expected[-1] != expected[0]
    for count in STAGES:
        stages = stages_of(SPEC, count)
        assert curve(list(named(stages).values()), lambda rows, s=stages: forward_backward(s, rows)[1]) == expected


def test_a_fresh_model_is_hugging_faces_tied_model():
    rows = tokens()
    logits, _ = forward_backward(stages_of(SPEC, 2), rows)
    tied = hugging_face(SPEC, tied=True)
    assert tied.lm_head.weight is tied.transformer.wte.weight
    assert torch.equal(logits, tied(rows[:, :-1]).logits)
    weights = named(stages_of(SPEC, 3))
    assert torch.equal(weights["lm_head.weight"], weights["wte.weight"])


def test_the_head_is_trained_by_itself():
    stages = stages_of(SPEC, 1)
    optimizer = torch.optim.SGD(stages[0].parameters(), lr=0.1)
    forward_backward(stages, tokens())
    optimizer.step()
    weights = named(stages)
    assert not torch.equal(weights["lm_head.weight"], weights["wte.weight"])


def test_random_weights_follow_hugging_faces_distribution():
    spec = ModelSpec(preset="tiny", layers=3)
    shape = base.resolve(spec, TASK)
    config = GPT2Config(
        vocab_size=shape.vocab_size, n_positions=shape.positions, n_embd=shape.width, n_layer=3, n_head=4,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    theirs = dict(GPT2LMHeadModel(config).named_parameters())
    for name, parameter in named(stages_of(spec, 2)).items():
        if name == "lm_head.weight":
            continue
        expected = theirs[hf_name(name)].detach()
        if expected.unique().numel() == 1:
            assert torch.equal(parameter, expected), name
        else:
            assert parameter.std().item() == pytest.approx(expected.std().item(), rel=0.03), name
            assert abs(parameter.mean().item()) < 5 * expected.std().item() / parameter.numel() ** 0.5, name


def test_seeds_and_components_differ_and_the_global_generator_is_left_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second = named(stages_of(SPEC, 2, seed=0)), named(stages_of(SPEC, 2, seed=1))
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first["h.0.attn.c_attn.weight"], second["h.0.attn.c_attn.weight"])
    assert not torch.equal(first["h.0.attn.c_attn.weight"], first["h.1.attn.c_attn.weight"])


def digest(stage: torch.nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in stage.parameters())).hexdigest()


def test_another_process_makes_the_same_weights_and_importing_starts_no_thread():
    code = (
        "import hashlib, os\n"
        "from thinpipe.harness.models import base, gpt2\n"
        "from thinpipe.harness.pipeline.partition import split\n"
        "from thinpipe.harness.spec import ModelSpec, TaskSpec\n"
        "threads = len(os.listdir('/proc/self/task'))\n"
        "spec = ModelSpec(preset='micro'); shape = base.resolve(spec, TaskSpec(vocab_size=320))\n"
        "stage = gpt2.build(spec, shape, split(shape, 2)[1], seed=3)\n"
        "data = b''.join(p.detach().numpy().tobytes() for p in stage.parameters())\n"
        "print(threads, hashlib.sha256(data).hexdigest())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stdout.split() == ["1", digest(stages_of(ModelSpec(preset="micro"), 2, seed=3)[1])]


def test_loss_with_weights_is_the_mean_over_what_is_no_padding():
    logits = torch.randn(4, 6, 11, generator=torch.Generator().manual_seed(0))
    targets = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(1))
    whole = gpt2.loss(logits[:3], targets[:3])
    weights = torch.tensor([1.0, 1.0, 1.0, 0.0])
    pieces = [gpt2.loss(logits[i : i + 2], targets[i : i + 2], weights[i : i + 2]) for i in (0, 2)]
    assert sum(pieces) / weights.sum() == pytest.approx(float(whole), rel=1e-6)
    by_hand = -logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).mean()
    assert float(gpt2.loss(logits, targets)) == pytest.approx(float(by_hand), rel=1e-5)


# --- shapes ----------------------------------------


def test_resolve_needs_no_torch():
    code = (
        "import sys\nfrom thinpipe.harness.models.base import resolve\n"
        "from thinpipe.harness.spec import ModelSpec, TaskSpec\nresolve(ModelSpec(), TaskSpec())\n"
        "assert not {'torch', 'transformers', 'safetensors'} & set(sys.modules), 'imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("spec", "task", "message"),
    [
        (ModelSpec(preset="tinny"), TaskSpec(), r"unknown preset 'tinny'.*Did you mean 'tiny'\?"),
        (ModelSpec(name="gpt3"), TaskSpec(), r"unknown model 'gpt3'.*Did you mean 'gpt2'\?"),
        (ModelSpec(width=130), TaskSpec(), r"width 130 cannot be divided among model.heads 4"),
        (ModelSpec(heads=3), TaskSpec(), r"width 128 cannot be divided among model.heads 3"),
        (ModelSpec(), TaskSpec(sequence_length=257), r"257 is longer than the model's 256 positions"),
        (
            ModelSpec(checkpoint="/nowhere/at/all"),
            TaskSpec(),
            r"/nowhere/at/all is no directory.*config\.json",
        ),
    ],
)
def test_sizes_that_cannot_be_are_refused(spec, task, message):
    with pytest.raises(UserError, match=message):
        base.resolve(spec, task)


def test_overrides_replace_the_presets_sizes():
    shape = base.resolve(ModelSpec(preset="tiny", layers=7, width=96, heads=3), TaskSpec(vocab_size=999))
    assert (shape.layers, shape.width, shape.heads, shape.vocab_size, shape.positions) == (7, 96, 3, 999, 256)
    assert len(shape.parameters_per_block) == 7


# --- checkpoints ----------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """As Hugging Face writes it: tied, so without the head; few of its settings are the defaults."""
    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=330, n_positions=48, n_embd=32, n_layer=3, n_head=2, n_inner=80,
        activation_function="relu", layer_norm_epsilon=1e-3, scale_attn_by_inverse_layer_idx=True,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("checkpoint")
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def copy(saved: Path, target: Path, *, change=lambda weights: weights, **config) -> Path:
    """The checkpoint again with its tensors and its configuration changed (None removes a key)."""
    target.mkdir(exist_ok=True)
    data = json.loads((saved / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps({k: v for k, v in data.items() if v is not None}))
    save_file(change(load_file(saved / base.WEIGHTS)), target / base.WEIGHTS)
    return target


def logits_of(folder: Path, num_stages: int = 2) -> torch.Tensor:
    x = tokens()[:, :-1]
    for stage in stages_of(ModelSpec(checkpoint=str(folder)), num_stages):
        x = stage(x)
    return x.detach()


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_a_checkpoint_gives_hugging_faces_logits(saved, num_stages):
    reference = GPT2LMHeadModel.from_pretrained(saved, attn_implementation="sdpa").eval()
    assert not [key for key in load_file(saved / base.WEIGHTS) if key.startswith("lm_head")]
    assert torch.equal(logits_of(saved, num_stages), reference(tokens()[:, :-1]).logits)


def test_a_checkpoints_sizes_are_its_own_and_its_counts_are_true(saved):
    spec = ModelSpec(checkpoint=str(saved))
    shape = base.resolve(spec, TASK)
    assert (shape.layers, shape.width, shape.heads, shape.vocab_size, shape.positions) == (3, 32, 2, 330, 48)
    stored = GPT2LMHeadModel.from_pretrained(saved)
    assert shape.parameters_per_block[0] == sum(p.numel() for p in stored.transformer.h[0].parameters())
    assert base.resolve(spec.model_copy(update={"layers": 3}), TASK) == shape


def test_shards_give_the_same_model(saved, tmp_path):
    GPT2LMHeadModel.from_pretrained(saved).save_pretrained(tmp_path, max_shard_size="20kB")
    assert (tmp_path / base.INDEX).exists()
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert torch.equal(logits_of(tmp_path), logits_of(saved))
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(UserError, match=rf"{gone.name}, not found"):
        base.resolve(ModelSpec(checkpoint=str(tmp_path)), TASK)


def test_a_bare_gpt2model_has_no_prefix(saved, tmp_path):
    GPT2Model.from_pretrained(saved).save_pretrained(tmp_path)
    assert "wte.weight" in load_file(tmp_path / base.WEIGHTS)
    assert torch.equal(logits_of(tmp_path), logits_of(saved))


def test_an_untied_checkpoint_keeps_its_head_and_needs_it(saved, tmp_path):
    head = torch.randn(330, 32, generator=torch.Generator().manual_seed(9))
    untied = copy(saved, tmp_path / "a", change=lambda w: w | {"lm_head.weight": head}, tie_word_embeddings=False)
    stage = stages_of(ModelSpec(checkpoint=str(untied)), 3)[-1]
    assert torch.equal(stage.lm_head.weight, head)
    headless = copy(saved, tmp_path / "b", tie_word_embeddings=False)
    with pytest.raises(UserError, match=r"lacks 1 tensor\(s\) of this model: lm_head\.weight"):
        stages_of(ModelSpec(checkpoint=str(headless)), 1)


def test_half_precision_weights_become_float32(saved, tmp_path):
    half = copy(saved, tmp_path, change=lambda w: {k: v.half() for k, v in w.items()}, dtype="float16")
    weights = named(stages_of(ModelSpec(checkpoint=str(half)), 2))
    assert {p.dtype for p in weights.values()} == {torch.float32}
    name = "h.1.mlp.c_fc.weight"
    assert torch.equal(weights[name], load_file(saved / base.WEIGHTS)[f"transformer.{name}"].half().float())


def test_a_stage_needs_only_its_own_tensors(saved, tmp_path):
    partial = copy(saved, tmp_path, change=lambda w: {k: v for k, v in w.items() if ".h.0." not in k})
    shape = base.resolve(ModelSpec(checkpoint=str(partial)), TASK)
    first, last = split(shape, 2)
    assert first.blocks.start == 0
    gpt2.build(ModelSpec(checkpoint=str(partial)), shape, last, seed=0)
    with pytest.raises(UserError, match=r"lacks 12 tensor\(s\) of this model: h\.0\.ln_1\.weight, .*, \.\.\."):
        gpt2.build(ModelSpec(checkpoint=str(partial)), shape, first, seed=0)


def test_tensors_of_another_shape_or_type_are_refused(saved, tmp_path):
    wide = copy(saved, tmp_path / "a", n_inner=96)
    with pytest.raises(UserError, match=r"h\.0\.mlp\.c_fc\.weight of .* has shape \(32, 80\).*\(32, 96\)"):
        stages_of(ModelSpec(checkpoint=str(wide)), 1)
    integer = copy(saved, tmp_path / "b", change=lambda w: {k: (100 * v).to(torch.int8) for k, v in w.items()})
    with pytest.raises(UserError, match=r"torch\.int8: quantised checkpoints are not supported"):
        stages_of(ModelSpec(checkpoint=str(integer)), 1)


def test_checkpoints_that_are_none_say_what_is_missing(saved, tmp_path):
    spec = ModelSpec(checkpoint=str(tmp_path))
    with pytest.raises(UserError, match=r"has no config\.json"):
        base.resolve(spec, TASK)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is no JSON"):
        base.resolve(spec, TASK)
    (tmp_path / "config.json").write_bytes((saved / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UserError, match=r"has no model\.safetensors.*pytorch_model\.bin is pickled"):
        base.resolve(spec, TASK)
    whole = (saved / base.WEIGHTS).read_bytes()
    (tmp_path / base.WEIGHTS).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        stages_of(spec, 1)


@pytest.mark.parametrize(
    ("config", "update", "task", "message"),
    [
        ({"model_type": "bert"}, {}, TASK, r"of family 'bert'.*needs 'gpt2'"),
        ({"n_head": None}, {}, TASK, r"lacks n_head"),
        ({"n_layer": "three"}, {}, TASK, r"n_layer is 'three', not a positive integer"),
        ({}, {"layers": 2}, TASK, r"model\.layers 2 contradicts .* n_layer is 3"),
        ({}, {"preset": "small"}, TASK, r"model\.preset 'small' has no effect"),
        ({}, {}, TaskSpec(vocab_size=331, sequence_length=8), r"331 is more than the checkpoint's 330"),
        ({}, {}, TaskSpec(vocab_size=320, sequence_length=49), r"49 is longer than the model's 48 positions"),
    ],
)
def test_checkpoints_at_odds_with_the_run_are_refused(saved, tmp_path, *, config, update, task, message):
    folder = copy(saved, tmp_path, **config)
    with pytest.raises(UserError, match=message):
        base.resolve(ModelSpec(checkpoint=str(folder), **update), task)


# --- what else a run may ask for ----------------------------------------

CLASSES = TaskSpec(name="classify", corpus="mine.csv", num_labels=3, vocab_size=320, sequence_length=21)


def classifier(spec: ModelSpec, num_stages: int = 2, seed: int = 0) -> list[torch.nn.Module]:
    shape = base.resolve(spec, CLASSES)
    return [gpt2.build(spec, shape, part, seed=seed) for part in split(shape, num_stages)]


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [("small", 124_439_808), ("medium", 354_823_168), ("large", 774_030_080), ("xl", 1_557_611_200)],
)
def test_presets_have_the_published_models_parameters(preset, parameters):
    """Of the tied models; as Hugging Face counts them."""
    shape = base.resolve(ModelSpec(preset=preset), TaskSpec(vocab_size=50257, sequence_length=1024))
    head = shape.parameters_head - shape.vocab_size * shape.width
    assert sum(shape.parameters_per_block) + shape.parameters_embedding + head == parameters


def test_summed_gradients_of_the_copies_are_the_tied_models():
    spec = SPEC.model_copy(update={"shared": "summed"})
    rows, tied = tokens(), hugging_face(SPEC, tied=True)
    gpt2.loss(tied(rows[:, :-1]).logits, rows[:, 1:]).backward()
    for count in STAGES:
        stages = stages_of(spec, count)
        forward_backward(stages, rows)
        held = [parameter for stage in stages for parameter in stage.shared.get("wte", [])]
        assert [id(parameter) for parameter in held] == [id(stages[0].wte.weight), id(stages[-1].lm_head.weight)]
        torch.testing.assert_close(sum(p.grad for p in held), tied.transformer.wte.weight.grad, rtol=1e-5, atol=1e-7)
    assert all(stage.shared == {} for stage in stages_of(SPEC, 2))


def test_summed_is_refused_where_nothing_is_shared(saved, tmp_path):
    head = torch.randn(330, 32, generator=torch.Generator().manual_seed(9))
    untied = copy(saved, tmp_path, change=lambda w: w | {"lm_head.weight": head}, tie_word_embeddings=False)
    with pytest.raises(UserError, match=r"'summed' needs a head that equals the token embedding.*Use 'copies'"):
        stages_of(ModelSpec(checkpoint=str(untied), shared="summed"), 2)
    with pytest.raises(UserError, match=r"'summed' has no effect on a classification"):
        classifier(ModelSpec(preset="micro", shared="summed"))


def test_a_language_model_becomes_a_classifier_with_a_new_head(saved):
    first, again, other = (classifier(ModelSpec(checkpoint=str(saved)), seed=seed)[-1] for seed in (0, 0, 1))
    assert first.score.weight.shape == (3, 32)
    assert torch.equal(first.score.weight, again.score.weight)
    assert not torch.equal(first.score.weight, other.score.weight)
    assert 0.015 < first.score.weight.std() < 0.025
    assert torch.equal(first.ln_f.weight, other.ln_f.weight)


def test_a_classifiers_checkpoint_keeps_its_head_and_must_have_as_many_classes(tmp_path):
    spec = ModelSpec(preset="micro")
    theirs = gpt2.reference(spec, base.resolve(spec, CLASSES))
    stage = classifier(spec, 1)[0]
    theirs.load_state_dict({gpt2.stored_names(name)[0]: value for name, value in stage.state_dict().items()})
    theirs.save_pretrained(tmp_path)
    loaded = classifier(ModelSpec(checkpoint=str(tmp_path)), 1, seed=8)[0]
    assert torch.equal(loaded.score.weight, stage.score.weight)
    two = CLASSES.model_copy(update={"num_labels": 2})
    shape = base.resolve(ModelSpec(checkpoint=str(tmp_path)), two)
    with pytest.raises(UserError, match=r"score\.weight of .* has shape \(3, \d+\), this model needs \(2, "):
        gpt2.build(ModelSpec(checkpoint=str(tmp_path)), shape, split(shape, 1)[0], seed=0)


def test_a_classifier_sees_no_padding_and_padding_comes_last():
    stage = classifier(ModelSpec(preset="micro"), 1)[0]
    rows = tokens()[:, :-1]
    mask = (torch.arange(21) < torch.tensor([[21], [5], [1]])).long()
    found = stage(rows, attention_mask=mask)
    assert torch.equal(stage(rows.masked_fill(mask == 0, 7), attention_mask=mask), found)
    alone = stage(rows[1:2, :5], attention_mask=mask[1:2, :5])
    torch.testing.assert_close(alone, found[1:2], rtol=1e-5, atol=1e-6)
    with pytest.raises(AssertionError, match="padding must follow the tokens"):
        stage(rows, attention_mask=mask.flip(1))
    with pytest.raises(AssertionError, match="a row has no token"):
        stage(rows, attention_mask=mask * 0)


def test_attention_with_dropout_is_hugging_faces_eager_attention(saved):
    """Held without dropping, scaled by the layer's index too; what is dropped, tests/unit/test_dropout.py holds."""
    reference = GPT2LMHeadModel.from_pretrained(saved, attn_implementation="eager").eval()
    x = tokens()[:, :-1]
    expected = reference(x).logits
    for stage in stages_of(ModelSpec(checkpoint=str(saved), dropout=0.1), 2):
        x = stage.eval()(x)
    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6)


def test_every_dropout_of_hugging_faces_model_is_there_and_drops():
    spec = SPEC.model_copy(update={"dropout": 0.25})
    dropped = {
        module.name: module.p
        for stage in stages_of(spec, 3)
        for module in stage.modules()
        if isinstance(module, _dropout.SampleDropout)
    }
    shape = base.resolve(spec, TASK)
    theirs = {
        name.removeprefix("transformer."): module.p
        for name, module in gpt2.reference(spec, shape).named_modules()
        if isinstance(module, torch.nn.Dropout)
    }
    assert dropped == theirs
    assert len(theirs) == 1 + 3 * 5
    assert set(theirs.values()) == {0.25}


def test_the_reference_is_tied_where_the_stages_stay_equal():
    shape = base.resolve(SPEC, TASK)
    apart = gpt2.reference(SPEC, shape)
    assert apart.lm_head.weight is not apart.transformer.wte.weight
    assert not apart.config.tie_word_embeddings
    summed = SPEC.model_copy(update={"shared": "summed"})
    tied = gpt2.reference(summed, base.resolve(summed, TASK))
    assert tied.lm_head.weight is tied.transformer.wte.weight
