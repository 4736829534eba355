"""Arithmetic in plug-ins' literals: `FORMULA = "bits + 16 / block"`, evaluated without importing the plug-in.

Numbers, text, the plug-in's parameters by name, + - * / **, comparisons, `and`, `or`, `not`, a choice by
`{"fp16": 16, "e8m0": 8}[scale]`, `x if c else y`, and the functions of FUNCTIONS. Nothing else.

>>> evaluate("bits + {'fp16': 16, 'e8m0': 8}[scale] / block", {"bits": 4, "block": 64, "scale": "fp16"})
4.25
>>> evaluate("rounding == 'stochastic' and bits > 1", {"rounding": "nearest", "bits": 4})
False
"""

from __future__ import annotations

import ast
import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any


def _entropy(share: float) -> float:
    """Bits a yes/no takes that is yes with this probability."""
    return -sum(p * math.log2(p) for p in (share, 1 - share) if p > 0)


FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "log2": math.log2, "entropy": _entropy}
_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def evaluate(text: str, names: Mapping[str, Any]) -> Any:
    """The value of an expression. Raises ValueError where it holds something else than the above."""
    return _value(_parse(text), names, text)


@functools.lru_cache(maxsize=512)
def _parse(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{text!r} is no expression: {error.msg}") from None


def _value(node: ast.expr, names: Mapping[str, Any], text: str) -> Any:
    def of(child: ast.expr) -> Any:
        return _value(child, names, text)

    match node:
        case ast.Constant(value=int() | float() | str() as value):
            return value
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -of(operand)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not of(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](of(left), of(right))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](of(left), of(right))
        case ast.BoolOp(op=op, values=values):
            return (all if isinstance(op, ast.And) else any)(of(value) for value in values)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return of(body) if of(test) else of(orelse)
        case ast.Subscript(value=ast.Dict(keys=keys, values=values), slice=index):
            table = {of(key): value for key, value in zip(keys, values, strict=True) if key is not None}
            return of(table[of(index)])
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            return FUNCTIONS[name](*(of(arg) for arg in args))
    raise ValueError(f"{text!r}: {ast.unparse(node)!r} is not allowed or not known here")
