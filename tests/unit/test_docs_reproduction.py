"""docs/reproduction.md against the results that are kept. `python tests/unit/test_docs_reproduction.py` writes its
tables anew and draws its figures, those whose tables have changed (all with --all); the findings above them are written
by hand, and every claim that fails or diverges must have one."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from thinpipe.harness import experiment, figures, plugins, reproduce, resultset, stats
from thinpipe.harness.claims.metrics import REGISTRY
from thinpipe.harness.report.page import must_be, number, span
from thinpipe.harness.report.pictures import whole

ROOT = Path(__file__).resolve().parents[2]
DOCS, REFERENCE = ROOT / "docs" / "reproduction.md", ROOT / "results" / "reference"
FIGURES = DOCS.parent / "figures"
# A text chunk of each figure's file: the tables it was drawn from.
DRAWN_FROM = "drawn-from"
# Of many panels in a row each must still be legible.
MAX_WIDTH, MAX_HEIGHT = 2400, 850
START = "<!-- results: start; written by tests/unit/test_docs_reproduction.py -->"
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
    lines = [
        f"### Claims of {source}: {manifest['title']}",
        "",
        f"{manifest['question']} {len(runs)} runs, seeds "
        f"{', '.join(map(str, sorted(set(runs['seed']))))}; commit {', '.join(c[:12] for c in manifest['commits'])}, "
        f"{manifest['date'][:10]}. Claims: {counted or 'none'}.",
        "",
        "| name | claim | source | state | value | must be | 90 % interval | n | why |",
        "|---|---|---|---|---:|---:|---:|---:|---|",
    ]
    for claim in found:
        cells = [
            claim["claim"],
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
    lines += throughput(source, runs) if "throughput_vs_bandwidth" in manifest["figures"] else []
    for path in pictures(source):
        lines += ["", f"![{source}: {path.stem}]({path.relative_to(DOCS.parent).as_posix()})"]
    return [*lines, ""]


def throughput(source: str, runs: pd.DataFrame) -> list[str]:
    """Samples a second by method and rate, of each part that was timed: mean of its unflagged runs, and how many."""
    lines = []
    for part, timed in runs[runs["measure"] == "timing"].groupby("part", sort=False):
        rates = sorted(set(timed["rate_mbit"]), reverse=True)
        titles = " | ".join(f"{rate:g} Mbit/s" for rate in rates)
        lines += ["", f"Samples/s of {source}, {part}, mean (runs without a flag):", ""]
        lines += [f"| method | {titles} |", f"|---{'|---:' * len(rates)}|"]
        for arm, of_arm in timed.groupby("arm", sort=False):
            cells = []
            for rate in rates:
                good = of_arm[(of_arm["rate_mbit"] == rate) & (of_arm["fidelity"] == "ok")]["samples_per_s"]
                cells.append(f"{good.mean():.3g} ({len(good)})" if len(good) else "all flagged")
            lines.append(f"| {arm} | {' | '.join(cells)} |")
    return lines


def pictures(source: str) -> list[Path]:
    return sorted((FIGURES / source.replace("/", "-")).glob("*.png"))


def origin(folder: Path) -> str:
    """What a set's figures are drawn from: its tables, which figures it has, of which version, for which target."""
    names = resultset.load(folder).figures
    versions = [(name, plugins.get("figures", name).version) for name in names]
    digest = hashlib.sha256(json.dumps([versions, stats.TOLERANCE]).encode())
    for path in sorted((folder / "tables").iterdir()):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def drawn_from(path: Path) -> str | None:
    with Image.open(path) as image:
        return image.info.get(DRAWN_FROM)


def draw(source: str, folder: Path) -> None:
    """The figures of a set as PNGs of few colours, small enough to keep."""
    found = resultset.load(folder)
    target = FIGURES / source.replace("/", "-")
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    said = PngInfo()
    said.add_text(DRAWN_FROM, origin(folder))
    with tempfile.TemporaryDirectory() as name:
        written, _ = figures.draw(whole(found), Path(name), found.figures, optional=True, formats=("png",))
        for path in written:
            with Image.open(path) as image:
                image.thumbnail((MAX_WIDTH, MAX_HEIGHT))
                image.convert("RGB").quantize(64).save(target / path.name, optimize=True, pnginfo=said)


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
    assert set(PAPERS) == set(reproduce.PAPERS)
    assert len(kept()) >= 39
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
    """What they compare, too: a changed bound or sentence asks for a new verdict (`thinpipe claims`, then save)."""
    declared = experiment.load(source, size="cpu").claims
    judged = claims(kept()[source])
    assert [claim["claim"] for claim in judged] == [claim.name for claim in declared]
    for now, then in zip(declared, judged, strict=True):
        for key in ("sentence", "source", "relation", "metric", "part", "other"):
            assert then[key] == getattr(now, key), f"{now.name}: {key}"
        assert bounds(now, then["bound"]), f"{now.name}: judged against {then['bound']}"


def bounds(claim, judged: float | list[float]) -> bool:
    """Whether a claim was judged against what it says now: a number, or the two ends of `~`."""
    centre = claim.factor if claim.bound is None else claim.bound
    if claim.bound is None and judged == 0.0:
        return claim.relation == "==" or REGISTRY[claim.metric].scale == "difference"
    if isinstance(judged, list):
        return any(judged[1] == pytest.approx(end) for end in (centre * (1 + claim.margin), centre + claim.margin))
    return judged == pytest.approx(centre)


@pytest.mark.parametrize("source", sorted(kept()))
def test_the_undecided_say_what_they_need(source):
    for claim in claims(kept()[source]):
        if claim["state"] == "undecided":
            assert claim["needs"] or claim["why"], claim["claim"]


@pytest.mark.parametrize("source", sorted(kept()))
def test_the_figures_are_drawn_from_the_kept_tables(source):
    folder = kept()[source]
    drawn = pictures(source)
    assert {path.stem.partition(".")[0] for path in drawn} == set(resultset.load(folder).figures)
    stale = [path.name for path in drawn if drawn_from(path) != origin(folder)]
    assert not stale, f"draw them with: python tests/unit/{Path(__file__).name}"
    assert all(path.stat().st_size < 200_000 for path in drawn)


if __name__ == "__main__":
    for source, folder in kept().items():
        if "--all" in sys.argv or {drawn_from(path) for path in pictures(source)} != {origin(folder)}:
            draw(source, folder)
    DOCS.write_text(DOCS.read_text(encoding="utf-8").partition(START)[0] + rendered(), encoding="utf-8")
    print(f"wrote the tables of {DOCS}")
