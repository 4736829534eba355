"""How every figure looks: one colour, marker and line a method, derived from its label and nothing else.

A label begins with its family and then says its bits: `FP32`, `BF16`, `DirectQ 4 bits`, `AQ-SGD fw2 bw8`.
Direct quantisation is orange and dashed, AQ-SGD blue and solid, fewer bits lighter, one marker a width; a
variant of a width (backward bits other than 8, another cache) has a dash-dot line, and where its label says more than
bits a marker of its own. Any other label gets a colour outside these two ramps, chosen by a hash of its words; its
numbers choose marker and line. The palette keeps apart under protanopia, deuteranopia
and tritanopia (a test simulates them). A hollow marker is a run whose fidelity is not `ok`.

>>> method("AQ-SGD 4 bits").colour == method("aq-sgd fw4 bw8").colour
True
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

FORMATS = ("png", "pdf", "svg")
# Each format's own way of being told to leave out the time of day: same tables, same bytes.
METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None},
    "svg": {"Date": None},
}
RC: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8.0,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8.0,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "figure.titlesize": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.4,
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,
    "svg.hashsalt": "thinpipe",
}
PANEL_IN = (3.4, 2.7)  # one panel, width and height
LEGEND_IN = 1.6
CAPTION_SIZE = 6.5
TITLE_SIZE = 10.0

SOLID: tuple[float, ...] = ()
DASHED = (4.0, 1.6)
VARIANT = {"directq": (4.0, 1.2, 1.0, 1.2), "aqsgd": (9.0, 1.2, 1.0, 1.2)}
# Tried in turn at the start of a label.
FAMILIES = (
    ("fp32", r"fp32|none\b|uncompressed"),
    ("bf16", r"bf16"),
    ("fp16", r"fp16"),
    ("directq", r"direct(q|[ -]?quant[a-z]*)?|fixpoint"),
    ("aqsgd", r"a[qc][-_ ]?sgd|aq|delta"),
)
USUAL_WORDS = {"fw", "bw", "b", "bit", "bits"}
PLAIN = {"fp32": ("#000000", "o"), "bf16": ("#7F7F7F", "P"), "fp16": ("#B0B0B0", "d")}
#: By bits from 1 to 8, light to dark.
RAMPS = {
    "directq": ("#F7D08A", "#F0B040", "#EA8F1F", "#D55E00", "#BF5003", "#A84405", "#963905", "#7A2A04"),
    "aqsgd": ("#A9DAF5", "#6CBDEB", "#3A95D3", "#0072B2", "#00649F", "#00558B", "#004677", "#002F5C"),
}
BIT_MARKERS = "v^Ds<>ph"
FALLBACK_COLOURS = ("#009E73", "#CC79A7", "#8A6FB0", "#7A7A00", "#B5005A")
FALLBACK_MARKERS = ("*", "X", "^", "s", "D", "v", "p", "<", ">", "P", "d")
FALLBACK_DASHES = (SOLID, (6.0, 1.4), (2.5, 1.2), (6.0, 1.2, 1.0, 1.2, 1.0, 1.2))
# Chosen so that no two methods of one experiment that comes with the package look alike (a test holds it).
SALT = 94
NOTE_COLOUR = "#555555"


class Bar(NamedTuple):
    """A mean over n seeds and what its bar spans; low and high are NaN where there is no bar."""

    mean: float
    low: float
    high: float
    n: int


class Method(NamedTuple):
    """How a method is drawn. `order` sorts legends: FP32, 16 bits, direct, AQ-SGD, others."""

    label: str
    colour: str
    marker: str
    dashes: tuple[float, ...]
    order: tuple[Any, ...]


def method(label: str) -> Method:
    """Colour, marker and line of the method called `label`: the same whatever else a figure draws."""
    low = label.strip().lower()
    for rank, (family, pattern) in enumerate(FAMILIES):
        found = re.match(pattern, low)
        if found is None:
            continue
        rest = low[found.end() :]
        numbers = [int(text) for text in re.findall(r"\d+", rest)]
        if family in PLAIN:
            if rest.strip():
                break
            return Method(label, *PLAIN[family], SOLID, (rank, 0, label))
        if not numbers or not 1 <= numbers[0] <= 8:
            break
        more = not set(re.findall(r"[a-z]+", rest)) <= USUAL_WORDS or len(numbers) > 2
        usual = numbers[1:] in ([], [8]) and not more
        dashes = (DASHED if family == "directq" else SOLID) if usual else VARIANT[family]
        bits = numbers[0]
        marker = _by_text(rest)[1] if more else BIT_MARKERS[bits - 1]
        return Method(label, RAMPS[family][bits - 1], marker, dashes, (rank, bits, label))
    return Method(label, *_by_text(low), (len(FAMILIES), 0, label))


def _by_text(text: str) -> tuple[str, str, tuple[float, ...]]:
    """Colour, marker and line of what is no usual method: labels that differ in a small number alone look different."""
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    words = " ".join(re.findall(r"[^\W\d]+", text))
    pick = int.from_bytes(hashlib.sha256(f"{words}{SALT}".encode()).digest()[:4], "big")
    colour, rest = FALLBACK_COLOURS[pick % len(FALLBACK_COLOURS)], pick // len(FALLBACK_COLOURS)
    marker = FALLBACK_MARKERS[(rest + sum(numbers[-1:])) % len(FALLBACK_MARKERS)]
    dashes = FALLBACK_DASHES[(rest // len(FALLBACK_MARKERS) + sum(numbers[:-1]) // 2) % len(FALLBACK_DASHES)]
    return colour, marker, dashes


def methods(labels: Iterable[str]) -> list[Method]:
    """The methods of `labels`, each once, in legend order."""
    return sorted((method(label) for label in set(labels)), key=lambda m: m.order)


def context() -> AbstractContextManager[None]:
    """The settings every figure is made and saved under, whatever the caller's matplotlibrc says."""
    # The backend is the caller's (a notebook's, say): figures here are saved, never shown.
    settings: dict[Any, Any] = {key: value for key, value in mpl.rcParamsDefault.items() if key != "backend"}
    return mpl.rc_context(settings | RC)


