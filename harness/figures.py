"""Draw an experiment's figures from its tables: finds the plots, asks each for what it can draw.

What a figure module defines is said in plots/__init__.py. One that breaks is reported by name and error, and
keeps no other from being drawn.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from thinpipe.harness import plugins
from thinpipe.harness.errors import UserError
from thinpipe.harness.store import NO_SPACE

if TYPE_CHECKING:
    import pandas as pd

Tables = Mapping[str, "pd.DataFrame"]


class UndrawnError(UserError):
    """Some figures broke, or were asked for and cannot be drawn; the others are in `written` and `skipped`."""

    def __init__(self, why: Mapping[str, str], written: list[Path], skipped: dict[str, str]) -> None:
        super().__init__("\n".join(f"no figure {name}: {reason}" for name, reason in why.items()))
        self.written = written
        self.skipped = skipped


def draw(
    tables: Tables,
    folder: Path,
    names: Sequence[str] = (),
    *,
    optional: bool = False,
    formats: Sequence[str] | None = None,
) -> tuple[list[Path], dict[str, str]]:
    """(files written, {figure: why it, or a part of it, was not drawn}) of the figures `names`, all when empty.

    A figure this experiment has no data for is skipped, also of `names` where they are `optional`. formats: png, pdf,
    svg; all when None. Raises UndrawnError, once every other figure is drawn, for one that broke and for one that was
    asked for by name and cannot be drawn whole.
    """
    every = [name for name in sorted(plugins.find("figures")) if not is_per_run(name) and not is_of_verb(name)]
    found = [plugins.get("figures", name) for name in names or every]
    written: list[Path] = []
    skipped: dict[str, str] = {}
    broken: dict[str, str] = {}
    for plugin in found:
        try:
            paths, absent = draw_one(plugin, tables, folder, formats)
            written += paths
        except UserError as error:
            absent = [str(error)]
        except Exception as error:
            if isinstance(error, OSError) and error.errno in NO_SPACE:
                raise
            broken[plugin.name] = _describe(plugin, error)
            continue
        if absent:
            (broken if names and not optional else skipped)[plugin.name] = "; ".join(absent)
    if broken:
        raise UndrawnError(broken, written, skipped)
    return written, skipped


def remove_others(folder: Path, written: Sequence[Path]) -> None:
    """Remove from `folder` the files of experiments' figures that are not among `written`; anything else stays.

    Of the formats that were written, all where nothing was: a picture of what the tables held before is no picture of
    what they hold."""
    own = {name for name in plugins.find("figures") if not is_per_run(name) and not is_of_verb(name)}
    from thinpipe.plots import style

    kinds = {path.suffix for path in written} or {f".{kind}" for kind in style.FORMATS}
    for path in folder.iterdir():
        if path.suffix in kinds and path.name.partition(".")[0] in own and path not in written:
            path.unlink()


def is_per_run(name: str) -> bool:
    """Whether a figure is drawn of one run, when asked for, and not of an experiment."""
    return bool(plugins.get("figures", name).parameters.get("per_run"))


def is_of_codecs(name: str) -> bool:
    """Whether a figure is drawn of what `thinpipe codecs measure` found, by that verb."""
    return bool(plugins.get("figures", name).parameters.get("of_codecs"))


def is_of_simulation(name: str) -> bool:
    """Whether a figure is drawn of what `thinpipe simulate --against` found, by that verb."""
    return bool(plugins.get("figures", name).parameters.get("of_simulation"))


def is_of_verb(name: str) -> bool:
    """Whether a figure is drawn by a verb of its own."""
    return is_of_codecs(name) or is_of_simulation(name)


def draw_one(
    plugin: plugins.Plugin, tables: Tables, folder: Path, formats: Sequence[str] | None = None
) -> tuple[list[Path], list[str]]:
    """(files written, why parts were not drawn) of one figure; UserError when none of it can be drawn."""
    from thinpipe.plots import style

    module = plugin.load()
    missing = sorted(set(getattr(module, "REQUIRES", ("runs",))) - set(tables))
    if missing:
        raise ValueError(f"REQUIRES names tables that do not exist: {missing}; there are {sorted(tables)}")
    if hasattr(module, "draw"):
        folder.mkdir(parents=True, exist_ok=True)
        return list(module.draw(tables, folder)), []
    written: list[Path] = []
    absent: list[str] = []
    for stem, made in _figures(plugin, module, tables):
        if isinstance(made, UserError):
            absent.append(str(made))
        else:
            written += style.save(made, folder, stem, formats or style.FORMATS)
    return written, absent


def _figures(plugin: plugins.Plugin, module: ModuleType, tables: Tables) -> list:
    if not hasattr(module, "figures"):
        raise AttributeError("the module defines neither figures(tables) nor draw(tables, out_dir)")
    made = list(module.figures(tables))
    for stem, _ in made:
        # Files of another name would be taken for, or overwrite, another figure's.
        if stem != plugin.name and not stem.startswith(f"{plugin.name}."):
            raise ValueError(f"it calls a figure {stem!r}: names are {plugin.name!r} or '{plugin.name}.PART'")
    return made


def _describe(plugin: plugins.Plugin, error: Exception) -> str:
    """Type and message of an error, and where in the figure's own file, or else anywhere, it came up."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename) == plugin.path] or list(frames)
    message = str(error).split("\n", 1)[0]
    return f"it broke with {type(error).__name__}: {message} ({own[-1].filename}, line {own[-1].lineno})"


def sources() -> list[str]:
    """A line a figure, and a file figures share, with a hash of its text: other lines, other pictures."""
    lines = {f"{plugin.name} {plugin.source_hash}" for plugin in plugins.find("figures").values()}
    shared = plugins.ROOT / plugins.FOLDERS["figures"]
    lines |= {f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}" for path in shared.glob("*.py")}
    return sorted(lines)
