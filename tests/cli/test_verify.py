"""`cpsr verify`."""

import threading
from pathlib import Path

import pytest
import torch

from cpsr.benchmarks.harness.checkpoint_files import weights_file
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore
from cpsr.state.shard import OperatorState, ParamSlice, Shard
from tests.cli.commands import cpsr


def committed_checkpoint(run_dir: Path) -> Path:
    """One real checkpoint of one small tensor; its weights file."""
    store = CheckpointStore(run_dir, 0, 1, "run", 1)
    store.prepare()
    weights = OperatorState("w", ParamSlice(torch.arange(100.0), (100,), 0), {"exp_avg": torch.zeros(100)}, 50)
    store.write(Snapshot(50, Shard({"w": weights}, {}), {"step": 50}))
    assert store.commit(50, 5.0, threading.Event()).committed
    return weights_file(store.catalogue()[0].directory)


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
