"""Sizes, workloads, and what an experiment file declares beside its runs."""

from __future__ import annotations

import copy
import fnmatch
import itertools

import pytest

from thinpipe.harness import experiment, sizes
from thinpipe.harness.errors import UserError
from thinpipe.harness.experiment import COMPOSITION_CHECK, expand

DATA = {
    "name": "demo",
    "base": {"task.num_sequences": 64, "train.lr": 0.1, "train.epochs": 9},
    "arm": [{"label": "FP32"}, {"label": "Q [4]", "compression.forward": "fixpoint:4"}],
    "size": {
        "check": {
            "seeds": [5],
            "base": {"train.epochs": 1},
            "part": {"timing": {"base": {"train.lr": 0.3}, "axes": {"network.rate_mbit": [7]}}},
        },
        "cpu": {"seeds": [0, 1], "arms": ["Q [4]"]},
        "paper": {"skip": ["timing"]},
    },
    "part": [
        {"name": "timing", "base": {"measure": "timing"}, "axes": {"network.rate_mbit": [10, 20]}},
        {"name": "loss", "base": {"train.lr": 0.2}},
    ],
    "compose": {"timing": "timing", "convergence": "loss", "check": 0.25},
}


CLAIM = {"name": "a", "sentence": "A.", "source": "ours", "part": "loss", "metric": "final_train_loss", "relation": "<"}


def changed(**keys):
    return {key: value for key, value in {**copy.deepcopy(DATA), **keys}.items() if value is not None}


def test_a_size_has_its_own_name_seeds_settings_axes_and_parts():
    check = expand(DATA, size="check")
    assert (check.name, check.size, check.seeds) == ("demo.check", "check", [5])
    timing = check.parts[0].cells[0]
    spec = timing.runs[0][1]
    assert (spec.network.rate_mbit, spec.train.lr, spec.train.epochs) == (7, 0.3, 1)
    loss = next(part for part in check.parts if part.name == "loss").cells[0].runs[0][1]
    assert (loss.train.lr, loss.train.epochs) == (0.2, 1)
    assert [part.name for part in expand(DATA, size="paper").parts] == ["loss"]


def test_cpu_is_the_size_unless_another_is_named_and_patterns_keep_arms():
    cpu = expand(DATA)
    assert cpu.size == "cpu"
    assert {cell.arm for cell in cpu.cells()} == {"Q [4]"}


def test_an_experiment_without_sizes_keeps_its_name_and_refuses_one():
    plain = {key: value for key, value in DATA.items() if key not in ("size", "compose")}
    assert expand(plain).name == "demo"
    with pytest.raises(UserError, match="no sizes"):
        expand(plain, size="check")


def test_a_share_of_the_composed_curves_is_also_run_in_full():
    cpu = expand(DATA, size="cpu")
    drawn = [(cell, seed, spec) for cell in cpu.parts[-1].cells for seed, spec in cell.runs]
    assert cpu.parts[-1].name == COMPOSITION_CHECK
    assert len(drawn) == 1  # of one arm, two networks, two seeds
    cell, seed, spec = drawn[0]
    trained = {s: r for c in cpu.parts[1].cells for s, r in c.runs if c.arm == cell.arm}
    assert spec.measure == "full"
    assert spec.train_id == trained[seed].train_id
    assert spec.network.rate_mbit == cell.settings["network.rate_mbit"]
    assert expand(DATA, size="cpu").parts[-1] == cpu.parts[-1]


def test_every_training_at_every_network_may_be_run_in_full():
    grid = changed(compose={"timing": "timing", "convergence": "loss", "check": 1})
    grid["base"] |= {"data_parallel.groups": 2}
    grid["part"][0]["axes"] = {"network.rate_mbit": [10], "data_parallel.rate_mbit": [5, 50]}
    grid["part"][1]["axes"] = {"train.lr": [0.1, 0.2, 0.3]}
    found = expand(grid, size="cpu")
    trained = {spec.train_id for cell in found.parts[1].cells for _, spec in cell.runs}
    timed = {spec.network_id for cell in found.parts[0].cells for _, spec in cell.runs}
    full = [(cell, spec) for cell in found.parts[-1].cells for _, spec in cell.runs]
    assert {(spec.train_id, spec.network_id) for _, spec in full} == set(itertools.product(trained, timed))
    assert len(full) == 3 * 2 * 2
    for cell, spec in full:
        assert cell.settings["train.lr"] == spec.train.lr
        assert cell.settings["data_parallel.rate_mbit"] == spec.data_parallel.rate_mbit


