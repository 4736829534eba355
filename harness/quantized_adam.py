"""QuantizedAdam: AdamW whose data groups exchange their momentum in a few bits, as AC-SGD's does.

    warm-up      gradients averaged in float32, then AdamW
    afterwards   the second moment stays as it is; each group adds its own gradient to the momentum, which is averaged:

        worker   x = momentum + error         ▸  Q(x) in chunks, one to each rank    error = x - Q(x)
        owner    y = mean of Q(x) + its error ▸  Q(y) to all                         its error = y - Q(y)
        all      momentum = Q(y)

Both ends keep what rounding lost and add it to the next message (two-sided error feedback), so that over many steps
nothing is lost. All decode the same bytes: momenta, and so replicas, stay bit-equal.

Scheme: Wang et al., 2022 (arXiv 2206.01299), after 1-bit Adam (Tang et al., 2021, arXiv 2102.02888). Unlike its code
has it, scales are bf16 rounded up (2 bytes as well, but they neither overflow nor shrink small values), levels are
symmetric, 512 neighbours share a scale (there, 512 elements from all over the model), errors are float32, and a chunk
is one message.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from thinpipe.harness import data_traffic
from thinpipe.harness.compression.kernels import cpu
from thinpipe.harness.compression.kernels.layout import Grid, layout
from thinpipe.harness.compression.tensors import raise_if_diverged
from thinpipe.harness.errors import DivergedError, PeerError

_WORKER, _OWNER = 1, 2  # message tags of the two halves


class _Slot(NamedTuple):
    """A parameter and its place in the flat momentum."""

    name: str
    parameter: torch.nn.Parameter
    start: int
    stop: int


class QuantizedAdam(torch.optim.AdamW):
    """AdamW (decoupled weight decay, torch's groups) over the ranks of `group` that hold the same float32 parameters.

    params: as torch's optimizers take them; where they are named, messages name them. bits: of an exchanged momentum,
    2..8. A step is

        set_warmup(...)          True in the warm-up epochs; the momentum is exchanged from the first False on
        average_gradients()      before clipping: in the warm-up the gradients become the groups' mean, so that steps
                                 are those of plain AdamW; afterwards nothing: gradients stay the group's own, and so
                                 does the norm they are clipped by
        step()

    The second moment's bias correction is frozen with it, the momentum's goes on. An element that had no gradient in
    the whole warm-up has no second moment to be scaled by, and is not updated afterwards. Which parameters get
    gradients must be the same in all groups; those that get none are left alone, as AdamW does.

    Memory beside AdamW's: 4 bytes a parameter, 8 / ranks more, and twice the payload.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        group: dist.ProcessGroup,
        bits: int,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ):
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        assert 2 <= bits <= 8
        self.warming_up = True
        self._averaged = False
        self._group, self._rank, self._size = group, dist.get_rank(group), dist.get_world_size(group)
        self._slots = _slots(self.param_groups)
        self.num_elements = self._slots[-1].stop
        self._chunk = data_traffic.chunk_elements(self.num_elements, self._size)
        self._grid = Grid(bits, symmetric=True)
        self._where = layout((self._chunk // data_traffic.GROUP, data_traffic.GROUP), "token")
        self._momentum = torch.zeros(self._size * self._chunk)
        self._error = torch.zeros_like(self._momentum)
        self._owner_error = torch.zeros(self._chunk)
        self._decoded = torch.empty(self._chunk)
        payload = (self._size, self._grid.num_bytes(self._where))
        self._out, self._in = torch.empty(payload, dtype=torch.uint8), torch.empty(payload, dtype=torch.uint8)
        for slot in self._slots:
            self.state[slot.parameter] = {
                "step": torch.zeros(()),
                "exp_avg": self._view(slot),
                "exp_avg_sq": torch.zeros_like(slot.parameter),
            }

    def _view(self, slot: _Slot) -> torch.Tensor:
        return self._momentum[slot.start : slot.stop].view(slot.parameter.shape)

    def traffic(self) -> data_traffic.Traffic:
        """What one step sends from this rank, as things stand."""
        if self.warming_up:
            return data_traffic.ring(self.num_elements, 4, self._rank, self._size)
        return data_traffic.quantized(self.num_elements, self._grid.bits, self._size)

    # --- a step --------------------------------------------------------------------------------------------------

    def set_warmup(self, warming_up: bool) -> None:
        """Whether this step belongs to the warm-up; the second moment freezes at the first that does not."""
        if self.warming_up and not warming_up:
            assert any(float(self.state[slot.parameter]["step"]) for slot in self._slots), "no step of warm-up was made"
            self._error.zero_()
            for slot in self._slots:
                state = self.state[slot.parameter]
                state["frozen_step"] = float(state["step"])
                second = state["exp_avg_sq"]
                # Else the first value that rounding lets through would be divided by eps alone.
                second.masked_fill_(second == 0, torch.inf)
        assert self.warming_up or not warming_up, "the second moment is frozen: there is no way back to the warm-up"
        self.warming_up = warming_up

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Replace gradients by their mean over the groups, in the warm-up. Raises DivergedError, naming the parameter,
        where one is not finite."""
        if not self.warming_up:
            return
        # Errors begin with the exchange of momenta: until then their memory is free.
        flat = self._error[: self.num_elements]
        flat.zero_()
        for slot in self._slots:
            gradient = slot.parameter.grad
            if gradient is not None:
                largest = cpu.copy(gradient.contiguous().view(-1).numpy(), flat[slot.start : slot.stop].numpy())
                _raise_if_diverged(slot, largest)
        # Divided first, as DDP does, so that the sums are the same to the bit where there are two groups.
        flat.div_(self._size)
        dist.all_reduce(flat, group=self._group)
        for slot in self._slots:
            if slot.parameter.grad is not None:
                slot.parameter.grad.copy_(flat[slot.start : slot.stop].view(slot.parameter.shape))
        self._averaged = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Raises DivergedError, naming the parameter, where a gradient is not finite; PeerError where another group
        did not send or take its part."""
        assert closure is None
        if self.warming_up:
            assert self._averaged, "average_gradients() must come before the clipping of each step"
            self._averaged = False
            super().step()
            return
        self._advance()
        try:
            self._exchange()
        except DivergedError:
            for slot in self._slots:
                if slot.parameter.grad is not None:
                    _raise_if_diverged(slot, float(slot.parameter.grad.abs().max()))
            raise
        self._update()

    def _advance(self) -> None:
        """The momentum with this group's gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] += 1
                    state["exp_avg"].lerp_(parameter.grad, 1 - group["betas"][0])

    def _exchange(self) -> None:
        """The momentum becomes the groups' mean."""
        own, peers = self._rank, [rank for rank in range(self._size) if rank != self._rank]
        momentum, error = self._momentum.view(self._size, -1), self._error.view(self._size, -1)
        due = [(peer, self._receive(self._in[peer], peer, _WORKER)) for peer in peers]
        error += momentum
        for rank in (*peers, own):
            self._encode(error[rank], self._out[rank])
            if rank != own:
                due.append((rank, self._send(self._out[rank], rank, _WORKER)))
            self._decode(self._out[rank], momentum[rank])
            error[rank] -= momentum[rank]
        self._wait(due)
        mean = momentum[own]
        for peer in peers:
            mean += self._decode(self._in[peer], self._decoded)
        mean /= self._size
        due = [(peer, self._receive(self._in[peer], peer, _OWNER)) for peer in peers]
        self._owner_error += mean
        self._encode(self._owner_error, self._out[own])
        due += [(peer, self._send(self._out[own], peer, _OWNER)) for peer in peers]
        self._owner_error -= self._decode(self._out[own], mean)
        self._wait(due)
        for peer in peers:
            self._decode(self._in[peer], momentum[peer])

    def _update(self) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                first = 1 - beta1 ** float(state["step"])
                second = 1 - beta2 ** state["frozen_step"]
                assert second > 0, "a parameter got its first gradient after the warm-up"
                scale = (state["exp_avg_sq"] / second).sqrt_().add_(group["eps"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.addcdiv_(state["exp_avg"], scale, value=-group["lr"] / first)

    # --- messages ------------------------------------------------------------------------------------------------

    def _encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        cpu.encode(values.numpy(), self._where, self._grid, 0, out.numpy())

    def _decode(self, payload: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        cpu.decode(payload.numpy(), self._where, self._grid, out.numpy())
        return out

    def _send(self, payload: torch.Tensor, peer: int, tag: int) -> dist.Work:
        work = dist.isend(payload, group=self._group, group_dst=peer, tag=tag)
        assert work is not None
        return work

    def _receive(self, payload: torch.Tensor, peer: int, tag: int) -> dist.Work:
        work = dist.irecv(payload, group=self._group, group_src=peer, tag=tag)
        assert work is not None
        return work

    def _wait(self, due: list[tuple[int, dist.Work]]) -> None:
        """Until all have arrived or left; the group's own time limit holds."""
        for peer, work in due:
            try:
                work.wait()
            except RuntimeError as error:
                raise PeerError(f"data group {peer} did not send or take its part of the momentum: {error}") from error

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """AdamW's, and what both error feedbacks hold."""
        state = super().state_dict()
        state["exchange"] = {
            "warming_up": self.warming_up,
            "error": self._error,
            "owner_error": self._owner_error,
        }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` gave: steps go on bit-identically."""
        exchange = state_dict["exchange"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "exchange"})
        for slot in self._slots:
            state = self.state[slot.parameter]
            state["exp_avg"] = self._view(slot).copy_(state["exp_avg"])
        self.warming_up = exchange["warming_up"]
        self._error.copy_(exchange["error"])
        self._owner_error.copy_(exchange["owner_error"])


def _slots(groups: list[dict[str, Any]]) -> list[_Slot]:
    """All parameters one behind the other, as the optimizer's groups have them."""
    slots: list[_Slot] = []
    start = 0
    for group in groups:
        names = group.get("param_names") or [f"parameter {len(slots) + i}" for i in range(len(group["params"]))]
        for name, parameter in zip(names, group["params"], strict=True):
            assert parameter.dtype == torch.float32, f"{name} is {parameter.dtype}"
            assert parameter.is_contiguous(), name
            slots.append(_Slot(name, parameter, start, start + parameter.numel()))
            start = slots[-1].stop
    return slots


def _raise_if_diverged(slot: _Slot, largest: float) -> None:
    try:
        raise_if_diverged(largest)
    except DivergedError:
        shape = tuple(slot.parameter.shape)
        raise DivergedError(f"the gradient of {slot.name} {shape} holds a non-finite value (NaN or infinity)") from None
