"""Starts `cpsr qualify` as a user does."""

import os
import subprocess
import sys
from pathlib import Path

from tests.device import DEVICE

END_SECONDS = 400.0  # for what takes ten; the machine may be busy


def command(workdir: Path, only: str) -> list[str]:
    return ["-m", "cpsr", "qualify", f"--device={DEVICE}", f"--only={only}", f"--workdir={workdir}"]


def start(arguments: list[str], log: Path) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "200"}
    with log.open("wb") as file:
        return subprocess.Popen([sys.executable, *arguments], stdout=file, stderr=file, env=environment)
