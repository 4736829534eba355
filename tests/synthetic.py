"""Results of an experiment that never ran: real files of the store, numbers from a small model of a pipeline.

Two stages, GPipe, links that carry one frame after the other, losses that fall and differ by method and
seed; three parts, language modelling for its loss and its step times, and a classification that is scored. One run
each is flagged, failed, diverged, foreign and unfinished: tables and figures meet all of them.
"""

from __future__ import annotations

import atexit
import functools
import json
import math
import random
import tempfile
from pathlib import Path

import pandas as pd

from thinpipe.harness import metrics, shards, tables
from thinpipe.harness.manifest import machine_id
from thinpipe.harness.spec import RunSpec, parse
from thinpipe.harness.store import Store

# label -> forward, backward, bits of each, loss in excess of FP32's, forward error.
ARMS = {
    "FP32": ("none", "none", 32, 32, 0.0, 0.0),
    "BF16": ("bf16", "bf16", 16, 16, 0.002, 0.003),
    "DirectQ fw4 bw8": ("fixpoint:4", "fixpoint:8", 4, 8, 0.05, 0.12),
    "DirectQ fw2 bw8": ("fixpoint:2", "fixpoint:8", 2, 8, 0.55, 0.55),
    "AQ-SGD fw4 bw8": ("delta(fixpoint:4)", "fixpoint:8", 4, 8, 0.01, 0.03),
    "AQ-SGD fw2 bw8": ("delta(fixpoint:2)", "fixpoint:8", 2, 8, 0.12, 0.16),
}
PARTS = ("classification", "convergence", "timing")
RATES = (10, 30, 100)
SEEDS = (0, 1, 2)
EPOCHS, STEPS_PER_EPOCH = 6, 8
RAW_BYTES = 4 * 4 * 64 * 128  # one micro-batch of 4 sequences of 64 tokens, width 128
M = 4
HEADER = 128
SYNC_BYTES = 4096
MEMORY_MIB = {"predicted_memory_mib": 61.5, "peak_memory_mib": 58.25}
FORWARD_S, BACKWARD_S, CODEC_S, OPTIMIZER_S = 0.006, 0.012, 0.0004, 0.004

FLAGGED = ("timing", "AQ-SGD fw4 bw8", 100, 1)
FAILED = ("timing", "BF16", 10, 2)
FOREIGN = ("timing", "DirectQ fw4 bw8", 30, 2)
UNFINISHED = ("timing", "AQ-SGD fw2 bw8", 30, 2)
DIVERGED = ("convergence", "DirectQ fw2 bw8", 100, 2)


def spec_of(part: str, arm: str, rate: float, seed: int) -> RunSpec:
    forward, backward, *_ = ARMS[arm]
    timing = part == "timing"
    scored = part == "classification"
    task = {"name": "classify", "corpus": "movie-reviews"} if scored else {}
    return parse(
        {
            "model": {"name": "deberta"} if scored else {},
            "compression": {"forward": forward, "backward": backward, "warmup_epochs": 0 if timing else 1},
            "network": {"rate_mbit": rate},
            "train": {"epochs": EPOCHS, "batch_size": 16},
            "task": {"num_sequences": 16 * STEPS_PER_EPOCH, **task},
            "timing": {"batches": 2, "passes": 2},
            "seed": seed,
            "measure": "timing" if timing else "convergence",
        }
    )


def build(root: Path, name: str = "synthetic", parts: tuple[str, ...] = PARTS) -> Store:
    """Write the runs of an experiment below `root`, and its runs.json."""
    store = Store(root)
    listed = []
    for part in parts:
        for arm in ARMS:
            for rate in RATES if part == "timing" else (100,):
                for seed in SEEDS:
                    spec = spec_of(part, arm, rate, seed)
                    write_run(store, spec, (part, arm, rate, seed))
                    row = {
                        "run_id": spec.run_id,
                        "part": part,
                        "arm": arm,
                        "cell": spec.cell_id,
                        "seed": seed,
                    }
                    listed.append(row)
    folder = store.experiment_dir(name)
    folder.mkdir(parents=True)
    (folder / "runs.json").write_text(json.dumps(listed))
    return store


