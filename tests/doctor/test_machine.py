"""What is found without writing, of file systems that are really mounted, and what a job says of it at its start."""

import logging
import sys
import time
from pathlib import Path

import pytest

from cpsr import CPSRRecovery
from cpsr.doctor import machine
from cpsr.doctor.machine import EVENT, check_devices, check_memory, report_machine
from cpsr.journal import JournalReader
from cpsr.journal.database import filesystem_of
from tests.doctor.mounts import mounted
from tests.recovery.test_faults import Loop, config

QUICK_SECONDS = 0.05


def levels_on(place: Path, options: str, expression: str) -> list[str]:
    """Levels of the findings of an expression, with a tmpfs at the place."""
    script = (
        "from pathlib import Path; from cpsr.doctor.machine import *; "
        f"place = Path({str(place)!r}); print(*[one.level for one in ({expression})])"
    )
    ended = mounted(place, options, [sys.executable, "-c", script])
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout.splitlines()[-1].split()


def test_shared_memory_must_hold_the_buffers_and_be_writable_memory(tmp_path: Path) -> None:
    sizes = "[one for size in (None, 30_000_000, 120_000_000) for one in check_memory(size, place)]"
    assert levels_on(tmp_path, "size=64m", sizes) == ["ok", "ok", "ok", "ok", "ok", "warning"]
    assert levels_on(tmp_path, "size=1m", "[check_memory_kind(place)]") == ["ok"]
    if filesystem_of(tmp_path) != "tmpfs":
        assert machine.check_memory_kind(tmp_path).level == "warning"
    absent = list(check_memory(None, tmp_path / "absent"))
    assert [one.level for one in absent] == ["ok", "warning"]


def test_the_machine_must_hold_the_buffers() -> None:
    first, *_ = check_memory(1 << 50)
    assert (first.subject, first.level) == ("host memory", "error")


def test_a_driver_without_a_gpu_for_torch_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert check_devices(2, tmp_path / "absent").level == "ok"
    (tmp_path / "version").touch()
    assert check_devices(2, tmp_path / "version").level == "warning"


def events(run_dir: Path) -> list[str]:
    with JournalReader(run_dir / "journal.db") as journal:
        return [row.message for row in journal.events() if row.kind == EVENT]


def test_a_job_says_nothing_where_nothing_is_wrong_and_that_takes_milliseconds(tmp_path: Path) -> None:
    if filesystem_of(tmp_path) in ("tmpfs", "overlay"):
        pytest.skip(f"the folder of tests is on {filesystem_of(tmp_path)}, which is a finding")
    with CPSRRecovery(Loop().adapter, config(tmp_path / "run")) as recovery:
        taken = []
        for _ in range(5):
            began = time.perf_counter()
            report_machine(recovery.life.job)
            taken.append(time.perf_counter() - began)
    assert min(taken) < QUICK_SECONDS
    assert events(tmp_path / "run") == []


def test_a_run_in_memory_is_told(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from cpsr import CPSRRecovery
from tests.doctor.test_machine import events
from tests.recovery.test_faults import Loop, config
run_dir = Path({str(tmp_path)!r}) / "run"
with CPSRRecovery(Loop().adapter, config(run_dir)):
    pass
print(*events(run_dir), sep="\\n")
"""
    ended = mounted(tmp_path, "size=64m", [sys.executable, "-c", script])
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert sum("is on tmpfs" in line for line in ended.stdout.splitlines()) == 1  # one event
    assert ended.stderr.count("is on tmpfs") == 1  # and one line


def test_what_cannot_be_looked_at_does_not_stop_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(machine, "check_file_system", fails)
    with caplog.at_level(logging.WARNING, "cpsr"), CPSRRecovery(Loop().adapter, config(tmp_path / "run")):
        pass
    assert any("could not be looked at" in one.getMessage() for one in caplog.records)
