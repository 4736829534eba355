"""What page.js works with, packed into script elements: tables, figures, settings and provenance of every set. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from thinpipe.harness import condense, metrics
from thinpipe.harness.report.markup import Markup, blob, el, many
from thinpipe.harness.resultset import ResultSet, common

if TYPE_CHECKING:
    from thinpipe.harness.report.page import Shown

#: Columns of the runs table that are shown before anyone chooses; of these the ones that hold anything.
SHOWN = (
    "run_id", "part", "arm", "seed", "state", "fidelity", "rate_mbit", "measured_rate_mbit", "step_time_s",
    "final_train_loss", "final_eval_loss", "final_accuracy", "measured_compression_ratio", "frame_bytes",
)  # fmt: skip


def scripts(shown: Sequence[Shown]) -> Markup:
    """The elements that hold it: `index` as it is, the rest packed; ids begin with the place of their set."""
    parts = [el("script", Markup(_script_json(_index(shown))), type="application/json", id="index")]
    for number, one in enumerate(shown):
        id_ = f"e{number}"
        parts += [
            blob(f"{id_}-{name}", _table(frame, name)) for name, frame in condense.tables(one.found.tables).items()
        ]
        parts += [blob(f"{id_}-figure-{place}", picture.content) for place, picture in enumerate(one.pictures)]
        parts.append(blob(f"{id_}-detail", _detail(one.found)))
    return many(parts)


def _index(shown: Sequence[Shown]) -> dict[str, Any]:
    from thinpipe.harness.dotted import flat
    from thinpipe.harness.spec import parse

    return {
        "sets": [{"id": f"e{place}", "name": one.found.name} for place, one in enumerate(shown)],
        "shown": SHOWN,
        "columns": {"runs": {name: [column.unit, column.meaning] for name, column in metrics.RUNS.items()}},
        "defaults": flat(parse({}).model_dump(mode="json")),
    }


def _script_json(data: Any) -> str:
    """JSON that no script element can be ended by."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _table(frame: Any, name: str) -> dict[str, Any]:
    """Columns and their cells as CSV has them, a list a column: alike values side by side pack well."""
    columns = list(metrics.TABLES[name])
    return {"columns": columns, "cells": [[condense.cell(value) for value in frame[column]] for column in columns]}


def _detail(found: ResultSet) -> dict[str, Any]:
    shared, own = common(found.settings)
    return {"shared": shared, "own": own, "provenance": found.provenance.to_json()}
