"""Loops that compile their model, their step or their optimizer; and steps that nobody calls."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from cpsr import CPSRRecovery, TorchAdapter
from cpsr.errors import UnsupportedEngineError
from tests.situations.lives import Life, alone_and_cut, backward, digest

STEPS = 12
ROWS = torch.arange(160.0)[:, None].expand(160, 8) / 160


def compiled_loop(life: Life) -> str:
    """The next batch is drawn while the device computes: a restart has to know by the forwards which one that is."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    called: Any = model
    step: Any = optimizer.step
    what = life.options["what"]
    if what == "in place":
        model.compile(backend="eager")
    elif what == "optimizer":
        step = torch.compile(optimizer.step, backend="eager")
    elif what != "step":
        called = torch.compile(model, backend="eager", fullgraph=what == "in one graph")

    def forward(batch: torch.Tensor) -> Any:
        return (called(batch) - batch).square().mean()

    def update(loss: Any) -> None:
        backward(loss)
        step()
        optimizer.zero_grad()

    parts: list[Any] = [forward, update]
    if what == "step":
        parts = [torch.compile(one, backend="eager") for one in parts]
    if life.options["warm"]:  # compiled before CPSR is there to see it
        backward(parts[0](ROWS[:8]))
        optimizer.zero_grad()
    adapted = called if what == "in one graph" else model
    loader = DataLoader(TensorDataset(ROWS), batch_size=8, shuffle=True)
    with CPSRRecovery(TorchAdapter(adapted, optimizer), life.config()) as recovery:
        batches = recovery.resume(loader, repeat=True)
        (batch,) = next(batches)
        while recovery.iteration < STEPS:
            loss = parts[0](batch)
            (batch,) = next(batches)
            parts[1](loss)
            life.step(recovery.iteration)
    return digest(model)


@pytest.mark.parametrize(
    ("what", "warm"),
    [("module", True), ("in one graph", True), ("in place", False), ("step", True), ("optimizer", False)],
)
def test_a_compiled_loop_continues_bit_for_bit(what: str, warm: bool, tmp_path: Path) -> None:
    alone, cut = alone_and_cut(compiled_loop, tmp_path, at=7, what=what, warm=warm)
    assert cut.result == alone.result


def adapted(model: torch.nn.Module, batches: int) -> TorchAdapter:
    return TorchAdapter(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batches_per_iteration=batches)


def test_a_loop_whose_weights_move_without_a_step_is_refused(tmp_path: Path) -> None:
    """As where the replay of a CUDA graph steps the optimizer."""
    model = torch.nn.Linear(8, 8)
    taken: list[Any] = []

    def train() -> None:
        with CPSRRecovery(adapted(model, 2), config(tmp_path)) as recovery:
            for (batch,) in recovery.resume(DataLoader(TensorDataset(ROWS), batch_size=8), repeat=True):
                taken.append(batch)
                with torch.no_grad():
                    model.weight.sub_(0.01)

    refused = re.escape("weights changed while the loop took 400 batches, and SGD.step() was called")
    with pytest.raises(UnsupportedEngineError, match=refused):
        train()
    assert len(taken) == 400


def test_a_loop_that_takes_many_batches_before_it_trains_is_not(tmp_path: Path) -> None:
    """As to fill a buffer of replays, or to accumulate over more batches than the adapter was told."""
    model = torch.nn.Linear(8, 8)
    adapter = adapted(model, 1)
    with CPSRRecovery(adapter, config(tmp_path)) as recovery:
        for taken, (batch,) in enumerate(recovery.resume(DataLoader(TensorDataset(ROWS), batch_size=8), repeat=True)):
            backward(model(batch).square().mean())
            if taken >= 350:
                adapter.optimizer.step()
                adapter.optimizer.zero_grad()
            if recovery.iteration == 4:
                break
    assert adapter.iteration == 4


def config(directory: Path) -> dict[str, Any]:
    return {"run_dir": str(directory), "mode": "exact", "checkpoint": {"interval_iterations": 4}}
