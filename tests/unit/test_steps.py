"""Which samples each step trains on."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_a_run_that_ends_in_its_first_epoch_measures_that():
    assert all(s.measured for s in steps.plan(spec(train={"max_steps": 2}), 10, batches))
    assert [s.measured for s in steps.plan(spec(train={"max_steps": 3}), 10, batches)] == [False, False, True]


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


# --- passes and data groups ---


def drawn(num_samples, batch_size, *, seed, epoch):
    """Batches in a random order of their own for each seed and epoch, as a task's."""
    order = list(range(num_samples))
    random.Random(f"{seed}, {epoch}").shuffle(order)
    return [tuple(order[i : i + batch_size]) for i in range(0, num_samples - batch_size + 1, batch_size)]


@st.composite
def shared_out(draw):
    groups, passes, pieces = (draw(st.integers(1, 3)) for _ in range(3))
    batch = groups * passes * pieces * draw(st.integers(1, 2))
    count = draw(st.integers(batch, 4 * batch + 3))
    data = {
        "seed": draw(st.integers(0, 5)),
        "train": {"batch_size": batch, "epochs": 3, "accumulate": passes},
        "pipeline": {"microbatches": pieces},
        "data_parallel": {"groups": groups},
        "task": {"num_sequences": count},
    }
    return parse(data), count


@settings(deadline=None)
@given(shared_out())
def test_passes_and_groups_share_a_batch_and_no_sample_changes_its_group(case):
    spec, count = case
    groups, passes = spec.data_parallel.groups, spec.train.accumulate
    size = spec.train.batch_size // groups // passes
    homes: dict[int, int] = {}
    plan = steps.plan(spec, count, drawn)
    assert len(plan) == 3 * spec.steps_per_epoch
    for step in plan:
        assert len(step.batches) == passes
        assert {len(ids) for together in step.batches for ids in together} == {size}
        assert {len(together) for together in step.batches} == {groups}
        assert len(set(step.ids)) == spec.train.batch_size, "a sample twice within a step"
        assert set(step.ids) <= set(range(count))
        for together in step.batches:
            for group, ids in enumerate(together):
                assert {homes.setdefault(i, group) for i in ids} == {group}
    for epoch in range(3):
        seen = [i for step in plan if step.epoch == epoch for i in step.ids]
        assert len(seen) == len(set(seen)), "a sample twice within an epoch"


def test_samples_are_listed_pass_by_pass_and_group_by_group():
    step = steps.plan(spec(train={"batch_size": 8, "accumulate": 2}, data_parallel={"groups": 2}), 10, batches)[0]
    # Group 0 has the even samples, group 1 the odd ones, from another place on: its seed is another.
    own = [[g + 2 * i for i in batches(5, 4, seed=g << 32, epoch=0)[0]] for g in (0, 1)]
    assert step.batches == tuple(tuple(tuple(ids[p * 2 : p * 2 + 2]) for ids in own) for p in (0, 1))
    assert step.ids == (*own[0][:2], *own[1][:2], *own[0][2:], *own[1][2:])


def test_one_group_and_one_pass_take_the_tasks_batches_as_they_are():
    assert [step.ids for step in steps.plan(spec(), 10, drawn)] == [
        ids for epoch in range(3) for ids in drawn(10, 4, seed=0, epoch=epoch)
    ]


def test_groups_do_not_draw_the_same_order():
    plan = steps.plan(spec(train={"batch_size": 8}, data_parallel={"groups": 2}), 1000, drawn)
    assert [i // 2 for i in plan[0].batches[0][0]] != [i // 2 for i in plan[0].batches[0][1]]


def test_epochs_may_be_cut_short_and_each_is_ended():
    short = spec(train={"max_steps_per_epoch": 2, "epochs": 3})
    plan = steps.plan(short, 40, batches)
    assert [(s.epoch, s.ends_epoch) for s in plan] == [(e, i == 1) for e in range(3) for i in range(2)]
    assert [s.ids for s in plan[:2]] == batches(40, 4, seed=0, epoch=0)[:2]
    generous = spec(train={"max_steps_per_epoch": 99})
    assert len(steps.plan(generous, 10, batches)) == 3 * generous.steps_per_epoch == 6


def test_timing_takes_its_batches_from_the_first_epoch_as_it_is_cut():
    timed = spec(measure="timing", timing={"batches": 4, "passes": 1}, train={"max_steps_per_epoch": 2})
    assert len(steps.plan(timed, 100, batches)) == 2 * 2


def test_too_few_samples_say_what_to_change():
    with pytest.raises(UserError, match=r"lower train\.batch_size"):
        steps.plan(spec(), 3, batches)
