import json
import math
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore
from cpsr.cli import app
from cpsr.journal import CheckpointRow, EventRow, FailureRow, Journal, PlanRow, RecoveryRow, RehearsalRow
from cpsr.state import OperatorState, ParamSlice, Shard

FLUSH_SECONDS = 20.0


def cpsr(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cpsr", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that was killed at 92, recovered at once, and is training on."""
    for life in range(2):
        journal = Journal.open(tmp_path / "journal.db")
        journal.start_life("predict")
        if life == 0:
            journal.record_plan(PlanRow(life=0, from_iteration=0, interval_iterations=50, origin="fixed"))
            journal.record_checkpoint(
                CheckpointRow(life=0, iteration=50, status="committed", bytes=2048, stall_seconds=0.012)
            )
        else:
            journal.record_event(EventRow(life=1, rank=0, kind="failed", message="rank 1 was killed (SIGKILL)"))
            journal.record_event(EventRow(life=1, rank=0, kind="started", message="All ranks continue."))
            journal.record_failure(FailureRow(life=0, iteration=92, checkpoint_iteration=50, description="killed"))
            journal.record_recovery(
                RecoveryRow(
                    id="r",
                    life=1,
                    failure_iteration=92,
                    checkpoint_iteration=50,
                    restored_iteration=92,
                    method="line",
                    requested_mode="predict",
                    reason="gain 2.38",
                    guard={"loss": math.nan},
                )
            )
            journal.record_rehearsal(
                RehearsalRow(
                    id="d",
                    life=1,
                    iteration=95,
                    failure_iteration=90,
                    checkpoint_iteration=50,
                    outcome="measured",
                    lag_iterations=-7.0,
                    lag_standard_error_iterations=3.0,
                    cost_seconds=4.5,
                )
            )
            journal.record_checkpoint(CheckpointRow(life=1, iteration=100, status="failed", reason="disk full"))
        journal.close()
    return tmp_path


def test_help_names_every_command_and_is_fast() -> None:
    code, output, _ = cpsr("--help")
    assert code == 0
    assert all(command in output for command in ("demo", "serve", "status", "inspect", "verify", "bench"))
    loaded = "import sys, cpsr.cli; print(sorted({m.split('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, timeout=60, check=True)
    heavy = {"torch", "deepspeed", "fastapi", "uvicorn", "matplotlib", "scipy", "numpy"}
    assert not heavy & set(json.loads(done.stdout.replace("'", '"')))


def test_import_cpsr_and_its_journal_load_no_web_framework() -> None:
    code = "import sys, cpsr, cpsr.journal; print('fastapi' in sys.modules, 'deepspeed' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_inspect_shows_lives_checkpoints_and_recoveries(run_dir: Path) -> None:
    code, output, _ = cpsr("inspect", run_dir)
    assert code == 0
    rehearsed = ("measured", "-7 ± 3.0", "4.5")
    for words in ("killed", "running", "scratch", "2,048", "0.012", "disk full", "line", "kept", *rehearsed):
        assert words in output


def test_inspect_names_the_rank_that_failed_and_keeps_the_numbers_for_verbose(run_dir: Path) -> None:
    _, output, _ = cpsr("inspect", run_dir)
    words = " ".join(output.replace("│", " ").split())
    assert "rank 1 was killed" in words
    assert "Life 1: All ranks continue." in words
    assert "gain 2.38" not in words
    _, output, _ = cpsr("inspect", run_dir, "--verbose")
    assert "Life 1: gain 2.38" in output


def test_inspect_json_has_everything(run_dir: Path) -> None:
    code, output, _ = cpsr("inspect", run_dir, "--json")
    data = json.loads(output, parse_constant=pytest.fail)
    assert code == 0
    assert [life["life"] for life in data["lives"]] == [0, 1]
    assert [row["status"] for row in data["checkpoints"]] == ["committed", "failed"]
    assert (data["recoveries"][0]["method"], data["recoveries"][0]["guard"]) == ("line", {"loss": "nan"})
    assert data["failures"][0]["iteration"] == 92
    assert data["plans"][0]["interval_iterations"] == 50
    assert data["rehearsals"][0]["lag_iterations"] == -7.0


def test_inspect_says_which_checkpoints_it_left_out(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    journal.start_life("auto")
    for iteration in range(1, 31):
        journal.record_checkpoint(CheckpointRow(life=0, iteration=1000 + iteration, status="committed"))
    journal.close()
    output = cpsr("inspect", tmp_path)[1]
    assert "Newest 20 of 30 checkpoints" in output
    assert "1030" in output
    assert "1010" not in output
    assert "No recovery so far." in output


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


def committed_checkpoint(run_dir: Path) -> Path:
    """One real checkpoint of one small tensor; its weights file."""
    store = CheckpointStore(run_dir, 0, 1, "run", 1, fsync=False)
    store.prepare()
    weights = OperatorState("w", ParamSlice(torch.arange(100.0), (100,), 0), {"exp_avg": torch.zeros(100)}, 50)
    store.write(Snapshot(50, Shard({"w": weights}, {}), {"step": 50}))
    assert store.commit(50, 5.0, threading.Event()).committed
    (path,) = run_dir.rglob("*.params.safetensors")
    return path


def test_verify_passes_a_whole_run(tmp_path: Path) -> None:
    committed_checkpoint(tmp_path)
    code, output, errors = cpsr("verify", tmp_path)
    assert (code, errors) == (0, "")
    assert output.count("\n") == 1
    assert "whole" in output


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_verify_names_the_damaged_file_with_status_1(tmp_path: Path, damage: str) -> None:
    path = committed_checkpoint(tmp_path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data if damage == "flip" else data[:-1])
    if damage == "remove":
        path.unlink()
    code, output, _ = cpsr("verify", tmp_path)
    assert code == 1
    assert output.count("\n") == 1
    assert output.startswith(f"{path}: ")
    assert "(iteration 50)" in output
