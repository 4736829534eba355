"""Ranks of data groups on loopback for unit tests: `run` forks them from a clean server process and collects what they
return. Functions that run in a rank live here too, since the ranks import them by name."""

import contextlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from thinpipe.harness import data_parallel, data_traffic, state, tcp
from thinpipe.harness.spec import RunSpec

LIMIT_S = 60
_CONTEXT = multiprocessing.get_context("forkserver")


def run(function, size, *args, expect_errors=False):
    """function(group, *args) on `size` ranks; their results by rank. A rank's error is its result where expected."""
    # The server imports by PYTHONPATH only.
    folders = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, os.pathsep.join(folders).split(os.pathsep))))
    _CONTEXT.set_forkserver_preload(["data_groups_server"])
    with tempfile.TemporaryDirectory() as folder:
        pipes, ranks = [], []
        for rank in range(size):
            ours, theirs = _CONTEXT.Pipe()
            ranks.append(_CONTEXT.Process(target=_rank, args=(theirs, function, (rank, size), f"{folder}/store", args)))
            ranks[-1].start()
            theirs.close()
            pipes.append(ours)
        results = []
        try:
            for rank, pipe in enumerate(pipes):
                assert pipe.poll(LIMIT_S), f"rank {rank} gave no result within {LIMIT_S} s"
                results.append(pickle.loads(pipe.recv_bytes()))
        finally:
            for process in ranks:
                process.join(1 if len(results) == size else 0)
                if process.is_alive():
                    process.kill()
                    process.join()
    failed = [result for result in results if isinstance(result, BaseException)]
    if failed and not expect_errors:
        raise failed[0]
    return results


def _rank(pipe, function, place, store, args):
    rank, size = place
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    limit = timedelta(seconds=20)
    try:
        dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=limit)
        result = function(dist.group.WORLD, *args)
    except BaseException as error:
        error.__traceback__ = None
        error.add_note(traceback.format_exc())
        result = error
    # Plain pickle: multiprocessing's own would share tensors' memory, which ends with this process.
    pipe.send_bytes(pickle.dumps(result))
    # A rank that fails leaves at once: whoever waits for it is told by the closed connection.
    sys.stdout.flush()
    os._exit(0)


def spec(exchange, groups=2, **parts):
    """A run with so many data groups."""
    parallel = {"groups": groups, "exchange": exchange, **parts.pop("data_parallel", {})}
    return RunSpec(data_parallel=parallel, train={"batch_size": 48, "accumulate": 1}, compression={"warmup_epochs": 1})


class Net(torch.nn.Module):
    """Several matrices of odd sizes, a frozen parameter and one that is never used; norm: running statistics too."""

    def __init__(self, seed=0, width=37, norm=True):
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(19, width)
        self.norm = torch.nn.BatchNorm1d(width) if norm else torch.nn.Identity()
        self.frozen = torch.nn.Parameter(torch.randn(width), requires_grad=False)
        self.unused = torch.nn.Parameter(torch.randn(7, 5))
        self.middle = torch.nn.Linear(width, width + 20, bias=False)
        self.last = torch.nn.Linear(width + 20, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.middle(self.norm(self.first(x)) * self.frozen)))


def batch(step, rank, rows=8):
    """Inputs and targets of one group in one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, 19, generator=generator), torch.randn(rows, 3, generator=generator)


def backward(module, x, y, *, pieces=2, scale=1.0, synchronise=True):
    """Micro-batches as torch's pipeline stage runs them through DDP; gradients are summed."""
    for index, (xs, ys) in enumerate(zip(x.chunk(pieces), y.chunk(pieces), strict=True)):
        last = synchronise and index == pieces - 1
        with contextlib.ExitStack() as stack:
            if isinstance(module, torch.nn.parallel.DistributedDataParallel):
                stack.enter_context(module.no_sync())
            loss = scale * torch.nn.functional.mse_loss(module(xs), ys)
            if isinstance(module, torch.nn.parallel.DistributedDataParallel) and last:
                module.reducer.prepare_for_backward([loss])
                stack.close()
            loss.backward()


def gradients(module):
    found = {n: p.grad for n, p in data_parallel.unwrap(module).named_parameters()}
    return {n: None if g is None else g.clone() for n, g in found.items()}


