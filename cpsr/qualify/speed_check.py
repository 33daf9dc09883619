"""What CPSR costs here: the stall of a snapshot beside a copy of the same bytes, and steps with it beside without."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from cpsr.journal import JournalReader
from cpsr.qualify.cells import Cell
from cpsr.qualify.scene import Scene
from cpsr.qualify.torch_cases import TorchJob, optimizer_of
from cpsr.recovery import CPSRRecovery

__all__ = ["check_speed", "copy_out"]

WIDTH, LAYERS, ITEMS = 768, 4, 64  # 2.4 million parameters
INTERVAL = 20  # iterations, of which one begins a checkpoint
TURNS = 7  # the first is not counted


class _Wide(nn.Module):
    """Returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs.to(next(self.parameters()).dtype)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return functional.mse_loss(hidden.float(), torch.zeros_like(inputs))


def check_speed(cell: Cell, scene: Scene) -> Mapping[str, Any]:
    """Measure in turns; nothing is required of the figures.

    Returns:
        `stall_ratio`: stall of a snapshot over a copy of the same bytes to the host, pinned on CUDA; `step_ratio`: time
        of the steps between two checkpoints with CPSR over that without. Each a median with the smallest and largest.
    """
    torch.manual_seed(1)
    inputs = torch.randn(ITEMS, WIDTH, device=scene.device)
    (_, plain), (recoverable, watched) = _trained(cell, scene, inputs), _trained(cell, scene, inputs)
    config = {
        "run_dir": str(scene.folder / "run"),
        "mode": "auto",  # in mode `exact` the steps without CPSR, by another optimizer, would end the run
        "checkpoint": {"interval_iterations": INTERVAL},
    }
    with CPSRRecovery(recoverable, config) as recovery:
        batches = recovery.resume([0], repeat=True)
        shard = [tensor for _, tensor in recovery.life.job.adapter.shard().tensors()]
        hosts = [torch.empty(one.shape, dtype=one.dtype, pin_memory=one.is_cuda) for one in shard]

        def with_cpsr() -> float:
            seconds = _timed(scene, lambda: [watched() for _ in range(INTERVAL) if next(batches) == 0])
            recovery.life.saver.drain(60.0)  # the steps without CPSR share no core with its writes
            return seconds

        def without() -> float:
            return _timed(scene, lambda: [plain() for _ in range(INTERVAL)])

        def copy() -> float:
            return _timed(scene, lambda: copy_out(shard, hosts))

        turns = [_turn(with_cpsr, without, copy, turn) for turn in range(TURNS)][1:]
    copy_seconds = statistics.median(copied for _, copied in turns)
    return {
        "copied_bytes": sum(one.nbytes for one in shard),
        "copy_seconds": copy_seconds,
        "stall_ratio": _spread([stall / copy_seconds for stall in _stalls(scene.folder / "run")]),
        "step_ratio": _spread([ratio for ratio, _ in turns]),
    }


def copy_out(shard: Sequence[torch.Tensor], hosts: Sequence[torch.Tensor]) -> None:
    """Copy tensors to the host as fast as the device can: into pinned memory nothing waits before the last."""
    for host, one in zip(hosts, shard, strict=True):
        host.copy_(one, non_blocking=True)


def _turn(
    with_cpsr: Callable[[], float], without: Callable[[], float], copy: Callable[[], float], turn: int
) -> tuple[float, float]:
    """Ratio of the steps' times, and seconds of the copy; which of the steps are first changes by turns."""
    measured = {act: act() for act in ((with_cpsr, without) if turn % 2 else (without, with_cpsr))}
    return measured[with_cpsr] / measured[without], copy()


def _stalls(run_dir: Path) -> list[float]:
    """Seconds of each committed checkpoint but the first, from the journal."""
    with JournalReader(run_dir / "journal.db") as journal:
        rows = [row for row in journal.checkpoints() if row.status == "committed"]
    stalls = [row.stall_seconds for row in rows if row.stall_seconds is not None]
    assert len(stalls) >= TURNS // 2, f"only {len(stalls)} checkpoints were committed"
    return stalls[1:]


def _trained(cell: Cell, scene: Scene, inputs: torch.Tensor) -> tuple[Any, Callable[[], None]]:
    """What `CPSRRecovery` takes, and a step."""
    module = _Wide()
    if cell.zero is None:
        module = module.to(scene.device)
        called = nn.parallel.DistributedDataParallel(module) if scene.ranks > 1 else module
        job = TorchJob(module, optimizer_of(cell.optimizer, module), called=called)

        def torch_step() -> None:
            job.train_on([(inputs,)])

        return job.adapter, torch_step
    from cpsr.qualify.deepspeed_jobs import configuration, initialize

    config = configuration(cell.zero, cell.precision, 1, steps_per_print=10**9)
    engine = initialize(module, config, cell.optimizer, schedule="none")

    def step() -> None:
        engine.backward(engine(inputs))
        engine.step()

    return engine, step


def _timed(scene: Scene, act: Callable[[], object]) -> float:
    """Seconds that it takes, until the device is done."""
    started = time.perf_counter()
    act()
    if scene.device.type == "cuda":
        torch.cuda.synchronize(scene.device)
    return time.perf_counter() - started


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
