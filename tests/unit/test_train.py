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


def rates(total=20, steps_per_epoch=None, **values):
    spec = TrainSpec(lr=2.0, **values)
    return [train.learning_rate(step, total, spec, steps_per_epoch) for step in range(total + 1)]


@pytest.mark.parametrize("warmup", [0, 5])
def test_cosine_is_torchs(warmup):
    found = rates(20, lr_schedule="cosine", warmup_steps=warmup)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20 - warmup)
    theirs = []
    for _ in range(20 - warmup + 1):
        theirs.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert found[warmup:] == pytest.approx(theirs, abs=1e-12)
    assert found[:warmup] == pytest.approx([2.0 * (i + 1) / 5 for i in range(warmup)])


def test_a_constant_rate_only_rises():
    assert rates(8, lr_schedule="constant", warmup_steps=2) == [1.0, *[2.0] * 8]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_laid_out_for_more_epochs_is_cut_short(schedule):
    """The first epochs of a longer run, step by step; not a run of its own that ends at 0."""
    whole = rates(40, 10, lr_schedule=schedule, warmup_steps=3)
    cut = rates(20, 10, lr_schedule=schedule, warmup_steps=3, lr_epochs=4)
    assert cut == whole[:21]
    assert cut[20] > 0
    assert rates(20, 10, lr_schedule=schedule, warmup_steps=3)[20] == pytest.approx(0, abs=1e-12)


def test_a_schedule_laid_out_for_fewer_epochs_stays_at_0():
    found = rates(20, 5, warmup_steps=0, lr_epochs=2)
    assert found[:11] == rates(10, 5, warmup_steps=0)
    assert found[10:] == [0.0] * 11


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_rate_may_change_once_an_epoch(schedule):
    by_step = rates(20, 5, lr_schedule=schedule, warmup_steps=0)
    by_epoch = rates(20, 5, lr_schedule=schedule, warmup_steps=0, lr_update="epoch")
    assert by_epoch == [by_step[step - step % 5] for step in range(21)]


def test_a_warm_up_moves_step_by_step_all_the_same():
    found = rates(20, 5, warmup_steps=7, lr_update="epoch")
    assert found[:7] == pytest.approx([2.0 * (i + 1) / 7 for i in range(7)])
    assert found[7:10] == [2.0] * 3, "until the epoch it ended in is over"
    assert found[10:15] == [pytest.approx(2.0 * 10 / 13)] * 5


def test_a_timing_run_knows_no_epochs_and_falls_to_0_in_its_passes():
    assert rates(10, None, warmup_steps=0, lr_epochs=200, lr_update="epoch") == rates(10, warmup_steps=0)


NAMED = [("w", torch.nn.Parameter(torch.zeros(2, 2))), ("b", torch.nn.Parameter(torch.zeros(2)))]


def test_weight_decay_is_for_matrices_only():
    optimizer = train.make_optimizer(NAMED, parse({"train": {"weight_decay": 0.5, "beta2": 0.95, "eps": 1e-6}}))
    assert type(optimizer) is torch.optim.AdamW
    assert [(g["params"][0].ndim, g["weight_decay"]) for g in optimizer.param_groups] == [(2, 0.5), (1, 0.0)]
    assert {(g["betas"], g["eps"]) for g in optimizer.param_groups} == {((0.9, 0.95), 1e-6)}


def test_sgd_decays_all_as_torchs():
    data = {"optimizer": "sgd", "momentum": 0.8, "weight_decay": 5e-4}
    optimizer = train.make_optimizer(NAMED, parse({"train": data}))
    (group,) = optimizer.param_groups
    assert type(optimizer) is torch.optim.SGD
    assert (group["params"], group["momentum"], group["weight_decay"]) == ([p for _, p in NAMED], 0.8, 5e-4)


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
