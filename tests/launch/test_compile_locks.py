"""A process that is killed while torch compiles leaves a lock; one that still compiles keeps it."""

import subprocess
import sys
from pathlib import Path

import pytest

from cpsr.launch.compile_locks import extensions_directory, remove_stale_locks

# As torch takes it (`torch.utils.file_baton`).
HOLDER = "import os, sys, time; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print('y', flush=True); time.sleep(60)"


def test_only_the_lock_of_a_dead_process_goes(tmp_path: Path) -> None:
    folder = tmp_path / "py311_cpu" / "deepspeed_shm_comm"
    folder.mkdir(parents=True)
    (folder / "ops.so").touch()
    command = [sys.executable, "-c", HOLDER, str(folder / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert remove_stale_locks(tmp_path) == []
        assert (folder / "lock").exists()
        holder.kill()
    assert remove_stale_locks(tmp_path) == [folder / "lock"]
    assert sorted(path.name for path in folder.iterdir()) == ["ops.so"]


def test_the_directory_is_where_torch_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert extensions_directory() == tmp_path
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert extensions_directory() == tmp_path / "torch_extensions"
