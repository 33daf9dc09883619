"""The public names are those of docs/versions.md, each with a docstring; what is renamed is told."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

from cpsr.config.renamed import RENAMED

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| `(cpsr[\w.]*)` \| (.+) \|$", re.MULTILINE)
PUBLIC = {
    module: re.findall(r"`(\w+)`", names)
    for module, names in ROW.findall((ROOT / "docs" / "versions.md").read_text(encoding="utf-8"))
}


INTEGRATIONS = {"accelerate", "lightning", "loggers", "transformers"}  # the other modules are parts of these


@pytest.mark.parametrize("module", PUBLIC)
def test_the_page_lists_what_a_module_offers(module: str) -> None:
    loaded = importlib.import_module(module)
    assert sorted(PUBLIC[module]) == sorted(loaded.__all__)
    for name in loaded.__all__:
        assert inspect.getdoc(getattr(loaded, name)), name


def test_what_users_import_is_on_the_page() -> None:
    assert {
        "cpsr",
        "cpsr.client",
        "cpsr.errors",
        *(f"cpsr.integrations.{one}" for one in INTEGRATIONS),
    } <= PUBLIC.keys()
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py")]
    shown = re.findall(
        r"^from (cpsr[\w.]*) import ([\w, ]+)", "\n".join(page.read_text() for page in pages), re.MULTILINE
    )
    assert len(shown) > 5
    for module, names in shown:
        assert {name.strip() for name in names.split(",")} <= set(PUBLIC.get(module, ())), module


def test_renamed_keys_are_in_the_changelog() -> None:
    if not (ROOT / "CHANGELOG.md").exists():
        pytest.skip("the source tree is elsewhere")
    told = re.findall(r"^\| `([\w.]+)` \| `([\w.]+)` \|$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert dict(told).items() >= RENAMED.items()


def test_the_version_is_a_semantic_one_and_has_an_entry() -> None:
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("the source tree is elsewhere")
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()
