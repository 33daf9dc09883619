"""`cpsr release`: what is freed by hand, and what is not."""

import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cpsr.checkpoint.file_lock import FileLock
from cpsr.checkpoint.memory_owners import mark_owner
from cpsr.cli.main import app


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands for the machine's: others' jobs free what is gone there."""
    directory = tmp_path / "memory"
    directory.mkdir()
    monkeypatch.setattr("cpsr.cli.release.SHARED_MEMORY", directory)
    return directory


def release(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["release", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def left(memory: Path, run_id: str, run_dir: Path | None) -> None:
    """A megabyte, as a failed job leaves it."""
    if run_dir is not None:
        run_dir.mkdir(parents=True)
        (run_dir / "run.json").write_text(json.dumps({"run_id": run_id}))
        mark_owner(run_id, run_dir, "node-1", memory)
    for slot in ("0", "replica-1"):
        (memory / f"cpsr-{run_id}-rank-00003-{slot}").write_bytes(bytes(500_000))


def test_what_a_failed_job_left_in_memory_is_freed(memory: Path, tmp_path: Path) -> None:
    left(memory, "0123", tmp_path / "run")
    code, output, errors = release(tmp_path / "run")
    assert (code, errors) == (0, "")
    assert "1.0 MB of host memory are free again" in output
    assert list(memory.iterdir()) == []


def test_nothing_is_freed_that_a_process_uses(memory: Path, tmp_path: Path) -> None:
    left(memory, "0123", tmp_path / "run")
    lock = FileLock(memory / "cpsr-0123-rank-00003-0")
    code, output, errors = release(tmp_path / "run")
    lock.release()
    assert (code, output) == (2, "")
    assert f"is in use, and was not freed: process {os.getpid()} (" in errors
    assert len(list(memory.iterdir())) == 3


def test_without_the_run_directory_the_way_is_named(memory: Path, tmp_path: Path) -> None:
    code, output, errors = release(tmp_path / "gone")
    assert (code, output) == (2, "")
    assert "holds no run.json" in errors
    assert "`cpsr release --orphans` frees" in errors
    assert release("--orphans") == (0, f"{memory} holds nothing of a run that is gone\n", "")
    assert [release(*wrong)[0] for wrong in ((), (tmp_path, "--orphans"))] == [2, 2]


def test_a_directory_that_cannot_be_read_is_one_line(memory: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, output, errors = release(tmp_path / "file")
    assert (code, output) == (2, "")
    assert f"{tmp_path / 'file'} cannot be read as a run directory" in errors
    assert "Traceback" not in errors


def test_of_orphans_what_is_gone_is_freed_and_the_command_for_the_rest_is_named(memory: Path, tmp_path: Path) -> None:
    gone, unclear = tmp_path / "gone", tmp_path / "a folder" / "run"
    moved = tmp_path / "unmounted"
    for run_id, run_dir in (("1", gone), ("2", unclear), ("3", None), ("4", tmp_path / "there")):
        left(memory, run_id, run_dir)
    shutil.rmtree(gone)
    unclear.parent.rename(moved)
    unclear.parent.mkdir()
    code, output, _ = release("--orphans")
    first, second, third = output.splitlines()
    assert code == 0
    assert first == f"run 1 of {gone}: 1.0 MB of host memory are free again: {gone} is gone"
    assert second.startswith(
        f"run 2 of {unclear}: 1.0 MB are kept, unknown whether it is gone: {unclear.parent} is another"
    )
    assert second.endswith(f"; it ran on node-1. Where no job needs it any more: rm {memory}/cpsr-2-*")
    assert third.endswith(f"no owner of it is recorded. Where no job needs it any more: rm {memory}/cpsr-3-*")
    assert sorted({path.name.split("-")[1] for path in memory.iterdir()}) == ["2", "3", "4"]
