"""JSON files that come with the package, by name, or anybody's own, by path: profiles, networks."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from thinpipe.harness.errors import UserError, near_miss

SUFFIX = ".json"


def names(folder: str) -> list[str]:
    """What a folder of experiments/ has.

    >>> names("wan")
    ['ten-regions']
    """
    found = (resources.files("thinpipe.experiments") / folder).iterdir()
    return sorted(file.name.removesuffix(SUFFIX) for file in found if file.name.endswith(SUFFIX))


def read(name_or_path: str, folder: str, what: str, hint: str) -> str:
    """The text of a file of `folder`, or of one's own. Raises UserError, which calls it `what`, where there is none.
    hint: how to come by one's own."""
    path = Path(name_or_path).expanduser()
    try:
        if path.suffix == SUFFIX or "/" in name_or_path:
            return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"there is no {what} {name_or_path}: {hint}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the {what} {name_or_path}: {error}") from None
    if name_or_path not in (known := names(folder)):
        raise UserError(f"unknown {what} {name_or_path!r}.{near_miss(name_or_path, known)} Or give a file's path.")
    return (resources.files("thinpipe.experiments") / folder / f"{name_or_path}{SUFFIX}").read_text(encoding="utf-8")
