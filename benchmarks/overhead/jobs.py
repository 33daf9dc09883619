"""The demo's model in training: one process under `TorchAdapter`, or ranks of a DeepSpeed ZeRO-1 job."""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from cpsr.benchmarks.harness.ranks import join_ranks
from cpsr.benchmarks.overhead.blocks import NEVER_ITERATIONS, measure_pairs
from cpsr.demo.model import BATCH, GPT, GPTConfig, Windows, read_corpus, zero_engine
from cpsr.engines import adapt
from cpsr.engines.adapter import EngineAdapter
from cpsr.engines.torch import TorchAdapter
from cpsr.recovery import CPSRRecovery

__all__ = ["ALONE_BATCH", "main", "torch_job", "zero_job"]

ALONE_BATCH = 2  # of one process; a step of a few tens of milliseconds on two cores

Job = tuple[EngineAdapter, Iterable[Any], Callable[[Any], None]]
"""The engine, its batches, and what trains on one of them."""


def main(run_dir: Path, pairs: int, kind: str, alone: bool = False) -> list[dict[str, Any]] | None:
    """Measure blocks with CPSR and without on every rank; rank 0, which also keeps the journal, returns what it saw."""
    adapter, loader, step = torch_job(ALONE_BATCH, kind) if alone else zero_job(run_dir)
    config = {"run_dir": run_dir, "checkpoint": {"interval_iterations": NEVER_ITERATIONS}}
    with CPSRRecovery(adapter, config) as recovery:
        measured = measure_pairs(adapter, recovery, loader, step, pairs, kind)
    return [asdict(pair) for pair in measured] if adapter.rank == 0 else None


def torch_job(batch_windows: int, device: str = "cpu") -> Job:
    """One process of plain torch."""
    torch.manual_seed(0)
    model = GPT(GPTConfig()).to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch.to(device)).backward()
        optimizer.step()

    return TorchAdapter(model, optimizer), DataLoader(_windows(), batch_windows, drop_last=True), step


def zero_job(run_dir: Path) -> Job:
    """One rank of the demo's model under ZeRO-1."""
    join_ranks(run_dir)
    torch.manual_seed(0)
    model = GPT(GPTConfig())
    engine = zero_engine(model, torch.optim.AdamW(model.parameters()))
    windows = _windows()
    sampler: DistributedSampler[Any] = DistributedSampler(windows, seed=0)

    def step(batch: torch.Tensor) -> None:
        engine.backward(engine(batch.to(engine.device)))
        engine.step()

    return adapt(engine), DataLoader(windows, BATCH, sampler=sampler, drop_last=True), step


def _windows() -> Windows:
    text, _ = read_corpus()
    return Windows(text, GPTConfig().context)
