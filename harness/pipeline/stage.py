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

import contextlib
from collections.abc import Callable, Mapping, Sequence
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
    after, backward the other way; the ends of the pipeline lack theirs, and so do neighbours on one rank (schedules
    shaped like a V), between which tensors are handed over as they are. visit(ids, step) is called before each
    micro-batch's forward and backward; autocast: the type matrix products are done in, None = float32.
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
        local: Sequence[int] = (),
        visit: Callable[[tuple[int, ...], int], None] = lambda ids, step: None,
        autocast: torch.dtype | None = None,
    ):
        """local: the stages on this rank."""
        super().__init__(module, stage_index, num_stages, torch.device("cpu"), group=group)
        before = stage_index > 0 and stage_index - 1 not in local
        after = stage_index < num_stages - 1 and stage_index + 1 not in local
        expected = {
            ("forward", "in"): before,
            ("forward", "out"): after,
            ("backward", "in"): after,
            ("backward", "out"): before,
        }
        assert set(channels) == {side for side, there in expected.items() if there}, "channels do not fit the stage"
        self.channels = channels
        for (direction, side), channel in channels.items():
            opposite = channels.get(("forward", "in" if side == "out" else "out"))
            if direction == "backward" and opposite is not None and channel.uses_peer:
                channel.take_peer_from(opposite)
        self.recorder = recorder
        self._visit, self._autocast = visit, autocast
        self._chunk = -1
        self._offset = 0
        self._ids: Sequence[tuple[int, ...]] = ()
        self._side: Sequence[Mapping[str, torch.Tensor]] = ()
        self._handed: dict[tuple[str, int], torch.Tensor] = {}
        #: Whether the last backward averages gradients between data groups: in the last pass of a step.
        self.synchronise = True

    # --- around a step -------------------------------------------------------------------------------------------

    def begin_step(
        self,
        step: int,
        ids: Sequence[tuple[int, ...]],
        *,
        training: bool,
        use: dict[tuple[Direction, int], str],
        watch: dict[tuple[Direction, int], tuple[str, ...]],
        side: Sequence[Mapping[str, torch.Tensor]] = (),
        offset: int = 0,
    ) -> None:
        """Post the receives of a step. use / watch: by (direction, boundary), see Channel.begin_step; side: what the
        module takes besides its input, by micro-batch; offset: number of the first micro-batch in what is recorded."""
        self._step, self._ids, self._side, self._offset = step, ids, side, offset
        self._handed.clear()
        for channel in self.channels.values():
            channel.offset = offset
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
                self.channels["backward", "out"].send(bwd_chunk_id, _only(gradients))
        return []

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[torch.Tensor, ...]:
        if ("forward", fwd_chunk_id) in self._handed:
            decoded = self._handed.pop(("forward", fwd_chunk_id))
        else:
            decoded = self.channels["forward", "in"].receive(fwd_chunk_id)
        # A new leaf each time, on the channel's storage: a kept one would accumulate gradients across steps.
        return (decoded.detach().requires_grad_(self.has_backward and torch.is_grad_enabled()),)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[torch.Tensor, ...]:
        if ("backward", bwd_chunk_id) in self._handed:
            return (self._handed.pop(("backward", bwd_chunk_id)),)
        return (self.channels["backward", "in"].receive(bwd_chunk_id),)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        self._handed["forward", mb_index] = prev_stage_outputs

    def get_local_bwd_output(self, mb_index: int) -> tuple[torch.Tensor | None, ...]:
        return self.bwd_cache.pop(mb_index) if self.has_backward else (None,)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int) -> None:
        if self.has_backward:
            self._handed["backward", mb_index] = _only(next_stage_bwd_outputs)

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        self._chunk = fwd_chunk_id
        self._visit(self._ids[fwd_chunk_id], self._step)
        return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._chunk = bwd_chunk_id
        # Recomputed blocks meet the dropout masks of this micro-batch again.
        self._visit(self._ids[bwd_chunk_id], self._step)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        self._chunk = bwd_chunk_id
        self._visit(self._ids[bwd_chunk_id], self._step)
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        start = now()
        cast = torch.autocast("cpu", self._autocast) if self._autocast else contextlib.nullcontext()
        # Added here and not before: torch would keep it for the backward pass as if it were an input.
        side = self._side[self._chunk] if self._side else {}
        with cast:
            output = super().forward_maybe_with_nosync(*args, **kwargs, **side)
        # The boundary tensor and the loss are float32 whatever the products were done in.
        output = output.float()
        self.recorder.span("forward_compute", start, now(), self._offset + self._chunk, stage=self.stage_index)
        return output

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        start = now()
        last_backward = last_backward and self.synchronise
        result = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward=last_backward)
        self.recorder.span("backward_compute", start, now(), self._offset + self._chunk, stage=self.stage_index)
        return result

    # --- metadata inference, skipped -----------------------------------------------------------------------------

    def _warmup_forward_vote(self, has_backward: bool, received_acc: torch.Tensor | None = None) -> torch.Tensor:
        return torch.ones(1, dtype=torch.int32)

    def _warmup_backward_result(self, received_result: torch.Tensor | None = None) -> torch.Tensor:
        return torch.ones(1, dtype=torch.int32)

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> None:
        self.chunks = num_microbatches
        # A schedule of several stages a rank looks up where inputs come from; there is nothing for it to know.
        self.args_recv_info = dict.fromkeys(range(num_microbatches), ())
        # backward_one_chunk counts the boundary inputs by this tuple's length.
        self._stage_meta.inputs = (None,)  # type: ignore[assignment]
        self.act_send_info = {}

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> None:
        self.chunks = num_microbatches


def _only(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """The gradient of the boundary tensor."""
    gradient = gradients[0]
    assert gradient is not None, "the boundary tensor got no gradient"
    return gradient
