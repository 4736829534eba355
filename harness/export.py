"""A result set as a table for a paper, a README or a spreadsheet: LaTeX (booktabs), Markdown, CSV.

The summary has a row a cell (part, arm, setting) and a column a number of runs: its mean over seeds and the half width
of its 95 % Student t interval. `*` marks a mean that a flagged run has a part in; runs that failed or diverged have
none, and are counted. Pure but for `export`.

>>> latex("50 % of A_B & C"), markdown("a|b")
('50 \\\\% of A\\\\_B \\\\& C', 'a\\\\|b')
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinpipe.harness.errors import UserError, near_miss
from thinpipe.harness.resultset import ResultSet, find, load
from thinpipe.harness.stats import Interval, interval
from thinpipe.harness.summarised import CellRuns, cells, metric_of

FORMATS = ("latex", "markdown", "csv")
LEVEL = 0.95
#: A half width below this share of its mean is rounding.
ROUNDING = 1e-9
#: Numbers of the summary unless others are asked for; of these the ones that any run has.
COLUMNS = (
    "step_time_s", "samples_per_s", "final_train_loss", "final_eval_loss", "final_accuracy",
    "measured_compression_ratio",
)  # fmt: skip
CLAIM_COLUMNS = ("experiment", "claim", "state", "value", "must be", "interval", "n", "source", "sentence")
SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
}  # fmt: skip


@dataclass(frozen=True)
class Mean:
    """A number of a cell over its seeds; flagged: whether a run with a part in it is."""

    found: Interval
    flagged: bool


def export(path: str | Path, fmt: str, columns: Sequence[str] = (), *, claims: bool = False) -> str:
    """The summary, or the `claims`, of the result sets in `path`, as one text. UserError on an unknown format or
    column."""
    if fmt not in FORMATS:
        raise UserError(f"unknown format {fmt!r}.{near_miss(fmt, FORMATS)}")
    sets = [load(folder) for folder in find([Path(path)])]
    if claims:
        return _claims([claim for found in sets for claim in found.claims], fmt)
    if fmt == "csv":
        return _summary_csv(sets, columns)
    return "\n".join(summary(found, fmt, columns) for found in sets)


def summary(found: ResultSet, fmt: str, columns: Sequence[str] = ()) -> str:
    """The summary table of one set."""
    if fmt == "csv":
        return _summary_csv([found], columns)
    chosen = list(columns) or _filled(found, COLUMNS)
    rows = [(cell, [_mean(cell, name) for name in chosen]) for cell in cells(found)]
    settings = any(cell.settings for cell, _ in rows)
    head = ["part", "arm", *(["setting"] if settings else []), *map(_heading, chosen), "seeds"]
    body = [
        [cell.part, cell.arm, *([cell.label] if settings else []), *(_text(mean) for mean in means), _seeds(cell)]
        for cell, means in rows
    ]
    numeric = len(head) - len(chosen) - 1
    note = "Mean and half of its 95 % Student t interval over seeds"
    note += "; *: a flagged run has a part in it." if any(m and m.flagged for _, means in rows for m in means) else "."
    return _table(fmt, f"{found.title} ({found.name}). {note}", head, body, numeric)


def _filled(found: ResultSet, names: Sequence[str]) -> list[str]:
    return [name for name in names if any(cell.values(metric_of(name), flagged=True) for cell in cells(found))]


def _mean(cell: CellRuns, name: str) -> Mean | None:
    values = cell.values(metric_of(name), flagged=True)
    if not values:
        return None
    flagged = metric_of(name).is_time and any(cell.runs[seed]["fidelity"] != "ok" for seed in values)
    return Mean(interval([values[seed] for seed in sorted(values)], LEVEL), flagged)


def _heading(name: str) -> str:
    unit = metric_of(name).unit
    return f"{name} ({unit})" if unit else name


def _text(mean: Mean | None) -> str:
    if mean is None:
        return ""
    low = mean.found.low
    text = plus_minus(mean.found.mean, None if low is None else mean.found.mean - low)
    return f"{text}*" if mean.flagged else text


def plus_minus(value: float, half: float | None) -> str:
    """A mean to the second digit of its half width; to four digits where there is none.

    >>> plus_minus(12.3456, 0.0789), plus_minus(12.3456, None), plus_minus(3000.0, 250.0), plus_minus(0.5, 0.0)
    ('12.346 ± 0.079', '12.35', '3000 ± 250', '0.5 ± 0')
    """
    if half is None:
        return f"{value:.4g}"
    if half <= ROUNDING * abs(value):
        return f"{value:.4g} ± 0"
    decimals = max(0, 1 - math.floor(math.log10(half)))
    return f"{value:.{decimals}f} ± {half:.{decimals}f}"


def _seeds(cell: CellRuns) -> str:
    """How many runs ended well, and what became of the others."""
    others = [f"{count} {state}" for state in ("diverged", "failed", "foreign") if (count := cell.count(state))]
    return ", ".join([str(cell.count("done")), *others])


def _summary_csv(sets: Sequence[ResultSet], columns: Sequence[str]) -> str:
    """One table of all sets: a column names the experiment."""
    chosen = list(columns) or [name for name in COLUMNS if any(_filled(found, [name]) for found in sets)]
    parts, states = ("", "_low", "_high", "_n", "_flagged"), ("done", "diverged", "failed")
    head = ["experiment", "part", "arm", "setting", *states, *(f"{name}{p}" for name in chosen for p in parts)]
    body = []
    for found in sets:
        for cell in cells(found):
            line: list[Any] = [found.name, cell.part, cell.arm, cell.label, *(cell.count(state) for state in states)]
            for mean in (_mean(cell, name) for name in chosen):
                line += [""] * len(parts) if mean is None else [*mean.found[:4], mean.flagged]
            body.append(line)
    return _csv(head, body)


def _claims(claims: Sequence[Mapping[str, Any]], fmt: str) -> str:
    from thinpipe.harness.report.page import must_be, number, span

    if fmt == "csv":
        keys = (
            "experiment",
            "claim",
            "state",
            "value",
            "relation",
            "bound",
            "interval",
            "n",
            "needs",
            "source",
            "sentence",
        )
        return _csv(keys, [[claim.get(key) for key in keys] for claim in claims])
    rows = [
        [
            *(str(claim.get(key) or "") for key in ("experiment", "claim", "state")),
            number(claim.get("value")),
            must_be(claim),
            span(claim.get("interval")),
            *(str(claim.get(key) or "") for key in ("n", "source", "sentence")),
        ]
        for claim in claims
    ]
    return _table(fmt, "Claims, with their 90 % intervals.", list(CLAIM_COLUMNS), rows, len(CLAIM_COLUMNS))


def _csv(head: Sequence[str], body: Sequence[Sequence[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(["" if value is None else value for value in line] for line in body)
    return out.getvalue()


def _table(fmt: str, note: str, head: Sequence[str], body: Sequence[Sequence[str]], numeric: int) -> str:
    """numeric: the first column that is set to the right."""
    if fmt == "markdown":
        rule = ["---" if place < numeric else "---:" for place in range(len(head))]
        lines = [list(map(markdown, head)), rule, *([markdown(cell) for cell in row] for row in body)]
        return "\n".join([f"{markdown(note)}\n", *(f"| {' | '.join(line)} |" for line in lines)]) + "\n"
    columns = "l" * min(numeric, len(head)) + "r" * max(0, len(head) - numeric)
    rows = [" & ".join(map(latex, row)) + r" \\" for row in body]
    parts = [
        "% needs \\usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{latex(note)}}}",
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        " & ".join(map(latex, head)) + r" \\",
        r"\midrule",
        *rows,
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(parts) + "\n"


def latex(text: str) -> str:
    """`text` as LaTeX sets it; line breaks are spaces."""
    made = "".join(SPECIAL.get(c, c) for c in " ".join(text.split()))
    return made.replace(" ± ", r" $\pm$ ").replace("<", "$<$").replace(">", "$>$")


def markdown(text: str) -> str:
    """`text` in a cell of a Markdown table: no markup of it takes effect."""
    made = "".join(f"\\{c}" if c in "\\`*_[]|#~" else c for c in " ".join(text.split()))
    return made.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
