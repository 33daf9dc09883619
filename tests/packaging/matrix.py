"""Run the conformance suite against the built wheel under each Python and torch: `make matrix` calls this as a module.

One cell after the other: a fresh environment, what pip finds for the wheel today, the tests, and a row of
docs/versions.md on the standard output. A cell's log stays in the folder of `--logs`.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

from tests.packaging.distributions import ROOT, build, copy_tests, tracked

PYTHONS = ["python3.11", "python3.12", "python3.13"]
TORCHES = ["2.6.0", "2.9.1", "2.11.0", "2.13.0"]
TESTS = [
    "tests/engines/test_conformance.py",
    "tests/engines/test_torch.py",
    "tests/engines/test_optimizer_state.py",
    "tests/recovery/test_kill.py",
]
TOOLS = ["pytest", "pytest-timeout", "hypothesis", "setuptools", "wheel"]  # DeepSpeed's kernels build with setuptools
SHOWN = ["torch", "deepspeed", "numpy", "scipy"]
HEADER = ["python", *SHOWN, "tests", "seconds"]
JOB_TIMEOUT_SECONDS = 1800


def run_cell(python: str, torch: str, wheel: Path, log: Path) -> tuple[list[str], bool]:
    """The row of one cell, and whether its tests passed."""
    with tempfile.TemporaryDirectory(prefix="cpsr-cell-") as folder:
        work = Path(folder)
        subprocess.run([python, "-m", "venv", str(work / "environment")], check=True)
        inside = str(work / "environment/bin/python")
        pip = [inside, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-cache-dir"]
        with log.open("w") as output:
            installed = subprocess.run(
                [*pip, f"torch=={torch}", str(wheel), *TOOLS], stdout=output, stderr=subprocess.STDOUT, check=False
            )
        version = subprocess.check_output([inside, "--version"], text=True).split()[1]
        if installed.returncode != 0:
            return [version, torch, "-", "-", "-", "not installed", "-"], False
        copy_tests(work / "elsewhere", [*tracked("tests"), *tracked("docs")])
        found = versions(inside)
        started = time.monotonic()
        with log.open("a") as output:
            ended = subprocess.run(
                [inside, "-m", "pytest", *TESTS, "-m", "not slow"],
                cwd=work / "elsewhere",
                env=environment(work),
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
                timeout=JOB_TIMEOUT_SECONDS,
            )
        seconds = time.monotonic() - started
        counts = re.findall(r"\d+ (?:passed|failed|skipped|errors?)\b", log.read_text().rsplit("\n", 2)[-2])
        row = [version, *(found[name] for name in SHOWN), ", ".join(counts) or "no result", f"{seconds:.0f}"]
        return row, ended.returncode == 0


def versions(python: str) -> dict[str, str]:
    """Of the packages that a row shows, as installed for this interpreter."""
    code = f"import json, importlib.metadata as m; print(json.dumps({{name: m.version(name) for name in {SHOWN}}}))"
    return dict(json.loads(subprocess.check_output([python, "-c", code], text=True)))


def environment(work: Path) -> dict[str, str]:
    """As a user's shell, with kernels built for this cell's torch alone, and one thread a rank."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST_"))}
    binaries = f"{work / 'environment/bin'}{os.pathsep}{os.environ['PATH']}"
    return kept | {"TORCH_EXTENSIONS_DIR": str(work / "kernels"), "OMP_NUM_THREADS": "1", "PATH": binaries}


def show(*lines: str) -> None:
    """A line is there once it is known: a matrix takes an hour."""
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


def main() -> int:
    """Exit status: 1 if a cell failed, or an interpreter is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", nargs="+", default=PYTHONS, help="interpreters, by name or path")
    parser.add_argument("--torch", nargs="+", default=TORCHES, help="versions of torch")
    parser.add_argument("--logs", type=Path, default=Path("runs/matrix"), help="folder of the cells' logs")
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    show(f"{datetime.now(UTC):%Y-%m-%d}\n", f"| {' | '.join(HEADER)} |", f"|{'---|' * len(HEADER)}")
    failed = False
    with tempfile.TemporaryDirectory(prefix="cpsr-wheel-") as folder:
        (wheel,) = build(ROOT, Path(folder), "--wheel")
        for torch, python in product(options.torch, options.python):
            row, passed = [python, torch, "-", "-", "-", "no such interpreter", "-"], False
            if shutil.which(python):
                row, passed = run_cell(python, torch, wheel, options.logs / f"{Path(python).name}-torch{torch}.log")
            show(f"| {' | '.join(row)} |")
            failed = failed or not passed
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
