"""What a wheel would hold: every package and experiment of the checkout, and nothing forgotten."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_declared():
    declared = set(PROJECT["tool"]["setuptools"]["packages"])
    tops = ("harness", "netem", "plots", "experiments")
    found = {path.parent for top in tops for path in (ROOT / top).rglob("__init__.py")}
    assert declared == {"thinpipe"} | {"thinpipe." + p.relative_to(ROOT).as_posix().replace("/", ".") for p in found}


def test_experiments_travel_as_package_data():
    assert "*.toml" in PROJECT["tool"]["setuptools"]["package-data"]["thinpipe.experiments"]
    assert list((ROOT / "experiments").glob("*.toml"))


def test_no_module_lies_outside_a_package():
    for top in ("harness", "netem", "plots"):
        for path in (ROOT / top).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), path


def test_the_tested_set_lies_within_the_ranges():
    from packaging.requirements import Requirement

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.lower().replace("_", "-").split("==") for line in lines if "==" in line)
    extras = PROJECT["project"]["optional-dependencies"]
    for text in [*PROJECT["project"]["dependencies"], *extras["dev"], *extras["data"]]:
        requirement = Requirement(text)
        pin = pins.get(requirement.name.lower())
        if pin is not None:
            assert pin in requirement.specifier, f"constraints.txt pins {requirement.name} {pin}, outside {text}"
