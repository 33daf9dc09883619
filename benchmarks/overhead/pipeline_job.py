"""One stage of a DeepSpeed pipeline on gloo, started by torchrun: what the predictor does in its bubbles, and costs."""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch.utils.data import DataLoader

from cpsr.benchmarks.overhead.blocks import Pair
from cpsr.benchmarks.overhead.gate import Gate
from cpsr.benchmarks.overhead.interval import IntervalSample, measure_interval
from cpsr.benchmarks.overhead.launch import RANKS, start_gloo
from cpsr.benchmarks.overhead.pipeline_model import layers, loss, split
from cpsr.demo.corpus import Windows, read_corpus
from cpsr.demo.model import GPTConfig
from cpsr.recovery import CPSRRecovery

BATCH = 4  # windows in a micro-batch, as in the demo


def main() -> None:
    """Train over so many checkpoint intervals, and write what this stage saw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--interval-iterations", type=int, required=True)
    parser.add_argument("--micro-batches", type=int, required=True)
    parser.add_argument("--warm-up", type=int, required=True, help="intervals before anything is measured")
    parser.add_argument("--intervals", type=int, required=True, help="intervals whose bubbles are measured")
    parser.add_argument("--pairs", type=int, required=True, help="intervals with and without the predictor's work")
    arguments = parser.parse_args()
    engine = _engine(arguments.micro_batches)
    text, _ = read_corpus()
    loader = DataLoader(Windows(text, GPTConfig().context), batch_size=BATCH, collate_fn=split, drop_last=True)
    configuration = {
        "run_dir": arguments.run_dir,
        "checkpoint": {"interval_iterations": arguments.interval_iterations, "final": False},
        "rehearsal": {"budget_fraction": 0.0},  # one rehearsal would be longer than an interval
    }
    with CPSRRecovery(engine, configuration) as recovery:
        data = recovery.resume(loader, repeat=True)

        def train() -> None:
            for _ in range(arguments.interval_iterations):
                engine.train_batch(data)

        for _ in range(arguments.warm_up):
            train()
        intervals = [measure_interval(recovery, train) for _ in range(arguments.intervals)]
        pairs = _measure_pairs(recovery, train, arguments.pairs)
    _write(arguments.results / f"{engine.global_rank}.json", engine, intervals, pairs)
    torch.distributed.destroy_process_group()  # or gloo's threads may abort the exit


def _measure_pairs(recovery: CPSRRecovery, train: Callable[[], None], pairs: int) -> list[Pair]:
    """Intervals with the predictor's work and without, in turns: with, without, without, with."""
    measured = []
    with Gate(recovery) as gate:
        for index in range(pairs):
            order = (True, False) if index % 2 == 0 else (False, True)
            seconds = {working: gate.timed(train, working) for working in order}
            measured.append(Pair(seconds[True], seconds[False]))
    return measured


def _write(path: Path, engine: Any, intervals: list[IntervalSample], pairs: list[Pair]) -> None:
    found = {
        "parameters": sum(parameter.numel() for parameter in engine.module.parameters()),
        "intervals": [asdict(interval) for interval in intervals],
        "pairs": [asdict(pair) for pair in pairs],
    }
    path.write_text(json.dumps(found), encoding="utf-8")


def _engine(micro_batches: int) -> Any:
    start_gloo()
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


if __name__ == "__main__":
    main()