def test_a_replayed_part_cannot_be_run_in_full():
    replayed = changed()
    replayed["part"][0]["base"] = {"measure": "timing", "compute": "replay", "profile": "v100-gpt2-xl"}
    with pytest.raises(UserError, match="check = 0"):
        expand(replayed)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"size": {"huge": {}}}, ["unknown key 'huge'", "check"]),
        ({"size": {"cpu": {"sedes": [1]}}}, ["sedes", "seeds"]),
        ({"size": {"cpu": {"skip": ["tming"]}}}, ["no part 'tming'", "'timing'"]),
        ({"size": {"cpu": {"part": {"los": {}}}}}, ["no part 'los'"]),
        ({"size": {"cpu": {"part": {"loss": {"arm": []}}}}}, ["unknown key 'arm'"]),
        ({"size": {"cpu": {"arms": ["nothing"]}}}, ["keeps none of its arms"]),
        ({"workload": "gpt5"}, ["unknown workload 'gpt5'"]),
        ({"compose": {"timing": "timing"}}, ["convergence must be the name of a part"]),
        ({"compose": {"timing": "tim", "convergence": "loss"}}, ["no part 'tim'", "'timing'"]),
        ({"compose": {"timing": "timing", "convergence": "loss", "check": 2}}, ["0 to 1"]),
        ({"needs": ["download it"]}, ["fetch-data NAME"]),
        ({"figures": ["trace"]}, ["'trace' is not drawn of an experiment"]),
        ({"figures": ["rate_distortion"]}, ["'rate_distortion' is not drawn of an experiment"]),
        ({"size": None, "claim": [{**CLAIM, "arm": "FP32", "bound": 1.0, "sizes": ["cpu"]}]}, ["has no sizes"]),
        ({"needs": ["fetch-data nope"]}, ["no 'nope'", "fashion-mnist"]),
        ({"compose": {"timing": "loss", "convergence": "loss"}}, ["one part, 'loss'"]),
        ({"compose": {"timing": "loss", "convergence": "timing"}}, ["'loss' has measure = 'convergence'"]),
        ({"size": {"cpu": {"skip": ["timing", "loss"]}}, "compose": None}, ["skips every part"]),
        ({"size": {"cpu": {"arms": ["FP32", "Z*"]}}}, ["no arm is like 'Z*'"]),
        ({"size": {"cpu": {"skip": ["loss"], "part": {"loss": {"seeds": [1]}}}}}, ["skipped, and also changed"]),
        ({"name": "reference"}, ["runs, reference"]),
        ({"base": {"network.rate": "rho:1", "network.rate_mbit": 200}}, ["leave one out"]),
        ({"claim": [{**CLAIM, "bound": float("nan")}]}, ["bound must be a finite number"]),
        ({"claim": [{**CLAIM, "factor": 10**400}]}, ["factor must be a finite number"]),
        ({"claim": [{**CLAIM, "args": {"s": float("inf")}}]}, ["args.s must be a finite number"]),
        ({"claim": [{**CLAIM, "arm": "FP32", "other": "FP32"}]}, ["against itself"]),
        ({"claim": [{"name": "a"}]}, ["claim 'a'", "sentence"]),
        ({"claim": [{"nmae": "a"}]}, ["unknown key 'nmae'", "'name'"]),
    ],
)
def test_what_is_wrong_is_refused_with_words(keys, words):
    with pytest.raises(UserError) as refused:
        expand(changed(**keys))
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize("name", sorted(sizes.workloads()))
def test_a_workload_is_used(name):
    users = [text for text in experiment.builtin().values() if f'workload = "{name}"' in text]
    assert users, f"no experiment uses workload {name}"


def test_a_group_is_in_the_order_of_its_numbers(monkeypatch):
    monkeypatch.setattr(experiment, "builtin", lambda: dict.fromkeys(["g/A10", "g/A2", "h/A1", "x"], ""))
    assert experiment.group("g") == ["g/A2", "g/A10"]
    assert fnmatch.filter(experiment.group("h"), "h/*") == ["h/A1"]
