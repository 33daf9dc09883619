"""One rank of a ZeRO-1 job that trains blocks with snapshots to host memory and without, started by the harness."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from cpsr.benchmarks.overhead.blocks import BLOCK_STEPS, NEVER_ITERATIONS, SETTLE_STEPS, WARM_UP_STEPS, Pair
from cpsr.benchmarks.overhead.deepspeed_job import BATCH, zero_engine
from cpsr.demo.model import GPT, GPTConfig, Windows, read_corpus
from cpsr.engines import adapt
from cpsr.engines.adapter import EngineAdapter
from cpsr.engines.torch import TorchAdapter
from cpsr.recovery import CPSRRecovery

__all__ = ["main"]

_Step = Callable[[Any], None]  # trains on one batch


def main(run_dir: Path, pairs: int, interval_iterations: int, alone: bool) -> dict[str, Any] | None:
    """Measure on every rank; rank 0 returns what it saw.

    Args:
        run_dir: of the job.
        pairs: of blocks, an even number.
        interval_iterations: between snapshots.
        alone: one process of plain torch instead.
    """
    adapter, loader, step = _torch_job() if alone else _zero_job(run_dir)
    checkpoint = {"interval_iterations": NEVER_ITERATIONS, "final": False}
    with CPSRRecovery(adapter, {"run_dir": run_dir, "mode": "exact", "checkpoint": checkpoint}) as recovery:
        batches = recovery.resume(loader, repeat=True)
        for _ in range(WARM_UP_STEPS):
            step(next(batches))
        saver = recovery.life.saver
        plan = saver.plan

        def block(interval: int | None) -> float:
            saver.plan = replace(plan, memory_interval_iterations=interval)
            return _seconds(batches, step)

        measured = []
        for index in range(pairs):
            order = (interval_iterations, None) if index % 2 == 0 else (None, interval_iterations)
            seconds = {interval: block(interval) for interval in order}
            measured.append(Pair(seconds[interval_iterations], seconds[None]))
        found = {
            "pairs": [asdict(pair) for pair in measured],
            "state_bytes": adapter.shard().state_bytes,
            "stall_seconds": statistics.median(saver.memory.stalls_seconds),
            "skipped": saver.memory.skipped,
        }
    return found if adapter.rank == 0 else None


def _torch_job() -> tuple[EngineAdapter, Iterable[Any], _Step]:
    torch.manual_seed(0)
    model = GPT(GPTConfig())
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()

    return TorchAdapter(model, optimizer), DataLoader(_windows(), batch_size=BATCH, drop_last=True), step


def _zero_job(run_dir: Path) -> tuple[EngineAdapter, Iterable[Any], _Step]:
    engine, windows = zero_engine(run_dir), _windows()
    sampler: DistributedSampler[Any] = DistributedSampler(windows, seed=0)

    def step(batch: torch.Tensor) -> None:
        engine.backward(engine(batch))
        engine.step()

    return adapt(engine), DataLoader(windows, batch_size=BATCH, sampler=sampler, drop_last=True), step


def _windows() -> Windows:
    text, _ = read_corpus()
    return Windows(text, GPTConfig().context)


def _seconds(batches: Iterator[Any], step: _Step) -> float:
    for _ in range(SETTLE_STEPS):
        step(next(batches))
    started = time.perf_counter()
    for _ in range(BLOCK_STEPS):
        step(next(batches))
    return time.perf_counter() - started
