"""Which cells a claim compares with which: its scope, spelled out as hypotheses. Pure.

A claim is made of every cell of its arm that `where` lets in: an axis that is neither fixed there nor gone `along` is
one hypothesis a value. The other side is the cell with the same settings, or the only one there is. Along an axis, or
along `arms`, each value is held against the next one: a < b < c.

Metrics of curves have networks of their own: a training is timed at every network of the timing runs, so all settings
of `network` and data_parallel.rate_mbit then mean those of the curve.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from thinpipe.harness.errors import UserError
from thinpipe.harness.settings import empty

if TYPE_CHECKING:
    import pandas as pd

    from thinpipe.harness.declared import Claim
    from thinpipe.harness.experiment import Cell, ExperimentPart
    from thinpipe.harness.spec import RunSpec

RATES = ("network.rate_mbit", "network.rate")
DATA_RATE = "data_parallel.rate_mbit"
Parts = Mapping[str, "ExperimentPart"]


@dataclass(frozen=True, eq=False)
class Network:
    """A network that curves are at: what shapes its links is what the runs `specs` ask for, all of them alike."""

    specs: tuple[RunSpec, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """The settings that are the network's."""
        return (*(f"network.{name}" for name in type(self.specs[0].network).model_fields), DATA_RATE)

    def rows(self, table: pd.DataFrame) -> pd.DataFrame:
        """Those of a table with a column network_id that are at this network."""
        return table[table["network_id"].isin({spec.network_id for spec in self.specs})]

    def text(self) -> str:
        link = self.specs[0].network
        return link.rate or ("no limit" if link.rate_mbit is None else f"{link.rate_mbit:g} Mbit/s")


@dataclass(frozen=True, eq=False)
class Unit:
    """All seeds of one thing measured: a cell, or its curves at one network."""

    cell: Cell
    network: Network | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """The settings in which it may differ from another unit of its arm."""
        return (*self.cell.settings, *(self.network.keys if self.network else ()))

    def setting(self, key: str) -> Any:
        """The value of a dotted setting."""
        of_network = self.network is not None and key in self.network.keys
        value: Any = self.network.specs[0] if self.network is not None and of_network else self.cell.runs[0][1]
        for name in key.split("."):
            value = getattr(value, name)
        return value


class Term(NamedTuple):
    """One side: a unit, set against (divided by, less) another where a claim is about a gain."""

    unit: Unit
    over: Unit | None = None


class Hypothesis(NamedTuple):
    """left RELATION right; right None: RELATION the claim's bound. label: what tells it from the claim's others."""

    label: str
    left: Term
    right: Term | None

    def units(self) -> list[Unit]:
        terms = [self.left, *([self.right] if self.right else [])]
        return [unit for term in terms for unit in term if unit is not None]


def hypotheses(claim: Claim, parts: Parts, *, curves: bool) -> list[Hypothesis]:
    """What the claim says, one by one. curves: its metric is of curves.

    Raises UserError where a scope lets no cell in, or a cell meets several on the other side.
    """
    if claim.arms:
        return _along_arms(claim, parts, curves)
    assert claim.arm is not None, claim
    left = units(claim, parts, claim.arm, claim.where, curves)
    others = _others(claim, parts, claim.other, curves)
    free = varying(left)
    if claim.along is None:
        return [Hypothesis(_label(unit, free), Term(unit), _term(unit, others)) for unit in left]
    if claim.along not in free:
        shown = ", ".join(free) or "none"
        raise UserError(f"arm {claim.arm!r} has one value of {claim.along} here; what varies: {shown}.")
    rest = [key for key in free if key not in _with(claim.along)]
    found = []
    for _, group in itertools.groupby(_grouped(left, rest), key=lambda unit: _key(unit, rest)):
        for a, b in itertools.pairwise(group):
            label = _label(a, [*rest, claim.along]) + f" against {_text(b.setting(claim.along))}"
            found.append(Hypothesis(label, Term(a, _match(a, others)), Term(b, _match(b, others))))
    return found


def _along_arms(claim: Claim, parts: Parts, curves: bool) -> list[Hypothesis]:
    beside = claim.args.get("others", [claim.other] * len(claim.arms))
    rows = [units(claim, parts, arm, claim.where, curves) for arm in claim.arms]
    overs = [_others(claim, parts, other, curves) for other in beside]
    free = varying(rows[0])
    found = []
    for unit in rows[0]:
        terms = [Term(one := _only(unit, row), _match(one, over)) for row, over in zip(rows, overs, strict=True)]
        for (a, left), (b, right) in itertools.pairwise(zip(claim.arms, terms, strict=True)):
            label = ", ".join(filter(None, [_label(unit, free), f"{a} against {b}"]))
            found.append(Hypothesis(label, left, right))
    return found


