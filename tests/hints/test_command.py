import json
import re
from pathlib import Path

import pytest

from tests.cli.commands import cpsr

PAGE = Path(__file__).parents[2] / "docs" / "hints.md"


@pytest.fixture
def description(tmp_path: Path) -> Path:
    """The sample of the page."""
    sample = re.search(r"^```yaml\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert sample is not None
    (tmp_path / "hints.yaml").write_text(sample[1], encoding="utf-8")
    return tmp_path / "hints.yaml"


def test_for_people_as_on_the_page(description: Path) -> None:
    status, out, _ = cpsr("plan", "--hints", description)
    assert status == 0
    shown = PAGE.read_text(encoding="utf-8")
    assert re.search(r"epoch / batch +│ 10000 +│ 4 +│ 78 +│ 128", out)
    for row in re.findall(r"^│ .*$", out, re.MULTILINE):
        assert row in shown


def test_for_programs(description: Path) -> None:
    status, out, _ = cpsr("plan", "--hints", description, "--json")
    assert status == 0
    found = json.loads(out)
    names = {found["hints"][hint] for hint, _ in found["checkpoints"]}
    assert names == {"load", "epoch / batch"}
    assert found["cost_seconds"] <= found["allowed_seconds"]


def test_what_cannot_be_used_is_named(tmp_path: Path, description: Path) -> None:
    status, _, error = cpsr("plan", "--hints", description, "--spec", description)
    assert status == 2
    assert "either --spec" in error
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(description.read_text(encoding="utf-8") + "  - {name: nothing}\n", encoding="utf-8")
    status, _, error = cpsr("plan", "--hints", wrong)
    assert status == 2
    assert "nothing: give either seconds or tasks" in error
