"""What CPSR costs here: the stall of a snapshot beside a copy of the same bytes, and steps with it beside without."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from cpsr.journal import JournalReader
from cpsr.qualify.cells import Cell
from cpsr.qualify.scene import Scene
from cpsr.qualify.torch_cases import TorchJob, optimizer_of
from cpsr.recovery import CPSRRecovery

__all__ = ["check_speed"]

WIDTH, LAYERS, ITEMS = 768, 4, 16  # 2.4 million parameters
INTERVAL = 6  # iterations, of which one begins a checkpoint
TURNS = 4  # the first is not counted


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
        "mode": "exact",
        "checkpoint": {"interval_iterations": INTERVAL, "final": False},
    }
    ratios, copies = [], []
    with CPSRRecovery(recoverable, config) as recovery:
        batches = recovery.resume([0], repeat=True)
        shard = [tensor for _, tensor in recovery.life.job.adapter.shard().tensors()]
        hosts = [torch.empty(one.shape, dtype=one.dtype, pin_memory=one.is_cuda) for one in shard]
        for turn in range(TURNS):
            with_cpsr = _timed(scene, lambda: [watched() for _ in range(INTERVAL) if next(batches) == 0])
            recovery.life.saver.drain(60.0)  # the next turn's checkpoint is not skipped
            without = _timed(scene, lambda: [plain() for _ in range(INTERVAL)])
            copies.append(_timed(scene, lambda: [host.copy_(one) for host, one in zip(hosts, shard, strict=True)]))
            if turn:
                ratios.append(with_cpsr / without)
    with JournalReader(scene.folder / "run" / "journal.db") as journal:
        rows = [row for row in journal.checkpoints() if row.status == "committed" and row.stall_seconds is not None]
    assert len(rows) >= TURNS // 2, f"only {len(rows)} checkpoints were committed"
    stalls = [row.stall_seconds for row in rows[1:] if row.stall_seconds is not None]
    copy_seconds = statistics.median(copies[1:])
    return {
        "copied_bytes": sum(one.nbytes for one in shard),
        "copy_seconds": copy_seconds,
        "stall_ratio": _spread([stall / copy_seconds for stall in stalls]),
        "step_ratio": _spread(ratios),
    }


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
