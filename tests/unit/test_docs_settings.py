"""docs/settings.md against spec.py: every key of RunSpec with its type, default, unit and meaning.

`python tests/unit/test_docs_settings.py` writes its tables anew.
"""

import re
import types
import typing
from pathlib import Path

import pytest

from thinpipe.harness import declared, experiment, sizes
from thinpipe.harness.settings import setting_keys
from thinpipe.harness.spec import TRAIN_PRESETS, Part, Rule, RunSpec

SETTINGS = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
START, END = "<!-- settings: start -->", "<!-- settings: end -->"
BOUNDS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}
WORDS = {int: "whole number", float: "number", str: "text", tuple[int, ...]: "list of whole numbers"}


def render() -> str:
    """One table a part of RunSpec, then its own keys, then those of a rule."""
    parts = [START]
    parts += _table("run", RunSpec, "", [name for name, field in RunSpec.model_fields.items() if not _is_part(field)])
    for name, field in RunSpec.model_fields.items():
        if _is_part(field):
            parts += _table(name, field.annotation, f"{name}.", list(field.annotation.model_fields))
    parts += _table("rules", Rule, "", list(Rule.model_fields))
    return "\n".join([*parts, "", END, ""])


def _is_part(field) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, Part)


def _table(title: str, part: type[Part], prefix: str, names: list[str]) -> list[str]:
    about = ABOUT_RUN if part is RunSpec else " ".join((part.__doc__ or "").split())
    rows = [f"\n### {title}\n", about, "", "| key | type | default | unit | meaning |", "|---|---|---|---|---|"]
    for name in names:
        field = part.model_fields[name]
        default = (
            "required"
            if field.is_required()
            else _none(field)
            if field.default is None
            else f"`{_value(field.default)}`"
        )
        unit = field.json_schema_extra["unit"]
        rows.append(f"| `{prefix}{name}` | {_type(field)} | {default} | {unit} | {field.description} |")
    return rows


ABOUT_RUN = "The keys that stand by themselves. `seed` is not set in an experiment, which lists its `seeds`."


def _value(value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _type(field) -> str:
    union = isinstance(field.annotation, types.UnionType) or typing.get_origin(field.annotation) is typing.Union
    kinds = typing.get_args(field.annotation) if union else (field.annotation,)
    if typing.get_origin(kinds[0]) is typing.Literal:
        shown = ", ".join(f"`{word}`" for word in typing.get_args(kinds[0]))
    elif kinds[0] is bool:
        shown = "`true`, `false`"
    else:
        shown = "compressor, or rules" if tuple[Rule, ...] in kinds else WORDS[kinds[0]]
    limits = [
        text.format(_value(getattr(item, name)))
        for item in field.metadata
        for name, text in BOUNDS.items()
        if hasattr(item, name)
    ]
    empty = [f"or {_none(field)}"] if type(None) in kinds else []
    return ", ".join([shown, *limits, *empty])


def _none(field) -> str:
    # Inside a list of rules TOML's values stand as they are: there is no word for an empty one.
    return "left out" if field in Rule.model_fields.values() else "`none`"


def test_the_tables_of_settings_md_are_those_of_spec():
    text = SETTINGS.read_text(encoding="utf-8")
    found = text[text.index(START) : text.index(END) + len(END) + 1] if START in text else ""
    assert found == render(), (
        "docs/settings.md is out of date: `python tests/unit/test_docs_settings.py` writes it anew"
    )


def test_every_key_is_there_with_its_meaning():
    rows = dict(re.findall(r"^\| `([\w.]+)` \|.*\| ([^|]+) \|$", render(), flags=re.MULTILINE))
    assert set(rows) == set(setting_keys()) | {"seed"} | set(Rule.model_fields)
    assert all(len(meaning) > 5 for meaning in rows.values())


def test_settings_md_says_what_a_training_preset_fills_in():
    text = SETTINGS.read_text(encoding="utf-8")
    for name, filled in TRAIN_PRESETS.items():
        said = re.search(rf"^- \*\*{name}\*\*: (.*?)\.\n", text, flags=re.MULTILINE | re.DOTALL)
        assert said, f"docs/settings.md does not explain train.preset {name!r}"
        assert dict(re.findall(r"`(\w+)` `([^`]+)`", said.group(1))) == {k: _value(v) for k, v in filled.items()}


def example(tmp_path: Path) -> Path:
    """The whole experiment that settings.md shows, as a file."""
    found = re.findall(r"^```toml\n(.*?)^```$", SETTINGS.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert len(found) == 1
    path = tmp_path / "example.toml"
    path.write_text(found[0], encoding="utf-8")
    return path


def test_the_example_of_settings_md_loads_at_each_size(tmp_path):
    made = {size: experiment.load(example(tmp_path), size=size) for size in sizes.SIZES}
    assert [one.name for one in made.values()] == [f"four-bits.{size}" for size in sizes.SIZES]
    assert [one.seeds for one in made.values()] == [[0], [0, 1, 2], [42, 43, 44]]
    assert [len(one.claims) for one in made.values()] == [1, 2, 1]
    rates = {
        size: {cell.settings["network.rate_mbit"] for cell in one.cells() if cell.part == "timing"}
        for size, one in made.items()
    }
    assert rates == {"check": {30}, "cpu": {10, 30, 100}, "paper": {100, 1000, 10000}}
    presets = {size: next(one.cells()).runs[0][1].model.preset for size, one in made.items()}
    assert presets == {"check": "micro", "cpu": "tiny", "paper": "small"}
    assert [part.name for part in made["cpu"].parts][-1] == experiment.COMPOSITION_CHECK


@pytest.mark.parametrize(
    "keys", [experiment.TOP_KEYS, experiment.PART_KEYS, sizes.SIZE_KEYS, declared.COMPOSE_KEYS, declared.NEEDS]
)
def test_settings_md_has_every_key_of_an_experiment(keys):
    text = SETTINGS.read_text(encoding="utf-8")
    about = text[text.index("## The file") : text.index("```toml")]
    for key in keys:
        assert re.search(rf"[`\[\"]{key}\b", about), f"docs/settings.md does not say what {key!r} is"


@pytest.mark.parametrize("word", ["experiment", "part", "arm", "cell", "run", "first visit", "size", "workload"])
def test_settings_md_explains_the_words(word):
    assert re.search(rf"^- \*\*{word}\*\*:", SETTINGS.read_text(encoding="utf-8"), flags=re.MULTILINE)


if __name__ == "__main__":
    text = SETTINGS.read_text(encoding="utf-8")
    SETTINGS.write_text(text.partition(START)[0] + render() + text.partition(f"{END}\n")[2], encoding="utf-8")
    print(f"wrote the tables of {SETTINGS}")
