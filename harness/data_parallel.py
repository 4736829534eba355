"""Data parallelism beside the pipeline: gradients averaged between the ranks that hold the same stage, by torch's DDP.

    wrap     the stage's module becomes a DistributedDataParallel with a hook of torch's (or stays as it is, for an
             optimizer that exchanges itself: quantized_adam.py)
    ...      backward passes add up; in the last one of a step torch's pipeline stage lets DDP send each bucket of
             gradients as soon as it is complete, so that the exchange overlaps with the rest of that backward pass
    finish   averages what that backward pass did not pass by, and makes sure that everything was averaged

Bytes by formula: data_traffic.py.
"""

# No `from __future__ import annotations`: DDP compares a hook's annotations with types, not with their names.

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from thinpipe.harness import data_traffic
from thinpipe.harness.compression.tensors import peak
from thinpipe.harness.errors import OverflowedError, PeerError, RunError, UserError
from thinpipe.harness.quantized_adam import QuantizedAdam
from thinpipe.harness.spec import DataParallelSpec, RunSpec

__all__ = ["QuantizedAdam", "finish", "hook_state", "load_hook_state", "traffic", "unwrap", "wrap"]

_FP16_MAX = float(torch.finfo(torch.float16).max)


@dataclass
class Exchange:
    """What the hook of one module knows. reduced: elements averaged in this step; buckets: their sizes in order;
    largest: magnitude of this rank's gradients (fp16 only); silent: parameters that the last backward pass of a step
    does not reach through DDP, found by `watches` in the first step (`fired`: the ids of the others)."""

    parallel: DataParallelSpec
    group: dist.ProcessGroup
    parameters: Sequence[torch.nn.Parameter]
    low_rank: Any = None
    priming: bool = False
    reduced: int = 0
    buckets: list[int] = field(default_factory=list)
    largest: float = 0.0
    fired: set[int] = field(default_factory=set)
    watches: list[Any] = field(default_factory=list)
    silent: list[torch.nn.Parameter] = field(default_factory=list)

    @property
    def compressed(self) -> bool:
        """Whether the next step's exchange is the compressed one."""
        return self.low_rank is None or self.low_rank.iter >= data_traffic.POWERSGD_START


def wrap(module: torch.nn.Module, group: dist.ProcessGroup, spec: RunSpec) -> torch.nn.Module:
    """`module` (a stage's, trainable parameters float32) so that its gradients are averaged over `group`, by
    spec.data_parallel.exchange:

        none            in float32
        fp16, bf16      cast, summed in that type by gloo, cast back
        powersgd        PowerSGD (Vogels et al., 2019, arXiv 1905.13727) with error feedback and warm start, in full
                        in the first data_traffic.POWERSGD_START steps; all in one bucket
        quantized-adam  unchanged: QuantizedAdam exchanges itself

    Buffers (BatchNorm's running statistics) are each group's own. Sends a digest and DDP's bucket layout, once.
    Raises RunError where the group's ranks do not hold the same parameters and buffers.
    """
    _check_equal(module, group)
    parameters = [p for p in module.parameters() if p.requires_grad]
    if spec.data_parallel.exchange == "quantized-adam" or not parameters:
        return module
    exchange = Exchange(spec.data_parallel, group, parameters)
    # A bucket larger than the model is the only one; None: DDP's usual sizes.
    bucket_mib = None
    if spec.data_parallel.exchange == "powersgd":
        exchange.low_rank = _low_rank(module, group, spec.data_parallel.matrix_rank)
        bucket_mib = 4 * sum(p.numel() for p in parameters) // data_traffic.MIB + 1
    # init_sync would send the model over the measured link; _check_equal has made sure it need not.
    wrapped = DistributedDataParallel(
        module, process_group=group, init_sync=False, forward_sync_buffers=False, bucket_cap_mb=bucket_mib
    )
    wrapped.exchange = exchange  # type: ignore[assignment]
    wrapped.register_comm_hook(exchange, _hook)
    _settle_buckets(wrapped, exchange)
    return wrapped


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The stage's own module."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def finish(module: torch.nn.Module) -> None:
    """After the backward passes of a step, before its gradients are used: all are the groups' mean when it returns.

    Parameters that the last backward pass did not reach through DDP (schedules that split it compute weight
    gradients past its hooks; a parameter may have no gradient) are averaged now. Those without a gradient keep none.

    Raises CodecError where finite gradients are too large for fp16, on the rank that holds them, PeerError on others.
    """
    exchange = _exchange(module)
    if exchange is None:
        return
    if exchange.watches:
        exchange.silent = [p for p in exchange.parameters if id(p) not in exchange.fired]
        for watch in exchange.watches:
            watch.remove()
        exchange.watches.clear()
    without = [p for p in exchange.silent if p.grad is None]
    if exchange.silent:
        _fire(exchange.silent)
    for parameter in without:
        parameter.grad = None
    due = sum(p.numel() for p in exchange.parameters)
    if exchange.reduced != due:
        raise RunError(f"{exchange.reduced} of a stage's {due} gradient elements were averaged between data groups")
    if exchange.parallel.exchange == "fp16":
        _raise_if_overflown(exchange)


def traffic(module: torch.nn.Module) -> data_traffic.Traffic:
    """What the next step's exchange sends from this rank, by the buckets DDP has; nothing for an unwrapped module."""
    exchange = _exchange(module)
    if exchange is None:
        return data_traffic.Traffic()
    shapes = [tuple(p.shape) for p in exchange.parameters]
    return data_traffic.step_traffic(
        shapes, exchange.parallel, dist.get_rank(exchange.group), compressed=exchange.compressed
    )


