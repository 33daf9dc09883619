"""`cpsr bench loader`: from the restart to the first batch, far into a pass, by kind of loader."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.table import Table
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from cpsr.benchmarks.harness.intervals import Estimate, median_interval
from cpsr.benchmarks.harness.machine import machine_text
from cpsr.benchmarks.harness.measurement import interval_text, measuring, verdict
from cpsr.errors import CPSRError
from cpsr.state import codec
from cpsr.state.loader import ResumableLoader
from cpsr.state.scalars import DataPosition
from cpsr.tables import print_table

__all__ = ["main"]

BATCHES = 1_000_000
WORKERS = (0, 4)
ROUNDS = 5
LEFT = 1_000  # batches after the restart, more than workers fetch ahead
DRIVEN = 8  # batches of the first position that is driven to, and of each step from there; whole turns of all workers
CHECKED = 6 * DRIVEN
AIM_SECONDS = 1.0
SEEKS = "a stream that seeks, StatefulDataLoader"


class Numbers(Dataset[int]):
    """Its items are their own places, so that what is measured is the way to them."""

    def __init__(self, items: int) -> None:
        self._items = items

    def __len__(self) -> int:
        return self._items

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """The same numbers in turn; its state is the place of each worker's next one."""

    def __init__(self, items: int) -> None:
        self._items, self._next = items, 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, workers = (0, 1) if info is None else (info.id, info.num_workers)
        while (item := first + workers * self._next) < self._items:
            self._next += 1
            yield item

    def state_dict(self) -> dict[str, int]:
        """How many this worker has given."""
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go there, at once."""
        self._next = state["next"]


Loader = Callable[[int, int], Any]  # of so many items, with so many workers
KINDS: dict[str, Loader] = {
    SEEKS: lambda items, workers: StatefulDataLoader(Stream(items), 1, num_workers=workers),
    "map-style in order, StatefulDataLoader": lambda items, workers: StatefulDataLoader(
        Numbers(items), 1, num_workers=workers
    ),
    "map-style shuffled, StatefulDataLoader": lambda items, workers: StatefulDataLoader(
        Numbers(items), 1, shuffle=True, num_workers=workers
    ),
    "map-style in order, DataLoader": lambda items, workers: DataLoader(Numbers(items), 1, num_workers=workers),
    "map-style shuffled, DataLoader": lambda items, workers: DataLoader(
        Numbers(items), 1, shuffle=True, num_workers=workers
    ),
}


def main(json_path: Path | None = None, batches: int = BATCHES, rounds: int = ROUNDS) -> None:
    """Measure, print the table, and write the JSON file.

    Args:
        json_path: where the figures go.
        batches: of one item each, that were trained before the restart; a multiple of 8.
        rounds: restarts of each kind.

    Raises:
        CPSRError: a restart did not go on with the next item.
    """
    with measuring("loader", json_path) as call:
        table = Table(title=f"first batch after {batches:,} batches of one pass, s", title_justify="left")
        for heading in ("loader", *(f"{workers} workers" for workers in WORKERS)):
            table.add_column(heading)
        advance = call.bar("loaders", len(KINDS) * len(WORKERS))
        found: dict[str, dict[int, Estimate]] = {}
        for kind, make in KINDS.items():
            found[kind] = {}
            for workers in WORKERS:
                far = partial(make, batches + LEFT, workers)
                found[kind][workers] = median_interval(_seconds(kind, far, batches, rounds))
                advance()
            table.add_row(kind, *(interval_text(one, digits=3) for one in found[kind].values()))
        met = all(one.value < AIM_SECONDS for one in found[SEEKS].values())
        print_table(call.console, table)
        call.console.print(f"{verdict(met)}  under {AIM_SECONDS:g} s where the loader can seek")
        call.console.print(machine_text(call.machine))
        figures = {kind: {str(workers): asdict(one) for workers, one in row.items()} for kind, row in found.items()}
        call.leave({"batches": batches, "rounds": rounds, "aim_met": met, "seconds": figures})


def _position(make: Callable[[], Any], batches: int) -> dict[str, Any]:
    """The position after so many batches, without reading them: workers need minutes for a million.

    Counts of a position grow alike with every batch. Two positions that are driven to tell by how much, and
    `_require_exact` checks it where reading on is quick.
    """
    torch.manual_seed(0)
    stream = ResumableLoader(make(), DataPosition(), until_epoch=None)
    next(islice(stream, DRIVEN - 1, None))
    first = stream.saved_position().to_tree()
    next(islice(stream, DRIVEN - 1, None))
    return dict(_grown(first, stream.saved_position().to_tree(), batches // DRIVEN - 1))


def _grown(first: Any, second: Any, steps: int) -> Any:
    """A tree whose counts have grown so many times as between the first two."""
    if isinstance(second, dict):
        return {key: _grown(first[key], value, steps) for key, value in second.items()}
    if isinstance(second, list | tuple):
        return type(second)(_grown(one, value, steps) for one, value in zip(first, second, strict=True))
    if isinstance(second, int) and not isinstance(second, bool):
        return first + (second - first) * steps
    return second


def _seconds(kind: str, make: Callable[[], Any], batches: int, rounds: int) -> list[float]:
    """From a new loader to its first batch, with workers started; the process is there already."""
    _require_exact(kind, make)
    kept = codec.encode(_position(make, batches))
    found = []
    for _ in range(rounds):
        begun = perf_counter()
        _first(make, kept)
        found.append(perf_counter() - begun)
    return found


def _require_exact(kind: str, make: Callable[[], Any]) -> None:
    """A restart at a position that was not driven to goes on with the item that reading on gives."""
    torch.manual_seed(0)
    expected = int(next(islice(ResumableLoader(make(), DataPosition(), until_epoch=None), CHECKED, None)))
    item = _first(make, codec.encode(_position(make, CHECKED)))
    if item != expected:
        raise CPSRError(f"{kind}: a restart after {CHECKED} batches went on with item {item}, not {expected}")


def _first(make: Callable[[], Any], kept: tuple[Any, Any]) -> int:
    """The first item of a restart."""
    return int(next(ResumableLoader(make(), DataPosition(**codec.decode(*kept)), until_epoch=None)))
