"""What is allotted to the predictor when a life begins, in a real life on one rank."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cpsr.checkpoint.catalogue import scan
from cpsr.config import CPSRConfig
from cpsr.coordinator.memory import allot_memory, history_checkpoints
from cpsr.engines.torch import TorchAdapter
from cpsr.errors import ResourceError
from cpsr.group import Group
from cpsr.journal import JournalReader
from cpsr.predictor.vitp import VITPPredictor
from cpsr.recovery import CPSRRecovery


def life(run_dir: Path, **predictor: Any) -> CPSRRecovery:
    model = nn.Linear(3, 2)
    adapter = TorchAdapter(model, torch.optim.AdamW(model.parameters()))
    return CPSRRecovery(adapter, {"run_dir": run_dir, "predictor": predictor, "checkpoint": {"fsync": False}})


def test_a_life_says_what_the_predictor_may_take(tmp_path: Path) -> None:
    with life(tmp_path):
        pass
    with JournalReader(tmp_path / "journal.db") as journal:
        (said,) = [event.message for event in journal.events() if event.kind == "predictor memory"]
    assert "(200 MB allowed) and nothing on the device: 2 operators" in said


def test_a_limit_that_does_not_suffice_is_refused_by_name_before_anything_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    with (
        pytest.raises(ResourceError, match=r"predictor.memory_limit_bytes on rank 0: .* 1000 are allowed"),
        life(tmp_path, memory_limit_bytes=1000),
    ):
        pass
    assert scan(tmp_path / "checkpoints").checkpoints == []


def test_checkpoints_of_a_shorter_interval_that_are_on_the_disk_count_too(tmp_path: Path) -> None:
    config = CPSRConfig(run_dir=tmp_path)
    said: list[str] = []
    for on_disk in (0, 500):
        allot_memory(VITPPredictor(), 7, on_disk, config, Group(), lambda _, message: said.append(message))
    assert f"up to {history_checkpoints(config)} checkpoints" in said[0]
    assert "up to 502 checkpoints" in said[1]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"interval_iterations": 20, "history_span_iterations": 400}, (400 + 60) // 20 + 1 + 2),
        ({"history_span_iterations": 400}, (400 + 60) // 10 + 1 + 2),  # the planner's shortest interval
        ({"interval_iterations": 500, "history_min_checkpoints": 6}, 6 + 2),
        ({"interval_iterations": 500, "full_checkpoints": 9}, 9 + 2),
    ],
)
def test_how_long_a_history_becomes(tmp_path: Path, settings: dict[str, Any], expected: int) -> None:
    assert history_checkpoints(CPSRConfig.load({"run_dir": tmp_path, "checkpoint": settings})) == expected
