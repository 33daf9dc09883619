"""The device that tests train on is the one that is named, and no GPU unasked."""

import os
import subprocess
import sys

import pytest

from tests.device import VARIABLE

PRINT = (
    "import os, tests.device as d; print(d.DEVICE, os.environ['DS_ACCELERATOR'], os.environ['CUDA_VISIBLE_DEVICES'])"
)


def child(named: str | None, visible: str) -> "subprocess.CompletedProcess[str]":
    variables = {name: value for name, value in os.environ.items() if name != VARIABLE}
    variables |= {"CUDA_VISIBLE_DEVICES": visible, "PYTHONPATH": os.pathsep.join(sys.path)}
    variables |= {} if named is None else {VARIABLE: named}
    return subprocess.run([sys.executable, "-c", PRINT], env=variables, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (None, ["cpu", "cpu"]),
        ("cpu", ["cpu", "cpu"]),
        ("cuda", ["cuda", "cuda", "2"]),
        ("cuda:0", ["cuda", "cuda", "2"]),
    ],
)
def test_processes_see_the_named_device_alone(named: str | None, expected: list[str]) -> None:
    assert child(named, "2,3").stdout.split() == expected


def test_another_device_is_refused() -> None:
    assert "tests run on cpu or cuda" in child("cuda:1", "").stderr
