"""Step time of the compressed pipeline (codec `none`) against torch's own ScheduleGPipe with PipelineStage.

Two stages on two hosts, eight micro-batches, the same GPT-2 weights and the same link, in the same two processes, in
turn. The stock stage has static metadata. Three figures (docs/numbers.md has the formulas):

    ratio_balanced   ours / stock where a micro-batch's transfer takes about as long as its forward pass   <= 0.8
    ratio_unlimited  ours / stock on a link without a limit                                                <= 1.05
    ratio_to_bound   ours / the GPipe lower bound, at the balanced rate                                    <= 1.15
"""

from __future__ import annotations

import copy
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import common  # first: it sets one thread
from thinpipe.harness import links, plugins
from thinpipe.harness.channel import Channel, Policy
from thinpipe.harness.compression import grammar
from thinpipe.harness.models import base as models
from thinpipe.harness.pipeline import partition
from thinpipe.harness.pipeline.stage import CompressedStage
from thinpipe.harness.recorder import Recorder, now
from thinpipe.harness.spec import ModelSpec, TaskSpec
from thinpipe.netem import calibrate
from thinpipe.netem.lab import Lab
from thinpipe.netem.link import LinkSpec
from thinpipe.netem.topology import Topology

MICROBATCHES, SEQUENCES, LENGTH = 8, 4, 64
MODEL = ModelSpec(layers=4, width=256, heads=4)
TASK = TaskSpec(sequence_length=LENGTH)
WARM_UP = 3


def rank_main(control: Any, rank: int, rendezvous: str, repeats: int) -> None:
    """One rank: both pipelines on the same weights, in turn; sends the step times and the phases' medians."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    joined = links.join(rendezvous, "eth0", rank, 2, 120.0)
    ids = [tuple(range(i * SEQUENCES, (i + 1) * SEQUENCES)) for i in range(MICROBATCHES)]
    recorder = Recorder("bench", rank)
    ours, stock, loss = build(rank, joined, recorder)
    use = {("forward", 0): "none", ("backward", 0): "none"}
    tokens = torch.randint(0, TASK.vocab_size, (MICROBATCHES * SEQUENCES, LENGTH + 1))
    step = 0

    def run_ours() -> float:
        nonlocal step
        step += 1
        recorder.step = step

        def once(schedule: ScheduleGPipe) -> None:
            ours.begin_step(step, ids, training=True, use=use, watch={})
            call(schedule, rank, tokens)
            ours.finish_step(training=True)

        return timed(joined, ours, schedules["ours"], once)

    def run_stock() -> float:
        return timed(joined, stock, schedules["stock"], lambda schedule: call(schedule, rank, tokens))

    schedules = {
        "ours": ScheduleGPipe(ours, MICROBATCHES, loss_fn=loss),
        "stock": ScheduleGPipe(stock, MICROBATCHES, loss_fn=loss),
    }
    contenders = {"ours": run_ours, "stock": run_stock}
    common.interleave(contenders, WARM_UP)
    recorder.rows["spans"].clear()
    taken = common.interleave(contenders, repeats)
    control.send({"taken": taken, "spans": medians(recorder)})
    dist.destroy_process_group()


def build(rank: int, joined: links.Links, recorder: Recorder) -> tuple[CompressedStage, PipelineStage, Any]:
    """Both stages of this rank, on equal weights."""
    model = plugins.get("models", "gpt2").load()
    shape = models.resolve(MODEL, TASK)
    module = model.build(MODEL, shape, partition.split(shape, 2)[rank], seed=0)
    boundary = (SEQUENCES, LENGTH, shape.width)

    def channel(direction: Any, sends: bool) -> Channel:
        return Channel(
            boundary=0, direction=direction, sends=sends, rank=rank, peer=1 - rank, group=joined.frames,
            compressors={"none": grammar.build("none")}, shape=boundary, microbatches=MICROBATCHES, seed=0,
            recorder=recorder, policy=Policy(sample_every=0, limit_s=120.0),
        )  # fmt: skip

    sides = [("forward", "out", True), ("backward", "in", False)]
    if rank == 1:
        sides = [("forward", "in", False), ("backward", "out", True)]
    channels = {(direction, side): channel(direction, sends) for direction, side, sends in sides}
    ours = CompressedStage(module, rank, 2, channels=channels, recorder=recorder, group=joined.frames)
    hidden = torch.empty(boundary, device="meta", requires_grad=True)
    logits = torch.empty((SEQUENCES, LENGTH, shape.vocab_size), device="meta", requires_grad=True)
    tokens = torch.empty((SEQUENCES, LENGTH), dtype=torch.int64, device="meta")
    stock = PipelineStage(
        copy.deepcopy(module), rank, 2, torch.device("cpu"), group=dist.new_group([0, 1]),
        input_args=tokens if rank == 0 else hidden, output_args=hidden if rank == 0 else logits,
    )  # fmt: skip
    return ours, stock, model.loss


def call(schedule: ScheduleGPipe, rank: int, tokens: torch.Tensor) -> None:
    if rank == 0:
        schedule.step(tokens[:, :-1], return_outputs=False)
    else:
        schedule.step(target=tokens[:, 1:], losses=[], return_outputs=False)


def timed(joined: links.Links, stage: PipelineStage, schedule: ScheduleGPipe, once: Any) -> float:
    """Seconds of one forward and backward of the batch on this rank, both ranks starting together."""
    stage.submod.zero_grad(set_to_none=True)
    joined.barrier()
    start = now()
    once(schedule)
    return now() - start


def medians(recorder: Recorder) -> dict[str, float]:
    """Median seconds of a micro-batch's forward (loss included) and backward on this rank."""
    found: dict[tuple[str, int, int], float] = {}
    for span in recorder.rows["spans"]:
        if span["phase"] in ("forward_compute", "backward_compute"):
            key = span["phase"], span["step"], span["microbatch"]
            found[key] = found.get(key, 0.0) + span["end_s"] - span["start_s"]
    return {
        phase: statistics.median(v for (p, _, _), v in found.items() if p == phase)
        for phase in ("forward_compute", "backward_compute")
    }


