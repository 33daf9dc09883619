"""One rank of a plain torch loop over a loader of a given kind, which can kill itself at a chosen micro-batch.

What each micro-batch held is written down as soon as the loop has it: a hash of its items, and one of all its values,
with what workers have drawn.
"""

import hashlib
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from cpsr import CPSRRecovery, TorchAdapter
from tests.recovery.options import LifeOptions
from tests.state.loaders import BATCH, Items, Stream, Written, seed, seeded, values

SHARDS, SHARD = 4, 7
WORKERS: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}  # not that of the ranks


@dataclass(frozen=True)
class Options(LifeOptions):
    """What one life of the job does.

    Attributes:
        kind: of the loader; a key of `LOADERS`.
        accumulate: micro-batches in a step.
        fault: before which micro-batch of the run, `iteration:micro`, rank 0 kills itself.
        committed: a commit record that must exist before.
    """

    kind: str
    accumulate: int = 2
    fault: str = ""
    committed: Path | None = None


class OfRank(Stream):
    """Each rank has items of its own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def __iter__(self) -> Iterator[Any]:
        return ((item + 1000 * self._rank, drawn) for item, drawn in super().__iter__())


def rows(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        for item in range(SHARD):
            yield {"item": shard * SHARD + item}


def hugging_face(rank: int, **shuffle: Any) -> Any:
    import datasets  # no dependency

    shards = [shard + SHARDS * rank for shard in range(SHARDS)]
    return datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": shards}).shuffle(seed=3, **shuffle)


def ordered(rank: int, ranks: int) -> Any:
    return DistributedSampler(Items(31), num_replicas=ranks, rank=rank, seed=3)


LOADERS: dict[str, Any] = {
    "map-style, workers": lambda rank, ranks: DataLoader(
        Items(), BATCH, shuffle=True, generator=seeded(rank), **WORKERS
    ),
    "torchdata, workers": lambda rank, ranks: StatefulDataLoader(Items(), BATCH, shuffle=True, **WORKERS),
    "torchdata, distributed": lambda rank, ranks: StatefulDataLoader(
        Items(31), BATCH, sampler=ordered(rank, ranks), **WORKERS
    ),
    "torchdata, stream": lambda rank, ranks: StatefulDataLoader(OfRank(rank), BATCH, **WORKERS),
    "stream": lambda rank, ranks: DataLoader(OfRank(rank), BATCH),
    "written": lambda rank, ranks: Written(),
    "Hugging Face": lambda rank, ranks: DataLoader(hugging_face(rank, buffer_size=1), BATCH),
    "Hugging Face, torchdata": lambda rank, ranks: StatefulDataLoader(
        hugging_face(rank, buffer_size=1), BATCH, **WORKERS
    ),
    "Hugging Face, shuffle buffer": lambda rank, ranks: DataLoader(hugging_face(rank, buffer_size=9), BATCH),
}


def main(options: Options, rank: int, ranks: int) -> None:
    if ranks > 1:
        meeting = options.meeting
        torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    seed(7)
    module = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
    called = nn.parallel.DistributedDataParallel(module) if ranks > 1 else module
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    adapter = TorchAdapter(called, optimizer, micro_batches_per_iteration=options.accumulate)
    loader = LOADERS[options.kind](rank, ranks)
    with (
        CPSRRecovery(adapter, options.config) as recovery,
        options.result.with_suffix(f".{rank}.batches").open("w") as to,
    ):
        micro = 0
        for batch in recovery.resume(loader, repeat=True):
            if rank == 0 and options.fault == f"{recovery.iteration}:{micro}":
                kill(options.committed)
            flat = values(list(batch.values()) if isinstance(batch, dict) else batch)
            items = [one for one in flat if one == int(one)]
            to.write(json.dumps([recovery.iteration, micro, digest(items), digest(flat)]) + "\n")
            to.flush()
            x = torch.tensor(items)[:, None] / 100
            nn.functional.mse_loss(called(x), x.sin()).backward()  # type: ignore[no-untyped-call]  # untyped in torch
            micro = (micro + 1) % options.accumulate
            if micro:
                continue
            optimizer.step()
            optimizer.zero_grad()
            if recovery.life.saver.is_due(recovery.iteration + 1):  # steps this short would outrun the disk
                recovery.life.saver.drain(10.0)
            if recovery.iteration >= options.iterations:
                break
    ended = {
        "state": digest([value.tolist() for value in module.state_dict().values()]),
        "drawn": digest(torch.rand(3)),
    }
    options.leave(rank, ended)
    if ranks > 1:
        torch.distributed.destroy_process_group()


def kill(committed: Path | None) -> None:
    deadline = time.monotonic() + 30
    while committed is not None and not committed.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)


def digest(given: Any) -> str:
    return hashlib.sha256(repr(given).encode()).hexdigest()[:16]
