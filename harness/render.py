"""views.py's data as text for people, with rich."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from thinpipe.harness.dotted import flat
from thinpipe.harness.metrics import SCORES
from thinpipe.harness.progress import duration

STATE_STYLES = {
    "done": "green",
    "diverged": "magenta",
    "failed": "red",
    "stale": "yellow",
    "foreign": "yellow",
    "pending": "cyan",
}
WIDE = 200


def console() -> Console:
    """Standard output; where it is no terminal, wide enough that no column is cut."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=WIDE)


def plan(data: Mapping[str, Any]) -> None:
    """The plan's runs in order and what it comes to."""
    rows = [
        [
            run["run_id"],
            run["part"],
            " = ".join(use["arm"] for use in run["uses"] if use["part"] == run["part"]),
            _rate(run["rate_mbit"]),
            run["seed"],
            _state(run["state"]),
            duration(run["predicted_s"]) if run["todo"] else "",
            f"{max(run['memory_mib'])} MiB",
            run["note"],
        ]
        for run in data["runs"]
    ]
    _table(["run", "part", "arm", "Mbit/s", "seed", "state", "predicted", "a rank", "note"], rows)
    counts = ", ".join(f"{number} {state}" for state, number in data["counts"].items())
    todo = f"{data['todo']} to do, {duration(data['todo_s'])}" if data["todo"] else "nothing to do"
    _line(f"{data['experiment']}: {len(rows)} runs ({counts}); {todo}.")


def cells(data: Sequence[Mapping[str, Any]]) -> None:
    """The results table: one row a cell; a column of settings where cells of one part and arm differ in any."""
    varied = any(cell["varies"] for cell in data)
    scores = [name for name in (f"final_{score}" for score in SCORES) if any(cell[name] is not None for cell in data)]
    rows = [
        [
            cell["part"],
            cell["arm"],
            *([_varied(cell["varies"])] if varied else []),
            _rate(cell["rate_mbit"]),
            _number(cell["step_time_s"], 1e3, ".1f"),
            _number(cell["samples_per_s"], 1, ".1f"),
            _ratio(cell["measured_compression_ratio"]),
            _loss(cell, "final_train_loss"),
            _loss(cell, "final_eval_loss"),
            *(_loss(cell, name) for name in scores),
            f"{cell['seeds']}/{cell['of']}",
            ", ".join([*cell["states"], *cell["flags"]]),
        ]
        for cell in data
    ]
    headers = [
        "part",
        "arm",
        *(["setting"] if varied else []),
        "Mbit/s",
        "step ms",
        "samples/s",
        "ratio",
        "training loss",
        "held-out loss",
        *(name.removeprefix("final_") for name in scores),
        "seeds",
        "",
    ]
    _table(headers, rows)
    if any(cell["seeds"] > 1 for cell in data):
        _line("Over seeds: medians; losses as mean ± half their range.")
    _line("ratio = raw bytes / frame bytes, over the measured steps.")
    if any(cell["measure"] == "convergence" for cell in data):
        _line("Parts that measure convergence have no step time: errors are sampled within their steps.")


def status(data: Sequence[Mapping[str, Any]]) -> None:
    """How far each experiment is."""
    if not data:
        _line("no results yet")
    for item in data:
        counts = ", ".join(f"{number} {state}" for state, number in item["counts"].items())
        _line(f"{item['experiment']}: {item['total']} runs: {counts}")
        if item["running"]:
            run = item["running"]
            _line(f"  running: {_who(run)}, for {duration(run['elapsed_s'])} (process {run['pid']})")
        for run in item["cut_short"]:
            _line(f"  cut short, will be begun anew: {_who(run)}")
        for run in item["failures"]:
            _line(f"  {run['state']}: {_who(run)}: {run['error']}")
        for note in item["notes"]:
            _line(f"  {note}")


