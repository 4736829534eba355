"""Schedules of torch.distributed.pipelining by name, and which rank holds which stage.

gpipe, 1f1b                                     one stage a rank
interleaved-1f1b, looped-bfs, interleaved-zb    several: stage k on rank k mod ranks
zbv-zb, dualpipev                               two, shaped like a V: rank r holds stages r and 2 ranks - 1 - r
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from thinpipe.harness.pipeline.stage import CompressedStage

SINGLE: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
SEVERAL: dict[str, Any] = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "looped-bfs": ScheduleLoopedBFS,
    "interleaved-zb": ScheduleInterleavedZeroBubble,
    "zbv-zb": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def training(name: str, stages: Sequence[CompressedStage], microbatches: int, loss: Loss) -> Any:
    """The schedule of a training step on this rank; gradients are summed over micro-batches and not divided."""
    if name in SINGLE:
        (stage,) = stages
        return SINGLE[name](stage, microbatches, loss_fn=loss, scale_grads=False)
    return SEVERAL[name](list(stages), microbatches, loss_fn=loss, scale_grads=False)


def evaluation(name: str, stages: Sequence[CompressedStage], microbatches: int, loss: Loss) -> Any:
    """The schedule of an evaluation: forward passes in order."""
    return training("gpipe" if name in SINGLE else name, stages, microbatches, loss)
