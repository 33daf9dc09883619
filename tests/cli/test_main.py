"""The `cpsr` command itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import cpsr

COMMANDS = {
    *("run", "rehearse", "demo", "serve", "status", "inspect", "verify", "export", "plan", "doctor", "explain"),
    *("qualify", "release", "bench"),
}


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cpsr", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_help_names_every_command_and_is_fast() -> None:
    code, output, _ = cpsr("--help")
    assert code == 0
    commands = {line.split()[1] for line in output.splitlines() if line.startswith("│ ") and line[2] not in " -"}
    assert commands - {"simulate"} == COMMANDS
    loaded = "import sys, cpsr.cli.main; print(sorted({m.split('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, timeout=60, check=True)
    heavy = {"torch", "deepspeed", "fastapi", "uvicorn", "matplotlib", "scipy", "numpy"}
    assert not heavy & set(json.loads(done.stdout.replace("'", '"')))


def test_import_cpsr_and_its_journal_load_no_web_framework() -> None:
    code = "import sys, cpsr, cpsr.journal; print('fastapi' in sys.modules, 'deepspeed' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_no_run_directory_is_one_line_and_status_2(tmp_path: Path, command: str) -> None:
    for arguments in ((command, str(tmp_path)), (command, str(tmp_path / "absent"))):
        done = process(*arguments)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith("cpsr: ")
        assert done.stderr.count("\n") == 1
        assert str(tmp_path) in done.stderr


def test_serve_refuses_other_hosts_and_taken_ports(tmp_path: Path) -> None:
    code, _, errors = cpsr("serve", "--run-dir", tmp_path, "--host", "0.0.0.0")
    assert code == 2
    assert "--token-file" in errors
    assert errors.count("\n") == 1


def test_a_missing_option_is_a_usage_error() -> None:
    code, _, errors = cpsr("serve")
    assert code == 2
    assert "--run-dir" in errors


def test_what_needs_an_extra_names_it_before_it_does_anything(tmp_path: Path) -> None:
    code = "import sys; sys.modules['matplotlib'] = None; sys.argv = ['cpsr', 'demo']; "
    command = [sys.executable, "-c", code + "from cpsr.cli.main import main; main()"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("cpsr: this command needs matplotlib")
    assert "pip install 'cpsr[plots]'" in done.stderr
    assert list(tmp_path.iterdir()) == []
