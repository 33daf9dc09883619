"""The drill: its schedules, what it reads from records, its table, and real runs of a small job."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from cpsr.benchmarks.drill.drive import Happened, Run, drive
from cpsr.benchmarks.drill.job import Job
from cpsr.benchmarks.drill.peers import PEERS, PLAIN, Peer
from cpsr.benchmarks.drill.records import Records, recovery
from cpsr.benchmarks.drill.schedule import Failure, Kind, draw_schedule
from cpsr.benchmarks.drill.table import rows_of
from cpsr.demo.machines import obstacle
from cpsr.demo.model import GPTConfig

BY_NAME = {peer.name: peer for peer in PEERS}
TINY = GPTConfig(layers=1, heads=2, width=32, context=32)


def test_a_schedule_is_the_same_each_time_and_three_have_all_kinds() -> None:
    schedules = [draw_schedule(number, 4, 120.0) for number in range(3)]
    assert schedules == [draw_schedule(number, 4, 120.0) for number in range(3)]
    early = [[one for one in schedule if one.seconds < 130.0] for schedule in schedules]
    assert [len(found) for found in early] == [2, 2, 2]
    assert {one.kind for found in early for one in found} == set(Kind)
    assert all(one.rank in range(4) and one.seconds >= 20.0 for schedule in schedules for one in schedule)
    assert len({schedule[0].seconds for schedule in schedules}) == 3


def records(directory: Path, *ranks: list[tuple[float, int, str, object]]) -> Records:
    """What ranks have written: a time, a process, what, and the first word."""
    (directory / "records").mkdir()
    for rank, lines in enumerate(ranks):
        text = "".join(json.dumps([at, pid, what, word, "x", 1.0]) + "\n" for at, pid, what, word in lines)
        (directory / "records" / f"rank-{rank}").write_text(text)
    found = Records(directory)
    found.refresh()
    return found


BEFORE: list[tuple[float, int, str, object]] = [(0.0, 7, "process", 7), (1.0, 7, "step", 1), (2.0, 7, "step", 2)]


def test_the_step_that_was_under_way_does_not_count(tmp_path: Path) -> None:
    """A rank that lives on ends the step that had begun; the first that counts begins after the failure."""
    survivor = [*BEFORE, (2.6, 7, "step", 3), (3.6, 7, "step", 4)]
    back = recovery(records(tmp_path, survivor, BEFORE), 2.5, all_leave=False)
    assert back is not None
    assert back.step_seconds == pytest.approx(1.1)
    assert back.lost_iterations == 0


def test_steps_that_are_trained_again_are_lost(tmp_path: Path) -> None:
    again = [*BEFORE, (6.0, 8, "process", 8), (7.0, 8, "step", 1), (8.0, 8, "step", 2)]
    back = recovery(records(tmp_path, again, BEFORE), 2.5, all_leave=False)
    assert back is not None
    assert (back.step_seconds, back.lost_iterations) == (4.5, 2)


def test_ranks_that_train_until_they_leave_have_not_come_back(tmp_path: Path) -> None:
    leaving = [*BEFORE, (3.0, 7, "step", 3), (4.0, 7, "step", 4)]
    assert recovery(records(tmp_path, leaving), 2.5, all_leave=True) is None


def test_after_sigterm_what_was_trained_while_leaving_counts_too(tmp_path: Path) -> None:
    again = [*BEFORE, (3.0, 7, "step", 3), (6.0, 8, "process", 8), (7.0, 8, "step", 3)]
    back = recovery(records(tmp_path, again), 2.5, all_leave=True)
    assert back is not None
    assert (back.step_seconds, back.lost_iterations) == (4.5, 1)


def run_of(seconds: float, *failures: Happened, weights: str = "a") -> Run:
    return Run(True, seconds, 101.0, [1.0], list(failures), 0, 10, [weights], [])


def test_the_table_compares_with_the_job_alone() -> None:
    peer, job = BY_NAME["torch.save"], Job(Path(), 2, "ddp", 101, 8, TINY, 5, 30.0, 120.0)
    failures = Happened(Kind.HUNG, 3.0, 40.0, 6), Happened(Kind.RANK_KILLED, 60.0, 10.0, 2)
    failed = {peer.name: [run_of(202.0, *failures), run_of(101.0, weights="b")]}
    (row,) = rows_of([peer], {peer.name: job}, [run_of(100.0)], {peer.name: run_of(110.0)}, failed)
    assert row.effective == pytest.approx([0.5, 1.0])
    assert row.lost_iterations == [4.0]
    assert row.step_seconds == {Kind.HUNG: [40.0], Kind.RANK_KILLED: [10.0]}
    assert row.overhead == pytest.approx(0.1)
    assert row.equal_weights == [True, False]
    assert row.equal_to_plain


def test_a_run_is_kept_as_it_was(tmp_path: Path) -> None:
    run = run_of(3.0, Happened(Kind.SIGTERM, 1.0, None, None))
    assert Run.of_json(json.loads(json.dumps(asdict(run)))) == run


@pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
@pytest.mark.parametrize(
    ("peer", "sharding", "ranks", "kind"),
    [
        (BY_NAME["CPSR, warm ranks"], "fsdp2", 4, Kind.MEMORY_LOST),
        (BY_NAME["CPSR"], "ddp", 2, Kind.ALL_KILLED),
        (BY_NAME["torch.save"], "ddp", 2, Kind.RANK_KILLED),
        (BY_NAME["DCP async_save"], "fsdp2", 4, Kind.SIGTERM),
    ],
    ids=lambda given: getattr(given, "name", str(given)),
)
def test_a_job_comes_back_with_the_weights_of_one_that_never_failed(
    tmp_path: Path, peer: Peer, sharding: str, ranks: int, kind: Kind
) -> None:
    job = Job(tmp_path / "job", ranks, sharding, 150, 8, TINY, 10, 30.0, 120.0)
    alone = drive(PLAIN, job)
    failed = drive(peer, job, [Failure(0.5, kind, 1)], limit_seconds=300.0, keep=tmp_path / "logs")
    logs = "\n".join(path.read_text() for path in sorted((tmp_path / "logs").iterdir()))
    assert failed.complete, logs
    assert [one.kind for one in failed.failures] == [kind]
    assert failed.failures[0].step_seconds is not None
    assert failed.weights == alone.weights, logs
