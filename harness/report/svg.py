"""A figure's SVG as part of a page: nothing that could act, ids of its own, text as text, and a third of the size.

matplotlib draws each character as an outline, hashes clip paths into ids that several figures share, and sets a style
for every element of the document. Here text becomes <text> again, held to the width it was drawn with; only the
elements and attributes a drawing needs pass; ids get a prefix, coordinates two decimals. Pure.

>>> inline('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"><path d="M 1.23456 0" onclick="x()"/></svg>', "a")
'<svg viewBox="0 0 9 9" stroke-linejoin="round" stroke-linecap="butt"><path d="M1.23 0"/></svg>'
"""

from __future__ import annotations

import html
import itertools
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping

from thinpipe.harness.errors import UserError

SPACE = "{http://www.w3.org/2000/svg}"
LINK = "{http://www.w3.org/1999/xlink}href"
ELEMENTS = {"svg", "g", "defs", "path", "use", "clipPath", "rect", "circle", "line", "text", "tspan", "image"}
ATTRIBUTES = {
    "id", "d", "x", "y", "width", "height", "cx", "cy", "r", "x1", "x2", "y1", "y2", "viewBox", "transform", "style",
    "clip-path", "fill", "stroke", "stroke-width", "opacity", "href", "font-size", "text-anchor", "textLength",
    "preserveAspectRatio",
}  # fmt: skip
STYLES = ("fill", "stroke", "opacity", "font", "text-anchor", "image-rendering")
#: matplotlib's own style for everything, which in a page would reach the page.
ROOT = {"stroke-linejoin": "round", "stroke-linecap": "butt"}
# Outlines are drawn in 1/100 of the font's size.
GLYPH_UNITS = 100.0
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
REFERENCE = re.compile(r"url\(\s*[\"']?#([^\"')\s]+)[\"']?\s*\)")
PICTURE = re.compile(r"data:image/png;base64,[A-Za-z0-9+/=\s]+")
SCALE = re.compile(r"\s*scale\(([0-9.]+) -[0-9.]+\)")
SHIFT = re.compile(r"translate\(([-0-9.]+)")


def inline(content: str, prefix: str) -> str:
    """`content`, a whole SVG file, as an <svg> element whose ids begin with `prefix`. UserError if it is none."""
    try:
        root = ET.fromstring(content, ET.XMLParser(target=ET.TreeBuilder(insert_comments=True)))
    except ET.ParseError as error:
        raise UserError(f"the figure is no SVG: {error}") from None
    if root.tag != f"{SPACE}svg":
        raise UserError("the figure is no SVG: its root is no <svg> element")
    for name in ("width", "height"):
        root.attrib.pop(name, None)
    _words(root)
    ids = {name: f"{prefix}-{number}" for number, name in enumerate(dict.fromkeys(_references(root)))}
    return "".join(_write(root, ids, ROOT))


def _references(root: ET.Element) -> Iterator[str]:
    for element in root.iter():
        for name, value in element.attrib.items():
            if name in ("href", LINK) and value.startswith("#"):
                yield value[1:]
            yield from REFERENCE.findall(value)


def _words(root: ET.Element) -> None:
    """Replace every group of outlined characters, which follows its text as a comment, by <text>."""
    outlines = []
    for parent in list(root.iter(f"{SPACE}g")):
        children = list(parent)
        for comment, group in itertools.pairwise(children):
            made = _text(comment, group)
            if made is not None:
                outlines += group.findall(f"{SPACE}defs/{SPACE}path")
                parent.remove(comment)
                parent[list(parent).index(group)] = made
    # A character's outline lies where it was first used; what is not text now may use it too.
    used = set(_references(root))
    kept = ET.SubElement(root, f"{SPACE}defs")
    kept.extend(path for path in outlines if path.get("id") in used)


