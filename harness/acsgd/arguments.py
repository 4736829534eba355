"""What `thinpipe train` takes: AC-SGD's arguments under their names, and a few of our own. Data and the parser.

The rows (table.py) say what each argument does here and where that differs; --help and docs/train.md are rendered
from them. An argument that is left out has its default; which ones were given is kept, so that one without effect
can be named instead of passed over.
"""

from __future__ import annotations

import argparse
import difflib
import math
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from thinpipe.harness.errors import UserError

Kind = Literal["int", "float", "text", "bool", "flag", "ints"]
METAVARS = {"int": "N", "float": "X", "text": "TEXT", "bool": "true|false", "ints": "N ...", "flag": ""}
USAGE = "thinpipe train --rank I --world-size N --dist-url tcp://HOST:PORT [ARGUMENT VALUE ...]"
ABOUT = (
    "One rank of one training run, in this process: AC-SGD's runner. Start it once a rank, with the same arguments "
    "but --rank. docs/train.md says of each argument what differs from AC-SGD's, and why."
)
WIDTH = 100


@dataclass(frozen=True)
class Argument:
    """One row. theirs: AC-SGD's default ("" = it has no such argument); default: ours (None: `shown` says what then).

    effect: what it does here. difference: from AC-SGD, and why; "" = none. dead: has no effect, there either.
    low, high: limits of a number, included.
    """

    name: str
    kind: Kind
    theirs: str
    default: Any
    effect: str
    difference: str = ""
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    shown: str = ""
    dead: bool = False

    @property
    def key(self) -> str:
        """Its attribute of the parsed arguments."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def default_text(self) -> str:
        return self.shown or _text(self.default)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def table() -> tuple[tuple[str, tuple[Argument, ...]], ...]:
    """(title, rows) of every group, AC-SGD's first, in the order of docs and help."""
    from thinpipe.harness.acsgd.table import GROUPS

    return GROUPS


def rows() -> tuple[Argument, ...]:
    return tuple(row for _, group in table() for row in group)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Values by key, `given`: the names that were there, `repeated`: those that were there more than once.

    Raises UserError for an unknown argument (with a near miss), a word that belongs to none, and a wrong value.
    """
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    known = {row.name: row for row in rows()}
    for row in known.values():
        if row.kind == "flag":
            parser.add_argument(row.name, dest=row.key, action="store_true")
        else:
            parser.add_argument(row.name, dest=row.key, nargs="+" if row.kind == "ints" else None)
    found, rest = parser.parse_known_args(list(argv))
    if rest:
        raise UserError(_unknown(rest[0], list(known)))
    counts = Counter(word.partition("=")[0] for word in argv if word.partition("=")[0] in known)
    values = {row.key: _value(row, getattr(found, row.key)) for row in known.values() if hasattr(found, row.key)}
    defaults = {row.key: row.default for row in known.values()}
    repeated = tuple(sorted(name for name, count in counts.items() if count > 1))
    return argparse.Namespace(**{**defaults, **values}, given=frozenset(counts), repeated=repeated)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. `thinpipe train --help` lists all arguments.")


def _unknown(word: str, names: Sequence[str]) -> str:
    if not word.startswith("-"):
        return f"unexpected word {word!r}: it belongs to no argument. `thinpipe train --help` lists them."
    name = word.partition("=")[0]
    close = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return f"unknown argument {name}.{hint} `thinpipe train --help` lists them."


def _value(row: Argument, word: Any) -> Any:
    if row.kind == "flag":
        return True
    if row.kind == "ints":
        return _ints(row, word)
    if row.kind == "bool":
        if word.lower() not in ("true", "false"):
            raise UserError(f"{row.name} must be true or false, not {word!r}.")
        return word.lower() == "true"
    if row.kind in ("int", "float"):
        return _number(row, word)
    if row.choices and word not in row.choices:
        close = difflib.get_close_matches(word, row.choices, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise UserError(f"{row.name} cannot be {word!r}.{hint} Valid: {', '.join(row.choices)}.")
    if not word:
        raise UserError(f"{row.name} is empty.")
    return word


def _number(row: Argument, word: str) -> int | float:
    try:
        value = int(word) if row.kind == "int" else float(word)
    except ValueError:
        raise UserError(f"{row.name} must be a {_limits(row)}, not {word!r}.") from None
    inside = (row.low is None or value >= row.low) and (row.high is None or value <= row.high)
    if not inside or not math.isfinite(value):
        raise UserError(f"{row.name} must be a {_limits(row)}, not {word}.")
    return value


def _limits(row: Argument) -> str:
    what = "whole number" if row.kind == "int" else "number"
    low = "" if row.low is None else f" from {_text(row.low)}"
    high = "" if row.high is None else f" to {_text(row.high)}"
    return f"{what}{low}{high}"


def _ints(row: Argument, words: Sequence[str]) -> tuple[int, ...]:
    """`0 1`, `0,1` and `(0,1)` are the same: AC-SGD's default is written as a tuple."""
    text = " ".join(words).strip("()[] ").replace(",", " ")
    try:
        return tuple(sorted({int(word) for word in text.split()}))
    except ValueError:
        raise UserError(f"{row.name} must be whole numbers, e.g. `0 1`, not {' '.join(words)!r}.") from None


def help_text() -> str:
    """What --help prints; the same on every terminal and Python."""
    lines = [f"usage: {USAGE}", "", *textwrap.wrap(ABOUT, WIDTH)]
    for title, group in table():
        lines += ["", f"{title}:"]
        for row in group:
            metavar = "|".join(row.choices) if row.choices else METAVARS[row.kind]
            default = "" if row.kind == "flag" else f" [{row.default_text}]"
            lines.append(f"  {row.name} {metavar}".rstrip() + default)
            lines += textwrap.wrap(row.effect, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines) + "\n"


def docs() -> str:
    """The tables of docs/train.md: AC-SGD's arguments, then our own, a heading a group."""
    from thinpipe.harness.acsgd.table import SETTINGS

    parts = []
    for title, group in table():
        own = not any(row.theirs for row in group)
        head = ("argument", "default", "effect") if own else ("argument", "theirs", "here", "effect", "what differs")
        parts += [f"\n### {title}\n", f"| {' | '.join((*head, 'setting'))} |", "|" + "---|" * (len(head) + 1)]
        for row in group:
            key = f"`{SETTINGS[row.name]}`" if row.name in SETTINGS else ""
            if own:
                cells = [f"`{row.name}`", row.default_text, row.effect, key]
            else:
                cells = [f"`{row.name}`", row.theirs, row.default_text, row.effect, row.difference or "nothing", key]
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*parts, ""])
