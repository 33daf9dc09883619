"""How long a restart takes to the first batch a million batches in, and what a checkpoint adds: for docs/loop_state.md.

`python -m tests.state.loader_times` writes one line for each loader. The positions are made, not trained to.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from cpsr.state.loader import ResumableLoader
from cpsr.state.scalars import DataPosition
from cpsr.state.worker_random_states import pack

BATCHES, BATCH, WORKERS = 1_000_000, 8, 4
ITEMS = (BATCHES + 1000) * BATCH
TIMES = 100


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """Can begin anywhere."""

    def __init__(self) -> None:
        self.at = self.start = 0

    def __iter__(self) -> Iterator[int]:
        start, self.start = self.start, 0
        for self.at in range(start + 1, ITEMS + 1):
            yield self.at - 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = self.at = state["at"]


def of_workers(state: Any) -> None:
    """Move torchdata's state of a stream in workers to the millionth batch."""
    for worker in state["_snapshot"]["_worker_snapshots"].values():
        worker["dataset_state"]["dataset"] = {"at": BATCHES // WORKERS * BATCH}


def of_sampler(state: Any) -> None:
    """The same of a map-style dataset."""
    snapshot = state["_snapshot"]
    main = snapshot["_main_snapshot"]
    snapshot["_snapshot_step"] = main["_sampler_iter_yielded"] = BATCHES
    batches = main["_sampler_iter_state"]
    batches["samples_yielded"] = BATCHES * BATCH
    if "sampler_iter_state" in batches:
        batches["sampler_iter_state"]["yielded"] = BATCHES * BATCH


def of_stream(state: Any) -> None:
    state["at"] = BATCHES * BATCH


LOADERS: dict[str, tuple[Callable[[], Any], Callable[[Any], None] | None]] = {
    "StatefulDataLoader, stream, workers": (
        lambda: StatefulDataLoader(Stream(), BATCH, num_workers=WORKERS),
        of_workers,
    ),
    "StatefulDataLoader, in order, workers": (
        lambda: StatefulDataLoader(Numbers(), BATCH, num_workers=WORKERS),
        of_sampler,
    ),
    "StatefulDataLoader, shuffled, workers": (
        lambda: StatefulDataLoader(Numbers(), BATCH, num_workers=WORKERS, shuffle=True),
        of_sampler,
    ),
    "DataLoader, stream": (lambda: DataLoader(Stream(), BATCH), of_stream),
    "DataLoader, in order, workers": (lambda: DataLoader(Numbers(), BATCH, num_workers=WORKERS), None),
    "DataLoader, shuffled, workers": (lambda: DataLoader(Numbers(), BATCH, num_workers=WORKERS, shuffle=True), None),
}


def microseconds(act: Callable[[], object]) -> float:
    """Median of many calls."""
    times = []
    for _ in range(TIMES):
        started = time.perf_counter()
        act()
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times)


def main() -> None:
    sys.stdout.write(f"random states of a worker: {microseconds(pack):.0f} us for each batch\n")
    for name, (make, move) in LOADERS.items():
        stream = ResumableLoader(make(), DataPosition(), until_epoch=None)
        for _ in range(2 * WORKERS):
            next(stream)
        added = microseconds(stream.saved_position)
        position = replace(stream.saved_position(), batches=BATCHES, batch=BATCHES, workers=None)
        if move is not None and position.loader is not None:
            move(position.loader["state"])
            position.loader.update(batches=BATCHES, batch=BATCHES)
        del stream
        loader = make()
        started = time.perf_counter()
        batch = next(ResumableLoader(loader, position, until_epoch=None))
        seconds = time.perf_counter() - started
        assert len(batch) == BATCH
        sys.stdout.write(f"{name}: {seconds:.3f} s to the first batch; {added:.0f} us for each checkpoint\n")


if __name__ == "__main__":
    main()
