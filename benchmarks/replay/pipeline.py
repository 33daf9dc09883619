"""What windows and the logs of stages cost the steps of a pipeline: one rank of two stages, with and without them."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

from cpsr import CPSRRecovery
from cpsr.benchmarks.harness.ranks import RANKS, join_ranks
from cpsr.checkpoint.memory_owners import remove_memory_states
from cpsr.checkpoint.run_directory import run_id

__all__ = ["ALONE", "LOGGED", "WINDOWS", "main"]

ALONE, WINDOWS, LOGGED = "without CPSR", "windows, no logs", "windows and logs"
WIDTH, BLOCKS, MICRO_BATCHES, BATCH, TOKENS, WINDOW = 128, 2, 4, 16, 128, 4
TURNS = 2  # of steps with logs and without, in a life
SETTLING = 2 * WINDOW  # steps of a life that are not counted: its first is measured, and its files are new


class _Block(nn.Module):
    """Dropout draws random numbers in every micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.inner(hidden)
        return hidden + added


def main(run_dir: Path, rounds: int, steps: int) -> dict[str, list[list[float]]]:
    """Seconds of each step, by variant and round: alone, then in a new run with windows, with logs and without."""
    torch.set_num_threads(1)
    join_ranks(run_dir)
    torch.manual_seed(5)
    engine, found = _engine(), dict[str, list[list[float]]]({ALONE: [], WINDOWS: [], LOGGED: []})
    _seconds(engine, steps)
    for number in range(rounds):
        own = run_dir.with_name(f"run-{number}")
        found[ALONE].append(_seconds(engine, steps))
        config = {
            "run_dir": str(own),
            "mode": "exact",
            "checkpoint": {"interval_iterations": 100_000},
            "learning": {"budget_fraction": 0.0},
            "replay": {"enabled": True, "window_iterations": WINDOW},
        }
        with CPSRRecovery(engine, config) as recovery:
            pipeline = recovery.life.job.adapter.pipeline
            assert pipeline is not None
            traffic, log = pipeline.traffic, pipeline.traffic.log
            _seconds(engine, SETTLING)
            found[WINDOWS].append([])
            found[LOGGED].append([])
            for name in (WINDOWS, LOGGED, LOGGED, WINDOWS) * TURNS:  # the machine's pace changes from minute to minute
                traffic.log = log if name == LOGGED else None
                found[name][-1] += _seconds(engine, max(1, steps // (2 * TURNS)))
            traffic.log = log
        torch.distributed.barrier()
        if engine.global_rank == 0:
            remove_memory_states(run_id(own))
    return found


def _engine() -> Any:
    layers = [LayerSpec(_Block) for _ in range(BLOCKS)]
    module = PipelineModule(layers, RANKS, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "zero_optimization": {"stage": 0},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    return engine


def _batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    batch = torch.randn(BATCH, TOKENS, WIDTH)
    while True:
        yield batch, batch


def _seconds(engine: Any, steps: int) -> list[float]:
    batches, seconds = _batches(), list[float]()
    for _ in range(steps):
        begun = time.perf_counter()
        engine.train_batch(batches)
        seconds.append(time.perf_counter() - begun)
    return seconds
