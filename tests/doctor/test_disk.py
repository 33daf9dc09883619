"""A disk is tried out as the job uses it, and left as it was."""

import errno
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cpsr.config import CPSRConfig
from cpsr.doctor import disk
from cpsr.doctor.disk import (
    FOLDER,
    check_bandwidth,
    check_direct,
    check_durable,
    check_journal,
    check_operations,
    scratch_folder,
)
from cpsr.doctor.needs import Launched, Needs
from tests.doctor.mounts import mounted

IMPORT = "from cpsr.doctor.disk import *\n"


def needs(run_dir: Path, state_bytes: int | None = None, **settings: Any) -> Needs:
    return Needs(CPSRConfig.load({"run_dir": run_dir, **settings}), Launched(2, 2), state_bytes)


def test_a_disk_that_does_all_of_it_is_ok_and_left_as_it_was(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "new"
    with scratch_folder(run_dir, "x") as folder:
        assert folder == tmp_path / f"{FOLDER}x"
        found = [check(folder) for check in (check_operations, check_direct, check_durable, check_journal)]
        rates = check_bandwidth(folder, needs(run_dir, 10_000_000))
    assert [one.level for one in (*found, rates)] == ["ok"] * 5, found
    assert list(tmp_path.iterdir()) == []
    assert found[2].figures["median_seconds"] > 0
    assert found[3].figures["mode"] in ("wal", "delete")
    speeds = [rates.figures[f"{name}_bytes_per_second"] for name in ("write", "read")]
    assert rates.figures["commit_seconds"] == pytest.approx(sum(2 * 10_000_000 / speed for speed in speeds))


def test_a_disk_slower_than_a_save_may_take_is_told(tmp_path: Path) -> None:
    slow = needs(tmp_path, 10_000_000_000, checkpoint={"save_timeout_seconds": 0.01})
    found = check_bandwidth(tmp_path, slow)
    assert found.level == "warning"
    assert "checkpoint.save_timeout_seconds is 0.01" in found.advice


def test_a_small_disk_is_not_filled(tmp_path: Path) -> None:
    (found,) = mounted(tmp_path, "size=8m", IMPORT + "show(check_bandwidth(place, needs(1000)))")
    assert found["level"] == "ok"
    assert found["figures"]["measured_bytes"] == 1 << 20


def test_a_folder_that_cannot_be_made_raises(tmp_path: Path) -> None:
    script = IMPORT + (
        "import errno\n"
        "from cpsr.doctor.finding import ok\n"
        "try:\n"
        "    with scratch_folder(place / 'run', 'x'): show()\n"
        "except OSError as error: show(ok('', errno.errorcode[error.errno]))\n"
    )
    (found,) = mounted(tmp_path, "size=1m,ro", script)
    assert found["measured"] == "EROFS"


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def test_what_a_file_system_refuses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "links").mkdir()
    monkeypatch.setattr(os, "link", refuse)
    found = check_operations(tmp_path / "links")
    assert (found.level, found.figures["refused"]) == ("warning", ["hard links"])
    (tmp_path / "more").mkdir()
    monkeypatch.setattr(mmap, "mmap", refuse)
    found = check_operations(tmp_path / "more")
    assert (found.level, found.figures["refused"]) == ("error", ["hard links", "shared mappings"])
    assert "Operation not supported" in found.measured


def test_a_refusal_of_direct_transfers_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refusing(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refusing)
    found = check_direct(tmp_path)
    assert found.level == "warning"
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_no_refusal(tmp_path: Path) -> None:
    script = (
        IMPORT
        + """
from cpsr.doctor.finding import failed
(place / "fill").write_bytes(bytes((1 << 20) - 4096))
try:
    show(check_operations(place))
except OSError as problem:
    show(failed("operations", "the file system failed", problem))
"""
    )
    (found,) = mounted(tmp_path, "size=1m", script)
    assert found["level"] == "error"
    assert "No space left" in found["measured"]
    assert found["advice"].startswith("make room")


@pytest.mark.parametrize("bytes_per_second", [100_000.0, 4e6, 1e9])
def test_a_slow_disk_is_measured_with_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_per_second: float
) -> None:
    written = []

    def slow(_: int, piece: memoryview, __: Path) -> None:
        written.append(len(piece) / bytes_per_second)

    monkeypatch.setattr(disk, "write_piece", slow)
    now = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: now() + sum(written))
    found = check_bandwidth(tmp_path, needs(tmp_path))
    assert sum(written) < 2 * (1 << 20) / bytes_per_second + 6
    assert 1 << 20 <= found.figures["measured_bytes"] <= min(64 << 20, max(1 << 20, 5 * bytes_per_second))


def test_a_disk_that_takes_seconds_for_a_small_file_is_not_asked_for_twenty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced = []
    now = time.perf_counter
    monkeypatch.setattr(disk, "write_bytes", lambda *_, **__: forced.append(2.0))
    monkeypatch.setattr(time, "perf_counter", lambda: now() + sum(forced))
    assert check_durable(tmp_path).level == "warning"
    assert len(forced) == 3


@pytest.mark.slow
def test_a_journal_without_room_is_an_error(tmp_path: Path) -> None:
    (found,) = mounted(tmp_path, "size=16k", IMPORT + "show(check_journal(place))")
    assert found["level"] == "error"
    assert "SQLite" in found["measured"]


def test_a_journal_that_is_no_file_of_sqlite_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "journal.db").mkdir()
    found = check_journal(tmp_path)
    assert found.level == "error"


def test_a_slow_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object, **__: object) -> None:
        time.sleep(0.11)

    monkeypatch.setattr(disk, "write_bytes", slow)
    found = check_durable(tmp_path)
    assert found.level == "warning"
    assert "ms" in found.measured


WRITES = """
import sys, time
from pathlib import Path
from cpsr.doctor import disk
def hang(descriptor):
    print("forced", flush=True)
    time.sleep(600)
disk.os.fsync = hang
disk.check_bandwidth(Path(sys.argv[1]), None)
"""


def test_a_kill_leaves_no_large_file(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITES, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "forced\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert list(tmp_path.iterdir()) == []
