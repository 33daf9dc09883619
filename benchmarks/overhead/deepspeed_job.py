"""One rank of a DeepSpeed ZeRO-1 job on gloo, started by torchrun: the demo's model and batch."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch.utils.data import DataLoader, DistributedSampler

from cpsr.benchmarks.overhead.blocks import configuration, measure_pairs
from cpsr.benchmarks.overhead.launch import start_gloo
from cpsr.demo.corpus import Windows, read_corpus
from cpsr.demo.model import GPT, GPTConfig
from cpsr.engines import adapt
from cpsr.recovery import CPSRRecovery

BATCH = 4  # windows per rank and step, as in the demo


def main() -> None:
    """Measure on every rank; rank 0, which also keeps the journal, writes what it saw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--results", type=Path, required=True)
    arguments = parser.parse_args()
    engine = _engine()
    adapter = adapt(engine)
    text, _ = read_corpus()
    windows = Windows(text, GPTConfig().context)
    loader = DataLoader(windows, batch_size=BATCH, sampler=DistributedSampler(windows, seed=0), drop_last=True)

    def step(batch: torch.Tensor) -> None:
        engine.backward(engine(batch))
        engine.step()

    with CPSRRecovery(adapter, configuration(arguments.run_dir)) as recovery:
        pairs = measure_pairs(adapter, recovery, loader, step, arguments.pairs)
    if adapter.rank == 0:
        found = json.dumps([asdict(pair) for pair in pairs])
        (arguments.results / f"{adapter.rank}.json").write_text(found, encoding="utf-8")
    torch.distributed.destroy_process_group()  # or gloo's threads may abort the exit


def _engine() -> Any:
    start_gloo()
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


if __name__ == "__main__":
    main()
