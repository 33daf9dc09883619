"""One rank of a small job without buffers, in plain torch or DeepSpeed, which leaves what it began with."""

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from cpsr import CPSRRecovery, TorchAdapter
from cpsr.demo.ranks import join_ranks
from tests.device import DEVICE
from tests.recovery.engines import configuration, initialize
from tests.recovery.loop_worker import BATCH, FEATURES, ITEMS, Net


@dataclass(frozen=True)
class Options:
    """What one life of the job does.

    Attributes:
        config: CPSR's configuration.
        result: where the result goes, `.<rank>.json` appended; weights at the start as `.<rank>.safetensors`, and the
            items of every batch as a line of `.<rank>.batches`.
        iterations: end of the run.
        fault: the iteration after which every rank is killed; empty: none.
        committed: not looked at.
        thinned: a record of a checkpoint's weights that must exist before.
        engine: `torch`, or `deepspeed` with ZeRO 1.
    """

    config: dict[str, Any]
    result: Path
    iterations: int
    fault: str = ""
    committed: Path | None = None
    thinned: Path | None = None
    engine: str = "torch"


def main(options: Options, rank: int, ranks: int) -> None:
    join_ranks(f"file://{options.result.with_suffix('.ranks')}")
    torch.manual_seed(7)
    module = Net().to(DEVICE)
    x = torch.randn(ITEMS * ranks, FEATURES)
    items = TensorDataset(x, x.sum(1, keepdim=True), torch.arange(len(x)))
    sampler: DistributedSampler[Any] = DistributedSampler(items, num_replicas=ranks, rank=rank, seed=3)
    loader = DataLoader(items, batch_size=BATCH, sampler=sampler, drop_last=True)
    if options.engine == "deepspeed":
        engine = initialize(module, configuration(1, "fp32", 1))
        called, given = engine, engine

        def step() -> None:
            engine.step()

    else:
        called = nn.parallel.DistributedDataParallel(module)
        optimizer = torch.optim.AdamW(module.parameters(), lr=2e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 0.01 * step))
        given = TorchAdapter(called, optimizer, scheduler=schedule)

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

    with CPSRRecovery(given, options.config) as recovery:
        began = state(recovery, options.result.with_suffix(f".{rank}.safetensors"))
        with options.result.with_suffix(f".{rank}.batches").open("w") as batches:
            for inputs, targets, indices in recovery.resume(loader, repeat=True):
                batches.write(json.dumps([recovery.iteration, *indices.tolist()]) + "\n")
                batches.flush()
                loss = called(inputs.to(DEVICE), targets.to(DEVICE))
                engine.backward(loss) if options.engine == "deepspeed" else loss.backward()
                step()
                if recovery.life.saver.is_due(recovery.iteration + 1):  # steps this short would outrun the disk
                    recovery.life.saver.drain(10.0)
                if options.fault == str(recovery.iteration):
                    die(options.thinned)
                if recovery.iteration >= options.iterations:
                    break
    options.result.with_suffix(f".{rank}.json").write_text(json.dumps(began))
    torch.distributed.destroy_process_group()  # or gloo's threads may abort the exit


def state(recovery: CPSRRecovery, weights: Path) -> dict[str, Any]:
    """What this life began with."""
    adapter = recovery.life.job.adapter
    operators = adapter.shard().operators
    save_file({name: one.parameter.values.detach().cpu().clone() for name, one in operators.items()}, weights)
    return {
        "iteration": recovery.iteration,
        "method": recovery.restored.method,
        "learning_rate": adapter.learning_rate(),
        "moments": sum(float(values.abs().sum()) for one in operators.values() for values in one.moments.values()),
        "steps": sorted({float(one.get("step", 0.0)) for one in adapter.scalars()["optimizer_steps"]}),
    }


def die(thinned: Path | None) -> None:
    deadline = time.monotonic() + 30
    while thinned is not None and not thinned.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)
