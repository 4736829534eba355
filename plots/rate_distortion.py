"""What compressors make of boundary tensors: bits an element against error, a curve a compressor's rates."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from thinpipe.harness.errors import UserError
from thinpipe.plots import style

VERSION = 1
SUMMARY = "error in dB against bits an element, a curve a compressor, a row a model, activations beside gradients"
SOURCE = "thinpipe"
PARAMETERS: dict = {"of_codecs": True}
REQUIRES = ("rate_distortion",)
NAME = "rate_distortion"
COLUMNS = "table rate_distortion (source, kind, curve, codec, compressor, bits_per_element, elements, error_db)"
KINDS = {"activation": "activations", "gradient": "activation gradients", "tensor": "tensors"}
#: Decibels that one bit more takes off the error of a Gaussian source at best.
GAUSSIAN = 20 * np.log10(2)
ENTRY_IN = 0.17
# By the codec inside: kept apart under colour blindness by lightness and mark.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#8A6FB0", "#7A7A00", "#B5005A", "#56B4E9", "#E69F00")
MARKERS = "osD^v<>phdX*P8H"
CODECS = (
    "none", "fixpoint", "blockwise", "grid", "topk", "minmax", "kmeans", "lowrank", "randk", "lossless", "fp8", "nf4",
    "mxfp4", "bf16", "fp16",
)  # fmt: skip
# By what is around it, or how it is told to work: dashes and a mark; the plain codec has a solid line and its own mark.
WAYS = (
    ((5.0, 1.5), "o"), ((1.5, 1.2), "P"), ((6.0, 1.5, 1.5, 1.5), "X"), ((3.0, 1.0), "*"), ((8.0, 2.0), "d"),
    ((4.0, 1.0, 1.0, 1.0, 1.0, 1.0), "8"), ((2.5, 2.5), "H"),
)  # fmt: skip


def figures(tables: Mapping[str, pd.DataFrame]) -> list[tuple[str, Figure]]:
    with style.context():
        return [(NAME, _figure(points(tables["rate_distortion"])))]


def points(rows: pd.DataFrame) -> pd.DataFrame:
    """A point a source, kind and compressor: bits over all tensors, mean of their errors in dB; exact ones left out."""
    keys = ["source", "kind", "curve", "codec", "compressor"]
    finite = rows[np.isfinite(rows["error_db"].astype(np.float64)) & np.isfinite(rows["bits_per_element"])]
    if finite.empty:
        raise UserError("nothing to draw for rate_distortion: it needs a compressor that is not exact.")
    weighed = finite.assign(bits=finite["bits_per_element"] * finite["elements"])
    found = weighed.groupby(keys, as_index=False).agg({"bits": "sum", "elements": "sum", "error_db": "mean"})
    return found.assign(bits=found["bits"] / found["elements"]).sort_values("bits")


def _figure(found: pd.DataFrame) -> Figure:
    sources, kinds = sorted(set(found["source"])), [kind for kind in KINDS if kind in set(found["kind"])]
    looks = _looks(found)
    # As high as the legend is, at least.
    fig = style.new_figure(len(sources), len(kinds), (4.6, max(3.6, ENTRY_IN * len(looks) / len(sources))))
    axes = fig.subplots(len(sources), len(kinds), squeeze=False, sharey="row")
    for row, source in zip(axes, sources, strict=True):
        for ax, kind in zip(row, kinds, strict=True):
            _panel(ax, found[(found["source"] == source) & (found["kind"] == kind)], looks)
            ax.set_title(f"{source}: {KINDS[kind]}")
            ax.set_xlabel("bits an element, header included")
        row[0].set_ylabel("error |decoded - x| / |x| (dB)")
    text = (
        f"Source: {COLUMNS}. Lower left is better. Bits over all boundaries together, errors their mean in dB, one "
        "run, no interval. Memories on the last of several visits. Exact compressors are not drawn. Gradients at a "
        "ReLU's output: where that is not zero. Thin line: no code of a Gaussian source is below it."
    )
    handles: list[Any] = [
        Line2D([], [], color=look["color"], marker=look["marker"], dashes=look["dashes"], markersize=4.5, label=name)
        for name, look in looks.items()
    ]
    style.finish(fig, "Bits against error at the boundaries", text, handles)
    return fig


def _panel(ax: Axes, here: pd.DataFrame, looks: Mapping[str, Mapping[str, Any]]) -> None:
    if here.empty:
        ax.text(0.5, 0.5, "nothing measured", transform=ax.transAxes, ha="center", color=style.NOTE_COLOUR)
        return
    for name, own in here.groupby("curve"):
        look = looks[str(name)]
        ax.plot(own["bits"], own["error_db"], label=str(name), markersize=4.5, lw=1.1, **look)
    low, high = float(here["bits"].min()) / 1.3, float(here["bits"].max()) * 1.3
    bits = np.geomspace(low, high, 100)
    ax.plot(bits, -GAUSSIAN * bits, color=style.NOTE_COLOUR, lw=0.7, zorder=1)
    ax.set_xscale("log", base=2)
    ax.set_xlim(low, high)
    floor, top = float(here["error_db"].min()), float(here["error_db"].max())
    ax.set_ylim(max(floor, -60.0) - 3, top + 3)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())


def _looks(found: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Colour of each curve by its codec, dashes and mark by what is around or inside it; in legend order."""
    pairs = sorted(set(zip(found["codec"], found["curve"], strict=True)), key=lambda pair: (_rank(pair[0]), pair))
    ways = sorted({way for codec, curve in pairs if (way := _way(codec, curve))})
    looks = {}
    for codec, curve in pairs:
        rank, way = _rank(codec), _way(codec, curve)
        dashes, marker = WAYS[ways.index(way) % len(WAYS)] if way else ((None, None), MARKERS[rank % len(MARKERS)])
        looks[curve] = {"color": COLOURS[rank % len(COLOURS)], "marker": marker, "dashes": dashes}
    return looks


def _rank(codec: str) -> int:
    return CODECS.index(codec) if codec in CODECS else len(CODECS) + sum(map(ord, codec)) % len(COLOURS)


def _way(codec: str, curve: str) -> str:
    """What a curve is besides its codec: "delta", "mask=forward", or nothing."""
    return re.sub(rf"(?<![\w-]){re.escape(codec)}(?![\w-])", "", curve).strip("()")
