"""A rank's reports to its launcher, and refusals, in real processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cpsr.ranks.link import LAUNCHER, REFUSED_STATUS, VERBOSE, Report, restart_obstacle


def child(code: str, directory: Path | None) -> "subprocess.CompletedProcess[str]":
    """A process that imports CPSR under a launcher, or under none."""
    environment = {name: value for name, value in os.environ.items() if name != LAUNCHER}
    if directory is not None:
        environment[LAUNCHER] = str(directory)
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


REFUSAL = "from cpsr.errors import ConfigError; import cpsr; raise ConfigError('the key is unknown')"


def test_a_refusal_has_a_status_of_its_own_under_a_launcher(tmp_path: Path) -> None:
    ended = child(REFUSAL, tmp_path)
    assert (ended.returncode, ended.stderr) == (REFUSED_STATUS, "")
    assert Report(tmp_path).refusals() == ["ConfigError: the key is unknown [docs/errors.md#configerror]"]


def test_a_rank_that_lost_another_prints_one_line_unless_more_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code = "import cpsr; raise RuntimeError('[gloo] Connection reset by peer\\nlong advice')"
    ended = child(code, tmp_path)
    assert ended.returncode == 1
    assert ended.stderr == "[rank 0] lost another rank (RuntimeError: [gloo] Connection reset by peer)\n"
    assert [one.passing for one in Report(tmp_path).uncaught()] == [True]
    monkeypatch.setenv(VERBOSE, "1")
    assert "Traceback" in child(code, tmp_path).stderr


def test_a_traceback_is_shown_once_by_all_ranks_and_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = "import cpsr, os\nraise ValueError('rank ' + os.environ.get('RANK', '0'))"
    first, other = child(code, tmp_path), child(code.replace("'0'", "'1'"), tmp_path)
    assert (first.returncode, other.returncode, other.stderr) == (1, 1, "")
    assert "Traceback" in first.stderr
    Report(tmp_path).clear()  # before the next start
    assert child(code, tmp_path).stderr == ""
    assert "KeyError" in child(code.replace("ValueError", "KeyError"), tmp_path).stderr
    monkeypatch.setenv(VERBOSE, "1")
    assert "Traceback" in child(code, tmp_path).stderr


ENDING = """
import atexit, cpsr, gc, pathlib, sys
class Log:
    def __init__(self, path):
        self.file, self.bound = pathlib.Path(path).open("w"), self.write  # a cycle
    def write(self, line):
        self.file.write(line)
log = Log({path!r})
log.write("step 1 ")
atexit.register(log.write, "exit")
if {fails}:
    raise ValueError
"""


@pytest.mark.parametrize("fails", [False, True])
def test_a_process_that_ends_by_an_error_has_written_its_files(tmp_path: Path, fails: bool) -> None:
    ended = child(ENDING.format(path=str(tmp_path / "log"), fails=fails), tmp_path)
    assert ended.returncode == fails
    assert (tmp_path / "log").read_text() == "step 1 exit"


STUCK = """
import cpsr, os, threading, time
full = os.fdopen(os.pipe()[1], "wb")
threading.Thread(target=full.write, args=(bytes(1 << 20),), daemon=True).start()
time.sleep(0.5)
raise ValueError
"""


@pytest.mark.timeout(60)
def test_a_process_ends_by_an_error_while_a_thread_waits_in_a_write(tmp_path: Path) -> None:
    assert child(STUCK, tmp_path).returncode == 1


def test_the_others_do_not_wait_until_a_failed_process_has_searched_for_garbage(tmp_path: Path) -> None:
    code = "import gc; gc.callbacks.append(lambda *_: print(len(gc.get_objects())))\nimport cpsr"
    counted = [int(line) for line in child(f"{code}\nraise ValueError", tmp_path).stdout.split()]
    assert counted
    assert counted[-1] < 100


@pytest.mark.parametrize(
    ("raised", "error", "passing"),
    [
        ("raise ValueError('bad\\nbatch')", "ValueError: bad", False),
        ("raise OSError('No such file')", "OSError: No such file", False),
        ("raise RuntimeError('Distributed package doesn\\'t have NCCL built in')", None, False),
        ("raise RuntimeError('Cannot use ReduceOp.PREMUL_SUM with Gloo')", None, False),
        ("raise RuntimeError('Cannot use ReduceOp.BAND with NCCL')", None, False),
        ("raise RuntimeError('[/third_party/gloo/gloo/transport/tcp/pair.cc:547] Read error')", None, True),
        ("raise RuntimeError('Gloo connectFullMesh failed with no route')", None, True),
        ("raise RuntimeError('wait timeout after 300000ms')", None, True),
        ("raise ConnectionResetError('Connection reset')", None, True),
        ("import socket; a = socket.create_server(('', 0)); socket.create_server(a.getsockname())", None, True),
        ("from cpsr.errors import RunDirectoryError; raise RunDirectoryError('not mounted')", None, True),
        # A library that wraps what its collective raised.
        ("\ntry: raise RuntimeError('[gloo] Connection reset')\nexcept Exception: raise KeyError('x')", None, True),
        ("exec('1 +')", "SyntaxError: invalid syntax (<string>, line 1)", False),
    ],
)
def test_what_ended_a_rank_is_reported(tmp_path: Path, raised: str, error: str | None, passing: bool) -> None:
    assert child(f"import cpsr; {raised}", tmp_path).returncode == 1
    (uncaught,) = Report(tmp_path).uncaught()
    assert uncaught.passing is passing
    assert error in (None, uncaught.error)


def test_a_run_directory_that_is_out_of_reach_is_no_refusal(tmp_path: Path) -> None:
    ended = child(REFUSAL.replace("ConfigError", "RunDirectoryError"), tmp_path)
    assert ended.returncode == 1
    assert not Report(tmp_path).refusals()


@pytest.mark.parametrize(
    ("store", "restarts", "warned"),
    [("True", "3", True), ("False", "3", False), ("True", "0", False), (None, None, False)],
)
def test_torchrun_that_cannot_restart_is_named(
    monkeypatch: pytest.MonkeyPatch, store: str | None, restarts: str | None, warned: bool
) -> None:
    for name, value in (("TORCHELASTIC_USE_AGENT_STORE", store), ("TORCHELASTIC_MAX_RESTARTS", restarts)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    obstacle = restart_obstacle()
    assert (obstacle is not None) == warned
    if obstacle is not None:
        assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in obstacle
        assert "cpsr run" in obstacle
