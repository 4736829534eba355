"""Evaluated claims as text for people, with rich."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from thinpipe.harness.render import console

# Above it a float no longer holds every whole number.
WHOLE = 2**53
STYLES = {"holds": "green", "fails": "bold red", "undecided": "yellow"}


def render(results: Sequence[Mapping[str, Any]]) -> None:
    """One row a claim of claims.evaluate, the sentence and any `why` below its name; then how many are in which
    state."""
    out = console()
    if not results:
        out.print("no claims")
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for header in ("claim", "state", "value", "must be", "90 % interval", "seeds", "source"):
        table.add_column(header, overflow="fold", justify="right" if header in ("value", "seeds") else "left")
    experiment = None
    for result in results:
        if result["experiment"] != experiment:
            experiment = result["experiment"]
            table.add_row(Text(str(experiment), style="bold"))
        table.add_row(*_row(result))
    out.print(table)
    counts = Counter(result["state"] for result in results)
    out.print(escape(f"{len(results)} claims: " + ", ".join(f"{counts[state]} {state}" for state in STYLES)) + ".")


def _row(result: Mapping[str, Any]) -> list[Text]:
    about = Text(f"{result['claim']}\n  {result['sentence']}")
    if result["why"]:
        about.append(f"\n  {result['why']}", style="dim")
    return [
        about,
        Text(result["state"], style=STYLES[result["state"]]),
        Text(number(result["value"])),
        Text(must_be(result)),
        Text(span(result["interval"])),
        Text(str(result["n"])),
        Text(str(result["source"])),
    ]


def number(value: float | None) -> str:
    """Four digits, a whole number in full (bytes that must be equal are to look it); `-` where there is none.

    >>> number(1.23456), number(123456.0), number(123456.7), number(None)
    ('1.235', '123456', '1.235e+05', '-')
    """
    if value is None:
        return "-"
    return f"{value:.0f}" if float(value).is_integer() and abs(value) < WHOLE else f"{value:.4g}"


def span(bounds: Sequence[float] | None) -> str:
    """
    >>> span([0.9, 1.1])
    '0.9 .. 1.1'
    """
    return "-" if bounds is None else f"{number(bounds[0])} .. {number(bounds[1])}"


def must_be(result: Mapping[str, Any]) -> str:
    """What the value is held against.

    >>> must_be({"relation": "<", "bound": 1.1}), must_be({"relation": "~", "bound": [0.95, 1.05]})
    ('< 1.1', '0.95 .. 1.05')
    """
    bound = result["bound"]
    return span(bound) if isinstance(bound, list) else f"{result['relation']} {number(bound)}"
