"""Pipelines of which some stages lose their state: these replay alone, and the run is what it would have been."""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cpsr.checkpoint.arena import Arena
from cpsr.checkpoint.memory_owners import remove_memory_states
from cpsr.checkpoint.memory_states import SHARED_MEMORY, MemoryState
from cpsr.checkpoint.run_directory import run_id
from tests.recovery.job import OF_THE_START, Ended, Job

pytestmark = pytest.mark.ranks

SETTINGS = {
    "checkpoint": {"shared_memory": True, "interval_iterations": 1000},
    "replay": {"enabled": True, "window_iterations": 4},
}
WORKER = "tests.replay.stages_worker"
OF_A_LIFE: dict[str, Any] = {"started": {}, "losses": {}}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path / "killed")
    yield job
    if job.run_dir.exists():
        remove_memory_states(run_id(job.run_dir))


@pytest.fixture
def launch(job: Job) -> Callable[..., Ended]:
    return partial(launched, job)


def launched(job: Job, ranks: int = 3, **options: Any) -> Ended:
    return job.launch("exact", worker=WORKER, ranks=ranks, settings=SETTINGS, **options)


@pytest.fixture(scope="module")
def killed_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Job, Path]]:
    """A job whose second stage was killed, and a folder with copies of what it left on the disk and in memory."""
    job, kept = Job(tmp_path_factory.mktemp("killed")), tmp_path_factory.mktemp("kept")
    launched(job, killed={1: 22}, awaited=17)
    shutil.copytree(job.run_dir, kept / "run")
    (kept / "memory").mkdir()
    for path in SHARED_MEMORY.glob(f"cpsr-{run_id(job.run_dir)}-*"):
        shutil.copy2(path, kept / "memory")
    yield job, kept
    remove_memory_states(run_id(kept / "run"))


@pytest.fixture
def lost(killed_once: tuple[Job, Path]) -> Job:
    """A job that has lost its second stage's state of iteration 22; each test finds all as it was left."""
    job, kept = killed_once
    remove_memory_states(run_id(kept / "run"))
    shutil.rmtree(job.run_dir)
    shutil.copytree(kept / "run", job.run_dir)
    for path in (kept / "memory").iterdir():
        shutil.copy2(path, SHARED_MEMORY)
    return job


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ended]:
    known: dict[str, Ended] = {}

    def of(ranks: int = 3, **options: Any) -> Ended:
        name = repr((ranks, sorted(options.items())))
        if name not in known:
            run = Job(tmp_path_factory.mktemp("uninterrupted"))
            known[name] = run.launch("exact", worker=WORKER, ranks=ranks, **options)
            assert set(known[name].statuses) == {0}, known[name].output[0][-3000:]
        return known[name]

    return of


def require_same(back: Ended, exact: Ended) -> None:
    """Every bit of the end, and every loss and norm that the loop saw, also where a stage did not compute."""
    for rank, status in enumerate(back.statuses):
        assert status == 0, back.output[rank][-3000:]
        mine, other = back.result(rank), exact.result(rank)
        assert mine["losses"] == {at: loss for at, loss in other["losses"].items() if at in mine["losses"]}
        assert {**mine, **OF_A_LIFE} == {**other, **OF_A_LIFE}


def left_by(job: Job, rank: int, *kinds: str) -> list[MemoryState]:
    return [one for one in Arena(run_id(job.run_dir)).list() if one.rank == rank and one.kind in kinds]


@pytest.mark.parametrize(
    ("ranks", "options", "killed", "resting"),
    [
        pytest.param(3, {}, {1: 22}, "stages 0, 2 ", id="the stage in the middle"),
        pytest.param(
            3, {"precision": "fp16", "zero": 0}, {2: 23}, "stages 0, 1 ", id="the last one, after an overflow"
        ),
        pytest.param(2, {"stages": 2, "zero": 0}, {0: 23}, "stages 1 ", id="the first one, a plain optimizer at rest"),
        pytest.param(3, {"precision": "bf16"}, {0: 24}, "stages 1, 2 ", marks=pytest.mark.slow, id="the first one"),
        pytest.param(4, {"stages": 2, "precision": "bf16"}, {3: 21}, "stages 0 ", id="two ranks of a stage"),
        pytest.param(
            4, {"stages": 4}, {1: 22, 2: 22}, "stages 0, 3 ", marks=pytest.mark.slow, id="neighbours, together"
        ),
        pytest.param(
            4, {"stages": 4}, {0: 22, 2: 22}, "stages 1, 3 ", marks=pytest.mark.slow, id="apart, each for itself"
        ),
    ],
)
def test_a_stage_that_lost_its_state_replays_alone(
    launch: Callable[..., Ended],
    uninterrupted: Callable[..., Ended],
    ranks: int,
    options: dict[str, Any],
    killed: dict[int, int],
    resting: str,
) -> None:
    launch(ranks=ranks, killed=killed, awaited=13, **options)
    back = launch(ranks=ranks, **options)
    assert f"{resting}have the state of iteration {min(killed.values())} and rest" in back.output[0]
    require_same(back, uninterrupted(ranks=ranks, **options))


