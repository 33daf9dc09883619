"""What a job says of its machine when it starts."""

import logging
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cpsr import CPSRRecovery
from cpsr.doctor import start
from cpsr.doctor.start import EVENT, report_machine
from cpsr.journal import JournalReader
from cpsr.journal.database import filesystem_of
from tests.doctor.mounts import mounted
from tests.recovery.test_faults import Loop, config

QUICK_SECONDS = 0.05


@contextmanager
def files_limited(soft: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def events(run_dir: Path) -> list[str]:
    with JournalReader(run_dir / "journal.db") as journal:
        return [row.message for row in journal.events() if row.kind == EVENT]


def test_each_finding_is_one_line_and_one_event(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = tmp_path / "run"
    with caplog.at_level(logging.WARNING, "cpsr"), files_limited(400), CPSRRecovery(Loop().adapter, config(run_dir)):
        pass
    told = [message for message in events(run_dir) if message.startswith("open files")]
    assert len(told) == 1
    assert "400 open files a process: a rank may need 516" in told[0]
    assert [one.getMessage() for one in caplog.records].count(told[0]) == 1


def test_where_nothing_is_wrong_nothing_is_said(tmp_path: Path) -> None:
    if filesystem_of(tmp_path) in ("tmpfs", "overlay"):
        pytest.skip(f"the folder of tests is on {filesystem_of(tmp_path)}, which is a finding")
    with CPSRRecovery(Loop().adapter, config(tmp_path / "run")):
        pass
    assert events(tmp_path / "run") == []


def test_a_run_in_memory_is_told(tmp_path: Path) -> None:
    script = """
from cpsr import CPSRRecovery
from cpsr.doctor.finding import ok
from cpsr.journal import JournalReader
from tests.recovery.test_faults import Loop, config
with CPSRRecovery(Loop().adapter, config(place / "run")):
    pass
with JournalReader(place / "run" / "journal.db") as journal:
    show(*[ok(row.kind, row.message) for row in journal.events()])
"""
    found = [one["measured"] for one in mounted(tmp_path, "size=64m", script) if one["subject"] == EVENT]
    assert len(found) == 1
    assert "is on tmpfs, memory: a new start of the machine loses every checkpoint" in found[0]


def test_it_takes_milliseconds(tmp_path: Path) -> None:
    with CPSRRecovery(Loop().adapter, config(tmp_path / "run")) as recovery:
        taken = []
        for _ in range(5):
            began = time.perf_counter()
            report_machine(recovery.life.job)
            taken.append(time.perf_counter() - began)
    assert min(taken) < QUICK_SECONDS


def test_what_cannot_be_looked_at_does_not_stop_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(start, "check_lifetime", fails)
    monkeypatch.setattr(start, "check_files_left", fails)
    with caplog.at_level(logging.WARNING, "cpsr"), CPSRRecovery(Loop().adapter, config(tmp_path / "run")):
        pass
    assert any("could not be looked at" in one.getMessage() for one in caplog.records)
