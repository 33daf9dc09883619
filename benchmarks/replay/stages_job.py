"""One rank of a pipeline with windows, one process and one thread a stage."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cpsr import CPSRRecovery
from cpsr.benchmarks.harness.ranks import join_ranks
from cpsr.checkpoint.memory_states import memory_states
from cpsr.checkpoint.run_directory import run_id
from cpsr.engines.deepspeed_traffic import DeepSpeedTraffic
from cpsr.replay.upstream import SLOT

__all__ = ["WINDOW", "main"]

WINDOW = 4
BATCH = 16
_SEALED_SECONDS = 30.0

Logs = Literal["alone", "windows", "windows and logs"]


def main(
    run_dir: Path,
    stages: int,
    micro_batches: int,
    until: int,
    width: int = 512,
    layers: int = 6,
    logs: Logs = "windows and logs",
    killed: int | None = None,
    killed_at: int = 0,
    failed_at: int = 0,
) -> dict[str, Any]:
    """Train to an iteration, or until this rank kills itself.

    Args:
        run_dir: of the run.
        stages: of the pipeline, of one rank each.
        micro_batches: of an iteration.
        until: the last iteration.
        width: of the model.
        layers: of it, each twice as wide within.
        logs: what CPSR does: nothing, since it is not there; windows alone; or also logs of what stages send.
        killed: the rank that kills itself.
        killed_at: after this iteration, once all ranks have a window that a restart can use.
        failed_at: iteration of the failure before, until which iterations are repeated.
    """
    torch.set_num_threads(1)
    run_dir.mkdir(parents=True, exist_ok=True)
    join_ranks(run_dir)
    torch.manual_seed(5)
    engine = _engine(stages, micro_batches, width, layers)
    values = torch.randn(1024, width, generator=torch.Generator().manual_seed(6))
    loader = DataLoader(TensorDataset(values, values.roll(1, -1)), BATCH, shuffle=True, drop_last=True)
    if logs == "alone":
        return {"step_seconds": _alone(engine, loader, until), "log_bytes": 0}
    settings: dict[str, Any] = {"interval_iterations": 100_000, "final": False, "fsync": False}
    replay = {"enabled": True, "window_iterations": WINDOW}
    if logs == "windows":
        setattr(DeepSpeedTraffic, "obstacle", "left out here")  # noqa: B010 - mypy refuses it otherwise
    config = {"run_dir": str(run_dir), "mode": "exact", "learning": {"budget_fraction": 0.0}, "replay": replay}
    with CPSRRecovery(engine, config | {"checkpoint": settings}) as recovery:
        began_at, first, seconds, repeated = recovery.iteration, time.perf_counter(), list[float](), 0.0
        data = _endless(recovery, loader)
        while recovery.iteration < until:
            if recovery.iteration == killed_at and killed == engine.global_rank:
                _await_window(run_dir, killed_at)
                os.kill(os.getpid(), signal.SIGKILL)
            begun = time.perf_counter()
            engine.train_batch(data)
            seconds.append(time.perf_counter() - begun)
            if recovery.iteration == failed_at:
                repeated = time.perf_counter() - first
        logged = sum(path.stat().st_size for path in Path("/dev/shm").glob(f"cpsr-{run_id(run_dir)}-*-{SLOT}*"))  # noqa: S108 - it is shared memory that is measured
        weights = [one.parameter.values for one in recovery.life.job.adapter.shard().operators.values()]
        digest = [float(one.double().sum()) for one in weights]
    found = {"began_at": began_at, "step_seconds": seconds, "repeated_seconds": repeated}
    return found | {"weights": digest, "log_bytes": logged, "parameters": sum(one.numel() for one in weights)}


def _engine(stages: int, micro_batches: int, width: int, layers: int) -> Any:
    parts = [
        LayerSpec(
            nn.Sequential, nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        for _ in range(layers)
    ]
    module = PipelineModule(parts, stages, loss_fn=nn.MSELoss(), partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    return engine


def _alone(engine: Any, loader: Any, until: int) -> list[float]:
    data, seconds = (batch for _ in range(until) for batch in loader), list[float]()
    while len(seconds) < until:
        begun = time.perf_counter()
        engine.train_batch(data)
        seconds.append(time.perf_counter() - begun)
    return seconds


def _endless(recovery: CPSRRecovery, loader: Any) -> Iterator[Any]:
    yield from recovery.resume(loader, repeat=True)


def _await_window(run_dir: Path, killed_at: int) -> None:
    """Wait until each rank has sealed the newest window that was complete by then."""
    deadline, ranks = time.monotonic() + _SEALED_SECONDS, torch.distributed.get_world_size()
    while time.monotonic() < deadline:
        windows = [one for one in memory_states(run_id(run_dir)) if one.kind == "window"]
        newest = [one for one in windows if killed_at - WINDOW < one.newest_iteration <= killed_at]
        if len({one.rank for one in newest}) == ranks:
            return
        time.sleep(0.005)