def write_run(store: Store, spec: RunSpec, key: tuple[str, str, float, int]) -> None:
    folder = store.begin(spec)
    rows = run_rows(spec, key)
    state = {FAILED: "failed", DIVERGED: "diverged"}.get(key, "done")
    for rank in range(2):
        mine = {table: [r for r in rows[table] if r.get("rank", 1) == rank] for table in rows}
        lines = [json.dumps({"table": table, **row}) for table in mine for row in mine[table] if table != "spans"]
        (folder / f"rank{rank}.jsonl").write_text("".join(line + "\n" for line in lines))
        for table, content in mine.items() if state == "done" else ():
            shards.write_shard(table, content, folder / f"{table}.rank{rank}.parquet")
    if key == UNFINISHED:
        return
    flagged = key == FLAGGED
    bytes_ = {n: sum(r[n] for r in rows["transfers"]) for n in ("raw_bytes", "payload_bytes", "frame_bytes")}
    error = {
        "failed": "rank 1 was killed by signal 9 at step 3\nits log is rank1.log",
        "diverged": "loss became nan",
    }
    store.finish(
        spec.run_id,
        {
            "state": state,
            "error": error.get(state),
            "detail": None,
            "started_at": "",
            "ended_at": "",
            "wall_s": 12.5,
            "machine": "f" * 12 if key == FOREIGN else machine_id(),
            "fidelity": {
                "flags": ["cpu-bound"] * flagged,
                "reasons": ["rank 0 waited 7.1 % for a core"] * flagged,
            },
            "totals": {
                **bytes_,
                "steps": len({r["step"] for r in rows["steps"]}),
                "wire_bytes": int(1.05 * bytes_["frame_bytes"]),
                "sync_bytes": SYNC_BYTES,
                "data_bytes": 0,
            },
            "memory": {**MEMORY_MIB, "memory_state_bytes": kept_bytes(spec)},
            "links": {"measured_rate_mbit": 0.998 * spec.network.rate_mbit, "measured_rtt_ms": 0.21},
            "run_queue_pct": 7.1 if flagged else 0.4,
        },
    )


def kept_bytes(spec: RunSpec) -> int:
    """What both ends of the one boundary keep of each sample, in 16 bits; nothing without a memory."""
    return 2 * spec.task.num_sequences * RAW_BYTES // 8 if spec.compression.forward.startswith("delta") else 0


def run_rows(spec: RunSpec, key: tuple[str, str, float, int]) -> dict[str, list[dict]]:
    """Rows of every table of one run, both ranks."""
    part, arm, rate, seed = key
    rng, run_id = random.Random(f"{key}"), spec.run_id
    rows: dict[str, list[dict]] = {"steps": [], "transfers": [], "evals": [], "spans": []}
    steps = 6 if part == "timing" else EPOCHS * STEPS_PER_EPOCH
    if key in (FAILED, DIVERGED):
        steps = 3 if key == FAILED else 3 * STEPS_PER_EPOCH + 2
    clock, trained = 1000.0, 0.0
    for step in range(steps):
        epoch = 0 if part == "timing" else step // STEPS_PER_EPOCH
        cold = step < 2 if part == "timing" else epoch == 0
        elapsed = one_step(rows, run_id, (step, epoch), arm, rate, start=clock, cold=cold, rng=rng)
        trained += elapsed
        clock += elapsed
        loss = loss_at(arm, step, seed, part) * rng.gauss(1, 0.01)
        last = rows["steps"][-1]
        last["train_loss"] = loss
        for row in rows["steps"][-2:]:
            row["t_s"] = trained
        if part != "timing" and (step + 1) % STEPS_PER_EPOCH == 0:
            at = {"run_id": run_id, "epoch": epoch + 1, "step": step + 1, "t_s": trained}
            rows["evals"].append(at | evaluated(part, loss_at(arm, step, seed, part) * 1.05 + 0.01 * epoch))
            clock += 0.5
    return rows


def evaluated(part: str, loss: float) -> dict:
    """The results of an evaluation: a classification is scored, better the lower its loss, and has no perplexity."""
    accuracy = math.exp(-loss)
    scores = {"accuracy": accuracy, "matthews": 2 * accuracy - 1, "f1": 0.97 * accuracy}
    scored = part == "classification"
    return {
        "evaluation": "off",
        "eval_loss": loss,
        "perplexity": None if scored else math.exp(loss),
        **(scores if scored else dict.fromkeys(metrics.SCORES)),
        "sequences": 64,
    }


