"""The rooms table of ARCHITECTURE.md is what the code does."""

import re
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| `(\w+)` \| .* \| ([^|]+) \|$", re.MULTILINE)


def table() -> dict[str, set[str] | None]:
    """Room -> the rooms it may import; None is all."""
    rows: dict[str, set[str] | None] = {}
    for room, column in ROW.findall((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")):
        cell = column.strip()
        rows[room] = None if cell == "all" else set() if cell == "-" else {name.strip() for name in cell.split(",")}
    return rows


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Room -> the rooms it imports, from the code."""
    graph = grimp.build_graph("cpsr")
    found: dict[str, set[str]] = {}
    for module in graph.modules - {"cpsr", "cpsr.__main__"}:
        room = module.split(".")[1]
        targets = {target.split(".")[1] for target in graph.find_modules_directly_imported_by(module) if "." in target}
        found.setdefault(room, set()).update(targets - {room})
    return found


def test_every_room_is_in_the_table(imports: dict[str, set[str]]) -> None:
    assert set(table()) == set(imports)


def test_rooms_import_only_what_the_table_allows(imports: dict[str, set[str]]) -> None:
    wrong = {}
    for room, allowed in table().items():
        if allowed is not None and not imports[room] <= allowed:
            wrong[room] = imports[room] - allowed
    assert wrong == {}


def test_the_table_allows_nothing_that_is_not_used(imports: dict[str, set[str]]) -> None:
    unused = {room: allowed - imports[room] for room, allowed in table().items() if allowed}
    assert {room: names for room, names in unused.items() if names} == {}


def test_no_room_imports_in_a_circle(imports: dict[str, set[str]]) -> None:
    done: set[str] = set()
    rest = dict(imports)
    while ready := [room for room, targets in rest.items() if targets <= done]:
        done |= {room for room in ready if rest.pop(room) is not None}
    assert rest == {}
