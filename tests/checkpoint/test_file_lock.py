"""The right to a file is one process's alone: not its children's, and not lost while it is stopped."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cpsr.checkpoint import file_lock
from cpsr.checkpoint.file_lock import FileInUseError, FileLock

PATIENCE_SECONDS = 20.0
SAY_PID = "print(os.getpid(), flush=True)"
Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "buffer"


@pytest.fixture
def start(path: Path) -> Iterator[Start]:
    """A process that runs a script, once that has printed something; it and its children are ended at the end."""
    started: list[subprocess.Popen[str]] = []

    def begin(script: str) -> "subprocess.Popen[str]":
        prologue = (
            "import os, time\nfrom pathlib import Path\n"
            f"from cpsr.checkpoint.file_lock import FileLock\npath = Path({str(path)!r})\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", prologue + script], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def next_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def killed(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()


def test_a_child_that_outlives_the_process_does_not_have_it(path: Path, start: Start) -> None:
    holder = start(f"lock = FileLock(path, create=True)\nif os.fork() == 0: {SAY_PID}\ntime.sleep(60)")
    child = int(next_line(holder))
    with pytest.raises(FileInUseError):
        FileLock(path)
    killed(holder)
    FileLock(path, create=True).release()
    os.kill(child, 0)  # it still runs


def test_a_child_that_runs_on_does_not_keep_what_its_parent_releases(path: Path, start: Start) -> None:
    holder = start(f"""
locks = [FileLock(path, create=True), FileLock(path.with_name("other"), create=True)]
if os.fork() == 0:
    own = FileLock(path.with_name("of the child"), create=True)  # with the number of a descriptor that the parent has
    for lock in locks: lock.release()
    {SAY_PID}
else: locks[0].release()
time.sleep(60)
""")
    next_line(holder)
    FileLock(path, PATIENCE_SECONDS).release()
    for name in ("other", "of the child"):
        with pytest.raises(FileInUseError, match="process "):
            FileLock(path.with_name(name))


def test_a_stopped_process_keeps_it_and_is_named(path: Path, start: Start) -> None:
    holder = start("lock = FileLock(path, create=True)\nprint('locked', flush=True)\ntime.sleep(60)")
    assert next_line(holder) == "locked"
    holder.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(FileInUseError, match=rf"^process {holder.pid} \(.*python.* -c .*\) still uses {path}$"):
        FileLock(path, 0.3)
    assert 0.3 <= time.monotonic() - began < PATIENCE_SECONDS


def test_a_process_that_dies_is_waited_for_and_that_is_logged_once(
    path: Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    holder = start("lock = FileLock(path, create=True)\nprint('locked', flush=True)\ntime.sleep(60)")
    assert next_line(holder) == "locked"
    threading.Timer(1.5, holder.kill).start()
    with caplog.at_level(logging.WARNING):
        FileLock(path, PATIENCE_SECONDS, create=True).release()
    (record,) = caplog.records
    assert f"waiting up to {PATIENCE_SECONDS:g} s for process {holder.pid} (" in record.getMessage()


def test_where_the_kernel_does_not_say_who_has_it_it_is_refused_all_the_same(
    path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a process of another container."""
    next_line(start(f"lock = FileLock(path, create=True); {SAY_PID}; time.sleep(60)"))
    monkeypatch.setattr(file_lock, "LOCKS", path.with_name("hidden"))
    with pytest.raises(FileInUseError, match="a process that cannot be seen from here"):
        FileLock(path)


def test_of_many_that_remove_the_file_one_at_a_time_has_it(path: Path, start: Start) -> None:
    processes = [
        start("""
for turn in range(100):
    lock = FileLock(path, 60, create=True)
    with open(path.with_name("inside"), "x"): pass  # another one inside would have made it
    path.with_name("inside").unlink()
    lock.remove() if turn % 3 else lock.release()
print("through", flush=True)
""")
        for _ in range(3)
    ]
    assert [next_line(process) for process in processes] == ["through"] * 3


def test_whoever_has_lost_the_file_leaves_the_next_ones_lock(path: Path, start: Start) -> None:
    """A command frees all files of a run, locks included, and a job begins before the command has ended."""
    lock = FileLock(path, create=True)
    for file in path.parent.iterdir():
        file.unlink()
    script = f"lock = FileLock(path, create=True); {SAY_PID}; time.sleep(60)"
    process = start(script)
    next_line(process)
    lock.release()
    with pytest.raises(FileInUseError, match=f"process {process.pid} "):
        FileLock(path)
