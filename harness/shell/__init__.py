"""Plumbing of the command line: options that verbs share, registering a verb, errors as exit codes, output.

Nothing heavy is imported here: `thinpipe --help` waits for it.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

ExperimentArg = Annotated[
    str, typer.Argument(metavar="EXPERIMENT", help="Name, path of a TOML file, or a stored run.json.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Replace a setting or an axis; repeatable."),
]
ResultsOption = Annotated[Path, typer.Option("--results", metavar="DIR", help="The results folder.")]
OnlyOption = Annotated[
    str | None,
    typer.Option("--only", metavar="EXPR", help="Choose runs, e.g. 'arm=FP32|AQ*,network.rate_mbit=10'."),
]
LimitOption = Annotated[int | None, typer.Option("--limit", metavar="N", help="Execute at most N runs now.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
SizeOption = Annotated[
    str | None,
    typer.Option("--size", metavar="SIZE", help="check, cpu or paper, of an experiment with sizes (default: cpu)."),
]
RESULTS = Path("results")


def command(group: typer.Typer, name: str) -> Callable[[Callable[..., int | None]], Callable[..., None]]:
    """Register a verb. It returns its exit code; errors meant for people become one message and exit code
    2."""

    def register(verb: Callable[..., int | None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def wrapped(*args: Any, **kwargs: Any) -> None:
            raise typer.Exit(guarded(functools.partial(verb, *args, **kwargs)))

        return group.command(name)(wrapped)

    return register


def guarded(verb: Callable[[], int | None]) -> int:
    """The exit code of a verb; what it raises for people is printed as one message."""
    from thinpipe.harness.errors import UserError
    from thinpipe.netem.errors import NetemError

    try:
        return verb() or 0
    except (UserError, NetemError) as error:
        print(f"thinpipe: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("thinpipe: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has seen enough; nothing more can be said there.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        return 0
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        print(f"thinpipe: {what}{error.strerror or error}. Nothing that was finished is lost.", file=sys.stderr)
        return 2


def show(data: Any, as_json: bool, render: Callable[[Any], None]) -> None:
    """Print a verb's answer: as JSON, or for people."""
    if as_json:
        print(json.dumps(data, indent=1, allow_nan=False))
    else:
        render(data)


def files(data: dict[str, Any]) -> None:
    """Print the files that a verb wrote, a line each."""
    for name in data["files"]:
        print(name)
