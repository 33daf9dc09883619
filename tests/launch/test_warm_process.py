"""The warm process of a machine, with ranks that import little: when its forks are ranks, and when they must not be."""

import _ctypes
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import cpsr.launch
from cpsr.launch.warm import ForkedRank, WarmRanks
from cpsr.ranks.link import LAUNCHER, Report

# A rank that opens a run: it needs nothing of torch for that.
SCRIPT = """
import os
{before}
import installed
from cpsr.ranks.link import Opened, report
report().open(Opened("run", 0, 1))
report().tell_imports()
print("rank", os.environ["RANK"], os.environ.get("SETTING"), flush=True)
raise SystemExit(int(os.environ["STATUS"]))
"""
ROOT = Path(__file__).parents[2]
RANK_START = Path(cpsr.launch.__file__).parent / "rank_start"
PATIENCE_SECONDS = 60.0


class Machine:
    """A launcher's machine with one rank, and with a package that is installed for this user.

    Args:
        folder: of everything.
        installed: the package's code.
        before: what the script does before it imports the package.
    """

    def __init__(self, folder: Path, installed: str = "", before: str = "") -> None:
        base = folder / "base"
        self.packages = base / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        self.packages.mkdir(parents=True)
        self.installed = self.packages / "installed.py"
        self.installed.write_text(installed)
        self.script = folder / "script" / "train.py"
        self.script.parent.mkdir()
        self.script.write_text(SCRIPT.format(before=before))
        self.lines: list[str] = []
        self.options = ["-u"]  # as torchrun starts scripts
        self.output = folder / "output"
        report = Report(folder / "launcher")
        report.clear()
        self.warm = WarmRanks(report, self.lines.append, self.lines.append)
        paths = [str(RANK_START), str(self.packages), os.environ.get("PYTHONPATH", "")]
        self._environment = {
            **os.environ,
            LAUNCHER: str(folder / "launcher"),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONUSERBASE": str(base),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "",
            "TORCHELASTIC_RUN_ID": "job",
            "LOCAL_RANK": "0",
        }

    def start(self, rank: int = 0, status: int = 0) -> "ForkedRank | subprocess.Popen[bytes]":
        """Start the rank; wait for its end and check its status."""
        process = self.launch(self.output, rank, status)
        assert process.wait(PATIENCE_SECONDS) == status, self.output.read_text()
        assert self.output.read_text().splitlines()[-1].startswith(f"rank {rank} ")
        return process

    def launch(self, output: Path, rank: int = 0, status: int = 0) -> "ForkedRank | subprocess.Popen[bytes]":
        """Start the rank, whose output goes to a file."""
        command = (sys.executable, *self.options, str(self.script))
        environment = {**self._environment, "RANK": str(rank), "STATUS": str(status)}
        self.warm.begin_start()
        with output.open("a") as stream:
            process = self.warm.fork(command, environment, stream, stream)
            return process or subprocess.Popen(command, env=environment, stdout=stream, stderr=stream)

    def until_told(self) -> str:
        """What is said of the warm process that the last start has asked for."""
        told, deadline = len(self.lines), time.monotonic() + PATIENCE_SECONDS
        while len(self.lines) == told:
            assert time.monotonic() < deadline
            self.warm.look()
            time.sleep(0.01)
        return self.lines[-1]


