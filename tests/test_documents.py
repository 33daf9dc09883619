"""The tests that documents name exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMED = re.compile(r"`(?:tests/)?((?:\w+/)*test_\w+\.py)?::(\w+)`")


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(
    ("document", "least"),
    [
        ("docs/protocol.md", 40),
        ("docs/leaving.md", 12),
        ("docs/memory.md", 40),
        ("docs/restart.md", 15),
        ("docs/target.md", 20),
        ("SECURITY.md", 12),
    ],
)
def test_named_tests_exist(document: str, least: int) -> None:
    path, absent, count = "", [], 0
    for named, test in NAMED.findall((ROOT / document).read_text(encoding="utf-8")):
        path, count = named or path, count + 1
        if not (ROOT / "tests" / path).is_file() or test not in functions_of(ROOT / "tests" / path):
            absent.append(f"{path}::{test}")
    assert absent == []
    assert count >= least  # the pattern has found what there is
