"""The device that tests train on is the one that is named, and no GPU unasked."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device import VARIABLE
from tests.rank_processes import become_rank, start_ranks

NAMES = ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES", "LOCAL_RANK")
PRINT = "import os, tests.device as d; print(d.DEVICE, *(os.environ[name] for name in {names}))"
START = "import sys, tests.test_device; tests.test_device.start(sys.argv[1])"
ON_CPU, ON_GPU = ["cpu", "cpu"], ["cuda", "cuda", "2"]


def child(named: str | None, visible: str, code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    variables = {name: value for name, value in os.environ.items() if name != VARIABLE}
    variables |= {"CUDA_VISIBLE_DEVICES": visible, "PYTHONPATH": os.pathsep.join(sys.path)}
    variables |= {} if named is None else {VARIABLE: named}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("named", "expected"), [(None, ON_CPU), ("cuda:0", ON_GPU)])
def test_processes_see_the_named_device_alone(named: str | None, expected: list[str]) -> None:
    assert child(named, "2,3", PRINT.format(names=NAMES[:2])).stdout.split() == expected


def test_another_device_is_refused() -> None:
    assert "tests run on cpu or cuda" in child("cuda:1", "", PRINT.format(names=())).stderr


def start(directory: str) -> None:
    """Start two ranks that note their environment, in a process whose environment names the device."""
    processes = start_ranks(note, Path(directory), 2)
    for process in processes:
        process.join()
    sys.exit(max(process.exitcode or 0 for process in processes))


def note(directory: Path, rank: int, ranks: int) -> None:
    become_rank(directory / f"{rank}.log", rank, ranks)
    (directory / f"{rank}.json").write_text(json.dumps([os.environ[name] for name in NAMES]))


def test_ranks_share_the_named_gpu(tmp_path: Path) -> None:
    """They are new processes, of which none asks for the GPU here."""
    ended = child("cuda", "2,3", START, str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [["cuda", "2", "0"]] * 2
