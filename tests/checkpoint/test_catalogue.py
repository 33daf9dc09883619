"""What is found in a run's directory where the file system refuses, or a manifest is damaged."""

import pytest

from cpsr.checkpoint.catalogue import remove_uncommitted, scan
from cpsr.checkpoint.manifest import COMMIT, THINNED
from cpsr.checkpoint.store import CheckpointStore
from tests.checkpoint.conftest import refuse_asking, save


@pytest.mark.parametrize("name", [COMMIT, THINNED])
def test_what_the_file_system_does_not_say_of_a_file_is_unreadable(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    for iteration in (10, 20, 30):
        save(store, iteration)
    refused = store.directory / "step-0000000020" / name
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
    hidden = store.directory / "step-0000000030" / COMMIT
    refuse_asking(monkeypatch, hidden, 1_000)
    save(store, 40)  # with a retention pass after it
    remove_uncommitted(scan(store.directory), before=40)
    refuse_asking(monkeypatch, hidden, 0)
    found = scan(store.directory).checkpoints
    assert [info.iteration for info in found] == [10, 20, 30, 40]
    assert [info.sequence for info in found] == [1, 2, 3, 4]
