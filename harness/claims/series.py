"""Metrics of claims that are worked out from a run's rows of steps, transfers and evals.

Of an epoch: of its rows. "The last epoch" is the last one with rows of the kind. Errors and changes were measured on
sampled steps (numbers.md), so a mean over an epoch is one over its sampled steps.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from thinpipe.harness.claims.subject import REQUIRED, Metric, NoValue, Subject

if TYPE_CHECKING:
    import pandas as pd

FLOAT_BYTES = 4
SCALE_BYTES = 2
DIRECTIONS = ("forward", "backward")
#: Arguments of what is measured at boundaries.
CROSSING = {"direction": "forward", "boundary": None}


# --- losses and scores ---


def losses(subject: Subject) -> pd.DataFrame:
    """step, epoch and train_loss, a row a step in order, where the run has a finite loss. NoValue where it has none."""
    rows = subject.rows("steps")
    rows = rows[rows["train_loss"].notna()].drop_duplicates("step").sort_values("step")
    if rows.empty:
        raise NoValue("no training loss: a timing run cycles a few batches")
    return rows[["step", "epoch", "train_loss"]].reset_index(drop=True)


def warmup_losses(subject: Subject) -> tuple[float, ...]:
    """The losses of the first `epochs` epochs, a step each."""
    found, epochs = losses(subject), subject.args["epochs"]
    if found["epoch"].max() + 1 < epochs:
        raise NoValue(f"it has {found['epoch'].max() + 1} epochs, not {epochs}")
    return tuple(found.loc[found["epoch"] < epochs, "train_loss"])


def first_epoch_loss(subject: Subject) -> float:
    found = losses(subject)
    return float(found.loc[found["epoch"] == 0, "train_loss"].mean())


def loss_at_step(subject: Subject) -> float:
    found = losses(subject)
    at = found.loc[found["step"] == subject.args["step"], "train_loss"]
    if at.empty:
        raise NoValue(f"no step {subject.args['step']}: it ended after {len(found)} steps")
    return float(at.iloc[0])


def loss_over_initial(subject: Subject) -> float:
    found = losses(subject)
    return subject.column("final_train_loss") / float(found["train_loss"].iloc[0])


def _scores(subject: Subject, column: str) -> pd.Series:
    found = subject.rows("evals")[column].dropna().astype(float)
    if found.empty:
        raise NoValue(f"no evaluation has {column}")
    return found


def max_accuracy(subject: Subject) -> float:
    return float(_scores(subject, "accuracy").max())


def best_eval_loss(subject: Subject) -> float:
    return float(_scores(subject, "eval_loss").min())


# --- what crossed ---


def _crossed(subject: Subject) -> pd.DataFrame:
    """Transfers of the claim's direction and boundary; None stands for all of them."""
    rows = subject.rows("transfers")
    for key in CROSSING:
        wanted = subject.args.get(key)
        rows = rows if wanted is None else rows[rows[key] == wanted]
    if rows.empty:
        raise NoValue(f"nothing crossed: {', '.join(f'{k} {subject.args.get(k)}' for k in CROSSING)}")
    return rows


def _of_last_epoch(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["epoch"] == rows["epoch"].max()]


def sent_bytes(subject: Subject) -> float:
    return float(_crossed(subject)["frame_bytes"].sum())


def bits_per_element(subject: Subject) -> float:
    rows = _of_last_epoch(_crossed(subject))
    return 8 * float(rows["frame_bytes"].sum()) / (float(rows["raw_bytes"].sum()) / FLOAT_BYTES)


def bytes_formula_ratio(subject: Subject) -> float:
    """Measured payload over sum of messages x (ceil(n b / 8) + 2 E), last epoch: n elements of a message at b bits, E
    scales of 2 bytes, one a channel; what goes uncompressed has 32 bits and no scale."""
    rows = _of_last_epoch(_crossed(subject))
    expected = sum(_formula(subject.spec, row) for row in rows.to_dict("records"))
    return float(rows["payload_bytes"].sum()) / expected


def _formula(spec: Any, row: Any) -> int:
    from thinpipe.harness.compression import grammar

    elements = row["raw_bytes"] // FLOAT_BYTES // row["messages"]
    codec = grammar.inner(row["compressor"])
    if codec == "none":
        return int(row["raw_bytes"])
    bits = grammar.bits(codec)
    if not codec.startswith("fixpoint:") or "scale=" in codec or bits is None:
        raise NoValue(f"the formula is of fixpoint with a scale a channel, not of {codec}")
    return int(row["messages"]) * (math.ceil(elements * bits / 8) + SCALE_BYTES * _channels(spec, row["boundary"]))


def _channels(spec: Any, boundary: int) -> int:
    """Channels of the tensor at a boundary: its last axis, of pictures the first one of a sample."""
    from thinpipe.harness.models.base import resolve
    from thinpipe.harness.pipeline import partition

    shape = resolve(spec.model, spec.task)
    parts = partition.split(shape, spec.pipeline.stages, spec.pipeline.cuts)
    sample = shape.boundaries[parts[boundary].blocks[-1]]
    return sample[-1] if len(sample) <= 2 else sample[0]


# --- errors and changes by epoch ---


def _by_epoch(subject: Subject, columns: list[str]) -> pd.DataFrame:
    """Mean a sampled step of `columns`, by epoch, where they were measured. NoValue where they never were."""
    rows = _crossed(subject)
    rows = rows.dropna(subset=columns)
    if rows.empty:
        raise NoValue(f"no {' and '.join(columns)}: measured with measure convergence or full, by methods that have it")
    return rows.groupby("epoch")[columns].mean().astype(float)


