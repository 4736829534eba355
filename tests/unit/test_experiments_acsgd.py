"""The experiments of arXiv 2206.01299: each loads at each size, and plans; what they share are the same runs."""

from __future__ import annotations

import functools
import math

import pytest

from thinpipe.harness import experiment, predict, profile, sizes
from thinpipe.harness.experiment import Experiment
from thinpipe.harness.spec import RunSpec

NAMES = experiment.group("acsgd")
IDS = [name.partition("/")[2] for name in NAMES]
#: Figures and tables of the paper, and what we add to them (A1 to A10, F4r).
EXPECTED = {
    *("F1a", "F1b", "F2", "F3a", "F3b", "F3c", "F3d", "T2", "F5a", "F5b", "F5c", "E2E", "F4r"),
    *(f"F4{letter}" for letter in "abcdefgh"),
    *(f"A{number}" for number in range(1, 11)),
}
#: Real ranks that are timed: two, or several whose links are so slow that computing does not count.
TIMED = {"F4r": 2, "F5c": 4}
#: Published checkpoints, which are not on this machine -> the preset of the same size.
PUBLISHED = {"openai-community/gpt2-xl": "xl", "microsoft/deberta-v2-xxlarge": "xxlarge"}


@functools.cache
def load(identifier: str, size: str) -> Experiment:
    return experiment.load(f"acsgd/{identifier}", size=size)


def specs(identifier: str, size: str, part: str | None = None) -> list[RunSpec]:
    cells = [cell for cell in load(identifier, size).cells() if part in (None, cell.part)]
    return [spec for cell in cells for _, spec in cell.runs]


def ids(identifier: str, size: str, part: str | None = None) -> set[str]:
    return {spec.run_id for spec in specs(identifier, size, part)}


def offline(spec: RunSpec) -> RunSpec:
    """The spec without a checkpoint of a hub: of the same size, so with the same plan."""
    preset = PUBLISHED.get(spec.model.checkpoint or "")
    if preset is None:
        return spec
    return spec.model_copy(update={"model": spec.model.model_copy(update={"checkpoint": None, "preset": preset})})


def test_every_figure_has_its_experiment():
    assert set(IDS) == EXPECTED


@pytest.mark.parametrize("identifier", IDS)
@pytest.mark.parametrize("size", sizes.SIZES)
def test_it_loads_and_plans(identifier, size):
    loaded = load(identifier, size)
    assert loaded.name == f"acsgd-{identifier}.{size}"
    assert loaded.title
    assert loaded.question.endswith("?")
    # Of each part the last cell: predicting all of them takes longer than the rest of these tests.
    for part in loaded.parts:
        spec = offline(part.cells[-1].runs[0][1])
        if spec.compute == "replay":
            assert profile.of_spec(profile.load(spec.profile or ""), spec)
        if spec.network.is_resolved and not (spec.model.checkpoint or "").startswith(("pretrained:", "fetched:")):
            seconds = predict.predict(spec)
            assert math.isfinite(seconds)
            assert seconds > 0


@pytest.mark.parametrize("identifier", IDS)
def test_claims_say_what_they_are(identifier):
    """Loading has checked that parts, arms, metrics and axes exist."""
    assert load(identifier, "cpu").claims
    for size in sizes.SIZES:
        for claim in load(identifier, size).claims:
            assert claim.sentence.endswith(".")
            assert len(claim.sentence) > 20
            assert claim.source


def test_what_is_unverified_is_called_so():
    for claim in load("E2E", "cpu").claims:
        if claim.args.get("s") == 6.8 and claim.bound == 4.3:
            assert "unverified" in claim.sentence
            break
    else:
        pytest.fail("the claim about 4.3 is gone")


@pytest.mark.parametrize("identifier", IDS)
def test_arithmetic_is_told_from_measurement(identifier):
    """What no run can contradict is called so, by name and source; and nothing else is."""
    for claim in load(identifier, "cpu").claims:
        worked_out = claim.metric == "accounting"
        assert claim.name.startswith("worked out: ") == worked_out
        assert ("no run has a part in it" in claim.source) == worked_out


