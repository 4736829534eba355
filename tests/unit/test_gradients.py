"""Between backward and update: gradients divided, shared ones summed, all clipped; in one process and over ranks."""

from __future__ import annotations

import data_groups
import gradient_ranks
import pytest
import torch
from gradient_ranks import SHARED, of, stages

from thinpipe.harness import gradients
from thinpipe.harness.errors import DivergedError
from thinpipe.harness.gradients import Gradients, StageGradients
from thinpipe.harness.recorder import Recorder
from thinpipe.harness.spec import TrainSpec


def finish(made, pieces=1, **train):
    return Gradients(made, TrainSpec(**train), None, Recorder("run", 0)).finish(pieces)


def copies(made):
    return [stage.named[SHARED[stage.stage]][1] for stage in made if stage.stage in SHARED]


@pytest.mark.parametrize("clip", [0.1, 1e6])
def test_clipping_is_bit_equal_to_torch(clip):
    made = stages(tied=False)
    parameters = [p for stage in made for _, p in stage.named]
    own = [p.grad.clone() for p in parameters]
    norm, factor = gradients.clip_coefficient(torch.stack([torch.linalg.vector_norm(g) for g in own]), clip)
    expected = torch.nn.utils.clip_grad_norm_(parameters, clip)
    assert norm == float(expected)
    for p, gradient in zip(parameters, own, strict=True):
        assert torch.equal(p.grad, gradient.mul_(factor))
    again = stages(tied=False)
    assert finish(again, clip_norm=clip) == norm
    assert all(torch.equal(gradient, p.grad) for gradient, p in zip(of(again).values(), parameters, strict=True))


@pytest.mark.parametrize(("scaling", "divisor"), [("mean", 6.0), ("sum", 1.0)])
def test_gradients_are_divided_by_the_micro_batches_or_left_as_their_sum(scaling, divisor):
    made = stages(tied=False)
    before = of(made)
    assert finish(made, pieces=6, loss_scaling=scaling, clip_norm=None) is None
    for name, gradient in of(made).items():
        assert torch.equal(gradient, before[name] / divisor)


def test_the_norm_is_taken_after_dividing():
    whole, parts = stages(tied=False), stages(tied=False)
    for _, parameter in (pair for stage in parts for pair in stage.named):
        parameter.grad.mul_(4)
    assert finish(parts, pieces=4, clip_norm=0.5) == pytest.approx(finish(whole, clip_norm=0.5), rel=1e-6)


def test_each_stage_may_clip_by_its_own_norm():
    made, apart = stages(tied=False), stages(tied=False)
    for _, parameter in (*made[0].named, *apart[0].named):
        parameter.grad.mul_(1e-3)
    norm = finish(made, clip_norm=0.5, clip_scope="stage")
    theirs = [torch.nn.utils.clip_grad_norm_([p for _, p in stage.named], 0.5) for stage in apart]
    assert norm == float(max(theirs))
    assert all(torch.equal(a, b) for a, b in zip(of(made).values(), of(apart).values(), strict=True))
    assert float(theirs[0]) < 0.5 < norm, "the first stage is one that needs no clipping"


# --- shared weights ---


def test_copies_of_a_shared_weight_all_get_the_sum():
    made = stages()
    before = of(made)
    total = sum(gradient.clone() for gradient in [p.grad for p in copies(made)])
    finish(made, clip_norm=None)
    assert len(copies(made)) == 3
    for parameter in copies(made):
        assert torch.equal(parameter.grad, total)
    for stage in made:
        for i, (name, parameter) in enumerate(stage.named):
            if i != SHARED.get(stage.stage):
                assert torch.equal(parameter.grad, before[name])


