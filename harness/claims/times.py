"""Metrics of claims about time: parts of a step, the GPipe bound, time and bytes to a target, speed-up accounting.

When a target is reached is what stats.time_to_target says, of the table `curves`: at the end of an epoch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from thinpipe.harness.claims.series import losses
from thinpipe.harness.claims.subject import REQUIRED, Flagged, Metric, NoValue, Subject
from thinpipe.harness.stats import TOLERANCE, time_to_target
from thinpipe.netem.link import segmented_bytes

if TYPE_CHECKING:
    import pandas as pd

    from thinpipe.harness.profile import StageTimes

PARTS_OF_A_STEP = ("compute_s", "codec_s", "wait_s", "idle_s")
TARGET = {"target": None, "tolerance": None}


def codec_fraction(subject: Subject) -> float:
    return subject.column("codec_s") / subject.column("step_time_s")


def time_sum_error(subject: Subject) -> float:
    step = subject.column("step_time_s")
    return abs(sum(subject.column(name) for name in PARTS_OF_A_STEP) - step) / step


# --- the GPipe bound ---


def gpipe_bound_s(
    times: Sequence[StageTimes], forward_s: Sequence[float], backward_s: Sequence[float], microbatches: int
) -> float:
    """The least seconds a GPipe step takes: passes in order, the busiest stage or link serving all micro-batches.

    times: of each stage, a micro-batch; forward_s, backward_s: of one message over each boundary. Codec, optimizer and
    latency are left out, so that it stays a bound (numbers.md).

    >>> from thinpipe.harness.profile import StageTimes
    >>> round(gpipe_bound_s([StageTimes(0.010, 0.020, 0.0)] * 2, [0.010], [0.010], 8), 3)
    0.29
    """
    bound = 0.0
    for compute, transfer in ((0, forward_s), (1, backward_s)):
        own = [stage[compute] for stage in times]
        bound += sum(own) + sum(transfer) + (microbatches - 1) * max([*own, *transfer])
    return bound


def step_time_over_bound(subject: Subject) -> float:
    """step_time_s over the bound of the run's profile, its rate and the frames it sent in its measured steps."""
    from thinpipe.harness import profile

    spec = subject.spec
    if spec.profile is None or spec.pipeline.schedule != "gpipe" or spec.train.accumulate > 1:
        raise NoValue("the bound is of replayed runs of schedule gpipe with one pass a step")
    times = profile.of_spec(profile.load(spec.profile), spec)
    forward_s, backward_s = (_message_s(subject, way) for way in ("forward", "backward"))
    return subject.column("step_time_s") / gpipe_bound_s(times, forward_s, backward_s, spec.pipeline.microbatches)


def _message_s(subject: Subject, direction: str) -> list[float]:
    """Seconds on the link of one frame over each boundary, at the rate set."""
    rate, mtu = subject.spec.network.rate_mbit, subject.spec.network.mtu
    steps, rows = subject.rows("steps"), subject.rows("transfers")
    # First visits are sent in full by some compressors, and belong to the same epoch as the steps that are measured.
    rows = rows[(rows["direction"] == direction) & rows["step"].isin(set(steps.loc[steps["measured"], "step"]))]
    sums = rows.groupby("boundary")[["frame_bytes", "messages"]].sum()
    if rate is None:
        return [0.0] * len(sums)
    frames = (sums["frame_bytes"] / sums["messages"]).tolist()
    return [8 * segmented_bytes(frame, mtu) / (rate * 1e6) for frame in frames]


def throughput_over_bound(subject: Subject) -> float:
    return 1 / step_time_over_bound(subject)


# --- curves ---


def curve(subject: Subject) -> pd.DataFrame:
    """The rows of the run's curve at its network, by step. NoValue where it has none there, or several; Flagged."""
    assert subject.network is not None
    rows = at_network(subject, subject.rows("curves"))
    wanted = subject.args.get("time_of")
    if rows.empty:
        by = f" timed by {wanted}" if wanted else ""
        raise NoValue(f"has no curve at {subject.network.text()}{by}{_lacking(subject)}")
    if rows["time_of"].nunique(dropna=False) > 1:
        names = ", ".join(sorted(str(name) for name in rows["time_of"].unique()))
        raise NoValue(f"several things timed it ({names}): name one in args.time_of")
    if rows["network_id"].nunique() > 1:
        raise NoValue(f"several networks of {subject.network.text()} timed it, of other hosts or data groups")
    if (rows["fidelity"] != "ok").any():
        raise Flagged("what timed it is flagged")
    return rows.sort_values("step")