@pytest.fixture
def machine_with(tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    made: list[Machine] = []

    def make(*args: str, **options: str) -> Machine:
        made.append(Machine(tmp_path, *args, **options))
        return made[-1]

    yield make
    for one in made:
        one.warm.close()


def test_forks_are_ranks_and_the_process_does_not_grow(machine_with: Callable[..., Machine]) -> None:
    machine = machine_with("VALUE = 1")
    assert isinstance(machine.start(), subprocess.Popen)
    pid = int(machine.until_told().partition("process ")[2].partition(",")[0])
    sizes = []
    for start in range(20):
        rank = machine.start(rank=start, status=start)
        assert isinstance(rank, ForkedRank)
        assert rank.poll() == rank.returncode == start
        sizes.append(psutil.Process(pid).memory_info().rss)
    assert psutil.Process(pid).children() == []
    assert sizes[-1] - sizes[4] < 1 << 18
    assert len(machine.lines) == 1


@pytest.mark.parametrize(
    ("installed", "before", "told"),
    [
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
            "",
            "a thread",
        ),
        ("import subprocess; process = subprocess.Popen(['sleep', '3'])", "", "started a process"),
        ("log = open('/dev/full', 'a')", "", "an import opened /dev/full"),
        ("import mmap; memory = mmap.mmap(-1, 4096)", "", "an import shares memory"),
        ("import tempfile; tempfile.TemporaryDirectory()", "", "an import made a temporary file or folder"),
        ("import numpy; generator = numpy.random.default_rng()", "", "made a random generator (numpy.random."),
        ("import os; variables = dict(os.environ)", "", "keeps the environment (installed.variables)"),
        ("import os; VALUE = os.environ.get('SETTING')", "os.environ['SETTING'] = '1'", "the script sets SETTING"),
        ("", "os.environ['OMP_NUM_THREADS'] = '7'", "the script sets OMP_NUM_THREADS"),
        ("", "import colorsys; colorsys.rgb_to_hsv = lambda *_: 0", "the script replaces colorsys.rgb_to_hsv"),
        (
            f"import sys; sys.path.append({str(ROOT)!r}); import tests.launch.jobs",
            "",
            "imports load tests.launch.jobs, which is not installed",
        ),
        ("import colorsys", "import sys, types; sys.modules['colorsys'] = types.ModuleType('c')", "made by the script"),
        (
            "import sys; assert hasattr(sys, 'ready')",
            "import sys; sys.ready = True",
            "imports failed (Asser",
        ),
        (
            "import sys; hasattr(sys, 'ready') or __import__('this')",
            "import sys; sys.ready = 1",
            "imports load this",
        ),
    ],
)
def test_ranks_start_fresh_where_a_fork_would_differ(
    machine_with: Callable[..., Machine], installed: str, before: str, told: str
) -> None:
    machine = machine_with(installed, before)
    machine.start()
    assert told in machine.until_told()
    assert machine.lines[-1].startswith("Restarts of this job import everything again: ")
    for _ in range(2):
        assert isinstance(machine.start(), subprocess.Popen)
    assert len(machine.lines) == 1


def test_parts_are_found_that_a_package_has_put_on_the_path(machine_with: Callable[..., Machine]) -> None:
    machine = machine_with(
        "import pathlib, sys; sys.path.append(f'{pathlib.Path(__file__).parent}/parts'); import part"
    )
    (machine.packages / "parts").mkdir()
    (machine.packages / "parts" / "part.py").write_text("")
    machine.start()
    assert machine.until_told().startswith("Restarts fork")
    assert isinstance(machine.start(), ForkedRank)


def test_a_module_of_the_user_is_not_taken_for_one_of_the_environment(machine_with: Callable[..., Machine]) -> None:
    machine = machine_with("import colorsys")
    (machine.script.parent / "colorsys.py").write_text("")
    machine.start()
    assert "again: colorsys is " in machine.until_told()


def test_ranks_start_fresh_where_imports_have_read_what_each_start_sets(machine_with: Callable[..., Machine]) -> None:
    machine = machine_with("import os; RANK = os.environ['RANK']")
    machine.start()
    machine.until_told()
    assert isinstance(machine.start(rank=0), ForkedRank)
    assert isinstance(machine.start(rank=1), subprocess.Popen)
    assert "imports read RANK, which each start sets" in machine.lines[-1]


def test_variables_that_imports_set_are_those_of_a_fresh_start(machine_with: Callable[..., Machine]) -> None:
    machine = machine_with("import os; os.environ['SETTING'] = 'theirs'; os.environ.pop('HOME', None)")
    machine.start()
    machine.until_told()
    assert isinstance(machine.start(), ForkedRank)
    assert machine.output.read_text().splitlines() == ["rank 0 theirs"] * 2


@pytest.mark.parametrize("changed", ["installed", "script", "beside"])
def test_a_changed_file_is_imported_anew_and_forks_come_from_a_new_process(
    machine_with: Callable[..., Machine], changed: str
) -> None:
    machine = machine_with("import colorsys, os; os.environ['SETTING'] = 'old'")
    machine.start()
    machine.until_told()
    if changed == "installed":
        machine.installed.write_text("import colorsys, os; os.environ['SETTING'] = 'new'")
    elif changed == "script":
        machine.script.write_text(SCRIPT.format(before="os.environ['UNREAD'] = '1'"))
    else:
        (machine.script.parent / "colorsys.so.txt").write_text("")
    assert isinstance(machine.start(), subprocess.Popen)
    assert re_matches(machine.lines[-1], changed)
    machine.until_told()
    assert isinstance(machine.start(), ForkedRank)
    assert machine.output.read_text().split()[-1] == ("new" if changed == "installed" else "old")


def test_the_users_own_modules_are_read_at_each_start(machine_with: Callable[..., Machine]) -> None:
    machine = machine_with(before="import own; os.environ['SETTING'] = own.VALUE")
    own = machine.script.parent / "own.py"
    own.write_text("VALUE = 'old'")
    machine.start()
    machine.until_told()
    own.write_text("VALUE = 'new'")
    assert isinstance(machine.start(), ForkedRank)
    assert machine.output.read_text().splitlines() == ["rank 0 old", "rank 0 new"]


