"""GPT-2 cut into stages: Hugging Face's own blocks, the embeddings on the first stage, the head on the last.

The head is untied: a copy of the token embedding when training starts, trained by itself from then on.
Hugging Face's model ties the two, so that a fresh model (or a checkpoint, which does not store the head) is
the same function here and there at step 0; sharing the tensor during training would add its gradient to what
the network carries every step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block, GPT2PreTrainedModel

from thinpipe.harness.errors import UserError
from thinpipe.harness.models._shared import next_token_loss as loss
from thinpipe.harness.models._shared import seeded
from thinpipe.harness.models.base import ModelShape, StagePart, checkpoint_config, checkpoint_files
from thinpipe.harness.spec import ModelSpec

__all__ = ["GPT2Stage", "build", "loss"]

VERSION = 1
SUMMARY = "GPT-2 of Hugging Face transformers, from a preset or a local checkpoint"
SOURCE = "Radford et al. 2019, Language Models are Unsupervised Multitask Learners"
PARAMETERS = {
    "presets": {
        "micro": {"layers": 2, "width": 32, "heads": 2, "positions": 64},
        "tiny": {"layers": 4, "width": 128, "heads": 4, "positions": 256},
        "small": {"layers": 12, "width": 768, "heads": 12, "positions": 1024},
    },
    "defaults": {"inner": {"width": 4}},
    "counts": {
        "block": {"width*width": 4, "width": 9, "width*inner": 2, "inner": 1},
        "embedding": {"vocab_size*width": 1, "positions*width": 1},
        "head": {"width": 2, "vocab_size*width": 1},
    },
    "checkpoint": {
        "model_type": "gpt2",
        "layers": "n_layer",
        "width": "n_embd",
        "heads": "n_head",
        "inner": "n_inner",
        "vocab_size": "vocab_size",
        "positions": "n_positions",
    },
}


class GPT2Stage(nn.Module):
    """One stage. forward: input_ids (mb, S) int64 on the first, hidden (mb, S, width) float32 on the others;
    returns hidden, or logits (mb, S, vocab_size) on the last.

    Parameters carry the names they have in the whole model (`wte.weight`, `h.3.attn.c_attn.weight`,
    `lm_head.weight`), so the stages' `named_parameters`, one after the other, are the model's, in its order.
    """

    def __init__(self, config: GPT2Config, part: StagePart) -> None:
        super().__init__()
        self.part = part
        if part.first:
            self.wte = nn.Embedding(config.vocab_size, config.n_embd)
            self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        # The block's index is the model's: Hugging Face can scale attention by it.
        self.h = nn.ModuleDict({str(index): GPT2Block(config, layer_idx=index) for index in part.blocks})
        if part.last:
            self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.part.first:
            positions = torch.arange(x.shape[-1], device=x.device).unsqueeze(0)
            x = self.wte(x) + self.wpe(positions)
        for block in self.h.values():
            x = block(x, attention_mask=None)
        if self.part.last:
            x = self.lm_head(self.ln_f(x))
        return x


def build(spec: ModelSpec, shape: ModelShape, part: StagePart, *, seed: int) -> nn.Module:
    """One stage in float32 on the CPU, in training mode: random weights, or the checkpoint's.

    Random weights follow Hugging Face's initialisation. Each component draws from its own generator, keyed by
    (seed, its name), so that a stage makes only its own and any number of stages makes the same model, bit
    for bit. The global generator is left as it was. Raises UserError for a checkpoint that lacks a tensor or
    has it in another shape.
    """
    config = _config(spec, shape)
    with torch.device("meta"):
        stage = GPT2Stage(config, part)
    stage.to_empty(device="cpu")
    assert not list(stage.buffers()), "a buffer would be left uninitialised"
    if spec.checkpoint is None:
        seeded(_components(stage), seed, GPT2PreTrainedModel(config)._init_weights)
    else:
        _load(stage, Path(spec.checkpoint).expanduser(), tied=config.tie_word_embeddings)
    return stage.train()


def _config(spec: ModelSpec, shape: ModelShape) -> GPT2Config:
    """Hugging Face's configuration: a checkpoint's own (epsilon, activation, scaling), without dropout."""
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
        values = checkpoint_config(Path(spec.checkpoint).expanduser())
    # A dropped-out activation differs at every visit of a sample, which a delta memory would have to send.
    fixed: dict[str, Any] = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "use_cache": False}
    # The ids of special tokens steer generation only, and the defaults lie outside a small vocabulary.
    fixed |= {"bos_token_id": None, "eos_token_id": None}
    return GPT2Config.from_dict(values | fixed, attn_implementation="sdpa")


def _components(stage: nn.Module) -> list[tuple[str, nn.Module]]:
    """What is seeded by itself, with its key: each block, and each module before and after them."""
    blocks = [(f"h.{name}", block) for name, block in stage.h.named_children()]  # type: ignore[union-attr]
    # The head is what the first stage's embedding is: the same key, the same distribution.
    others = [("wte" if name == "lm_head" else name, module) for name, module in stage.named_children() if name != "h"]
    return blocks + others


def _load(stage: nn.Module, directory: Path, *, tied: bool) -> None:
    """Fill the stage's parameters from a checkpoint's safetensors, reading no other tensor."""
    wanted = dict(stage.named_parameters())
    for path in checkpoint_files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                stored = set(file.keys())
                for name in list(wanted):
                    source = _source(name, stored, tied=tied)
                    if source is not None:
                        _copy(wanted.pop(name), file.get_tensor(source), f"{source} of {path}")
        except SafetensorError as error:
            raise UserError(f"{path} cannot be read as safetensors: {error}. Save the checkpoint again.") from None
    if wanted:
        names = list(wanted)
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise UserError(f"model.checkpoint {directory} lacks {len(names)} tensor(s) of this model: {shown}.")


def _source(name: str, stored: set[str], *, tied: bool) -> str | None:
    """What a file calls parameter `name`: a bare GPT2Model has no `transformer.` prefix, others have."""
    names = [name, f"transformer.{name}"]
    if name == "lm_head.weight" and tied:
        names = ["wte.weight", "transformer.wte.weight"]
    return next((candidate for candidate in names if candidate in stored), None)


@torch.no_grad()
def _copy(parameter: torch.Tensor, value: torch.Tensor, what: str) -> None:
    if value.shape != parameter.shape:
        raise UserError(f"{what} has shape {tuple(value.shape)}, config.json asks for {tuple(parameter.shape)}.")
    if not value.is_floating_point():
        raise UserError(f"{what} is {value.dtype}: quantised checkpoints are not supported, save it as floats.")
    parameter.copy_(value)
