"""Two result sets: what is paired with what, what counts as a change, and what is not judged."""

import json

import pytest
from made_sets import made, run

from thinpipe.harness import compare
from thinpipe.harness.errors import UserError

NUMBERS = {"step_time_s": 1.0, "final_train_loss": 2.0, "final_eval_loss": 2.5, "frame_bytes": 1000, "measure": "full"}


def sets(change, *, seeds=3, settings=lambda row: {}):
    """A and B of one cell each; change(seed) -> columns of B's run that are not A's."""
    a = [run(seed, seed=seed, **NUMBERS) for seed in range(seeds)]
    b = [run(seed + 100, seed=seed, **{**NUMBERS, **change(seed)}) for seed in range(seeds)]
    return made(a, settings), made(b, settings, name="other")


def effect(answer, metric, **where):
    (found,) = [e for e in answer["effects"] if e["metric"] == metric and all(e[k] == v for k, v in where.items())]
    return found


def test_a_sure_change_has_a_side():
    answer = compare.of(*sets(lambda seed: {"step_time_s": 0.5 + 0.001 * seed, "final_train_loss": 2.2 + 0.01 * seed}))
    faster = effect(answer, "step_time_s")
    assert faster["verdict"] == "better"
    assert faster["effect"] == pytest.approx(0.501, abs=1e-4)
    assert faster["interval"][0] < faster["effect"] < faster["interval"][1] < 1
    assert faster["n"] == 3
    assert effect(answer, "final_train_loss")["verdict"] == "worse"
    assert effect(answer, "final_eval_loss")["verdict"] == "same"
    assert answer["counts"] == {"better": 1, "worse": 1, "undecided": 0, "same": 2, "foreign": 0}


def test_more_is_better_where_it_is():
    answer = compare.of(*sets(lambda seed: {"final_accuracy": 0.9 + 0.001 * seed}), metrics=["step_time_s"])
    assert answer["counts"]["same"] == 1
    a = made([run(s, seed=s, samples_per_s=10.0 + s) for s in range(3)])
    b = made([run(s, seed=s, samples_per_s=20.0 + s) for s in range(3)])
    assert effect(compare.of(a, b, ["samples_per_s"]), "samples_per_s")["verdict"] == "better"


def test_noise_is_undecided_and_one_seed_too():
    assert effect(compare.of(*sets(lambda seed: {"step_time_s": (0.8, 1.3, 1.0)[seed]})), "step_time_s")["verdict"] == (
        "undecided"
    )
    one = compare.of(*sets(lambda seed: {"step_time_s": 0.5, "frame_bytes": 900}, seeds=1))
    assert effect(one, "step_time_s")["verdict"] == "undecided"
    assert effect(one, "step_time_s")["effect"] == pytest.approx(0.5)
    assert effect(one, "frame_bytes")["verdict"] == "better", "bytes are counted: one run says them"


def test_only_shared_seeds_are_paired():
    a = made([run(s, seed=s, **NUMBERS) for s in (0, 1, 2)])
    b = made([run(s, seed=s, **NUMBERS, wall_s=1.0) for s in (1, 2, 3)])
    assert effect(compare.of(a, b), "step_time_s")["n"] == 2


def test_flagged_runs_have_no_part_in_times():
    answer = compare.of(*sets(lambda seed: {"step_time_s": 9.0 if seed == 1 else 1.0, "fidelity": FLAGS[seed]}))
    assert effect(answer, "step_time_s")["n"] == 2
    assert effect(answer, "step_time_s")["verdict"] == "same"
    assert effect(answer, "final_train_loss")["n"] == 3
    every = compare.of(*sets(lambda seed: {"fidelity": "cpu-bound"}))
    assert effect(every, "step_time_s")["n"] == 0
    assert "flagged" in effect(every, "step_time_s")["why"]


FLAGS = ("ok", "cpu-bound", "ok")


def test_times_of_another_machine_are_shown_and_not_judged():
    answer = compare.of(*sets(lambda seed: {"machine": "b" * 12, "step_time_s": 0.5, "final_train_loss": 1.0}))
    assert answer["foreign"]
    assert effect(answer, "step_time_s")["verdict"] == "foreign"
    assert effect(answer, "step_time_s")["effect"] == pytest.approx(0.5)
    assert effect(answer, "final_train_loss")["verdict"] == "better"
    assert "different machines" in compare.render(answer)


def test_divergence_is_worse_than_any_number():
    gone = {"state": "diverged", "final_train_loss": None, "final_eval_loss": None, "step_time_s": None}
    answer = compare.of(*sets(lambda seed: gone if seed == 0 else {"final_train_loss": 1.0 + 0.01 * seed}))
    lost = effect(answer, "final_train_loss")
    assert (lost["verdict"], lost["n"]) == ("worse", 2)
    assert "1 seed(s) diverged in B alone" in lost["why"]
    a, b = sets(lambda seed: gone if seed == 0 else {})
    assert effect(compare.of(b, a), "final_train_loss")["verdict"] == "better"


def test_cells_are_paired_by_the_settings_that_set_them_apart():
    def rows(rates, offset):
        return [
            run(1000 * offset + 10 * n + s, seed=s, rate_mbit=rate, step_time_s=rate * (1 + offset), measure="full")
            for n, rate in enumerate(rates)
            for s in range(2)
        ]

    def settings(row, lr=0.1):
        return {"network.rate_mbit": row["rate_mbit"], "train.lr": lr}

    a = made(rows((10.0, 30.0), 0), settings)
    b = made(rows((30.0, 100.0), 1), lambda row: settings(row, 0.2))
    answer = compare.of(a, b, ["step_time_s"])
    assert [e["setting"] for e in answer["effects"]] == ["rate_mbit 30"]
    assert answer["effects"][0]["effect"] == pytest.approx(2.0)
    assert answer["only_a"] == [{"part": "timing", "arm": "A", "setting": "rate_mbit 10"}]
    assert answer["only_b"] == [{"part": "timing", "arm": "A", "setting": "rate_mbit 100"}]
    assert answer["changed"] == {"train.lr": [[0.1], [0.2]]}
    text = compare.render(answer)
    assert "only in B: timing / A / rate_mbit 100" in text
    assert "changed: train.lr: 0.1 -> 0.2" in text


def test_numbers_that_may_be_zero_are_subtracted():
    answer = compare.of(*sets(lambda seed: {"codec_s": 0.1}), metrics=["codec_s"])
    assert answer["effects"] == [], "A has none"
    a, b = (made([run(s, seed=s, codec_s=value + 0.001 * s) for s in range(3)]) for value in (0.0, 0.5))
    found = effect(compare.of(a, b, ["codec_s"]), "codec_s")
    assert (found["scale"], found["verdict"]) == ("difference", "worse")
    assert found["effect"] == pytest.approx(0.5)


def test_what_cannot_be_compared_is_refused():
    a, b = sets(lambda seed: {"arm": "B"})
    with pytest.raises(UserError, match="nothing to compare"):
        compare.of(a, b)
    with pytest.raises(UserError, match="no better side"):
        compare.of(a, a, ["stages"])
    with pytest.raises(UserError, match="Did you mean 'frame_bytes'"):
        compare.of(a, a, ["frame_byte"])


def test_the_answer_is_plain_data():
    answer = compare.of(*sets(lambda seed: {}))
    assert json.loads(json.dumps(answer, allow_nan=False)) == answer
