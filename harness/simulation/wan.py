"""Links between regions of the world: what each pair is like, and which stage stands where. No torch here.

    experiments/wan/NAME.json, or a file of one's own:

    regions      their names
    delay_ms     [from][to], one way; the diagonal: between two hosts of one region
    rate_mbit    [from][to], Mbit/s at layer 2; or, where it changes with time, [[from second, Mbit/s], ...]

Stages are put into regions in order, the same number of stages in each. The order is the file's, or the best one that
a local search finds: `best_order`.

>>> load("ten-regions").link("Virginia", "Ohio").delay_s
0.011
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from thinpipe.harness import shipped
from thinpipe.harness.errors import UserError, near_miss
from thinpipe.harness.simulation.model import Link

KEYS = ("name", "source", "regions", "delay_ms", "rate_mbit")


@dataclass(frozen=True)
class Wan:
    """A matrix of links. rates: bytes a second by (from second, rate), as model.Link has them."""

    name: str
    source: str
    regions: tuple[str, ...]
    delay_s: tuple[tuple[float, ...], ...]
    rates: tuple[tuple[tuple[tuple[float, float], ...], ...], ...]

    def link(self, source: str, destination: str) -> Link:
        """One direction between hosts of two regions, or of one. UserError on a region that there is not."""
        for region in (source, destination):
            if region not in self.regions:
                raise UserError(f"{self.name} has no region {region!r}.{near_miss(region, self.regions)}")
        i, j = self.regions.index(source), self.regions.index(destination)
        return Link(self.rates[i][j], self.delay_s[i][j])


def load(name_or_path: str) -> Wan:
    """A matrix by name, or by the path of its file. Raises UserError naming the file and what is wrong with it."""
    text = shipped.read(name_or_path, "wan", "network", "docs/simulate.md says how one is written")
    try:
        data = json.loads(text)
    except ValueError as error:
        raise UserError(f"network {name_or_path} is no JSON: {error}") from None
    return _parse(data, f"network {name_or_path}")


def _parse(data: Any, where: str) -> Wan:
    if not isinstance(data, dict) or set(data) != set(KEYS):
        raise UserError(f"{where} must hold one JSON object with {', '.join(KEYS)}, and nothing else.")
    regions = data["regions"]
    if not isinstance(regions, list) or len(set(map(str, regions))) != len(regions) or not regions:
        raise UserError(f"{where}: regions must be a list of different names.")
    delays = _matrix(data["delay_ms"], len(regions), _delay_s, f"{where}: delay_ms")
    rates = _matrix(data["rate_mbit"], len(regions), _rates, f"{where}: rate_mbit")
    return Wan(str(data["name"]), str(data["source"]), tuple(map(str, regions)), delays, rates)


def _matrix(rows: Any, size: int, one: Callable[[Any, str], Any], where: str) -> Any:
    if not isinstance(rows, list) or len(rows) != size or any(not isinstance(r, list) or len(r) != size for r in rows):
        raise UserError(f"{where} must be {size} rows of {size}, as many as there are regions.")
    return tuple(tuple(one(value, f"{where}[{i}][{j}]") for j, value in enumerate(r)) for i, r in enumerate(rows))


def _delay_s(value: Any, where: str) -> float:
    return _number(value, where, least=0.0) / 1e3


def _rates(value: Any, where: str) -> tuple[tuple[float, float], ...]:
    if not isinstance(value, list):
        return ((0.0, _number(value, where) * 1e6 / 8),)
    if not value or any(not isinstance(pair, list) or len(pair) != 2 for pair in value):
        raise UserError(f"{where} must be a rate, or pairs [from second, Mbit/s].")
    found = tuple((_number(since, where, least=0.0), _number(rate, where) * 1e6 / 8) for since, rate in value)
    times = [since for since, _ in found]
    if times[0] != 0 or times != sorted(set(times)):
        raise UserError(f"{where}: the times of its rates must begin at 0 and rise, not {times}.")
    return found


def _number(value: Any, where: str, least: float = 1e-3) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise UserError(f"{where} must be a number from {least:g}, not {value!r}.")
    return float(value)


# --- which stage stands where ---


def spread(regions: Sequence[str], ranks: int) -> list[str]:
    """The region of each rank: as many in each as can be, the first ones with one more.

    >>> spread(["a", "b"], 5)
    ['a', 'a', 'a', 'b', 'b']
    """
    used = list(regions)[:ranks]
    each, more = divmod(ranks, len(used))
    return [region for k, region in enumerate(used) for _ in range(each + (k < more))]


def best_order(wan: Wan, ranks: int, message_bytes: float, microbatches: int) -> list[str]:
    """The order of regions in which a chain of `ranks` is predicted to pass `microbatches` messages soonest.

    A chain's cost is what GPipe's formula makes of its links: the sum of delays and transfers, and microbatches - 1
    times the longest transfer, at the rates of second 0. From each region the nearest one not yet used is taken, then
    pieces of the order are turned round, and regions moved, as long as that helps (2-opt and or-opt, a local search;
    all starts are tried).
    """
    count = min(ranks, len(wan.regions))

    def cost(order: Sequence[str]) -> float:
        links = [wan.link(a, b) for a, b in itertools.pairwise(order[:count])]
        transfers = [message_bytes / link.rates[0][1] for link in links]
        fill = sum(transfers) + sum(link.delay_s for link in links)
        return fill + (microbatches - 1) * max(transfers, default=0.0)

    found = [_improved(_greedy(wan, first, message_bytes), cost) for first in wan.regions]
    return min(found, key=cost)[:count]


def _greedy(wan: Wan, first: str, message_bytes: float) -> list[str]:
    order, left = [first], [region for region in wan.regions if region != first]
    while left:
        links = {region: wan.link(order[-1], region) for region in left}
        nearest = min(left, key=lambda r: links[r].delay_s + message_bytes / links[r].rates[0][1])
        order.append(nearest)
        left.remove(nearest)
    return order


def _improved(order: list[str], cost: Callable[[Sequence[str]], float]) -> list[str]:
    best = cost(order)
    while True:
        tried = ((cost(other), other) for other in _neighbours(order))
        least, other = min(tried, default=(math.inf, order))
        if least >= best:
            return order
        best, order = least, other


def _neighbours(order: list[str]) -> list[list[str]]:
    """Each piece turned round, and each region moved to each other place."""
    pairs = itertools.combinations(range(len(order) + 1), 2)
    turned = [order[:i] + order[i:j][::-1] + order[j:] for i, j in pairs if j - i > 1]
    moved = []
    for i, region in enumerate(order):
        rest = order[:i] + order[i + 1 :]
        moved += [[*rest[:j], region, *rest[j:]] for j in range(len(order)) if j != i]
    return turned + moved
