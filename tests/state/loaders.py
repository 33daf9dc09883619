"""Loaders of every kind, over items that each library's global state augments when they are read."""

import pickle
import random
from collections.abc import Callable, Iterator
from multiprocessing import Value
from typing import Any

import numpy
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

ITEMS, BATCH = 23, 4  # six batches in a pass, the last one of three items
WORKERS = 2
READ: Any = Value("l")  # items that all processes have read


def noise() -> float:
    """As augmentations draw it: of each library's global state."""
    return float(torch.rand(())) + float(numpy.random.rand()) + random.random() + random.gauss(0, 1)


def read(item: int) -> tuple[int, float]:
    with READ.get_lock():
        READ.value += 1
    return item, noise()


class Items(Dataset[Any]):
    """Map-style, with augmentation."""

    def __init__(self, items: int = ITEMS) -> None:
        self.items = items

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> tuple[int, float]:
        return read(index)


class Reading(Items):
    """Counts what it has read, and has that as its state."""

    read = 0

    def __getitem__(self, index: int) -> tuple[int, float]:
        self.read += 1
        item, drawn = super().__getitem__(index)
        return item, drawn + 10 * self.read

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = state["read"]


class Stream(IterableDataset[Any]):
    """Has a state, as torchdata's guide shows it; worker 0 has more items than the others."""

    def __init__(self, items: int = ITEMS) -> None:
        self.items, self.at, self.start = items, 0, 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        start, self.start = self.start, 0
        first, more = (0, self.items) if info is None else ((0, 15), (15, 8))[info.id]
        for place in range(start, more if info is None or self.items == ITEMS else self.items):
            self.at = place + 1
            yield read(first + place)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = self.at = state["at"]


class Buffered(Stream):
    """Gives as its state the list that it goes on filling, as datasets do that pack texts to one length."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        for place, drawn in super().__iter__():
            self.given.append(place)
            yield place + 100 * sum(self.given), drawn

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.given = state["given"]


class Pickling(StatefulDataLoader):  # type: ignore[misc]
    """Packs the state, as torchtitan's loaders."""

    def state_dict(self) -> dict[str, Any]:
        return {"rank 0": pickle.dumps(super().state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(pickle.loads(state["rank 0"]))


class Stateless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return map(read, range(ITEMS))


class Written:
    """A loader written by hand: it shuffles with a generator of its own, and its state says where it is."""

    def __init__(self, items: int = ITEMS) -> None:
        self.items, self.passes, self.at = items, 0, 0

    def __iter__(self) -> Iterator[Any]:
        order = numpy.random.default_rng(self.passes).permutation(self.items)
        while self.at < self.items:
            self.at += BATCH
            yield [read(int(item)) for item in order[self.at - BATCH : self.at]]
        self.passes, self.at = self.passes + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passes, self.at = state["passes"], state["at"]


class OneShot(Written):
    """An iterator that cannot begin anew, and never ends."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.at += 1
        return [read(self.at)]


class Permuted(Sampler[int]):
    """Shuffles with NumPy's or Python's global generator, as hand-written samplers do."""

    def __init__(self, library: str) -> None:
        self._library = library

    def __len__(self) -> int:
        return ITEMS

    def __iter__(self) -> Iterator[int]:
        if self._library == "numpy":
            return iter(numpy.random.permutation(ITEMS).tolist())
        return iter(random.sample(range(ITEMS), ITEMS))


class Counting(Sampler[int]):
    """Shuffles by the number of the pass, which it counts itself."""

    def __init__(self) -> None:
        self.passes = 0

    def __len__(self) -> int:
        return ITEMS

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(torch.randperm(ITEMS, generator=seeded(self.passes)).tolist())


class Seeking(Counting):
    """Has a state, as torchdata's guide shows it, which goes on within a pass."""

    def __init__(self) -> None:
        self.passes = self.dealt = self.skip = 0

    def __iter__(self) -> Iterator[int]:
        if not self.skip:
            self.passes += 1
        self.dealt, self.skip = self.skip, 0
        for index in torch.randperm(ITEMS, generator=seeded(self.passes)).tolist()[self.dealt :]:
            self.dealt += 1
            yield index

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes, "dealt": self.dealt}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passes, self.skip = state["passes"], state["dealt"]


class Wrapping(Sampler[int]):
    """Deals as the sampler that it has in an attribute does."""

    def __init__(self, inner: Sampler[int]) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return ITEMS

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner)


