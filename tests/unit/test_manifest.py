"""The manifest: stable, complete, without torch and without names of people or hosts."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

from thinpipe.harness import manifest, plugins
from thinpipe.harness.spec import RunSpec, parse


def test_machine_id_is_the_same_in_every_process():
    code = (
        "import sys; from thinpipe.harness import manifest, plan, store, sweep\n"
        "print(manifest.machine_id(), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [manifest.machine_id(), "False"]


def test_machine_id_changes_with_the_machine(monkeypatch):
    here = manifest.machine_id()
    manifest.machine.cache_clear()
    manifest.machine_id.cache_clear()
    monkeypatch.setattr(manifest.platform, "release", lambda: "9.9.9")
    try:
        assert manifest.machine_id() != here
    finally:
        manifest.machine.cache_clear()
        manifest.machine_id.cache_clear()


def test_collect_is_complete_and_plain():
    spec = parse({"compression": {"forward": "delta(fixpoint:4)"}})
    found = manifest.collect(spec)
    assert json.loads(json.dumps(found)) == found
    assert found["machine_id"] == manifest.machine_id()
    assert found["versions"]["torch"]
    assert found["versions"]["thinpipe"]
    assert "pytest" not in found["versions"]
    assert found["python"] == platform.python_version()
    assert len(found["load_at_start"]) == 3
    assert set(found["tools"]) == {"tc", "ip"}
    assert found["machine"]["cores"] >= 1
    assert platform.node() not in json.dumps(found["machine"])


def test_plugins_with_version_and_hash():
    found = manifest.plugin_hashes(parse({"compression": {"forward": "delta(fixpoint:4)"}}))
    assert {"models/gpt2", "tasks/lm", "codecs/fixpoint", "memories/delta", "codecs/none"} == set(found)
    plugin = plugins.get("models", "gpt2")
    assert found["models/gpt2"] == {"version": plugin.version, "source_hash": plugin.source_hash}
    assert "codecs/fixpoint" not in manifest.plugin_hashes(RunSpec())


def test_source_of_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(plugins, "ROOT", tmp_path)
    assert manifest.source() is None

    def git(*args):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, "-C", str(tmp_path), *args], check=True, capture_output=True, timeout=30)

    git("init", "-q")
    (tmp_path / "harness").mkdir()
    (tmp_path / "harness" / "x").write_text("1")
    assert manifest.source() == {"commit": None, "dirty": True}
    git("add", ".")
    git("commit", "-qm", "x")
    assert manifest.source()["dirty"] is False
    assert len(manifest.source()["commit"]) == 40
    (tmp_path / "results-2").mkdir()
    (tmp_path / "results-2" / "runs.json").write_text("[]")
    assert manifest.source()["dirty"] is False, "results are no source"
    (tmp_path / "harness" / "x").write_text("2")
    assert manifest.source()["dirty"] is True


def test_what_is_not_installed_is_none():
    assert manifest.version("surely-not-installed-anywhere") is None
