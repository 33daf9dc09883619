"""What jobs receive, and what is refused before a job starts."""

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from cpsr.benchmarks.experts.names import CATCH_UP, MADE_UP, STALE
from cpsr.benchmarks.experts.policies import DYNAMIC_K, IN_TURN, IN_WINDOW
from cpsr.benchmarks.experts.size import FULL, QUICK
from cpsr.benchmarks.experts.tasks import TASK, FailingTask, Failures, Mixture, StallTask
from cpsr.cli.main import app
from cpsr.demo.model import GPTConfig


def test_a_task_travels_as_json() -> None:
    for task in (FailingTask(seed=3), StallTask(pairs=4, mixture=Mixture(ranks=2, expert_parallel=2))):
        assert TASK.validate_json(task.model_dump_json()) == task


def test_models_are_distinguished() -> None:
    assert Mixture().label == "top-1, one rank"
    assert Mixture(ranks=2, expert_parallel=2, experts_per_token=2).label == "top-2, ep 2 of 2 ranks"
    assert Mixture(gpt=GPTConfig()).label == "top-1, one rank, width 128, context 128"
    assert Mixture(batch_windows=32).label == "top-1, one rank, 32 windows a batch"
    for size in (QUICK, FULL):
        for mixtures in (size.failing, size.stalling):
            assert len({mixture.label for mixture in mixtures}) == len(mixtures)


@pytest.mark.parametrize(
    "wrong",
    [{"expert_parallel": 2}, {"ranks": 3}, {"ranks": 6, "expert_parallel": 3}, {"ranks": 2, "batch_windows": 3}],
)
def test_experts_and_batches_are_shared_equally(wrong: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match="equally"):
        Mixture.model_validate(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"at": (300,)},  # a checkpoint's
        {"at": (475, 305)},
        {"at": (5,)},  # before the first checkpoint
        {"end": 800},
        {"fault_free_end": 900},
    ],
)
def test_failures_that_cannot_be_measured_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="must ascend and no failure be at a checkpoint"):
        Failures.model_validate(wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"policies": ("by chance",)}, "no policy 'by chance'"),
        ({"policies": ()}, "at least 1 item"),
        ({"modes": (STALE, "as they please")}, "no mode 'as they please'"),
        ({"modes": (CATCH_UP,)}, "compared with 'stale'"),
    ],
)
def test_policies_and_modes_that_cannot_be_followed_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Failures.model_validate(wrong)


def test_the_checkpoint_before_a_failure() -> None:
    assert Failures().checkpoint_before(305) == 300
    assert Failures().checkpoint_before(299) == 290


def test_quick_and_full_exclude_each_other() -> None:
    result = CliRunner().invoke(app, ["bench", "experts", "--quick", "--full"])
    assert result.exit_code == 2
    assert "exclude each other" in result.output


def test_runs_that_fail_are_made_more_and_larger() -> None:
    assert QUICK.with_failing(None, None) == QUICK
    size = FULL.with_failing(7, 4)
    assert size.seeds == 7
    assert {mixture.batch_windows for mixture in size.failing} == {4}
    assert size.stalling == FULL.stalling
    result = CliRunner().invoke(app, ["bench", "experts", "--full", "--batch-windows", "3"])
    assert result.exit_code == 2
    assert "2 ranks must share them equally" in " ".join(result.output.split())


def test_policies_and_modes_of_runs_that_fail_are_chosen() -> None:
    """In one order and each once, so that the same choice is the same task."""
    size = FULL.with_failing(None, None, ["window", "dynamic_k", "sequential", "window"], ["catch_up", "more_capacity"])
    assert size.failures.policies == (IN_TURN, DYNAMIC_K, IN_WINDOW)
    assert size.failures.modes == (STALE, MADE_UP, CATCH_UP)  # all is compared with stale experts
    assert size.failures.at == FULL.failures.at
    assert (size.failing, size.stalling) == (FULL.failing, FULL.stalling)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--policies", "window,lru", "--policies lru: there are sequential, load_aware, dynamic_k, moetion, window"),
        ("--policies", ",", "--policies is empty: there are sequential"),
        ("--modes", "stale,hope", "--modes hope: there are stale, more_capacity, catch_up"),
        ("--modes", "", "--modes is empty: there are stale"),
    ],
)
def test_policies_and_modes_that_are_not_known_are_refused(option: str, value: str, message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "experts", option, value])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
