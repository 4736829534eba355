"""What tests of figures share: synthetic tables changed in one way, and what a drawn figure says."""

import itertools
import math

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox


def with_runs(tables, **columns):
    """The runs changed; the fidelity of what is composed of them too."""
    made = {"curves": tables["curves"].assign(fidelity=columns["fidelity"])} if "fidelity" in columns else {}
    return {**tables, **made, "runs": tables["runs"].assign(**columns)}


def only(tables, keep):
    return {**tables, "runs": tables["runs"][keep(tables["runs"])]}


def all_diverged(tables, *, steps):
    """Every run diverged in its step number `steps`: the last loss is inf, nothing was computed or evaluated."""
    short = tables["steps"][tables["steps"]["step"] < steps]
    last = (short["step"] == steps - 1) & short["train_loss"].notna()
    lost = dict.fromkeys(("step_time_s", "samples_per_s", "final_train_loss", "final_eval_loss"), math.nan)
    return with_runs(tables, state="diverged", **lost) | {
        "steps": short.assign(train_loss=short["train_loss"].where(~last, math.inf)),
        "transfers": tables["transfers"].head(0),
        "evals": tables["evals"].head(0),
        "curves": tables["curves"].head(0),
    }


def without_numbers(tables, value):
    """Every measured number is `value`, nan or inf; settings, counts and states stay."""
    changed = {}
    for name, frame in tables.items():
        floats = [c for c in frame.select_dtypes("float").columns if c != "rate_mbit"]
        changed[name] = frame.assign(**dict.fromkeys(floats, value))
    return changed


def few(tables, *others):
    """Two methods and `others`, two seeds and one network of an experiment's tables: quick to draw."""
    curves = tables["curves"]
    fewer = {**tables, "curves": curves[curves["rate_mbit"] == 100]}
    arms = ("FP32", "AQ-SGD fw4 bw8", *others)
    return only(fewer, lambda r: (r["seed"] < 2) & r["arm"].isin(arms) & (r["rate_mbit"] == 100))


def made(figures) -> Figure:
    """The only figure of `figures`, not laid out: for what it says."""
    ((_, fig),) = figures
    return fig


def drawn(figures) -> Figure:
    """The only figure of `figures`, laid out and drawn as when it is saved."""
    fig = made(figures)
    FigureCanvasAgg(fig).draw()
    return fig


def caption_of(fig):
    (text,) = [t.get_text() for t in fig.texts if t.get_gid() == "caption"]
    return text.replace("\n", " ")


def legend_of(fig):
    return {} if not fig.legends else {t.get_text(): h for t, h in _entries(fig.legends[0])}


def _entries(legend):
    return zip(legend.get_texts(), legend.legend_handles, strict=True)


def words(fig):
    axes = [t for ax in fig.axes for t in (ax.get_title(), ax.get_xlabel(), ax.get_ylabel())]
    return [*axes, *legend_of(fig), fig.get_suptitle(), caption_of(fig)]


def hollow_marks(fig):
    lines = [line for ax in fig.axes for line in ax.get_lines()]
    return sum(line.get_marker() != "None" and to_hex(line.get_markerfacecolor()) == "#ffffff" for line in lines)


def cell_texts(fig):
    return [t.get_text() for ax in fig.axes for t in ax.texts if t.get_size() > 6]


def check_layout(fig):
    """Nothing outside the figure, and neither panels, legend, title nor caption over one another."""
    renderer = fig.canvas.get_renderer()  # drawn with Agg
    panels = [ax.get_tightbbox(renderer) for ax in fig.axes]
    boxes = panels + [legend.get_window_extent(renderer) for legend in fig.legends]
    boxes += [t.get_window_extent(renderer) for t in fig.texts]
    for box in boxes:
        assert box.x0 >= fig.bbox.x0 - 1
        assert box.y0 >= fig.bbox.y0 - 1
        assert box.x1 <= fig.bbox.x1 + 1
        assert box.y1 <= fig.bbox.y1 + 1
    for one, other in itertools.combinations(boxes, 2):
        shared = Bbox.intersection(one, other)
        assert shared is None or min(shared.width, shared.height) < 2, (one, other)