def new_figure(
    rows: int, columns: int, panel_in: tuple[float, float] = PANEL_IN, *, legend_in: float = LEGEND_IN
) -> Figure:
    """A figure for rows x columns panels of panel_in inches, with room for a legend at the right."""
    size = (columns * panel_in[0] + legend_in, rows * panel_in[1] + 0.5)
    return Figure(figsize=size, layout="constrained")


def finish(fig: Figure, title: str, caption: str, handles: list[Artist]) -> None:
    """Add title, legend and caption; the caption is wrapped and has its own strip at the bottom."""
    width, height = fig.get_size_inches()
    beside = legend_width(handles)
    width += max(0.0, beside - LEGEND_IN)
    # A character of DejaVu Sans is 0.55 of its size wide, on average of a text like a caption.
    text = textwrap.fill(caption, width=int((width - 0.2) * 72 / (0.55 * CAPTION_SIZE)))
    strip = (text.count("\n") + 1) * CAPTION_SIZE * 1.3 / 72 + 0.12
    room = width - (max(beside, LEGEND_IN) if handles else 0.0) - 0.2
    title = textwrap.fill(title, width=max(20, int(room * 72 / (0.55 * TITLE_SIZE))))
    # Panels keep their height whatever the title takes.
    height += title.count("\n") * TITLE_SIZE * 1.3 / 72
    fig.set_size_inches(width, height + strip)
    share = strip / (height + strip)
    engine = fig.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    # The layout leaves no margin where a panel ends without a label.
    engine.set(rect=(0, share, 1 - 0.05 / width, 1 - share))
    fig.suptitle(title, x=0.01, ha="left")
    bottom = 0.06 / (height + strip)
    fig.text(0.1 / width, bottom, text, size=CAPTION_SIZE, color=NOTE_COLOUR, va="bottom", gid="caption")
    if handles:
        fig.legend(handles=handles, loc="outside right upper")


def legend_width(handles: Sequence[Artist]) -> float:
    """Inches that a legend of `handles` takes, about: its longest line and a mark before it."""
    longest = max((len(line) for entry in handles for line in str(entry.get_label()).splitlines()), default=0)
    return 0.55 * longest * RC["legend.fontsize"] / 72 + 0.45


def handle(m: Method) -> Line2D:
    """A method's entry in a legend."""
    line = m.dashes or (None, None)
    return Line2D([], [], color=m.colour, marker=m.marker, dashes=line, markersize=5, label=m.label)


def note(label: str, marker: str = "o", *, hollow: bool = False) -> Line2D:
    """A legend entry that explains a mark which is no method's."""
    face = "white" if hollow else NOTE_COLOUR
    return Line2D([], [], color=NOTE_COLOUR, linestyle="none", marker=marker, markerfacecolor=face, label=label)


def dodge(index: int, count: int, gap: float) -> float:
    """How far right of its x method `index` of `count` stands, so that equal values do not overlap."""
    return (index - (count - 1) / 2) * 0.5 * gap / count


