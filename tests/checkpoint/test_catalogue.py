"""What is found in a run's directory where the file system refuses, or a manifest is damaged."""

import errno
import gc
import os
import shutil
import time
import weakref
from pathlib import Path

import pytest

from cpsr.benchmarks.harness.checkpoint_files import commit_file, edit_commit
from cpsr.checkpoint import saved
from cpsr.checkpoint.catalogue import Retention, remove_unlisted, scan
from cpsr.checkpoint.manifest import COMMIT, SLABS, Manifest, step_name
from cpsr.checkpoint.store import CheckpointStore
from cpsr.checkpoint.verify import read_manifest
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


@pytest.mark.parametrize("seen", ["at the start", "when it was set aside"])
def test_a_count_that_a_life_has_seen_is_given_to_no_other_checkpoint(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: str
) -> None:
    for iteration in (10, 20, 30):
        save(store, iteration)
    later = CheckpointStore(tmp_path, 0, 1, "run", 2)
    if seen == "at the start":
        later.prepare()
        hidden = 30
    else:
        aside = later.quarantine(30, "a test")
        assert aside is not None
        shutil.rmtree(aside)  # a user frees space
        hidden = 20
    commit_record = commit_file(store.directory / step_name(hidden))
    refuse_asking(monkeypatch, commit_record, 1_000)
    save(later, 40)
    refuse_asking(monkeypatch, commit_record, 0)
    assert scan(store.directory).checkpoints[-1].manifest.sequence == 4


@pytest.mark.parametrize("readable", [True, False])
def test_a_catalogue_with_an_invalid_commit_record_goes_with_its_last_reference(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, readable: bool
) -> None:
    for iteration in (10, 20):
        save(store, iteration)
    record = commit_file(store.directory / step_name(10))
    if readable:
        record.write_text("torn")
    else:
        refuse_asking(monkeypatch, record, 1_000)
    gc.disable()
    try:
        found = scan(store.directory)
        assert len(found.problems if readable else found.unreadable) == 1
        listed = weakref.ref(found.checkpoints[0])
        del found
        assert listed() is None
    finally:
        gc.enable()


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


def test_a_commit_record_is_read_again_once_its_file_is_another(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every commit lists all checkpoints: what it knows of an old one is as good as its record, until that changes."""
    old, read = time.time() - 60, list[str]()

    def noted(directory: Path) -> Manifest:
        read.append(directory.name)
        return read_manifest(directory)

    for iteration in (10, 20):
        save(store, iteration)
        os.utime(commit_file(store.directory / step_name(iteration)), (old, old))
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 60)  # nothing can change the time of a change
    scan(store.directory)
    monkeypatch.setattr(saved, "read_manifest", noted)
    first = scan(store.directory).checkpoints
    assert [(info.iteration, info.full, info.listing.sequence) for info in first] == [(10, True, 1), (20, True, 2)]
    assert read == []
    assert first[1].manifest.listing == first[1].listing
    read.clear()
    edit_commit(first[0].directory, lambda manifest: manifest.update(weights_only=True))
    assert [info.full for info in scan(store.directory).checkpoints] == [False, True]
    assert read == [first[0].directory.name]


def test_a_young_commit_record_is_read_each_time(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one tick of the file system's clock, a file of the same size may be another."""
    save(store, 10)
    scan(store.directory)
    read = list[Path]()

    def noted(directory: Path) -> Manifest:
        read.append(directory)
        return read_manifest(directory)

    monkeypatch.setattr(saved, "read_manifest", noted)
    found = commit_file(store.directory / step_name(10)).stat()
    monkeypatch.setattr(time, "time", lambda: found.st_ctime + 0.5)
    scan(store.directory)
    assert read == [store.directory / step_name(10)]
