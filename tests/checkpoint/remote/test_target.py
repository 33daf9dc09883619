"""`checkpoint.target` through one life after another, and the thread that copies, which never stands in the way."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from typer.testing import CliRunner

from cpsr.checkpoint.catalogue import Retention
from cpsr.checkpoint.remote.copies import scan
from cpsr.checkpoint.remote.place import open_place
from cpsr.checkpoint.remote.target import CheckpointTarget
from cpsr.checkpoint.remote.uploader import Copier, Report
from cpsr.checkpoint.store import CheckpointStore
from cpsr.cli.main import app
from cpsr.config import CheckpointConfig
from cpsr.ranks.group import Group
from tests.checkpoint.remote.conftest import (
    RUN,
    FaultySystem,
    commit,
    committed_at,
    fetched,
    new_run,
    send,
)

URL = "faulty://bucket/target"
PATIENCE_SECONDS = 10.0
RETENTION = Retention(history_span_iterations=0, history_min_checkpoints=2)


class Copied:
    """A run of one rank whose checkpoints are copied, and what was reported of it."""

    def __init__(self, run_dir: Path, keep: int = 2) -> None:
        self.store: CheckpointStore = new_run(run_dir)[0]
        self.place = open_place(URL)
        self.events: list[tuple[str, str, int]] = []
        self.copier = Copier(self.place, keep, self.store, self._report)

    def _report(self, report: Report) -> None:
        self.events.append((report.kind, report.message, report.level))

    def commit(self, iteration: int) -> None:
        commit([self.store], iteration)
        self.copier.notify(iteration)

    def wait_for(self, kind: str, count: int = 1) -> None:
        wait_until(lambda: self.count(kind) >= count)

    def count(self, kind: str) -> int:
        return sum(event[0] == kind for event in self.events)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_every_checkpoint_is_copied_and_the_newest_stay(tmp_path: Path, faulty: type[FaultySystem]) -> None:
    run = Copied(tmp_path / "run")
    for number, iteration in enumerate((10, 20, 30), start=1):
        run.commit(iteration)
        run.wait_for("target copied", number)
    run.copier.close(PATIENCE_SECONDS)
    assert committed_at(run.place) == [20, 30]
    assert {level for _, _, level in run.events} == {logging.DEBUG}  # nothing that people must read
    assert fetched(run.place, tmp_path / "new") == 30


def test_a_slow_target_holds_nothing_up_and_the_newest_is_next(tmp_path: Path, faulty: type[FaultySystem]) -> None:
    run = Copied(tmp_path / "run", keep=9)
    run.commit(10)
    run.wait_for("target copied")
    faulty.arm(None, hangs_at=20)
    run.commit(20)
    wait_until(lambda: not faulty.answers.is_set())  # in the middle of the copy
    for iteration in (30, 40, 50, 60):
        commit([run.store], iteration)
        run.store.retain(RETENTION)
        started = time.monotonic()
        run.copier.notify(iteration)
        assert time.monotonic() - started < 0.1
    assert [info.iteration for info in run.store.catalogue() if info.full] == [20, 50, 60]  # 20 stays while it is read
    faulty.answers.set()
    run.wait_for("target copied", 3)
    run.copier.close(PATIENCE_SECONDS)
    assert committed_at(run.place) == [10, 20, 60]
    run.store.retain(RETENTION)
    assert [info.iteration for info in run.store.catalogue() if info.full] == [50, 60]


def test_an_unreachable_target_is_reported_once_counted_and_tried_again(
    tmp_path: Path, faulty: type[FaultySystem]
) -> None:
    run = Copied(tmp_path / "run")
    faulty.arm(1)
    for number, iteration in enumerate((10, 20, 30), start=1):
        run.commit(iteration)
        run.wait_for("target copy failed", number)
    faulty.arm(None)
    run.commit(40)
    run.wait_for("target copied")
    run.copier.close(PATIENCE_SECONDS)
    levels = [level for kind, _, level in run.events if kind == "target copy failed"]
    assert levels == [logging.WARNING, logging.DEBUG, logging.DEBUG]
    assert "does not answer" in run.events[0][1]
    assert "attempt 3 in a row" in run.events[2][1]
    kind, message, level = run.events[3]
    assert (kind, level) == ("target copied", logging.INFO)
    assert "after 3 attempts that failed" in message
    assert fetched(run.place, tmp_path / "new") == 40


def test_states_that_were_given_up_are_set_aside_at_the_target_too(tmp_path: Path, faulty: type[FaultySystem]) -> None:
    run = Copied(tmp_path / "run")
    for number, iteration in enumerate((10, 20), start=1):
        run.commit(iteration)
        run.wait_for("target copied", number)
    run.store.abandon_after(10, "the predicted state diverged")
    run.copier.notify(10)  # as the first step after a roll-back does
    wait_until(lambda: committed_at(run.place) == [10])
    run.wait_for("target set aside")
    assert fetched(run.place, tmp_path / "new") == 10
    run.commit(20)  # the same iteration again
    run.wait_for("target copied", 3)
    run.copier.close(PATIENCE_SECONDS)
    assert committed_at(run.place) == [10, 20]
    assert [copy.manifest.sequence for copy in scan(run.place).usable] == [1, 3]


def test_two_runs_at_one_target(tmp_path: Path, faulty: type[FaultySystem]) -> None:
    other = new_run(tmp_path / "other", run_id="ab" * 16)
    send(open_place(URL), commit(other, 10))
    run = Copied(tmp_path / "run")
    run.commit(10)
    run.wait_for("target refused")
    run.commit(20)
    run.copier.close(PATIENCE_SECONDS)
    assert [(kind, level) for kind, _, level in run.events] == [("target refused", logging.ERROR)]
    assert [copy.manifest.run_id for copy in scan(run.place).usable] == ["ab" * 16]


def test_a_checkpoint_that_no_life_had_time_to_copy_is_copied_by_the_next(tmp_path: Path, url: str) -> None:
    run = tmp_path / "run"
    commit(new_run(run), 10)
    target = CheckpointTarget(CheckpointConfig(target=url), run, Group())
    target.adopt_run()
    store = CheckpointStore(run, 0, 1, RUN, 2)
    assert target.fetch(store, ()) is None
    target.start(store)
    target.notify(10)
    target.close(PATIENCE_SECONDS)
    assert committed_at(open_place(url)) == [10]


def test_verify_passes_whole_copies_and_names_damage(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/target"
    assert CliRunner().invoke(app, ["verify", url]).exit_code == 2, "nothing is committed there"
    for iteration in (10, 20):
        (store,) = new_run(tmp_path / "run")
        send(open_place(url), commit([store], iteration))
    assert CliRunner().invoke(app, ["verify", url]).exit_code == 0
    file = "checkpoints/step-0000000010/rank-00000.extra.safetensors"
    (tmp_path / "target" / file).write_bytes(b"damaged")
    done = CliRunner().invoke(app, ["verify", url])
    assert done.exit_code == 1
    assert f"{url}/{file}" in done.stdout
    assert "step-0000000020" not in done.stdout
