import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cpsr.cli.main import app
from cpsr.errors import ConfigError
from cpsr.simulate import spec as spec_module
from cpsr.simulate.command import run_simulation
from cpsr.simulate.policies import systems
from cpsr.simulate.spec import read_spec
from cpsr.simulate.system import Prediction, Replay, Rollback

SPEC: dict[str, Any] = {
    "iteration_seconds": 3.0,
    "checkpoint": {"stall_seconds": 4.0, "persist_seconds": 45.0},
    "failures": {"mtbf_hours": 3.0, "restart_seconds": 60, "detection_seconds": 5},
    "recovery": {"end_cost": {"per_horizon_iteration": 0.2}, "predict_seconds": 6},
    "limits": {"interval_max_iterations": 500},
    "wall_days": 2.0,
    "systems": [
        {
            "name": "sparse",
            "interval_iterations": 6,
            "stall_seconds": 0.3,
            "recovery": "replay",
            "conversion_iterations": 6,
            "replay_time_fraction": 0.6,
        }
    ],
    "runs": 60,
}


PREDICTING = {"name": "x", "interval_iterations": 1, "stall_seconds": 1, "recovery": "predict"}


@pytest.fixture
def write(tmp_path: Path):  # type: ignore[no-untyped-def]
    def write_spec(**changes: Any) -> Path:
        path = tmp_path / "spec.yaml"
        path.write_text(yaml.safe_dump(SPEC | changes), encoding="utf-8")
        return path

    return write_spec


