"""The tests that documents name exist, their links lead somewhere, and a page is at most two screens long."""

import ast
import re
from pathlib import Path

import pytest
import typer.main

from cpsr.cli.main import app
from docs.site.generated import BEGIN

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
NAMED = re.compile(r"`(?:tests/)?((?:\w+/)*test_\w+\.py)?::(\w+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
TWO_SCREENS = 120


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_tests_exist(page: Path) -> None:
    path, absent = "", []
    for named, test in NAMED.findall(page.read_text(encoding="utf-8")):
        path = named or path
        if not (ROOT / "tests" / path).is_file() or test not in functions_of(ROOT / "tests" / path):
            absent.append(f"{path}::{test}")
    assert absent == []


def test_the_pattern_finds_tests_that_a_page_names() -> None:
    assert len(NAMED.findall((ROOT / "SECURITY.md").read_text(encoding="utf-8"))) > 12


def anchors(path: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = HEADING.findall(path.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    dead = []
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not link.startswith("http") and not (target.exists() and (not anchor or anchor in anchors(target))):
            dead.append(link)
    assert dead == []


def test_every_page_is_linked() -> None:
    linked = {
        (page.parent / link.partition("#")[0]).resolve()
        for page in DOCUMENTS
        for link in LINK.findall(page.read_text(encoding="utf-8"))
    }
    assert [str(page) for page in (ROOT / "docs").rglob("*.md") if page.resolve() not in linked] == []


def test_pages_are_at_most_two_screens() -> None:
    lengths = {
        str(page.relative_to(ROOT)): page.read_text(encoding="utf-8").count("\n")
        for page in (ROOT / "docs").rglob("*.md")
        if BEGIN not in page.read_text(encoding="utf-8")  # references, which nobody reads from end to end
    }
    assert lengths
    assert {page: length for page, length in lengths.items() if length > TWO_SCREENS} == {}


def test_the_version_is_a_semantic_one_and_has_an_entry() -> None:
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_command_is_in_the_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    commands: dict[str, object] = vars(typer.main.get_command(app))["commands"]
    names = [*commands, *vars(commands["bench"])["commands"]]
    assert {"run", "bench", "recovery"} <= set(names)
    assert [name for name in names if not re.search(rf"`(cpsr (bench )?)?{name}\b", text)] == []
