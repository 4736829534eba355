"""The help of every verb is frozen. `python tests/unit/test_cli_help.py` writes tests/golden/cli_help.txt anew."""

from __future__ import annotations

from pathlib import Path

import typer
from typer.testing import CliRunner

from thinpipe import cli

GOLDEN = Path(__file__).parent.parent / "golden" / "cli_help.txt"


def help_texts() -> str:
    """--help of the program and of every verb, one after the other; `train` has a golden file of its own."""

    def walk(command, path):
        if path == ["train"]:
            return
        shown = CliRunner(env={"COLUMNS": "100", "TERM": "dumb"}).invoke(cli.app, [*path, "--help"])
        assert shown.exit_code == 0, shown.output
        yield f"$ thinpipe {' '.join([*path, '--help'])}\n{shown.output.rstrip()}\n"
        for name, sub in getattr(command, "commands", {}).items():
            yield from walk(sub, [*path, name])

    return "\n".join(walk(typer.main.get_command(cli.app), []))


def test_help_is_frozen():
    assert help_texts() == GOLDEN.read_text(encoding="utf-8"), f"if wanted: python {__file__}"


if __name__ == "__main__":
    GOLDEN.write_text(help_texts(), encoding="utf-8")
    print(f"wrote {GOLDEN}")
