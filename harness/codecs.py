"""What `thinpipe codecs` shows: every codec and memory by its literals, nothing imported; and the presets.

>>> form(plugins.get("codecs", "fp16")), example(plugins.get("memories", "delta"))
('fp16', 'delta(fixpoint:4)')
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Mapping
from typing import Any

from thinpipe.harness import plugins
from thinpipe.harness.compression import grammar
from thinpipe.harness.compression_presets import PRESETS
from thinpipe.harness.errors import UserError, near_miss

KINDS = {"codecs": "codec", "memories": "memory"}
# What an example wraps, and a whole number where it needs one.
INSIDE, BITS = "fixpoint:4", 4


def listing() -> list[dict[str, Any]]:
    """A row a codec and memory: name, kind, form, summary, formula (expression, None: its bits), example and what it
    takes, whether that is unbiased and when any is, what it keeps, source, module."""
    return [_row(plugin) for plugin in _plugins().values()]


def one(name: str) -> dict[str, Any]:
    """All that is known of one, its parameters and CONTRACT too; or of a preset. UserError for an unknown name."""
    found = _plugins()
    if name in found:
        plugin = found[name]
        return {
            **_row(plugin),
            "version": plugin.version,
            "parameters": [_parameter(key, entry) for key, entry in plugin.parameters.items()],
            "contract": contract(plugin),
            "file": str(plugin.path),
        }
    if name in PRESETS:
        return next(row for row in presets() if row["name"] == name)
    raise UserError(
        f"no codec, memory or preset is called {name!r}.{near_miss(name, found)} Presets: `thinpipe codecs --presets`."
    )


def presets() -> list[dict[str, Any]]:
    """A row a preset: name, its settings, summary, source, bits an element either way once the warm-up is over."""
    return [
        {
            "name": name,
            **preset.settings(),
            "forward_bits": grammar.estimate(preset.forward),
            "backward_bits": grammar.estimate(preset.backward),
            "summary": preset.summary,
            "source": preset.source,
        }
        for name, preset in PRESETS.items()
    ]


def form(plugin: plugins.Plugin) -> str:
    """How it is written, with all it can be given: "fixpoint:BITS(rounding=nearest|stochastic, ...)"."""
    argument = ""
    inside: list[str] = []
    for name, entry in plugin.parameters.items():
        place = entry.get("place", "option")
        if place == "argument":
            argument = f":{name.upper()}" if "default" not in entry else f"[:{name.upper()}]"
        elif place == "item":
            inside.insert(0, "CODEC")
        elif place == "option":
            inside.append(f"{name}={_values(name, entry)}")
    return f"{plugin.name}{argument}" + (f"({', '.join(inside)})" if inside else "")


def example(plugin: plugins.Plugin) -> str:
    """A usual text of it, canonical, else the first of its CONTRACT: what its bits an element are shown for."""
    inside = "".join(f"({INSIDE})" for entry in plugin.parameters.values() if entry.get("place") == "item")
    needed = [e for e in plugin.parameters.values() if e.get("place") == "argument" and "default" not in e]
    if not needed or needed[0]["type"] == "int":
        with contextlib.suppress(UserError):
            return grammar.canonical(f"{plugin.name}{f':{BITS}' if needed else ''}{inside}")
    return grammar.canonical(next(iter(contract(plugin))))


def contract(plugin: plugins.Plugin) -> dict[str, dict[str, Any]]:
    """Its CONTRACT, text -> bounds, those that are no literals (2.0**120) as text. UserError where there is none."""
    for node in ast.parse(plugin.path.read_text(encoding="utf-8")).body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or not isinstance(node.value, ast.Dict):
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, ast.Name) and target.id == "CONTRACT":
            given = zip(node.value.keys, node.value.values, strict=True)
            return {_plain(text): _bounds(bounds) for text, bounds in given}
    raise UserError(
        f"{plugin.path.name} has no CONTRACT that can be read without importing it: text -> bounds, literals."
    )


def _bounds(node: ast.AST) -> dict[str, Any]:
    if not isinstance(node, ast.Dict):
        return {"bounds": _plain(node)}
    return {str(_plain(key)): _plain(value) for key, value in zip(node.keys, node.values, strict=True)}


def _plain(node: ast.AST | None) -> Any:
    assert node is not None, "a dict spread into a literal"
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def _plugins() -> dict[str, plugins.Plugin]:
    return {name: plugin for kind in KINDS for name, plugin in sorted(plugins.find(kind).items())}


def _row(plugin: plugins.Plugin) -> dict[str, Any]:
    text = example(plugin)
    return {
        "name": plugin.name,
        "kind": KINDS[plugin.kind],
        "form": form(plugin),
        "summary": plugin.summary,
        "formula": plugin.extra.get("FORMULA"),
        "example": text,
        "bits_per_element": round(grammar.estimate(text), 4),
        "first_visit_bits": round(grammar.first_visit_bits(text), 4),
        "exact": _is_exact(plugin, text),
        "unbiased": grammar.is_unbiased(text),
        "unbiased_when": plugin.extra.get("UNBIASED"),
        "state": grammar.state(text),
        "uses": sorted(grammar.uses(text)),
        "source": plugin.source,
        "module": plugin.module,
    }


def _is_exact(plugin: plugins.Plugin, text: str) -> bool:
    """Whether its CONTRACT allows `text` no error at all."""
    bounds = contract(plugin).get(text)
    return bounds is not None and not any(bounds.values())


def _parameter(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter for people: where it is written, what it may be, what it is when not written."""
    place = entry.get("place", "option")
    shown = {"name": name, "place": place, "type": entry.get("type", "")}
    shown["values"] = str(entry["value"]) if place == "fixed" else _values(name, entry)
    shown["default"] = None if "default" not in entry else str(entry["default"])
    notes = [f"{word}: settles {', '.join(pinned)}" for word, pinned in entry.get("pins", {}).items()]
    for word, least in entry.get("needs", {}).items():
        notes += [f"{word}: needs {other} of at least {value}" for other, value in least.items()]
    notes += [f"{word}: uses the {' and the '.join(what)}" for word, what in entry.get("uses", {}).items()]
    notes += [f"{word}: the same as {meant}" for word, meant in entry.get("aliases", {}).items()]
    return {**shown, "notes": notes}


def _values(name: str, entry: Mapping[str, Any]) -> str:
    words = "|".join(entry.get("choices", ()))
    if entry["type"] == "codec":
        return f"{words}|CODEC" if words else "CODEC"
    if words:
        return words
    low = str(entry["min"]) if "min" in entry else f"above {entry['above']}" if "above" in entry else None
    if low is None:
        return f"up to {entry['max']}" if "max" in entry else name.upper()
    return f"{low} to {entry['max']}" if "max" in entry else f"{low} or more" if "min" in entry else low
