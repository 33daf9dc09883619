"""Described jobs, through the command."""

import json
from pathlib import Path

import pytest
import yaml

from cpsr.benchmarks.simulate.described import SimulationSpec
from cpsr.benchmarks.simulate.run import main
from cpsr.config import read_model
from cpsr.errors import ConfigError

JOB = {
    "iteration_seconds": 3.0,
    "checkpoint": {"stall_seconds": 4, "persist_seconds": 60},
    "failures": {"mtbf_hours": 3, "restart_seconds": 120},
    "recovery": {
        "end_cost": {"per_horizon_iteration": 0.5},
        "predict_seconds": 10,
        "predictable_interval_iterations": 300,
    },
    "policies": ["young", "checkfreq", "pccheck", "gemini", "sinh", "cpsr"],
    "wall_days": 2,
    "runs": 20,
}


def test_a_described_job_is_simulated_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec, report = tmp_path / "job.yaml", tmp_path / "report.json"
    spec.write_text(yaml.safe_dump(JOB), encoding="utf-8")
    main(spec, report)
    found = json.loads(report.read_text(encoding="utf-8"))
    by_name = {one["system"]: one for one in found["systems"]}
    assert list(by_name) == JOB["policies"]
    for one in by_name.values():
        assert sum(one["wall_time_fractions"].values()) == pytest.approx(1)
    assert by_name["cpsr"]["ettr_mean"] >= by_name["young"]["ettr_mean"]
    assert "checkfreq" in capsys.readouterr().out


@pytest.mark.parametrize("change", [{"policies": ["cheapest"]}, {"memory": {"stall_seconds": 1.0}}, {"wall_day": 3}])
def test_what_cannot_be_simulated_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    spec = tmp_path / "job.yaml"
    spec.write_text(yaml.safe_dump(JOB | change), encoding="utf-8")
    with pytest.raises(ConfigError, match=next(iter(change)) if "policies" not in change else "cheapest"):
        main(spec)


def test_the_description_on_the_page_is_accepted(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "simulation.md").read_text(encoding="utf-8")
    path = tmp_path / "simulation.yaml"
    path.write_text(page.partition("```yaml\n")[2].partition("```")[0])
    assert read_model(SimulationSpec, path).wall_days == 54
