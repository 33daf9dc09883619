"""Versions that are too old are errors, unknown ones are told."""

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from cpsr.doctor.packages import (
    TESTED,
    TESTED_PYTHONS,
    TESTED_RELEASES,
    check_packages,
    check_python,
    installed_versions,
)

ROOT = Path(__file__).parents[2]
VERSIONS = ROOT / "docs" / "versions.md"
REQUIRED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def here(**others: str | None) -> dict[str, str | None]:
    return {**installed_versions(), **TESTED, **others}


def test_releases_that_are_called_tested_are_those_of_the_matrix() -> None:
    table = re.findall(
        r"^\| (\d+\.\d+)\.\d+ \| (\d+\.\d+)\S+ \| (\d+\.\d+)\.\d+ \|", VERSIONS.read_text(), re.MULTILINE
    )
    assert table
    pythons, *others = (tuple(sorted(set(column), key=Version)) for column in zip(*table, strict=True))
    assert pythons == TESTED_PYTHONS
    assert others == [TESTED_RELEASES["torch"], TESTED_RELEASES["deepspeed"]]


def test_what_is_called_tested_is_the_tested_set() -> None:
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert {name: pinned[name] for name in TESTED} == TESTED
    assert REQUIRED["requires-python"] == f">={TESTED_PYTHONS[0]}"


def test_all_requirements_are_looked_at() -> None:
    names = {Requirement(text).name for text in REQUIRED["dependencies"]}
    assert names - {"packaging"} <= set(installed_versions())  # which an older install may lack
    assert installed_versions()["torch"] == version("torch")


def test_the_tested_set_is_ok() -> None:
    found = check_packages(here())
    assert found.level == "ok"
    assert found.measured.endswith("as tested")
    assert found.figures["torch"] == TESTED["torch"]


def test_what_is_absent_or_too_old_is_named() -> None:
    found = check_packages(here(xxhash=None, torch="2.4.1"))
    assert found.level == "error"
    assert "xxhash is not installed" in found.measured
    assert "torch is 2.4.1, CPSR needs >=2.6" in found.measured


def test_another_release_of_torch_is_a_warning_and_of_others_a_remark() -> None:
    found = check_packages(here(torch="2.14.0+cu130"))
    assert found.level == "warning"
    assert "CPSR is tested with torch 2.6, 2.9 and 2.13;" in found.advice
    assert check_packages(here(torch="2.10.0")).level == "warning"  # between tested ones
    for release in ("2.13.1+cu130", "2.6.0", "2.9.1+cu128"):
        found = check_packages(here(torch=release))
        assert found.level == "ok"
        assert found.measured.endswith("as tested")
    found = check_packages(here(numpy="1.26.4"))
    assert found.level == "ok"
    assert f"(tested: numpy {TESTED['numpy']})" in found.measured


def test_pythons() -> None:
    for release in ("3.11.9", "3.12.1", "3.13.1"):
        assert check_python(release, optimised=False).measured == f"Python {release}, as tested"
    assert check_python("3.14.0", optimised=False).level == "warning"
    assert check_python("3.10.4", optimised=False).level == "error"
    assert "assertions" in check_python("3.11.9", optimised=True).measured
