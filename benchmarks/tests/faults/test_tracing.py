"""What is recorded of a process, and what an injection does to it."""

import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cpsr.benchmarks.faults.errors import save_all
from cpsr.benchmarks.faults.saves import RETENTION, SPARSE
from cpsr.benchmarks.faults.stage import Stage
from cpsr.benchmarks.faults.tracing import Call, Tracer, read_calls, why_no_strace
from cpsr.errors import CPSRError

SCRIPT = """
import os, sys
first, second, absent = (os.path.abspath(name) for name in ("first", "second", "absent"))
print("ready", flush=True)
sys.stdin.readline()
descriptor = os.open(first, os.O_WRONLY | os.O_CREAT)
for text in (b"one", b"two"):
    os.write(descriptor, text)
os.rename(first, second)
os.open(second, os.O_RDONLY)
try:
    os.unlink(absent)
except FileNotFoundError:
    pass
"""


@pytest.fixture(autouse=True)
def require_strace() -> None:
    if (missing := why_no_strace()) is not None:
        pytest.skip(missing)


def traced(directory: Path, *injections: str) -> tuple[int, list[Call]]:
    """Exit status of the script, and its calls in the directory."""
    work = directory / "work"
    work.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", SCRIPT], cwd=work, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        tracer = Tracer(process.pid, directory / "log", injections)
        process.stdin.write("go\n")
        process.stdin.close()
        status = process.wait(20)
        tracer.end()
    return status, read_calls(directory / "log", work)


def test_calls_are_recorded_by_name_number_and_file(tmp_path: Path) -> None:
    status, calls = traced(tmp_path)
    assert status == 0
    changing = [call for call in calls if call.changes]
    assert [(call.name, call.number, call.file) for call in changing if call.name != "openat"] == [
        ("write", 1, "first"),
        ("write", 2, "first"),
        ("rename", 1, "second"),
    ]
    assert [call.file for call in changing if call.name == "openat"] == ["first"]  # the other one reads
    assert [call.returned for call in calls if call.name == "unlink"] == [-1]
    assert str(changing[2]) == "write 2 of 2: first"


def test_a_process_that_is_killed_at_a_call_does_not_carry_it_out(tmp_path: Path) -> None:
    status, _ = traced(tmp_path, "write:signal=KILL:when=2")
    assert status == -signal.SIGKILL
    assert (tmp_path / "work" / "first").read_bytes() == b"one"


def test_a_call_can_fail_or_claim_to_have_worked(tmp_path: Path) -> None:
    status, _ = traced(tmp_path, "rename:error=ENOSPC:when=1")
    assert status == 1
    assert (tmp_path / "work" / "first").read_bytes() == b"onetwo"
    (tmp_path / "again").mkdir()
    status, calls = traced(tmp_path / "again", "write:retval=3:when=1")
    assert status == 0
    assert (tmp_path / "again" / "work" / "second").read_bytes() == b"two"
    assert [call.returned for call in calls if call.name == "write"] == [3, 3]


def test_a_process_that_is_gone_cannot_be_traced(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    gone.wait()
    with pytest.raises(CPSRError, match="strace cannot trace"):
        Tracer(gone.pid, tmp_path / "log")


# As strace writes them: aligned, and a call that others came between in two parts.
BETWEEN = """\
11 openat(AT_FDCWD, "/work/a", O_WRONLY|O_CREAT, 0666) = 3</work/a>
11 write(3</work/a>, ""..., 9 <unfinished ...>
12 fsync(4</work/b> <unfinished ...>
11 <... write resumed>)                    = 5
12 <... fsync resumed>)                    = 0
11 fsync(3</work/a>)                       = -1 EIO (Input/output error) (INJECTED)
12 write(4</work/b>, ""..., 7 <unfinished ...>
12 +++ killed by SIGKILL +++
"""


def test_calls_that_others_came_between_are_whole(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(BETWEEN)
    calls = read_calls(tmp_path / "log", Path("/work"))
    assert [(call.thread, str(call), call.returned, call.changes) for call in calls] == [
        (11, "openat 1 of 1: a", 3, True),
        (11, "write 1 of 1: a", 5, True),
        (12, "fsync 1 of 1: b", 0, True),
        (11, "fsync 1 of 1: a", -1, False),
        (12, "write 1 of 1: b", None, False),
    ]
    assert calls[1].arguments == '3</work/a>, ""..., 9'


def test_calls_keep_their_numbers_where_files_are_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = []
    for wait_seconds in (math.inf, 0.0):
        monkeypatch.setattr("cpsr.checkpoint.files.WAIT_SECONDS", wait_seconds)
        stage = Stage(tmp_path / f"{wait_seconds:g}", SPARSE.prepare)
        stage.traced(lambda run_dir, gate: save_all(SPARSE, run_dir, gate, RETENTION))
        numbers.append([call.number for call in stage.calls() if call.name == "unlink"])
    assert numbers[0] == numbers[1] == list(range(1, len(numbers[0]) + 1))