def _text(comment: ET.Element, group: ET.Element) -> ET.Element | None:
    """The <text> that `group` shows the outlines of, None where it is something else."""
    scale = SCALE.search(group.get("transform", ""))
    if comment.tag is not ET.Comment or group.tag != f"{SPACE}g" or scale is None:
        return None
    whole = (comment.text or "")[1:-1]
    text = whole.rstrip()
    # What is between dollars is set by matplotlib's own rules: it stays as it is drawn.
    if not text or "$" in text:
        return None
    size = float(scale.group(1))
    made = ET.Element(f"{SPACE}text", {"transform": SCALE.sub("", group.get("transform", ""))})
    made.set("font-size", f"{GLYPH_UNITS * size:g}")
    shifts = [SHIFT.match(use.get("transform", "")) for use in group.findall(f"{SPACE}use")]
    starts = [float(found.group(1)) if found else 0.0 for found in shifts]
    ends = starts[: len(starts) - (len(whole) - len(text))]
    if len(ends) > 2:
        # The width of the last one is not in the file: it is taken as the mean of the others.
        made.set("textLength", f"{size * max(ends) * len(ends) / (len(ends) - 1):.1f}")
    if "style" in group.attrib:
        made.set("style", group.attrib["style"])
    made.text = re.sub(r"^ +", lambda found: "\u00a0" * len(found.group()), text)
    return made


def _write(element: ET.Element, ids: Mapping[str, str], extra: dict[str, str]) -> Iterator[str]:
    tag = element.tag.removeprefix(SPACE) if isinstance(element.tag, str) else ""
    if tag not in ELEMENTS:
        return
    _share_style(element)
    attributes = dict(_attributes(element, ids)) | extra
    text = html.escape(element.text) if tag in ("text", "tspan") and element.text else ""
    inner = text + "".join(part for child in element for part in _write(child, ids, {}))
    if tag == "g" and not attributes:
        yield inner
    elif inner or tag not in ("g", "defs"):
        opened = "".join(f' {name}="{html.escape(value)}"' for name, value in attributes.items())
        yield f"<{tag}{opened}>{inner}</{tag}>" if inner else f"<{tag}{opened}/>"


def _share_style(element: ET.Element) -> None:
    """Say once, in a group, the style that all in it have: of a line's marks, most of the file."""
    styles = {child.get("style") for child in element}
    if element.tag == f"{SPACE}g" and len(element) > 1 and len(styles) == 1 and "style" not in element.attrib:
        style = styles.pop()
        if style is not None and not any(child.get("clip-path") for child in element):
            element.set("style", style)
            for child in element:
                del child.attrib["style"]


def _attributes(element: ET.Element, ids: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, value in element.attrib.items():
        name = "href" if name == LINK else name
        if name not in ATTRIBUTES:
            continue
        if name == "id":
            if value in ids:
                yield name, ids[value]
        elif name == "href":
            if value.startswith("#"):
                yield name, f"#{ids[value[1:]]}"
            elif PICTURE.fullmatch(value):
                yield name, re.sub(r"\s", "", value)
        elif name == "style":
            yield name, _style(value, ids)
        else:
            yield name, _short(_renamed(value, ids))


def _style(value: str, ids: Mapping[str, str]) -> str:
    """Declarations of a style attribute: none that could fetch or place anything."""
    kept = []
    for part in value.split(";"):
        name, _, what = part.partition(":")
        harmless = "url(" not in REFERENCE.sub("", what) and "\\" not in part and "/*" not in part
        if name.strip().startswith(STYLES) and harmless:
            kept.append(f"{name.strip()}:{_renamed(what.strip(), ids)}")
    return ";".join(kept)


def _renamed(value: str, ids: Mapping[str, str]) -> str:
    return REFERENCE.sub(lambda found: f"url(#{ids[found.group(1)]})", value)


def _short(value: str) -> str:
    """Two decimals; no space but between numbers."""
    value = NUMBER.sub(lambda m: f"{float(m.group()):.2f}".rstrip("0").rstrip("."), value)
    return re.sub(r"\s*([A-Za-z])\s+(?=[-0-9])", r"\1", " ".join(value.split()))
