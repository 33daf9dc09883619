import json
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cpsr.cli.main import app

JOB: dict[str, Any] = {
    "iteration_seconds": 0.6,
    "checkpoint": {"stall_seconds": 0.9, "persist_seconds": 5.0},
    "failures": {"mtbf_hours": 6},
    "recovery": {"predictable_interval_iterations": 200, "end_cost": {"per_horizon_iteration": 0.3}},
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


def test_for_people(description: str) -> None:
    result = CliRunner().invoke(app, ["plan", "--spec", description])
    assert result.exit_code == 0, result.output
    for word in ("cpsr", "200", "predict", "checkfreq", "theorem1"):
        assert word in result.stdout


def samples() -> Iterator[tuple[str, str, str]]:
    """Command, name and text of every description that the help texts and the page show."""
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    for name, text in re.findall(r"^```yaml\n# (\S+)[^\n]*\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        yield "plan", name, text
    for command, name in (("plan", "job.yaml"), ("simulate", "simulation.yaml")):
        printed = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"}).stdout
        assert name in printed
        shown = re.search(r"^ +iteration_seconds:.*?(?=^\s*$)", printed, re.DOTALL | re.MULTILINE)
        assert shown is not None, printed
        yield command, name, textwrap.dedent(shown[0])


def test_every_sample_is_taken_as_it_is_printed(tmp_path: Path) -> None:
    found = list(samples())
    assert [(command, name) for command, name, _ in found] == [
        ("plan", "job.yaml"),
        ("plan", "job.yaml"),
        ("simulate", "simulation.yaml"),
    ]
    for command, name, text in found:
        (tmp_path / name).write_text(text, encoding="utf-8")
        result = CliRunner().invoke(app, [command, "--spec", str(tmp_path / name)])
        assert result.exit_code == 0, result.output


def test_a_simulation_is_refused_with_its_command(tmp_path: Path) -> None:
    path = tmp_path / "simulation.yaml"
    failures = {"mtbf_hours": 6, "process": "poisson"}
    path.write_text(yaml.safe_dump(JOB | {"wall_days": 2.0, "runs": 2, "failures": failures}), encoding="utf-8")
    refused = CliRunner().invoke(app, ["plan", "--spec", str(path)])
    assert refused.exit_code == 2
    message = " ".join(refused.output.split())
    assert "describes a simulation: runs, wall_days, failures.process are keys of `cpsr simulate`" in message
    assert "unknown key" not in message
    named = re.search(r"`cpsr (simulate --spec [^`]+)`", message)
    assert named is not None
    assert CliRunner().invoke(app, shlex.split(named[1])).exit_code == 0
    path.write_text(yaml.safe_dump(JOB), encoding="utf-8")  # the other way round nothing has to be left out
    assert CliRunner().invoke(app, ["simulate", "--spec", str(path)]).exit_code == 0


def test_mistakes_are_one_line(description: str, tmp_path: Path) -> None:
    unknown = CliRunner().invoke(app, ["plan", "--spec", description, "--policy", "cheapest"])
    assert unknown.exit_code == 2
    assert "cheapest" in unknown.output
    assert "gemini" in unknown.output
    absent = CliRunner().invoke(app, ["plan", "--spec", str(tmp_path / "absent.yaml")])
    assert absent.exit_code == 2
    assert "absent.yaml" in absent.output


def test_both_tiers_of_a_job_with_replicas(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    tiers = {
        "memory": {"stall_seconds": 0.01, "replica_seconds": 2},
        "failures": {"mtbf_hours": 6, "process_fraction": 0.5},
    }
    path.write_text(yaml.safe_dump(JOB | tiers), encoding="utf-8")
    result = CliRunner().invoke(app, ["plan", "--spec", str(path), "--json"])
    assert result.exit_code == 0, result.output
    (plan,) = json.loads(result.stdout)["plans"]
    assert 1 < plan["memory_interval_iterations"] < plan["interval_iterations"]
    classes = plan["explanation"]["classes"]
    assert [one["back_to"] for one in classes.values()] == ["memory", "replica", "disk"]
    assert (classes["process"]["share"], classes["machine"]["share"]) == (0.5, 0.45)
    printed = CliRunner().invoke(app, ["plan", "--spec", str(path)]).stdout
    for word in ("replica", "everything", "memory"):
        assert word in printed
