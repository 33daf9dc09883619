"""The checkpoints of a resumable function: written beside it, damaged, and in directories that others use."""

from pathlib import Path

import numpy
import pytest
import torch

from cpsr.benchmarks.harness.checkpoint_files import small_state_file
from cpsr.checkpoint.commit import SupersededError
from cpsr.checkpoint.files import remove_tree
from cpsr.checkpoint.manifest import step_name
from cpsr.errors import RunDirectoryError
from cpsr.hints.resumable_checkpoints import KeptCheckpoints
from tests.checkpoint.conftest import count_rank_manifests


def opened(directory: Path) -> KeptCheckpoints:
    return KeptCheckpoints(directory, "count", {"function": "count"})


def test_a_call_keeps_no_manifest_of_a_damaged_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as call:
        for total in (1, 2):
            call.save({"total": total})
    for number in (1, 2):
        path = small_state_file(tmp_path / "checkpoints" / step_name(number))
        path.write_bytes(b"torn")
    counts = count_rank_manifests(monkeypatch)
    opened(tmp_path)
    assert counts == [0, 0]


def test_a_checkpoint_holds_what_was_when_it_began_whatever_changes_while_it_is_written(tmp_path: Path) -> None:
    tensor, array, rows = torch.zeros(1000), numpy.zeros((10, 10)).T, [[0]]
    with opened(tmp_path) as call:
        for value in range(1, 9):
            tensor.fill_(value)
            array[:] = value
            rows[0] = [value]
            call.save({"tensor": tensor, "array": array, "rows": rows})
            tensor.fill_(-1)
            array[:] = -1
            rows[0][0] = -1
    number, saved = opened(tmp_path).newest() or (0, {})
    assert number == 8
    assert saved["tensor"].eq(8).all()
    assert (saved["array"] == 8).all()
    assert saved["rows"] == [[8]]


def test_a_checkpoint_that_is_gone_already_keeps_no_other_one_from_being_removed(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    with opened(tmp_path) as call:
        for total in range(1, 7):
            call.save({"total": total}).result()
            if total == 2:
                remove_tree(checkpoints / step_name(1))
        assert sorted(path.name for path in checkpoints.glob("step-*")) == [step_name(5), step_name(6)]


def test_an_older_call_learns_from_its_next_checkpoint_that_a_newer_one_has_begun(tmp_path: Path) -> None:
    with opened(tmp_path) as older, opened(tmp_path) as newer:
        writing = older.save({"total": 1})
        with pytest.raises(SupersededError):
            writing.result()
        newer.save({"total": 2}).result()
        with pytest.raises(SupersededError):
            older.save({"total": 3})
    number, saved = opened(tmp_path).newest() or (0, {})
    assert (number, saved["total"]) == (1, 2)


@pytest.mark.parametrize("name", ["", "progress", "checkpoints"])
def test_a_file_in_the_place_of_a_directory_is_no_other_call(tmp_path: Path, name: str) -> None:
    path = tmp_path / "run" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("notes")
    with pytest.raises(RunDirectoryError, match=r"cannot be used .* Make it a directory that can be written"):
        opened(tmp_path / "run")
    assert path.read_text() == "notes"
