"""The experiments of arXiv 2401.07788: each file loads and plans at each size, and says of itself what is true."""

from __future__ import annotations

from functools import cache

import pytest

from thinpipe.harness import experiment, plan
from thinpipe.harness.experiment import Experiment
from thinpipe.harness.sizes import SIZES
from thinpipe.harness.store import Store

NAMES = experiment.group("rudakov")
IDS = [f"R{number}" for number in range(1, 9)]
# What the summary of the paper's tables gives, as shares of 1: nothing else may be shown as its number.
PUBLISHED = {0.85, 0.9205, 0.9187, 0.93}
# Runs that one sitting of each size can hold: minutes for `check`, less than an hour for `cpu`.
MOST_RUNS = {"check": 40, "cpu": 400}


@cache
def loaded(name: str, size: str) -> Experiment:
    return experiment.load(name, size=size)


def runs(size: str) -> dict[str, str]:
    """Model by run, of all files: what they share is there once."""
    specs = [spec for name in NAMES for cell in loaded(name, size).cells() for _, spec in cell.runs]
    return {spec.run_id: spec.model.name for spec in specs}


def test_the_ids_are_all_there():
    assert [f"rudakov/{name}" for name in IDS] == NAMES


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_it_plans(name, size, tmp_path):
    # Seeds change nothing in a plan but its length.
    found = experiment.load(name, ["seeds=[0]"], size=size)
    assert found.name == f"rudakov-{name.partition('/')[2]}.{size}"
    planned = plan.make(found, Store(tmp_path))
    assert {entry.state for entry in planned.entries} == {"pending"}
    assert all(entry.predicted_s > 0 for entry in planned.entries)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_each_part_has_a_bf16_baseline_and_claims(name, size):
    found = loaded(name, size)
    for part in found.parts:
        assert "BF16" in {cell.arm for cell in part.cells}
    assert found.claims
    assert len({claim.sentence for claim in found.claims}) == len(found.claims)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_uncompressed_is_said_of_fp32_only(name, size):
    """BF16 halves the bytes: what is held against it names it."""
    for claim in loaded(name, size).claims:
        assert "uncompressed" not in claim.sentence.lower() or "FP32" in (claim.arm, claim.other)
        assert claim.other != "FP32" or claim.arm == "BF16" or "FP32" in claim.sentence


@pytest.mark.parametrize("name", NAMES)
def test_seeds_are_enough_to_decide_but_for_a_check(name):
    assert [len(loaded(name, size).seeds) for size in ("check", "paper")] == [1, 3]
    assert len(loaded(name, "cpu").seeds) >= 3
    # Settings were chosen on seeds from 100 on.
    assert max(loaded(name, "cpu").seeds) < 100


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_the_pipeline_is_as_published_and_untimed(name, size):
    for cell in loaded(name, size).cells():
        for _, spec in cell.runs:
            assert spec.pipeline.stages == 4
            assert spec.measure == "convergence"
            assert spec.network.rate_mbit is None
            assert spec.model.name == ("gpt2" if name.endswith(("R2", "R4")) else "resnet")


@pytest.mark.parametrize("name", NAMES)
def test_arms_share_everything_but_compression(name):
    """One learning rate, one data order, one model: an arm that had its own would need to say so."""
    for size in SIZES:
        specs = [cell.runs[0][1] for cell in loaded(name, size).cells()]
        assert len({spec.model_copy(update={"compression": None}).model_dump_json() for spec in specs}) == 1
        assert len({spec.run_id for spec in specs}) == len(specs)


@pytest.mark.parametrize("name", NAMES)
def test_published_numbers_belong_to_the_paper_size(name):
    for size in SIZES:
        for claim in loaded(name, size).claims:
            assert not claim.name.startswith("published") or claim.sizes == ("paper",)
            if claim.metric == "max_accuracy" and claim.bound is not None:
                assert claim.bound in PUBLISHED
                assert claim.sizes == ("paper",)


def test_the_paper_size_names_each_published_number():
    named = {claim.bound for name in NAMES for claim in loaded(name, "paper").claims if claim.name.startswith("publ")}
    assert named - {None} == PUBLISHED


def test_sizes_stay_small():
    for size, most in MOST_RUNS.items():
        assert 0 < len(runs(size)) <= most


def test_experiments_share_runs():
    """Plain TopK and the baseline are trained once: R5 and R6 compare with R3's, R7 with R5's and R6's."""
    by_name = {
        name: {spec.run_id for cell in loaded(f"rudakov/{name}", "cpu").cells() for _, spec in cell.runs}
        for name in ("R3", "R5", "R6", "R7")
    }
    for one, other, arms, seeds in (("R3", "R5", 5, 3), ("R3", "R6", 5, 5), ("R5", "R7", 3, 3), ("R6", "R7", 2, 3)):
        assert len(by_name[one] & by_name[other]) == seeds * arms


def test_evaluation_on_and_off_differ_in_nothing_else():
    arms = {cell.arm: cell.runs[0][1] for name in ("R3", "R5") for cell in loaded(f"rudakov/{name}", "cpu").cells()}
    pairs = [label for label in arms if label.endswith(", inference off")]
    assert len(pairs) == 10
    for label in pairs:
        off, on = arms[label].compression, arms[label.removesuffix(", inference off")].compression
        assert (off.evaluation, on.evaluation) == ("off", "codec")
        assert off.model_copy(update={"evaluation": "codec"}) == on


def test_both_quantisers_have_equal_bits_one_direction_at_a_time():
    cells = [cell for cell in loaded("rudakov/R8", "cpu").cells() if cell.arm != "BF16"]
    assert len(cells) == 8
    for cell in cells:
        codec, direction, bits = cell.arm.replace("fw", "forward ").replace("bw", "backward ").split()
        compression = cell.runs[0][1].compression
        other = {"forward": "backward", "backward": "forward"}[direction]
        text = {"min-max": "minmax:{}", "grid": "grid:{}(by=rate)"}[codec].format(bits)
        assert (getattr(compression, direction), getattr(compression, other)) == (text, "none")
