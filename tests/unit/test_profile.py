"""Profiles: reading, refusing, seconds of a stage; what spec.py lets a replay do; what is predicted of one."""

import json
from dataclasses import replace

import pytest

from thinpipe.harness import manifest, memory, plan, predict, profile, runner, sweep
from thinpipe.harness.errors import RunError, UserError
from thinpipe.harness.experiment import expand
from thinpipe.harness.settings import setting_keys
from thinpipe.harness.spec import parse
from thinpipe.harness.store import Store, write_json

XL = {
    "model": {"preset": "xl"},
    "task": {"sequence_length": 1024},
    "pipeline": {"stages": 8, "microbatches": 32},
    "train": {"batch_size": 32, "recompute": True},
    "measure": "timing",
    "compute": "replay",
    "profile": "v100-gpt2-xl",
}
XXL = {
    "model": {"name": "deberta", "preset": "xxlarge"},
    "task": {"name": "classify", "corpus": "movie-reviews", "sequence_length": 256},
    "pipeline": {"stages": 8, "microbatches": 8},
    "train": {"batch_size": 64, "recompute": True},
    "measure": "timing",
    "compute": "replay",
    "profile": "v100-deberta-v2-xxl",
}


def spec(base=XL, **changes):
    """`base` with changes by dotted key, written with two underscores."""
    data = json.loads(json.dumps(base))
    for key, value in changes.items():
        *groups, leaf = key.split("__")
        node = data
        for group in groups:
            node = node.setdefault(group, {})
        node[leaf] = value
    return parse(data)


def stages(of):
    return profile.of_spec(profile.load(of.profile), of)


def test_a_file_reads_back_as_it_was_written(tmp_path):
    found = profile.load("v100-gpt2-xl")
    profile.write(found, tmp_path / "folder" / "own.json")
    assert profile.load(str(tmp_path / "folder" / "own.json")) == found
    assert profile.digest(str(tmp_path / "folder" / "own.json")) == profile.digest("v100-gpt2-xl")
    profile.write(replace(found, date="2020-01-01"), tmp_path / "own.json")
    assert profile.digest(str(tmp_path / "own.json")) != profile.digest("v100-gpt2-xl")


@pytest.mark.parametrize("base", [XL, XXL])
def test_a_stated_profile_says_so_and_gives_the_throughput_it_was_solved_for(base):
    """GPipe's model at 10 Gbit/s, links at 0.8 of it: references of the profiles' source."""
    run = spec(base)
    found = profile.load(run.profile)
    assert not found.measured
    assert "UNVERIFIED" in found.source
    times = stages(run)
    assert len({tuple(one) for one in times}) == 1, "balanced"
    forward, backward, optimizer = times[0]
    assert backward == pytest.approx(3 * forward, rel=1e-4)
    assert optimizer == 0
    pieces, message_s = run.pipeline.microbatches, 4 * predict.elements(run) * 8 / 0.8e10
    seconds = (8 + pieces - 1) * (forward + backward) + 2 * 7 * message_s
    assert run.train.batch_size / seconds == pytest.approx({32: 3.80, 64: 12.9}[run.train.batch_size], rel=2e-3)


def test_a_micro_batch_of_another_size_takes_as_much_longer():
    small, large = stages(spec()), stages(spec(train__batch_size=128))
    assert large[3].forward_s == pytest.approx(4 * small[3].forward_s)
    assert large[3].optimizer_s == small[3].optimizer_s


def test_a_stage_takes_what_its_blocks_take():
    times = stages(spec(pipeline__stages=2, pipeline__cuts=[12]))
    assert [round(one.forward_s, 4) for one in times] == [round(12 * 0.0089, 4), round(36 * 0.0089, 4)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"profile": "v100-gpt2"}, "v100-gpt2-xl"),
        ({"profile": "nowhere/one.json"}, "no profile nowhere/one.json"),
        ({"model__preset": "large", "task__sequence_length": 64}, "its model is 'gpt2:xl'"),
        ({"model__layers": 12}, "gpt2:xl(layers=12)"),
        ({"task__sequence_length": 512}, "sequence_length is 1024"),
        ({"train__recompute": False}, "recompute is True"),
    ],
)
def test_a_profile_that_does_not_fit_is_refused(changes, said):
    run = spec(**changes)
    with pytest.raises(UserError) as error:
        stages(run)
    assert said in str(error.value)


