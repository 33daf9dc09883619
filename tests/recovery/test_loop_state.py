"""Usual training loops: after a kill every loss is that of the run left alone, or CPSR reports what it cannot see."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.recovery.job import Ended, Job

WORKER = "tests.recovery.loop_worker"
OWN = "from recovery.epoch"
PASS = 10  # batches; a checkpoint at iteration 20 is one at the end of a pass
KILL = "SIGKILL"


@dataclass(frozen=True)
class Case:
    """A loop and the failure of one of its lives.

    Attributes:
        keeps: as in `loop_worker.Options`, like `given` and what is in `options`.
        fault: before which micro-batch, and by what.
        committed: a checkpoint that is awaited before.
        iterations: end of the run.
    """

    keeps: str
    given: str
    fault: str
    committed: int | None
    options: tuple[tuple[str, Any], ...] = ()
    iterations: int = 25

    def launch(self, job: Job, *, fails: bool = False, ranks: int = 1, mode: str = "exact") -> Ended:
        more: dict[str, Any] = {"fault": self.fault, "committed": self.committed} if fails else {}
        return job.launch(
            mode,
            worker=WORKER,
            ranks=ranks,
            keeps=self.keeps,
            given=self.given,
            iterations=self.iterations,
            survivor_seconds=3,
            **dict(self.options),
            **more,
        )


def case(
    keeps: str, given: str = "", at: int = 14, how: str = KILL, committed: int | None = 12, **options: Any
) -> Case:
    return Case(keeps, given, f"{at}:{how}", committed, tuple(options.items()))


AT_THE_END_OF_A_PASS: dict[str, Any] = {"at": 23, "committed": 20, "own_epochs": OWN}
CASES = {
    "scaler": case("scaler", "adapter"),
    "schedule by step, registered": case("schedule", "register"),
    "schedule by pass": case("schedule by epoch", "register", **AT_THE_END_OF_A_PASS),
    "average": case("average", "register"),
    "random numbers after a pass": case("draws", **AT_THE_END_OF_A_PASS),
    "accumulation, in the middle": case("nothing", at=40, accumulate=3),
}
MORE_CASES = {
    "nothing": case("nothing"),
    "scaler that overflows": case("scaler that overflows", "adapter"),
    "schedule by step": case("schedule", "adapter"),
    "schedule in parts": case("schedule in parts", "register"),
    "schedule made late": case("schedule", "register", late=True),
    "schedule by metric": case("schedule by metric", "register", **AT_THE_END_OF_A_PASS),
    "counters": case("counters", "register", **AT_THE_END_OF_A_PASS),
    "generator": case("generator", "register"),
    "sampler with set_epoch": case("nothing", at=23, committed=20, own_epochs=OWN, sampler="sets epoch"),
    "sampler with set_epoch, in a pass": case("nothing", own_epochs=OWN, sampler="sets epoch"),
    "sampler without set_epoch": case("nothing", own_epochs=OWN, sampler="keeps epoch"),
    "average after SIGTERM": case("average", "register", how="SIGTERM", committed=None),
    # Leaves at iteration 20, whose pass is over then.
    "random numbers after SIGTERM": case("draws", at=19, how="SIGTERM", committed=None, own_epochs=OWN),
}


def losses(job: Job, life: int, rank: int = 0) -> dict[tuple[int, int], str]:
    lines = (job.directory / f"life-{life}.{rank}.losses").read_text().splitlines()
    return {(iteration, micro): loss for iteration, micro, loss in map(json.loads, lines)}


@pytest.mark.parametrize(
    "tried", [*CASES.values(), *(pytest.param(one, marks=pytest.mark.slow) for one in MORE_CASES.values())],
    ids=[*CASES, *MORE_CASES],
)  # fmt: skip
def test_every_loss_is_that_of_the_run_left_alone(tmp_path: Path, tried: Case) -> None:
    check(tmp_path, tried)


@pytest.mark.slow
def test_two_ranks_with_a_scaler(tmp_path: Path) -> None:
    check(tmp_path, case("scaler", "adapter", own_epochs=OWN, sampler="sets epoch"), ranks=2)


@pytest.mark.slow
def test_two_ranks_after_sigterm(tmp_path: Path) -> None:
    after: dict[str, Any] = {"how": "SIGTERM", "committed": None, "own_epochs": OWN, "sampler": "sets epoch"}
    check(tmp_path, case("counters", "register", **after), ranks=2)


def check(directory: Path, tried: Case, ranks: int = 1) -> None:
    alone, job = Job(directory / "alone"), Job(directory / "job")
    whole = tried.launch(alone, ranks=ranks)
    assert whole.statuses == [0] * ranks, whole.output
    failed = tried.launch(job, fails=True, ranks=ranks)
    assert failed.statuses[0] in (-9, 128 + 15), failed.output
    back = tried.launch(job, ranks=ranks)
    assert back.statuses == [0] * ranks, back.output
    for rank in range(ranks):
        expected, before, after = losses(alone, 1, rank), losses(job, 1, rank), losses(job, 2, rank)
        assert min(after)[0] >= (tried.committed or 13)
        assert max(after) == max(expected)
        assert {**expected, **before, **after} == expected
        assert before.keys() | after.keys() == expected.keys()
        assert back.result(rank) == whole.result(rank)


@pytest.mark.parametrize(
    ("keeps", "names"),
    [
        ("scaler", "The GradScaler .* grad_scaler=scaler"),
        ("scaler that overflows", "The OwnScaler .* grad_scaler=scaler"),
        ("schedule in parts", r"The schedule SequentialLR .* recovery.register\(.scheduler., scheduler\)$"),
        ("average", r"AveragedModel\) are not registered .* recovery.register\(.average., averaged_model\)"),
    ],
)
def test_what_nobody_saves_is_refused_when_the_loop_has_used_it_once(tmp_path: Path, keeps: str, names: str) -> None:
    job = Job(tmp_path)
    refused = case(keeps, own_epochs=OWN).launch(job)
    assert refused.statuses == [1]
    last, section = refused.output[0].strip().splitlines()[-2:]
    assert section == "[docs/errors.md#unsupportedengineerror]"
    assert last.startswith("cpsr.errors.UnsupportedEngineError: ")
    assert re.search(names, last), last
    assert max(losses(job, 1)) < (10, 0)
    done = case(keeps, "register", own_epochs=OWN).launch(job)
    assert done.statuses == [0], done.output[0]
    assert min(losses(job, 2)) <= (1, 0)


def test_a_schedule_that_is_used_later_is_refused_then(tmp_path: Path) -> None:
    ended = case("schedule by metric", own_epochs=OWN).launch(Job(tmp_path))
    assert ended.statuses == [1], ended.output[0]
    assert "cannot restore all that this loop keeps. The schedule ReduceLROnPlateau was not given" in ended.output[0]


def test_in_other_modes_it_is_reported_once_and_the_advice_can_be_followed(tmp_path: Path) -> None:
    job = Job(tmp_path)
    ended = case("scaler", accumulate=2, at=20, committed=4).launch(job, fails=True, mode="auto")
    assert ended.output[0].count("The GradScaler that scales the loss was not given to CPSR") == 1
    assert "micro_batches_per_iteration=2)" in ended.output[0]
    better = case("scaler", "adapter", accumulate=2, adapter_accumulate=2).launch(job, mode="auto")
    assert better.statuses == [0], better.output[0]
    assert "the saved run had no grad_scaler" in better.output[0]
    assert "was not given" not in better.output[0]
    assert "micro_batches_per_iteration=" not in better.output[0]


def test_a_loop_over_passes_that_begins_anew_is_reported(tmp_path: Path) -> None:
    job = Job(tmp_path)
    tried = case("nothing", at=17, committed=12, own_epochs="from 0", sampler="sets epoch")
    tried.launch(job, fails=True)
    assert "for epoch in range(recovery.epoch, epochs)" in tried.launch(job).output[0]
