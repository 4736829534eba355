"""Learning rate, clipping, which compressor is in force when."""

import pytest
import torch

from thinpipe.harness import regimes, train
from thinpipe.harness.spec import TrainSpec, parse


def test_learning_rate_rises_then_falls_to_zero():
    spec = TrainSpec(lr=2.0, warmup_steps=4)
    rates = [train.learning_rate(s, 20, spec) for s in range(21)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[20] == 0


def test_warm_up_longer_than_the_run_still_ends_in_the_run():
    spec = TrainSpec(lr=1.0, warmup_steps=100)
    assert [train.learning_rate(s, 5, spec) for s in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("clip", [0.1, 1e6])
def test_clipping_is_bit_equal_to_torch(clip):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n)) for n in (3, 50, 7)]
    for p in params:
        p.grad = torch.randn_like(p)
    own = [p.grad.clone() for p in params]
    norm, factor = train.clip_coefficient(torch.stack([torch.linalg.vector_norm(g) for g in own]), clip)
    expected = torch.nn.utils.clip_grad_norm_(params, clip)
    assert norm == float(expected)
    for p, gradient in zip(params, own, strict=True):
        assert torch.equal(p.grad, gradient.mul_(factor))


def test_weight_decay_is_for_matrices_only():
    named = [("w", torch.nn.Parameter(torch.zeros(2, 2))), ("b", torch.nn.Parameter(torch.zeros(2)))]
    groups = train.make_optimizer(named, TrainSpec(weight_decay=0.5)).param_groups
    assert [(g["params"][0].ndim, g["weight_decay"]) for g in groups] == [(2, 0.5), (1, 0.0)]


def test_warm_up_sends_uncompressed_while_the_later_memory_watches():
    spec = parse({"compression": {"forward": "delta(fixpoint:4)", "backward": "fixpoint:8", "warmup_epochs": 1}})
    first, second = regimes.regime(spec, 0), regimes.regime(spec, 1)
    assert first.use == {("forward", 0): "none", ("backward", 0): "none"}
    assert "delta(fixpoint:4)" in first.watch["forward", 0]
    assert second.use == {("forward", 0): "delta(fixpoint:4)", ("backward", 0): "fixpoint:8"}
    assert second.watch == {("forward", 0): (), ("backward", 0): ()}


def test_evaluation_is_off_or_the_inner_codec():
    data = {"forward": "delta(fixpoint:4)", "backward": "fixpoint:8"}
    off = regimes.evaluation_regime(parse({"compression": data}), 0)
    codec = regimes.evaluation_regime(parse({"compression": {**data, "evaluation": "codec"}}), 0)
    assert off.use["forward", 0] == "none"
    assert codec.use["forward", 0] == "fixpoint:4"
    assert not off.watch
    assert not codec.watch


def test_rules_by_boundary_and_epoch():
    rules = [{"use": "fixpoint:8"}, {"from_epoch": 2, "boundary": 1, "use": "fixpoint:2"}]
    spec = parse({"pipeline": {"stages": 3}, "compression": {"forward": rules}})
    assert [regimes.regime(spec, e).use["forward", 1] for e in (0, 2)] == ["fixpoint:8", "fixpoint:2"]
    assert regimes.regime(spec, 2).use["forward", 0] == "fixpoint:8"
    assert regimes.texts(spec, "forward", 0) == {"none", "fixpoint:8"}
