"""The rooms table of ARCHITECTURE.md is what the code does, and pages stay short."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \| .* \|$", re.MULTILINE)


def rows() -> list[list[str]]:
    """The rooms of each row, top to bottom."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    return [re.findall(r"`(\w+)`", cell) for cell in ROW.findall(text)]


@pytest.fixture(scope="module")
def imports() -> set[tuple[str, str]]:
    """Pairs of rooms of which the first imports the second, with the modules that do."""
    graph = grimp.build_graph("cpsr")
    found = set()
    for module in graph.modules - {"cpsr", "cpsr.__main__"}:
        for target in graph.find_modules_directly_imported_by(module):
            if "." in target and target.split(".")[1] != module.split(".")[1]:
                found.add((module, target))
    return found


def test_every_room_is_in_the_table(imports: set[tuple[str, str]]) -> None:
    named = [room for row in rows() for room in row]
    assert len(named) == len(set(named))
    assert set(named) == {module.split(".")[1] for pair in imports for module in pair}


def test_rooms_import_only_rooms_below_them(imports: set[tuple[str, str]]) -> None:
    place = {room: number for number, row in enumerate(rows()) for room in row}
    upward = [pair for pair in imports if place[pair[0].split(".")[1]] > place[pair[1].split(".")[1]]]
    assert upward == []


def lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def test_pages_are_short() -> None:
    assert lines(ROOT / "ARCHITECTURE.md") <= 160
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1200


# Private to other packages by their names alone.
FOREIGN = {
    "os._exit": "the way out of a forked process",
    "usage._replace": "a method of named tuples",
    "automatic._config": "DeepSpeed's parsed configuration, which the adapter reads as well",
    "engine._INSTRUCTION_MAP": "where the adapter takes hold of DeepSpeed's pipeline",
    "_forward_hooks": "torch lists a module's hooks there only",
    "_forward_pre_hooks": "torch",
    "_optimizer_step_pre_hooks": "torch",
    "_optimizer_step_post_hooks": "torch",
    "_saved_result": "what autograd keeps for a backward",
    "scaler._scale": "where torch keeps a loss scale on its device",
    "scaler._growth_tracker": "torch",
    "torch.Tensor._make_wrapper_subclass": "torch has no other way to make a tensor of another device",
    "torch._C": "torch",
    "expert_groups._get_expert_parallel_group_dict": "DeepSpeed: the groups of experts that there are",
    "expert_groups._create_expert_and_data_parallel": "DeepSpeed: makes one",
}


def private_names(path: Path) -> Iterator[str]:
    """What a file reads of the private attributes of others; `super()` has an object's own."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr):
            owner = ast.unparse(node.value)
            allowed = owner in ("self", "cls", "super()") or {node.attr, f"{owner}.{node.attr}"} & FOREIGN.keys()
            if not allowed:
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {owner}.{node.attr}"


def test_tests_use_public_names() -> None:
    assert [name for path in sorted((ROOT / "tests").rglob("*.py")) for name in private_names(path)] == []


def test_tests_do_not_know_benchmarks() -> None:
    """But for the one module that says where the files of a checkpoint lie, for both."""
    wrong = {
        f"{path.relative_to(ROOT)}:{number}"
        for path in (ROOT / "tests").rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"^\s*(from|import) cpsr\.benchmarks(?!\.harness\.checkpoint_files import)", line)
    }
    assert wrong == set()


def test_results_are_small() -> None:
    files = [path for path in (ROOT / "benchmarks" / "results").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 3e6
