"""Resumable functions in processes that are killed, and what happens to their run directory."""

import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cpsr.benchmarks.harness.checkpoint_files import small_state_file, steps_in
from cpsr.checkpoint.verify import verify_run
from cpsr.errors import NotResumableError, RunMismatchError
from cpsr.hints import resumable
from tests.hints import programs
from tests.hints.programs import module_of

# A line says when each hint is passed, and the last one what came out.
COUNTING = """
import math, random, sys, time
from cpsr.hints import hint, resumable

@resumable(sys.argv[1], allowance=float(sys.argv[3]))
def count(n):
    total = 0
    for i in range(n):
        total += i
        hint()
        print("hint", i, flush=True)
        time.sleep(float(sys.argv[2]))
    return total

print("result", count(30), flush=True)
"""


def started(path: Path, run_dir: Path, pause: float = 0.0, allowance: float = math.inf) -> "subprocess.Popen[str]":
    command = [sys.executable, str(path), str(run_dir), str(pause), str(allowance)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def result(process: "subprocess.Popen[str]") -> list[str]:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output.splitlines()[-1].split()[1:]


def test_a_function_in_a_thread_goes_on_after_the_main_thread_has_ended(tmp_path: Path) -> None:
    *body, last = COUNTING.splitlines()
    path = tmp_path / "count.py"
    path.write_text("\n".join([*body, "import threading", f"threading.Thread(target=lambda: {last}).start()"]))
    assert result(started(path, tmp_path / "run", pause=0.01)) == ["435"]


TEXT = """
from cpsr.hints import resumable
import pathlib, time
from tests.hints import programs

class Killed(BaseException):
    pass

left = programs.left
SCALE = 3

def scaled(x):
    return SCALE * x

def tick():
    programs.left[0] -= 1
    if programs.left[0] == 0:
        raise Killed

@resumable(RUN, ALLOWANCE)
def f(n, rows):
    total = 0
    for i in range(n):
        total += scaled(i)
        rows.append(total)
        hint()
        tick()
    return total
"""
Made = Callable[..., ModuleType]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """The module, perhaps with other text, over the same run directory."""

    def make(*changes: tuple[str, str], allowance: float = math.inf) -> ModuleType:
        text = TEXT.replace("RUN", repr(str(tmp_path / "run"))).replace("ALLOWANCE", f"float('{allowance}')")
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        module = module_of(tmp_path, text)
        module.f.__wrapped__.__module__ = module.scaled.__module__ = "program"
        return module

    return make


def killed_at(module: ModuleType, hint: int, *arguments: Any) -> None:
    module.left[0] = hint
    with pytest.raises(module.Killed):
        module.f(*arguments)
    module.left[0] = 10**9


def checkpoints(tmp_path: Path) -> list[str]:
    return steps_in(tmp_path / "run" / "checkpoints")


def test_a_call_goes_on_and_the_next_one_begins_anew(made: Made, tmp_path: Path) -> None:
    killed_at(made(), 4, 6, [])
    assert checkpoints(tmp_path) == ["step-0000000003", "step-0000000004"]
    assert verify_run(tmp_path / "run") == []
    module = made()
    rows: list[int] = []
    assert module.f(6, rows=rows) == 45
    assert rows == [0, 3, 9, 18, 30, 45]
    assert module.f.resumed_from == 4
    assert checkpoints(tmp_path) == []
    assert module.f(6, []) == 45
    assert module.f.resumed_from is None


def test_a_call_that_goes_on_from_its_first_checkpoint_makes_more(made: Made, tmp_path: Path) -> None:
    """A first look tells what the next one may cost; by this allowance all hints after it are checkpoints."""
    for killed, newest in ((2, 1), (3, 2)):
        killed_at(made(allowance=1e9), killed, 6, [])
        assert checkpoints(tmp_path)[-1] == f"step-000000000{newest}"


@pytest.mark.parametrize(
    ("changes", "arguments", "words"),
    [
        ([("total += scaled(i)", "total -= scaled(i)")], (6, []), "its code"),
        ([("SCALE = 3", "SCALE = 4")], (6, []), "its code"),
        ([], (7, []), "the argument 'n'"),
        ([], (6, [0]), "the argument 'rows'"),
    ],
)
def test_other_code_or_arguments_are_refused(
    made: Made, tmp_path: Path, changes: list[tuple[str, str]], arguments: tuple[Any, ...], words: str
) -> None:
    killed_at(made(), 4, 6, [])
    before = checkpoints(tmp_path)
    with pytest.raises(RunMismatchError, match=words):
        made(*changes).f(*arguments)
    assert checkpoints(tmp_path) == before
    assert made(("    total = 0", "    # a comment\n\n    total = 0")).f(6, []) == 45


def test_a_damaged_checkpoint_is_skipped_with_a_line(
    made: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed_at(made(), 4, 6, [])
    newest = tmp_path / "run" / "checkpoints" / "step-0000000004"
    file = small_state_file(newest)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    module, rows = made(), []  # type: ignore[var-annotated]
    assert module.f(6, rows) == 45
    assert rows == [0, 3, 9, 18, 30, 45]
    assert module.f.resumed_from == 3
    assert "checkpoint 4 is skipped, and the one before it is used" in caplog.text
    assert checkpoints(tmp_path) == []


def test_a_directory_of_a_training_is_refused(made: Made, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(RunMismatchError, match="run directory of a training"):
        made().f(6, [])
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.json"]


@pytest.mark.parametrize("allowance", [math.inf, 1e9])
def test_a_newer_call_ends_the_older_one(made: Made, tmp_path: Path, allowance: float) -> None:
    """A job that was taken for dead goes on beside the one that took its place."""
    path = tmp_path / "old.py"
    module = made()
    path.write_text(COUNTING)
    old = started(path, tmp_path / "shared", 2.0, allowance)
    assert old.stdout is not None
    assert old.stdout.readline().startswith("hint")
    new = started(path, tmp_path / "shared")
    assert result(new) == ["435"]
    output, _ = old.communicate(timeout=60)
    assert old.returncode == 1
    assert "result" not in output
    assert module.f(2, []) == 3


# Each life is killed some steps later than the one before; mostly while a checkpoint is written.
KILLED_AGAIN = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from cpsr.hints import hint, resumable

def tick(step):
    if step >= int(os.environ["KILL_AT"]):
        while not any(Path(sys.argv[1]).glob("checkpoints/step-*/COMMIT")):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

@resumable(sys.argv[1], allowance=1e9)
def count(table, seen):
    for i in range(200):
        table[i % 50] += random.random() + torch.rand(())
        table.mul_(1.0001)
        seen.append(float(table.sum()))
        hint()
        time.sleep(0.001)
        tick(i)
    return seen

def begin():
    random.seed(1)
    torch.manual_seed(1)
    return torch.zeros(20_000), []

for kill_at in (20, 35, 80, 120, 155, 180, 1000):
    os.environ["KILL_AT"] = str(kill_at)
    child = os.fork()
    if not child:
        seen = count(*begin())
        assert seen == count.__wrapped__(*begin())
        print("result", count.resumed_from, flush=True)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == (-signal.SIGKILL if kill_at < 1000 else 0), status
"""


def test_wherever_a_life_is_killed_while_checkpoints_are_written_the_next_one_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "killed.py"
    path.write_text(KILLED_AGAIN)
    (resumed_from,) = result(started(path, tmp_path / "run"))
    assert int(resumed_from) > 0
    assert checkpoints(tmp_path) == []


def test_an_error_keeps_the_checkpoints(made: Made, tmp_path: Path) -> None:
    module = made(("class Killed(BaseException)", "class Killed(ValueError)"))
    killed_at(module, 3, 6, [])
    assert checkpoints(tmp_path) == ["step-0000000002", "step-0000000003"]
    assert module.f(6, []) == 45
    assert module.f.resumed_from == 3


def test_two_at_once_in_a_process_are_refused(made: Made) -> None:
    module = made(("total += scaled(i)", "total += f(1, [])"))
    with pytest.raises(NotResumableError, match="while another resumable function runs"):
        module.f(6, [])
    fine = made(("total += scaled(i)", "total += f.__wrapped__(0, [])"))
    assert fine.f(2, []) == 0


def test_a_full_disk_costs_a_checkpoint_and_not_the_call(
    made: Made, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cpsr.checkpoint.rank_part.write_tensors", full)
    assert made().f(3, []) == 9
    assert "checkpoint 1 failed" in caplog.text


@pytest.mark.parametrize("made_by", ["torch.nn.Linear(1, 1)", "{1: 2}"])
def test_a_global_that_a_call_could_change_is_refused_even_in_a_helper(made: Made, made_by: str) -> None:
    module = made(("left =", f"STATE = {made_by}\nleft ="), ("    return SCALE * x", "    STATE\n    return SCALE * x"))
    with pytest.raises(NotResumableError, match="scaled uses the global 'STATE'"):
        module.f(6, [])


def test_what_cannot_be_saved_is_refused_at_the_first_arrival_even_if_no_checkpoint_is_due(made: Made) -> None:
    begin = ("    total = 0", "    total = 0\n    seen = {1}")
    assert made(begin, allowance=1e-9).f(2, []) == 3  # not needed after the hint
    with pytest.raises(NotResumableError, match="the variable 'seen' is a set"):
        made(begin, ("return total", "return total, seen"), allowance=1e-9).f(2, [])


SEVERAL = """
import random
from cpsr.hints import hint, resumable

def score(n):
    total = 0.0
    for i in range(n):
        total += random.random()
        hint()
        tick()
    return total

def tick():
    if programs.left[0] == 0:
        raise Killed
    programs.left[0] -= 1

class Killed(BaseException):
    pass
"""


def test_one_of_several_calls_does_not_go_on_from_another_one(tmp_path: Path) -> None:
    module = module_of(tmp_path, "from tests.hints import programs\n" + SEVERAL)
    score = resumable(tmp_path / "run", math.inf)(module.score)
    programs.left[0] = 10
    random.seed(1)
    with pytest.raises(module.Killed):
        [score(4) for _ in range(3)]
    programs.left[0] = 10**9
    random.seed(1)
    with pytest.raises(RunMismatchError, match="the global random states at its begin"):
        score(4)
    random.seed(1)
    wanted = [module.score(4) for _ in range(3)]
    random.seed(1)
    before = [module.score(4) for _ in range(2)]
    assert [*before, score(4)] == wanted
