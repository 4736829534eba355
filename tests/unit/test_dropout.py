"""Dropout by keyed masks: whose mask it is decides what is dropped, nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from thinpipe.harness.models import _dropout
from thinpipe.harness.models._shared import call


def layer(p: float = 0.3, *, name: str = "h.0.drop", seed: int = 0, masks="sample") -> _dropout.SampleDropout:
    return _dropout.SampleDropout(p, name=name, seed=seed, masks=masks)


def ones(count: int = 3, sizes: tuple[int, ...] = (16, 32)) -> torch.Tensor:
    return torch.ones(count, *sizes)


def at(ids: tuple[int, ...], step: int = 0, **options) -> torch.Tensor:
    _dropout.visit(ids, step)
    return layer(**options)(ones(len(ids)))


def test_a_mask_is_its_samples_own_whatever_its_neighbours_and_the_step():
    first = at((4, 9, 2))
    assert torch.equal(at((4, 9, 2), step=6), first)
    assert torch.equal(at((2, 4)), first[[2, 0]])
    assert torch.equal(at((9,)), first[[1]])
    assert not torch.equal(first[0], first[1])


def test_masks_differ_by_place_and_seed_and_by_step_where_they_are_to():
    first = at((4,))
    assert not torch.equal(at((4,), name="h.1.drop"), first)
    assert not torch.equal(at((4,), seed=1), first)
    stepwise = [at((4,), step=step, masks="step") for step in (0, 1, 0)]
    assert not torch.equal(stepwise[0], stepwise[1])
    assert torch.equal(stepwise[0], stepwise[2])


@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 0.9, 0.999999])
def test_what_is_kept_is_scaled_so_that_the_expectation_is_exact(p):
    _dropout.visit(tuple(range(8)), 0)
    drop = layer(p)
    out = drop(ones(8, (501, 97)))
    values = out.unique()
    scale = values[values > 0]
    assert scale.numel() <= 1
    if scale.numel():
        dropped = 1 - 1 / scale.item()
        assert dropped == pytest.approx(p, abs=1 / 65536)
    share = (out == 0).double().mean().item()
    assert share == pytest.approx(p, abs=1 / 65536 + 5 * (p * (1 - p) / out.numel()) ** 0.5)


def test_masks_are_fixed_by_definition():
    """The first words of Philox 4x64 (Salmon et al. 2011) under this key: other numpy releases drop the same."""
    import hashlib

    import numpy as np

    digest = hashlib.blake2b(b"0/dropout/h.0.drop", digest_size=8).digest()
    key = np.array([int.from_bytes(digest, "little"), 5], dtype=np.uint64)
    words = np.random.Philox(counter=[0, 0, 0, 0], key=key).random_raw(2).tolist()
    pieces = [word >> shift & 0xFFFF for word in words for shift in (0, 16, 32, 48)]
    _dropout.visit((5,), 0)
    kept = layer()(torch.ones(1, 7))[0] != 0
    assert kept.tolist() == [piece >= round(0.3 * 65536) for piece in pieces[:7]]


def test_the_gradient_has_the_mask_of_its_forward_pass():
    _dropout.visit((1, 2), 0)
    x = ones(2).requires_grad_()
    out = layer()(x)
    _dropout.visit((7, 8), 3)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())


def test_recomputation_meets_the_same_masks_after_another_micro_batch():
    block = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.4), nn.Linear(32, 32))
    _dropout.swap(block, masks="step", seed=0)
    gradients = []
    for recompute in (False, True):
        block.zero_grad()
        _dropout.visit((0, 1), 5)
        first = call(block, ones(2), recompute=recompute)
        _dropout.visit((2, 3), 5)
        second = call(block, ones(2), recompute=recompute)
        for ids, out in (((0, 1), first), ((2, 3), second)):
            _dropout.visit(ids, 5)
            out.square().sum().backward()
        gradients.append([p.grad.clone() for p in block.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_swap_replaces_every_dropout_and_names_it_in_the_whole_model():
    inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Dropout(0.0))
    module = nn.ModuleDict({"h": nn.ModuleDict({"3": inner}), "drop": nn.Dropout(0.2)}).eval()
    before = list(module.state_dict())
    _dropout.swap(module, masks="sample", seed=2, prefix="encoder.")
    found = {m.name: m for m in module.modules() if isinstance(m, _dropout.SampleDropout)}
    assert {name: m.p for name, m in found.items()} == {"encoder.h.3.1": 0.1, "encoder.drop": 0.2}
    assert list(module.state_dict()) == before
    assert not any(m.training for m in found.values()), "the mode stays"
    assert isinstance(inner[2], nn.Dropout), "one that drops nothing stays"


def test_evaluation_is_the_identity_and_asks_for_no_visit():
    _dropout.visit((), 0)
    x = ones()
    assert layer().eval()(x) is x
    with pytest.raises(AssertionError, match=r"h\.0\.drop: 3 rows for 0 samples"):
        layer()(x)


def test_the_global_generators_are_left_alone():
    before = torch.get_rng_state()
    at((1, 2))
    assert torch.equal(torch.get_rng_state(), before)


def test_half_precision_stays_so():
    _dropout.visit((0,), 0)
    assert layer()(torch.ones(1, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
