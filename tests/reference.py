"""Plain loops to hold the pipeline against: torch and transformers only, one process, micro-batches accumulated."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from thinpipe.harness import plugins, steps, train, worker
from thinpipe.harness.models import base as models
from thinpipe.harness.pipeline import partition


def whole(spec) -> torch.nn.Module:
    """The model as a run of one stage starts from it."""
    shape = models.resolve(spec.model, spec.task)
    (part,) = partition.split(shape, 1)
    return plugins.get("models", spec.model.name).load().build(spec.model, shape, part, seed=spec.seed)


def hugging_face(spec, *, tied: bool = False) -> GPT2LMHeadModel:
    """GPT2LMHeadModel with the weights a run starts from; tied: embedding and head are one tensor."""
    shape = models.resolve(spec.model, spec.task)
    config = GPT2Config(
        vocab_size=shape.vocab_size, n_positions=shape.positions, n_embd=shape.width, n_layer=shape.layers,
        n_head=shape.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=tied,
        use_cache=False, attn_implementation="sdpa",
        activation_function="gelu_pytorch_tanh",
    )  # fmt: skip
    theirs = GPT2LMHeadModel(config)
    state = {}
    for name, value in whole(spec).named_parameters():
        state[name if name.startswith("lm_head") else f"transformer.{name}"] = value.detach().clone()
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected
    assert not [n for n in missing if not n.endswith((".attn.bias", ".attn.masked_bias", "lm_head.weight"))]
    return theirs.train()


def optimizer_of(model: torch.nn.Module, spec) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    if spec.train.optimizer == "sgd":
        return torch.optim.SGD(
            [p for _, p in named], lr=spec.train.lr, momentum=spec.train.momentum, weight_decay=spec.train.weight_decay
        )
    groups = [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": spec.train.weight_decay},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=spec.train.lr, fused=True)


def plain_loop(spec, *, tied: bool = False) -> list[float]:
    """Losses of GPT-2 on the samples of the run's plan, in its order, with torch's own clipping."""
    torch.set_num_threads(1)
    data = worker.prepare(spec)
    model = hugging_face(spec, tied=tied)
    optimizer = optimizer_of(model, spec)
    plan = steps.plan(spec, len(data.dataset.train), data.task.epoch_batches)
    pieces = spec.train.batch_size // spec.microbatch_size
    losses = []
    for number, step in enumerate(plan):
        rows = data.dataset.train[list(step.ids)]
        total = 0.0
        for part in rows.chunk(pieces):
            logits = model(input_ids=part[:, :-1], attention_mask=None).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
            loss.backward()
            total += loss.detach()
        for parameter in model.parameters():
            parameter.grad.div_(pieces)
        torch.nn.utils.clip_grad_norm_(model.parameters(), spec.train.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = train.learning_rate(number, len(plan), spec.train)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total) / pieces)
    return losses
