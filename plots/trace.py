"""What the ranks of one run did when: a Gantt chart of a few of its steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from thinpipe.harness import timeline
from thinpipe.harness.errors import UserError
from thinpipe.plots import _select as select
from thinpipe.plots import style

VERSION = 1
SUMMARY = "what each rank of one run did when: a Gantt chart of a few steps"
SOURCE = "Huang et al. 2019 (GPipe), figure 2"
# Drawn of one run and when it is asked for, not of an experiment.
PARAMETERS: dict = {"per_run": True}
REQUIRES = ("runs", "steps", "spans")
NAME = "trace"
COLUMNS = "tables runs (fidelity), steps (measured, step_time_s), spans (phase, microbatch, start_s, end_s)"
NUM_STEPS = 2
SIZE_IN = (7.6, 0.66)  # width of the chart, height of a rank's band
LABEL_SIZE = 5.5
# By the place of a stage among its rank's: the first dark, later ones lighter.
FORWARD = ("#0072B2", "#6CBDEB", "#A9DAF5")
BACKWARD = ("#D55E00", "#F0B040", "#F7D08A")
PLACE = ("first", "second", "later")
OTHERS = {
    "codec": ("#009E73", ("encode", "decode")),
    "optimizer": ("#3B3B3B", ("optimizer",)),
    "sync (norms, gradients)": ("#CC79A7", ("sync",)),
}
# A band's lanes: from where in it, and how high.
WORK, LINKS = (0.06, 0.52), {"forward": (0.62, 0.13), "backward": (0.78, 0.13)}


class Box(NamedTuple):
    """A bar: rank, lane (offset, height), start and length in s, colour, text inside, hollow or not."""

    rank: int
    lane: tuple[float, float]
    start: float
    seconds: float
    colour: str
    text: str = ""
    hollow: bool = False


def figures(tables: select.Tables) -> select.Drawn:
    """The chart of the one run whose spans are in `tables`; UserError where there is none, or several."""
    spans = tables["spans"]
    ids = sorted(set(spans["run_id"]))
    if not ids:
        raise select.nothing(tables, "a run with spans, one whose ranks wrote their shards")
    if len(ids) > 1:
        raise UserError(f"a trace is of one run, not of {len(ids)}: name one, e.g. `thinpipe plot trace {ids[0]}`.")
    run = tables["runs"][tables["runs"]["run_id"] == ids[0]].iloc[0]
    steps = tables["steps"][tables["steps"]["run_id"] == ids[0]]
    with style.context():
        return [(NAME, _figure(run, steps, spans))]


def typical(steps: pd.DataFrame) -> range:
    """NUM_STEPS steps from the one on whose time (slowest rank) is nearest the median of the measured steps (of all,
    where none is measured)."""
    counted = steps[steps["measured"]] if steps["measured"].any() else steps
    times = counted.groupby("step")["step_time_s"].max()
    end = int(times.index.max()) + 1
    first = min(int((times - times.median()).abs().idxmin()), end - NUM_STEPS)
    return range(max(int(times.index.min()), first), end)[:NUM_STEPS]


def _figure(run: pd.Series, steps: pd.DataFrame, spans: pd.DataFrame) -> Figure:
    chosen, world = typical(steps), int(spans["rank"].max()) + 1
    ranks = world // int(run["groups"])
    drawn = list(timeline.by_step(spans, chosen))
    rows = [row for _, own in drawn for row in own]
    stages = {rank: sorted({r["stage"] for r in rows if r["rank"] == rank} - {None}) for rank in range(world)}
    pace: dict[Any, float] = {}
    boxes = [box for _, own in drawn for box in _on_links(timeline.frames(own, ranks, pace))]
    boxes += [box for row in rows if (box := _work(row, stages[row["rank"]]))]
    fig = style.new_figure(1, 1, (SIZE_IN[0], 0.5 + SIZE_IN[1] * world))
    ax = fig.add_subplot(xlabel="time from the first of these steps on (ms)")
    _draw(ax, boxes, min(row["start_s"] for row in rows), max(row["end_s"] for row in rows))
    ax.set_yticks(
        [rank + WORK[0] + WORK[1] / 2 for rank in range(world)], [_name(rank, stages[rank]) for rank in range(world)]
    )
    ax.set_ylim(world, 0)
    ax.grid(axis="y", visible=False)
    shown = f"step {chosen[0]}" if len(chosen) == 1 else f"steps {chosen[0]} to {chosen[-1]}"
    handles = _legend(boxes, max(map(len, stages.values())))
    style.finish(fig, f"{run['arm']}: {shown} of run {run['run_id']}", _caption(run, steps, spans, ranks), handles)
    return fig


def _name(rank: int, stages: Sequence[int]) -> str:
    return f"rank {rank}\nstage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


def _work(row: Mapping[str, Any], stages: Sequence[int]) -> Box | None:
    """What a rank was busy with; waiting is left white."""
    seconds = row["end_s"] - row["start_s"]
    if row["phase"] in timeline.COMPUTE:
        shades = FORWARD if row["phase"] == "forward_compute" else BACKWARD
        colour = shades[min(stages.index(row["stage"]), len(shades) - 1)]
        return Box(row["rank"], WORK, row["start_s"], seconds, colour, str(row["microbatch"]))
    for colour, phases in OTHERS.values():
        if row["phase"] in phases:
            return Box(row["rank"], WORK, row["start_s"], seconds, colour)
    return None


def _on_links(sent: Iterable[timeline.Frame]) -> Iterable[Box]:
    for frame in sent:
        colour = FORWARD[0] if frame.direction == "forward" else BACKWARD[0]
        seconds = frame.arrived_s - frame.start_s
        yield Box(frame.sender, LINKS[frame.direction], frame.start_s, seconds, colour, "", not frame.seen)


def _draw(ax: Axes, boxes: Sequence[Box], start: float, end: float) -> None:
    point = (end - start) / (SIZE_IN[0] * 72)
    for box in boxes:
        low, height = box.rank + box.lane[0], box.lane[1]
        left, wide = 1e3 * (box.start - start), 1e3 * box.seconds
        face = "white" if box.hollow else box.colour
        # An outline would hide a bar that is thinner than it.
        edge = box.colour if box.hollow else "white"
        line = 0.6 if box.seconds > 4 * point else 0.0
        if box.hollow and not line:
            face = box.colour
        ax.add_patch(Rectangle((left, low), wide, height, facecolor=face, edgecolor=edge, linewidth=line))
        if box.text and box.seconds > (len(box.text) + 0.5) * 0.62 * LABEL_SIZE * point:
            dark = box.colour in (FORWARD[0], BACKWARD[0])
            ax.text(
                left + wide / 2, low + height / 2, box.text, size=LABEL_SIZE, color="white" if dark else "black",
                ha="center", va="center_baseline",
            )  # fmt: skip
    ax.set_xlim(0, 1e3 * (end - start))


def _legend(boxes: Sequence[Box], most: int) -> list[Any]:
    """What the chart has: colours of work, and of frames."""
    used = {(box.colour, box.hollow, box.lane == WORK) for box in boxes}
    entries: list[Any] = []
    for name, shades in (("forward", FORWARD), ("backward", BACKWARD)):
        for place, colour in enumerate(shades[:most]):
            which = "" if most == 1 else f", {PLACE[place]} stage"
            entries.append(Patch(facecolor=colour, label=f"{name}{which}"))
    entries += [
        Patch(facecolor=colour, label=name) for name, (colour, _) in OTHERS.items() if (colour, False, True) in used
    ]
    entries += [
        Patch(facecolor=shades[0], label=f"{name} frame,\non the link (thin)")
        for name, shades in (("forward", FORWARD), ("backward", BACKWARD))
        if {(shades[0], False, False), (shades[0], True, False)} & used
    ]
    if any(box.hollow for box in boxes):
        entries.append(Patch(facecolor="white", edgecolor=style.NOTE_COLOUR, label="hollow: arrival\nestimated"))
    return entries


def _caption(run: pd.Series, steps: pd.DataFrame, spans: pd.DataFrame, ranks: int) -> str:
    counted = steps[steps["measured"]] if steps["measured"].any() else steps
    numbers = sorted(set(counted["step"]))
    found = timeline.medians(timeline.fractions(spans, ranks), numbers)
    bubble, overlap, pieces = found["bubble_fraction"], found["overlap_fraction"], int(run["microbatches"])
    text = f"Experiment {run['experiment']}, part {run['part']}. Source: {COLUMNS}. Numbers: micro-batches; white: "
    text += "waiting. Thin bars: frames on the link of their sender, above forward, below backward. "
    text += f"Medians over {len(numbers)} {'measured ' if steps['measured'].any() else ''}steps: bubble {bubble:.0%}"
    if ranks > 1:
        text += f" (GPipe's ideal with {ranks} equal ranks and {pieces} micro-batches: "
        text += f"{timeline.ideal_bubble(ranks, pieces):.0%})"
    text += "." if overlap is None else f", overlap of transfers with work {overlap:.0%}."
    return text + ("" if run["fidelity"] == "ok" else f" The run was flagged: {run['fidelity']}.")
