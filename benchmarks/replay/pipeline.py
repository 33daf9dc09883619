"""What windows and the logs of stages cost the steps of a pipeline: one rank of two stages, with and without them."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

from cpsr import CPSRRecovery
from cpsr.benchmarks.harness.ranks import RANKS, join_ranks
from cpsr.benchmarks.replay.in_turn import ALONE, in_turn
from cpsr.checkpoint.memory_owners import remove_memory_states
from cpsr.checkpoint.run_directory import run_id

__all__ = ["LOGGED", "WINDOWS", "main"]

WINDOWS, LOGGED = "windows, no logs", "windows and logs"
WIDTH, BLOCKS, MICRO_BATCHES, BATCH, TOKENS, WINDOW = 128, 2, 4, 16, 128, 4
SETTLED = 4 * WINDOW  # steps until all files of windows and logs have been filled once


class _Block(nn.Module):
    """Dropout draws random numbers in every micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.inner(hidden)
        return hidden + added


def main(run_dir: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step, by kind and round: of an engine alone, and of one with windows, with logs and without."""
    torch.set_num_threads(1)
    join_ranks(run_dir)
    torch.manual_seed(5)
    alone, engine, batches = _engine(), _engine(), _batches()
    own = run_dir.with_name("run")
    config = {
        "run_dir": str(own),
        "mode": "auto",  # which allows the optimizer of the other engine
        "checkpoint": {"interval_iterations": 100_000},
        "learning": {"budget_fraction": 0.0},
        "replay": {"enabled": True, "window_iterations": WINDOW},
    }
    with CPSRRecovery(engine, config) as recovery:
        pipeline = recovery.life.job.adapter.pipeline
        assert pipeline is not None
        traffic, log = pipeline.traffic, pipeline.traffic.log

        def step(own_log: Any) -> None:
            traffic.log = own_log
            engine.train_batch(batches)

        kinds = {
            ALONE: partial(alone.train_batch, batches),
            WINDOWS: partial(step, None),
            LOGGED: partial(step, log),
        }
        in_turn(kinds, 2, SETTLED, 0)  # every file is new
        found = in_turn(kinds, rounds, WINDOW, 1)
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