def run(data: Mapping[str, Any]) -> None:
    """One run: settings asked for beside those in force, how it ended, last lines of its logs."""
    _line(f"run {data['run_id']} in {data['folder']}: {data['state']}")
    for use in data["uses"]:
        _line(f"  used by {use['experiment']} / {use['part']} / {use['arm']}")
    found = data["status"] or {}
    for name in ("error", "started_at", "ended_at", "wall_s", "machine", "fidelity", "totals", "links"):
        if found.get(name) is not None:
            _line(f"  {name}: {found[name]}")
    if data["note"]:
        _line(f"  {data['note']}")
    _line("\nsettings (defaults left out)")
    for key, value in flat(data["spec"]).items():
        _line(f"  {key} = {value}")
    _settings(data["settings"])
    for name, lines in data["logs"].items():
        _line(f"\nlast lines of {name}")
        for line in lines:
            _line(f"  {line}")
    if found.get("detail"):
        _line(f"\ndetail\n{found['detail']}")


def _settings(rows: Sequence[Mapping[str, Any]]) -> None:
    """Requested settings beside what was read back: once where all ranks agree, else rank by rank."""
    if rows:
        shown = [[row["setting"], _word(row["requested"]), _in_force(row["in_force"])] for row in rows]
        _line("")
        _table(["setting", "requested", "in force"], shown)


def _in_force(found: Mapping[str, Any]) -> str:
    if set(found) <= {"all"}:
        return _word(found.get("all"))
    return "; ".join(f"{rank}: {_word(value)}" for rank, value in found.items())