def loss_at(arm: str, step: int, seed: int, part: str) -> float:
    progress = step / (EPOCHS * STEPS_PER_EPOCH)
    loss = 2.1 + 0.12 * (seed - 1) + 4.6 * math.exp(-4 * progress) + ARMS[arm][4] * min(1.0, 2 * progress)
    # From that of two classes drawn by lot on.
    return 0.1 * loss if part == "classification" else loss


def one_step(rows, run_id, at, arm, rate, *, start, cold, rng) -> float:
    """Play one GPipe step, at = (step, epoch); append its rows; return its seconds."""
    step, epoch = at
    _, _, bits_f, bits_b, _, error = ARMS[arm]
    bits = {"forward": 32 if cold and ("delta" in ARMS[arm][0] or epoch == 0) else bits_f, "backward": bits_b}
    frame = {d: RAW_BYTES * b // 32 + HEADER for d, b in bits.items()}
    transfer = {d: 8 * 1.05 * n / (rate * 1e6) for d, n in frame.items()}
    codec = 0.0 if arm == "FP32" else CODEC_S
    now = [start, start]
    free = {"forward": start, "backward": start}
    arrived: dict[tuple[str, int], float] = {}

    def span(rank, phase, end, i=-1, direction=None):
        rows["spans"].append(
            {
                "run_id": run_id,
                "rank": rank,
                "step": step,
                "microbatch": i,
                "phase": phase,
                "direction": direction,
                "boundary": None if direction is None else 0,
                "stage": rank if phase.endswith("_compute") else None,
                "start_s": now[rank],
                "end_s": end,
            }
        )
        now[rank] = end

    def send(rank, i, direction):
        span(rank, "encode", now[rank] + codec, i, direction)
        span(rank, "send", now[rank], i, direction)
        free[direction] = max(free[direction], now[rank]) + transfer[direction]
        arrived[direction, i] = free[direction]

    def receive(rank, i, direction):
        span(rank, "wait_receive", max(now[rank], arrived[direction, i]), i, direction)
        span(rank, "decode", now[rank] + codec, i, direction)

    for i in range(M):
        span(0, "forward_compute", now[0] + FORWARD_S * rng.uniform(0.95, 1.05), i)
        send(0, i, "forward")
    for i in range(M):
        receive(1, i, "forward")
        span(1, "forward_compute", now[1] + FORWARD_S * rng.uniform(0.95, 1.05), i)
    for i in range(M):
        span(1, "backward_compute", now[1] + BACKWARD_S * rng.uniform(0.95, 1.05), i)
        send(1, i, "backward")
    for i in range(M):
        receive(0, i, "backward")
        span(0, "backward_compute", now[0] + BACKWARD_S * rng.uniform(0.95, 1.05), i)
    end = max(now)
    for rank in range(2):
        span(rank, "sync", end)
        span(rank, "optimizer", now[rank] + OPTIMIZER_S)
        sums: dict[str, float] = {}
        for row in rows["spans"]:
            if row["rank"] == rank and row["step"] == step:
                sums[row["phase"]] = sums.get(row["phase"], 0.0) + row["end_s"] - row["start_s"]
        rows["steps"].append(
            {
                "run_id": run_id,
                "rank": rank,
                "step": step,
                "epoch": epoch,
                "measured": not cold,
                "t_s": 0.0,
                "step_time_s": now[rank] - start,
                "train_loss": None,
                "lr": 1e-3,
                "grad_norm": 1.5,
                "compute_s": sum(sums.get(p, 0.0) for p in ("forward_compute", "backward_compute", "optimizer")),
                "codec_s": sums["encode"] + sums["decode"],
                "blocked_s": sums["wait_receive"],
                "sync_s": sums["sync"],
            }
        )
        direction = ("forward", "backward")[rank]
        sampled = step % 4 == 0
        exact = bits[direction] == 32
        delta = direction == "forward" and "delta" in ARMS[arm][0]
        wide = {"forward": error, "backward": 0.01}[direction] * (0.8 if delta else 1.0)
        fade = math.exp(-0.5 * epoch) if delta else 1.0
        rows["transfers"].append(
            {
                "run_id": run_id,
                "rank": rank,
                "step": step,
                "epoch": epoch,
                "boundary": 0,
                "direction": direction,
                "compressor": "none" if exact else ARMS[arm][rank],
                "messages": M,
                "raw_bytes": M * RAW_BYTES,
                "payload_bytes": M * (frame[direction] - HEADER),
                "frame_bytes": M * frame[direction],
                "rel_error": (0.0 if exact else wide * fade * rng.uniform(0.9, 1.1)) if sampled else None,
                "mean_abs": 0.8 if sampled else None,
                "mean_abs_change": 0.27 * fade * rng.uniform(0.9, 1.1) if sampled and delta and epoch else None,
                "clip_fraction": None,
            }
        )
    return max(now) - start


@functools.cache
def results() -> tuple[Store, dict[str, pd.DataFrame]]:
    """The store and the tables of the whole experiment, made once for all tests: do not change them."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    store = build(Path(folder.name))
    return store, tables.build(store, "synthetic")


def parts_for(columns: str) -> set[str]:
    """The parts a figure with these COLUMNS is to draw: of those trained on, the scored one or the language model."""
    scored = any(name in columns for name in metrics.SCORES)
    return {"timing", "classification" if scored else "convergence"}


def predicted() -> pd.DataFrame:
    """A table predictions: cells of three methods, one of them flagged and one that constants are fitted to."""
    rng, rows = random.Random("predicted"), []
    for number, arm in enumerate(("FP32", "DirectQ fw4 bw4", "AQ-SGD fw4 bw4") * 4):
        step_time = 0.1 * 1.4**number
        rows.append({
            **dict.fromkeys(metrics.PREDICTIONS), "experiment": "synthetic", "part": "grid", "arm": arm,
            "cell": f"{number:012x}", "profile": "grid-fast", "stages": 2, "microbatches": 8, "schedule": "gpipe",
            "rate_mbit": 100.0, "predicted_step_time_s": step_time * rng.uniform(0.95, 1.05), "fitted": number == 1,
            "measured_step_time_s": None if number == 2 else step_time, "spread": 0.01,
            "runs": 0 if number == 2 else 3, "flagged_runs": 3 if number == 2 else 0, "bubble_fraction": 0.3,
            "link_use": 0.5, **{f"{part}_share": 0.25 for part in ("compute", "codec", "transfer", "delay")},
        })  # fmt: skip
    return tables.to_frame("predictions", shards.to_arrow("predictions", rows))


def measured() -> pd.DataFrame:
    """A table rate_distortion: two models, three boundaries, the curves of several codecs, one of them exact."""
    rng, rows = random.Random("measured"), []
    texts = {"fixpoint": (2, 4, 8), "grid": (1, 2), "delta(fixpoint)": (2, 4), "relu(fixpoint)": (4,), "none": (32,)}
    for source in ("gpt2", "resnet"):
        for kind in ("activation", "gradient"):
            for curve, rates in texts.items():
                if "relu" in curve and (source, kind) != ("resnet", "gradient"):
                    continue
                for bits in rates:
                    for boundary in range(3):
                        rows.append(measured_row((source, kind, boundary), curve, bits, rng.uniform(0.9, 1.1)))
    return tables.to_frame("rate_distortion", shards.to_arrow("rate_distortion", rows))


def measured_row(place: tuple[str, str, int], curve: str, bits: int, factor: float) -> dict:
    source, kind, boundary = place
    exact, elements = curve == "none", 4096 << boundary
    codec = curve.rpartition("(")[2].rstrip(")")
    error = 0.0 if exact else factor * 2.0 ** (1 - bits)
    payload = elements * bits // 8
    return {
        "source": source,
        "tensor": f"{kind} {boundary}",
        "kind": kind,
        "boundary": boundary,
        "compressor": curve if exact else curve.replace(codec, f"{codec}:{bits}"),
        "curve": curve,
        "codec": codec,
        "messages": 1,
        "elements": elements,
        "payload_bytes": payload,
        "frame_bytes": payload + 64,
        "payload_bits": float(bits),
        "bits_per_element": bits + 512 / elements,
        "first_visit_bits": 32.0 if "delta" in curve else None,
        "rel_error": error,
        "error_db": None if exact else 20 * math.log10(error),
        "bias": 0.001,
        "systematic_error": error,
        "draws": 1,
        "encode_melem_s": 500.0,
        "decode_melem_s": 900.0,
    }
