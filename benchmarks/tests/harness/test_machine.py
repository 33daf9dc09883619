"""What a result says of the code that was measured."""

import shutil
import subprocess
from pathlib import Path

import pytest

from cpsr.benchmarks.harness.measurement import describe_machine, machine_text, measured_code

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(directory: Path, *arguments: str) -> str:
    name = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(["git", "-C", str(directory), *name, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@needs_git
def test_code_is_named_by_its_commit_and_whether_files_differ(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    source = tmp_path / "source.py"
    source.write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert measured_code(tmp_path) == commit
    source.write_text("2")
    assert measured_code(tmp_path) == f"{commit}+"
    installed = tmp_path / "environment"
    installed.mkdir()
    assert measured_code(installed) is None


def test_without_a_checkout_no_commit_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured_code(tmp_path) is None
    monkeypatch.setenv("PATH", "")
    assert measured_code(tmp_path) is None


def test_a_machine_is_described_in_plain_data(tmp_path: Path) -> None:
    machine = describe_machine(tmp_path)
    assert machine["cores"] >= 1
    assert machine["device"] == {"kind": "cpu"}
    assert machine_text(machine).endswith(f"{machine['cores']} cores, device: cpu")
    assert machine["code"] is None or len(machine["code"].removesuffix("+")) == 40
