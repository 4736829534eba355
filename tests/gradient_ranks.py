"""What ranks do in test_gradients.py; they import these functions by name."""

from types import SimpleNamespace

import torch
import torch.distributed as dist

from thinpipe.harness.gradients import Gradients, StageGradients
from thinpipe.harness.recorder import Recorder
from thinpipe.harness.spec import TrainSpec

#: Elements of each stage's parameters; the first of stage 0, the last of stage 3, and one of stage 1 are copies of one.
SIZES = ((6, 3), (6, 5), (4, 9), (2, 6))
SHARED = {0: 0, 1: 0, 3: 1}


def stages(*, tied=True, spoilt=None):
    """Every stage's parameters with gradients, in model order. spoilt: a stage with a gradient that is not finite."""
    torch.manual_seed(0)
    made = []
    for index, sizes in enumerate(SIZES):
        named = [(f"{index}.{i}", torch.nn.Parameter(torch.randn(size))) for i, size in enumerate(sizes)]
        for _, parameter in named:
            parameter.grad = torch.randn_like(parameter)
        if index == spoilt:
            named[0][1].grad[0] = float("nan")
        shared = {"tied": [named[SHARED[index]][1]]} if tied and index in SHARED else {}
        made.append(StageGradients(index, named, shared))
    return made


def of(made):
    return {name: parameter.grad.clone() for stage in made for name, parameter in stage.named}


def finished(group, placement, train, pieces, made):
    """(norm, gradients by name, phases that took time) of this rank, which holds the stages of its place; `made`: how
    stages() makes them."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    links = SimpleNamespace(
        rank=rank,
        ranks=size,
        pipe=group,
        subgroup=_group_of,
    )
    mine = [stage for stage in stages(**made) if stage.stage in placement[rank]]
    recorder = Recorder("run", rank)
    norm = Gradients(mine, TrainSpec(**train), links, recorder).finish(pieces)
    return norm, of(mine), [span["phase"] for span in recorder.rows["spans"]]


def _group_of(ranks):
    """As Links.subgroup: every rank makes it, a stranger to it gets none."""
    made = dist.new_group(list(ranks))
    return None if made is dist.GroupMember.NON_GROUP_MEMBER else made
