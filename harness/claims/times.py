"""Metrics of claims about time: parts of a step, the GPipe bound, time and bytes to a target, speed-up accounting.

Time to a target is read from the table `curves` (its time at each epoch's end, steps in between in proportion) and
the losses of the steps, smoothed over an epoch: a mean over as many steps as the first epoch has, ending there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from thinpipe.harness.claims.series import losses
from thinpipe.harness.claims.subject import REQUIRED, Flagged, Metric, NoValue, Subject

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from thinpipe.harness.profile import StageTimes

PARTS_OF_A_STEP = ("compute_s", "codec_s", "wait_s", "idle_s")
#: TCP payload of a segment, and what Ethernet, IP and TCP add to it.
SEGMENT, HEADERS = 1448, 66
TARGET = {"tolerance": 1.0, "target": None}


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
    """step_time_s over the bound of the run's profile, its rate and the frames it sent in its last epoch."""
    from thinpipe.harness import profile

    spec = subject.spec
    if spec.profile is None or spec.pipeline.schedule != "gpipe" or spec.train.accumulate > 1:
        raise NoValue("the bound is of replayed runs of schedule gpipe with one pass a step")
    times = profile.of_spec(profile.load(spec.profile), spec)
    forward_s, backward_s = (_message_s(subject, way) for way in ("forward", "backward"))
    return subject.column("step_time_s") / gpipe_bound_s(times, forward_s, backward_s, spec.pipeline.microbatches)


def _message_s(subject: Subject, direction: str) -> list[float]:
    """Seconds on the link of one frame over each boundary, at the rate set."""
    rate = subject.spec.network.rate_mbit
    rows = subject.rows("transfers")
    rows = rows[(rows["direction"] == direction) & (rows["epoch"] == rows["epoch"].max())]
    sums = rows.groupby("boundary")[["frame_bytes", "messages"]].sum()
    if rate is None:
        return [0.0] * len(sums)
    frames = (sums["frame_bytes"] / sums["messages"]).tolist()
    return [8 * (frame + HEADERS * math.ceil(frame / SEGMENT)) / (rate * 1e6) for frame in frames]


def throughput_over_bound(subject: Subject) -> float:
    return 1 / step_time_over_bound(subject)


# --- curves ---


def curve(subject: Subject) -> pd.DataFrame:
    """The rows of the run's curve at its network, by step. NoValue where it has none there, or several; Flagged."""
    rows = subject.rows("curves")
    rate, ratio = subject.network if subject.network else (None, None)
    here = rows["rate_mbit"].isna() if rate is None else (rows["rate_mbit"] / rate - 1).abs() < 1e-9
    wanted = subject.args.get("time_of")
    rows = rows[here] if wanted is None else rows[here & (rows["time_of"] == wanted)]
    if rows.empty:
        at = "without a limit" if rate is None else ratio or f"{rate:g} Mbit/s"
        raise NoValue(f"has no curve at {at}" + (f" timed by {wanted}" if wanted else "") + _lacking(subject, rate))
    if rows["time_of"].nunique(dropna=False) > 1:
        names = ", ".join(sorted(str(name) for name in rows["time_of"].unique()))
        raise NoValue(f"several things timed it ({names}): name one in args.time_of")
    if (rows["fidelity"] != "ok").any():
        raise Flagged("what timed it is flagged")
    return rows.sort_values("step")


def _lacking(subject: Subject, rate: float | None) -> str:
    """What the table `composition` says is missing for a curve at this rate."""
    rows = subject.frame("composition")
    if rows is None:
        return ""
    here = rows["rate_mbit"].isna() if rate is None else rows["rate_mbit"] == rate
    missing = sorted(set(rows.loc[here, "missing"].dropna()))
    return f" ({'; '.join(missing)})" if missing else ""


def total_time_s(subject: Subject) -> float:
    return float(curve(subject)["t_s"].iloc[-1])


def time_to_target_s(subject: Subject) -> float:
    """Seconds of training until the smoothed loss is at the target; infinite where it never is."""
    import numpy as np

    found = curve(subject)
    reached = _steps_to_target(subject)
    if reached is None:
        return math.inf
    return float(np.interp(reached, [0, *found["step"]], [0.0, *found["t_s"]]))


def bytes_to_target(subject: Subject) -> float:
    """Frame bytes sent until then; infinite where it never is."""
    reached = _steps_to_target(subject)
    if reached is None:
        return math.inf
    sent = subject.rows("transfers")
    return float(sent.loc[sent["step"] < reached, "frame_bytes"].sum())


def _steps_to_target(subject: Subject) -> int | None:
    """Steps taken when the smoothed loss is first at or below the reference's last one times `tolerance`."""
    import numpy as np

    if subject.reference is None or subject.reference.row["state"] == "diverged":
        raise NoValue("the run that sets the target diverged, or is missing")
    target = smoothed(subject.reference)[1][-1] * subject.args["tolerance"]
    steps, values = smoothed(subject)
    below = np.flatnonzero(values <= target)
    return int(steps[below[0]]) + 1 if below.size else None


def smoothed(subject: Subject) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(steps, mean loss of an epoch's worth of steps ending there)."""
    import numpy as np

    found = losses(subject)
    window = int((found["epoch"] == found["epoch"].iloc[0]).sum())
    values = found["train_loss"].to_numpy(dtype=np.float64)
    means = np.lib.stride_tricks.sliding_window_view(values, window).mean(axis=1)
    return found["step"].to_numpy()[window - 1 :], means


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
    """Measured speed-up of the whole over what the accounting gives for the speed-up of a warm step."""
    if subject.reference is None:
        raise NoValue("the run that it is compared with is missing")
    own, slow = curve(subject), curve(subject.reference)
    s = _last_step_s(slow) / _last_step_s(own)
    expected = speed_up(s, len(own), subject.column("warmup_epochs"))
    return float(slow["t_s"].iloc[-1] / own["t_s"].iloc[-1]) / expected


def _last_step_s(found: pd.DataFrame) -> float:
    """Seconds of a step of a curve's last epoch."""
    if len(found) < 2:
        raise NoValue("a curve of one epoch has no warm part")
    last, before = found.iloc[-1], found.iloc[-2]
    return float((last["t_s"] - before["t_s"]) / (last["step"] - before["step"]))


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
        step_time_over_bound, ("runs", "transfers"), is_time=True,
    ),
    Metric(
        "throughput_over_bound", "the same of throughput: bound over step_time_s", "", "higher",
        throughput_over_bound, ("runs", "transfers"), is_time=True,
    ),
    Metric(
        "total_time_s", "training time of the whole curve", "s", "lower", total_time_s, ("curves",), is_time=True,
        args={"time_of": None},
    ),
    Metric(
        "time_to_target_s", "training time until the loss, smoothed over an epoch, is at that of arm `target` at its "
        "end, times `tolerance`", "s", "lower", time_to_target_s, ("curves", "steps"), is_time=True,
        args={**TARGET, "time_of": None}, reference="target",
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
        "accounting_ratio", "total_time_s of arm `baseline` over the run's, over what the accounting gives for the "
        "ratio of their last epoch's step times", "", None, accounting_ratio, ("curves",), is_time=True,
        args={"baseline": None, "time_of": None}, reference="baseline",
    ),
    Metric(
        "composition_error", "|composed - measured| over measured time of the whole, of a run made in full", "",
        "lower", composition_error, ("composition",), is_time=True, scale="difference",
    ),
)  # fmt: skip
