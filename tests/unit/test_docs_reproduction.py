"""docs/reproduction.md against the results that are kept. `python tests/unit/test_docs_reproduction.py` writes its
tables anew; the findings above them are written by hand, and every claim that fails or diverges must have one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from thinpipe.harness import experiment, reproduce, resultset
from thinpipe.harness.report.page import must_be, number, span

ROOT = Path(__file__).resolve().parents[2]
DOCS, REFERENCE = ROOT / "docs" / "reproduction.md", ROOT / "results" / "reference"
START = "<!-- results: start -->"
PAPERS = {
    "acsgd": "arXiv 2206.01299, AC-SGD / AQ-SGD",
    "rudakov": "arXiv 2401.07788, compression for model-parallel training",
}
MARK = {"holds": "holds", "fails": "**fails**", "undecided": "undecided"}


def kept() -> dict[str, Path]:
    """source (acsgd/F3a) -> folder of its saved set, of the `cpu` size."""
    found = {}
    for paper in PAPERS:
        for source in experiment.group(paper):
            folder = REFERENCE / f"{source.replace('/', '-')}.cpu"
            if (folder / resultset.MANIFEST).exists():
                found[source] = folder
    return found


def claims(folder: Path) -> list[dict]:
    return json.loads((folder / resultset.CLAIMS).read_text(encoding="utf-8"))


def why(source: str, claim: dict) -> str:
    """What a reader must know of the verdict; a failing claim leads to its finding."""
    said = [claim["why"]] if claim["why"] else []
    if claim["state"] == "undecided" and claim["needs"]:
        said.append(f"needs n = {claim['needs']}")
    if claim["state"] == "fails":
        said.append(f"see [{source}](#{anchor(source)})")
    return "; ".join(said)


def anchor(source: str) -> str:
    return re.sub(r"[^a-z0-9-]", "", source.lower().replace(" ", "-"))


def section(source: str, folder: Path) -> list[str]:
    """One experiment: what was run, and its claims."""
    manifest = json.loads((folder / resultset.MANIFEST).read_text(encoding="utf-8"))
    runs = resultset.load(folder).tables["runs"]
    found = claims(folder)
    states = [claim["state"] for claim in found]
    counted = ", ".join(f"{states.count(state)} {state}" for state in MARK if state in states)
    figures = ", ".join(f"`{name}`" for name in manifest["figures"])
    lines = [
        f"### Claims of {source}: {manifest['title']}",
        "",
        f"{manifest['question']} Figures: {figures}. {len(runs)} runs, seeds "
        f"{', '.join(map(str, sorted(set(runs['seed']))))}; commit {', '.join(c[:12] for c in manifest['commits'])}, "
        f"{manifest['date'][:10]}. Claims: {counted or 'none'}.",
        "",
        "| claim | source | state | value | must be | 90 % interval | n | why |",
        "|---|---|---|---:|---:|---:|---:|---|",
    ]
    for claim in found:
        cells = [
            claim["sentence"],
            claim["source"],
            MARK[claim["state"]],
            number(claim["value"]),
            must_be(claim),
            span(claim["interval"]),
            str(claim["n"]),
            why(source, claim),
        ]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return [*lines, ""]


def unchecked(paper: str) -> list[str]:
    """Claims that only the published sizes can check."""
    rows = []
    for source in experiment.group(paper):
        here = {claim.name for claim in experiment.load(source, size="cpu").claims}
        rows += [
            f"| {source} | {claim.sentence} | {claim.source} |"
            for claim in experiment.load(source, size="paper").claims
            if claim.name not in here
        ]
    return (
        [
            "Not run here, since only size `paper` can check them:",
            "",
            "| experiment | claim | source |",
            "|---|---|---|",
            *rows,
            "",
        ]
        if rows
        else []
    )


def overview(found: dict[str, Path]) -> list[str]:
    lines = ["| paper | experiment | holds | fails | undecided |", "|---|---|---:|---:|---:|"]
    for paper in PAPERS:
        for source, folder in found.items():
            if source.startswith(f"{paper}/"):
                states = [claim["state"] for claim in claims(folder)]
                counts = " | ".join(str(states.count(state)) for state in MARK)
                title = json.loads((folder / resultset.MANIFEST).read_text(encoding="utf-8"))["title"]
                lines.append(f"| {paper} | {source.partition('/')[2]}: {title} | {counts} |")
    return [*lines, ""]


def to_come(found: dict[str, Path]) -> list[str]:
    """The experiments whose runs have not all ended at this size."""
    names = [source for paper in PAPERS for source in experiment.group(paper) if source not in found]
    return [f"Not run to the end at this size yet: {', '.join(names)}.", ""] if names else []


def rendered() -> str:
    found = kept()
    lines = [START, "", "## All claims", "", *overview(found), *to_come(found)]
    for paper, title in PAPERS.items():
        lines += [f"## {title}", ""]
        for source, folder in found.items():
            if source.startswith(f"{paper}/"):
                lines += section(source, folder)
        lines += unchecked(paper)
    return "\n".join(lines)


def test_what_is_kept_has_run_to_its_end():
    assert len(kept()) >= 25
    assert set(PAPERS) == set(reproduce.PAPERS)
    for folder in kept().values():
        runs = resultset.load(folder).tables["runs"]
        assert set(runs["state"]) <= {"done", "diverged"}, folder.name
        assert json.loads((folder / resultset.MANIFEST).read_text(encoding="utf-8"))["notes"] == []


def test_the_tables_are_those_of_the_kept_results():
    text = DOCS.read_text(encoding="utf-8")
    assert text[text.index(START) :] == rendered(), f"write them with: python tests/unit/{Path(__file__).name}"


@pytest.mark.parametrize("source", sorted(kept()))
def test_a_claim_that_fails_is_explained(source):
    findings = DOCS.read_text(encoding="utf-8").partition(START)[0]
    failing = [claim["claim"] for claim in claims(kept()[source]) if claim["state"] == "fails"]
    if failing:
        _, heading, after = findings.partition(f"\n### {source}\n")
        assert heading, f"docs/reproduction.md lacks a finding `### {source}`"
        text = after.partition("\n### ")[0]
        missing = [name for name in failing if f"*{name}*" not in text]
        assert not missing, f"the finding of {source} does not speak of {missing}"


@pytest.mark.parametrize("source", sorted(kept()))
def test_the_kept_claims_are_those_declared(source):
    declared = experiment.load(source, size="cpu").claims
    assert [claim["claim"] for claim in claims(kept()[source])] == [claim.name for claim in declared]


@pytest.mark.parametrize("source", sorted(kept()))
def test_the_undecided_say_what_they_need(source):
    for claim in claims(kept()[source]):
        if claim["state"] == "undecided":
            assert claim["needs"] or claim["why"], claim["claim"]


if __name__ == "__main__":
    DOCS.write_text(DOCS.read_text(encoding="utf-8").partition(START)[0] + rendered(), encoding="utf-8")
    print(f"wrote the tables of {DOCS}")
