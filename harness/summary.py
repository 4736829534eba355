"""What a finished run's rows add up to: the computed columns of the runs table. Formulas: docs/numbers.md.

    steps, spans, evals, transfers of all ranks of one run ──▶ step_time_s, compute_s ... final_eval_loss

>>> frame = pd.DataFrame({"rank": [0, 1], "step": [0, 0], "step_time_s": [0.2, 0.3]})
>>> slowest_rank_median(frame)
0.3
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from thinpipe.harness import metrics
from thinpipe.harness.errors import UserError
from thinpipe.harness.spec import RunSpec
from thinpipe.harness.tasks import base as tasks

COLUMNS = (
    "step_time_s",
    "cold_step_time_s",
    "samples_per_s",
    "tokens_per_s",
    "compute_s",
    "codec_s",
    "wait_s",
    "idle_s",
    "initial_train_loss",
    "final_train_loss",
    "final_eval_loss",
    *(f"final_{name}" for name in metrics.SCORES),
    "measured_compression_ratio",
)
# A frame is one sender's: within a data group its boundary and direction say whose.
SPAN_KEY = ["group", "step", "microbatch", "direction", "boundary"]


def summarise(
    spec: RunSpec, steps: pd.DataFrame, spans: pd.DataFrame, evals: pd.DataFrame, transfers: pd.DataFrame
) -> dict[str, Any]:
    """The values of COLUMNS for one finished run; None where the run has nothing to compute them from.

    steps, spans, evals, transfers: rows of all ranks, columns as metrics.TABLES. Losses are None in a timing run: it
    cycles a few batches, so its loss is not one of the training that the experiment is about. Raises
    UserError where a frame was waited for that no rank has sent.
    """
    measured = steps[steps["measured"]]
    step_time = slowest_rank_median(measured)
    samples_per_s = spec.train.batch_size / step_time if step_time else None
    timing = spec.measure == "timing"
    tokens = tasks.kind(spec.task) != "images"
    waiting = wait_by_step(spans, spec.pipeline.ranks)
    return {
        "step_time_s": step_time,
        "cold_step_time_s": slowest_rank_median(steps[~steps["measured"]]) if timing else None,
        "samples_per_s": samples_per_s,
        "tokens_per_s": None if samples_per_s is None or not tokens else samples_per_s * spec.task.sequence_length,
        "compute_s": rank_mean_of_medians(measured, "compute_s"),
        "codec_s": rank_mean_of_medians(measured, "codec_s"),
        **_wait_and_idle(measured, waiting),
        "initial_train_loss": None if timing else _first_loss(steps),
        "final_train_loss": None if timing else _last_epoch_loss(steps),
        "final_eval_loss": None if timing else _last_of(evals, "eval_loss"),
        **{f"final_{name}": None if timing else _last_of(evals, name) for name in metrics.SCORES},
        "measured_compression_ratio": ratio_of_steps(transfers, measured["step"]),
    }


def slowest_rank_median(steps: pd.DataFrame) -> float | None:
    """Median over steps of the slowest rank's step_time_s, in seconds; None without steps."""
    if steps.empty:
        return None
    return float(steps.groupby("step")["step_time_s"].max().median())


def rank_mean_of_medians(steps: pd.DataFrame, column: str) -> float | None:
    """Mean over ranks of each rank's median over steps of `column`; None without steps."""
    if steps.empty:
        return None
    return float(steps.groupby("rank")[column].median().mean())


def ratio_of_steps(transfers: pd.DataFrame, steps: pd.Series) -> float | None:
    """raw_bytes / frame_bytes of all that was sent in `steps`; None where nothing was."""
    sent = transfers[transfers["step"].isin(steps)]
    frames = int(sent["frame_bytes"].sum())
    return int(sent["raw_bytes"].sum()) / frames if frames else None


def wait_by_step(spans: pd.DataFrame, ranks: int) -> pd.Series:
    """Seconds a rank was blocked while a frame was on its way, by (rank, step), for every step with spans.

        wait_receive   |---- idle ----|---- wait ----|
        sender's send          start_s ^

    Up to the sender's `send` the receiver had nothing to wait for but the pipeline's own order: that is idle.
    `wait_send` is all wait: its frame is on its way by definition. ranks: of one pipeline.
    """
    spans = spans.assign(group=spans["rank"] // ranks)
    receives = spans[spans["phase"] == "wait_receive"]
    sends = spans[spans["phase"] == "send"].rename(columns={"rank": "sender", "start_s": "sent_s"})
    repeated = sends.duplicated(SPAN_KEY)
    if repeated.any():
        raise UserError(f"spans: {_describe(sends[repeated].iloc[0])} was sent twice within one step.")
    pairs = receives.merge(sends[["sender", *SPAN_KEY, "sent_s"]], on=SPAN_KEY, how="left")
    unmatched = pairs[pairs["sent_s"].isna()]
    if not unmatched.empty:
        waiter, frame = unmatched.iloc[0]["rank"], _describe(unmatched.iloc[0])
        raise UserError(
            f"spans: rank {waiter} waited for {frame}, but no such send is recorded: the sender's shard is "
            "incomplete. Delete the run's folder, then `thinpipe run` repeats it."
        )
    under_way_from = pairs["sent_s"].clip(pairs["start_s"], pairs["end_s"])
    pairs["wait_s"] = pairs["end_s"] - under_way_from
    blocked = spans[spans["phase"] == "wait_send"]
    blocked = blocked.assign(wait_s=blocked["end_s"] - blocked["start_s"])
    waits = pd.concat([part[["rank", "step", "wait_s"]] for part in (pairs, blocked)])
    seen = pd.MultiIndex.from_frame(spans[["rank", "step"]].drop_duplicates())
    return waits.groupby(["rank", "step"])["wait_s"].sum().reindex(seen, fill_value=0.0)


def _describe(row: pd.Series) -> str:
    return (
        f"the frame of step {row['step']}, micro-batch {row['microbatch']}, {row['direction']} over boundary "
        f"{row['boundary']}"
    )


def _wait_and_idle(steps: pd.DataFrame, waiting: pd.Series) -> dict[str, float | None]:
    """wait_s and idle_s: what is left of a rank's own step after compute, codec and wait is idle."""
    joined = steps.join(waiting.rename("wait_s"), on=["rank", "step"], how="inner")
    busy = joined["compute_s"] + joined["codec_s"] + joined["wait_s"]
    joined["idle_s"] = (joined["step_time_s"] - busy).clip(lower=0.0)
    return {name: rank_mean_of_medians(joined, name) for name in ("wait_s", "idle_s")}


def _first_loss(steps: pd.DataFrame) -> float | None:
    losses = steps[steps["train_loss"].notna()].sort_values("step")["train_loss"]
    return None if losses.empty else float(losses.iloc[0])


def _last_epoch_loss(steps: pd.DataFrame) -> float | None:
    losses = steps.dropna(subset=["train_loss"])
    if losses.empty:
        return None
    return float(losses.loc[losses["epoch"] == losses["epoch"].max(), "train_loss"].mean())


def _last_of(evals: pd.DataFrame, column: str) -> float | None:
    """`column` at the last evaluation; None where there is none, or it was not scored so."""
    if evals.empty:
        return None
    value = evals.sort_values("step", kind="stable")[column].iloc[-1]
    return None if pd.isna(value) else float(value)
