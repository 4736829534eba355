"""rho: of a rate, a rate of it, and once an experiment."""

import json

import pytest

from thinpipe.harness import profile, rho, runner
from thinpipe.harness.errors import UserError
from thinpipe.harness.experiment import expand
from thinpipe.harness.profile import Profile
from thinpipe.harness.spec import parse
from thinpipe.harness.store import Store

# Boundaries of 4 x 64 x 128 float32: 131072 B, and 91 segments' headers.
MESSAGE_BITS = 8 * (131072 + 66 * 91)
TIMES = ((0.001, 0.002, 0.001, 0.001), (0.003, 0.004, 0.002, 0.002), (0.0,) * 4)
FOUND = Profile("own", "", True, "", "", "gpt2:tiny", 64, 4, False, *TIMES)
# Blocks 0, 1 and 2, 3: the first stage is the slower one.
SLOWEST_S = 0.003 + 0.007


def grid(arms=("FP32", "DirectQ"), where="experiment", **base):
    return expand(
        {
            "name": "grid",
            "seeds": [0, 1],
            "base": {"measure": "timing", "pipeline": {"cuts": [2]}, **base},
            "part": [{"name": "timing", "axes": {"network": {"rate": ["rho:0.5", "rho:2"]}}}],
            "arm": [
                {"label": label, "compression": {"forward": forward}}
                for label, forward in zip(arms, ("none", "fixpoint:4"), strict=True)
            ],
        },
        where=where,
    )


def networks(experiment):
    return [spec.network for cell in experiment.cells() for _, spec in cell.runs]


def test_a_ratio_and_its_rate_are_each_others_inverse():
    spec = parse({"pipeline": {"cuts": [2]}})
    assert rho.ratio(spec, FOUND, 10.0) == pytest.approx(2 * MESSAGE_BITS / 1e7 / SLOWEST_S)
    rate = rho.rate_mbit(spec, FOUND, 3.0)
    assert rate == pytest.approx(2 * MESSAGE_BITS / 1e6 / (3.0 * SLOWEST_S), rel=1e-3)
    assert rho.ratio(spec, FOUND, rate) == pytest.approx(3.0, rel=1e-3)
    assert rate == float(f"{rate:.4g}")


def test_a_ratio_to_the_forward_time_is_converted():
    """Twice the transfer, over forward and a backward pass that recomputes it."""
    forward_s, message_s = 0.0534, 0.219
    theirs = message_s / forward_s
    assert rho.from_forward_ratio(theirs) == pytest.approx(2 * message_s / (forward_s + 3 * forward_s))
    assert rho.from_forward_ratio(1.0, backward_per_forward=2.0) == pytest.approx(2 / 3)


def test_a_rate_that_no_link_can_have_is_refused():
    with pytest.raises(UserError, match="choose another rho"):
        rho.rate_mbit(parse({"pipeline": {"cuts": [2]}}), FOUND, 1e-4)


def test_rates_are_worked_out_once_an_experiment(tmp_path):
    store, asked = Store(tmp_path), []

    def measure(spec):
        asked.append(spec)
        return FOUND

    first = rho.resolve(grid(), store, measure)
    assert len(asked) == 1, "arms, rates and seeds share a model"
    assert all(one.is_resolved for one in networks(first))
    assert len({one.rate_mbit for one in networks(first)}) == 2
    assert {one.rate for one in networks(first)} == {"rho:0.5", "rho:2"}
    for cell in first.cells():
        assert cell.cell_id == cell.runs[0][1].cell_id
    kept = json.loads((tmp_path / "grid" / "rho.json").read_text())
    assert sorted(row["rho"] for row in kept["rates"]) == [0.5, 2.0]
    assert networks(rho.resolve(grid(), store)) == networks(first), "read back, nothing measured"
    rho.resolve(grid(), store, measure)
    rho.resolve(first, store, measure)
    assert len(asked) == 1


def test_another_model_is_measured_by_itself(tmp_path):
    store, asked = Store(tmp_path), []

    def measure(spec):
        asked.append(spec)
        return FOUND

    rho.resolve(grid(), store, measure)
    rho.resolve(grid(train={"lr": 1.0}), store, measure)
    assert len(asked) == 1
    rho.resolve(grid(train={"autocast": "bf16"}), store, measure)
    assert len(asked) == 2
    rho.resolve(grid(), store, measure)
    assert len(asked) == 2


def test_planning_measures_and_writes_nothing(tmp_path):
    planned = rho.resolve(grid(), Store(tmp_path))
    assert not any(one.is_resolved for one in networks(planned))
    assert list(tmp_path.iterdir()) == []


def test_a_replay_needs_no_measurement(tmp_path):
    profile.write(FOUND, tmp_path / "own.json")
    replayed = {"compute": "replay", "profile": str(tmp_path / "own.json")}
    made = rho.resolve(grid(**replayed), Store(tmp_path))
    for cell in made.cells():
        for _, spec in cell.runs:
            assert rho.ratio(spec, FOUND, spec.network.rate_mbit) == pytest.approx(spec.network.rho, rel=1e-3)
            assert rho.of_run(spec) == spec.network.rho
    given = parse({**replayed, "measure": "timing", "network": {"rate_mbit": 10.0}, "pipeline": {"cuts": [2]}})
    assert rho.of_run(given) == pytest.approx(rho.ratio(given, FOUND, 10.0))
    assert rho.of_run(parse({"network": {"rate_mbit": 10.0}})) is None


def test_both_ways_to_say_a_rate_must_agree(tmp_path):
    profile.write(FOUND, tmp_path / "own.json")
    asked = {"compute": "replay", "profile": str(tmp_path / "own.json"), "network": {"rate_mbit": 10.0}}
    with pytest.raises(UserError, match="leave one out"):
        grid(**asked)
    # A stored run has both, and they must still agree.
    with pytest.raises(UserError, match="leave one of them out"):
        rho.resolve(grid(where="run.json", **asked), Store(tmp_path))


def test_a_rate_that_is_not_worked_out_cannot_be_run():
    with pytest.raises(UserError, match="'rho:2' is a ratio"):
        runner.topology_of(parse({"network": {"rate": "rho:2"}}))
    resolved = parse({"network": {"rate": "rho:2", "rate_mbit": 12.0}})
    plain = parse({"network": {"rate_mbit": 12.0}})
    assert runner.topology_of(resolved) == runner.topology_of(plain)
    assert resolved.network_id == plain.network_id


@pytest.mark.parametrize("rate", ["2", "rho:", "rho:-1", "rho:0", "rho:0.0", "rho:nan", "RHO:1", "rho:1e3"])
def test_what_is_no_ratio_is_refused(rate):
    with pytest.raises(UserError, match=r"write it as rho:X"):
        parse({"network": {"rate": rate}})


def test_one_stage_has_no_ratio():
    with pytest.raises(UserError, match="nothing crosses"):
        parse({"network": {"rate": "rho:2"}, "pipeline": {"stages": 1}})


def test_a_damaged_record_is_refused(tmp_path):
    (tmp_path / "grid").mkdir()
    (tmp_path / "grid" / "rho.json").write_text("[]")
    with pytest.raises(UserError, match="delete it"):
        rho.resolve(grid(), Store(tmp_path), lambda spec: FOUND)
