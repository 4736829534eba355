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
    return gpt2_loop(spec, tied=tied)[0]


def held_out_loss(model: GPT2LMHeadModel, spec) -> float:
    """What transformers itself says of the held-out sequences: its own shifted loss, a sequence at a time."""
    rows = worker.prepare(spec).dataset.held_out
    with torch.no_grad():
        return sum(float(model.eval()(input_ids=row[None], labels=row[None]).loss) for row in rows) / len(rows)


def gpt2_loop(spec, *, tied: bool = False) -> tuple[list[float], GPT2LMHeadModel]:
    """The losses of `plain_loop`, and the model as it ends."""
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
    return losses, model


def transformers_model(spec) -> torch.nn.Module:
    """Hugging Face's whole model of any family, with the weights a run starts from."""
    plugin = plugins.get("models", spec.model.name).load()
    ours, theirs = whole(spec), plugin.reference(spec.model, models.resolve(spec.model, spec.task))
    state = {plugin.stored_names(name)[0]: value for name, value in ours.state_dict().items()}
    theirs.load_state_dict(state, strict=True)
    trained = {plugin.stored_names(name)[0] for name, p in ours.named_parameters() if p.requires_grad}
    for name, parameter in theirs.named_parameters():
        parameter.requires_grad_(name in trained)
    return theirs.train()


def classify_loop(spec) -> tuple[list[float], list[dict]]:
    """Training losses, and after each epoch loss and scikit-learn's scores, of a classification without a pipeline."""
    from sklearn import metrics as scores

    torch.set_num_threads(1)
    data, task = worker.prepare(spec), plugins.get("tasks", spec.task.name).load()
    model = transformers_model(spec)

    def logits(batch, rows):
        return model(batch.inputs[rows], **{name: value[rows] for name, value in batch.side.items()}).logits

    trainable = torch.nn.ModuleList()
    trainable.named_parameters = lambda: [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = optimizer_of(trainable, spec)
    plan = steps.plan(spec, len(data.dataset.train), task.epoch_batches)
    pieces = spec.train.batch_size // spec.microbatch_size
    losses, evaluations = [], []
    for number, step in enumerate(plan):
        batch = task.batch(data.dataset.train, step.ids, epoch=step.epoch)
        total = 0.0
        for rows in torch.arange(len(step.ids)).chunk(pieces):
            loss = torch.nn.functional.cross_entropy(logits(batch, rows), batch.targets[rows])
            loss.backward()
            total += loss.detach()
        parameters = [p for _, p in trainable.named_parameters()]
        for parameter in parameters:
            parameter.grad.div_(pieces)
        torch.nn.utils.clip_grad_norm_(parameters, spec.train.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = train.learning_rate(number, len(plan), spec.train)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total) / pieces)
        if step.ends_epoch:
            model.eval()
            every = range(len(data.dataset.held_out))
            batch = task.batch(data.dataset.held_out, tuple(every))
            with torch.no_grad():
                out = torch.cat([logits(batch, torch.tensor([row])) for row in every])
            model.train()
            said, truth = out.argmax(1).numpy(), batch.targets.numpy()
            evaluations.append(
                {
                    "eval_loss": float(torch.nn.functional.cross_entropy(out, batch.targets)),
                    "accuracy": scores.accuracy_score(truth, said),
                    "matthews": scores.matthews_corrcoef(truth, said),
                }
            )
    return losses, evaluations
