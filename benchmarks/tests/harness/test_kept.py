"""What was measured is taken over by the code that measured it, and by no other."""

from pathlib import Path
from typing import Any

import pytest

from cpsr.benchmarks.harness.kept import kept

COMMIT = "0" * 40
MACHINE = {"code": COMMIT, "cpu_model": "a processor", "cores": 2, "python": "3.11", "versions": {"torch": "2"}}
TASK = {"seed": 3, "modes": ["stale"]}


class Job:
    def __init__(self) -> None:
        self.runs = 0

    def __call__(self) -> Any:
        self.runs += 1
        return {"run": self.runs}


def test_a_finished_job_is_not_run_again(tmp_path: Path) -> None:
    job = Job()
    for _ in range(2):
        assert kept(tmp_path / "cache", TASK, MACHINE, job) == {"run": 1}
    assert kept(tmp_path / "cache", TASK | {"seed": 4}, MACHINE, job) == {"run": 2}


@pytest.mark.parametrize("other", [{"code": "1" * 40}, {"cpu_model": "another"}, {"versions": {"torch": "3"}}])
def test_other_code_and_other_machines_measure_anew(tmp_path: Path, other: dict[str, Any]) -> None:
    job = Job()
    kept(tmp_path, TASK, MACHINE, job)
    assert kept(tmp_path, TASK, MACHINE | other, job) == {"run": 2}


@pytest.mark.parametrize("code", [None, f"{COMMIT}+"])
def test_code_that_cannot_be_named_is_always_measured(tmp_path: Path, code: str | None) -> None:
    job = Job()
    for runs in (1, 2):
        assert kept(tmp_path, TASK, MACHINE | {"code": code}, job) == {"run": runs}
    assert not list(tmp_path.iterdir())


def test_an_interrupted_job_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kept(tmp_path, TASK, MACHINE, interrupted)
    assert kept(tmp_path, TASK, MACHINE, Job()) == {"run": 1}
