"""Rows -> one parquet file with the fixed columns of metrics.TABLES: what each rank writes at its end.

Apart from tables.py because a rank pays for what it imports here: pyarrow alone, not pandas.

>>> schema("evals").names[:3]
['run_id', 'epoch', 'step']
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from thinpipe.harness import metrics

ARROW = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}


def schema(table: str) -> pa.Schema:
    """The fixed arrow schema of `table`: int64, float64, string or bool, in the order of metrics.TABLES."""
    return pa.schema([(name, ARROW[column.type]) for name, column in metrics.TABLES[table].items()])


def write_shard(table: str, rows: list[dict[str, Any]], path: Path) -> None:
    """Write `rows` as one parquet file by atomic rename; zero rows make a file with the same schema.

    Raises KeyError or TypeError (metrics.check) where a row is not one of `table`, OSError where the disk
    refuses; `path` is then as it was.
    """
    content = to_arrow(table, rows)
    replace(path, functools.partial(pq.write_table, content))


def to_arrow(table: str, rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Checked rows as an arrow table with the schema of `table`."""
    checked = list(rows)
    for row in checked:
        metrics.check(table, row)
    return pa.Table.from_pylist(checked, schema=schema(table))


def replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` make a file beside `path`, then move it there: readers see the old file or the new one."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(part)
        os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