@pytest.mark.parametrize("options", [["-u"], []])
def test_forks_print_on_a_terminal_as_fresh_ranks_do_and_nothing_that_imports_have_printed(
    machine_with: Callable[..., Machine], options: list[str]
) -> None:
    streams = "[[s.isatty(), s.line_buffering, s.write_through, s.fileno()] for s in (sys.stdout, sys.stderr)]"
    machine = machine_with(
        "import ctypes; print('by Python'); ctypes.CDLL(None).printf(b'by C')",
        f"import sys; print({streams}, os.ttyname(1), file=sys.stderr)",
    )
    machine.options = options
    terminal, process_end = os.openpty()
    printed = []
    for kind in (subprocess.Popen, ForkedRank, ForkedRank):
        process = machine.launch(Path(os.ttyname(process_end)))
        assert isinstance(process, kind)
        assert process.wait(PATIENCE_SECONDS) == 0
        os.write(process_end, b"end")
        text = ""
        while not text.endswith("end"):
            text += os.read(terminal, 4096).decode()
        printed.append(text)
        if kind is subprocess.Popen:
            machine.until_told()
    fresh, *forks = printed
    assert "True" in fresh
    assert forks == [fresh.replace("by Python\r\n", "").replace("by C", "")] * 2
    os.close(terminal)
    os.close(process_end)


def re_matches(line: str, changed: str) -> bool:
    """Whether a line names the changed file."""
    name = {"installed": "installed.py", "script": "train.py", "beside": "colorsys.so.txt"}[changed]
    return line.startswith("The ranks import everything again: ") and line.endswith(f"{name} has changed")


def test_limits_that_the_launcher_got_meanwhile_hold_for_its_ranks(machine_with: Callable[..., Machine]) -> None:
    machine = machine_with()
    machine.start()
    machine.until_told()
    limits = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0 if limits[0] else 1 << 20, limits[1]))
    try:
        assert isinstance(machine.start(), subprocess.Popen)
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, limits)
    assert machine.lines[-1].endswith("again: limits of cpsr run is not as it was")


def test_the_process_never_runs_the_script(machine_with: Callable[..., Machine]) -> None:
    machine = machine_with("import os, signal; signal.signal(signal.SIGUSR1, lambda *_: os.listdir('/missing'))")
    machine.start()
    os.kill(int(machine.until_told().partition("process ")[2].partition(",")[0]), signal.SIGUSR1)
    assert machine.until_told().endswith("the warm process ended with status 1")  # the script would end with 0


def test_a_rank_is_waited_for_on_any_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    with subprocess.Popen(["sleep", "60"]) as process:
        rank = ForkedRank(process.pid)
        with pytest.raises(subprocess.TimeoutExpired):
            rank.wait(0.1)
        process.kill()
        assert rank.wait() == rank.wait(0.0) == -signal.SIGKILL
        assert ForkedRank(process.pid).wait() == 1  # its status was taken


def test_ranks_start_fresh_where_the_launcher_gets_no_forks_as_children(
    machine_with: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cpsr.launch.warm.prctl", lambda *_: None)
    machine = machine_with()
    machine.start()
    machine.until_told()
    assert isinstance(machine.start(), subprocess.Popen)
    assert machine.lines[-1].endswith("(it has ended, or is no child of cpsr run)")
    assert len(machine.output.read_text().splitlines()) == 2


@pytest.mark.parametrize(("name", "told"), [("libopenblas-old.so", "the threads of /"), ("openblas/lib.so", "fork")])
def test_an_openblas_whose_threads_cannot_be_set_is_told(
    machine_with: Callable[..., Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, told: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    shutil.copy(_ctypes.__file__, tmp_path / name)
    machine = machine_with(f"import ctypes; library = ctypes.CDLL({str(tmp_path / name)!r})")
    machine.start()
    assert told in machine.until_told()


@pytest.mark.parametrize("when", ["before", "during"])
def test_ranks_start_fresh_after_the_process_was_killed(machine_with: Callable[..., Machine], when: str) -> None:
    machine = machine_with()
    machine.start()
    pid = int(machine.until_told().partition("process ")[2].partition(",")[0])
    os.kill(pid, signal.SIGKILL if when == "before" else signal.SIGSTOP)
    if when == "during":
        os.kill(pid, signal.SIGKILL)
    assert isinstance(machine.start(), subprocess.Popen)
    assert "the warm process" in machine.lines[-1]
    assert isinstance(machine.start(), subprocess.Popen)
    assert len(machine.lines) == 2
