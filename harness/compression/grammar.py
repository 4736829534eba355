"""The text of a compressor: NAME[:ARGUMENT][(ITEM, ...)], an ITEM being a nested compressor or key=value.

Everything known about a name comes from its plug-in's literals (see the package docstring), so texts are checked
and brought to one canonical form while planning, without importing torch.

>>> canonical("fixpoint:04( scale = channel, rounding=stochastic )")
'fixpoint:4(rounding=stochastic)'
>>> bits("delta(fixpoint:4, cache=fixpoint:8)")
4.0
>>> inner("delta(fixpoint:4)")
'fixpoint:4'
>>> estimate("delta(fixpoint:4)"), uses("fixpoint:4")
(4.0, frozenset())
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

from thinpipe.harness import plugins
from thinpipe.harness.compression import formula
from thinpipe.harness.errors import UserError, near_miss

if TYPE_CHECKING:
    from pathlib import Path

    from thinpipe.harness.compression.base import Compressor

_WORD = re.compile(r"[^\s(),:=]+")
_SPACE = re.compile(r"\s*")
_DEPTH_MAX = 8


@dataclass(frozen=True)
class Node:
    """One compressor as written. `options` maps a key to its value's Node (a plain word has a name only)."""

    name: str
    argument: str | None = None
    items: tuple[Node, ...] = ()
    options: Mapping[str, Node] = field(default_factory=lambda: MappingProxyType({}))
    position: int = field(default=0, compare=False)

    @property
    def is_word(self) -> bool:
        return self.argument is None and not self.items and not self.options


@dataclass(frozen=True)
class _Compressor:
    """A Node held against its plug-in: typed values of all parameters, defaults filled in."""

    plugin: plugins.Plugin
    values: Mapping[str, Any]


def parse(text: str) -> Node:
    """The syntax alone; names and values are not looked at. Raises UserError with the position."""
    return _Parser(text).whole()


def check(text: str) -> None:
    """Raise UserError unless `text` names a compressor that can be built; the message shows what and where."""
    _resolve(text)


def canonical(text: str) -> str:
    """The one text of everything that means the same: defaults dropped, options sorted, no surplus spaces."""
    return _write(_resolve(text))


def plugins_used(text: str) -> set[str]:
    """`kind/name` of each plug-in that the canonical text names, e.g. {"codecs/fixpoint", "memories/delta"}."""
    return _named(_resolve(text))


def bits(text: str) -> float | None:
    """Bits an element as configured (of the codec inside any memory or wrapper); None where it has no such number."""
    return _bits(_resolve(text))


def estimate(text: str) -> float:
    """Bits an element to be expected of a large message, side information included: the plug-in's FORMULA, else its
    bits; an estimate where the length depends on the data. Headers and first visits are not in it."""
    return _estimate(_resolve(text))


def is_unbiased(text: str) -> bool:
    """Whether the mean of what is decoded, over the codec's own draws, is what was encoded. False for memories."""
    return _unbiased(_resolve(text))


def state(text: str) -> str:
    """What the compressor keeps between messages: none, shared or sender (base.Compressor.state)."""
    own = _resolve(text)
    inside = _codec(own)
    return own.plugin.extra.get("STATE") or inside.plugin.extra.get("STATE", "none")


def uses(text: str) -> frozenset[str]:
    """What it asks of where it stands, from its parameters' `uses`: "peer": it codes gradients by the help of the
    forward tensor; "relu": and is exact only where the boundary carries a ReLU's output; "steering": its bytes can be
    steered."""
    return frozenset(_uses(_resolve(text)))


def is_steered(text: str) -> bool:
    """Whether the bytes of what it codes can be steered (base.Compressor.steered): not those of a first visit, or of
    a codec for the values of another one."""
    node = _codec(_resolve(text))
    while inside := [node.values[n] for n, e in node.plugin.parameters.items() if e.get("place") == "item"]:
        node = inside[0]
    return any("steering" in e.get("uses", {}).get(f"{node.values[n]}", ()) for n, e in node.plugin.parameters.items())


def first_visit_bits(text: str) -> float:
    """As `estimate`, of samples not met before: of the codec in a memory's parameter `first`, where it has one.

    >>> first_visit_bits("delta(fixpoint:4)"), first_visit_bits("fixpoint:4")
    (32.0, 4.0)
    """
    found = _resolve(text)
    first = found.values.get("first") if found.plugin.kind == "memories" else None
    return _estimate(first) if isinstance(first, _Compressor) else _estimate(found)