GOOD = profile.load("v100-gpt2-xl").to_json()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"forward": [1.0]}, "unknown key 'forward'. Did you mean 'forward_s'"),
        ({"forward_s": [0.1]}, "a time for each block"),
        ({"backward_s": [-1.0] * 48}, "backward_s must be a list of seconds"),
        ({"optimizer_s": ["fast"] * 48}, "optimizer_s must be a list of seconds"),
        ({"microbatch_size": 0}, "microbatch_size must be a whole number"),
        ({"recompute": "yes"}, "recompute must be true or false"),
    ],
)
def test_a_damaged_file_is_refused(change, said):
    with pytest.raises(UserError) as error:
        profile.parse(json.dumps({**GOOD, **change}))
    assert said in str(error.value)
    with pytest.raises(UserError, match="lacks source"):
        profile.parse(json.dumps({key: value for key, value in GOOD.items() if key != "source"}))
    with pytest.raises(UserError, match="no JSON"):
        profile.parse("{")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"profile": None}, "set profile"),
        ({"compute": "real"}, "profile has no effect"),
        ({"measure": "convergence"}, 'set measure "timing"'),
        ({"data_parallel__groups": 2, "train__batch_size": 64}, "no gradients to exchange"),
        ({"pipeline__schedule": "zbv-zb", "pipeline__stages_per_rank": 2}, "two halves"),
        ({"train__autocast": "bf16"}, "nothing is computed"),
    ],
)
def test_what_a_replay_cannot_do_is_refused(changes, said):
    with pytest.raises(UserError) as error:
        spec(**changes)
    assert said in str(error.value)


def test_a_run_that_computes_is_named_as_before():
    """Fields with defaults change no id."""
    assert parse({}).run_id == parse({"compute": "real", "network": {"rate": None}}).run_id
    assert spec().run_id != spec(profile="other.json").run_id
    assert {"compute", "profile", "network.rate"} <= set(setting_keys())


def test_time_and_memory_of_a_replay_are_predicted():
    """FP32 over 100 Mbit/s takes most of a minute a step: the limit on silence is longer. No weights are counted."""
    slow = spec(network__rate_mbit=100)
    assert predict.step_s(slow, 0, first_visit=False) == pytest.approx(42, rel=0.05)
    assert runner.stall_limit_s(slow) > 500
    fast = spec(network__rate_mbit=10_000)
    assert predict.step_s(fast, 0, first_visit=False) == pytest.approx(39 * 0.2136, rel=0.02)
    assert predict.step_s(spec(network__rate="rho:0.5"), 0, first_visit=False) > 1.02 * 39 * 0.2136
    assert max(one.total for one in memory.predict(slow)) < 1.5 * 2**30
    assert {one.parts["parameters"] for one in memory.predict(slow)} == {0}


def test_with_another_profile_of_the_same_name_a_run_is_stale(tmp_path):
    path, store = tmp_path / "own.json", Store(tmp_path / "results")
    path.write_text(json.dumps(GOOD))
    settings = spec(profile=str(path)).canonical()
    experiment = expand({"name": "once", "base": settings, "part": [{"name": "run", "arm": [{"label": "FP32"}]}]})
    ((_, run),) = next(experiment.cells()).runs
    write_json(store.begin(run) / "manifest.json", manifest.collect(run))
    store.finish(run.run_id, {**sweep.failed_status(RunError(""), "", 1.0), "state": "done"})

    def entry():
        return plan.make(experiment, store).entries[0]

    assert store.manifest(run.run_id)["profile"] == GOOD
    assert entry().state == "done"
    path.write_text(json.dumps({**GOOD, "forward_s": [0.001] * 48}))
    assert entry().state == "stale"
    assert f"profile {path}" in entry().note


def test_links_that_carry_no_frames_are_not_calibrated():
    """Eight hosts have 56 links between them, and a pipeline uses 14."""
    assert len(runner.carrying(spec())) == 14
    groups = parse({"data_parallel": {"groups": 2}})
    assert runner.carrying(groups) == {(0, 1), (1, 0), (2, 3), (3, 2), (0, 2), (2, 0), (1, 3), (3, 1)}
