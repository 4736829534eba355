"""BERT weights as a DeBERTa-v2 checkpoint: the same function, ready to be fine-tuned with relative attention.

DeBERTa-v2 with absolute positions in its input is BERT plus attention between content and relative positions. That
attention starts at exactly nothing here: embeddings of relative positions and the biases of their projections are zero.
The projections themselves are random, so that training can take it up (`model.shared = "summed"`; frozen embeddings
stay zero). Two further terms in the scores make DeBERTa divide all of them by sqrt(3 d) where BERT has sqrt(d), d the
size of a head: queries are multiplied by sqrt(3).

Made for all-MiniLM-L6-v2 (6 x 384, 12 heads; preset `minilm` is its size), fit for any BERT.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import DebertaV2Config, DebertaV2Model

from thinpipe.harness.errors import UserError
from thinpipe.harness.models.base import WEIGHTS, checkpoint_config, checkpoint_files
from thinpipe.harness.models.deberta import ABSOLUTE, PUBLISHED

BUCKETS = 64
# What a BERT and a DeBERTa-v2 configuration call the same.
KEPT = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "max_position_embeddings",
    "type_vocab_size",
    "initializer_range",
    "layer_norm_eps",
    "pad_token_id",
)
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt", "added_tokens.json")
PROJECTIONS = ("query", "key", "value")


def convert(source: Path, target: Path) -> None:
    """Write the BERT of folder `source` to folder `target` as a DeBERTa-v2 encoder, with its tokenizer beside it.

    source: config.json of model_type bert, safetensors, tokenizer files. target: made where it is missing; the same
    bytes each time; its config.json comes last, so that a folder that has one is whole. Pooler and classifier are
    left out: DeBERTa's are others. Hidden states at tokens are BERT's within fp32 rounding (3e-6 for MiniLM).
    Raises UserError for a source that is no such folder, or a BERT with relative positions.
    """
    values = checkpoint_config(source)
    if values.get("model_type") != "bert" or values.get("position_embedding_type", "absolute") != "absolute":
        raise UserError(f"{source}: config.json is of no BERT with absolute positions, and only that can be converted.")
    config = DebertaV2Config.from_dict(
        PUBLISHED | ABSOLUTE | {"position_buckets": BUCKETS} | {key: values[key] for key in KEPT if key in values}
    )
    weights = _weights(source, config)
    target.mkdir(parents=True, exist_ok=True)
    save_file(weights, target / WEIGHTS, metadata={"format": "pt"})
    for name in TOKENIZER:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    text = json.dumps({**config.to_diff_dict(), "architectures": ["DebertaV2Model"]}, indent=2, sort_keys=True)
    (target / "config.json").write_text(text + "\n", encoding="utf-8")


def _weights(source: Path, config: Any) -> dict[str, torch.Tensor]:
    """The encoder's state_dict, float32, held against what Hugging Face's model of `config` has."""
    stored: dict[str, torch.Tensor] = {}
    for path in checkpoint_files(source):
        try:
            stored |= load_file(path)
        except SafetensorError as error:
            raise UserError(f"{path} cannot be read as safetensors: {error}. Fetch it again.") from None
    bert = {name.removeprefix("bert."): value.float() for name, value in stored.items()}
    with torch.device("meta"):
        expected = DebertaV2Model(config).state_dict()
    # Random, but the same in every copy of the folder.
    generator = torch.Generator().manual_seed(0)
    found: dict[str, torch.Tensor] = {}
    for name, like in expected.items():
        if name == "encoder.rel_embeddings.weight" or (".pos_" in name and name.endswith(".bias")):
            found[name] = torch.zeros(like.shape)
        elif ".pos_" in name:
            found[name] = torch.empty(like.shape).normal_(0.0, config.initializer_range, generator=generator)
        else:
            value = bert.get(_bert_name(name))
            if value is None or value.shape != like.shape:
                shape = "missing" if value is None else f"of shape {tuple(value.shape)}, not {tuple(like.shape)}"
                raise UserError(f"{source}: {_bert_name(name)} is {shape}. Fetch or save this BERT again.")
            scale = math.sqrt(3) if ".query_proj." in name else 1.0
            found[name] = value * scale
    return found


def _bert_name(name: str) -> str:
    """What BERT calls a tensor of DeBERTa-v2's encoder."""
    for projection in PROJECTIONS:
        name = name.replace(f".self.{projection}_proj.", f".self.{projection}.")
    return name
