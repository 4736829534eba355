"""The pipeline against a plain loop, and the network against the numbers.

Without compression, any number of stages gives bit for bit the losses of one process that accumulates the same
micro-batches with Hugging Face's own model. With it, the network may change the time and nothing else.
"""

import math

import pytest

from reference import gpt2_loop, held_out_loss, plain_loop
from runs import Lab, small
from thinpipe.harness.runner import Session

pytestmark = [pytest.mark.lab, pytest.mark.e2e]

EVEN = small()
ODD = small(
    model={"layers": 5},
    task={"sequence_length": 61, "num_sequences": 72},
    train={"batch_size": 18},
    pipeline={"microbatches": 6},
)


@pytest.fixture(scope="module")
def expected_losses():
    return {"even": plain_loop(EVEN), "odd": plain_loop(ODD)}


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("size", ["even", "odd"])
def test_losses_equal_a_plain_loop_bit_for_bit(trained, expected_losses, size, stages):
    spec = {"even": EVEN, "odd": ODD}[size]
    spec = small(**{**spec.canonical(), "pipeline": {**spec.canonical().get("pipeline", {}), "stages": stages}})
    losses = trained.losses(spec)
    expected = expected_losses[size]
    assert len(losses) == len(expected) == 20
    assert losses == expected
    assert losses[-1] < losses[0] - 0.1, "it must have learnt something for the comparison to mean anything"


def test_perplexity_is_what_transformers_makes_of_the_plain_loop(trained):
    found = trained.rows(EVEN, "evals").sort_values("step").iloc[-1]
    _, model = gpt2_loop(EVEN)
    expected = held_out_loss(model, EVEN)
    assert found["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)


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
