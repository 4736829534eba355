"""An experiment's tables made small enough to be kept in git and on a page, so that its figures stay the same.

    runs, evals, curves ...   every row
    steps                     training runs, the rank that has the loss: at most ROWS_PER_EPOCH rows an epoch, each of
                              `k` consecutive steps: step and t_s of the last, seconds summed, losses averaged
    transfers                 training runs: a row an epoch, sender, boundary, direction and compressor: bytes and
                              messages summed, errors averaged over the sampled steps

k divides the steps of an epoch, so the mean loss of an epoch and the time it took stay what they were. Rows keep the
columns and types of metrics.TABLES; numbers keep DIGITS digits when they are written. Pure.

>>> bin_size(12, 4), bin_size(7, 4), bin_size(3, 4)
(3, 7, 1)
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from thinpipe.harness import metrics
from thinpipe.harness.errors import UserError

ROWS_PER_EPOCH = 4
DIGITS = 7
TRAINED = ("convergence", "full")
#: How the columns of rows that become one are joined; the keys they are grouped by are equal in all of them.
STEPS = {
    "step": "last", "t_s": "last", "lr": "last", "train_loss": "mean", "grad_norm": "mean", "step_time_s": "sum",
    "compute_s": "sum", "codec_s": "sum", "blocked_s": "sum", "sync_s": "sum",
}  # fmt: skip
TRANSFERS = {
    "step": "last", "messages": "sum", "raw_bytes": "sum", "payload_bytes": "sum", "frame_bytes": "sum",
    "rel_error": "mean", "mean_abs": "mean", "mean_abs_change": "mean", "clip_fraction": "mean",
}  # fmt: skip
# A path that begins at the root or at a home folder, up to its last part.
PATH = re.compile(r"(?<![\w./])(?:~?/)(?:[\w.@+~-]+/)*(?=[\w.@+~-])")

Tables = Mapping[str, pd.DataFrame]


def tables(found: Tables) -> dict[str, pd.DataFrame]:
    """The tables of one experiment, condensed as the module says; every other table as it is."""
    runs = found["runs"]
    trained = set(runs.loc[runs["measure"].isin(TRAINED), "run_id"])
    made = dict(found)
    if "steps" in found:
        made["steps"] = steps(_of(found["steps"], trained))
    if "transfers" in found:
        made["transfers"] = transfers(_of(found["transfers"], trained))
    return made


def _of(frame: pd.DataFrame, run_ids: set[str]) -> pd.DataFrame:
    return frame[frame["run_id"].isin(run_ids)]


def steps(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows with a loss, ROWS_PER_EPOCH or fewer for each run, rank and epoch."""
    rows = frame[frame["train_loss"].notna()].sort_values(["run_id", "rank", "step"], kind="stable")
    by = ["run_id", "rank", "epoch", "measured"]
    if rows.empty:
        return rows
    groups = rows.groupby(by, sort=False)
    size = groups["step"].transform("size").map(lambda n: bin_size(int(n), ROWS_PER_EPOCH))
    return _joined(rows.assign(_bin=groups.cumcount() // size), [*by, "_bin"], STEPS, "steps")


def transfers(frame: pd.DataFrame) -> pd.DataFrame:
    """One row for each run, sender, epoch, boundary, direction and compressor."""
    by = ["run_id", "rank", "epoch", "boundary", "direction", "compressor"]
    return frame if frame.empty else _joined(frame, by, TRANSFERS, "transfers")


def _joined(frame: pd.DataFrame, by: Sequence[str], how: Mapping[str, str], table: str) -> pd.DataFrame:
    made = frame.groupby(list(by), sort=False, dropna=False).agg(dict(how)).reset_index()
    return made[list(metrics.TABLES[table])].astype(dict(frame[list(metrics.TABLES[table])].dtypes))


def bin_size(count: int, rows: int) -> int:
    """The least divisor of `count` that leaves at most `rows` bins."""
    least = math.ceil(count / rows)
    return next(k for k in range(least, count + 1) if count % k == 0)


def to_csv(frame: pd.DataFrame, table: str, text: Callable[[str], str] = str) -> str:
    """`frame` as CSV with a header: nothing for what is missing, DIGITS digits; `text` is applied to strings."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = list(metrics.TABLES[table])
    writer.writerow(columns)
    writer.writerows([cell(value, text) for value in row] for row in frame[columns].itertuples(index=False))
    return out.getvalue()


def cell(value: Any, text: Callable[[str], str] = str) -> str:
    """One value as to_csv writes it."""
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, str):
        return text(value)
    return format(value, f".{DIGITS}g") if isinstance(value, float) else str(value)


def from_csv(content: str, table: str, where: str) -> list[dict[str, Any]]:
    """The rows of `content`, values of the types of `table`. UserError naming `where`, line and column."""
    columns = metrics.TABLES[table]
    reader = csv.reader(io.StringIO(content))
    header = next(reader, [])
    if header != list(columns):
        odd = ", ".join(sorted(set(header) ^ set(columns))) or "their order"
        raise UserError(f"{where} has other columns than this version's table {table} ({odd}).")
    rows = []
    for record in reader:
        if len(record) != len(header):
            raise UserError(f"{where}, line {reader.line_num}: {len(record)} values for {len(header)} columns.")
        try:
            rows.append({name: _parse(value, columns[name]) for name, value in zip(header, record, strict=True)})
        except ValueError as error:
            raise UserError(f"{where}, line {reader.line_num}, is damaged: {error}") from None
    return rows


def _parse(value: str, column: metrics.Column) -> Any:
    if value == "" and column.optional:
        return None
    if column.type is bool:
        if value not in ("True", "False"):
            raise ValueError(f"{value!r} is neither True nor False")
        return value == "True"
    return column.type(value)


def without_paths(value: Any) -> Any:
    """`value` (JSON) with every path in its texts and keys cut to the last part: a machine's folders are its own.

    >>> without_paths({"task.corpus": "/home/me/data/mine.txt", "rate": "10/30"})
    {'task.corpus': 'mine.txt', 'rate': '10/30'}
    """
    if isinstance(value, str):
        return PATH.sub("", value)
    if isinstance(value, Mapping):
        return {without_paths(key): without_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(item) for item in value]
    return value
