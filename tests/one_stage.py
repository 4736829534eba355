"""One stage of a run, trained for a few steps in a process of its own: prints the bytes it needed (rss.py).

    python one_stage.py '{"pipeline": {"stages": 2}}' 0

Its frames and the other stages are stood in for; what it computes, keeps and updates is a rank's.
"""

import json
import math
import sys

import torch
import torch.distributed.pipelining  # what a rank has imported

from thinpipe.harness import memory, plugins, rss, spec
from thinpipe.harness.models import _dropout, base
from thinpipe.harness.pipeline import partition

STEPS = 3


def main(text: str, index: int) -> None:
    run = spec.parse(json.loads(text))
    torch.set_num_threads(1)
    shape = base.resolve(run.model, run.task)
    part = partition.split(shape, run.pipeline.stages, run.pipeline.cuts)[index]
    model = plugins.get("models", run.model.name).load()
    before = rss.start()
    stage = model.build(run.model, shape, part, seed=0, recompute=run.train.recompute)
    parameters = list(stage.parameters())
    adamw = run.train.optimizer == "adamw"
    optimizer = torch.optim.AdamW(parameters, fused=True) if adamw else torch.optim.SGD(parameters, momentum=0.9)
    size, count = run.microbatch_size, run.pipeline.microbatches
    ends = [None if part.first else part.blocks[0] - 1, None if part.last else part.blocks[-1]]
    shapes = [None if end is None else (size, *shape.boundaries[end]) for end in ends]
    frames = [
        torch.ones(4 * math.prod(s) + memory.HEADER, dtype=torch.uint8) for s in shapes if s for _ in range(2 * count)
    ]
    received, gradients = ([torch.randn(s) for _ in range(count)] if s else [] for s in shapes)

    def forward(i: int):
        _dropout.visit(tuple(range(size)), 0)
        x = inputs(run, shape) if part.first else received[i].detach().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=run.train.autocast == "bf16"):
            y = stage(x, **side(run, shape))
        y = y.float()
        return y, model.loss(y, targets(run, shape)) if part.last else None

    def backward(i: int, y: torch.Tensor, loss: torch.Tensor | None) -> None:
        _dropout.visit(tuple(range(size)), 0)
        torch.autograd.backward(y if loss is None else loss, gradients[i] if loss is None else None)

    flight = memory.in_flight(run, index)
    for _ in range(STEPS):
        held: dict[int, tuple] = {}
        for i in range(count):
            if len(held) == flight:
                oldest = min(held)
                backward(oldest, *held.pop(oldest))
            held[i] = forward(i)
        for i in sorted(held):
            backward(i, *held.pop(i))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert frames or run.pipeline.stages == 1
    print(rss.peak(before))


def inputs(run, shape):
    if shape.kind == "images":
        return torch.randn(run.microbatch_size, 3, 32, 32)
    return torch.randint(0, shape.vocab_size, (run.microbatch_size, run.task.sequence_length))


def side(run, shape):
    if shape.kind != "classification":
        return {}
    return {"attention_mask": torch.ones(run.microbatch_size, run.task.sequence_length, dtype=torch.int64)}


def targets(run, shape):
    size = run.microbatch_size
    if shape.kind == "lm":
        return torch.randint(0, shape.vocab_size, (size, run.task.sequence_length))
    return torch.randint(0, shape.num_labels, (size,))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
