"""The example of docs/library.md, run as it stands and in three other ways: prints what tests/unit/test_library.py
reads.

    python library_ranks.py docs/examples/compressed_stage.py
"""

import contextlib
import copy
import runpy
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from thinpipe.harness import library
from thinpipe.harness.compression import grammar
from thinpipe.harness.compression.base import Context
from thinpipe.harness.compression.kernels import cpu
from thinpipe.harness.errors import UserError
from thinpipe.harness.library import CompressedPipelineStage

ROWS, WIDTH = 2, 8


class Stock(PipelineStage):
    """torch's own stage where the example asks for ours."""

    def __init__(self, module, stage_index, num_stages, device, **_):
        super().__init__(module, stage_index, num_stages, device)
        self.sent = {}

    def step(self, ids):
        return contextlib.nullcontext()


def evaluated(rank: int, rendezvous: str, evaluation: str) -> None:
    """One training step, then an evaluation: is its output what it should be, is the memory as it was?"""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    torch.manual_seed(0)
    halves = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)]
    x, ids = torch.randn(2 * ROWS, WIDTH), (4, 5, 6, 7)
    stage = CompressedPipelineStage(
        halves[rank], rank, 2, torch.device("cpu"), num_microbatches=2, input_shape=(ROWS, WIDTH),
        output_shape=(ROWS, WIDTH), forward="delta(fixpoint:4)", backward="bf16", evaluation=evaluation,
    )  # fmt: skip
    schedule = ScheduleGPipe(stage, 2, loss_fn=torch.nn.functional.mse_loss)
    args, kwargs = ((x,), {}) if rank == 0 else ((), {"target": x})
    with stage.step(ids):
        schedule.step(*args, **kwargs)
    (memory,) = [c.compressors["delta(fixpoint:4)"] for (way, _), c in stage.channels.items() if way == "forward"]
    before, sent = memory.digest(), copy.deepcopy(stage.sent)
    with stage.evaluate(ids), torch.no_grad():
        output = schedule.eval(*args, **kwargs)
    kept = memory.digest() == before and stage.sent == sent and len(memory.rows) == len(ids)
    print(f"evaluation {evaluation} rank {rank}: memory kept {kept}", flush=True)
    if rank == 1:
        exact = halves[1](_crossed(halves[0](x).detach(), "none" if evaluation == "off" else "fixpoint:4"))
        print(f"evaluation {evaluation}: output {torch.equal(output, exact)}", flush=True)
    with stage.step(ids):
        schedule.step(*args, **kwargs)
    print(f"evaluation {evaluation} rank {rank}: goes on {memory.digest() != before}", flush=True)
    if evaluation == "off":
        refused(rank, stage)
    dist.destroy_process_group()


def refused(rank, stage):
    """What a stage that works says of uses that cannot."""
    try:
        with stage.step((1, 2, 3)):
            raise AssertionError
    except UserError as error:
        print(f"rank {rank}: {error}", flush=True)
    try:
        ScheduleGPipe(stage, 4).eval(*([torch.zeros(4 * ROWS, WIDTH)] if rank == 0 else []))
    except UserError as error:
        print(f"rank {rank}: {error}", flush=True)


def _crossed(x, text):
    codec, parts = grammar.build(text), []
    for part in x.chunk(2):
        buffer, out = torch.zeros(codec.max_bytes(tuple(part.shape)), dtype=torch.uint8), torch.zeros(part.shape)
        codec.encode_decoded(part, Context(tuple(part.shape)), buffer, out)
        parts.append(out)
    return torch.cat(parts)


def run(title, script, *texts):
    print(f"--- {title}", flush=True)
    sys.argv = [script, *texts]
    runpy.run_path(script, run_name="__main__")


def main(script):
    cpu.warm_up()  # once, not in every process that is forked
    run("as it stands", script)
    run("none", script, "none", "none")
    library.CompressedPipelineStage = Stock
    run("stock", script)
    print("--- evaluation", flush=True)
    for evaluation in ("off", "codec"):
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(evaluated, (f"{folder}/rendezvous", evaluation), nprocs=2, start_method="fork")


if __name__ == "__main__":
    main(sys.argv[1])