def change_ratios(subject: Subject) -> pd.Series:
    """mean(mean_abs_change) / mean(mean_abs) by epoch, of visits after the first."""
    found = _by_epoch(subject, ["mean_abs_change", "mean_abs"])
    return found["mean_abs_change"] / found["mean_abs"]


def change_ratio_first(subject: Subject) -> float:
    return float(change_ratios(subject).iloc[0])


def change_ratio_last(subject: Subject) -> float:
    return float(change_ratios(subject).iloc[-1])


def change_ratio_max(subject: Subject) -> float:
    return float(change_ratios(subject).max())


def change_ratio_decay(subject: Subject) -> float:
    found = change_ratios(subject)
    return float(found.iloc[-1] / found.iloc[0])


def change_ratio_spearman(subject: Subject) -> float:
    """Rank correlation of epoch and ratio."""
    found = change_ratios(subject)
    if len(found) < 3 or found.nunique() == 1:
        raise NoValue("a rank correlation needs three epochs and values that differ")
    return float(found.rank().corr(found.index.to_series().rank()))


def rel_errors(subject: Subject) -> pd.Series:
    """Mean rel_error by epoch, from the first epoch on that has any error: before, all was sent in full."""
    found = _by_epoch(subject, ["rel_error"])["rel_error"]
    lossy = found[found > 0]
    if lossy.empty:
        raise NoValue("nothing was lost: rel_error is 0 throughout")
    return found[found.index >= lossy.index[0]]


def rel_error_first(subject: Subject) -> float:
    return float(rel_errors(subject).iloc[0])


def rel_error_last(subject: Subject) -> float:
    return float(rel_errors(subject).iloc[-1])


def rel_error_at(subject: Subject) -> float:
    found = rel_errors(subject)
    visit = subject.args["visit"]
    if not 1 <= visit <= len(found):
        raise NoValue(f"no compressed visit {visit}: there are {len(found)}")
    return float(found.iloc[visit - 1])


def rel_error_decay(subject: Subject) -> float:
    found = rel_errors(subject)
    return float(found.iloc[-1] / found.iloc[0])


def error_per_change(subject: Subject) -> float:
    """Last epoch: mean rel_error over mean(mean_abs_change) / mean(mean_abs): the codec's error as a share of what it
    was given, the constant c_Q of AQ-SGD's theory but for the norms (2-norm over 1-norm)."""
    found = _by_epoch(subject, ["rel_error", "mean_abs_change", "mean_abs"]).iloc[-1]
    return float(found["rel_error"] * found["mean_abs"] / found["mean_abs_change"])


def _of_transfers(name: str, meaning: str, function: Any, **options: Any) -> Metric:
    args = {**CROSSING, **options.pop("args", {})}
    return Metric(name, meaning, "", options.pop("better", "lower"), function, ("transfers",), args=args, **options)


METRICS = (
    Metric(
        "warmup_losses", "training loss of each step of the first `epochs` epochs, exactly", "nat", None, warmup_losses,
        ("steps",), args={"epochs": 1}, of_start=True, is_sequence=True,
    ),
    Metric(
        "first_epoch_loss", "mean training loss of the first epoch", "nat", "lower", first_epoch_loss, ("steps",),
        of_start=True,
    ),
    Metric(
        "loss_at_step", "training loss of step `step` (from 0)", "nat", "lower", loss_at_step, ("steps",),
        args={"step": REQUIRED},
    ),
    Metric(
        "loss_over_initial", "final_train_loss over the loss of the first step, before any update", "", "lower",
        loss_over_initial, ("runs", "steps"),
    ),
    Metric("max_accuracy", "highest accuracy of all evaluations", "", "higher", max_accuracy, ("evals",)),
    Metric("best_eval_loss", "lowest held-out loss of all evaluations", "nat", "lower", best_eval_loss, ("evals",)),
    Metric(
        "sent_bytes", "frame bytes of a direction over all training steps", "B", "lower", sent_bytes, ("transfers",),
        args=CROSSING,
    ),
    Metric(
        "bits_per_element", "8 x frame bytes over elements, last epoch", "bit", "lower", bits_per_element,
        ("transfers",), args=CROSSING, of_start=True,
    ),
    Metric(
        "bytes_formula_ratio", "payload bytes over messages x (ceil(n b / 8) + 2 E), last epoch: n elements of a "
        "message, b bits, E channels", "", None, bytes_formula_ratio, ("transfers",), args=CROSSING, of_start=True,
    ),
    _of_transfers(
        "change_ratio_first", "mean |change since the last visit| over mean |value|, first epoch that has one",
        change_ratio_first, of_start=True,
    ),
    _of_transfers("change_ratio_last", "the same, last epoch", change_ratio_last),
    _of_transfers("change_ratio_max", "the same, highest of all epochs", change_ratio_max),
    _of_transfers("change_ratio_decay", "change_ratio_last over change_ratio_first", change_ratio_decay),
    _of_transfers(
        "change_ratio_spearman", "rank correlation of epoch and that ratio: -1 where it always falls",
        change_ratio_spearman, scale="difference",
    ),
    _of_transfers(
        "rel_error_first", "mean |decoded - x| / |x|, first epoch that has any error", rel_error_first, of_start=True
    ),
    _of_transfers("rel_error_last", "the same, last epoch", rel_error_last),
    _of_transfers(
        "rel_error_at", "the same, at compressed visit `visit` (from 1)", rel_error_at, args={"visit": REQUIRED}
    ),
    _of_transfers("rel_error_decay", "rel_error_last over rel_error_first", rel_error_decay),
    _of_transfers(
        "error_per_change", "rel_error over the change ratio, last epoch: about AQ-SGD's c_Q", error_per_change
    ),
)  # fmt: skip