def hook_state(module: torch.nn.Module) -> dict[str, Any]:
    """What an exchange remembers from step to step, as tensors and plain data: PowerSGD's. Empty for the others."""
    exchange = _exchange(module)
    if exchange is None or exchange.low_rank is None:
        return {}
    return {key: getattr(exchange.low_rank, key) for key in _REMEMBERED} | {"rng": exchange.low_rank.rng.get_state()}


def load_hook_state(module: torch.nn.Module, state: dict[str, Any]) -> None:
    """Restore what `hook_state` gave: steps go on bit-identically."""
    if not state:
        return
    exchange = _exchange(module)
    assert exchange is not None
    assert exchange.low_rank is not None
    for key in _REMEMBERED:
        value = state[key]
        # Not shared with the state: the hook works in place.
        setattr(exchange.low_rank, key, {i: t.clone() for i, t in value.items()} if isinstance(value, dict) else value)
    exchange.low_rank.rng.set_state(state["rng"])


_REMEMBERED = ("iter", "error_dict", "p_memory_dict", "q_memory_dict")


def _exchange(module: torch.nn.Module) -> Exchange | None:
    return getattr(module, "exchange", None) if isinstance(module, DistributedDataParallel) else None


def _check_equal(module: torch.nn.Module, group: dist.ProcessGroup) -> None:
    digest = xxhash.xxh3_64()
    for tensor in (*module.parameters(), *module.buffers()):
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    mine = torch.tensor([digest.intdigest() - 2**63])
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine, group=group)
    different = [rank for rank, other in enumerate(found) if not torch.equal(other, found[0])]
    if different:
        raise RunError(f"data groups 0 and {different[0]} do not begin with the same parameters and buffers")


def _low_rank(module: torch.nn.Module, group: dist.ProcessGroup, matrix_rank: int) -> powerSGD_hook.PowerSGDState:
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.ndim == 0:
            raise UserError(
                f'data_parallel.exchange "powersgd" has no rows and columns in the scalar {name}; use "fp16"'
            )
    return powerSGD_hook.PowerSGDState(
        group,
        matrix_approximation_rank=matrix_rank,
        start_powerSGD_iter=data_traffic.POWERSGD_START,
        min_compression_rate=data_traffic.POWERSGD_GAIN,
        use_error_feedback=True,
        warm_start=True,
        # A gradient of zeros would be divided by its norm.
        orthogonalization_epsilon=1e-8,
    )


def _hook(exchange: Exchange, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """One bucket of gradients, when it is complete; in place."""
    gradients = bucket.buffer()
    if exchange.priming:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(gradients)
        return done
    exchange.reduced += gradients.numel()
    exchange.buckets.append(gradients.numel())
    if exchange.low_rank is not None:
        # It begins each all-reduce when the one before is done, on a thread of gloo's: with anything else under way
        # ranks would begin them in different orders, and hang.
        averaged = powerSGD_hook.powerSGD_hook(exchange.low_rank, bucket)
        averaged.wait()
        return averaged
    if exchange.parallel.exchange == "fp16":
        exchange.largest = max(exchange.largest, peak(gradients))
        return default_hooks.fp16_compress_hook(exchange.group, bucket)
    if exchange.parallel.exchange == "bf16":
        return default_hooks.bf16_compress_hook(exchange.group, bucket)
    return default_hooks.allreduce_hook(exchange.group, bucket)


def _raise_if_overflown(exchange: Exchange) -> None:
    if all(math.isfinite(peak(p.grad.contiguous())) for p in exchange.parameters if p.grad is not None):
        return
    if math.isfinite(exchange.largest):
        if exchange.largest > _FP16_MAX:
            raise OverflowedError(
                f"a gradient of {exchange.largest:g}, summed over micro-batches, is too large for fp16: use "
                'data_parallel.exchange "bf16"'
            )
        raise PeerError("the average of the data groups' gradients is not finite, though this rank's part of it is")
    # Its own are not finite: the gradient norm says so, with the step.


class _Zero(torch.autograd.Function):
    """A 0 that depends on a parameter, with a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor) -> torch.Tensor:
        ctx.shape = parameter.shape
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient.new_zeros(()).expand(ctx.shape)


def _fire(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Let DDP see these parameters' gradients as they are, last one first."""
    with torch.enable_grad():
        torch.stack([_Zero.apply(p) for p in parameters]).sum().backward()


class _Reducer:
    """DDP's reducer, with a look at what the last backward pass passes by.

    torch's pipeline stage calls prepare_for_backward just before the last backward pass of a step.
    """

    def __init__(self, reducer: Any, exchange: Exchange):
        self._reducer, self._exchange = reducer, exchange

        def seen(parameter: torch.Tensor) -> None:
            exchange.fired.add(id(parameter))

        exchange.watches = [p.register_post_accumulate_grad_hook(seen) for p in exchange.parameters]

    def prepare_for_backward(self, outputs: list[torch.Tensor]) -> None:
        self._exchange.fired.clear()
        self._exchange.buckets.clear()
        self._exchange.reduced, self._exchange.largest = 0, 0.0
        self._reducer.prepare_for_backward(outputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)


def _settle_buckets(wrapped: DistributedDataParallel, exchange: Exchange) -> None:
    """Give DDP its final buckets now: filled from the last parameter back, about as backward passes meet them.

    It would begin with one bucket for all and choose others after the first step, by the order it saw; a run that
    goes on from a checkpoint would then not sum in the order that the run before had, and PowerSGD's memory would
    belong to other buckets.
    """
    exchange.priming = True
    wrapped.reducer.prepare_for_backward([])
    _fire(exchange.parameters)
    wrapped.reducer._rebuild_buckets()
    exchange.priming = False
    for parameter in exchange.parameters:
        parameter.grad = None
    wrapped.reducer = _Reducer(wrapped.reducer, exchange)  # type: ignore[assignment]
