import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cpsr.cli import app

JOB: dict[str, Any] = {
    "iteration_seconds": 0.6,
    "checkpoint": {"stall_seconds": 0.9, "persist_seconds": 5.0},
    "failures": {"mtbf_hours": 6},
    "recovery": {"predictable_interval_iterations": 200, "lag": {"per_horizon_iteration": 0.3}},
    "fixed_interval_iterations": 50,
    "ranks": [{"count": 3}],
}


@pytest.fixture
def description(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB), encoding="utf-8")
    return str(path)


def test_for_programs(description: str) -> None:
    result = CliRunner().invoke(app, ["plan", "--spec", description, "--policy", "cpsr", "--policy", "fixed", "--json"])
    assert result.exit_code == 0, result.output
    first, second = json.loads(result.stdout)["plans"]
    assert (first["policy"], first["mode"], first["interval_iterations"]) == ("cpsr", "predict", 200)
    assert first["explanation"]["bound"] == "predictor"
    assert (second["policy"], second["interval_iterations"]) == ("fixed", 50)
    assert len(first["explanation"]["ranks"]["optimum_iterations"]) == 3


def test_for_people(description: str) -> None:
    result = CliRunner().invoke(app, ["plan", "--spec", description])
    assert result.exit_code == 0, result.output
    for word in ("cpsr", "200", "predict", "checkfreq", "theorem1"):
        assert word in result.stdout


def test_mistakes_are_one_line(description: str, tmp_path: Path) -> None:
    unknown = CliRunner().invoke(app, ["plan", "--spec", description, "--policy", "cheapest"])
    assert unknown.exit_code == 2
    assert "cheapest" in unknown.output
    assert "gemini" in unknown.output
    absent = CliRunner().invoke(app, ["plan", "--spec", str(tmp_path / "absent.yaml")])
    assert absent.exit_code == 2
    assert "absent.yaml" in absent.output
