"""GPT-2 cut into stages: Hugging Face's own blocks, the embeddings on the first stage, the head on the last.

A language model's head is a copy of the token embedding when training starts. Hugging Face's model ties the two, so
that a fresh model (or a checkpoint, which does not store the head) is the same function here and there at step 0. From
then on it is trained by itself (`shared = "copies"`), or stays equal because both copies get the sum of their gradients
(`"summed"`), which the network carries every step.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block, GPT2PreTrainedModel

from thinpipe.harness.errors import UserError
from thinpipe.harness.models import _dropout, _weights
from thinpipe.harness.models._shared import call, class_loss, materialise, next_token_loss, seeded, unset
from thinpipe.harness.models.base import ModelShape, StagePart, checkpoint_config, checkpoint_folder
from thinpipe.harness.spec import ModelSpec

__all__ = ["GPT2Stage", "build", "loss", "reference", "stored_names"]

VERSION = 1
SUMMARY = "GPT-2 of Hugging Face transformers, from a preset or a local checkpoint"
SOURCE = "Radford et al. 2019, Language Models are Unsupervised Multitask Learners"
PARAMETERS = {
    "kinds": ["lm", "classification"],
    "presets": {
        "micro": {"layers": 2, "width": 32, "heads": 2, "positions": 64},
        "tiny": {"layers": 4, "width": 128, "heads": 4, "positions": 256},
        "small": {"layers": 12, "width": 768, "heads": 12, "positions": 1024},
        "medium": {"layers": 24, "width": 1024, "heads": 16, "positions": 1024},
        "large": {"layers": 36, "width": 1280, "heads": 20, "positions": 1024},
        "xl": {"layers": 48, "width": 1600, "heads": 25, "positions": 1024},
    },
    "defaults": {"inner": {"width": 4}},
    "counts": {
        "block": {"width*width": 4, "width": 9, "width*inner": 2, "inner": 1},
        "embedding": {"vocab_size*width": 1, "positions*width": 1},
        "head": {"width": 2, "lm*vocab_size*width": 1, "num_labels*width": 1},
    },
    "flops": {
        "block": {
            "sequence_length*width*width": 4,
            "sequence_length*width*inner": 2,
            "sequence_length*sequence_length*width": 2,
        },
        "head": {"lm*sequence_length*width*vocab_size": 1, "num_labels*width": 1},
    },
    "activations": {
        "block": {
            "sequence_length*width": 8,
            "sequence_length*inner": 2,
            "sequence_length*heads": 1,
            "sequence_length": 4,
        },
        # With the token ids and positions, of 64 bits each.
        "embedding": {"sequence_length*width": 1, "sequence_length": 4},
        # A classifier's head sees one token.
        "head": {
            "width": 2,
            "num_labels": 2,
            "lm*width": -2,
            "lm*sequence_length*width": 1,
            "lm*sequence_length*vocab_size": 2,
        },
    },
    "boundary": {"shape": ["sequence_length", "width"], "relu": False},
    "shared": ["copies", "summed"],
    "checkpoint": {
        "model_type": "gpt2",
        "layers": "n_layer",
        "width": "n_embd",
        "heads": "n_head",
        "inner": "n_inner",
        "vocab_size": "vocab_size",
        "positions": "n_positions",
    },
    "published": {
        "openai-community/gpt2": {"preset": "small", "vocab_size": 50257},
        "openai-community/gpt2-medium": {"preset": "medium", "vocab_size": 50257},
        "openai-community/gpt2-large": {"preset": "large", "vocab_size": 50257},
        "openai-community/gpt2-xl": {"preset": "xl", "vocab_size": 50257},
    },
}


# The name of `_attention` among transformers' attention functions.
ATTENTION = "thinpipe_keyed_dropout"


class GPT2Stage(nn.Module):
    """One stage. forward: input_ids (mb, S) int64 on the first, hidden (mb, S, width) float32 on the others;
    returns hidden, or on the last logits (mb, S, vocab_size), of a classification (mb, num_labels).

    attention_mask (mb, S), a classification's: 1 = token, 0 = padding, which must follow the tokens. A causal model's
    tokens then never see it, so that only the last stage uses the mask: it classifies by the last token.

    Parameters carry the names they have in the whole model (`wte.weight`, `h.3.attn.c_attn.weight`,
    `lm_head.weight`), so the stages' `named_parameters`, one after the other, are the model's, in its order.
    """

    def __init__(self, config: GPT2Config, part: StagePart, kind: str, *, recompute: bool) -> None:
        super().__init__()
        self.part, self.recompute = part, recompute
        self.shared: dict[str, list[nn.Parameter]] = {}
        if part.first:
            self.wte = nn.Embedding(config.vocab_size, config.n_embd)
            self.wpe = nn.Embedding(config.n_positions, config.n_embd)
            self.drop = nn.Dropout(config.embd_pdrop)
        # The block's index is the model's: Hugging Face can scale attention by it.
        self.h = nn.ModuleDict({str(index): GPT2Block(config, layer_idx=index) for index in part.blocks})
        if part.last:
            self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
            if kind == "lm":
                self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
            else:
                assert config.num_labels is not None
                self.score = nn.Linear(config.n_embd, config.num_labels, bias=False)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        if self.part.first:
            positions = torch.arange(x.shape[-1], device=x.device).unsqueeze(0)
            x = self.drop(self.wte(x) + self.wpe(positions))
        for block in self.h.values():
            x = call(block, x, attention_mask=None, recompute=self.recompute)
        if not self.part.last:
            return x
        if hasattr(self, "lm_head"):
            return self.lm_head(self.ln_f(x))
        assert attention_mask is not None, "a classification's batches have an attention_mask"
        return self.score(self.ln_f(_last_tokens(x, attention_mask)))


def _last_tokens(x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """x (mb, S, width) at each row's last token: (mb, width)."""
    lengths = attention_mask.sum(dim=1)
    places = torch.arange(x.shape[1], device=x.device)
    assert torch.equal(attention_mask.bool(), places < lengths.unsqueeze(1)), "padding must follow the tokens"
    assert lengths.min() > 0, "a row has no token"
    return x[torch.arange(len(x), device=x.device), lengths - 1]


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of (mb, heads, S, width / heads) whose dropout is the module's own layer, which can be replaced.

    Hugging Face's attention functions draw their masks inside, from the global generator.
    """
    assert attention_mask is None, "padding must follow the tokens"
    scores = query @ key.transpose(-1, -2) * scaling
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
    weights = module.attn_dropout(weights)  # type: ignore[operator]
    return (weights @ value).transpose(1, 2), weights


AttentionInterface.register(ATTENTION, _attention)


def build(spec: ModelSpec, shape: ModelShape, part: StagePart, *, seed: int, recompute: bool = False) -> nn.Module:
    """One stage in float32 on the CPU, in training mode: random weights, or the checkpoint's.

    Random weights follow Hugging Face's initialisation. Each component draws from its own generator, keyed by
    (seed, its name), so that a stage makes only its own and any number of stages makes the same model, bit
    for bit. The global generator is left as it was. A checkpoint without a classifier gets a random one. Raises
    UserError for a checkpoint that lacks a tensor or has it in another shape, and for `shared` where nothing is.
    """
    config = _config(spec, shape)
    _check_shared(spec, shape, tied=config.tie_word_embeddings)
    with torch.device("meta"):
        stage = GPT2Stage(config, part, shape.kind, recompute=recompute)
    materialise(stage)
    components = _components(stage)
    if spec.checkpoint is not None:
        components = [pair for pair in components if pair[0] == "score"]
    seeded(components, seed, GPT2PreTrainedModel(config)._init_weights)
    if spec.checkpoint is not None:
        names = functools.partial(_names, tied=config.tie_word_embeddings)
        _weights.load(stage, checkpoint_folder(spec.checkpoint), names, optional=("score.weight",))
    if spec.dropout:
        _dropout.swap(stage, masks=spec.dropout_masks, seed=seed)
    if shape.shared == "summed" and shape.kind == "lm":
        copies = [module.weight for name, module in stage.named_children() if name in ("wte", "lm_head")]
        stage.shared = {"wte": copies} if copies else {}  # type: ignore[dict-item]
    return stage.train()


def loss(output: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Next-token cross-entropy of logits (mb, S, V), of classes where they are (mb, C); see models/_shared.py."""
    return (next_token_loss if output.dim() == 3 else class_loss)(output, targets, weights)


