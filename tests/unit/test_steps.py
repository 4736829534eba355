"""Which samples each step trains on."""

import pytest

from thinpipe.harness import steps
from thinpipe.harness.errors import UserError
from thinpipe.harness.spec import parse


def batches(num_samples, batch_size, *, seed, epoch):
    order = [(i + epoch + seed) % num_samples for i in range(num_samples)]
    return [tuple(order[i : i + batch_size]) for i in range(0, num_samples - batch_size + 1, batch_size)]


def spec(**values):
    train = {"batch_size": 4, "epochs": 3, **values.pop("train", {})}
    return parse({"train": train, "pipeline": {"microbatches": 2}, "task": {"num_sequences": 10}, **values})


def test_epochs_in_order_with_the_incomplete_batch_left_out():
    plan = steps.plan(spec(), 10, batches)
    assert [(s.epoch, s.ends_epoch) for s in plan] == [(e, i == 1) for e in range(3) for i in range(2)]
    assert [s.measured for s in plan] == [False, False, True, True, True, True]


def test_measured_steps_begin_after_the_last_change_of_compressors():
    warm = spec(compression={"forward": "delta(fixpoint:4)", "warmup_epochs": 2})
    assert [s.measured for s in steps.plan(warm, 10, batches)] == [False] * 4 + [True] * 2


def test_one_epoch_is_measured():
    assert all(s.measured for s in steps.plan(spec(train={"epochs": 1}), 10, batches))


def test_max_steps_cuts():
    plan = steps.plan(spec(train={"max_steps": 3}), 10, batches)
    assert [s.ends_epoch for s in plan] == [False, True, True], "what a cut epoch leaves is evaluated too"


def test_max_steps_that_leave_nothing_to_time_are_refused():
    with pytest.raises(UserError, match="unmeasured pass"):
        steps.plan(spec(measure="timing", timing={"batches": 2}, train={"max_steps": 2}), 10, batches)


def test_timing_cycles_fixed_batches_after_one_unmeasured_pass():
    timed = spec(measure="timing", timing={"batches": 2, "passes": 3}, compression={"warmup_epochs": 1})
    plan = steps.plan(timed, 100, batches)
    assert len(plan) == 2 * (1 + 3)
    assert [s.measured for s in plan] == [False] * 2 + [True] * 6
    assert [s.ids for s in plan[:2]] == [s.ids for s in plan[2:4]] == [s.ids for s in plan[6:]]
    assert {s.epoch for s in plan} == {1}, "the compressors after warm-up are the ones that are timed"


def test_too_few_samples_say_what_to_change():
    with pytest.raises(UserError, match=r"lower train\.batch_size"):
        steps.plan(spec(), 3, batches)
