"""`thinpipe report`: one HTML page of result sets, whole in itself: no network, no other file.

    result sets ─▶ pictures (figures as SVG) ─▶ page.html_of ─▶ out

page.py builds the document, markup.py escapes, svg.py makes figures fit to stand in it; page.css and page.js are put
into it as they are. What is large (tables, figures, settings of runs) lies in it compressed and is unpacked by the
browser when it is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from thinpipe.harness.errors import UserError


def report(paths: Sequence[str | Path], out: str | Path) -> dict[str, Any]:
    """Write the page of every result set in `paths`; returns {out, bytes, experiments, claims: {state: count}}.

    paths: folders of result sets, or folders that hold such. UserError where there is none, one is damaged, or `out`
    cannot be written.
    """
    from thinpipe.harness import resultset
    from thinpipe.harness.report import page, pictures

    sets = [resultset.load(folder) for folder in resultset.find([Path(path) for path in paths])]
    if not sets:
        raise UserError("give the folder of at least one result set, e.g. results/quickstart.")
    shown = [page.Shown(found, *pictures.of(found, f"e{number}")) for number, found in enumerate(sets)]
    text = page.html_of(shown, datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))
    target = Path(out)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"the page cannot be written to {out}: {error.strerror}. Give another file with --out."
        ) from None
    states = [claim["state"] for found in sets for claim in found.claims]
    return {
        "out": str(out),
        "bytes": len(text.encode()),
        "experiments": [found.name for found in sets],
        "claims": {state: states.count(state) for state in page.STATES},
    }


def render(data: dict[str, Any]) -> str:
    """What `report` returns, in a line for people."""
    claims = ", ".join(f"{count} {state}" for state, count in data["claims"].items())
    return f"{data['out']}: {len(data['experiments'])} experiment(s), claims: {claims}; {data['bytes'] / 1e6:.1f} MB"
