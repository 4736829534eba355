"""What an experiment file declares beside its runs: claims to be checked, curves to be composed, what it needs.

Only the form is checked here; what a claim's metric and relation mean, claims/ says.

>>> claims([{"name": "a", "sentence": "A < B.", "source": "ours", "part": "p", "metric": "step_time_s",
...          "arm": "A", "other": "B", "relation": "<"}], "file")[0].factor
1.0
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from thinpipe.harness.errors import UserError, near_miss

RELATIONS = ("<", "<=", ">", ">=", "~", "==")
COMPOSE_KEYS = ("timing", "convergence", "check")
NEEDS = ("fetch-data",)


@dataclass(frozen=True)
class Claim:
    """One sentence that runs can contradict: metric(arm) RELATION factor x metric(other), or RELATION bound.

    where, other_where: dotted settings that the cells of either side have (other_where: `where` unless given).
    along: a dotted axis, and `arms`: labels in order; then each value against the next one (a < b < c). sizes: those it
    is about, all when empty. args: the metric's. exact: one run suffices, since nothing in it is random.
    """

    name: str
    sentence: str
    source: str
    part: str
    metric: str
    relation: str
    arm: str | None = None
    other: str | None = None
    factor: float = 1.0
    margin: float | None = None
    bound: float | None = None
    where: Mapping[str, Any] = field(default_factory=dict)
    other_where: Mapping[str, Any] | None = None
    along: str | None = None
    arms: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    args: Mapping[str, Any] = field(default_factory=dict)
    exact: bool = False


@dataclass(frozen=True)
class Compose:
    """Curves of loss against time: runs of part `convergence` at each network of part `timing`. check: the share of
    them that is also run in full, to hold the composed time against."""

    timing: str
    convergence: str
    check: float = 0.1


_TEXTS = ("name", "sentence", "source", "part", "metric", "relation")
_NUMBERS = ("factor", "margin", "bound")
_TABLES = ("where", "other_where", "args")
_LISTS = ("arms", "sizes")


def claims(items: Sequence[Mapping[str, Any]], where: str) -> tuple[Claim, ...]:
    """The [[claim]] tables of an experiment. Raises UserError naming the claim and the key that is wrong."""
    made = [_claim(item, where) for item in items]
    names = [claim.name for claim in made]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{where}: claim name {twice[0]!r} is given twice.")
    return tuple(made)


def _claim(item: Mapping[str, Any], where: str) -> Claim:
    where = f"{where} claim {item.get('name', '(without a name)')!r}"
    known = [f.name for f in fields(Claim)]
    for key in item:
        if key not in known:
            raise UserError(f"{where}: unknown key {key!r}.{near_miss(str(key), known)}")
    for key in _TEXTS:
        if not isinstance(item.get(key), str) or not item[key]:
            raise UserError(f"{where}: a claim needs {key}, a text.")
    for key in (*_TEXTS, "arm", "other", "along"):
        _typed(item, key, str, "a text", where)
    for key in _NUMBERS:
        _typed(item, key, (int, float), "a number", where)
        _finite(item.get(key), key, where)
    for key in _TABLES:
        _typed(item, key, Mapping, "a table", where)
    for key in _LISTS:
        _typed(item, key, list, "a list", where)
    _typed(item, "exact", bool, "true or false", where)
    if item["relation"] not in RELATIONS:
        raise UserError(f"{where}: unknown relation {item['relation']!r}.{near_miss(item['relation'], RELATIONS)}")
    for key, value in item.get("args", {}).items():
        _finite(value, f"args.{key}", where)
    arms = item.get("arms", [])
    if any(label in arms[:i] for i, label in enumerate(arms)) or (
        item.get("other") is not None and item.get("other") == item.get("arm") and not item.get("other_where")
    ):
        raise UserError(f"{where}: it holds an arm against itself. Name another, or give other_where.")
    numbers = {key: float(item[key]) for key in _NUMBERS if key in item}
    # Settings of a scope may be nested or dotted, as everywhere.
    tables = {key: _dotted(item[key]) for key in _TABLES if key in item}
    return Claim(**{**item, **numbers, **tables, **{key: tuple(item[key]) for key in _LISTS if key in item}})


def _typed(item: Mapping[str, Any], key: str, kind: Any, what: str, where: str) -> None:
    value = item.get(key)
    if key in item and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
        raise UserError(f"{where}: {key} must be {what}, got {value!r}.")


def _finite(value: Any, key: str, where: str) -> None:
    """Refuse what no comparison can be made with: nan, infinities, and whole numbers that no float holds."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            if math.isfinite(value):
                return
        except OverflowError:
            pass
        raise UserError(f"{where}: {key} must be a finite number, got {str(value)[:20]}.")


def _dotted(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def compose(data: Any, where: str) -> Compose:
    """The [compose] table of an experiment."""
    if not isinstance(data, Mapping):
        raise UserError(f"{where}: write compose as [compose], a table, got {data!r}.")
    for key in data:
        if key not in COMPOSE_KEYS:
            raise UserError(f"{where} compose: unknown key {key!r}.{near_miss(str(key), COMPOSE_KEYS)}")
    for key in ("timing", "convergence"):
        if not isinstance(data.get(key), str):
            raise UserError(f"{where} compose: {key} must be the name of a part, got {data.get(key)!r}.")
    if data["timing"] == data["convergence"]:
        raise UserError(f"{where} compose: timing and convergence are one part, {data['timing']!r}: it takes two.")
    share = data.get("check", Compose.check)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise UserError(f"{where} compose: check is a share of the curves, 0 to 1, got {share!r}.")
    return Compose(data["timing"], data["convergence"], float(share))


def needs(data: Any, where: str) -> tuple[tuple[str, str], ...]:
    """(verb, name) of what must be prepared once before the runs: ["fetch-data fashion-mnist", ...].

    >>> needs(["fetch-data fashion-mnist"], "file")
    (('fetch-data', 'fashion-mnist'),)
    """
    if not isinstance(data, list):
        raise UserError(f"{where}: needs must be a list of texts, got {data!r}.")
    found = []
    for text in data:
        verb, _, name = text.partition(" ") if isinstance(text, str) else ("", "", "")
        if verb not in NEEDS or not name.strip():
            raise UserError(f"{where}: needs {text!r}: write `fetch-data NAME`. (Models of recipes need no word.)")
        found.append((verb, _known_need(verb, name.strip(), where)))
    return tuple(found)


def _known_need(verb: str, name: str, where: str) -> str:
    from thinpipe.harness import fetch

    if name not in fetch.SOURCES:
        raise UserError(f"{where}: needs `{verb} {name}`: there is no {name!r}.{near_miss(name, fetch.SOURCES)}")
    return name


def figures(data: Any, where: str) -> tuple[str, ...]:
    """The names of the figures an experiment is drawn in."""
    from thinpipe.harness import figures as drawing
    from thinpipe.harness import plugins

    if not isinstance(data, list):
        raise UserError(f"{where}: figures must be a list of names, got {data!r}.")
    known = plugins.find("figures")
    for name in data:
        if name not in known:
            raise UserError(f"{where}: unknown figure {name!r}.{near_miss(str(name), known)}")
        if drawing.is_per_run(name) or drawing.is_of_verb(name):
            raise UserError(
                f"{where}: figure {name!r} is not drawn of an experiment: `thinpipe list figures` says of what it is"
            )
    return tuple(data)