class CountingBatches:
    """No DataLoader, and without a state; counts its passes."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return iter(torch.randperm(6, generator=seeded(self.passes))[:, None])


class Around:
    """A loader around a DataLoader, as timm's PrefetchLoader: it augments too, and may fetch some batches ahead."""

    def __init__(self, inside: Any, ahead: int) -> None:
        self.inside, self.depth = inside, ahead

    def __len__(self) -> int:
        return len(self.inside)

    def __iter__(self) -> Iterator[Any]:
        held: list[Any] = []
        for batch in self.inside:
            held.append((batch, noise()))
            if len(held) > self.depth:
                yield held.pop(0)
        yield from held


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shuffled(make: Any = StatefulDataLoader, **more: Any) -> Any:
    return make(Items(), BATCH, shuffle=True, **more)


def distributed() -> Any:
    return DistributedSampler(Items(), 2, 1, seed=3)


OWN_ORDER: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(Items(), BATCH),
    "distributed": lambda: DataLoader(Items(), BATCH, sampler=distributed()),
    "list": lambda: [torch.tensor([i]) for i in range(6)],
}
# Their batches are dealt, or loaded, again.
SKIPPED: dict[str, Callable[[], Any]] = OWN_ORDER | {
    "shuffled, own generator": lambda: shuffled(DataLoader, generator=seeded(1)),
    "shuffled, global generator": lambda: shuffled(DataLoader),
    "with replacement": lambda: DataLoader(
        Items(), BATCH, sampler=RandomSampler(range(ITEMS), replacement=True, generator=seeded(2))
    ),
    "numpy sampler": lambda: DataLoader(Items(), BATCH, sampler=Permuted("numpy")),
    "python sampler": lambda: DataLoader(Items(), BATCH, sampler=Permuted("python")),
    "counting sampler": lambda: DataLoader(Items(), BATCH, sampler=Counting()),
    "wrapped counting sampler": lambda: DataLoader(Items(), BATCH, sampler=Wrapping(Counting())),
    "sampler with a state": lambda: DataLoader(Items(), BATCH, sampler=Seeking()),
    "counting batches": CountingBatches,
    "unbatched": lambda: DataLoader(Items(), None, shuffle=True, generator=seeded(4)),
    "without a state": lambda: DataLoader(Stateless(), BATCH),
    "around another": lambda: Around(shuffled(DataLoader), 0),
    "around another, ahead": lambda: Around(shuffled(DataLoader), 1),
    "around another, far ahead": lambda: Around(shuffled(DataLoader, generator=seeded(1)), 4),
}
# They go on from their state, reading nothing twice.
AT_ONCE: dict[str, Callable[[], Any]] = {
    "written": Written,
    "one-shot": OneShot,
    "stream": lambda: DataLoader(Stream(), BATCH),
    "stream, unbatched": lambda: DataLoader(Stream(), None),
    "torchdata, shuffled": shuffled,
    "torchdata, one generator for all": lambda: shuffled(generator=seeded(1)),
    "torchdata, unbatched": lambda: StatefulDataLoader(Items(), None, shuffle=True),
    "torchdata, global generator": lambda: StatefulDataLoader(Items(), BATCH, sampler=RandomSampler(range(ITEMS))),
    "torchdata, distributed": lambda: StatefulDataLoader(Items(), BATCH, sampler=distributed()),
    "torchdata, its own distributed": lambda: StatefulDataLoader(
        Items(), BATCH, sampler=StatefulDistributedSampler(Items(), 2, 1, seed=3)
    ),
    "torchdata, sampler with a state": lambda: StatefulDataLoader(Items(), BATCH, sampler=Seeking()),
    "torchdata, dataset with a state": lambda: StatefulDataLoader(Reading(), BATCH),
    "torchdata, stream": lambda: StatefulDataLoader(Stream(), BATCH),
    "torchdata, packed state of a stream": lambda: Pickling(Buffered(), BATCH),
    "torchdata, packed state": lambda: Pickling(Items(), BATCH, shuffle=True),
}
WITH_WORKERS: dict[str, Callable[[], Any]] = {
    "torchdata, workers": lambda: shuffled(num_workers=WORKERS),
    "torchdata, persistent workers": lambda: shuffled(num_workers=WORKERS, persistent_workers=True),
    "torchdata, stream, workers": lambda: StatefulDataLoader(Stream(), BATCH, num_workers=WORKERS),
    "shuffled, persistent workers": lambda: shuffled(DataLoader, num_workers=WORKERS, persistent_workers=True),
    "around another, ahead, persistent workers": lambda: Around(
        shuffled(DataLoader, num_workers=WORKERS, persistent_workers=True), 1
    ),
    "torchdata, one generator for all, workers": lambda: shuffled(num_workers=WORKERS, generator=seeded(1)),
    "torchdata, rare snapshots": lambda: shuffled(num_workers=WORKERS, snapshot_every_n_steps=4),
    "torchdata, global generator, workers": lambda: StatefulDataLoader(
        Items(), BATCH, sampler=RandomSampler(range(ITEMS)), num_workers=WORKERS
    ),
    "torchdata, distributed, workers": lambda: StatefulDataLoader(
        Items(), BATCH, sampler=distributed(), num_workers=WORKERS
    ),
    "torchdata, stream, rare snapshots": lambda: StatefulDataLoader(
        Stream(), BATCH, num_workers=WORKERS, snapshot_every_n_steps=3
    ),
    "torchdata, stream without a state": lambda: StatefulDataLoader(Stateless(), BATCH, num_workers=WORKERS),
    "torchdata, custom sampler": lambda: StatefulDataLoader(
        Items(), BATCH, sampler=Permuted("numpy"), num_workers=WORKERS
    ),
    "torchdata, sampler with a state, workers": lambda: StatefulDataLoader(
        Items(), BATCH, sampler=Seeking(), num_workers=WORKERS
    ),
    "sampler with a state, persistent workers": lambda: DataLoader(
        Items(), BATCH, sampler=Seeking(), num_workers=WORKERS, persistent_workers=True
    ),
    "shuffled, more workers": lambda: shuffled(DataLoader, num_workers=3, generator=seeded(4)),
    "custom sampler, workers": lambda: DataLoader(Items(), BATCH, sampler=Permuted("numpy"), num_workers=WORKERS),
    "custom sampler, persistent workers": lambda: DataLoader(
        Items(), BATCH, sampler=Permuted("numpy"), num_workers=WORKERS, persistent_workers=True
    ),
    "stream, workers": lambda: DataLoader(Stream(), BATCH, num_workers=WORKERS),
}
LOADERS = SKIPPED | AT_ONCE | WITH_WORKERS
OFTEN = list(WITH_WORKERS)[:5]  # the others are slow tests


def seed(number: int) -> None:
    torch.manual_seed(number)
    numpy.random.seed(number)
    random.seed(number)


def values(batch: Any) -> list[float]:
    if isinstance(batch, torch.Tensor):
        return [float(item) for item in batch.reshape(-1)]
    return [one for part in batch for one in values(part)] if isinstance(batch, list | tuple) else [float(batch)]


def items(batch: Any) -> list[float]:
    """Without what was drawn."""
    return [one for one in values(batch) if one == int(one)]
