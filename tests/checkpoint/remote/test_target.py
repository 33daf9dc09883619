"""`checkpoint.target` through one life after another, as a run uses it."""

import logging
import shutil
from pathlib import Path

import pytest

from cpsr.checkpoint.remote.place import open_place
from cpsr.checkpoint.remote.target import CheckpointTarget
from cpsr.checkpoint.store import CheckpointStore
from cpsr.config import CheckpointConfig
from cpsr.errors import ConfigError, RecoveryError
from cpsr.ranks.group import Group
from tests.checkpoint.remote.conftest import RUN, FaultySystem, assert_whole, commit, committed_at, new_run

PATIENCE_SECONDS = 20.0


def life(run_dir: Path, url: str, iterations: tuple[int, ...], life: int) -> tuple[int | None, list[str]]:
    """One life of a run of one rank: what it fetched when it began, and the kinds of what it reported.

    Whether a copy is done before the next checkpoint is the machine's affair: `target slow` is left out.
    """
    target = CheckpointTarget(CheckpointConfig(target=url), run_dir, Group())
    target.adopt_run()
    if not (run_dir / "run.json").exists():
        new_run(run_dir)
    store = CheckpointStore(run_dir, 0, 1, RUN, life, fsync=False)
    store.prepare()
    fetched = target.fetch(store, ())
    whole = [info.iteration for info in store.catalogue() if info.full]
    if whole:
        assert_whole(store, whole[-1])
    target.start(store)
    target.notify(whole[-1] if whole else None)
    for iteration in iterations:
        commit([store], iteration)
        target.notify(iteration)
        target.notify(iteration)  # as at every step
    target.close(PATIENCE_SECONDS)
    return fetched, [
        report.kind for report in target.reports() if report.level >= logging.WARNING and report.kind != "target slow"
    ]


def test_lives_of_a_run_on_disks_that_are_lost(tmp_path: Path, url: str) -> None:
    run = tmp_path / "run"
    assert life(run, url, (10, 20), 0)[0] is None
    assert committed_at(open_place(url))[-1] == 20
    assert life(run, url, (30,), 1)[0] is None  # the disk is there
    shutil.rmtree(run)
    assert life(run, url, (), 0) == (30, ["target adopted", "target fetched"])
    shutil.rmtree(run / "checkpoints")
    assert life(run, url, (40, 50), 1) == (30, ["target fetched"])
    shutil.rmtree(run / "checkpoints" / "step-0000000050")
    assert life(run, url, (), 2) == (50, ["target fetched"])
    assert committed_at(open_place(url))[-1] == 50


def test_a_checkpoint_that_no_life_had_time_to_copy_is_copied_by_the_next(tmp_path: Path, url: str) -> None:
    run = tmp_path / "run"
    commit(new_run(run), 10)
    assert life(run, url, (), 1) == (None, [])
    assert committed_at(open_place(url)) == [10]


def test_without_a_target_nothing_happens(tmp_path: Path) -> None:
    store = new_run(tmp_path / "run")[0]
    target = CheckpointTarget(CheckpointConfig(), tmp_path / "run", Group())
    target.adopt_run()
    assert target.fetch(store, ()) is None
    target.start(store)
    target.notify(10)
    target.close(0.0)
    assert target.reports() == []


def test_a_target_in_the_run_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lie in one another"):
        CheckpointTarget(CheckpointConfig(target=f"file://{tmp_path}/run/copies"), tmp_path / "run", Group())


def test_a_run_goes_on_while_its_target_is_away(tmp_path: Path, faulty: type[FaultySystem]) -> None:
    url, run = "faulty://bucket/target", tmp_path / "run"
    life(run, url, (10,), 0)
    faulty.arm(1)
    assert life(run, url, (20,), 1) == (None, ["target not reachable", "target copy failed"])
    shutil.rmtree(run)
    with pytest.raises(RecoveryError, match="does not answer"):
        life(run, url, (), 2)
    faulty.arm(None)
    assert life(run, url, (), 2)[0] == 10
