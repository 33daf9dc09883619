import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from cpsr.errors import ConfigError
from cpsr.fitter.failures import PRIOR_SHARES
from cpsr.planner import spec
from cpsr.planner.inputs import MemoryTier
from cpsr.planner.recovery_curve import LEAD_AFTER_ITERATIONS, EndCostCurve, PaperCurve
from cpsr.planner.spec import PlanSpec, read_plan_spec
from tests.planner.jobs import PHASE

DESCRIPTION: dict[str, Any] = {
    "iteration_seconds": 0.6,
    "checkpoint": {"state_bytes": 4e9, "snapshot_bytes_per_second": 5e9, "persist_bytes_per_second": 1e9},
    "failures": {"mtbf_hours": 12, "restart_seconds": 30},
    "recovery": {"predict_seconds": 2, "end_cost": {"constant_iterations": -10, "per_horizon_iteration": 0.8}},
}


def changed(**fields: Any) -> dict[str, Any]:
    return {**DESCRIPTION, **fields}


def read(directory: Path, description: Any) -> PlanSpec:
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(description), encoding="utf-8")
    return read_plan_spec(path)


def test_sizes_and_bandwidths_become_seconds(tmp_path: Path) -> None:
    (inputs,) = read(tmp_path, DESCRIPTION).inputs()
    assert (inputs.stall_seconds, inputs.persist_seconds) == (0.8, 4.0)
    assert inputs.failures_per_second == pytest.approx(1 / 43200)
    assert inputs.origins["stall_seconds"].kind == "configured"
    assert isinstance(inputs.recovery, EndCostCurve)
    assert inputs.recovery.coefficients == (-10.0, 0.8, 0.0)
    assert inputs.recovery.source == "the job's description"


def test_a_lead_is_had_as_late_as_it_was_measured_where_the_description_does_not_say(tmp_path: Path) -> None:
    (inputs,) = read(tmp_path, DESCRIPTION).inputs()
    assert inputs.lead_after_iterations == LEAD_AFTER_ITERATIONS
    at_once = changed(recovery={**DESCRIPTION["recovery"], "lead_after_iterations": 0})
    assert read(tmp_path, at_once).inputs()[0].lead_after_iterations == 0
    assert read(tmp_path, changed(recovery=None)).inputs()[0].lead_after_iterations == 0


def test_the_example_in_the_documentation_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(textwrap.dedent((spec.__doc__ or "").split("For example:")[1]), encoding="utf-8")
    found = read_plan_spec(path).inputs()
    assert len(found) == 8
    assert found[7].persist_seconds == 5.0


def test_snapshots_in_memory_stall_as_a_checkpoint_does_if_nothing_else_is_known(tmp_path: Path) -> None:
    assert read(tmp_path, DESCRIPTION).inputs()[0].memory is None
    (inputs,) = read(tmp_path, changed(memory={"replica_seconds": 3})).inputs()
    assert inputs.memory == MemoryTier(0.8, None, 3.0)
    assert inputs.disk_share == PRIOR_SHARES["everything"]
    failures = {"mtbf_hours": 12, "process_fraction": 0.6, "everything_fraction": 0.1}
    (inputs,) = read(tmp_path, changed(memory={"stall_seconds": 0.1}, failures=failures)).inputs()
    assert inputs.memory == MemoryTier(0.1)
    assert inputs.disk_share == pytest.approx(0.4)  # no replica: what takes a machine takes its memory


@pytest.mark.parametrize(
    ("given", "shares"),
    [
        ({"process_fraction": 1.0}, (1.0, 0.0, 0.0)),
        ({"process_fraction": 0.97}, (0.97, 0.0, 0.03)),
        ({"everything_fraction": 1.0}, (0.0, 0.0, 1.0)),
        ({"process_fraction": 0.5}, (0.5, 0.45, 0.05)),
    ],
)
def test_a_class_that_is_left_out_takes_what_is_left(
    tmp_path: Path, given: dict[str, float], shares: tuple[float, ...]
) -> None:
    (inputs,) = read(tmp_path, changed(failures={"mtbf_hours": 12, **given})).inputs()
    assert tuple(one.share for one in inputs.classes.values()) == pytest.approx(shares)


def test_a_phase_stands_in_for_a_lag(tmp_path: Path) -> None:
    (inputs,) = read(tmp_path, changed(recovery={}, phase=vars(PHASE))).inputs()
    assert inputs.phase == PHASE
    assert inputs.recovery == PaperCurve(PHASE)


def test_ranks_differ_where_they_say_so(tmp_path: Path) -> None:
    ranks = [{"count": 2}, {"state_bytes": 8e9, "parameters": 7}]
    found = read(tmp_path, changed(ranks=ranks, recovery={}, phase=vars(PHASE))).inputs()
    assert [inputs.persist_seconds for inputs in found] == [4.0, 4.0, 8.0]
    assert [inputs.phase.parameters for inputs in found if inputs.phase] == [355_000_000, 355_000_000, 7]


def test_numbers_as_people_write_them(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "iteration_seconds: 1\ncheckpoint: {stall_seconds: 5e-1, persist_seconds: 2}\nfailures: {mtbf_hours: 1e1}\n",
        encoding="utf-8",
    )
    (inputs,) = read_plan_spec(path).inputs()
    assert inputs.stall_seconds == 0.5
    assert inputs.recovery is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"failures": {"mtbf_hour": 12}}, "did you mean 'failures.mtbf_hours'"),
        ({"ranks": [{"cont": 2}]}, "unknown key 'ranks.0.cont'; did you mean 'ranks.0.count'"),
        ({"recovery": {"end_cost": {"per_horizon": 1}}}, "did you mean 'recovery.end_cost.per_horizon_iteration'"),
        ({"iteration_seconds": 0}, "'iteration_seconds' = 0"),
        ({"iteration_seconds": float("nan")}, "finite number"),
        ({"checkpoint": {"stall_seconds": 1}}, "give either persist_seconds or persist_bytes_per_second"),
        (
            {"checkpoint": {"stall_seconds": 1, "persist_bytes_per_second": 1e9}},
            "persist_bytes_per_second needs state_bytes",
        ),
        ({"recovery": {}}, "recovery needs an end_cost, or a phase"),
        (
            {"checkpoint": {"stall_seconds": 1, "persist_seconds": 1}, "ranks": [{"state_bytes": 1}]},
            "need checkpoint.state_bytes",
        ),
        ({"limits": {"interval_min_iterations": 9, "interval_max_iterations": 8}}, "larger than"),
        ({"phase": {**vars(PHASE), "last_iteration": 1}}, "before first_iteration"),
        (
            {"failures": {"mtbf_hours": 1, "process_fraction": 0.9, "everything_fraction": 0.2}},
            "more than 1 together",
        ),
    ],
)
def test_mistakes_are_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"job\.yaml") as caught:
        read(tmp_path, changed(**fields))
    assert message in str(caught.value)


def test_a_file_that_is_no_description(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        read_plan_spec(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="expected a mapping"):
        read(tmp_path, [1, 2])