def reference(spec: ModelSpec, shape: ModelShape) -> nn.Module:
    """The whole model as Hugging Face has it, its parameters unset; tied where all stages' copies stay equal."""
    config = _config(spec, shape)
    config.tie_word_embeddings = shape.shared == "summed"
    config._attn_implementation = "sdpa"
    return unset(GPT2LMHeadModel if shape.kind == "lm" else GPT2ForSequenceClassification, config)


def stored_names(name: str) -> tuple[str, ...]:
    """What checkpoints call a stage's parameter: a bare GPT2Model has no `transformer.` prefix, others have."""
    return _names(name, tied=False)


def _names(name: str, *, tied: bool) -> tuple[str, ...]:
    if name == "lm_head.weight" and tied:
        name = "wte.weight"
    return (name,) if name in ("lm_head.weight", "score.weight") else (f"transformer.{name}", name)


def _config(spec: ModelSpec, shape: ModelShape) -> GPT2Config:
    """Hugging Face's configuration: a checkpoint's own (epsilon, activation, scaling), with the dropout asked for."""
    if spec.checkpoint is None:
        values: dict[str, Any] = {
            "vocab_size": shape.vocab_size,
            "n_positions": shape.positions,
            "n_embd": shape.width,
            "n_layer": shape.layers,
            "n_head": shape.heads,
            # GPT-2's own function (the tanh form of GELU) in one kernel; "gelu_new" takes eight, and a tenth of a step.
            "activation_function": "gelu_pytorch_tanh",
        }
    else:
        values = checkpoint_config(checkpoint_folder(spec.checkpoint))
    fixed: dict[str, Any] = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), spec.dropout)
    # The ids of special tokens steer generation only, and the defaults lie outside a small vocabulary.
    fixed |= {"use_cache": False, "bos_token_id": None, "eos_token_id": None}
    config = GPT2Config.from_dict(values | fixed, attn_implementation=ATTENTION if spec.dropout else "sdpa")
    if shape.kind == "classification" and config.num_labels != shape.num_labels:
        config.num_labels = shape.num_labels
    return config


def _check_shared(spec: ModelSpec, shape: ModelShape, *, tied: bool) -> None:
    if spec.shared == "summed" and shape.kind != "lm":
        raise UserError(f"model.shared 'summed' has no effect on a {shape.kind}, whose head is its own: leave it out.")
    if spec.shared == "summed" and not tied:
        raise UserError(
            f"model.shared 'summed' needs a head that equals the token embedding; in {spec.checkpoint} it does not "
            "(tie_word_embeddings is false). Use 'copies'."
        )


def _components(stage: nn.Module) -> list[tuple[str, nn.Module]]:
    """What is seeded by itself, with its key: each block, and each module before and after them."""
    blocks = [(f"h.{name}", block) for name, block in stage.h.named_children()]  # type: ignore[union-attr]
    # The head is what the first stage's embedding is: the same key, the same distribution.
    others = [("wte" if name == "lm_head" else name, module) for name, module in stage.named_children() if name != "h"]
    return blocks + others
