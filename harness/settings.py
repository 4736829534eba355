"""RunSpec's settings by dotted key: flattening, nesting, and the KEY=VALUE texts of --set. Pure.

>>> nest({"train.lr": 0.1})
{'train': {'lr': 0.1}}
"""

from __future__ import annotations

import tomllib
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from thinpipe.harness.errors import UserError, near_miss

Settings = dict[str, Any]


def parse_override(text: str) -> tuple[str, Any]:
    """("a.b", value) of "a.b=v"; UserError on an unknown key.

    >>> parse_override("network.rate_mbit=[10, 30]")
    ('network.rate_mbit', [10, 30])
    """
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UserError(f"--set {text!r}: write it as key=value, e.g. --set train.epochs=3")
    valid = {**setting_keys(), "seeds": False, "name": False}
    if key not in valid:
        hint = " Seeds are set as a list: --set seeds=[0,1]" if key == "seed" else _near_key(key, valid)
        raise UserError(f"--set {key}: unknown key.{hint}")
    try:
        parsed = tomllib.loads(f"v = {value.strip()}")
    except tomllib.TOMLDecodeError:
        return key, value.strip()
    return (key, parsed["v"]) if set(parsed) == {"v"} else (key, value.strip())


@cache
def setting_keys() -> Mapping[str, bool]:
    """Every dotted key of a RunSpec but the seed -> whether it may be empty (None)."""
    from thinpipe.harness.spec import RunSpec

    def walk(model: Any, prefix: str) -> Iterator[tuple[str, bool]]:
        for name, field in model.model_fields.items():
            if hasattr(field.annotation, "model_fields"):
                yield from walk(field.annotation, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", type(None) in typing.get_args(field.annotation)

    return {key: empty for key, empty in walk(RunSpec, "") if key != "seed"}


def flatten(data: Any, where: str, *, convert: bool = True) -> Settings:
    """Nested or dotted settings -> {dotted key: value}; UserError on a key that RunSpec does not have."""
    keys = setting_keys()
    flat: Settings = {}

    def walk(node: Any, prefix: str) -> None:
        for name, value in node.items():
            key = f"{prefix}{name}"
            if key in keys:
                if key in flat:
                    raise UserError(f"{where}: {key} is set twice.")
                flat[key] = empty(key, value) if convert else value
            elif isinstance(value, Mapping) and any(k.startswith(f"{key}.") for k in keys):
                walk(value, f"{key}.")
            elif any(k.startswith(f"{key}.") for k in keys):
                raise UserError(f"{where}: {key} is a group of settings, it cannot be {value!r}.")
            else:
                hint = " Seeds are listed in `seeds`." if key == "seed" else _near_key(key, keys)
                raise UserError(f"{where}: unknown key {key!r}.{hint}")

    if not isinstance(data, Mapping):
        raise UserError(f"{where}: must be a table of settings, got {data!r}.")
    walk(data, "")
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{dotted key: value} -> nested dicts.

    >>> nest({"a.b": 1, "a.c": 2})
    {'a': {'b': 1, 'c': 2}}
    """
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *groups, leaf = key.split(".")
        node = nested
        for group in groups:
            node = node.setdefault(group, {})
        node[leaf] = value
    return nested


def empty(key: str, value: Any) -> Any:
    """None where `none` stands for it."""
    if key in setting_keys() and setting_keys()[key] and value == "none":
        return None
    return value


def _near_key(key: str, valid: Mapping[str, bool]) -> str:
    """The near miss of a dotted key: among its own group where that exists, so that the list stays
    readable."""
    group = key.rpartition(".")[0]
    same = [k for k in valid if k.rpartition(".")[0] == group]
    if group and same:
        return near_miss(key, same)
    import difflib

    leaf = key.rpartition(".")[2]
    close = difflib.get_close_matches(key, valid, n=1) or [k for k in valid if k.rpartition(".")[2] == leaf]
    hint = f" Did you mean {close[0]!r}?" if close else ""
    groups = sorted({k.partition(".")[0] for k in valid})
    return f"{hint} Valid groups: {', '.join(groups)}."
