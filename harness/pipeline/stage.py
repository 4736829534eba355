"""CompressedStage: a PipelineStage whose traffic goes through channels, under torch's own schedules.

torch's schedule asks the stage for point-to-point operations, runs them, and calls forward and backward:

    schedule:   get_fwd_recv_ops ─▶ forward_one_chunk ─▶ get_fwd_send_ops     (backward likewise)
    here:       []                  receives from a       sends through a
                                    channel inside        channel, returns []

Metadata inference is skipped: it would send over the measured link, repeat at each train/evaluation switch, and run an
extra forward. tests/contract/test_torch_pipelining.py names every method overridden here and what it relies on.

    1 stage.begin_step(...)        receives are posted
    2 schedule.step(...)           forwards and backwards
    3 stage.finish_step()          sends have left
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from thinpipe.harness.channel import Channel, Traffic
from thinpipe.harness.compression.base import Direction
from thinpipe.harness.recorder import Recorder, now


class CompressedStage(PipelineStage):
    """Stage `stage_index` of `num_stages`; one float tensor crosses each boundary.

    channels: (direction, "in" | "out") -> Channel. Forward comes in from the stage before and goes out to the one
    after, backward the other way; the ends of the pipeline lack theirs.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        stage_index: int,
        num_stages: int,
        *,
        channels: dict[tuple[Direction, str], Channel],
        recorder: Recorder,
        group: dist.ProcessGroup | None = None,
    ):
        super().__init__(module, stage_index, num_stages, torch.device("cpu"), group=group)
        expected = {
            ("forward", "in"): stage_index > 0,
            ("forward", "out"): stage_index < num_stages - 1,
            ("backward", "in"): stage_index < num_stages - 1,
            ("backward", "out"): stage_index > 0,
        }
        assert set(channels) == {side for side, there in expected.items() if there}, "channels do not fit the stage"
        self.channels = channels
        self.recorder = recorder
        self._chunk = -1

    # --- around a step -------------------------------------------------------------------------------------------

    def begin_step(
        self,
        step: int,
        ids: Sequence[tuple[int, ...]],
        *,
        training: bool,
        use: dict[tuple[Direction, int], str],
        watch: dict[tuple[Direction, int], tuple[str, ...]],
    ) -> None:
        """Post the receives of a step. use / watch: by (direction, boundary), see Channel.begin_step."""
        for (direction, _), channel in self.channels.items():
            if training or direction == "forward":
                key = (direction, channel.boundary)
                channel.begin_step(step, ids, training=training, use=use[key], watch=watch.get(key, ()))

    def finish_step(self, *, training: bool) -> list[tuple[Channel, Traffic]]:
        """Wait for this step's sends; what each sending channel sent."""
        done = []
        for (direction, side), channel in self.channels.items():
            if training or direction == "forward":
                traffic = channel.finish_step()
                if side == "out":
                    done.append((channel, traffic))
        return done

    # --- what torch calls ----------------------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.is_last:
            (output,), _ = self.fwd_cache[fwd_chunk_id]
            self.channels["forward", "out"].send(fwd_chunk_id, output.detach())
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward:
            # Popped on the first stage too, where there is nobody to send to: torch's own stage leaves it behind.
            gradients = self.bwd_cache.pop(bwd_chunk_id)
            if not self.is_first:
                gradient = gradients[0]
                assert gradient is not None, "the boundary tensor got no gradient"
                self.channels["backward", "out"].send(bwd_chunk_id, gradient)
        return []

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[torch.Tensor, ...]:
        decoded = self.channels["forward", "in"].receive(fwd_chunk_id)
        # A new leaf each time, on the channel's storage: a kept one would accumulate gradients across steps.
        return (decoded.detach().requires_grad_(self.has_backward and torch.is_grad_enabled()),)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[torch.Tensor, ...]:
        return (self.channels["backward", "in"].receive(bwd_chunk_id),)

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        self._chunk = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._chunk = bwd_chunk_id
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        start = now()
        output = super().forward_maybe_with_nosync(*args, **kwargs)
        self.recorder.span("forward_compute", start, now(), self._chunk)
        return output

    def backward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        start = now()
        result = super().backward_maybe_with_nosync(*args, **kwargs)
        self.recorder.span("backward_compute", start, now(), self._chunk)
        return result

    # --- metadata inference, skipped -----------------------------------------------------------------------------

    def _warmup_forward_vote(self, has_backward: bool, received_acc: torch.Tensor | None = None) -> torch.Tensor:
        return torch.ones(1, dtype=torch.int32)

    def _warmup_backward_result(self, received_result: torch.Tensor | None = None) -> torch.Tensor:
        return torch.ones(1, dtype=torch.int32)

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> None:
        self.chunks = num_microbatches
        # backward_one_chunk counts the boundary inputs by this tuple's length.
        self._stage_meta.inputs = (None,)  # type: ignore[assignment]
        self.act_send_info = {}

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> None:
        self.chunks = num_microbatches
