"""Plug-ins are found by their files, described by their literals, and never imported before use."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from thinpipe.harness import plugins
from thinpipe.harness.compression import grammar
from thinpipe.harness.errors import UserError

# A third party's codec in these tests: a name that no codec of ours will ever take.
NAME = "only_of_this_test"
GOOD = """
VERSION = 3
SUMMARY: str = "keeps the sign"
SOURCE = "a test"
PARAMETERS = {"bits": {"place": "argument", "type": "int", "min": 1, "max": 2}}
"""
CODEC = (
    "import torch\nfrom thinpipe.harness.compression.base import Codec\n"
    + GOOD
    + """
class Sign(Codec):
    def __init__(self, bits):
        self.bits = bits
    def encode(self, x, ctx, out):
        return 0
    def decode(self, payload, ctx, out):
        return out
    def max_bytes(self, shape):
        return 0
"""
)


def write(folder: Path, text: str, name: str = "plugged_in") -> Path:
    path = folder / f"{name}.py"
    path.write_text(text)
    return path


@pytest.fixture
def entry_point(tmp_path, monkeypatch):
    """Register a module of `text` as a third party's entry point."""

    def register(text: str, name: str = NAME, group: str = "thinpipe.codecs", module: str = "plugged_in") -> None:
        write(tmp_path, text, module)
        entry = importlib.metadata.EntryPoint(name, module, group)
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry] if group == entry.group else [])
        monkeypatch.syspath_prepend(str(tmp_path))
        forget()

    def forget() -> None:
        plugins._find.cache_clear()
        grammar._resolve.cache_clear()
        sys.modules.pop("plugged_in", None)

    yield register
    monkeypatch.undo()
    forget()


def test_every_file_of_ours_is_a_plug_in_with_its_literals() -> None:
    for kind in ("codecs", "memories", "models", "tasks"):
        files = {p.stem for p in (plugins.ROOT / plugins.FOLDERS[kind]).glob("*.py")} - plugins.NOT_PLUGINS
        found = plugins.find(kind)
        hyphen = kind in plugins.HYPHENATED
        names = {name.replace("_", "-") if hyphen else name for name in files if not name.startswith("_")}
        assert set(found) == names
        for plugin in found.values():
            assert plugin.version >= 1
            assert plugin.summary
            assert plugin.source
    assert set(plugins.find("codecs")) >= {"none", "fp16", "bf16", "fixpoint"}
    assert set(plugins.find("memories")) >= {"delta"}


def test_an_unknown_name_is_answered_with_a_near_miss() -> None:
    with pytest.raises(UserError, match=r"unknown codec 'fixpont'. Did you mean 'fixpoint'\? Valid: bf16,"):
        plugins.get("codecs", "fixpont")


def test_reading_takes_literals_without_importing(tmp_path) -> None:
    path = write(tmp_path, "raise SystemExit('imported')\n" + GOOD)
    plugin = plugins.read("codecs", NAME, "plugged_in", path)
    assert (plugin.version, plugin.summary, plugin.source) == (3, "keeps the sign", "a test")
    assert plugin.parameters["bits"]["max"] == 2
    other = plugins.read("codecs", NAME, "plugged_in", write(tmp_path, GOOD))
    assert plugin.source_hash != other.source_hash


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("VERSION = 3", "", "lacks the literal.* VERSION"),
        ("VERSION = 3", "VERSION = 1 + 2", "must be a literal"),
        ("VERSION = 3", "VERSION = '3'", "must be a int"),
        ("PARAMETERS = {", "PARAMETERS = dict(a=1) or {", "must be a literal"),
    ],
)
def test_literals_that_are_none(tmp_path, old: str, new: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plugins.read("codecs", NAME, "plugged_in", write(tmp_path, GOOD.replace(old, new)))


def test_a_third_party_codec_is_one_file(entry_point) -> None:
    entry_point(CODEC)
    assert grammar.canonical(f"delta({NAME}:2, cache={NAME}:01)") == f"delta({NAME}:2, cache={NAME}:1)"
    assert grammar.bits(f"{NAME}:1") == 1
    assert grammar.plugins_used(f"{NAME}:1") == {f"codecs/{NAME}"}
    assert "plugged_in" not in sys.modules, "checking a text must not import"
    with pytest.raises(UserError, match="1 to 2"):
        grammar.check(f"{NAME}:3")
    codec = grammar.build(f"{NAME}:2")
    assert (codec.name, codec.bits) == (f"{NAME}:2", 2)


def test_a_module_with_no_class_or_two_is_refused(entry_point) -> None:
    entry_point(GOOD)
    with pytest.raises(UserError, match="exactly one subclass of Codec, it has 0"):
        grammar.build(f"{NAME}:1")
    entry_point(CODEC + "\nclass Other(Sign):\n    pass\n")
    with pytest.raises(UserError, match="it has 2"):
        grammar.build(f"{NAME}:1")


def test_duplicates_are_refused(entry_point) -> None:
    entry_point(CODEC, name="fixpoint")
    with pytest.raises(UserError, match="two codecs are called 'fixpoint'"):
        plugins.find("codecs")
    entry_point(CODEC, name="delta")
    with pytest.raises(UserError, match="a codec and a memory are both called 'delta'"):
        grammar.check("delta(fixpoint:4)")


def test_an_entry_point_without_a_module(entry_point) -> None:
    entry_point(CODEC, module="plugged_in")
    importlib.metadata.entry_points(group="thinpipe.codecs")
    entry = importlib.metadata.EntryPoint(NAME, "no_such_module_here", "thinpipe.codecs")
    with pytest.raises(UserError, match="no module that can be found"):
        plugins._find_spec(entry)
