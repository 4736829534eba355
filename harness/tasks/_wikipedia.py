"""Plain text of Wikipedia articles from a MediaWiki dump, in the form of WikiText: ` = Title =`, ` = = Section = =`.

What is not running text is left out: templates, tables, references, pictures, formulas, and the sections that only
list (see also, references, external links). One pass of regular expressions, no parser: good enough to train on.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable

PAGE = re.compile(r"<page>(.*?)</page>", re.S)
TEXT = re.compile(r"<text[^>]*>(.*?)</text>", re.S)
TITLE = re.compile(r"<title>(.*?)</title>")
COMMENT = re.compile(r"<!--.*?-->", re.S)
EMPTY_TAG = re.compile(r"<\w+[^<>]*/>")
ELEMENT = re.compile(
    r"<(ref|math|gallery|timeline|source|syntaxhighlight|code|pre|score|table|div|imagemap|hiero)\b[^<>]*>.*?</\1\s*>",
    re.S | re.I,
)
TAG = re.compile(r"</?\w+[^<>]*>")
# Innermost first, again and again, until nothing changes: what nests is gone then, what never closes stays one line.
TEMPLATE = re.compile(r"\{\{[^{}]*\}\}")
TABLE = re.compile(r"^[ :]*\{\|(?:(?!^[ :]*\{\|).)*?^[ :]*\|\}", re.S | re.M)
LINK = re.compile(r"\[\[([^\[\]]*)\]\]")
NO_TEXT = re.compile(r"\s*:?\s*(?:file|image|category|media|wikt|wiktionary|s|[a-z]{2,3}|simple|[a-z-]+-[a-z]+):", re.I)
EXTERNAL = re.compile(r"\[(?:https?:|ftp:)?//\S+?(?:\s+([^\[\]]*))?\]")
QUOTES = re.compile(r"'{2,}")
SWITCH = re.compile(r"__[A-Z]+__")
HEADING = re.compile(r"^(={2,6})\s*(.*?)\s*\1\s*$")
LISTED = {
    "see also", "references", "external links", "notes", "further reading", "bibliography", "footnotes", "sources",
    "notes and references", "citations", "gallery", "literature",
}  # fmt: skip
MARKER = re.compile(r"^[*#:;]+\s*")
# What a template leaves behind within a sentence.
LEFTOVERS = (
    (re.compile(r"\(\s*(?:[,;:]\s*)+"), "("),
    (re.compile(r"\s*\(\s*\)"), ""),
    (re.compile(r"[ \t\u00a0]+"), " "),
    (re.compile(r" ([,.;:!?)])"), r"\1"),
)


def articles(dump: str) -> list[tuple[str, str]]:
    """(title, text) of every article in the dump that is no redirect and has text, in its order."""
    found = []
    for page in PAGE.findall(dump):
        title, text = TITLE.search(page), TEXT.search(page)
        if title is None or text is None or "<redirect" in page or "<ns>0</ns>" not in page:
            continue
        body = plain(html.unescape(text.group(1)))
        if body:
            found.append((html.unescape(title.group(1)), body))
    return found


def plain(markup: str) -> str:
    """The running text of one article: a paragraph or heading a line.

    >>> plain("'''Ann''' is [[tall (height)|tall]]{{cn}}.<ref>A book</ref>\\n== Notes ==\\n* [[Bob]]")
    'Ann is tall.'
    """
    for pattern in (COMMENT, EMPTY_TAG, ELEMENT):
        markup = pattern.sub("", markup)
    for pattern in (TEMPLATE, TABLE):
        markup = _until_same(pattern, "", markup)
    markup = _until_same(LINK, _link, markup)
    markup = EXTERNAL.sub(lambda match: match.group(1) or "", markup)
    for pattern in (QUOTES, SWITCH, TAG):
        markup = pattern.sub("", markup)
    return "\n".join(_sections(html.unescape(markup).splitlines()))


def _until_same(pattern: re.Pattern[str], replacement: str | Callable[[re.Match[str]], str], text: str) -> str:
    while True:
        text, count = pattern.subn(replacement, text)
        if not count:
            return text


def _link(match: re.Match[str]) -> str:
    if NO_TEXT.match(match.group(1)):
        return ""
    return match.group(1).rpartition("|")[2]


def _sections(lines: list[str]) -> list[str]:
    """Lines with text in them, and the headings that stand over some."""
    kept: list[str] = []
    headings: list[tuple[int, str]] = []
    skipped = 0  # level of the listing section we are in, 0 outside of one
    for line in lines:
        heading = HEADING.match(line.strip())
        if heading:
            level = len(heading.group(1))
            if skipped and level > skipped:
                continue
            skipped = level if heading.group(2).lower() in LISTED else 0
            headings = [one for one in headings if one[0] < level]
            if not skipped:
                marks = " ".join("=" * level)
                headings.append((level, f" {marks} {heading.group(2)} {marks}"))
            continue
        text = MARKER.sub("", line.strip())
        for pattern, replacement in LEFTOVERS:
            text = pattern.sub(replacement, text).strip()
        if skipped or not any(c.isalpha() for c in text) or text[0] in "|!{}":
            continue
        kept += [title for _, title in headings]
        headings = []
        kept.append(text)
    return kept
