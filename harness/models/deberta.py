"""DeBERTa-v2 and v3 cut into stages: Hugging Face's own layers, embeddings on the first stage, pooler and classifier on
the last.

What attention needs besides its input is made by every stage itself, so that one tensor crosses a boundary: the mask
from the batch's `attention_mask`, the relative positions from the sequence length, and the embeddings of relative
positions from copies that every stage holds, with the LayerNorm applied to them. Shared they are:

    frozen     never trained, as AC-SGD has them (with one stage too)
    summed     trained; what the stages' gradients sum to is the whole model's

The convolution that some configurations have after the first block reads that block's input too: it belongs to block 0.
Padding crosses as zeros, and what comes back for it is dropped: nothing depends on it, with a lossy codec either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import DebertaV2Config, DebertaV2ForSequenceClassification
from transformers.models.deberta_v2.modeling_deberta_v2 import (
    ContextPooler,
    DebertaV2Embeddings,
    DebertaV2Encoder,
    DebertaV2PreTrainedModel,
    DisentangledSelfAttention,
)

from thinpipe.harness.models import _dropout, _weights
from thinpipe.harness.models._shared import call, materialise, seeded, unset
from thinpipe.harness.models._shared import class_loss as loss
from thinpipe.harness.models.base import ModelShape, StagePart, checkpoint_config, checkpoint_folder
from thinpipe.harness.spec import ModelSpec

__all__ = ["DebertaStage", "build", "loss", "reference", "stored_names"]

VERSION = 1
SUMMARY = "DeBERTa-v2 and v3 of Hugging Face transformers for classification, from a preset or a local checkpoint"
SOURCE = "He et al. 2021, DeBERTa: Decoding-enhanced BERT with Disentangled Attention; DeBERTaV3 (arXiv 2111.09543)"
# conv: size of the convolution's kernel, 0 = there is none. absolute: 1 = as MiniLM's weights need it, see ABSOLUTE.
# Checkpoints take these two from their config.json, but are counted as if both were 0.
PARAMETERS = {
    "kinds": ["classification"],
    "presets": {
        "micro": {"layers": 2, "width": 32, "heads": 2, "positions": 128, "buckets": 16},
        "tiny": {"layers": 4, "width": 128, "heads": 4, "positions": 256, "buckets": 32},
        "minilm": {"layers": 6, "width": 384, "heads": 12, "positions": 512, "buckets": 64, "absolute": 1},
        "base": {"layers": 12, "width": 768, "heads": 12, "positions": 512, "buckets": 256},
        "large": {"layers": 24, "width": 1024, "heads": 16, "positions": 512, "buckets": 256},
        "xxlarge": {"layers": 48, "width": 1536, "heads": 24, "positions": 512, "buckets": 256, "conv": 3},
    },
    "defaults": {"inner": {"width": 4}, "buckets": {"positions": 1}, "conv": {}, "absolute": {}},
    "counts": {
        "block": {
            "width*width": 4,
            "width": 9,
            "width*inner": 2,
            "inner": 1,
            "absolute*width*width": 2,
            "absolute*width": 2,
        },
        # The convolution's bias and LayerNorm are 3 width; it is 3 wide wherever there is one.
        "embedding": {
            "vocab_size*width": 1,
            "buckets*width": 2,
            "width": 4,
            "absolute*positions*width": 1,
            "conv*width*width": 1,
            "conv*width": 1,
        },
        "head": {"width*width": 1, "width": 1, "width*num_labels": 1, "num_labels": 1},
    },
    # Relative positions are projected once a micro-batch, not once a sample: not counted.
    "flops": {
        "block": {
            "sequence_length*width*width": 4,
            "sequence_length*width*inner": 2,
            "sequence_length*sequence_length*width": 2,
            "sequence_length*buckets*width": 4,
        },
        "head": {"width*width": 1, "width*num_labels": 1},
    },
    # Scores against all relative positions are kept, of each head and both kinds, before those that apply are gathered.
    # Where they are is kept too, two squares of 64 bits a micro-batch: counted as if it had a sample or two.
    "activations": {
        "block": {
            "sequence_length*width": 9,
            "sequence_length*inner": 2,
            "sequence_length*sequence_length*heads": 1,
            "sequence_length*sequence_length": 3,
            "sequence_length*heads*buckets": 4,
            "buckets*width": 4,
            "sequence_length": 4,
        },
        # Token ids of 64 bits; the convolution, where there is one, keeps three tensors.
        "embedding": {"sequence_length*width": 2, "sequence_length": 5, "conv*sequence_length*width": 1},
        "head": {"width": 3},
    },
    "boundary": {"shape": ["sequence_length", "width"], "relu": False},
    "shared": ["frozen", "summed"],
    "checkpoint": {
        "model_type": "deberta-v2",
        "layers": "num_hidden_layers",
        "width": "hidden_size",
        "heads": "num_attention_heads",
        "inner": "intermediate_size",
        "vocab_size": "vocab_size",
        "positions": "max_position_embeddings",
        "buckets": "position_buckets",
    },
    "published": {
        "microsoft/deberta-v3-base": {"preset": "base", "vocab_size": 128100},
        "microsoft/deberta-v2-xxlarge": {"preset": "xxlarge", "vocab_size": 128100},
    },
}

# What the published configurations of v2 and v3 have in common (microsoft/deberta-v3-base, deberta-v2-xxlarge).
PUBLISHED: dict[str, Any] = {
    "relative_attention": True,
    "max_relative_positions": -1,
    "pos_att_type": ["p2c", "c2p"],
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "position_biased_input": False,
    "type_vocab_size": 0,
    "layer_norm_eps": 1e-7,
}
# A BERT with attention to relative positions beside its absolute ones: what _minilm.py maps BERT's weights to.
ABSOLUTE: dict[str, Any] = {
    "norm_rel_ebd": "none",
    "share_att_key": False,
    "position_biased_input": True,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}
# Parameters that every stage holds.
SHARED = ("encoder.rel_embeddings.", "encoder.LayerNorm.")
HEAD = ("pooler.", "classifier.")


class DebertaStage(nn.Module):
    """One stage. forward: input_ids (mb, S) int64 on the first, hidden (mb, S, width) float32 on the others, and
    attention_mask (mb, S), 1 = token, 0 = padding, on all; returns hidden, zero where padding is, or logits
    (mb, num_labels) on the last.

    Parameters carry Hugging Face's names without `deberta.`. What stages share comes before the blocks, so that the
    stages' parameters, one after the other and each name once, have the same order for every cut.
    shared: name -> [parameter], of those whose gradients are to be summed over stages; empty where they are frozen.
    """

    def __init__(self, config: DebertaV2Config, part: StagePart, *, recompute: bool) -> None:
        super().__init__()
        self.part, self.recompute = part, recompute
        self.shared: dict[str, list[nn.Parameter]] = {}
        if part.first:
            self.embeddings = DebertaV2Embeddings(config)
        self.encoder = DebertaV2Encoder(config)
        blocks = self.encoder.layer
        # Registered anew: after what is shared.
        del self.encoder.layer
        self.encoder.layer = nn.ModuleDict({str(i): blocks[i] for i in part.blocks})  # type: ignore[assignment]
        if not part.first:
            self.encoder.conv = None
        if part.last:
            assert config.num_labels is not None
            self.pooler = ContextPooler(config)
            self.dropout = nn.Dropout(config.cls_dropout)
            self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        mask = attention_mask.long()
        if self.part.first:
            x = self.embeddings(input_ids=x, mask=mask)
        entry = x
        pairs = self.encoder.get_attention_mask(mask)
        relative = {
            "relative_pos": self.encoder.get_rel_pos(x),
            "rel_embeddings": self.encoder.get_rel_embedding(),
        }
        for index, block in self.encoder.layer.named_children():
            x = call(block, x, pairs, recompute=self.recompute, **relative)[0]
            if index == "0" and self.encoder.conv is not None:
                x = call(self.encoder.conv, entry, x, mask, recompute=self.recompute)
        if self.part.last:
            return self.classifier(self.dropout(self.pooler(x)))
        return x * mask.unsqueeze(-1)


def build(spec: ModelSpec, shape: ModelShape, part: StagePart, *, seed: int, recompute: bool = False) -> nn.Module:
    """One stage in float32 on the CPU, in training mode: random weights, or the checkpoint's.

    Random weights follow Hugging Face's initialisation, each component from a generator keyed by (seed, its name). A
    checkpoint may lack pooler and classifier, as a pretrained encoder does: they are then random; anything else that
    it lacks is a UserError. spec.dropout holds for every dropout but the pooler's, which no published configuration
    has, and the one on the embeddings of relative positions, which belong to no sample: no mask could be keyed.
    """
    config = _config(spec, shape)
    with torch.device("meta"):
        stage = DebertaStage(config, part, recompute=recompute)
    initialise = DebertaV2PreTrainedModel(config)._init_weights
    materialise(stage, initialise)
    components = _components(stage)
    if spec.checkpoint is None:
        seeded(components, seed, initialise)
    else:
        seeded([pair for pair in components if f"{pair[0]}.".startswith(HEAD)], seed, initialise)
        head = [name for name, _ in stage.named_parameters() if name.startswith(HEAD)]
        _weights.load(stage, checkpoint_folder(spec.checkpoint), stored_names, optional=head)
    for module in stage.modules():
        if isinstance(module, DisentangledSelfAttention) and module.relative_attention:
            module.pos_dropout.p = 0.0
    _dropout.swap(stage, masks=spec.dropout_masks, seed=seed)
    for name, parameter in stage.named_parameters():
        if name.startswith(SHARED) and shape.shared == "summed":
            stage.shared[name] = [parameter]
        elif name.startswith(SHARED):
            parameter.requires_grad_(False)
    return stage.train()


def reference(spec: ModelSpec, shape: ModelShape) -> nn.Module:
    """The whole DebertaV2ForSequenceClassification, its weights unset."""
    return unset(DebertaV2ForSequenceClassification, _config(spec, shape))


def stored_names(name: str) -> tuple[str, ...]:
    """What checkpoints call a parameter: Hugging Face's encoder alone is stored without `deberta.`."""
    return (name,) if name.startswith(HEAD) else (f"deberta.{name}", name)