def at_network(subject: Subject, rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of curves or composition that are at the subject's network, of what `args.time_of` names where it does."""
    assert subject.network is not None
    rows, wanted = subject.network.rows(rows), subject.args.get("time_of")
    return rows if wanted is None else rows[rows["time_of"] == wanted]


def _lacking(subject: Subject) -> str:
    """What the table `composition` says is missing for a curve at this network."""
    rows = subject.frame("composition")
    missing = [] if rows is None else sorted(set(at_network(subject, rows)["missing"].dropna()))
    return f" ({'; '.join(missing)})" if missing else ""


def total_time_s(subject: Subject) -> float:
    return float(curve(subject)["t_s"].iloc[-1])


def time_to_target_s(subject: Subject) -> float:
    """Seconds of training until the loss is at the target; infinite where it never is."""
    found = curve(subject)
    return _reached(subject, found["t_s"], found["train_loss"])


def bytes_to_target(subject: Subject) -> float:
    """Frame bytes sent until then; infinite where it never is."""
    epochs = losses(subject).groupby("epoch").agg(step=("step", "max"), train_loss=("train_loss", "mean"))
    sent = subject.rows("transfers")
    so_far = epochs["step"].map(lambda step: sent.loc[sent["step"] <= step, "frame_bytes"].sum())
    return _reached(subject, so_far, epochs["train_loss"])


def _reached(subject: Subject, at: pd.Series, by_epoch: pd.Series) -> float:
    """at, by_epoch: what counts, and the mean loss, at each epoch's end."""
    if subject.reference is None or subject.reference.row["state"] == "diverged":
        raise NoValue("the run that sets the target diverged, or is missing")
    tolerance = subject.args["tolerance"]
    tolerance = TOLERANCE if tolerance is None else tolerance
    target = tolerance * subject.reference.column("final_train_loss")
    found = time_to_target(list(at.astype(float)), list(by_epoch.astype(float)), target)
    return math.inf if found is None else found


# --- speed-up accounting ---


def accounting(subject: Subject) -> float:
    """Speed-up of a whole training of which some epochs go uncompressed: E / (W + (E - W) / s)."""
    args = subject.args
    return speed_up(args["s"], args["epochs"], args["warmup"])


def speed_up(s: float, epochs: float, warmup: float) -> float:
    """
    >>> round(speed_up(6.8, 10, 1), 1), round(speed_up(8.5, 10, 1), 1)
    (4.3, 4.9)
    """
    return epochs / (warmup + (epochs - warmup) / s)


def accounting_ratio(subject: Subject) -> float:
    """Speed-up of the whole training, measured in full, over what the accounting gives for the timed steps' speed-up.

    Of composed curves both sides would be made of the same step times, and nothing could contradict it: NoValue.
    """
    if subject.reference is None:
        raise NoValue("the run that it is compared with is missing")
    own, slow = (_in_full(one) for one in (subject, subject.reference))
    s = _timed_step_s(subject.reference) / _timed_step_s(subject)
    expected = speed_up(s, len(own), subject.column("warmup_epochs"))
    return float(slow["t_s"].iloc[-1] / own["t_s"].iloc[-1]) / expected


def _in_full(subject: Subject) -> pd.DataFrame:
    found = curve(subject)
    if found["composed"].any():
        raise NoValue("its curve is composed, of which the accounting is an identity: it takes runs of measure full")
    return found


def _timed_step_s(subject: Subject) -> float:
    """Seconds of a step of a full run's last epoch, as timing runs of its network have it."""
    rows = subject.frame("composition")
    found = None if rows is None else at_network(subject, rows).dropna(subset=["step_s", "measured_s"])
    if found is None or found.empty:
        raise NoValue(f"no timing run has its last epoch's compressors at its network{_lacking(subject)}")
    if (found["fidelity"] != "ok").any():
        raise Flagged("what timed it is flagged")
    return float(found["step_s"].iloc[0])


def composition_error(subject: Subject) -> float:
    rows = subject.rows("composition").dropna(subset=["total_error"])
    if rows.empty:
        raise NoValue("nothing composed to hold it against")
    if (rows["fidelity"] != "ok").all():
        raise Flagged("what timed it is flagged")
    rows = rows[rows["fidelity"] == "ok"]
    return float(rows["total_error"].max())


METRICS = (
    Metric(
        "codec_fraction", "codec_s over step_time_s", "", "lower", codec_fraction, is_time=True, scale="difference"
    ),
    Metric(
        "time_sum_error", "|compute_s + codec_s + wait_s + idle_s - step_time_s| over step_time_s", "", "lower",
        time_sum_error, is_time=True, scale="difference",
    ),
    Metric(
        "step_time_over_bound", "step_time_s over the GPipe bound of its profile, rate and frames", "", "lower",
        step_time_over_bound, ("runs", "steps", "transfers"), is_time=True,
    ),
    Metric(
        "throughput_over_bound", "the same of throughput: bound over step_time_s", "", "higher",
        throughput_over_bound, ("runs", "steps", "transfers"), is_time=True,
    ),
    Metric(
        "total_time_s", "training time of the whole curve", "s", "lower", total_time_s, ("curves",), is_time=True,
        args={"time_of": None},
    ),
    Metric(
        "time_to_target_s", "training time at the end of the first epoch whose mean loss is at or below "
        f"final_train_loss of arm `target`, times `tolerance` ({TOLERANCE} unless given)", "s", "lower",
        time_to_target_s, ("curves",), is_time=True, args={**TARGET, "time_of": None}, reference="target",
    ),
    Metric(
        "bytes_to_target", "frame bytes sent until then", "B", "lower", bytes_to_target, ("steps", "transfers"),
        args=TARGET, reference="target",
    ),
    Metric(
        "accounting", "E / (W + (E - W) / s) of arguments s, epochs, warmup: speed-up of a training whose first W of E "
        "epochs are uncompressed, s times faster after", "", None, accounting, (),
        args={"s": REQUIRED, "epochs": REQUIRED, "warmup": 1}, needs_run=False,
    ),
    Metric(
        "accounting_ratio", "total_time_s of arm `baseline` over the run's, both run in full, over what the accounting "
        "gives for the ratio of their last epoch's step times in timing runs", "", None, accounting_ratio,
        ("curves", "composition"), is_time=True, args={"baseline": None}, reference="baseline",
    ),
    Metric(
        "composition_error", "|composed - measured| over measured time of the whole, of a run made in full", "",
        "lower", composition_error, ("composition",), is_time=True, scale="difference",
    ),
)  # fmt: skip