def seeds(ax: Axes, m: Method, xs: Sequence[float], ys: Sequence[float], flagged: Sequence[bool]) -> None:
    """One small mark a seed; flagged ones hollow."""
    for flag in (False, True):
        chosen = [(x, y) for x, y, f in zip(xs, ys, flagged, strict=True) if bool(f) is flag]
        if chosen:
            hollow = {"markerfacecolor": "white", "markersize": 3.4, "markeredgewidth": 0.8}
            look = hollow if flag else {"markersize": 3.0, "alpha": 0.55}
            kx, ky = zip(*chosen, strict=True)
            ax.plot(kx, ky, m.marker, color=m.colour, zorder=3.5 if flag else 2, gid=f"seeds {m.label}", **look)


def seed_line(ax: Axes, m: Method, xs: Sequence[float], ys: Sequence[float], *, flagged: bool) -> None:
    """One seed of a curve: a thin line with a small mark at its end, hollow when flagged."""
    ax.plot(xs, ys, color=m.colour, lw=0.7, alpha=0.5, zorder=2, gid=f"seeds {m.label}")
    seeds(ax, m, xs[-1:], ys[-1:], [flagged] * len(xs[-1:]))


def means(
    ax: Axes,
    m: Method,
    xs: Sequence[float],
    bars: Sequence[Bar],
    flagged: Sequence[bool],
    *,
    size: float = 6,
    band: bool = False,
    marked: slice = slice(None),
) -> None:
    """The means over seeds, their line and bars (or a band, for curves); hollow where a run is flagged.

    marked: which of the means have a mark; all are on the line.
    """
    ys = [bar.mean for bar in bars]
    error = [[bar.mean - bar.low for bar in bars], [bar.high - bar.mean for bar in bars]]
    if band:
        ax.fill_between(xs, [b.low for b in bars], [b.high for b in bars], color=m.colour, alpha=0.09, lw=0)
    elif np.isfinite(error).any():
        ax.errorbar(xs, ys, yerr=error, fmt="none", color=m.colour, capsize=2, elinewidth=0.9, zorder=3)
    ax.plot(xs, ys, color=m.colour, dashes=m.dashes or (None, None), zorder=3, label=m.label)
    points = list(zip(xs, ys, flagged, strict=True))[marked]
    for flag in (False, True):
        chosen = [(x, y) for x, y, f in points if bool(f) is flag]
        if chosen:
            kx, ky = zip(*chosen, strict=True)
            face = "white" if flag else m.colour
            ax.plot(kx, ky, m.marker, color=m.colour, markerfacecolor=face, markersize=size, zorder=4)


def log_axis(axis: Axis, values: Sequence[float]) -> None:
    """Make `axis` logarithmic around `values` (above 0), with plain numbers, some even within one decade."""
    which = "x" if axis is axis.axes.xaxis else "y"
    axis.axes.set(**{f"{which}scale": "log"})
    if not len(values):
        return
    low, high = min(values) / 1.3, max(values) * 1.3
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = [digit * 10.0**exponent for exponent in decades for digit in range(1, 10)]
    fine = [tick for tick in every if low <= tick <= high]
    coarse = [tick for tick in fine if f"{tick:e}"[0] in "125"]
    ticks = coarse if len(coarse) >= 2 else fine or [math.sqrt(low * high)]
    axis.axes.set(**{f"{which}lim": (low, high)})
    axis.set_ticks(ticks, labels=[f"{tick:.6g}" for tick in ticks])
    axis.set_minor_locator(NullLocator())


def bytes_text(count: float) -> str:
    """A number of bytes as axes show it, in decimal units.

    >>> bytes_text(0), bytes_text(512), bytes_text(20_000), bytes_text(1.5e6)
    ('0', '512 B', '20 kB', '1.5 MB')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:g} {unit}"
    return f"{count:g} B" if count else "0"


FLAGGED = "hollow: flagged\n(runs.fidelity)"
DIVERGED = "diverged"


def notes(*, flagged: bool, diverged: bool = False) -> list[Artist]:
    """Legend entries for the marks that a figure has used."""
    entries: list[Artist] = []
    if flagged:
        entries.append(note(FLAGGED, hollow=True))
    if diverged:
        entries.append(note(DIVERGED, "x"))
    return entries


def save(fig: Figure, out_dir: Path, name: str, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write `fig` as NAME.png, .pdf and .svg (or `formats`), each whole or not at all; same tables, same bytes."""
    out_dir.mkdir(parents=True, exist_ok=True)
    paths = []
    # Laid out once: each format measures letters its own way, and would move what the one before it has placed.
    with context():
        fig.draw_without_rendering()
    fig.set_layout_engine("none")
    for kind in formats:
        path = out_dir / f"{name}.{kind}"
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            with context():
                fig.savefig(part, format=kind, metadata=METADATA[kind])
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        paths.append(path)
    return paths