def parameters(module):
    return {n: p.detach().clone() for n, p in data_parallel.unwrap(module).named_parameters()}


def clear(module):
    for parameter in module.parameters():
        parameter.grad = None


def optimizer_of(module, kind=torch.optim.AdamW, **settings):
    named = [(n, p) for n, p in data_parallel.unwrap(module).named_parameters() if p.requires_grad]
    return kind(named, lr=1e-2, weight_decay=0.1, **settings)


def through_a_file(saved):
    """As it comes back from a training checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        state.save(Path(folder), 1, 0, 1, saved)
        state.commit(Path(folder), 1, 1)
        return state.load(Path(folder), 1, 0)


# --- functions of a rank, for test_data_parallel.py -------------------------------------------------------------------


def averaged(group, exchange, passes=1):
    """The gradients of 4 steps, and whether statistics stayed the group's own."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    module = data_parallel.wrap(Net(), group, spec(exchange, size))
    found = []
    for step in range(4):
        for turn in range(passes):
            backward(module, *batch(step * passes + turn, rank), synchronise=turn == passes - 1)
        data_parallel.finish(module)
        found.append(gradients(module))
        clear(module)
    return found, data_parallel.unwrap(module).norm.running_mean.clone()


def trained(group, exchange, steps, batch_rows=8):
    """Parameters after some steps of AdamW."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    module = data_parallel.wrap(Net(norm=False), group, spec(exchange, size))
    optimizer = optimizer_of(module)
    for step in range(steps):
        backward(module, *batch(step, rank, batch_rows))
        data_parallel.finish(module)
        optimizer.step()
        optimizer.zero_grad()
    return parameters(module)


def low_rank(group, steps, matrix_rank):
    """PowerSGD: the sums of true means and of what was applied, what is kept as error, and the same of each rank."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    module = data_parallel.wrap(Net(), group, spec("powersgd", size, data_parallel={"matrix_rank": matrix_rank}))
    plain = Net()
    true = applied = 0.0
    for step in range(steps):
        backward(module, *batch(step, rank))
        data_parallel.finish(module)
        backward(plain, *batch(step, rank))
        trainable = [p for p in module.parameters() if p.requires_grad]
        applied = applied + torch.cat([_flat(p) for p in trainable])
        true = true + torch.cat([_flat(p) for p in plain.parameters() if p.requires_grad])
        clear(module)
        clear(plain)
    (error,) = module.exchange.low_rank.error_dict.values()
    order = list(reversed(trainable))
    pieces = error.split([p.numel() for p in order])
    return true, applied, torch.cat(list(reversed(pieces)))


def _flat(parameter):
    gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    return gradient.view(-1).double()


def resumed(group, exchange):
    """Parameters of an uninterrupted run and of one that goes on from a checkpoint in a fresh module."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    made = spec(exchange, size)

    def go_on(module, optimizer, first, last):
        for step in range(first, last):
            backward(module, *batch(step, rank))
            data_parallel.finish(module)
            optimizer.step()
            optimizer.zero_grad()

    module = data_parallel.wrap(Net(width=600), group, made)
    optimizer = optimizer_of(module)
    go_on(module, optimizer, 0, 5)
    saved = through_a_file(
        {
            "module": data_parallel.unwrap(module).state_dict(),
            "optimizer": optimizer.state_dict(),
            "hook": data_parallel.hook_state(module),
        }
    )
    go_on(module, optimizer, 5, 9)
    again = data_parallel.wrap(Net(width=600), group, made)
    fresh = optimizer_of(again)
    data_parallel.unwrap(again).load_state_dict(saved["module"])
    fresh.load_state_dict(saved["optimizer"])
    data_parallel.load_hook_state(again, saved["hook"])
    go_on(again, fresh, 5, 9)
    return parameters(module), parameters(again), len(module.exchange.buckets)


def counted(group, exchange, width, matrix_rank=2, steps=4):
    """By step: TCP's bytes on the data group's connections, the formula's, and DDP's buckets beside the formula's."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    own = set(tcp.connections())
    control = dist.new_group(backend="gloo")
    added = probe(group, own, control)
    made = spec(exchange, size, data_parallel={"matrix_rank": matrix_rank})
    module = data_parallel.wrap(Net(width=width), group, made)
    found = []
    for step in range(steps):
        expected = data_parallel.traffic(module).on_the_wire(added)
        with counting(own, control) as sent:
            backward(module, *batch(step, rank))
            data_parallel.finish(module)
        clear(module)
        shapes = [tuple(p.shape) for p in module.parameters() if p.requires_grad]
        found.append((sum(sent), expected, module.exchange.buckets[:], data_traffic.buckets(shapes)))
    return found


