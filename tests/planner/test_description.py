import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cpsr.cli.main import app
from cpsr.config import read_model
from cpsr.errors import ConfigError
from cpsr.fitter.failures import PRIOR_SHARES
from cpsr.planner.description import PlanSpec
from cpsr.planner.inputs import MemoryTier
from cpsr.planner.recovery_curve import EndCostCurve, PaperCurve
from tests.planner.jobs import PHASE

GIVEN_PHASE = {name: value for name, value in vars(PHASE).items() if name != "tau1_low_per_checkpoint"}

DESCRIPTION: dict[str, Any] = {
    "iteration_seconds": 0.6,
    "checkpoint": {"stall_seconds": 0.8, "persist_seconds": 4.0},
    "failures": {"mtbf_hours": 12, "restart_seconds": 30},
    "recovery": {"predict_seconds": 2, "end_cost": {"constant_iterations": -10, "per_horizon_iteration": 0.8}},
}


def changed(**fields: Any) -> dict[str, Any]:
    return {**DESCRIPTION, **fields}


def read(directory: Path, description: Any) -> PlanSpec:
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(description), encoding="utf-8")
    return read_model(PlanSpec, path)


def test_a_description_becomes_inputs(tmp_path: Path) -> None:
    inputs = read(tmp_path, DESCRIPTION).inputs()
    assert (inputs.stall_seconds, inputs.persist_seconds) == (0.8, 4.0)
    assert inputs.failures_per_second == pytest.approx(1 / 43200)
    assert inputs.recovery == EndCostCurve(-10.0, 0.8, 0.0, source="the job's description")


def test_snapshots_in_memory_and_what_failures_leave(tmp_path: Path) -> None:
    assert read(tmp_path, DESCRIPTION).inputs().memory is None
    inputs = read(tmp_path, changed(memory={"stall_seconds": 0.1, "replica_seconds": 3})).inputs()
    assert inputs.memory == MemoryTier(0.1, None, 3.0)
    assert inputs.disk_share == PRIOR_SHARES["everything"]
    failures = {"mtbf_hours": 12, "process_fraction": 0.6, "everything_fraction": 0.1}
    inputs = read(tmp_path, changed(memory={"stall_seconds": 0.1}, failures=failures)).inputs()
    assert inputs.memory == MemoryTier(0.1)
    assert inputs.disk_share == pytest.approx(0.4)  # no replica: what takes a machine takes its memory


def test_a_phase_stands_in_for_a_lag(tmp_path: Path) -> None:
    inputs = read(tmp_path, changed(recovery={}, phase=GIVEN_PHASE)).inputs()
    assert inputs.phase == PHASE
    assert inputs.recovery == PaperCurve(PHASE)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"failures": {"mtbf_hour": 12}}, "did you mean 'failures.mtbf_hours'"),
        ({"recovery": {"end_cost": {"per_horizon": 1}}}, "did you mean 'recovery.end_cost.per_horizon_iteration'"),
        ({"iteration_seconds": 0}, "'iteration_seconds' = 0"),
        ({"iteration_seconds": float("nan")}, "finite number"),
        ({"checkpoint": {"stall_seconds": 1}}, "the key 'checkpoint.persist_seconds' is required"),
        ({"recovery": {}}, "recovery needs an end_cost, or a phase"),
        ({"limits": {"interval_min_iterations": 9, "interval_max_iterations": 8}}, "larger than"),
        ({"phase": {**GIVEN_PHASE, "last_iteration": 1}}, "before first_iteration"),
        (
            {"failures": {"mtbf_hours": 1, "process_fraction": 0.9, "everything_fraction": 0.2}},
            "(0.2) are more than 1 together",
        ),
    ],
)
def test_mistakes_are_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"job\.yaml") as caught:
        read(tmp_path, changed(**fields))
    assert message in str(caught.value)


JOB: dict[str, Any] = {
    "iteration_seconds": 0.6,
    "checkpoint": {"stall_seconds": 0.9, "persist_seconds": 5.0},
    "failures": {"mtbf_hours": 6},
    "recovery": {"predictable_interval_iterations": 200, "end_cost": {"per_horizon_iteration": 0.3}},
}


@pytest.fixture
def description(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB), encoding="utf-8")
    return str(path)


def test_for_programs(description: str) -> None:
    result = CliRunner().invoke(app, ["plan", "--spec", description, "--policy", "cpsr", "--policy", "young", "--json"])
    assert result.exit_code == 0, result.output
    first, second = json.loads(result.stdout)["plans"]
    assert (first["policy"], first["mode"], first["interval_iterations"]) == ("cpsr", "predict", 200)
    assert first["explanation"]["bound"] == "predictor"
    assert second["policy"] == "young"


def test_every_sample_is_taken_as_it_is_printed(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    texts = re.findall(r"^```yaml\n# job.yaml[^\n]*\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    printed = CliRunner().invoke(app, ["plan", "--help"], env={"COLUMNS": "80"}).stdout
    shown = re.search(r"^ +iteration_seconds:.*?(?=^\s*$)", printed, re.DOTALL | re.MULTILINE)
    assert shown is not None, printed
    assert texts
    for text in (*texts, textwrap.dedent(shown[0])):
        (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
        result = CliRunner().invoke(app, ["plan", "--spec", str(tmp_path / "job.yaml")])
        assert result.exit_code == 0, result.output


def test_mistakes_are_one_line(description: str, tmp_path: Path) -> None:
    unknown = CliRunner().invoke(app, ["plan", "--spec", description, "--policy", "cheapest"])
    assert unknown.exit_code == 2
    assert "cheapest" in unknown.output
    assert "daly" in unknown.output
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
