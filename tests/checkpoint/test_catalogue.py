"""What is found in a run's directory where the file system refuses, or a manifest is damaged."""

import errno
from pathlib import Path

import pytest

from cpsr.benchmarks.harness.checkpoint_files import commit_file
from cpsr.checkpoint.catalogue import Retention, remove_unlisted, scan
from cpsr.checkpoint.manifest import COMMIT, SLABS
from cpsr.checkpoint.store import CheckpointStore
from tests.checkpoint.conftest import refuse_asking, save


def test_what_the_file_system_does_not_say_of_a_commit_record_is_unreadable(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for iteration in (10, 20, 30):
        save(store, iteration)
    refused = store.directory / "step-0000000020" / COMMIT
    refuse_asking(monkeypatch, refused, 1_000)
    found = scan(store.directory)
    assert [info.iteration for info in found.checkpoints] == [10, 30]
    assert [(problem.file, problem.iteration) for problem in found.unreadable] == [(refused, 20)]
    assert found.problems == []
    assert [info.iteration for info in store.catalogue()] == [10, 30]
    assert "cannot be read now: Stale file handle" in caplog.text
    refuse_asking(monkeypatch, refused, 1)
    assert [info.iteration for info in store.catalogue()] == [10, 20, 30]


def test_a_checkpoint_that_is_not_seen_now_is_neither_removed_nor_counted_over(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for iteration in (10, 20, 30):
        save(store, iteration)
    hidden = commit_file(store.directory / "step-0000000030")
    refuse_asking(monkeypatch, hidden, 1_000)
    save(store, 40)  # with a retention pass after it
    remove_unlisted(store.directory)
    refuse_asking(monkeypatch, hidden, 0)
    found = scan(store.directory).checkpoints
    assert [info.iteration for info in found] == [10, 20, 30, 40]
    assert [info.manifest.sequence for info in found] == [1, 2, 3, 4]


def test_what_was_set_aside_and_cannot_be_read_now_counts_nevertheless(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for iteration in (10, 20):
        save(store, iteration)
    store.quarantine(20, "a test")
    real = Path.is_dir

    def refusing(path: Path) -> bool:
        if path.name.startswith("damaged-"):
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return real(path)

    monkeypatch.setattr(Path, "is_dir", refusing)
    for _ in range(2):
        found = scan(store.directory)
    assert ([info.iteration for info in found.checkpoints], found.newest_sequence) == ([10], 2)
    assert [aside.iteration for aside in found.asides] == [20]
    assert caplog.text.count("Stale file handle") == 1
    assert [info.iteration for info in store.catalogue()] == [10]
    slabs = sorted((store.directory / SLABS).iterdir())
    save(store, 30)
    store.retain(Retention())
    assert set(slabs) < set((store.directory / SLABS).iterdir())
    assert caplog.text.count("no slab is removed") == 1
