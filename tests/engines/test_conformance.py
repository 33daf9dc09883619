"""Both adapters under one rule: snapshot, another engine, inject, go on; bitwise what never stopped would give.

The DeepSpeed and DDP cases run in jobs of two gloo ranks each, pipelines with experts on four; every case is reported
here on its own.
"""

import importlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cpsr.qualify.conformance import check_early_state, check_resume
from cpsr.qualify.ranks import read_records
from tests.engines.groups import GROUPS, LACKING, RANKS, SLOW
from tests.engines.torch_cases import CASES, NO_MUON, one_thread
from tests.rank_processes import become_rank, start_ranks

ROOT = Path(__file__).parents[2]
JOB_TIMEOUT_SECONDS = 800
WITHOUT_MUON = pytest.mark.skipif(NO_MUON != "", reason=NO_MUON)
ALONE = [pytest.param(name, marks=[WITHOUT_MUON] if name == "two-optimizers" else []) for name in CASES]


@pytest.mark.parametrize("name", ALONE)
def test_torch_resumes_bitwise(name: str) -> None:
    with one_thread():
        result = check_resume(CASES[name])
    assert len(result["evaluations"]) == 4


@pytest.mark.parametrize("name", ["fp32-adamw-cosine", "fp32-sgd", "channels_last-sgd-onecycle"])
def test_torch_skip_ahead_equals_training(name: str) -> None:
    with one_thread():
        check_resume(CASES[name], skip=3)


@pytest.mark.parametrize("name", ALONE)
def test_torch_state_created_early_changes_nothing(name: str) -> None:
    with one_thread():
        check_early_state(CASES[name])


def run_job(group: str, folder: Path) -> list[dict[str, Any]]:
    """Run a group on its ranks; per rank, its results by case and the end of its log."""
    processes = start_ranks(run_rank, (group, folder), RANKS.get(group, 2))
    deadline = time.monotonic() + JOB_TIMEOUT_SECONDS  # the cases without a result fail below, with the log
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0.0))
    for process in processes:
        process.kill()
        process.join()
    ended = [line for line in read_records(folder) if line["event"] == "ended"]
    outcomes = []
    for rank in range(len(processes)):
        errors = {one["trial"].rpartition(": ")[2]: one["error"] for one in ended if one["rank"] == rank}
        outcomes.append({"errors": errors, "log": (folder / f"{rank}.log").read_text()[-3000:]})
    return outcomes


def run_rank(job: tuple[str, Path], rank: int, ranks: int) -> None:
    group, folder = job
    become_rank(folder / f"{rank}.log", rank, ranks)
    # Imports DeepSpeed, which the tests' own process does without.
    importlib.import_module("tests.engines.worker").main(group, folder)


@pytest.fixture(scope="module")
def jobs() -> dict[str, list[dict[str, Any]]]:
    return {}


@pytest.mark.parametrize(
    ("group", "name"),
    [
        pytest.param(group, name, marks=[pytest.mark.slow] if group in SLOW else [])
        for group, cases in GROUPS.items()
        for name in cases
    ],
)
def test_ranks(
    group: str, name: str, jobs: dict[str, list[dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    if name in LACKING:
        pytest.skip(LACKING[name])
    if group not in jobs:
        jobs[group] = run_job(group, tmp_path_factory.mktemp(group))
    for rank, outcome in enumerate(jobs[group]):
        error = outcome["errors"].get(name)
        assert error is not None, f"rank {rank} never finished this case; an earlier one failed:\n{outcome['log']}"
        assert error == "", f"rank {rank}:\n{error}"


def test_import_needs_no_deepspeed() -> None:
    script = "import sys, cpsr.engines; sys.exit('deepspeed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0
