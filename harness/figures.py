"""Draw an experiment's figures from its tables: finds the plots, asks each for what it can draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from thinpipe.harness import plugins
from thinpipe.harness.errors import UserError

if TYPE_CHECKING:
    import pandas as pd


def draw(
    tables: Mapping[str, pd.DataFrame], folder: Path, names: Sequence[str] = ()
) -> tuple[list[Path], dict[str, str]]:
    """(files written, {figure: why it was not drawn}) of the figures `names`, all when empty.

    A figure asked for by name that cannot be drawn is a UserError; among all, it is one that this experiment
    does not have.
    """
    written: list[Path] = []
    skipped: dict[str, str] = {}
    for name in names or sorted(plugins.find("figures")):
        module = plugins.get("figures", name).load()
        missing = [table for table in module.REQUIRES if table not in tables]
        assert not missing, f"figure {name} requires tables that do not exist: {missing}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            written += module.draw(tables, folder)
        except UserError as error:
            if names:
                raise
            skipped[name] = str(error)
    return written, skipped
