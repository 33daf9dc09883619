"""The image's recipe: nobody there is root, signals reach the launcher, and the build sees what it copies."""

import json
import os
import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.launch.jobs import BIN

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "examples" / "docker" / "Dockerfile"
IGNORED = DOCKERFILE.with_name("Dockerfile.dockerignore")
STEPS = [
    (word, rest.strip())
    for word, _, rest in (
        line.partition(" ")
        for line in re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ").splitlines()
        if line
    )
]


def steps(word: str) -> list[str]:
    return [rest for one, rest in STEPS if one == word]


def in_context(name: str) -> bool:
    """Whether a file reaches the build: the last rule that fits it, or a folder above it, decides."""
    found = True
    for rule in IGNORED.read_text().splitlines():
        pattern = rule.removeprefix("!")
        parts = [name, *map(str, Path(name).parents)]
        if rule and not rule.startswith("#") and any(fnmatch(part, pattern) for part in parts):
            found = rule.startswith("!")
    return found


def test_what_runs_is_not_root_and_gets_signals() -> None:
    (user,) = steps("USER")
    assert user == "1000:1000"
    assert STEPS.index(("USER", user)) > max(i for i, (word, _) in enumerate(STEPS) if word in ("RUN", "COPY"))
    (entrypoint,) = steps("ENTRYPOINT")
    assert json.loads(entrypoint) == ["tini", "--", "cpsr"]  # in this form without a shell, which would keep signals


def test_the_context_holds_what_the_wheel_is_built_of() -> None:
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("the source tree is elsewhere")
    needed = [ROOT / "pyproject.toml", ROOT / "README.md"]
    for room in ("cpsr", "predictor", "fitter", "service", "benchmarks"):
        files = [path for path in (ROOT / room).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        needed += [path for path in files if not path.is_relative_to(ROOT / "benchmarks" / "results")]
    assert len(needed) > 300
    assert [str(path.relative_to(ROOT)) for path in needed if not in_context(str(path.relative_to(ROOT)))] == []
    assert not any(in_context(name) for name in (".git/config", ".venv/bin/python", "runs/x", "tests/conftest.py"))


def test_hadolint_finds_nothing() -> None:
    linter = shutil.which("hadolint", path=f"{BIN}{os.pathsep}{os.environ['PATH']}")
    if linter is None:
        pytest.skip("hadolint is not installed: pip install -e '.[dev]'")
    found = subprocess.run([linter, "--no-color", DOCKERFILE], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