def measure(link: LinkSpec, repeats: int) -> tuple[dict[str, list[float]], list[dict[str, float]], float]:
    """(step times of the slower rank, phase medians by rank, measured layer-2 rate in Mbit/s) on one link."""
    with tempfile.TemporaryDirectory() as folder, Lab(Topology.mesh(2, link)) as lab:
        rate = min(m.measured_rate_mbit for m in calibrate.calibrate(lab)) if link.rate_mbit else 0.0
        log = Path(folder) / "log"
        for rank in range(2):
            args = {"rank": rank, "rendezvous": f"{folder}/rendezvous", "repeats": repeats}
            lab.spawn(f"rank{rank}", rank, "__main__:rank_main", args, log=log)
        got: dict[int, dict[str, Any]] = {}
        while len(got) < 2:
            event = lab.event(300.0)
            if event is None or (event.kind == "exit" and event.status):
                raise SystemExit(f"a rank failed: {event}\n{log.read_text()}")
            if event.kind == "message":
                got[int(event.name[-1])] = event.data
    slower = {
        name: [max(pair) for pair in zip(got[0]["taken"][name], got[1]["taken"][name], strict=True)]
        for name in ("ours", "stock")
    }
    return slower, [got[r]["spans"] for r in range(2)], rate


def lower_bound_s(spans: list[dict[str, float]], transfer_s: float) -> float:
    """GPipe's lower bound of a step, two stages: each phase fills, runs at its slowest part's pace, and drains."""
    total = 0.0
    for phase in ("forward_compute", "backward_compute"):
        first, second = spans[0][phase], spans[1][phase]
        total += first + transfer_s + second + (MICROBATCHES - 1) * max(first, transfer_s, second)
    return total


def main() -> None:
    options = common.arguments(__doc__ or "", repeats=12)
    unlimited, spans, _ = measure(LinkSpec(), options.repeats)
    payload = 4 * SEQUENCES * LENGTH * (MODEL.width or 0)
    forward = statistics.mean(s["forward_compute"] for s in spans)
    # Layer-2 bytes of a message: headers of every segment of 1448 B.
    wire_bytes = payload + 66 * -(-payload // 1448)
    rate_mbit = round(8 * wire_bytes / forward / 1e6, 1)
    balanced, spans, measured_mbit = measure(LinkSpec(rate_mbit=rate_mbit), options.repeats)
    transfer_s = 8 * wire_bytes / (measured_mbit * 1e6)
    bound = lower_bound_s(spans, transfer_s)
    common.show(
        {
            "ratio_balanced": common.paired_ratio(balanced["ours"], balanced["stock"]),
            "ratio_unlimited": common.paired_ratio(unlimited["ours"], unlimited["stock"]),
            "ratio_to_bound": statistics.median(balanced["ours"]) / bound,
            "rate_mbit": rate_mbit,
            "measured_rate_mbit": measured_mbit,
            "transfer_over_forward": transfer_s / statistics.mean(s["forward_compute"] for s in spans),
            "bound_s": bound,
            "step_s": {name: statistics.median(values) for name, values in balanced.items()},
            "unlimited_step_s": {name: statistics.median(values) for name, values in unlimited.items()},
            "repeats": options.repeats,
        },
        options.json,
    )


if __name__ == "__main__":
    main()
