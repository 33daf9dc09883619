"""One stage of a DeepSpeed pipeline: what the predictor does in its bubbles, and costs."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch.utils.data import DataLoader

from cpsr.benchmarks.harness.device import wait_for
from cpsr.benchmarks.harness.ranks import RANKS, join_ranks
from cpsr.benchmarks.overhead.blocks import Pair
from cpsr.benchmarks.overhead.gate import Gate
from cpsr.benchmarks.overhead.interval import measure_interval
from cpsr.benchmarks.overhead.pipeline_model import layers, loss, split
from cpsr.demo.model import GPTConfig, Windows, read_corpus
from cpsr.recovery import CPSRRecovery

BATCH = 4  # windows in a micro-batch, as in the demo


def main(
    run_dir: Path, interval_iterations: int, micro_batches: int, warm_up: int, intervals: int, pairs: int
) -> dict[str, Any]:
    """Train over so many checkpoint intervals, and return what this stage saw.

    Args:
        run_dir: of the job.
        interval_iterations: of its checkpoints.
        micro_batches: of an iteration.
        warm_up: intervals before anything is measured.
        intervals: whose bubbles are measured.
        pairs: of intervals with and without the predictor's work.
    """
    engine = _engine(run_dir, micro_batches)
    text, _ = read_corpus()
    loader = DataLoader(Windows(text, GPTConfig().context), batch_size=BATCH, collate_fn=split, drop_last=True)
    configuration = {
        "run_dir": run_dir,
        "checkpoint": {"interval_iterations": interval_iterations, "final": False},
    }
    with CPSRRecovery(engine, configuration) as recovery:
        data = recovery.resume(loader, repeat=True)

        def train() -> None:
            for _ in range(interval_iterations):
                engine.train_batch(data)
            wait_for(engine.device.type)

        for _ in range(warm_up):
            train()
        samples = [measure_interval(recovery, train) for _ in range(intervals)]
        measured = _measure_pairs(recovery, train, pairs)
    return {
        "parameters": sum(parameter.numel() for parameter in engine.module.parameters()),
        "intervals": [asdict(sample) for sample in samples],
        "pairs": [asdict(pair) for pair in measured],
    }


def _measure_pairs(recovery: CPSRRecovery, train: Callable[[], None], pairs: int) -> list[Pair]:
    """Intervals with the predictor's work and without, in turns: with, without, without, with."""
    measured = []
    with Gate(recovery.life.loop.learning.learner) as gate:
        for index in range(pairs):
            order = (True, False) if index % 2 == 0 else (False, True)
            seconds = {working: gate.timed(train, working) for working in order}
            measured.append(Pair(seconds[True], seconds[False]))
    return measured


def _engine(run_dir: Path, micro_batches: int) -> Any:
    join_ranks(run_dir)
    torch.manual_seed(0)
    module = PipelineModule(layers(GPTConfig()), num_stages=RANKS, loss_fn=loss, partition_method="uniform")
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.AdamW(module.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": micro_batches,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        },
    )
    return engine
