"""The result sets that are kept in git draw their figures again, from their tables alone."""

from __future__ import annotations

import html
from pathlib import Path

import pytest

from thinpipe.harness import resultset
from thinpipe.harness.report import pictures

REFERENCE = Path(__file__).resolve().parents[2] / "results" / "reference"
SETS = sorted(path.parent.name for path in REFERENCE.glob(f"*/{resultset.MANIFEST}"))
# One of each kind: curves of loss, times of replays, a value by a setting, composed curves.
QUICK = ("acsgd-F3c.cpu", "acsgd-A7.cpu", "rudakov-R8.cpu", "acsgd-F4c.cpu")


def test_there_are_such_sets():
    assert set(QUICK) <= set(SETS)


@pytest.mark.parametrize("name", [pytest.param(s, marks=() if s in QUICK else pytest.mark.slow) for s in SETS])
def test_figures_are_rebuilt(name):
    found = resultset.load(REFERENCE / name)
    assert found.figures_folder is None, "tables alone"
    drawn, absent = pictures.of(found, "e0")
    assert absent == {}
    assert {picture.stem.partition(".")[0] for picture in drawn} == set(found.figures)
    arms = set(found.tables["runs"]["arm"])
    for picture in drawn:
        text = html.unescape(picture.content)
        assert any(arm in text for arm in arms), f"{picture.stem} names none of its arms"


@pytest.mark.parametrize("name", SETS)
def test_each_file_is_small_and_each_run_has_its_origin(name):
    folder = REFERENCE / name
    assert all(path.stat().st_size < resultset.MAX_BYTES for path in folder.rglob("*") if path.is_file())
    found = resultset.load(folder)
    assert found.manifest["commits"]
    assert found.manifest["date"]
    assert set(found.tables["runs"]["run_id"]) <= set(found.provenance.runs)
