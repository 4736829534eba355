"""The closed vocabulary of what is measured: every table column with its type, unit and meaning.

A row is a dict; `check(table, row)` refuses a column that is not listed here, or one that is missing. Ranks write
rows as JSON lines while they run and as parquet shards at their end; tables.py merges the shards. docs/formats.md is
held against this file by a test. Times called *_s are seconds; `t_s` and span times are CLOCK_MONOTONIC, shared by
the hosts of one machine's lab.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from thinpipe.harness.errors import near_miss


class Column(NamedTuple):
    """type: int, float, str or bool. Values may be None where `optional`."""

    type: type
    unit: str
    meaning: str
    optional: bool = False


# What a stage can be busy with; spans carry one of these.
PHASES = (
    "forward_compute",
    "backward_compute",
    "encode",
    "decode",
    "wait_receive",  # blocked until a frame was here
    "wait_send",  # blocked until a frame had left
    "send",  # a frame handed to the network: only its start counts
    "optimizer",
    "sync",  # what crosses between ranks besides frames: clip norms, gradients of shared weights and data groups
)

# What an evaluation may be scored by besides its loss; a task's `score` gives some of them.
SCORES = ("accuracy", "matthews", "f1")

KEYS: dict[str, Column] = {
    "run_id": Column(str, "", "12 hex digits, hash of the spec"),
}

RUNS: dict[str, Column] = {
    **KEYS,
    "train_id": Column(str, "", "what the loss curve depends on: run_id without network, measure, timing"),
    "experiment": Column(str, "", "name of the experiment file"),
    "part": Column(str, "", "part of the experiment"),
    "arm": Column(str, "", "label of the method in figures"),
    "cell": Column(str, "", "hash of all settings but the seed: runs that differ in the seed alone share it"),
    "seed": Column(int, "", "seed of weights, data order and stochastic rounding"),
    "state": Column(str, "", "done, diverged, failed or foreign"),
    "measure": Column(str, "", "convergence, timing or full"),
    "compute": Column(str, "", "real, or replay: stages waited instead of computing"),
    "profile": Column(str, "", "the profile that a replay waited by", True),
    "model": Column(str, "", "plug-in and preset or checkpoint"),
    "task": Column(str, "", "plug-in and corpus"),
    "stages": Column(int, "", "pipeline stages"),
    "groups": Column(int, "", "data-parallel groups: pipelines side by side"),
    "microbatches": Column(int, "", "micro-batches a batch"),
    "batch_size": Column(int, "samples", "samples of an optimizer step"),
    "forward": Column(str, "", "compressor of activations after any warm-up, canonical text"),
    "backward": Column(str, "", "compressor of activation gradients after any warm-up"),
    "forward_bits": Column(float, "bit", "bits as configured of the forward codec (32 for none)", True),
    "backward_bits": Column(float, "bit", "bits as configured of the backward codec (32 for none)", True),
    "warmup_epochs": Column(int, "epochs", "uncompressed epochs at the start"),
    "rate_mbit": Column(float, "Mbit/s", "rate set on every link, empty = unlimited", True),
    "rho": Column(float, "", "transfer time / compute time of a micro-batch, fp32, both ways; where it is known", True),
    "measured_rate_mbit": Column(float, "Mbit/s", "calibrated goodput, worst link, as layer-2 rate", True),
    "measured_rtt_ms": Column(float, "ms", "calibrated round trip of a small message, worst link", True),
    "steps": Column(int, "steps", "optimizer steps taken"),
    "step_time_s": Column(float, "s", "median time of a measured step, slowest rank", True),
    "cold_step_time_s": Column(float, "s", "median time of the unmeasured first pass's steps (timing runs)", True),
    "samples_per_s": Column(float, "1/s", "batch_size / step_time_s", True),
    "tokens_per_s": Column(float, "1/s", "samples_per_s x sequence length", True),
    "compute_s": Column(float, "s", "median a step, mean over ranks: forward, backward and optimizer", True),
    "codec_s": Column(float, "s", "median a step, mean over ranks: encode and decode", True),
    "wait_s": Column(float, "s", "median a step, mean over ranks: blocked while a frame was on its way", True),
    "idle_s": Column(float, "s", "median a step, mean over ranks: the rest (bubble, synchronisation)", True),
    "initial_train_loss": Column(float, "nat", "training loss of the first step, before any update", True),
    "final_train_loss": Column(float, "nat", "mean training loss of the last epoch", True),
    "final_eval_loss": Column(float, "nat", "held-out loss at the last evaluation", True),
    "final_accuracy": Column(float, "", "accuracy at the last evaluation", True),
    "final_matthews": Column(float, "", "Matthews correlation at the last evaluation", True),
    "final_f1": Column(float, "", "F1 at the last evaluation", True),
    "predicted_memory_mib": Column(float, "MiB", "predicted peak memory of the largest rank over its imports", True),
    "peak_memory_mib": Column(float, "MiB", "measured peak resident memory of the largest rank over its imports", True),
    "memory_state_bytes": Column(int, "B", "what all memories of all ranks keep at the run's end, RAM and disk", True),
    "raw_bytes": Column(int, "B", "4 B an element of every tensor that crossed, training steps"),
    "payload_bytes": Column(int, "B", "what the compressors wrote, training steps"),
    "frame_bytes": Column(int, "B", "payload and header, training steps"),
    "wire_bytes": Column(int, "B", "leaf-qdisc counters of all hosts over the whole run, evaluation included", True),
    "sync_bytes": Column(int, "B", "TCP bytes of everything else between ranks; empty for a resumed run", True),
    "data_bytes": Column(int, "B", "the part of sync_bytes that averages gradients between data groups", True),
    "compression_ratio": Column(float, "", "raw_bytes / frame_bytes", True),
    "measured_compression_ratio": Column(float, "", "raw bytes / frame bytes of the measured steps", True),
    "run_queue_pct": Column(
        float, "%", "worst rank: time its main thread was runnable but not running, over the measured time", True
    ),
    "fidelity": Column(str, "", "ok, or what is wrong, joined by +: cpu-bound, link-off, other-profile"),
    "fidelity_reason": Column(str, "", "why it was flagged", True),
    "machine": Column(str, "", "hash of the machine's identity"),
    "wall_s": Column(float, "s", "whole run, lab and launch included"),
    "error": Column(str, "", "first line of what went wrong", True),
}

STEPS: dict[str, Column] = {
    **KEYS,
    "rank": Column(int, "", "global rank"),
    "step": Column(int, "", "optimizer step from 0"),
    "epoch": Column(int, "", "epoch from 0"),
    "measured": Column(
        bool,
        "",
        "whether its time counts: false in a timing run's first pass; in other runs false in the first epoch "
        "and before the last change of compressors (runs of one epoch: always true)",
    ),
    "t_s": Column(float, "s", "training time at the step's end: the sum of step_time_s so far, evaluation excluded"),
    "step_time_s": Column(float, "s", "from the step's start to its end on this rank"),
    "train_loss": Column(float, "nat", "mean over the batch, last stage only", True),
    "lr": Column(float, "", "learning rate used"),
    "grad_norm": Column(float, "", "global norm before clipping", True),
    "compute_s": Column(float, "s", "forward, backward and optimizer"),
    "codec_s": Column(float, "s", "encode and decode"),
    "blocked_s": Column(float, "s", "waiting for a receive or a send"),
    "sync_s": Column(float, "s", "exchanging clip norms, gradients of shared weights and of data groups"),
}

TRANSFERS: dict[str, Column] = {
    **KEYS,
    "rank": Column(int, "", "the sender"),
    "step": Column(int, "", "optimizer step from 0"),
    "epoch": Column(int, "", "epoch from 0"),
    "boundary": Column(int, "", "0 = between stages 0 and 1"),
    "direction": Column(str, "", "forward or backward"),
    "compressor": Column(str, "", "canonical text of what was in force"),
    "messages": Column(int, "", "frames sent"),
    "raw_bytes": Column(int, "B", "4 B an element"),
    "payload_bytes": Column(int, "B", "what the compressor wrote"),
    "frame_bytes": Column(int, "B", "payload and header"),
    "rel_error": Column(float, "", "|decoded - x| / |x|, 2-norm, sampled steps", True),
    "mean_abs": Column(float, "", "mean |x| of the tensor sent, sampled steps", True),
    "mean_abs_change": Column(float, "", "mean |x - its last visit's|, delta methods, sampled steps", True),
    "clip_fraction": Column(float, "", "share of elements at the codec's end codes, sampled steps", True),
}

EVALS: dict[str, Column] = {
    **KEYS,
    "epoch": Column(int, "", "epochs completed"),
    "step": Column(int, "", "optimizer steps completed"),
    "t_s": Column(float, "s", "training time so far: the sum of step_time_s, evaluation excluded"),
    "evaluation": Column(str, "", "off or codec: how the boundary was compressed"),
    "eval_loss": Column(float, "nat", "mean held-out loss: a token's, or a sample's of a classification"),
    "perplexity": Column(float, "", "exp(eval_loss), language modelling only", True),
    "accuracy": Column(float, "", "share of held-out samples classified right", True),
    "matthews": Column(float, "", "Matthews correlation coefficient of the held-out predictions", True),
    "f1": Column(
        float, "", "F1 of the held-out predictions: of class 1 where there are two, else the classes' mean", True
    ),
    "sequences": Column(int, "", "held-out samples scored"),
}

SPANS: dict[str, Column] = {
    **KEYS,
    "rank": Column(int, "", "global rank"),
    "step": Column(int, "", "optimizer step from 0"),
    "microbatch": Column(int, "", "micro-batch from 0, counted through the passes of a step; -1 where none"),
    "phase": Column(str, "", "one of PHASES"),
    "direction": Column(str, "", "forward or backward, empty where neither", True),
    "boundary": Column(int, "", "the boundary a frame crosses, 0 = between stages 0 and 1; empty where none", True),
    "stage": Column(int, "", "the stage that computed; empty in other phases", True),
    "start_s": Column(float, "s", "CLOCK_MONOTONIC"),
    "end_s": Column(float, "s", "CLOCK_MONOTONIC"),
}

RATE_DISTORTION: dict[str, Column] = {
    "source": Column(str, "", "the model whose training the tensors are of, or the name of their file"),
    "tensor": Column(str, "", "which of its tensors"),
    "kind": Column(str, "", "activation, gradient, or tensor where a file does not say"),
    "boundary": Column(int, "", "0 = between stages 0 and 1; empty for a file's", True),
    "compressor": Column(str, "", "canonical text"),
    "curve": Column(str, "", "the text without its numbers after colons: points of one curve share it"),
    "codec": Column(str, "", "name of the codec inside any memory"),
    "messages": Column(int, "", "messages measured: of memories those of the last visit"),
    "elements": Column(int, "", "elements of these messages"),
    "payload_bytes": Column(int, "B", "what the compressor wrote"),
    "frame_bytes": Column(int, "B", "payload and header"),
    "payload_bits": Column(float, "bit", "8 payload_bytes / elements"),
    "bits_per_element": Column(float, "bit", "8 frame_bytes / elements"),
    "first_visit_bits": Column(float, "bit", "bits_per_element of the first visit's messages, memories only", True),
    "rel_error": Column(
        float,
        "",
        "|decoded - x| / |x|, 2-norm, all messages together; of a gradient at a ReLU's output where that is not zero",
    ),
    "error_db": Column(float, "dB", "20 log10 rel_error; empty where it is 0", True),
    "bias": Column(float, "", "mean of decoded - x over mean |x|"),
    "systematic_error": Column(float, "", "|mean of decoded over draws - x| / |x|: rel_error of one, less of unbiased"),
    "draws": Column(int, "", "message keys that bias and systematic_error are over; 1 where bytes do not depend on it"),
    "encode_melem_s": Column(float, "10^6/s", "elements encoded a second, one thread, median message"),
    "decode_melem_s": Column(float, "10^6/s", "elements decoded a second, one thread, median message"),
}

# Made of whole runs by compose.py.
CURVES: dict[str, Column] = {
    **{name: RUNS[name] for name in ("experiment", "part", "arm", "cell", "seed")},
    **KEYS,
    "state": Column(str, "", "of the run that trained: done, diverged or foreign"),
    "network_id": Column(str, "", "names the network: hosts, data groups and everything set about links"),
    "rate_mbit": RUNS["rate_mbit"],
    "rho": RUNS["rho"],
    "timing_run_id": Column(
        str,
        "",
        "the timing run of the last epoch's compressors and the training's seed; where that seed was not timed, all "
        "others, joined by +; empty: measured",
        True,
    ),
    "time_of": Column(str, "", "whose steps the times are, where another model's: profile and pipeline", True),
    "composed": Column(bool, "", "times of timing runs; else the run's own"),
    "fidelity": Column(str, "", "ok, or the flags of every run whose times are in it, joined by +"),
    "flagged_runs": Column(int, "", "flagged timing runs left out, as others of their cell are not flagged"),
    "step": Column(int, "steps", "optimizer steps completed, at the end of an epoch"),
    "epoch": Column(int, "epochs", "epochs completed (of a run that broke off, the last one begun)"),
    "t_s": Column(float, "s", "training time so far, evaluation excluded"),
    "train_loss": Column(float, "nat", "mean over the epoch's steps", True),
    "eval_loss": Column(float, "nat", "held-out loss at this step, where it was evaluated", True),
    "frame_bytes": Column(int, "B", "payload and header sent in training so far, all ranks"),
}

COMPOSITION: dict[str, Column] = {
    **{name: CURVES[name] for name in ("experiment", "part", "arm", "cell", "seed", "run_id", "network_id")},
    **{name: CURVES[name] for name in ("rate_mbit", "rho", "timing_run_id", "time_of", "fidelity", "flagged_runs")},
    "step_s": Column(
        float, "s", "what a step of the last epoch's compressors takes, first visits apart, as timed", True
    ),
    "missing": Column(str, "", "the timing runs that a curve lacks; it is not made then", True),
    "composed_s": Column(float, "s", "the training's time, composed", True),
    "measured_s": Column(float, "s", "the same, measured: of full runs at this network", True),
    "total_error": Column(float, "", "|composed_s - measured_s| / measured_s", True),
    "max_error": Column(float, "", "largest distance of the two in time, over steps, / measured_s", True),
    "same_losses": Column(bool, "", "whether runs of one train_id have equal losses, bit for bit", True),
}

PREDICTIONS: dict[str, Column] = {
    **{name: RUNS[name] for name in ("experiment", "part", "arm", "cell", "profile", "stages", "microbatches")},
    "schedule": Column(str, "", "order of the micro-batches"),
    "rate_mbit": RUNS["rate_mbit"],
    "network": Column(str, "", "the matrix of links in the network's place, empty = the network's", True),
    "predicted_step_time_s": Column(float, "s", "simulated"),
    "measured_step_time_s": Column(float, "s", "step_time_s, median over the cell's runs that are not flagged", True),
    "error": Column(float, "", "predicted_step_time_s / measured_step_time_s - 1", True),
    "spread": Column(float, "", "of those runs: (largest - smallest) step_time_s / median, two runs or more", True),
    "runs": Column(int, "", "the cell's replays that are not flagged"),
    "flagged_runs": Column(int, "", "the cell's replays that are flagged, so left out"),
    "fitted": Column(bool, "", "the simulator's constants are fitted to this cell: no test of it"),
    "bubble_fraction": Column(float, "", "share of the ranks' time in the pipeline without compute and codec"),
    "link_use": Column(float, "", "share of the step in which the busiest link is"),
    "compute_share": Column(float, "", "of the step's critical path: forward and backward"),
    "codec_share": Column(float, "", "of the critical path: encode and decode"),
    "transfer_share": Column(float, "", "of the critical path: bytes leaving a link"),
    "delay_share": Column(float, "", "of the critical path: delay of links"),
}

# What every rank writes rows of; the others are made of many runs, or of none.
OF_RANKS = ("steps", "transfers", "evals", "spans")
TABLES: dict[str, dict[str, Column]] = {
    "runs": RUNS,
    "steps": STEPS,
    "transfers": TRANSFERS,
    "evals": EVALS,
    "spans": SPANS,
    "curves": CURVES,
    "composition": COMPOSITION,
    "rate_distortion": RATE_DISTORTION,
    "predictions": PREDICTIONS,
}


def check(table: str, row: Mapping[str, Any]) -> None:
    """Assert that `row` has exactly the columns of `table` with values of their types; KeyError or TypeError if not."""
    columns = TABLES[table]
    for name in row:
        if name not in columns:
            raise KeyError(f"{table} has no column {name!r}.{near_miss(name, columns)}")
    for name, column in columns.items():
        if name not in row:
            raise KeyError(f"a row of {table} lacks {name!r}")
        value = row[name]
        if value is None and column.optional:
            continue
        allowed = (int, float) if column.type is float else (column.type,)
        if not isinstance(value, allowed) or (isinstance(value, bool) and column.type is not bool):
            raise TypeError(f"{table}.{name} is {value!r}, not {column.type.__name__}")
