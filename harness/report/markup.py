"""HTML as nested calls, in which every text is escaped unless it is markup already. Pure.

>>> el("p", "1 < 2", el("b", "x"), class_="a\\"b")
'<p class="a&quot;b">1 &lt; 2<b>x</b></p>'
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Iterable
from typing import Any

VOID = {"meta", "link", "input", "br"}


class Markup(str):
    """Text that is HTML: passes `el` as it is."""

    __slots__ = ()


def el(tag: str, *children: Any, **attributes: Any) -> Markup:
    """One element. attributes: `class_` is class, `data_x` data-x; True: without a value; None and False: left out."""
    parts = [f"<{tag}"]
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        name = name.rstrip("_").replace("_", "-")
        parts.append(f" {name}" if value is True else f' {name}="{escape(value)}"')
    parts.append(">")
    if tag not in VOID:
        parts += [many(children), f"</{tag}>"]
    return Markup("".join(parts))


def many(children: Iterable[Any]) -> Markup:
    """Elements and texts one after the other; lists are taken apart, None is nothing."""
    made: list[str] = []
    for child in children:
        if isinstance(child, Markup):
            made.append(child)
        elif isinstance(child, list | tuple):
            made.append(many(child))
        elif child is not None:
            made.append(escape(child))
    return Markup("".join(made))


def escape(value: Any) -> str:
    """`value` as text between tags or quotes; characters that no document may hold become U+FFFD."""
    text = "".join(c if c >= " " or c in "\t\n\r" else "\ufffd" for c in str(value))
    return html.escape(text.encode("utf-8", "replace").decode("utf-8"))


def packed(data: Any) -> str:
    """`data` as gzipped JSON in base64: same data, same text. Nothing in it can end a script element."""
    content = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(content.encode("ascii"), 9, mtime=0)).decode("ascii")


def unpacked(text: str) -> Any:
    """What `packed` was given, as JSON has it."""
    return json.loads(gzip.decompress(base64.b64decode(text)))


def blob(id_: str, data: Any) -> Markup:
    """A script element that holds `data` packed, for page.js to find by its id."""
    return el("script", Markup(packed(data)), type="application/octet-stream", id=id_)
