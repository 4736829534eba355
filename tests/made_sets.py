"""Result sets made by hand, without runs or files: what tests of reports, exports and comparisons share."""

from __future__ import annotations

from thinpipe.harness import metrics, shards
from thinpipe.harness.provenance import Provenance
from thinpipe.harness.resultset import ResultSet
from thinpipe.harness.tables import to_frame

#: Ends attributes, scripts, table cells and lines; tries to act; is not ASCII.
HOSTILE = (
    "<script>window.hacked=1</script>\"'><img src=x onerror=window.hacked=1>&amp;|`$_\\ \u2028 Größe 名 \u202e</script>"
)
LINK = {"rate_mbit": 30.0, "delay_ms": 0.0, "measured_rate_mbit": 29.7, "goodput_mbit": 28.0, "rtt_ms": 0.2}
LINKS = [
    {"source": 0, "destination": 1, **LINK, "ok": True, "reason": ""},
    {"source": 1, "destination": 0, **LINK, "ok": False, "reason": HOSTILE},
]
SURROUNDINGS = {
    "machine_id": "a" * 12,
    "machine": {"cpu": f"CPU {HOSTILE}", "cores": 2},
    "versions": {"torch": "2.13.0"},
    "source": {"commit": "c" * 40, "dirty": False},
}
CLAIM = {
    "experiment": "made",
    "claim": "faster",
    "state": "holds",
    "value": 0.5,
    "bound": 0.9,
    "relation": "<",
    "interval": [0.4, 0.6],
    "n": 3,
    "needs": None,
    "source": "arXiv 2206.01299, figure 3",
    "sentence": "A is faster than B.",
    "why": "",
    "metric": "step_time_s",
    "part": "timing",
    "pairs": [],
}


def blank(table: str) -> dict:
    """A row of a table with nothing in it that may be empty."""
    return {name: None if c.optional else c.type() for name, c in metrics.TABLES[table].items()}


def run(number: int, **columns) -> dict:
    """A row of the runs table; run number `number`, done, timed, unflagged."""
    own = {"run_id": f"{number:012x}", "train_id": f"{number:012x}", "cell": f"{number:012x}", "experiment": "made"}
    usual = {"part": "timing", "arm": "A", "state": "done", "measure": "timing", "fidelity": "ok", "machine": "a" * 12}
    return {**blank("runs"), **own, **usual, **columns}


def frame(table: str, rows: list[dict]):
    return to_frame(table, shards.to_arrow(table, rows))


def made(rows: list[dict], settings=lambda row: {}, name: str = "made", claims=(), **tables) -> ResultSet:
    """A result set of runs `rows`; settings(row) -> the settings of that run; tables: rows of the others, by name."""
    ids = [row["run_id"] for row in rows]
    runs = {
        i: {"started_at": "2030-01-01T00:00:00", "load_at_start": [0.1], "surroundings": 0, "used": None, "links": 0}
        for i in ids
    }
    given = {"runs": rows, **{table: [] for table in ("steps", "transfers", "evals")}, **tables}
    provenance = Provenance([SURROUNDINGS], [], [LINKS], runs)
    return ResultSet(
        name,
        f"Title of {name}",
        "What is asked?",
        {table: frame(table, content) for table, content in given.items()},
        list(claims),
        {"experiment": name, "size": None, **provenance.summary()},
        {row["run_id"]: {"seed": row["seed"], **settings(row)} for row in rows},
        provenance,
    )


def hostile() -> ResultSet:
    """Every text of it is HOSTILE in part; four runs, one of them flagged, with steps."""
    texts = ("part", "arm", "model", "task", "forward", "backward", "fidelity_reason", "error")
    rows = [
        run(
            number,
            **{name: f"{name} {HOSTILE}" for name in texts},
            seed=number,
            step_time_s=(0.25, 0.125, 10.0, 1e-05)[number],
            measured_rate_mbit=29.7,
            rate_mbit=30.0,
            fidelity="cpu-bound" if number == 2 else "ok",
            measure="full",
        )
        for number in range(4)
    ]
    claims = [
        {**CLAIM, "claim": f"{state} {HOSTILE}", "state": state, "sentence": f"{state}: {HOSTILE}", "source": HOSTILE}
        | {"why": HOSTILE, "pairs": [{**CLAIM, "pair": HOSTILE}]}
        for state in ("holds", "fails", "undecided")
    ]
    steps = [
        {**blank("steps"), "run_id": row["run_id"], "rank": 1, "step": step, "train_loss": 3.0 - step, "measured": True}
        for row in rows
        for step in range(2)
    ]
    return made(rows, lambda row: {"task.corpus": HOSTILE, HOSTILE: 1}, f"made {HOSTILE}", claims, steps=steps)
