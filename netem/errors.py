"""The one error of this package."""

from __future__ import annotations


class NetemError(Exception):
    """The network cannot be had as asked. The message says what was wrong and what to do about it."""
