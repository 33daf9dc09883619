"""The `cpsr` command itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import cpsr

WITHOUT = "import sys; sys.modules[{!r}] = None"
SIMULATION = """
iteration_seconds: 3.0
checkpoint: {stall_seconds: 4, persist_seconds: 60}
failures: {mtbf_hours: 3, restart_seconds: 120, process: poisson}
wall_days: 1
policies: [young]
"""


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cpsr", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_help_names_every_command_and_is_fast() -> None:
    code, output, _ = cpsr("--help")
    assert code == 0
    assert all(command in output for command in ("demo", "serve", "status", "inspect", "verify", "bench"))
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


@pytest.mark.parametrize(
    ("module", "extra", "arguments"),
    [
        ("matplotlib", "plots", ["demo"]),
        ("matplotlib", "plots", ["bench", "plan"]),
        ("matplotlib", "plots", ["simulate", "--spec", "SPEC", "--json", "out.json"]),
        ("torchdata", "bench", ["bench", "loader"]),
    ],
)
def test_what_needs_an_extra_names_it_before_it_does_anything(
    tmp_path: Path, module: str, extra: str, arguments: list[str]
) -> None:
    spec = tmp_path / "simulation.yaml"
    spec.write_text(SIMULATION)
    given = [str(spec) if one == "SPEC" else one for one in arguments]
    code = f"{WITHOUT.format(module)}; sys.argv = ['cpsr', *{given!r}]; from cpsr.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"cpsr: this command needs {module}")
    assert f"pip install 'cpsr[{extra}]'" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [spec.name]


def test_a_simulation_without_a_plot_needs_no_extra(tmp_path: Path) -> None:
    spec = tmp_path / "simulation.yaml"
    spec.write_text(SIMULATION)
    given = ["simulate", "--spec", str(spec)]
    code = f"{WITHOUT.format('matplotlib')}; sys.argv = ['cpsr', *{given!r}]; from cpsr.cli.main import main; main()"
    subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=True)
