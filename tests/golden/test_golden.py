"""The pipeline against a plain loop, and the network against the numbers.

Without compression, any number of stages gives bit for bit the losses of one process that accumulates the same
micro-batches with Hugging Face's own model. With it, the network may change the time and nothing else.
"""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from runs import Lab, small
from thinpipe.harness import plugins, steps, train, worker
from thinpipe.harness.models import base as models
from thinpipe.harness.pipeline import partition
from thinpipe.harness.runner import Session

pytestmark = [pytest.mark.lab, pytest.mark.e2e]

EVEN = small()
ODD = small(
    model={"layers": 5},
    task={"sequence_length": 61, "num_sequences": 72},
    train={"batch_size": 18},
    pipeline={"microbatches": 6},
)


def hugging_face(spec):
    """GPT2LMHeadModel, head untied, with the weights a one-stage run would start from."""
    shape = models.resolve(spec.model, spec.task)
    (part,) = partition.split(shape, 1)
    ours = plugins.get("models", "gpt2").load().build(spec.model, shape, part, seed=spec.seed)
    config = GPT2Config(
        vocab_size=shape.vocab_size, n_positions=shape.positions, n_embd=shape.width, n_layer=shape.layers,
        n_head=shape.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=False,
        use_cache=False, attn_implementation="sdpa",
        activation_function="gelu_pytorch_tanh",
    )  # fmt: skip
    theirs = GPT2LMHeadModel(config)
    state = {}
    for name, value in ours.named_parameters():
        state[name if name.startswith("lm_head") else f"transformer.{name}"] = value.detach().clone()
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected
    assert not [name for name in missing if not name.endswith((".attn.bias", ".attn.masked_bias"))]
    return theirs.train()


def plain_loop(spec):
    """Losses of one process: torch and transformers only, micro-batches accumulated, torch's own clipping."""
    torch.set_num_threads(1)
    data = worker.prepare(spec)
    model = hugging_face(spec)
    named = list(model.named_parameters())
    groups = [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": spec.train.weight_decay},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=spec.train.lr, fused=True)
    plan = steps.plan(spec, len(data.dataset.train), data.task.epoch_batches)
    pieces = spec.pipeline.microbatches
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


@pytest.fixture(scope="module")
def reference():
    return {"even": plain_loop(EVEN), "odd": plain_loop(ODD)}


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("size", ["even", "odd"])
def test_losses_equal_a_plain_loop_bit_for_bit(trained, reference, size, stages):
    spec = {"even": EVEN, "odd": ODD}[size]
    spec = small(**{**spec.canonical(), "pipeline": {**spec.canonical().get("pipeline", {}), "stages": stages}})
    losses = trained.losses(spec)
    expected = reference[size]
    assert len(losses) == len(expected) == 20
    assert losses == expected
    assert losses[-1] < losses[0] - 0.1, "it must have learnt something for the comparison to mean anything"


COMPRESSED = {"forward": "delta(fixpoint:3)", "backward": "fixpoint:6(rounding=stochastic)", "warmup_epochs": 1}


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_the_network_changes_no_number(trained, stages):
    pipeline = {"stages": stages}
    free = small(pipeline=pipeline, compression=COMPRESSED)
    slow = small(pipeline=pipeline, compression=COMPRESSED, network={"rate_mbit": 20.0})
    assert free.train_id == slow.train_id
    assert free.run_id != slow.run_id
    assert trained.losses(free) == trained.losses(slow)
    evals = [trained.rows(s, "evals")["eval_loss"].tolist() for s in (free, slow)]
    assert evals[0] == evals[1]
    assert len(evals[0]) == 5


def test_compression_does_change_numbers(trained):
    plain = trained.losses(small())
    lossy = trained.losses(small(compression=COMPRESSED))
    warm = 4
    assert plain[:warm] == lossy[:warm], "the uncompressed epoch is the same for every method"
    assert plain[warm + 1 :] != lossy[warm + 1 :]


def test_a_forked_run_equals_one_in_fresh_processes(trained, tmp_path):
    spec = small(compression=COMPRESSED)
    with Session(calibrated=False, fresh=True) as session:
        fresh = Lab(session, tmp_path)
        assert fresh.losses(spec) == trained.losses(spec)
        assert fresh.rows(spec, "transfers")["frame_bytes"].tolist() == (
            trained.rows(spec, "transfers")["frame_bytes"].tolist()
        )


def test_evaluation_touches_no_gradient_and_no_number(trained):
    often = trained.losses(small(compression=COMPRESSED))
    never = trained.losses(small(compression=COMPRESSED, train={"evaluate_every": 0}))
    assert often == never
