"""What README.md, CONTRIBUTING.md and docs/ tell people to type, open and write is there and works."""

from __future__ import annotations

import ast
import itertools
import re
import shlex
import textwrap
from pathlib import Path

import click
import pytest
import typer
from typer.testing import CliRunner

from thinpipe import cli
from thinpipe.harness import experiment, plugins
from thinpipe.harness.compression import grammar

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
README = TEXTS["README.md"]
# `thinpipe ...` in backticks, or at the start of an indented line.
COMMAND = re.compile(
    r"`thinpipe ([^`]+)`|^ {4}(?:\.venv/bin/)?(?:thinpipe|python -m thinpipe\.cli) (.+)$", re.MULTILINE
)
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
TICKED = re.compile(r"`([^`\n]+)`")
# What is there only after a run, or stands for a name of the reader's.
MADE = re.compile(r"^(\.venv|results|runs|figures|tables)\b|[<{*]|\b[A-Z]{3,}\b")
FOLDERS = ("harness", "netem", "plots", "tests", "docs", "bench", "experiments")


def commands() -> list[tuple[str, str]]:
    """(page, arguments) of every command line shown; comments cut off, `.venv/bin/python -m` included."""
    found = []
    for page, text in TEXTS.items():
        for match in COMMAND.finditer(text.replace(".venv/bin/", "")):
            found.append((page, (match[1] or match[2]).partition(" #")[0].strip()))
    return found


def indented_blocks(text: str) -> list[str]:
    return [textwrap.dedent(block) for block in re.findall(r"(?:^(?: {4}.*)?\n)+", text, flags=re.MULTILINE)]


def paths(text: str) -> list[str]:
    """Paths of this repository that a text names in backticks: with a known folder or suffix, nothing made later."""
    found = []
    for word in TICKED.findall(text):
        known = word.split("/")[0] in FOLDERS and "/" in word
        if (known or re.fullmatch(r"[\w./-]+\.(md|py|toml|txt)", word)) and " " not in word and not MADE.search(word):
            found.append(word.removesuffix("/"))
    return found


def exists(path: str) -> bool:
    """Below the root, or, for a bare file name, anywhere in the tree that is ours."""
    if "/" in path or (ROOT / path).exists():
        return (ROOT / path).exists()
    return any(next((ROOT / folder).rglob(path), None) for folder in FOLDERS)


def test_the_pages_show_commands():
    assert len(commands()) > 12
    assert {arguments.split()[0] for page, arguments in commands() if page == "README.md"} >= {"run", "plan", "net"}


@pytest.mark.parametrize(("page", "arguments"), commands())
def test_a_command_line_parses(page, arguments):
    """Down to the verb, its options and the number of arguments; nothing is executed."""
    command, words = typer.main.get_command(cli.app), shlex.split(arguments)
    context = click.Context(command, info_name="thinpipe")
    while hasattr(command, "commands") and not (words and words[0].startswith("-")):
        name, command, words = command.resolve_command(context, words)
        context = click.Context(command, info_name=name, parent=context)
        if not words and hasattr(command, "commands"):
            return
    mentioned_only = not words and page != "README.md"
    if not mentioned_only:
        command.make_context(context.info_name, list(words))


@pytest.mark.parametrize(("page", "arguments"), commands())
def test_an_experiment_that_a_command_names_exists(page, arguments):
    verb, *rest = shlex.split(arguments)
    before = dict(zip(rest[1:], rest, strict=False))
    names = [w for w in rest if not w.startswith("-") and "=" not in w and before.get(w) != "--size"]
    if verb in ("plan", "run", "tables", "plot") and names:
        *figures, name = names
        assert name in experiment.builtin() or name.endswith((".toml", ".json")) or name.isupper()
        assert set(figures) <= set(plugins.find("figures"))


@pytest.mark.parametrize(("page", "arguments"), commands())
def test_an_experiment_that_a_command_names_expands_as_changed(page, arguments):
    """With the size and the changes that the command gives."""
    verb, *rest = shlex.split(arguments)
    given = list(itertools.pairwise(rest))
    if verb in ("plan", "run", "simulate", "profile") and rest and rest[0] in experiment.builtin():
        sizes = [after for word, after in given if word == "--size"]
        experiment.load(rest[0], [after for word, after in given if word == "--set"], *sizes[:1])


def test_a_network_script_that_a_command_shows_can_be_made():
    """Its arguments parse as words whatever they are, so it is really run: it only prints."""
    shown = [shlex.split(arguments) for page, arguments in commands() if page == "README.md"]
    (words,) = [words for words in shown if words[:2] == ["net", "script"]]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("#!/bin/sh")


@pytest.mark.parametrize("page", TEXTS)
def test_every_relative_link_leads_somewhere(page):
    links = [link for link in LINK.findall(TEXTS[page]) if "://" not in link]
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


@pytest.mark.parametrize("page", TEXTS)
def test_every_path_named_in_backticks_exists(page):
    assert [path for path in paths(TEXTS[page]) if not exists(path)] == []


def test_what_writes_documentation_anew_runs_by_itself():
    """It is started as a plain script, which does not see the helpers that pytest's path has."""
    scripts = re.findall(r"`python (tests/unit/\w+\.py)`", TEXTS["CONTRIBUTING.md"])
    helpers = {path.stem for path in (ROOT / "tests").glob("*.py")}
    assert len(scripts) >= 5
    for script in scripts:
        text = (ROOT / script).read_text(encoding="utf-8")
        assert '__name__ == "__main__"' in text, script
        tree = ast.parse(text)
        froms = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert not (froms | names) & helpers, script


def test_paths_are_really_looked_at():
    assert len(paths(TEXTS["CONTRIBUTING.md"])) > 15
    assert paths("`harness/no.py` `docs/nowhere/` `plots/NAME.py` `a b.py`") == ["harness/no.py", "docs/nowhere"]
    assert not exists("harness/no.py")
    assert not exists("no_such_file.py")


def test_the_readmes_experiment_loads_and_expands(tmp_path):
    (block,) = [block for block in indented_blocks(README) if "[[part]]" in block]
    file = tmp_path / "mine.toml"
    file.write_text(block)
    loaded = experiment.load(file)
    cells = [(cell.part, cell.arm, len(cell.runs)) for cell in loaded.cells()]
    arms = ("FP32", "AQ-SGD fw4 bw8")
    assert sorted(cells) == sorted([("convergence", a, 3) for a in arms] + [("timing", a, 3) for a in arms] * 3)
    assert {spec.measure for cell in loaded.cells() for _, spec in cell.runs} == {"convergence", "timing"}


def test_the_readmes_compressors_can_be_built():
    (block,) = [block for block in indented_blocks(README) if "fp16" in block]
    texts = [text for line in block.strip().splitlines() for text in re.split(r" {2,}", line.strip())[:-1]]
    assert len(texts) == 7
    for text in texts:
        grammar.check(text)
