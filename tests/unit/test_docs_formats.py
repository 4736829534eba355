"""docs/formats.md and docs/numbers.md against the code: columns, figures' arithmetic, nothing missing.

`python tests/unit/test_docs_formats.py` writes the column tables of docs/formats.md anew.
"""

import ast
import math
import operator
import re
import statistics
from pathlib import Path

import pytest

from thinpipe.harness import metrics
from thinpipe.harness.store import STATUS_FIELDS

DOCS = Path(__file__).resolve().parents[2] / "docs"
FORMATS, NUMBERS = DOCS / "formats.md", DOCS / "numbers.md"
START, END = "<!-- columns: start -->", "<!-- columns: end -->"
ABOUT = {
    "runs": "One row a run and part: everything a figure of whole runs needs.",
    "steps": "One row a step and rank.",
    "transfers": "One row a step, boundary and direction, by the sender.",
    "evals": "One row an evaluation, by the rank with the last stage, of the first data group.",
    "spans": "One row a span: what a rank was busy with. Shards only; `phase` is one of "
    + ", ".join(f"`{phase}`" for phase in metrics.PHASES)
    + ".",
    "curves": "One row an epoch of a training and network it was timed at: loss against time (numbers.md, Composed "
    "curves).",
    "composition": "One row a training and network: what its curve is composed of, or lacks, and how far off it is "
    "where it was measured too.",
    "rate_distortion": "One row a compressor and tensor, written by `thinpipe codecs measure` (codecs.md).",
    "predictions": "One row a cell, written by `thinpipe simulate EXPERIMENT --against` (simulate.md).",
}
BENCHMARK_KEYS = (
    "ratio_balanced",
    "ratio_unlimited",
    "ratio_to_bound",
    "vs_reference",
    "vs_memcpy",
    "channel_vs_memcpy",
    "forked_s",
    "fresh_s",
    "ratio",
)


def render() -> str:
    """The column tables, from metrics.TABLES."""
    parts = [START]
    for name, columns in metrics.TABLES.items():
        parts += [
            f"\n### {name}\n",
            ABOUT[name],
            "",
            "| column | type | unit | meaning |",
            "|---|---|---|---|",
        ]
        for key, column in columns.items():
            meaning = column.meaning.replace("|", "\\|") + (" (may be empty)" if column.optional else "")
            parts.append(f"| `{key}` | {column.type.__name__} | {column.unit} | {meaning} |")
    return "\n".join([*parts, "", END, ""])


def test_the_columns_of_formats_md_are_those_of_metrics():
    text = FORMATS.read_text(encoding="utf-8")
    found = text[text.index(START) :] if START in text else ""
    assert found == render(), (
        "docs/formats.md is out of date: `python tests/unit/test_docs_formats.py` writes its columns anew"
    )


def test_formats_md_names_every_field_of_a_status():
    text = FORMATS.read_text(encoding="utf-8")
    assert [name for name in STATUS_FIELDS if f"`{name}`" not in text] == []


@pytest.mark.parametrize("name", [*metrics.RUNS, *BENCHMARK_KEYS])
def test_numbers_md_says_what_a_number_is(name):
    text = NUMBERS.read_text(encoding="utf-8")
    said = re.search(rf"^(### |\| |)(`\w+`, )*`{name}`", text, flags=re.MULTILINE)
    assert said, f"docs/numbers.md has no heading, table row or paragraph that begins with `{name}`"


EXAMPLES = re.findall(r"^Example: `(.+) = (\S+)`$", NUMBERS.read_text(encoding="utf-8"), flags=re.MULTILINE)
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
FUNCTIONS = {
    "max": max,
    "min": min,
    "ceil": math.ceil,
    "sqrt": math.sqrt,
    "exp": math.exp,
    "mean": lambda *values: statistics.fmean(values),
    "median": lambda *values: statistics.median(values),
}


def evaluate(node: ast.AST) -> float:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -evaluate(node.operand)
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right))
    assert isinstance(node, ast.Call), ast.dump(node)
    assert isinstance(node.func, ast.Name), ast.dump(node)
    return FUNCTIONS[node.func.id](*map(evaluate, node.args))


@pytest.mark.parametrize(("formula", "stated"), EXAMPLES)
def test_the_arithmetic_of_an_example(formula, stated):
    """The stated value is the formula's, rounded to the digits shown."""
    digits = len(stated.partition(".")[2])
    assert f"{evaluate(ast.parse(formula, mode='eval').body):.{digits}f}" == stated


def test_every_example_line_is_one_that_is_checked():
    lines = re.findall(r"^Example:", NUMBERS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(lines) == len(EXAMPLES)
    assert len(lines) > 25


if __name__ == "__main__":
    text = FORMATS.read_text(encoding="utf-8")
    FORMATS.write_text(text.partition(START)[0] + render(), encoding="utf-8")
    print(f"wrote the columns of {FORMATS}")