def _config(spec: ModelSpec, shape: ModelShape) -> DebertaV2Config:
    """Hugging Face's configuration: a checkpoint's own, or a preset's; dropout and classes as the run has them."""
    if spec.checkpoint is None:
        preset = PARAMETERS["presets"][spec.preset]  # type: ignore[index]
        values = PUBLISHED | (ABSOLUTE if preset.get("absolute") else {})
        values |= {
            "vocab_size": shape.vocab_size,
            "max_position_embeddings": shape.positions,
            "hidden_size": shape.width,
            "intermediate_size": 4 * shape.width,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "position_buckets": preset["buckets"],
            "conv_kernel_size": preset.get("conv", 0),
            "conv_act": "gelu",
            # Which id is padding is the task's business: the mask says where it is.
            "pad_token_id": None,
        }
    else:
        values = checkpoint_config(checkpoint_folder(spec.checkpoint))
    dropout = {"hidden_dropout_prob": spec.dropout, "attention_probs_dropout_prob": spec.dropout}
    dropout |= {"cls_dropout": spec.dropout, "pooler_dropout": 0.0}
    # A checkpoint's names of its own classes would fix their number.
    values = {key: value for key, value in values.items() if key not in ("id2label", "label2id")}
    return DebertaV2Config.from_dict(values | dropout | {"num_labels": shape.num_labels})


def _components(stage: DebertaStage) -> list[tuple[str, nn.Module]]:
    """What is seeded by itself, with its name: each block, and each module before, beside and after them."""
    blocks = [(f"encoder.layer.{name}", block) for name, block in stage.encoder.layer.named_children()]
    beside = [(f"encoder.{name}", module) for name, module in stage.encoder.named_children() if name != "layer"]
    return [pair for pair in stage.named_children() if pair[0] != "encoder"] + beside + blocks
