"""One rank of a DeepSpeed ZeRO-1 job, started by the harness: the demo's model and batch."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch.utils.data import DataLoader, DistributedSampler

from cpsr.benchmarks.harness.ranks import join_ranks
from cpsr.benchmarks.overhead.blocks import configuration, measure_pairs
from cpsr.demo.model import GPT, GPTConfig, Windows, read_corpus
from cpsr.engines import adapt
from cpsr.recovery import CPSRRecovery

__all__ = ["BATCH", "main", "zero_engine"]

BATCH = 4  # windows per rank and step, as in the demo


def main(run_dir: Path, pairs: int) -> list[dict[str, Any]] | None:
    """Measure on every rank; rank 0, which also keeps the journal, returns what it saw."""
    engine = zero_engine(run_dir)
    adapter = adapt(engine)
    text, _ = read_corpus()
    windows = Windows(text, GPTConfig().context)
    loader = DataLoader(windows, batch_size=BATCH, sampler=DistributedSampler(windows, seed=0), drop_last=True)

    def step(batch: torch.Tensor) -> None:
        engine.backward(engine(batch.to(engine.device)))
        engine.step()

    with CPSRRecovery(adapter, configuration(run_dir)) as recovery:
        measured = measure_pairs(adapter, recovery, loader, step, pairs, engine.device.type)
    return [asdict(pair) for pair in measured] if adapter.rank == 0 else None


def zero_engine(run_dir: Path) -> Any:
    """The demo's model under ZeRO-1."""
    join_ranks(run_dir)
    torch.manual_seed(0)
    model = GPT(GPTConfig())
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
        },
    )
    return engine