def inner(text: str) -> str:
    """Canonical text of the codec inside any memory; of the codec itself where there is none."""
    return _write(_codec(_resolve(text)))


def build(text: str, capacity: int | None = None, folder: Path | None = None) -> Compressor:
    """Import and make the compressor. capacity: samples a memory will meet (its rows are then allocated once);
    folder: where a memory with store=disk keeps its rows, None = a temporary one of its own."""
    return _make(_resolve(text), {"capacity": capacity, "folder": folder})


class _Parser:
    """Recursive descent over one text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0

    def whole(self) -> Node:
        node = self.node()
        if self.at < len(self.text):
            raise _error(self.text, self.at, f"unexpected {self.text[self.at :]!r} after the end")
        return node

    def node(self) -> Node:
        position = self.skip()
        self.depth += 1
        if self.depth > _DEPTH_MAX:
            raise _error(self.text[:80], position, f"nested more than {_DEPTH_MAX} deep")
        name = self.word("a name")
        argument = self.word("an argument after ':'") if self.take(":") else None
        items: list[Node] = []
        options: dict[str, Node] = {}
        if self.take("("):
            while not self.take(")"):
                if items or options:
                    self.expect(",")
                self.item(items, options)
        self.depth -= 1
        return Node(name, argument, tuple(items), MappingProxyType(options), position)

    def item(self, items: list[Node], options: dict[str, Node]) -> None:
        node = self.node()
        if not self.take("="):
            items.append(node)
        elif not node.is_word:
            raise _error(self.text, node.position, "the key of key=value must be a plain word")
        elif node.name in options:
            raise _error(self.text, node.position, f"{node.name!r} is given twice")
        else:
            options[node.name] = self.node()

    def word(self, what: str) -> str:
        self.skip()
        match = _WORD.match(self.text, self.at)
        if not match:
            raise _error(self.text, self.at, f"expected {what}, found {self.found()}")
        self.at = match.end()
        self.skip()
        return match.group()

    def take(self, char: str) -> bool:
        if self.text[self.at : self.at + 1] != char:
            return False
        self.at += 1
        self.skip()
        return True

    def expect(self, char: str) -> None:
        if not self.take(char):
            raise _error(self.text, self.at, f"expected {char!r} or ')', found {self.found()}")

    def found(self) -> str:
        return repr(self.text[self.at]) if self.at < len(self.text) else "the end"

    def skip(self) -> int:
        match = _SPACE.match(self.text, self.at)
        assert match
        self.at = match.end()
        return self.at


@functools.lru_cache(maxsize=1024)
def _resolve(text: str) -> _Compressor:
    return _compressor(text, parse(text), ("codecs", "memories"))


def _compressor(text: str, node: Node, kinds: tuple[str, ...], words: Sequence[str] = ()) -> _Compressor:
    """Hold `node` against the plug-in of its name, of one of `kinds`; `words` could have stood here as well."""
    plugin = _lookup(text, node, kinds, words)
    left = dict(node.options)
    items = list(node.items)
    values: dict[str, Any] = {}
    for name, entry in plugin.parameters.items():
        place = entry.get("place", "option")
        if place == "fixed":
            values[name] = entry["value"]
        elif place == "argument":
            values[name] = _argument(text, node, name, entry)
        elif place == "item":
            values[name] = _item(text, node, entry, items)
        else:
            values[name] = _option(text, node, name, entry, left.pop(name, None))
        if entry.get("plain") and isinstance(values[name], _Compressor):
            _require_plain(text, node, values[name])
    if items:
        raise _error(text, items[0].position, _surplus(plugin, items[0]))
    if left:
        key, value = next(iter(left.items()))
        known = [name for name, entry in plugin.parameters.items() if entry.get("place", "option") == "option"]
        raise _error(text, value.position, f"{plugin.name} has no option {key!r}.{near_miss(key, known)}")
    if node.argument is not None and not any(e.get("place") == "argument" for e in plugin.parameters.values()):
        raise _error(text, node.position, f"{plugin.name} takes no argument, but was given {node.argument!r}")
    _together(text, node, plugin, values)
    return _Compressor(plugin, MappingProxyType(values))


def _lookup(text: str, node: Node, kinds: tuple[str, ...], words: Sequence[str]) -> plugins.Plugin:
    both = {kind: plugins.find(kind) for kind in ("codecs", "memories")}
    holders = [kind for kind, found in both.items() if node.name in found]
    if len(holders) > 1:
        raise UserError(f"a codec and a memory are both called {node.name!r}: rename one.")
    valid = {name for kind in kinds for name in both[kind]} | set(words)
    if not holders:
        what = "compressor" if len(kinds) > 1 else "codec"
        raise _error(text, node.position, f"unknown {what} {node.name!r}.{near_miss(node.name, valid)}")
    if holders[0] not in kinds:
        raise _error(
            text,
            node.position,
            f"{node.name!r} is a memory, and a codec is needed here: {', '.join(sorted(valid))}",
        )
    return both[holders[0]][node.name]


def _argument(text: str, node: Node, name: str, entry: Mapping[str, Any]) -> Any:
    if node.argument is not None:
        return _scalar(text, node.position, f"{node.name}'s {name}", entry, node.argument)
    if "default" in entry:
        return entry["default"]
    raise _error(text, node.position, f"{node.name} needs {name} after a colon{_range(entry)}")


def _item(text: str, node: Node, entry: Mapping[str, Any], items: list[Node]) -> _Compressor:
    if not items:
        what = "memory" if node.name in plugins.find("memories") else "wrapper"
        raise _error(
            text,
            node.position,
            f"{node.name!r} is a {what} and needs a codec inside, e.g. {node.name}(fixpoint:4)",
        )
    return _compressor(text, items.pop(0), ("codecs",))


def _require_plain(text: str, node: Node, nested: _Compressor) -> None:
    """Refuse, inside a codec that sends parts of a message, one that needs to know of others than these."""
    if nested.plugin.extra.get("STATE", "none") != "none":
        why = "keeps something between messages"
    elif "peer" in _uses(nested):
        why = "reads the forward tensor"
    else:
        return
    raise _error(text, node.position, f"{_write(nested)} {why}, so it cannot stand inside {node.name}(...)")


def _surplus(plugin: plugins.Plugin, item: Node) -> str:
    wanted = [n for n, e in plugin.parameters.items() if item.name in e.get("choices", ())]
    if wanted:
        return f"{item.name!r} must be written as {wanted[0]}={item.name}"
    if not any(e.get("place") == "item" for e in plugin.parameters.values()):
        memories = ", ".join(sorted(plugins.find("memories")))
        return f"{plugin.name!r} is a codec and wraps nothing; only a memory ({memories}) takes {item.name!r} inside"
    return f"{plugin.name} wraps one codec, {item.name!r} is one too many"


def _option(text: str, node: Node, name: str, entry: Mapping[str, Any], value: Node | None) -> Any:
    if value is None:
        if "default" not in entry:
            raise _error(text, node.position, f"{node.name} needs the option {name}=")
        given = entry["default"]
        is_codec = entry["type"] == "codec" and given not in entry.get("choices", ())
        return _compressor(given, parse(given), ("codecs",)) if is_codec else given
    word = entry.get("aliases", {}).get(value.name, value.name) if value.is_word else None
    if entry["type"] == "codec":
        words = entry.get("choices", ())
        return word if word in words else _compressor(text, value, ("codecs",), words)
    if word is None:
        raise _error(text, value.position, f"{name} takes a plain value, not a compressor")
    return _scalar(text, value.position, f"{node.name}'s {name}", entry, word)


def _scalar(text: str, position: int, what: str, entry: Mapping[str, Any], word: str) -> Any:
    if entry["type"] == "word":
        if word not in entry["choices"]:
            raise _error(text, position, f"{what} cannot be {word!r}.{near_miss(word, entry['choices'])}")
        return word
    kind = {"int": int, "float": float}[entry["type"]]
    try:
        value = kind(word)
    except ValueError:
        article = "a whole number" if kind is int else "a number"
        raise _error(text, position, f"{what} must be {article}{_range(entry)}, not {word!r}") from None
    low, high, above = entry.get("min"), entry.get("max"), entry.get("above")
    inside = (low is None or value >= low) and (high is None or value <= high) and (above is None or value > above)
    if not inside or not math.isfinite(value):
        raise _error(text, position, f"{what} is {word}, out of range{_range(entry)}")
    return value


def _range(entry: Mapping[str, Any]) -> str:
    low = f"{entry['min']}" if "min" in entry else f"above {entry['above']}" if "above" in entry else None
    if low is None:
        return f" (at most {entry['max']})" if "max" in entry else ""
    return f" ({low} to {entry['max']})" if "max" in entry else f" ({low} or more)"


def _together(text: str, node: Node, plugin: plugins.Plugin, values: Mapping[str, Any]) -> None:
    """What one choice asks of the other parameters: `pins` and `needs`."""
    for name, entry in plugin.parameters.items():
        choice = values[name] if isinstance(values[name], str) else ""
        for pinned in entry.get("pins", {}).get(choice, ()):
            if pinned in node.options:
                raise _error(
                    text,
                    node.options[pinned].position,
                    f"{name}={choice} settles {pinned} itself; leave one of them out",
                )
        for other, least in entry.get("needs", {}).get(choice, {}).items():
            if values[other] < least:
                raise _error(text, node.position, f"{name}={choice} needs {other} of at least {least}")


def _write(node: _Compressor) -> str:
    argument, items, options = "", [], []
    for name, entry in node.plugin.parameters.items():
        place, value = entry.get("place", "option"), node.values[name]
        if place == "fixed":
            continue
        shown = _write(value) if isinstance(value, _Compressor) else f"{value}"
        if place == "item":
            items.append(shown)
        elif "default" not in entry or shown != f"{entry['default']}":
            if place == "argument":
                argument = f":{shown}"
            else:
                options.append(f"{name}={shown}")
    inside = ", ".join([*items, *sorted(options)])
    return f"{node.plugin.name}{argument}" + (f"({inside})" if inside else "")


def _named(node: _Compressor) -> set[str]:
    names = {f"{node.plugin.kind}/{node.plugin.name}"}
    for name, value in node.values.items():
        entry = node.plugin.parameters[name]
        if isinstance(value, _Compressor) and _write(value) != entry.get("default"):
            names |= _named(value)
    return names


def _bits(node: _Compressor) -> float | None:
    if node.plugin.kind == "memories":
        found = _bits(_codec(node))
        return None if found is None else found * node.values.get("messages", 1)
    if "bits" in node.values:
        return None if node.values["bits"] is None else float(node.values["bits"])
    wrapped = [node.values[name] for name, entry in node.plugin.parameters.items() if entry.get("place") == "item"]
    return _bits(wrapped[0]) if wrapped else None


def _estimate(node: _Compressor) -> float:
    if "FORMULA" in node.plugin.extra:
        return float(formula.evaluate(node.plugin.extra["FORMULA"], _names(node)))
    if node.plugin.kind == "memories":
        return _estimate(_codec(node)) * node.values.get("messages", 1)
    found = _bits(node)
    return 32.0 if found is None else found


def _names(node: _Compressor) -> dict[str, Any]:
    """The parameters by name, for an expression: a nested compressor stands for its own estimate, and with
    `_unbiased` after its name for whether it is."""
    names: dict[str, Any] = {}
    for name, value in node.values.items():
        nested = isinstance(value, _Compressor)
        names[name] = _estimate(value) if nested else value
        if nested:
            names[f"{name}_unbiased"] = _unbiased(value)
    return names


def _unbiased(node: _Compressor) -> bool:
    return bool(formula.evaluate(node.plugin.extra.get("UNBIASED", "1 == 0"), _names(node)))


def _uses(node: _Compressor) -> set[str]:
    found: set[str] = set()
    for name, value in node.values.items():
        if isinstance(value, _Compressor):
            found |= _uses(value)
        elif isinstance(value, str):
            found |= set(node.plugin.parameters[name].get("uses", {}).get(value, ()))
    return found


def _codec(node: _Compressor) -> _Compressor:
    for name, entry in node.plugin.parameters.items():
        if node.plugin.kind == "memories" and entry.get("place") == "item":
            return node.values[name]
    return node


def _make(node: _Compressor, given: Mapping[str, Any]) -> Compressor:
    module = node.plugin.load()
    arguments: dict[str, Any] = {}
    for name, value in node.values.items():
        if node.plugin.parameters[name].get("place") != "fixed":
            arguments[name] = _make(value, {}) if isinstance(value, _Compressor) else value
    if node.plugin.kind == "memories":
        arguments |= {name: value for name, value in given.items() if value is not None}
    compressor = _class_of(module, node.plugin.kind)(**arguments)
    compressor.name = _write(node)
    return compressor


def _class_of(module: ModuleType, kind: str) -> Any:
    from thinpipe.harness.compression.base import Codec, Memory

    base = {"codecs": Codec, "memories": Memory}[kind]
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, base) and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise UserError(f"{module.__name__} must define exactly one subclass of {base.__name__}, it has {len(found)}.")
    return found[0]


def _error(text: str, position: int, message: str) -> UserError:
    return UserError(f"compressor {text!r}, character {position + 1}: {message}")
