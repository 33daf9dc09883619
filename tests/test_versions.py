"""The version is a semantic one, and the changelog names every command."""

import re
from pathlib import Path

import pytest
import typer.main

from cpsr.cli.main import app

ROOT = Path(__file__).parents[1]


def test_the_version_is_a_semantic_one_and_has_an_entry() -> None:
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("the source tree is elsewhere")
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_command_is_in_the_changelog() -> None:
    if not (ROOT / "CHANGELOG.md").exists():
        pytest.skip("the source tree is elsewhere")
    text = (ROOT / "CHANGELOG.md").read_text()
    commands: dict[str, object] = vars(typer.main.get_command(app))["commands"]
    names = [*commands, *vars(commands["bench"])["commands"]]
    assert {"run", "bench", "recovery"} <= set(names)
    assert [name for name in names if not re.search(rf"`(cpsr (bench )?)?{name}\b", text)] == []
