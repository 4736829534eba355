"""A real reproduction of one experiment at its smallest size, killed in the middle and given again, by the command."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from command import command

from thinpipe.harness import resultset
from thinpipe.harness.store import Store

pytestmark = [pytest.mark.lab, pytest.mark.e2e]

# Pictures that scikit-learn ships: nothing is fetched, nothing pretrained.
COMMAND = ["reproduce", "rudakov", "--size", "check", "--experiment", "R8", "--only", "arm=BF16|* bw2"]


def start(folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        command(folder, *COMMAND), cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def ended(store: Store) -> dict[str, int]:
    """run_id -> when it ended."""
    return {path.parent.name: path.stat().st_mtime_ns for path in store.root.glob("runs/*/status.json")}


def test_a_reproduction_that_was_killed_goes_on_to_its_page(tmp_path):
    store = Store(tmp_path / "results")
    killed = start(tmp_path)
    try:
        deadline = time.monotonic() + 300
        while not ended(store) and killed.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert killed.poll() is None, killed.communicate()[0]
    finally:
        killed.kill()
        killed.communicate()
    before = ended(store)
    assert 1 <= len(before) < 3

    again = start(tmp_path)
    try:
        said, _ = again.communicate(timeout=300)
    finally:
        again.kill()
    assert again.returncode == 0, said
    after = ended(store)
    assert len(after) == 3
    assert {run: after[run] for run in before} == before, "what had ended is not run again"
    found = resultset.load(tmp_path / "results" / "rudakov-R8.check")
    assert set(found.tables["runs"]["state"]) == {"done"}
    assert {claim["state"] for claim in found.claims} <= {"holds", "undecided"}, "one seed decides no comparison"
    assert len(json.loads((tmp_path / "results" / "rudakov-R8.check" / "claims.json").read_text())) == len(found.claims)
    page = (tmp_path / "results" / "rudakov.check.html").read_text()
    assert all(claim["sentence"].replace("'", "&#x27;") in page for claim in found.claims)
    assert list((tmp_path / "results" / "rudakov-R8.check" / "figures").glob("value_by_setting*.svg"))
