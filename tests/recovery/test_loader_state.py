"""Three kills in a row: every batch that is trained is that of the run left alone, to the bit of what workers drew."""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from cpsr import CPSRRecovery, TorchAdapter
from tests.committed import keep_pace, wait_until_committed
from tests.situations.lives import Life, backward, live
from tests.state.loaders import BATCH, Items, Stream, Written, seed, seeded, values

INTERVAL, ITERATIONS, ACCUMULATE = 4, 26, 2
WORKERS: dict[str, Any] = {"num_workers": 2}


class OfRank(Stream):
    """Each rank has items of its own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def __iter__(self) -> Iterator[Any]:
        return ((item + 1000 * self._rank, drawn) for item, drawn in super().__iter__())


def ordered(rank: int, ranks: int) -> Any:
    return DistributedSampler(Items(31), num_replicas=ranks, rank=rank, seed=3)


LOADERS: dict[str, Any] = {
    "map-style, workers": lambda rank, ranks: DataLoader(
        Items(), BATCH, shuffle=True, generator=seeded(rank), **WORKERS
    ),
    "torchdata, distributed": lambda rank, ranks: StatefulDataLoader(
        Items(31), BATCH, sampler=ordered(rank, ranks), **WORKERS
    ),
    "torchdata, stream": lambda rank, ranks: StatefulDataLoader(OfRank(rank), BATCH, **WORKERS),
    "written": lambda rank, ranks: Written(),
}


def training(life: Life) -> Any:
    """Notes what each micro-batch held as soon as it has it; rank 0 is killed before the one that `cut` names."""
    if life.ranks > 1:
        torch.distributed.init_process_group("gloo")
    seed(7)
    module = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
    called = nn.parallel.DistributedDataParallel(module) if life.ranks > 1 else module
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    adapter = TorchAdapter(called, optimizer, micro_batches_per_iteration=ACCUMULATE)
    loader = LOADERS[life.options["kind"]](life.rank, life.ranks)
    checkpoint = {"interval_iterations": INTERVAL, "shared_memory": False}
    config = life.config(mode=life.options.get("mode", "exact"), checkpoint=checkpoint)
    micro, cut = 0, life.options.get("cut")
    with CPSRRecovery(adapter, config) as recovery, noted(life.directory, life).open("w") as notes:
        for batch in recovery.resume(loader, repeat=True):
            if cut == [recovery.iteration, micro] and life.rank == 0:
                wait_until_committed(life.directory / "run", cut[0] // INTERVAL * INTERVAL)
                life.at = cut[0]
                life.step(cut[0])
            flat = values(batch)
            items = [one for one in flat if one == int(one)]
            notes.write(json.dumps([recovery.iteration, micro, digest(items), digest(flat)]) + "\n")
            notes.flush()
            x = torch.tensor(items)[:, None] / 100
            backward(nn.functional.mse_loss(called(x), x.sin()))
            micro = (micro + 1) % ACCUMULATE
            if micro:
                continue
            optimizer.step()
            optimizer.zero_grad()
            keep_pace(recovery)
            if recovery.iteration >= ITERATIONS:
                break
    if life.ranks > 1:
        torch.distributed.destroy_process_group()
    return [digest([value.tolist() for value in module.state_dict().values()]), torch.rand(3).tolist()]


def digest(given: Any) -> str:
    return hashlib.sha256(repr(given).encode()).hexdigest()[:16]


def noted(folder: Path, life: Life, rank: int | None = None) -> Path:
    return folder / f"{life.number}.{life.rank if rank is None else rank}.batches"


def batches(life: Life, rank: int) -> dict[tuple[int, int], list[str]]:
    """(iteration, micro-batch) -> hash of its items, and of all that it held."""
    lines = noted(life.directory, life, rank).read_text().splitlines()
    return {(iteration, micro): hashes for iteration, micro, *hashes in map(json.loads, lines)}


def kills(kind: str, checkpoints: Sequence[int]) -> list[list[int]]:
    """Micro-batches before which a life ends, one after each of these; the same whenever the test runs."""
    drawn = random.Random(kind)
    return [[at + drawn.randrange(1, INTERVAL), drawn.randrange(ACCUMULATE)] for at in checkpoints]


def check(directory: Path, kind: str, ranks: int, checkpoints: Sequence[int]) -> None:
    alone = Life(directory / "alone", ranks=ranks, options={"kind": kind})
    whole = live(training, alone)
    cuts = [*kills(kind, checkpoints), None]
    lives = [
        Life(directory / "cut", ranks=ranks, number=number, options={"kind": kind, "cut": cut})
        for number, cut in enumerate(cuts)
    ]
    *killed, back = (live(training, life) for life in lives)
    assert [one.statuses[0] for one in killed] == [-9] * len(checkpoints), killed[0].output
    assert back.results == whole.results
    for rank in range(ranks):
        expected = batches(alone, rank)
        assert len(expected) == ITERATIONS * ACCUMULATE
        trained = [batches(life, rank) for life in lives]
        for number, found in enumerate(trained):
            assert found == {at: expected[at] for at in found}, f"rank {rank}, life {number}"
        assert [min(found) for found in trained] == [(0, 0), *((at, 0) for at in checkpoints)]
        assert max(trained[-1]) == max(expected)


@pytest.mark.parametrize("kind", ["map-style, workers", "torchdata, stream", "written"])
def test_three_kills_in_a_row_lose_and_repeat_no_sample(tmp_path: Path, kind: str) -> None:
    check(tmp_path, kind, 1, [2 * INTERVAL, 3 * INTERVAL, 5 * INTERVAL])


def test_every_rank_continues_from_the_state_of_its_own_loader(tmp_path: Path) -> None:
    check(tmp_path, "torchdata, distributed", 2, [3 * INTERVAL])