@pytest.mark.parametrize(
    ("rank", "at", "until"),
    [
        pytest.param(1, 18, 22, id="the one that computes, in the window"),
        pytest.param(0, 19, 22, marks=pytest.mark.slow, id="one that rests"),
        pytest.param(2, 22, 22, marks=pytest.mark.slow, id="one that has rested, at its end"),
        pytest.param(1, 24, 24, id="the same again, before the next window"),
    ],
)
def test_a_kill_during_the_replay_and_after_it_repeats_it(
    lost: Job, uninterrupted: Callable[..., Ended], rank: int, at: int, until: int
) -> None:
    launched(lost, killed={rank: at})
    back = launched(lost)
    assert f"have the state of iteration {until} and rest" in back.output[0]
    require_same(back, uninterrupted())


def test_a_lost_machine_replays_a_window_that_another_had_while_the_others_rest(
    launch: Callable[..., Ended], uninterrupted: Callable[..., Ended], tmp_path: Path
) -> None:
    launch(killed={1: 22}, received=9, step_seconds=0.2, nodes=["a", "b", "c"])
    shutil.rmtree(tmp_path / "killed" / "memory" / "b")
    back = launch(nodes=["a", "d", "c"])
    assert "stages 0, 2 have the state of iteration 22 and rest" in back.output[0]
    assert "window" in back.result(1)["started"]["reason"]
    require_same(back, uninterrupted())


def test_a_failure_during_the_replay_widens_it(lost: Job, uninterrupted: Callable[..., Ended]) -> None:
    launched(lost, killed={2: 19})
    for state in left_by(lost, 2, "departure"):  # its machine has lost it
        state.path.unlink()
    back = launched(lost)
    assert "stages 0 have the state of iteration 22 and rest" in back.output[0]
    require_same(back, uninterrupted())


def test_without_a_log_all_stages_replay(lost: Job, uninterrupted: Callable[..., Ended]) -> None:
    for rank in (0, 2):
        log = next(one for one in left_by(lost, rank, "upstream") if one.iteration == 19)
        with log.path.open("r+b") as file:  # a hash shows it
            file.seek(log.size.header_bytes)
            file.write(b"another")
    back = launched(lost)
    assert "all stages replay the window" in back.output[0]
    require_same(back, uninterrupted())


def test_a_stage_that_gives_something_else_is_found_out_and_its_neighbour_replays_too(
    lost: Job, uninterrupted: Callable[..., Ended]
) -> None:
    noisy = launched(lost, noisy=1)
    assert any("came from rank 1 with other values than the first time" in one for one in noisy.output)
    back = launched(lost)  # the rank that found it has no use for its logs any more
    assert "stages 0 have the state of iteration 22 and rest" in back.output[0]
    require_same(back, uninterrupted())


def test_an_evaluation_during_the_rest_ends_it(lost: Job, uninterrupted: Callable[..., Ended]) -> None:
    evaluating = launched(lost, evaluates=19)
    assert any("eval_batch was called while this stage repeats" in one for one in evaluating.output)
    back = launched(lost)
    assert "all stages replay the window" in back.output[0]
    require_same(back, uninterrupted())


def test_where_the_loop_registers_objects_all_stages_replay(
    launch: Callable[..., Ended], uninterrupted: Callable[..., Ended]
) -> None:
    launch(killed={1: 22}, awaited=17, averages=True)
    back = launch(averages=True)
    assert "all stages replay the window: the loop has registered objects" in back.output[0]
    require_same(back, uninterrupted(averages=True))


def test_a_stage_with_experts_replays_while_the_other_rests(job: Job, tmp_path: Path) -> None:
    options: dict[str, Any] = {"ranks": 4, "stages": 2, "expert_parallel": 2, "routed": (1, 2), "micro_batches": 2}
    job.launch("exact", fault="step:3:22", settings=SETTINGS, **options)
    back = job.launch("exact", settings=SETTINGS, **options)
    assert "stages 0 have the state of iteration 22 and rest" in back.output[0]
    exact = Job(tmp_path / "uninterrupted").launch("exact", **options)
    for rank in range(4):
        assert {**back.result(rank), **OF_THE_START} == {**exact.result(rank), **OF_THE_START}
