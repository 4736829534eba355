"""Two pipeline stages in two processes: activations cross as changes in 4 bits, their gradients in 8."""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe

from thinpipe.harness.library import CompressedPipelineStage

SAMPLES, WIDTH, MICROBATCHES, EPOCHS = 64, 256, 4, 20


def train(rank: int, rendezvous: str, forward: str, backward: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    x = torch.randn(SAMPLES, WIDTH)
    y = torch.tanh(x @ torch.randn(WIDTH, 8) / 8)
    module = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), nn.Linear(WIDTH, 8))[rank]
    boundary = (SAMPLES // MICROBATCHES, WIDTH)  # what crosses, of one micro-batch
    stage = CompressedPipelineStage(
        module, rank, 2, torch.device("cpu"), num_microbatches=MICROBATCHES,
        input_shape=boundary, output_shape=boundary, forward=forward, backward=backward,
    )  # fmt: skip
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    for epoch in range(EPOCHS):
        order, losses = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)), []
        with stage.step(order.tolist()):  # whose rows these are: a memory knows a sample by its number
            schedule.step(x[order]) if rank == 0 else schedule.step(target=y[order], losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            print(f"epoch {epoch} loss {sum(loss.item() for loss in losses) / MICROBATCHES}", flush=True)
    for direction, sent in stage.sent.items():
        print(f"{direction}: {sent.payload_bytes} of {sent.raw_bytes} B in {sent.messages} messages", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    texts = sys.argv[1:] or ["delta(fixpoint:4)", "fixpoint:8"]
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(train, (f"{folder}/rendezvous", *texts), nprocs=2, start_method="fork")