def test_two_copies_within_a_stage_are_summed_too_and_counted_once():
    def pair():
        torch.manual_seed(0)
        found = [torch.nn.Parameter(torch.randn(5)) for _ in range(3)]
        for parameter in found:
            parameter.grad = torch.randn(5)
        return found

    a, b, c = pair()
    norm = finish([StageGradients(0, [("a", a), ("b", b), ("c", c)], {"k": [a, c]})], clip_norm=1e9)
    x, y, z = (p.grad for p in pair())
    assert torch.equal(a.grad, x + z)
    assert torch.equal(a.grad, c.grad)
    assert norm == float(torch.linalg.vector_norm(torch.stack([g.norm() for g in (x + z, y)])))


def test_a_shared_weight_enters_the_norm_once():
    """As in the model in which it is one weight."""
    made, one = stages(), stages()
    shared = copies(one)
    for other in shared[1:]:
        shared[0].grad.add_(other.grad)
    once = [p for stage in one for _, p in stage.named if not any(p is other for other in shared[1:])]
    expected = torch.nn.utils.clip_grad_norm_(once, 0.5)
    assert finish(made, clip_norm=0.5) == float(expected)
    for parameter in copies(made):
        assert torch.equal(parameter.grad, shared[0].grad)


# --- what is not finite ---


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("scope", ["global", "stage"])
def test_a_norm_that_is_not_finite_is_divergence(value, scope):
    made = stages(tied=False)
    made[2].named[1][1].grad[3] = value
    recorder = Recorder("run", 0)
    recorder.step = 7
    with pytest.raises(DivergedError, match=r"the gradient norm became .* at step 7"):
        Gradients(made, TrainSpec(clip_norm=1.0, clip_scope=scope), None, recorder).finish(1)


def test_a_parameter_without_a_gradient_is_our_own_bug():
    made = stages(tied=False)
    made[1].named[0][1].grad = None
    with pytest.raises(AssertionError, match=r"1\.0 got no gradient"):
        finish(made)


# --- over ranks ---

PLACEMENTS = {
    "one stage a rank": ((0,), (1,), (2,), (3,)),
    "looped": ((0, 2), (1, 3)),
    "a V": ((0, 3), (1, 2)),
}


def over_ranks(placement, *, train, pieces=3, expect_errors=False, **made):
    return data_groups.run(
        gradient_ranks.finished, len(placement), placement, train, pieces, made, expect_errors=expect_errors
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_ranks_end_with_what_one_process_has(name, tied):
    train = {"clip_norm": 0.5}
    made = stages(tied=tied)
    norm = finish(made, pieces=3, **train)
    found = over_ranks(PLACEMENTS[name], train=train, tied=tied)
    together = {}
    for rank, (_, own, phases) in enumerate(found):
        assert {int(key[0]) for key in own} == set(PLACEMENTS[name][rank])
        assert "sync" in phases
        together |= own
    expected = of(made)
    assert set(together) == set(expected)
    assert len({theirs for theirs, *_ in found}) == 1, "one norm on all ranks"
    if not tied:
        assert found[0][0] == norm
        assert all(torch.equal(together[key], gradient) for key, gradient in expected.items())
        return
    # The sum of a shared weight is added up in another order.
    assert found[0][0] == pytest.approx(norm, rel=1e-6)
    for key, gradient in expected.items():
        torch.testing.assert_close(together[key], gradient, rtol=1e-6, atol=1e-7)
    copies_found = [together[f"{stage}.{at}"] for stage, at in SHARED.items()]
    assert all(torch.equal(copies_found[0], other) for other in copies_found[1:]), "copies must not drift apart"


def test_ranks_that_clip_by_stage_exchange_nothing():
    found = over_ranks(PLACEMENTS["looped"], train={"clip_norm": 0.5, "clip_scope": "stage"}, tied=False)
    assert not any("sync" in phases for *_, phases in found)
    assert found[0][0] != found[1][0], "each has its own largest norm"


def test_what_diverges_on_one_rank_ends_all():
    found = over_ranks(PLACEMENTS["looped"], train={"clip_norm": 1.0}, spoilt=2, expect_errors=True)
    assert [type(error) for error in found] == [DivergedError] * 2