def listing(data: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """What there is, by kind."""
    for kind, items in data.items():
        _line(kind)
        for item in items:
            about = item.get("summary") or ", ".join(
                f"{key} {value}" for key, value in item.items() if key != "name" and value is not None
            )
            _line(f"  {item['name']:<24} {about}")


def checks(data: Sequence[Mapping[str, Any]]) -> None:
    """What doctor found, and what to do about it."""
    for check in data:
        mark = {True: "ok", False: "FAIL" if check["required"] else "warn"}[check["ok"]]
        _line(f"{mark:<5} {check['name']:<22} {check['found']}")
        if not check["ok"] and check["advice"]:
            _line(f"{'':<6}{'':<22} -> {check['advice']}")


def _table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, header in enumerate(headers):
        numeric = any(isinstance(row[index], (int, float)) for row in rows)
        table.add_column(header, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(v if isinstance(v, Text) else escape("" if v is None else str(v)) for v in row))
    console().print(table)


def _line(text: str) -> None:
    console().print(text, markup=False, soft_wrap=True)


def _word(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def _state(state: str) -> Text:
    return Text(state, style=STATE_STYLES.get(state, ""))


def _who(run: Mapping[str, Any]) -> str:
    return f"{run['run_id']} ({run['part']} / {run['arm']} / seed {run['seed']})"


def _rate(rate: float | None) -> str:
    return "no limit" if rate is None else f"{rate:g}"


def _varied(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={'none' if value is None else value}" for key, value in settings.items())


def _ratio(value: float | None) -> str:
    """Three decimals below 1: a frame's header makes the ratio of `none` a little less than 1."""
    return "" if value is None else format(value, ".3f" if value < 1 else ".2f")


def _number(value: float | None, scale: float, form: str) -> str:
    return "" if value is None else format(value * scale, form)


def _loss(cell: Mapping[str, Any], name: str) -> str:
    mean, half = cell[name], cell[f"{name}_half_range"]
    if mean is None:
        return ""
    return f"{mean:.3f}" if half is None else f"{mean:.3f} ± {half:.3f}"


def fetched(data: Sequence[Mapping[str, Any]]) -> None:
    """What there is to fetch, and where it is."""
    rows = [[d["name"], d["purpose"], d["licence"], f"{d['download_mb']} MB", d["path"] or "not here"] for d in data]
    _table(["name", "purpose", "licence", "download", "folder"], rows)


def pretrained(data: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """The recipes, or what one has made."""
    for item in [data] if isinstance(data, Mapping) else data:
        for key, value in item.items():
            _line(f"{key}: {_word(value)}")


def partitioned(data: Mapping[str, Any]) -> None:
    """The files of a partition."""
    rows = [
        [f["file"], "-".join(map(str, f["blocks"])), f["tensors"], f"{f['bytes'] / 2**20:.1f} MiB"]
        for f in data["files"]
    ]
    _table(["file", "blocks", "tensors", "size"], rows)
    for name, why in (("fresh", "not in the checkpoint, to be drawn at random"), ("unused", "not in the model")):
        if data.get(name):
            _line(f"{why}: {_word(data[name])}")
    _line(f"wrote {data['out']}")


def merged(data: Mapping[str, Any]) -> None:
    """What a merge wrote."""
    for key, value in data.items():
        if value is not None:
            _line(f"{key}: {_word(value)}")


def codecs(data: Sequence[Mapping[str, Any]]) -> None:
    """Every codec and memory."""
    rows = [
        [
            item["form"],
            item["example"],
            f"{item['bits_per_element']:g}",
            item["formula"] or "",
            _bias(item),
            item["state"],
            item["source"],
        ]
        for item in data
    ]
    _table(["codec or memory", "for example", "bits", "formula", "mean", "keeps", "source"], rows)
    _line("bits: an element of a large message, without header and first visits; `thinpipe codecs NAME` says more.")


def _bias(item: Mapping[str, Any]) -> str:
    if item["exact"] or item["unbiased"]:
        return "exact" if item["exact"] else "unbiased"
    return f"unbiased if {item['unbiased_when']}" if item["unbiased_when"] else "biased"


def presets(data: Sequence[Mapping[str, Any]]) -> None:
    """The presets of `compression`."""
    names = ("name", "forward", "backward", "warmup_epochs", "evaluation", "source", "summary")
    _table(
        ["preset", "forward", "backward", "warm-up", "evaluation", "source", ""], [[d[n] for n in names] for d in data]
    )
    _line('Use one as compression.preset = "NAME".')


def codec(data: Mapping[str, Any]) -> None:
    """One codec, memory or preset in full."""
    for key, value in data.items():
        if key not in ("parameters", "contract", "uses") and value is not None:
            _line(f"{key}: {_word(value)}")
    if data.get("uses"):
        _line(f"uses: {_word(data['uses'])}")
    if data.get("parameters"):
        _line("")
        names = ("name", "place", "values", "default")
        rows = [[*(p[n] for n in names), "; ".join(p["notes"])] for p in data["parameters"]]
        _table(["parameter", "written as", "values", "default", ""], rows)
    if data.get("contract"):
        _line("\nheld by the contract suite to (harness/compression/__init__.py says what the words mean)")
        for text, bounds in data["contract"].items():
            _line(f"  {text}: {', '.join(f'{key} {value}' for key, value in bounds.items()) or 'exact'}")


def measured(data: Sequence[Mapping[str, Any]]) -> None:
    """What compressors made of tensors (views.measured), a table a source."""
    for source in dict.fromkeys(row["source"] for row in data):
        own = [row for row in data if row["source"] == source]
        kinds = sorted({kind for row in own for kind in row["kinds"]})
        headers = ["compressor", *(f"{kind} {what}" for kind in kinds for what in ("bits", "dB", "bias"))]
        rows = []
        for row in own:
            cells: list[Any] = [row["compressor"]]
            for kind in kinds:
                found = row["kinds"].get(kind)
                error = "" if found is None else "exact" if found["error_db"] is None else f"{found['error_db']:.1f}"
                cells += ["", "", ""] if found is None else [f"{found['bits']:.2f}", error, f"{found['bias']:+.4f}"]
            rows.append([*cells, f"{row['encode_melem_s']:.0f}", f"{row['decode_melem_s']:.0f}"])
        _line(f"{source}")
        _table([*headers, "encode M/s", "decode M/s"], rows)
    _line("bits: an element, header included; dB: of |decoded - x| / |x|; bias: mean error / mean |x|;")
    _line("M/s: million elements a second on one thread. Memories: at the last of several visits.")