@contextlib.contextmanager
def counting(connections, control):
    """What these connections send inside; other ranks neither begin earlier nor end later."""
    dist.barrier(control)
    before = _settled(connections)
    dist.barrier(control)
    sent = []
    yield sent
    dist.barrier(control)
    after = _settled(connections)
    sent += [after[fd] - count for fd, count in before.items()]
    dist.barrier(control)


def _settled(connections):
    """Counters once they stand still: gloo's thread may still be writing when a collective has returned."""
    deadline = time.monotonic() + 10
    last = None
    while time.monotonic() < deadline:
        tcp.drain(list(connections), 10)
        counters = {fd: tcp.read(fd) for fd in connections}
        now = {fd: c.bytes_sent - c.bytes_retrans for fd, c in counters.items()}
        if now == last:
            return now
        last = now
        time.sleep(0.02)
    raise AssertionError("the connections did not come to rest")


def probe(group, connections, control):
    """What gloo adds to a message at its sender and at its receiver, from a message of rank 0 to rank 1."""
    rank = dist.get_rank(group)
    message = torch.zeros(64, dtype=torch.uint8)
    with counting(connections, control) as sent:
        if rank == 0:
            dist.send(message, group=group, group_dst=1)
        if rank == 1:
            dist.recv(message, group=group, group_src=0)
    mine = torch.tensor([sum(sent)])
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine, group=control)
    return int(found[0]) - 64, int(found[1])


def too_large(group):
    """A gradient of rank 1 beyond fp16."""
    rank = dist.get_rank(group)
    module = data_parallel.wrap(Net(), group, spec("fp16"))
    backward(module, *batch(0, rank), scale=1e6 if rank == 1 else 1.0)
    data_parallel.finish(module)


def unequal(group):
    data_parallel.wrap(Net(seed=dist.get_rank(group)), group, spec("none"))


def scalar(group):
    module = Net()
    module.scale = torch.nn.Parameter(torch.ones(()))
    data_parallel.wrap(module, group, spec("powersgd"))


def scheduled(group, schedule, exchange="none"):
    """Gradients of a step of two stages on each rank, by one of torch's schedules, whole pipelines side by side."""
    from thinpipe.harness.pipeline import schedules
    from thinpipe.harness.pipeline.stage import CompressedStage
    from thinpipe.harness.recorder import Recorder

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    pipes = [dist.new_group([r], backend="gloo") for r in range(size)]
    torch.manual_seed(5)
    modules = [
        torch.nn.Sequential(torch.nn.Linear(19, 33), torch.nn.Tanh(), torch.nn.Linear(33, 12)),
        torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear(12, 21), torch.nn.Tanh(), torch.nn.Linear(21, 3)),
    ]
    recorder = Recorder("", rank)
    stages = [
        CompressedStage(
            data_parallel.wrap(module, group, spec(exchange, size)), index, 2, channels={}, recorder=recorder,
            group=pipes[rank], local=(0, 1),
        )
        for index, module in enumerate(modules)
    ]  # fmt: skip
    made = schedules.training(schedule, stages, 4, torch.nn.functional.mse_loss)
    for step in range(2):
        x, y = batch(step, rank)
        for module in modules:
            clear(module)
        for stage in stages:
            stage.begin_step(step, [(i,) for i in range(4)], training=True, use={}, watch={})
        made.step(x, target=y, losses=[], return_outputs=False)
        for stage in stages:
            stage.finish_step(training=True)
            data_parallel.finish(stage.submod)
    return {f"{i}.{n}": g for i, module in enumerate(modules) for n, g in gradients(module).items()}
