"""The figures of a result set as SVG for a page: taken from its folder, or drawn afresh from its tables."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from thinpipe.harness import figures, metrics
from thinpipe.harness.errors import UserError
from thinpipe.harness.report import svg
from thinpipe.harness.resultset import ResultSet


@dataclass(frozen=True)
class Picture:
    """stem: file name without its ending; content: an <svg> element; about: what the figure shows, in a line."""

    stem: str
    about: str
    content: str


def of(found: ResultSet, prefix: str) -> tuple[list[Picture], dict[str, str]]:
    """(pictures, {figure: why it, or a part of it, is not there}) of a set; ids in them begin with `prefix`."""
    if found.figures_folder is not None:
        pictures, missing = _read(found.figures_folder, prefix, {}, found.figures)
        drawn = {picture.stem.partition(".")[0] for picture in pictures} | {name.partition(".")[0] for name in missing}
        why = f"its folder has none; `thinpipe plot {found.name}` says why"
        return pictures, missing | {name: why for name in found.figures if name not in drawn}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            _, absent = figures.draw(whole(found), folder, found.figures, optional=True, formats=("svg",))
        except figures.UndrawnError as error:
            absent = {**error.skipped, "": str(error)}
        return _read(folder, prefix, absent)


def whole(found: ResultSet) -> dict:
    """The tables of a set, those that it has no rows of too: a figure may ask for any."""
    from thinpipe.harness.shards import schema
    from thinpipe.harness.tables import TABLES, to_frame

    empty = {name: to_frame(name, schema(name).empty_table()) for name in TABLES if name in metrics.TABLES}
    return {**empty, **found.tables}


def _read(
    folder: Path, prefix: str, absent: Mapping[str, str], names: Sequence[str] = ()
) -> tuple[list[Picture], dict[str, str]]:
    """The SVGs of a folder, of the figures `names` alone where there are any."""
    pictures, missing = [], dict(absent)
    for number, path in enumerate(sorted(folder.glob("*.svg"))):
        if names and path.stem.partition(".")[0] not in names:
            continue
        try:
            content = svg.inline(path.read_text(encoding="utf-8"), f"{prefix}g{number}")
        except (UserError, OSError, UnicodeDecodeError) as error:
            missing[path.stem] = str(error)
            continue
        pictures.append(Picture(path.stem, _about(path.stem), content))
    return pictures, missing


def _about(stem: str) -> str:
    """The summary of the figure a file is of; nothing for one that is not known any more."""
    from thinpipe.harness import plugins

    found = plugins.find("figures").get(stem.partition(".")[0])
    return found.summary if found else ""
