"""Which row of a memory each row of a message goes by.

    sample    the sample's own: needs its id
    slot      that of its place in the step: micro-batch x rows + row
    batch     one for all: the mean over the message's rows of what is to be kept

slot is one buffer of the batch's shape, shared by all batches, as in arXiv 2401.07788: a row goes on from whatever
sample was in its place last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from thinpipe.harness.compression.base import Context
from thinpipe.harness.errors import CodecError

Key = Literal["sample", "slot", "batch"]


def identities(key: Key, ctx: Context, name: str) -> tuple[int, ...]:
    """The identity of the row that each row of the message goes by. CodecError where a sample's id is not known."""
    count = ctx.shape[0]
    if key == "slot":
        return tuple(range(ctx.microbatch * count, (ctx.microbatch + 1) * count))
    if key == "batch":
        return (0,) * count
    if len(ctx.sample_ids) != count:
        raise CodecError(f"{name} needs one sample id a row: {len(ctx.sample_ids)} for {count} rows")
    return ctx.sample_ids


def most(key: Key, num_samples: int | None, rows: int, microbatches: int) -> int | None:
    """Rows there can be; None where that is not known. rows: of a message."""
    return {"sample": num_samples, "slot": rows * microbatches, "batch": 1}[key]


def mean(values: torch.Tensor) -> torch.Tensor:
    """(1, ...): the mean over the first axis in float32, summed in order, so that it is the same everywhere. Each
    is divided before it is added: no sum overflows."""
    total = values[0] / len(values)
    for row in values[1:]:
        total += row / len(values)
    return total.unsqueeze(0)


def folded(identities: Sequence[int], values: torch.Tensor) -> tuple[Sequence[int], torch.Tensor]:
    """The sums, in order, of the rows of each identity."""
    first: dict[int, int] = {}
    for i, one in enumerate(identities):
        first.setdefault(one, i)
    if len(first) == len(identities):
        return identities, values
    sums = values[list(first.values())]
    place = {one: j for j, one in enumerate(first)}
    for i, one in enumerate(identities):
        if first[one] != i:
            sums[place[one]] += values[i]
    return list(first), sums
