"""The demo end to end, at its shortest."""

import json
from pathlib import Path

import pytest

from cpsr.demo.main import run_demo

pytestmark = pytest.mark.slow


def test_the_way_from_the_kill_to_the_first_step_is_timed_part_by_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_demo(tmp_path, iterations=400)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["recovery"]["failure_iteration"] == 192
    parts = result["restart_parts"]
    assert result["restart_seconds"] == pytest.approx(sum(part["seconds"] for part in parts))
    assert result["restart_ours_seconds"] == pytest.approx(sum(part["seconds"] for part in parts if part["ours"]))
    assert 0 < result["restart_ours_seconds"] < result["restart_seconds"]
    assert all(part["seconds"] >= 0 for part in parts)
    assert len(parts) == 11  # rank 0 noted the end of its life: rank 1 was killed
    report = (tmp_path / "report.html").read_text()
    assert all(part["name"].replace("'", "&#x27;") in report for part in parts)
    assert "from the kill to the first new step" in capsys.readouterr().out
