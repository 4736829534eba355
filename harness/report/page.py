"""The document of a report: what is there without a script (claims, facts, definitions), and the data of what is not.

    header, counts ─ overview of all claims ─ contents ─ a section an experiment ─ how each number is defined

Every id begins with its experiment's place (`e0-...`), since names may be anything. Pure.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from thinpipe.harness import condense, metrics
from thinpipe.harness.claims import render as claims_render
from thinpipe.harness.report import data
from thinpipe.harness.report.markup import Markup, el, many
from thinpipe.harness.report.pictures import Picture
from thinpipe.harness.resultset import ResultSet

STATES = ("holds", "fails", "undecided")
#: What a state looks like besides its colour.
MARKS = {"holds": "✓", "fails": "✗", "undecided": "?"}
#: A figure of a larger ratio of width to height takes a row of its own.
WIDE = 2.2
#: How many times its own size a figure is shown at most.
LARGEST = 1.7
COLUMNS = ("State", "Experiment", "Claim", "Value", "Must be", "90 % interval", "n", "Source")


@dataclass(frozen=True)
class Shown:
    """A result set with its pictures; absent: figure -> why it is not there."""

    found: ResultSet
    pictures: Sequence[Picture]
    absent: Mapping[str, str]


def html_of(shown: Sequence[Shown], made: str) -> str:
    """The whole document. made: when, as it is to be shown."""
    title = shown[0].found.title if len(shown) == 1 else f"{len(shown)} experiments"
    style, script = _asset("page.css"), _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("title", f"{title} - thinpipe"),
        el("style", Markup(style)),
    )
    body = el(
        "body",
        el("a", "Skip to the results", href="#results", class_="skip"),
        el("header", el("h1", title), _counts(shown), el("p", f"Page written {made} by thinpipe.", class_="soft")),
        el(
            "main",
            el(
                "noscript", el("p", "Figures, run tables and downloads need JavaScript; claims and definitions do not.")
            ),
            _overview(shown),
            _contents(shown),
            [_experiment(f"e{number}", one) for number, one in enumerate(shown)],
            _definitions(shown),
            id="results",
            tabindex="-1",
        ),
        el("footer", "One file: it asks no network for anything, and everything it shows is in it."),
        el("dialog", id="run"),
        data.scripts(shown),
        el("script", Markup(script)),
    )
    return f"<!DOCTYPE html>\n{el('html', head, body, lang='en')}\n"


@functools.cache
def _asset(name: str) -> str:
    return resources.files("thinpipe.harness.report").joinpath(name).read_text(encoding="utf-8")


# --- all experiments together ---


def _counts(shown: Sequence[Shown]) -> Markup:
    states = Counter(claim["state"] for one in shown for claim in one.found.claims)
    if not states:
        return el("p", "No claims are declared.")
    buttons = [
        el("button", _badge(state), f" {states[state]}", type="button", data_state=state, aria_pressed="false")
        for state in STATES
        if states[state]
    ]
    return el("div", el("span", f"{sum(states.values())} claims:"), buttons, class_="bar", role="group")


def _badge(state: str) -> Markup:
    return el("span", f"{MARKS.get(state, '')} {state}".strip(), class_=f"badge {state if state in STATES else ''}")


def _overview(shown: Sequence[Shown]) -> Markup | None:
    rows = [
        _overview_row(f"e{number}", place, one.found, claim)
        for number, one in enumerate(shown)
        for place, claim in enumerate(one.found.claims)
    ]
    if not rows:
        return None
    head = el("thead", el("tr", [el("th", name, scope="col", class_=_align(name)) for name in COLUMNS]))
    table = el("table", head, el("tbody", rows), class_="stack sortable", id="overview")
    label = "all claims"
    return el(
        "section",
        el("h2", "Claims", id="claims"),
        el("div", table, class_="scroll", tabindex="0", role="region", aria_label=label),
        aria_labelledby="claims",
    )


def _align(name: str) -> str | None:
    return "number" if name in ("Value", "n") else None


def _overview_row(set_id: str, place: int, found: ResultSet, claim: Mapping[str, Any]) -> Markup:
    cells = (
        _badge(claim["state"]),
        el("a", found.name, href=f"#{set_id}"),
        el("a", claim.get("sentence") or claim["claim"], href=f"#{set_id}-claim-{place}"),
        number(claim.get("value")),
        must_be(claim),
        span(claim.get("interval")),
        claim.get("n"),
        claim.get("source"),
    )
    urgency = ("fails", "undecided", "holds")
    order = urgency.index(claim["state"]) if claim["state"] in urgency else len(urgency)
    values = {"State": order, "Value": claim.get("value"), "n": claim.get("n")}
    made = [
        el("td", cell, data_label=name, class_=_align(name), data_value=_sort_value(values, name))
        for name, cell in zip(COLUMNS, cells, strict=True)
    ]
    return el("tr", made, data_state=claim["state"])


def _sort_value(values: Mapping[str, Any], name: str) -> str | None:
    if name not in values:
        return None
    return "" if values[name] is None else str(values[name])


def _contents(shown: Sequence[Shown]) -> Markup | None:
    if len(shown) < 2:
        return None
    items = []
    for number_, one in enumerate(shown):
        states = Counter(claim["state"] for claim in one.found.claims)
        said = ", ".join(f"{states[state]} {state}" for state in STATES if states[state])
        link = el("a", one.found.title, href=f"#e{number_}")
        items.append(el("li", link, el("span", f" {one.found.name}{': ' if said else ''}{said}", class_="soft")))
    return el("nav", el("h2", "Experiments"), el("ul", items), aria_label="experiments")


# --- one experiment ---


def _experiment(id_: str, one: Shown) -> Markup:
    found = one.found
    return el(
        "section",
        el("h2", found.title, id=id_, tabindex="-1"),
        el("p", found.question) if found.question else None,
        el("p", _summary(found), class_="soft"),
        [el("p", el("strong", "Note: "), note) for note in found.notes],
        _claims(id_, found),
        _figures(id_, one),
        el("h3", "Runs"),
        el("div", el("p", f"{len(found.tables['runs'])} runs.", class_="soft"), data_runs=id_),
        _downloads(id_, found),
        _manifest(found),
        class_="experiment",
        aria_labelledby=id_,
    )


def _summary(found: ResultSet) -> str:
    runs = found.tables["runs"]
    states = ", ".join(f"{count} {state}" for state, count in runs["state"].value_counts().sort_index().items())
    flagged = int((runs["fidelity"] != "ok").sum())
    parts = [found.name, f"size {found.manifest['size']}" if found.manifest.get("size") else "", f"{len(runs)} runs"]
    parts[-1] += f" ({states})" if states else ""
    parts.append(f"{flagged} flagged: no claim about times counts them" if flagged else "")
    parts.append(f"ended {found.manifest['date']}" if found.manifest.get("date") else "")
    return " · ".join(part for part in parts if part)


def _claims(id_: str, found: ResultSet) -> Markup | None:
    if not found.claims:
        return None
    items = []
    for place, claim in enumerate(found.claims):
        facts = {
            "value": number(claim.get("value")),
            "must be": must_be(claim),
            "90 % interval": span(claim.get("interval")),
            "n": claim.get("n"),
            "needs": f"n = {claim['needs']} to be decided" if claim.get("needs") else None,
            "why": claim.get("why"),
            "metric": _metric(claim),
            "part": claim.get("part"),
            "source": claim.get("source"),
        }
        state = claim["state"] if claim["state"] in STATES else ""
        sentence = el("p", _badge(claim["state"]), " ", claim.get("sentence") or "", class_="sentence")
        name = el("p", claim["claim"], class_="soft")
        body = [sentence, name, _facts(facts), _pairs(claim)]
        items.append(el("li", body, class_=state, id=f"{id_}-claim-{place}"))
    return many([el("h3", "Claims"), el("ul", items, class_="claims")])


def _metric(claim: Mapping[str, Any]) -> str | None:
    meaning = meanings().get(str(claim.get("metric")), "")
    return f"{claim['metric']}: {meaning}" if meaning else claim.get("metric")


def _pairs(claim: Mapping[str, Any]) -> Markup | None:
    """What a claim of several comparisons is made of."""
    pairs = claim.get("pairs") or []
    if not pairs:
        return None
    head = el("tr", [el("th", name, scope="col") for name in ("pair", "state", "value", "90 % interval", "n", "why")])
    rows = [
        el(
            "tr",
            [
                el("td", cell)
                for cell in (
                    one["pair"],
                    _badge(one["state"]),
                    number(one["value"]),
                    span(one["interval"]),
                    one["n"],
                    one["why"],
                )
            ],
        )
        for one in pairs
    ]
    table = el("table", el("thead", head), el("tbody", rows))
    return el("details", el("summary", f"{len(pairs)} comparisons"), el("div", table, class_="scroll", tabindex="0"))


def _facts(facts: Mapping[str, Any]) -> Markup:
    known = {name: value for name, value in facts.items() if value not in (None, "")}
    return el("dl", [el("div", el("dt", name), el("dd", value)) for name, value in known.items()], class_="facts")


def _figures(id_: str, one: Shown) -> Markup | None:
    absent = [el("li", f"{name}: {why}" if name else why) for name, why in sorted(one.absent.items())]
    left_out = el("details", el("summary", f"{len(absent)} figure(s) not drawn"), el("ul", absent)) if absent else None
    if not one.pictures:
        return left_out
    figures = []
    for place, picture in enumerate(one.pictures):
        name = f"{id_}-figure-{place}"
        width, height = _size(picture.content)
        room = f"aspect-ratio:{width / height:.4g};max-width:{LARGEST * width:.0f}px"
        paper = el("div", class_="paper", data_figure=name, style=room)
        caption = el("figcaption", el("strong", picture.stem), f": {picture.about}" if picture.about else "")
        figures.append(el("figure", paper, caption, class_="wide" if width > WIDE * height else None))
    return many([el("h3", "Figures"), el("div", figures, class_="figures"), left_out])


def _size(content: str) -> tuple[float, float]:
    """Width and height that a figure was drawn for: the room it takes, so that nothing moves when it comes."""
    box = content.partition('viewBox="')[2].partition('"')[0].split()
    return (float(box[2]), float(box[3])) if len(box) == 4 else (450.0, 300.0)


def _downloads(id_: str, found: ResultSet) -> Markup:
    small = condense.tables(found.tables)
    buttons = [
        el(
            "button",
            f"{name}.csv ({len(frame)} rows)",
            type="button",
            data_blob=f"{id_}-{name}",
            data_file=_file(found, name),
        )
        for name, frame in small.items()
    ]
    thinned = "steps and transfers of training runs, joined to a few rows an epoch; bytes and means of epochs are kept."
    return many([el("h3", "Tables as CSV"), el("div", buttons, class_="bar"), el("p", thinned, class_="soft")])


def _file(found: ResultSet, table: str) -> str:
    safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in found.name)
    return f"{safe}.{table}.csv"


def _manifest(found: ResultSet) -> Markup:
    machines = found.manifest.get("machines") or {}
    facts = {
        "commit": ", ".join(found.manifest.get("commits") or ())
        + (" (changed)" if found.manifest.get("dirty") else ""),
        "date": found.manifest.get("date"),
        **{f"machine {id_}": _line(about) for id_, about in machines.items()},
        "versions": _line(found.manifest.get("versions") or {}),
    }
    return el("details", el("summary", "Manifest"), _facts(facts))


def _line(about: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in about.items() if value is not None)


# --- numbers ---


def number(value: Any) -> str:
    """Four digits, a whole number in full; nothing where there is none.

    >>> number(0.123456), number(1048576.0), number(None), number(True)
    ('0.1235', '1048576', '', 'True')
    """
    if isinstance(value, float):
        return claims_render.number(value)
    return "" if value is None else str(value)


def span(bounds: Any) -> str:
    """
    >>> span([0.9, 1.1]), span(None)
    ('0.9 to 1.1', '')
    """
    return "" if not bounds else f"{number(bounds[0])} to {number(bounds[1])}"


def must_be(claim: Mapping[str, Any]) -> str:
    """What a claim's value is held against.

    >>> must_be({"relation": "<", "bound": 1.5}), must_be({"relation": "~", "bound": [0.9, 1.1]})
    ('< 1.5', '0.9 to 1.1')
    """
    bound = claim.get("bound")
    return span(bound) if isinstance(bound, list | tuple) else f"{claim.get('relation', '')} {number(bound)}".strip()


def meanings() -> dict[str, str]:
    """Metric of claims -> what it is."""
    from thinpipe.harness.claims.metrics import REGISTRY

    return {name: f"{metric.meaning}{f' ({metric.unit})' if metric.unit else ''}" for name, metric in REGISTRY.items()}


def _definitions(shown: Sequence[Shown]) -> Markup:
    used = {str(claim.get("metric")) for one in shown for claim in one.found.claims}
    asked = {name: meaning for name, meaning in meanings().items() if name in used and name not in metrics.RUNS}
    blocks = [_definition("Metrics of claims", [(name, "", text) for name, text in asked.items()])] if asked else []
    for table in dict.fromkeys(name for one in shown for name in one.found.tables):
        columns = metrics.TABLES[table]
        blocks.append(_definition(f"Table {table}", [(name, c.unit, c.meaning) for name, c in columns.items()]))
    return el("section", el("h2", "How each number is defined", id="numbers"), blocks, class_="experiment")


def _definition(title: str, rows: Sequence[tuple[str, str, str]]) -> Markup:
    head = el("tr", [el("th", name, scope="col") for name in ("name", "unit", "what it is")])
    body = [el("tr", el("th", name, scope="row"), el("td", unit), el("td", text)) for name, unit, text in rows]
    table = el("table", el("thead", head), el("tbody", body))
    return el("details", el("summary", title), el("div", table, class_="scroll", tabindex="0"))
