"""Described jobs and recorded traces, through the command."""

import json
from pathlib import Path

import pytest
import yaml

from cpsr.benchmarks.simulate.described import read_spec
from cpsr.benchmarks.simulate.failures import Trace, read_trace
from cpsr.benchmarks.simulate.run import main
from cpsr.errors import ConfigError

EVENTS = """0,add,a
0,add,b
0,add,c
60000,remove,a
60000,remove,b
120000,add,d
90000,remove,c
180000,add,e
"""
SAMPLES = """,Time,GPUs
0,1000.5,56
1,1063.5,50
2,1126.5,50
3,1189.5,52
"""
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


def traced(tmp_path: Path, text: str) -> Trace:
    path = tmp_path / "trace"
    path.write_text(text, encoding="utf-8")
    return read_trace(path)


def test_a_described_job_is_simulated_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec, report = tmp_path / "job.yaml", tmp_path / "report.json"
    spec.write_text(yaml.safe_dump(JOB), encoding="utf-8")
    main(spec, None, report)
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
        main(spec, None, None)


def test_traces_have_one_of_two_forms(tmp_path: Path) -> None:
    assert traced(tmp_path, EVENTS) == Trace(180.0, (60.0, 90.0))
    assert traced(tmp_path, SAMPLES) == Trace(189.0, (63.0,))
    for text in ("", "a,b\n", "0,add,a\n", ",Time,GPUs\n", EVENTS + "z\n"):
        with pytest.raises(ConfigError, match=r"neither|nothing to simulate"):
            traced(tmp_path, text)


def test_the_description_on_the_page_is_accepted(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "simulation.md").read_text(encoding="utf-8")
    path = tmp_path / "simulation.yaml"
    path.write_text(page.partition("```yaml\n")[2].partition("```")[0])
    assert read_spec(path).wall_days == 54
