"""emulate.run gives the numbers of the run it stands for, bit for bit: losses, evaluations and bytes."""

from __future__ import annotations

import pytest

from reference import plain_loop
from runs import Lab, small
from thinpipe.harness import emulate

CASES = {
    "plain": {},
    "memories": {"compression": {"forward": "delta(fixpoint:2)", "backward": "fixpoint:4", "warmup_epochs": 1}},
    "passes, evaluation through the codec": {
        "compression": {
            "forward": "fixpoint:3(rounding=stochastic)",
            "backward": "fixpoint:6(rounding=stochastic)",
            "evaluation": "codec",
        },
        "train": {"accumulate": 2, "batch_size": 32},
    },
    "a budget kept, gradients by it too": {
        "compression": {
            "forward": "delta(grid:1.0, first=grid:0.1(scale=token))",
            "backward": "grid:0.3",
            "budget_bits": 2.5,
            "budget_by": "sensitivity",
        },
    },
}


def test_one_process_is_the_plain_loop() -> None:
    """Against torch and transformers alone, without any of ours between."""
    spec = small(pipeline={"stages": 3, "microbatches": 4})
    assert emulate.run(spec).losses == pytest.approx(plain_loop(spec), rel=1e-6)


@pytest.mark.e2e
@pytest.mark.lab
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in ("plain", "memories") else n for n in CASES]
)
def test_one_process_gives_the_numbers_of_the_run(trained: Lab, name: str) -> None:
    spec = small(pipeline={"stages": 3, "microbatches": 4}, **CASES[name])
    found = emulate.run(spec)
    assert found.losses == trained.losses(spec)
    evals = trained.rows(spec, "evals").sort_values("step")
    assert [(row.epoch, row.eval_loss) for row in evals.itertuples()] == [(e, loss) for e, loss, _ in found.evals]
    sent = trained.rows(spec, "transfers").groupby(["direction", "boundary"])["frame_bytes"].sum()
    assert {key: int(value) for key, value in sent.items()} == dict(found.frame_bytes)