@pytest.mark.parametrize("size", sizes.SIZES)
@pytest.mark.parametrize("identifier", IDS)
def test_compositions_are_checked_where_there_are_full_runs(identifier, size):
    """Of composed curves the accounting is an identity, and what was composed cannot be held against itself."""
    found = load(identifier, size)
    for claim in found.claims:
        if claim.metric in ("accounting_ratio", "composition_error"):
            cells = [cell for cell in found.cells() if cell.part == claim.part]
            assert {spec.measure for cell in cells for _, spec in cell.runs} == {"full"}
            assert {claim.arm, claim.args.get("baseline", claim.arm)} <= {cell.arm for cell in cells}


@pytest.mark.parametrize("size", sizes.SIZES)
def test_what_is_measured_in_full_is_what_is_composed(size):
    """The same trainings, with every seed, at one of the networks that were timed."""
    trained = {spec.train_id for spec in specs("F4r", size, "convergence")}
    timed = {spec.network for spec in specs("F4r", size, "timing")}
    full = specs("F4r", size, "measured")
    assert {spec.seed for spec in full} == set(load("F4r", size).seeds)
    assert {spec.train_id for spec in full} <= trained
    assert {spec.network for spec in full} <= timed
    assert {claim.metric for claim in load("F4r", size).claims} >= {"accounting_ratio", "composition_error"}


@pytest.mark.parametrize("letter", "abcd")
def test_the_gap_of_direct_quantisation_is_over_aq_sgd_at_its_bits(letter):
    (claim,) = [claim for claim in load(f"F3{letter}", "cpu").claims if claim.name == "fewer bits, larger gap"]
    over = dict(zip(claim.arms, claim.args["others"], strict=True))
    assert over == {arm: arm.replace("DirectQ", "AQ-SGD") for arm in claim.arms}
    low, high = (int(arm.split(" fw")[1][0]) for arm in claim.arms)
    assert low < high
    assert claim.relation == ">"


@pytest.mark.parametrize("identifier", IDS)
def test_arms_differ_in_their_method_only(identifier):
    """Learning rate, batch and length of training are shared by all arms."""
    for cell in load(identifier, "cpu").cells():
        assert not [key for key in cell.settings if key.startswith("train.")], cell.arm


@pytest.mark.parametrize("identifier", [name for name in IDS if name != "A7"])
def test_there_is_a_bf16_baseline(identifier):
    assert any(cell.arm.startswith("BF16") for cell in load(identifier, "cpu").cells())


@pytest.mark.parametrize("identifier", IDS)
@pytest.mark.parametrize("size", ["check", "cpu"])
def test_deep_pipelines_are_timed_by_replay_only(identifier, size):
    for spec in specs(identifier, size):
        if spec.measure != "convergence" and spec.compute == "real":
            assert spec.world_size <= TIMED.get(identifier, 0), spec
        rate = spec.network.rate_mbit
        assert rate is None or rate <= 1000, "beyond what one small machine carries"


@pytest.mark.parametrize("identifier", IDS)
def test_sizes_have_their_seeds(identifier):
    assert len(load(identifier, "check").seeds) == 1
    exact = all(claim.exact for claim in load(identifier, "cpu").claims)
    assert len(load(identifier, "cpu").seeds) >= (1 if exact else 3)


@pytest.mark.parametrize("size", ["check", "cpu"])
@pytest.mark.parametrize("identifier", [f"F4{letter}" for letter in "abcdefgh"])
def test_curves_are_composed_of_runs_that_are_there_anyway(identifier, size):
    trained = "F3" + "abcd"["abcdefgh".index(identifier[-1]) % 4]
    assert ids(identifier, size, "convergence") <= ids(trained, size)
    assert ids(identifier, size, "timing") <= ids("T2", size)


@pytest.mark.parametrize(
    ("identifier", "part", "others"),
    [
        ("E2E", "throughput", ("T2",)),
        ("A8", "throughput", ("T2",)),
        ("A9", "training", ("A1", "A3")),
        ("F1b", "convergence", ("F3c",)),
        ("F2", "convergence", ("F3c",)),
        ("F2", "data-parallel", ("F5a",)),
    ],
)
def test_experiments_share_runs(identifier, part, others):
    for size in ("check", "cpu"):
        known = set().union(*(ids(other, size) for other in others))
        shared = ids(identifier, size, part) & known
        assert len(shared) >= 0.6 * len(ids(identifier, size, part)), size


def test_fast_links_are_at_paper_size():
    rates = {spec.network.rate_mbit for spec in specs("T2", "paper")}
    assert rates == {10000, 1000, 500, 300, 100}
    assert {spec.compute for spec in specs("T2", "paper")} == {"real"}
