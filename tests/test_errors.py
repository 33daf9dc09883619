"""Every exception names its section of docs/errors.md, which says what happened, what was kept and what to do."""

import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from cpsr import errors
from cpsr.errors import CPSRError
from cpsr.launch.agent import HOW_IT_ENDS

PAGE = Path(__file__).parents[1] / "docs" / "errors.md"
SECTION = re.compile(r"^## (\w+)$", re.MULTILINE)
# Where classes of other modules derive from these.
FURTHER = ("checkpoint.commit", "checkpoint.replicated", "checkpoint.verify")


def sections() -> dict[str, str]:
    parts = SECTION.split(PAGE.read_text(encoding="utf-8"))
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def below(kind: type[CPSRError]) -> Iterator[type[CPSRError]]:
    yield kind
    for derived in kind.__subclasses__():
        yield from below(derived)


def test_every_class_has_a_section() -> None:
    assert sections().keys() == set(errors.__all__)


@pytest.mark.parametrize("name", errors.__all__)
def test_a_section_says_what_happened_what_was_kept_and_what_to_do(name: str) -> None:
    said = re.findall(r"^- \*\*(\w+):\*\* \S", sections()[name], re.MULTILINE)
    assert said == ["Happened", "Kept", "Do"]


@pytest.mark.parametrize("name", errors.__all__)
def test_the_note_of_an_error_names_its_section(name: str) -> None:
    error = getattr(errors, name)("it happened")
    assert str(error) == "it happened"
    printed = traceback.format_exception(error)
    assert printed[-2:] == [f"cpsr.errors.{name}: it happened\n", f"[docs/errors.md#{name.lower()}]\n"]


def test_a_class_of_another_module_has_the_section_of_its_base() -> None:
    for module in FURTHER:
        import_module(f"cpsr.{module}")
    named = {kind.__name__: kind.reference() for kind in below(CPSRError)}
    assert len(named) > len(errors.__all__)
    anchors = {f"docs/errors.md#{name.lower()}" for name in sections()}
    assert set(named.values()) <= anchors
    assert named["DamagedFileError"] == "docs/errors.md#checkpointcorrupterror"
    assert named["SupersededError"] == "docs/errors.md#checkpointerror"


def test_one_line_is_one_line() -> None:
    assert CPSRError("two\n  lines").one_line() == "two lines [docs/errors.md#cpsrerror]"


def test_the_section_of_the_launchers_last_line_exists() -> None:
    page, _, anchor = HOW_IT_ENDS.strip("[]").partition("#")
    headings = re.findall(r"^## (.+)$", (PAGE.parents[1] / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert anchor in {heading.lower().replace(" ", "-") for heading in headings}


def test_the_command_line_prints_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cpsr", "inspect", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"cpsr: .+ \[docs/errors\.md#\w+\]\n", done.stderr)
