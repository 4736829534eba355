"""BERT's weights as a DeBERTa-v2 checkpoint: the same hidden states, and what our stages make of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, BertModel, DebertaV2Model

from thinpipe.harness.errors import UserError
from thinpipe.harness.models import _minilm, base, deberta
from thinpipe.harness.pipeline.partition import split
from thinpipe.harness.spec import ModelSpec, TaskSpec

TASK = TaskSpec(name="classify", corpus="sentences", num_labels=2, vocab_size=300, sequence_length=12)
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "fine", "film"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    """A small BERT with weights large enough for attention to matter, and a tokenizer beside it."""
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=320, hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=100,
        max_position_embeddings=80, initializer_range=0.2,
    )  # fmt: skip
    model = BertModel(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=parameter.detach().mean().item(), std=0.3)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    return folder


@pytest.fixture(scope="module")
def converted(bert, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("parent") / "deberta"
    _minilm.convert(bert, folder)
    return folder


def sentences() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(5, 320, (4, 70), generator=torch.Generator().manual_seed(1))
    return ids, (torch.arange(70) < torch.tensor([70, 30, 5, 1]).unsqueeze(1)).long()


def test_hidden_states_are_berts_at_every_layer(bert, converted):
    ids, mask = sentences()
    models = [BertModel.from_pretrained(bert).eval(), DebertaV2Model.from_pretrained(converted).eval()]
    with torch.no_grad():
        theirs, ours = (m(ids, attention_mask=mask, output_hidden_states=True).hidden_states for m in models)
    assert len(theirs) == len(ours) == 4
    for layer, (expected, hidden) in enumerate(zip(theirs, ours, strict=True)):
        difference = (expected - hidden)[mask.bool()].abs().max().item()
        assert difference < 1e-5, f"layer {layer}"
        assert expected[mask.bool()].std() > 0.5
    with torch.no_grad():
        models[1].encoder.layer[0].attention.self.query_proj.weight /= 3**0.5
        moved = models[1](ids, attention_mask=mask).last_hidden_state
    assert (moved - theirs[-1])[mask.bool()].abs().max() > 1e-3, "the factor matters"


def test_it_is_a_checkpoint_of_the_plugin_without_a_head(converted):
    spec = ModelSpec(name="deberta", checkpoint=str(converted))
    shape = base.resolve(spec, TASK)
    assert (shape.layers, shape.width, shape.heads, shape.vocab_size, shape.positions) == (3, 48, 4, 320, 80)
    stages = [deberta.build(spec, shape, part, seed=0).eval() for part in split(shape, 3)]
    ids, mask = sentences()
    x = ids
    with torch.no_grad():
        expected = DebertaV2Model.from_pretrained(converted).eval()(ids, attention_mask=mask).last_hidden_state
        for stage in stages[:-1]:
            x = stage(x, attention_mask=mask)
        logits = stages[-1](x, attention_mask=mask)
        assert torch.equal(logits, stages[-1].classifier(stages[-1].pooler(expected)))


def test_relative_attention_starts_at_nothing_and_can_be_trained(converted):
    weights = load_file(converted / base.WEIGHTS)
    assert not weights["encoder.rel_embeddings.weight"].any()
    assert weights["encoder.rel_embeddings.weight"].shape == (2 * _minilm.BUCKETS, 48)
    model = DebertaV2Model.from_pretrained(converted)
    ids, mask = sentences()
    model(ids, attention_mask=mask).last_hidden_state[:, 0].square().sum().backward()
    assert model.encoder.rel_embeddings.weight.grad.any()


def test_the_tokenizer_comes_along_and_nothing_else(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokenizer("a fine film")["input_ids"] == [2, 5, 6, 7, 3]
    assert {path.name for path in converted.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer_config.json",
        "vocab.txt",
    }


def test_conversion_gives_the_same_weights_each_time_and_leaves_the_generator_alone(bert, converted, tmp_path):
    torch.manual_seed(9)
    before = torch.get_rng_state()
    _minilm.convert(bert, tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    for path in converted.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_bert_with_a_head_is_converted_too(bert, converted, tmp_path):
    whole = BertForSequenceClassification.from_pretrained(bert)
    whole.save_pretrained(tmp_path / "whole")
    _minilm.convert(tmp_path / "whole", tmp_path / "out")
    first, second = (load_file(folder / base.WEIGHTS) for folder in (converted, tmp_path / "out"))
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize(
    ("config", "drop", "message"),
    [
        ({"model_type": "roberta"}, None, "is of no BERT with absolute positions"),
        ({"position_embedding_type": "relative_key"}, None, "is of no BERT with absolute positions"),
        ({}, "encoder.layer.1.attention.self.query.bias", r"layer\.1\.attention\.self\.query\.bias is missing"),
        ({"intermediate_size": 64}, None, r"intermediate\.dense\.weight is of shape \(100, 48\), not \(64, 48\)"),
    ],
)
def test_what_is_no_such_bert_is_refused_and_leaves_no_checkpoint(bert, tmp_path, *, config, drop, message):
    source = tmp_path / "source"
    source.mkdir()
    values = json.loads((bert / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(values | config))
    weights = load_file(bert / base.WEIGHTS)
    save_file({name: value for name, value in weights.items() if name != drop}, source / base.WEIGHTS)
    with pytest.raises(UserError, match=message):
        _minilm.convert(source, tmp_path / "target")
    assert not (tmp_path / "target" / "config.json").exists()