def reference(unit: Unit, arm: str, claim: Claim, parts: Parts, *, curves: bool) -> Unit:
    """The unit of another arm that a metric is worked out against: with the settings of `unit`, else the only one."""
    return _only(unit, units(claim, parts, arm, {}, curves))


def _others(claim: Claim, parts: Parts, arm: str | None, curves: bool) -> list[Unit]:
    if arm is None:
        return []
    return units(claim, parts, arm, {**claim.where, **(claim.other_where or {})}, curves)


def units(claim: Claim, parts: Parts, arm: str, where: Mapping[str, Any], curves: bool) -> list[Unit]:
    """What an arm has within a scope, in the order declared. Raises UserError where that is nothing."""
    cells = [cell for cell in parts[claim.part].cells if cell.arm == arm]
    every = [Unit(cell, network) for cell in cells for network in (_networks(cell, parts) if curves else [None])]
    if not every:
        raise UserError(f"part {claim.part!r} has no network that was timed, so arm {arm!r} has no curve.")
    for key, value in where.items():
        kept = [unit for unit in every if same(unit.setting(key), empty(key, value))]
        if not kept:
            there = ", ".join(dict.fromkeys(_text(unit.setting(key)) for unit in every))
            raise UserError(f"arm {arm!r} has no cell with {key} = {_text(value)}; there is {there}.")
        every = kept
    return every


def _networks(cell: Cell, parts: Parts) -> list[Network]:
    """Where a cell's runs have curves: a full run at its own network, another one wherever something was timed."""
    own = cell.runs[0][1]
    if own.measure == "full":
        return [Network((own,))]
    found: dict[Any, list[RunSpec]] = {}
    for spec in (other.runs[0][1] for part in parts.values() for other in part.cells):
        if spec.measure == "timing":
            between = spec.data_parallel.rate_mbit if spec.data_parallel.groups > 1 else None
            found.setdefault((spec.network, between), []).append(spec)
    return [Network(tuple(specs)) for specs in found.values()]


def varying(found: Sequence[Unit]) -> list[str]:
    """The settings in which units of one arm differ, in the order declared."""
    keys = dict.fromkeys(key for unit in found for key in unit.keys)
    # A rate that stands for a ratio comes with that ratio, which is what the file says: one of them is enough.
    differ = [key for key in keys if any(not same(unit.setting(key), found[0].setting(key)) for unit in found)]
    return [key for key in differ if key != RATES[0]] if RATES[1] in differ else differ


def _with(axis: str) -> tuple[str, ...]:
    return RATES if axis in RATES else (axis,)


def _term(unit: Unit, others: Sequence[Unit]) -> Term | None:
    found = _match(unit, others)
    return None if found is None else Term(found)


def _match(unit: Unit, others: Sequence[Unit]) -> Unit | None:
    return _only(unit, others) if others else None


def _only(unit: Unit, others: Sequence[Unit]) -> Unit:
    """The unit on the other side that goes with `unit`: the only one, else the one with the same settings."""
    if len(others) == 1:
        return others[0]
    keys = varying(others)
    alike = [other for other in others if all(same(other.setting(key), unit.setting(key)) for key in keys)]
    if len(alike) != 1:
        here = _label(unit, keys)
        raise UserError(
            f"arm {others[0].cell.arm!r} has {len(alike)} cells to hold against {unit.cell.arm!r} at {here}: "
            f"fix {', '.join(keys)} in where or other_where."
        )
    return alike[0]


def _grouped(found: Sequence[Unit], keys: Sequence[str]) -> Iterator[Unit]:
    """Units with equal values of `keys` after each other, otherwise in the order declared."""
    groups: dict[str, list[Unit]] = {}
    for unit in found:
        groups.setdefault(_key(unit, keys), []).append(unit)
    return itertools.chain.from_iterable(groups.values())


def _key(unit: Unit, keys: Iterable[str]) -> str:
    return _label(unit, keys)


def _label(unit: Unit, keys: Iterable[str]) -> str:
    return ", ".join(f"{key} {_text(unit.setting(key))}" for key in keys)


def _text(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def same(a: Any, b: Any) -> bool:
    """Whether two settings are equal: numbers to rounding, lists as tuples."""
    if isinstance(a, float | int) and isinstance(b, float | int):
        return math.isclose(a, b, rel_tol=1e-9)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