def test_every_policy_on_the_same_failures(write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    report_path = tmp_path / "out" / "figures.json"
    outcomes = {outcome.system.name: outcome for outcome in run_simulation(write(), json_path=report_path)}
    assert list(outcomes) == ["young", "daly", "checkfreq", "pccheck", "gemini", "cpsr", "sparse"]
    assert outcomes["cpsr"].ettr.mean() > max(outcomes[name].ettr.mean() for name in ("young", "daly", "gemini"))
    assert len({float(outcome.failures.sum()) for outcome in outcomes.values()}) == 1
    report = json.loads(report_path.read_text(encoding="utf-8"))
    assert report["simulated"] is True
    assert report["mtbf_seconds"] == 3 * 3600
    assert [system["system"] for system in report["systems"]] == list(outcomes)
    assert report_path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr()
    assert "Simulated: 60 runs of 2 days" in printed.out
    assert "\r" not in printed.out + printed.err  # no progress bar without a terminal


def test_the_command_writes_figures_and_names_what_is_wrong(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    report_path = tmp_path / "figures.json"
    arguments = ["simulate", "--spec", str(write()), "--policies", "young,cpsr", "--json", str(report_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    report = json.loads(report_path.read_text(encoding="utf-8"))
    assert [system["system"] for system in report["systems"]] == ["young", "cpsr", "sparse"]
    wrong = CliRunner().invoke(app, ["simulate", "--spec", str(tmp_path / "absent.yaml")])
    assert wrong.exit_code == 2
    assert "cannot read the configuration" in wrong.stderr


def test_policies_can_be_chosen_and_unknown_ones_are_named(write) -> None:  # type: ignore[no-untyped-def]
    names = [outcome.system.name for outcome in run_simulation(write(systems=[]), policies=["daly", "cpsr"])]
    assert names == ["daly", "cpsr"]
    with pytest.raises(ConfigError, match="unknown policies jung; known are checkfreq, cpsr"):
        run_simulation(write(), policies=["jung"])


def test_a_trace_takes_the_place_of_the_process(write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,a\n3600000,remove,a\n3600000,add,b\nnonsense\n7200000,add,c\n", encoding="utf-8")
    report_path = tmp_path / "figures.json"
    outcomes = run_simulation(write(runs=1), trace, ["young"], report_path)
    assert outcomes[0].failures.tolist() == [24]
    report = json.loads(report_path.read_text(encoding="utf-8"))["trace"]
    assert (report["incidents"], report["removed"], report["span_seconds"]) == (1, 1, 7200)
    assert "line 4: 'nonsense' is not" in " ".join(capsys.readouterr().out.split())


def test_policies_know_how_often_a_trace_meets_the_job(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    trace = tmp_path / "trace.csv"
    rows = [f"0,add,{node}" for node in range(8)] + ["3600000,remove,0", "3600000,add,8", "7200000,add,9"]
    trace.write_text("\n".join(rows), encoding="utf-8")
    failures = {"process": "trace", "trace": str(trace), "mtbf_hours": 1}
    report_path = tmp_path / "figures.json"
    found = []
    for nodes in (None, 2):
        run_simulation(write(failures=failures | {"trace_nodes": nodes}, runs=1), None, ["young"], report_path)
        report = json.loads(report_path.read_text(encoding="utf-8"))
        found.append((report["mtbf_seconds"], report["systems"][0]["interval_iterations"]))
    # Once in two hours one of 8 nodes goes, and one time in four it is one of the job's 2: sqrt(2 4 s M) / 3 s.
    assert found == [(7200, 80), (pytest.approx(28800), 160)]


def test_a_trace_that_cannot_be_simulated_is_refused(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,a\n1000,add,b\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="has no incident"):
        run_simulation(write(), trace)
    trace.write_text("0,add,a\n1000,add,b\n2000,remove,a\n", encoding="utf-8")
    nodes = {"process": "trace", "trace": str(trace), "trace_nodes": 3, "mtbf_hours": 1}
    with pytest.raises(ConfigError, match="never has 3 nodes"):
        run_simulation(write(failures=nodes))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"wall_hours": 2}, r"unknown key 'wall_hours'; did you mean 'wall_days'"),
        ({"pipeline": {"micro_batches": 1, "stage_seconds": [1.0]}}, "either iteration_seconds or pipeline"),
        ({"checkpoint": {"stall_seconds": -1, "persist_seconds": 1}}, r"checkpoint\.stall_seconds"),
        ({"failures": {"process": "poisson"}}, r"failures\.mtbf_hours"),
        ({"failures": {"mtbf_hours": 1, "process": "trace"}}, r"needs failures\.trace"),
        ({"policies": ["random"]}, "unknown policies random"),
        ({"policies": ["fixed"]}, "unknown policies fixed"),
        ({"limits": {"interval_min_iterations": 9, "interval_max_iterations": 3}}, "larger than"),
        ({"systems": [PREDICTING | {"slots": 2, "contention": "skip"}]}, "one slot only"),
        ({"systems": [PREDICTING], "recovery": None}, "section recovery"),
    ],
)
def test_descriptions_that_make_no_sense_are_refused_by_key(write, changes: dict[str, Any], why: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=why):
        read_spec(write(**changes))


def test_files_that_are_no_description_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    with pytest.raises(ConfigError, match="cannot read"):
        read_spec(path)
    path.write_text("job: [", encoding="utf-8")
    with pytest.raises(ConfigError, match="not valid YAML"):
        read_spec(path)
    path.write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="'iteration_seconds' is required"):
        read_spec(path)


def test_intervals_stay_inside_the_bounds(write) -> None:  # type: ignore[no-untyped-def]
    spec = read_spec(
        write(
            policies=["young", "pccheck", "fixed", "cpsr"],
            fixed_interval_iterations=900,
            limits={"interval_min_iterations": 5, "interval_max_iterations": 60},
            recovery=SPEC["recovery"] | {"predictable_interval_iterations": 50},
        )
    )
    found = {system.name: system for system in systems(spec, mtbf_seconds=3 * 3600.0)}
    intervals = {name: system.checkpoints.interval_iterations for name, system in found.items()}
    # sqrt(2 4 s 3 h) / 3 s is 98; 45 s to persist over two slots and 1.02 x 3 s is 8.
    assert intervals == {"young": 60, "pccheck": 8, "fixed": 60, "cpsr": 50, "sparse": 6}
    assert found["young"].note == "bound: maximum"
    assert isinstance(found["young"].recovery, Rollback)
    assert isinstance(found["cpsr"].recovery, Prediction)
    assert isinstance(found["sparse"].recovery, Replay)


def test_every_sample_of_the_page_is_accepted_by_its_command(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "simulation.md").read_text(encoding="utf-8")
    samples = re.findall(r"^```yaml\n# (\S+)[^\n]*\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert [name for name, _ in samples] == ["job.yaml", "simulation.yaml"]
    for name, text in samples:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        for command in ("plan", "simulate") if name == "job.yaml" else ("simulate",):
            result = CliRunner().invoke(app, [command, "--spec", str(path)])
            assert result.exit_code == 0, result.output


def test_the_example_in_the_module_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "simulation.yaml"
    path.write_text(textwrap.dedent((spec_module.__doc__ or "").split("does:")[1]), encoding="utf-8")
    assert read_spec(path).failures.weibull_shape == 0.7


def test_without_a_curve_of_the_lag_nothing_is_predicted(write) -> None:  # type: ignore[no-untyped-def]
    found = systems(read_spec(write(recovery=None, policies=["cpsr"], systems=[])), mtbf_seconds=3600.0)
    assert isinstance(found[0].recovery, Rollback)


def test_an_iteration_can_be_estimated_from_its_pipeline(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    pipeline = {
        "micro_batches": 16,
        "stage_seconds": [0.1, 0.12],
        "synchronisation": [{"alpha_seconds": 0.01, "beta_seconds_per_byte": 1e-9, "message_bytes": 1e8}],
        "update_seconds": 0.05,
    }
    estimated = {key: value for key, value in SPEC.items() if key != "iteration_seconds"}
    write().write_text(yaml.safe_dump(estimated | {"pipeline": pipeline}), encoding="utf-8")
    spec = read_spec(tmp_path / "spec.yaml")
    assert spec.iteration_seconds == pytest.approx(17 * 0.12 + 0.11 + 0.05)
