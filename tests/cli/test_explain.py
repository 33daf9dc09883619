"""`cpsr explain` has a section for every reference that CPSR prints."""

import re
from pathlib import Path

import pytest

import cpsr
from cpsr import errors
from cpsr.cli.explain import explain
from cpsr.errors import ConfigError
from tests.cli.commands import cpsr as command

PACKAGE = Path(cpsr.__file__).parent
REFERENCE = re.compile(r"docs/\w+\.md(?:#[\w-]+)?")


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_explained_by_its_name_and_by_what_its_message_ends_with(name: str) -> None:
    section = explain(name)
    assert section.startswith(f"## {name}\n")
    assert section.count("\n## ") == 0
    assert explain(f"[{getattr(errors, name).reference()}]") == section


def test_every_page_that_the_code_names_is_there() -> None:
    named = {found for path in PACKAGE.rglob("*.py") for found in REFERENCE.findall(path.read_text(encoding="utf-8"))}
    assert len(named) > 5
    for reference in sorted(named):
        assert explain(reference)


def test_the_command_prints_the_section_or_says_what_there_is() -> None:
    status, printed, _ = command("explain", "rundirectoryerror")
    assert status == 0
    assert printed.startswith("## RunDirectoryError\n")
    assert command("explain", "NoSuchError")[0] == 2
    with pytest.raises(ConfigError, match=r"errors.md has no section 'NoSuchError'; its sections: .*configerror"):
        explain("NoSuchError")
    with pytest.raises(ConfigError, match=r"there is no page nowhere.md"):
        explain("docs/nowhere.md#at-all")


def test_the_version_is_that_of_the_package() -> None:
    assert command("--version")[:2] == (0, f"cpsr {cpsr.__version__}\n")
    assert re.fullmatch(r"\d+\.\d+\.\d+", cpsr.__version__)
