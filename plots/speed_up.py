"""How much faster a whole training is than a step: speed-up against the number of epochs, by method and link rate.

With W of E epochs uncompressed, a step that is s times faster makes the whole E / (W + (E - W) / s) times faster: at
most s, and at most E / W.
"""

from __future__ import annotations

import functools

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from thinpipe.plots import _composed, style
from thinpipe.plots import _select as select
from thinpipe.plots.style import Bar

VERSION = 1
SUMMARY = "speed-up of a training with uncompressed epochs against its number of epochs, of measured step times"
SOURCE = "AC-SGD, arXiv 2206.01299, abstract; E / (W + (E - W) / s) worked out"
PARAMETERS: dict = {}
REQUIRES = ("runs",)
NAME = "speed_up"
COLUMNS = "table runs (rate_mbit, step_time_s, arm, seed, forward, backward, warmup_epochs, fidelity)"
EPOCHS = (1, 2, 3, 4, 5, 7, 10, 14, 20, 30, 50, 100)
MARKED = 10
# s, and the speed-up that the abstract states for it. 8.5 is the authors' own; 6.8 is a ratio of unverified values.
HEADLINES = ((8.5, 4.9, "s = 8.5"), (6.8, 4.3, "s = 6.8, unverified"))


def figures(tables: select.Tables) -> select.Drawn:
    return select.per_part(NAME, select.timed(tables), functools.partial(_figure, tables))


def whole(s: float, epochs: float, warmup: float) -> float:
    """How much faster `epochs` epochs are, `warmup` of them (or all, if fewer) uncompressed, a step being s times
    faster.

    >>> round(whole(6.8, 10, 1), 1), round(whole(8.5, 10, 1), 1)
    (4.3, 4.9)
    """
    warmup = min(warmup, epochs)
    return epochs / (warmup + (epochs - warmup) / s)


def _figure(tables: select.Tables, part: str, runs: pd.DataFrame) -> Figure:
    select.one_setting(runs, ["arm", "rate_mbit"])
    base = _composed.baseline(runs)
    arms = [arm for arm in style.methods(runs["arm"]) if arm.label != base] or style.methods([base])
    declared = int(runs["warmup_epochs"].max())
    warmup = max(1, declared)
    rates = list(runs.groupby("rate_mbit", dropna=False))
    fig = style.new_figure(1, 1 + len(rates), (2.7, 2.9))
    first, *axes = fig.subplots(1, 1 + len(rates), squeeze=False, sharex=True, sharey=True)[0]
    tops = [_worked_out(first)]
    counts: list[int] = []
    for ax, (rate, here) in zip(axes, rates, strict=True):
        ratios = _ratios(here, base, arms)
        _measured(ax, ratios, here, warmup)
        ax.set_title(select.rate_text(float(str(rate)), "Mbit/s"))
        counts += [bar.n for bar, _ in ratios.values()]
        tops += [bar.mean for bar, _ in ratios.values()]
    _axes([first, *axes], max(tops))
    points = f"at {MARKED} epochs small points: seeds, large: their mean; bands"
    text = select.caption(tables, part, COLUMNS, counts, timing=True, points=points)
    text += f" s: step time of {base} / step time, paired by seed. W = {warmup} uncompressed epoch(s)"
    text += "" if declared else ", as published: timed runs declare none"
    text += ". Worked out: of stated s, not of runs. Dotted: the limit E / W."
    handles = [*map(style.handle, arms), *_notes(runs)]
    style.finish(fig, f"Speed-up of a whole training over {base}, part {part}", text, handles)
    return fig


def _ratios(
    here: pd.DataFrame, base: str, arms: list[style.Method]
) -> dict[style.Method, tuple[Bar, dict[int, float]]]:
    """By method at one rate: s with its interval, and s of each seed."""
    times = {arm: dict(zip(own["seed"], own["step_time_s"], strict=True)) for arm, own in here.groupby("arm")}
    slow = times.get(base, {})
    found = {}
    for arm in arms:
        own = times.get(arm.label, {})
        if (bar := select.ratio_bar(slow, own)) is not None:
            found[arm] = bar, {seed: slow[seed] / own[seed] for seed in slow.keys() & own.keys()}
    return found


def _measured(
    ax: Axes, ratios: dict[style.Method, tuple[Bar, dict[int, float]]], here: pd.DataFrame, warmup: int
) -> None:
    """A curve a method, marked where the paper states its numbers."""
    marked = EPOCHS.index(MARKED)
    lines = []
    for arm, (bar, by_seed) in ratios.items():
        flagged = any(select.flagged(here[here["arm"] == arm.label]))
        bars = [
            Bar(whole(bar.mean, e, warmup), whole(bar.low, e, warmup), whole(bar.high, e, warmup), bar.n)
            for e in EPOCHS
        ]
        seeds = [whole(s, MARKED, warmup) for s in by_seed.values()]
        style.seeds(ax, arm, [MARKED] * len(seeds), seeds, [flagged] * len(seeds))
        style.means(ax, arm, EPOCHS, bars, [flagged] * len(bars), band=True, marked=slice(marked, marked + 1))
        lines.append((f"s = {bar.mean:.2f}, at {MARKED} epochs {bars[marked].mean:.2f}", arm.colour))
    _write(ax, lines)
    _limit(ax, warmup)


def _worked_out(ax: Axes) -> float:
    """The published numbers beside what the formula makes of them; returns the largest speed-up drawn."""
    ends = []
    for s, stated, _ in HEADLINES:
        curve = [whole(s, epochs, 1) for epochs in EPOCHS]
        ax.plot(EPOCHS, curve, color=style.NOTE_COLOUR, lw=1.0, zorder=2)
        ax.plot(MARKED, stated, "x", color="black", markersize=6, markeredgewidth=1.5, zorder=5, gid="stated")
        ends.append(curve[-1])
    _write(ax, [(f"{label}: {whole(s, MARKED, 1):.2f}", "black") for s, _, label in HEADLINES])
    _limit(ax, 1)
    ax.set_title("worked out, W = 1")
    return max(ends)


def _write(ax: Axes, lines: list[tuple[str, str]]) -> None:
    """Lines of text where no curve can be: above the limit, for few epochs."""
    for i, (text, colour) in enumerate(lines):
        ax.text(0.03, 0.985 - 0.055 * i, text, transform=ax.transAxes, size=6, color=colour, va="top")


def _limit(ax: Axes, warmup: int) -> None:
    ends = [warmup, EPOCHS[-1]]
    ax.plot(ends, [epochs / warmup for epochs in ends], color=style.NOTE_COLOUR, dashes=(1.0, 1.6), lw=1.0, zorder=1)


def _axes(axes: list[Axes], top: float) -> None:
    axes[0].set_ylabel("speed-up of the whole training (log scale)")
    style.log_axis(axes[0].xaxis, EPOCHS)
    # Room above the curves for what is written there.
    style.log_axis(axes[0].yaxis, [1 / 1.1, 2.6 * top])
    for ax in axes:
        ax.set_xlabel("epochs E (log scale)")


def _notes(runs: pd.DataFrame) -> list[Artist]:
    limit = Line2D([], [], color=style.NOTE_COLOUR, dashes=(1.0, 1.6), label="limit E / W")
    stated = Line2D([], [], color="black", marker="x", linestyle="none", label="4.9 and 4.3, as\nthe abstract states")
    return [limit, stated, *style.notes(flagged=any(select.flagged(runs)))]
