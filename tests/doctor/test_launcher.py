"""Who starts the ranks again, by the environment that each launcher makes."""

import pytest

from cpsr.config import CPSRConfig
from cpsr.doctor.finding import Finding
from cpsr.doctor.launcher import check_cluster, check_elastic, check_grace, check_launcher
from cpsr.doctor.needs import Launched, Needs

TORCHRUN = {
    "RANK": "0",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RESTART_COUNT": "1",
}


def test_alone_there_is_no_launcher_and_no_grace() -> None:
    found = check_launcher(Launched(), {}, by_cpsr=False)
    assert found.level == "ok"
    assert "cpsr run" in found.measured
    assert check_grace(100.0, {}, by_cpsr=False) is None
    assert check_cluster(100.0, {}) is None


def test_restarts_that_are_left_are_counted() -> None:
    for by_cpsr, name in ((True, "cpsr run"), (False, "torchrun")):
        found = check_launcher(Launched(2, 2), TORCHRUN, by_cpsr=by_cpsr)
        assert found.level == "ok"
        assert found.measured.startswith(f"{name}, 2 restarts")
        none = check_launcher(Launched(2, 2), TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "3"}, by_cpsr=by_cpsr)
        assert none.level == "warning"
        assert "the first failure ends the job" in none.advice


def test_a_store_that_breaks_restarts_is_told_as_at_the_start_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    found = check_launcher(Launched(2, 2), by_cpsr=False)
    assert found.level == "warning"
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in found.advice


def test_ranks_that_nothing_starts_again_are_a_warning() -> None:
    found = check_launcher(Launched(8, 8), {"RANK": "0"}, by_cpsr=False)
    assert found.level == "warning"
    assert "cpsr run" in found.advice


def test_ranks_outside_of_the_elastic_limits_are_told() -> None:
    def found(**elastic: int) -> Finding | None:
        return check_elastic(Needs(CPSRConfig.load({"run_dir": "run", "elastic": elastic}), Launched(4, 4)))

    assert found() is None
    inside, outside = found(min_ranks=2), found(min_ranks=6)
    assert inside is not None
    assert (inside.level, inside.measured) == ("ok", "4 ranks, 2 or more may go on with a run")
    assert outside is not None
    assert outside.level == "warning"


@pytest.mark.parametrize(
    ("timeout", "commit_seconds", "level"),
    [(None, None, "ok"), (None, 10.0, "ok"), (None, 20.0, "warning"), ("600", 200.0, "ok"), ("600", 400.0, "warning")],
)
def test_the_time_after_sigterm_must_hold_a_commit(
    timeout: str | None, commit_seconds: float | None, level: str
) -> None:
    environment = TORCHRUN | ({} if timeout is None else {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": timeout})
    for by_cpsr, settable in ((False, True), (True, False)):  # `cpsr run` sees to it with any torch
        found = check_grace(commit_seconds, environment, by_cpsr=by_cpsr, settable=settable)
        assert found is not None
        assert found.level == level
        assert found.figures["grace_seconds"] == float(timeout or 30)


def test_an_older_torchrun_leaves_30_seconds_whatever_is_set() -> None:
    environment = TORCHRUN | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}
    found = check_grace(20.0, environment, by_cpsr=False, settable=False)
    assert found is not None
    assert (found.level, found.figures["grace_seconds"]) == ("warning", 30.0)
    assert found.advice.startswith("start the job with `cpsr run`")


@pytest.mark.parametrize(
    ("environment", "subject", "advice"),
    [
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, "Slurm", "#SBATCH --signal=TERM@200 --requeue"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "Kubernetes", "terminationGracePeriodSeconds: 200"),
    ],
)
def test_what_a_cluster_must_be_told(environment: dict[str, str], subject: str, advice: str) -> None:
    found = check_cluster(100.0, environment)
    assert found is not None
    assert (found.subject, found.level) == (subject, "warning")
    assert advice in found.advice
    soon = check_cluster(3.0, environment)
    assert soon is not None
    assert soon.level == "ok"
    assert ("scontrol requeue" in soon.measured) == (subject == "Slurm")  # a commit in time does not continue the job
    unknown = check_cluster(None, environment)
    assert unknown is not None
    assert unknown.level == "warning"
    assert "120" in unknown.advice
