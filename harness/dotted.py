"""Nested settings by dotted key. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted keys.

    >>> flat({"train": {"lr": 0.1}, "seed": 1})
    {'train.lr': 0.1, 'seed': 1}
    """
    items: dict[str, Any] = {}
    for key, value in data.items():
        items |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return items
