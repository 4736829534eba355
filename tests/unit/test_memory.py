"""Predicted memory: its arithmetic, against torch's schedules and compressors, and against processes that trained."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from thinpipe.harness import memory, rss
from thinpipe.harness.compression import grammar
from thinpipe.harness.errors import UserError
from thinpipe.harness.models import base as models
from thinpipe.harness.pipeline import partition, placement
from thinpipe.harness.spec import parse

MIB = 2**20
# A prediction is good to the larger of the two.
WITHIN, FLOOR = 0.15, 20 * MIB


def spec(**parts):
    return parse(parts)


def of(found, name):
    return [one.parts[name] for one in found]


# --- arithmetic ---


def test_every_parameter_is_on_one_rank_with_its_gradient_and_two_moments():
    found = memory.predict(spec(pipeline={"stages": 4}))
    shape = models.resolve(spec().model, spec().task)
    every = 4 * (sum(shape.parameters_per_block) + shape.parameters_embedding + shape.parameters_head)
    assert sum(of(found, "parameters")) == sum(of(found, "gradients")) == every
    assert of(found, "optimizer") == [2 * size for size in of(found, "parameters")]
    assert [one.rank for one in found] == [0, 1, 2, 3]


@pytest.mark.parametrize(("train", "state"), [({"optimizer": "sgd"}, 1), ({"optimizer": "sgd", "momentum": 0.0}, 0)])
def test_what_the_optimizer_keeps(train, state):
    (one,) = memory.predict(spec(pipeline={"stages": 1}, train=train))
    assert one.optimizer == state * one.parameters


def test_cuts_decide_what_a_rank_holds():
    even, odd = (memory.predict(spec(pipeline={"stages": 2, "cuts": [cut]})) for cut in (2, 3))
    block = 4 * models.resolve(spec().model, spec().task).parameters_per_block[2]
    assert of(odd, "parameters")[0] - of(even, "parameters")[0] == block


def test_frames_have_a_buffer_at_both_ends_and_one_decoded():
    found = memory.predict(spec(pipeline={"stages": 3, "microbatches": 4, "cuts": [1, 2]}))
    tensor = 4 * 4 * 64 * 128  # bytes, sequences, tokens, width
    end = 4 * (3 * tensor + 2 * 64)
    assert of(found, "buffers") == [end, 2 * end, end]


def test_ranks_of_other_data_groups_need_as_much_and_keep_gradients_twice():
    one = memory.predict(spec(train={"batch_size": 16}))
    two = memory.predict(spec(train={"batch_size": 32}, data_parallel={"groups": 2}))
    assert [other.total for other in two[:2]] == [other.total for other in two[2:]]
    assert of(two, "gradients")[:2] == [2 * size for size in of(one, "gradients")]
    assert of(two, "activations")[:2] == of(one, "activations")


def test_recomputation_1f1b_and_small_batches_need_less():
    def activations(**parts):
        return memory.predict(spec(pipeline={"stages": 2, **parts.pop("pipeline", {})}, **parts))[1].activations

    usual = activations()
    assert activations(train={"recompute": True}) < usual / 2
    assert activations(pipeline={"schedule": "1f1b"}) < usual / 2
    assert activations(train={"batch_size": 8}) < usual * 0.6


def test_long_runs_keep_many_spans():
    short, long = (memory.predict(spec(train={"epochs": epochs}))[0].other for epochs in (1, 101))
    assert 50 * MIB > long - short > 5 * MIB


@pytest.mark.parametrize(
    "text",
    [
        "none",
        "fixpoint:4",
        "delta(fixpoint:4)",
        "delta(fixpoint:4, cache=fp32)",
        "delta(fixpoint:2, cache=none)",
        "delta(fixpoint:2, cache=fixpoint:8)",
        "delta(fixpoint:2, cache=fixpoint:3)",
        "delta(fixpoint:2, cache=fixpoint:3(rounding=stochastic))",
        "delta(fixpoint:2, cache=fixpoint:4(scale=token))",
        "delta(fixpoint:4, store=disk)",
        "delta(fixpoint:4, key=slot)",
        "delta(fixpoint:4, key=batch, store=disk)",
        "ef(fixpoint:4)",
        "ef(fixpoint:4, key=sample, cache=bf16, store=disk)",
        "ef21(fixpoint:4)",
        "ef21(fixpoint:4, key=batch)",
        "ef-mixed(fixpoint:4, key=slot, store=disk)",
    ],
)
def test_a_memory_keeps_as_much_as_it_says(text):
    built = grammar.build(text)
    for samples, shape, microbatches in ((1, (1, 64, 128), 1), (100, (4, 64, 128), 3), (100, (4, 64, 128), 8)):
        expected = built.state_bytes(samples, shape, microbatches) if hasattr(built, "state_bytes") else 0
        assert memory.state_bytes(text, samples, shape, microbatches) == expected


def test_caches_are_counted_at_both_ends_of_the_boundaries_that_have_them():
    rules = [{"use": "none"}, {"use": "delta(fixpoint:4)", "from_epoch": 1, "boundary": 1}]
    found = memory.predict(spec(pipeline={"stages": 3}, compression={"forward": rules}), 100)
    assert of(found, "caches") == [0, 100 * 64 * 128 * 2, 100 * 64 * 128 * 2]
    every = {"forward": "delta(fixpoint:4)"}
    groups = spec(train={"batch_size": 32}, data_parallel={"groups": 2}, compression=every)
    assert of(memory.predict(groups, 100), "caches") == [50 * 64 * 128 * 2] * 4
    timing = spec(measure="timing", timing={"batches": 2}, compression=every)
    assert of(memory.predict(timing, 1000), "caches") == [2 * 16 * 64 * 128 * 2] * 2
    slots = spec(compression={"forward": "delta(fixpoint:4, key=slot)"}, pipeline={"microbatches": 2})
    assert of(memory.predict(slots, 100), "caches") == [spec().train.batch_size * 64 * 128 * 2] * 2
    variants = spec(task={"augment": "variant", "variants": 3}, compression=every)
    assert of(memory.predict(variants, 100), "caches") == [3 * 100 * 64 * 128 * 2] * 2


def test_what_only_the_sender_keeps_is_counted_there():
    both = {"forward": "ef(fixpoint:4, key=sample)", "backward": "ef(fixpoint:4, key=batch)"}
    row = 64 * 128 * 4
    found = memory.predict(spec(pipeline={"stages": 3}, compression=both), 100)
    assert of(found, "caches") == [100 * row, 101 * row, row]


# --- torch's schedules ---

SCHEDULES = {
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "interleaved-zb": "ScheduleInterleavedZeroBubble",
    "zbv-zb": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "each"), [(2, 2), (3, 2), (3, 3), (4, 2)])
def test_as_many_micro_batches_are_in_flight_as_torch_lets_there_be(name, ranks, each):
    from torch.distributed.pipelining import schedules

    if name in placement.V_SHAPED and each != 2:
        each = 2
    pieces = 4 * ranks
    place = {"stages": ranks * each, "stages_per_rank": each, "schedule": name, "microbatches": pieces}
    run = spec(pipeline=place, train={"batch_size": pieces}, model={"layers": ranks * each})
    stand_in = {"num_stages": ranks * each, "group_size": ranks, "group_rank": 0, "is_first": False, "is_last": False}
    stages = [
        SimpleNamespace(**stand_in, stage_index=i, has_backward=True, submod=None, group=None, device=None)
        for i in range(each)
    ]
    order = getattr(schedules, SCHEDULES[name])(stages, pieces, loss_fn=lambda x, y: x).pipeline_order
    for rank, actions in order.items():
        assert each * memory.in_flight(run, rank) == most_held(actions), rank


def most_held(actions):
    """Most micro-batches that were through a stage of a rank forward and not yet wholly backward."""
    held = most = 0
    for action in filter(None, actions):
        for one in action.sub_actions or [action]:
            held += {"FORWARD": 1, "FULL_BACKWARD": -1, "BACKWARD_WEIGHT": -1}.get(one.computation_type.name, 0)
            most = max(most, held)
    return most


# --- refusing ---


def test_what_fits_is_let_through_and_what_does_not_is_told_what_takes_most():
    run = spec(compression={"forward": "delta(fixpoint:4)"})
    needed = sum(one.total for one in memory.predict(run, 100_000))
    memory.fits(run, 100_000, int(needed / (1 - memory.RESERVE)) + 2)
    with pytest.raises(UserError, match=r"need 3\.\d+ GiB together.*Rank 1 .*: caches 1\.53, .*Lower task.num_seq"):
        memory.fits(run, 100_000, int(needed / (1 - memory.RESERVE)) - 2)


@pytest.mark.parametrize(
    ("parts", "advice"),
    [
        ({"task": {"sequence_length": 256}, "train": {"batch_size": 256}}, "train.accumulate"),
        ({"model": {"width": 2048}}, "Choose a smaller model"),
    ],
)
def test_advice_is_about_what_takes_most(parts, advice):
    with pytest.raises(UserError, match=advice):
        memory.fits(spec(**parts), None, MIB)


def test_without_a_number_the_machine_is_asked(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10 * MIB))
    with pytest.raises(UserError, match=r"free 0\.01 GiB"):
        memory.fits(spec())


# --- what a process needed ---


def test_the_peak_is_that_of_anonymous_memory_since_the_start():
    before = rss.start()
    block = np.ones(64 * MIB, np.uint8)
    del block
    assert 60 * MIB < rss.peak(before) < 80 * MIB
    assert rss.peak(rss.start()) < 8 * MIB


def test_a_mapped_file_is_not_counted(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * MIB))
    before = rss.start()
    mapped = np.memmap(path, np.uint8, "r")
    assert mapped.sum() == 0
    assert rss.peak(before) < 16 * MIB


GPT2 = {"model": {"preset": "tiny", "width": 256}, "task": {"vocab_size": 1000, "sequence_length": 128}}
TWO = {"pipeline": {"stages": 2, "microbatches": 4}}
DEBERTA = {
    "model": {"name": "deberta", "preset": "tiny", "width": 256},
    "task": {"name": "classify", "corpus": "movie-reviews", "sequence_length": 128},
}
RESNET = {"model": {"name": "resnet", "preset": "narrow"}, "task": {"name": "image", "corpus": "fashion-mnist"}}
SMALL = {
    "model": {"preset": "small"},
    "task": {"vocab_size": 50257, "sequence_length": 1024, "num_sequences": 8},
    "pipeline": {"stages": 4, "microbatches": 4},
    "train": {"batch_size": 4},
}
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("parts", "stage"),
    [
        (GPT2 | TWO | {"train": {"batch_size": 32}}, 1),
        pytest.param(GPT2 | TWO | {"train": {"batch_size": 32}}, 0, marks=slow),
        pytest.param(GPT2 | TWO | {"train": {"batch_size": 32, "recompute": True}}, 0, marks=slow),
        pytest.param(GPT2 | TWO | {"train": {"batch_size": 32, "optimizer": "sgd"}}, 0, marks=slow),
        pytest.param(
            GPT2 | {"pipeline": {"stages": 2, "schedule": "1f1b"}, "train": {"batch_size": 32}}, 1, marks=slow
        ),
        pytest.param(
            GPT2 | TWO | {"train": {"batch_size": 16}, "model": {"width": 256, "dropout": 0.1}}, 0, marks=slow
        ),
        pytest.param(DEBERTA | TWO | {"train": {"batch_size": 32}}, 0, marks=slow),
        pytest.param(DEBERTA | TWO | {"train": {"batch_size": 32}}, 1, marks=slow),
        pytest.param(RESNET | TWO | {"train": {"batch_size": 128}}, 0, marks=slow),
        *(pytest.param(SMALL, stage, marks=slow) for stage in range(4)),
    ],
)
def test_a_stage_needs_what_was_predicted(parts, stage):
    helper = Path(__file__).parent.parent / "one_stage.py"
    command = [sys.executable, str(helper), json.dumps(parts), str(stage)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    found, measured = memory.predict(spec(**parts))[stage], int(done.stdout)
    predicted = found.total - found.scoring  # nothing is evaluated here
    print(f"{measured / MIB:.0f} MiB measured, {predicted / MIB:.0f} MiB predicted", found.parts)
    assert abs(predicted - measured) < max(WITHIN * measured, FLOOR)


def test_the_partition_is_the_one_that_ranks_use():
    run = spec(pipeline={"stages": 2, "cuts": [1]})
    shape = models.resolve(run.model, run.task)
    parts = partition.split(shape, 2, run.pipeline.cuts)
    held = [4 * sum(shape.parameters_per_block[block] for block in part.blocks) for part in parts]
    ends = [4 * shape.parameters_embedding, 4 * shape.parameters_head]
    assert of(memory.predict(run), "parameters") == [a + b for a, b in zip(held, ends, strict=True)]
