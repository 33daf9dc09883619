"""Iterable datasets of Hugging Face continue from their state, except those with a shuffle buffer, which it lacks.

The package is no dependency: these tests run where it is installed.
"""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from cpsr.state import loader_state
from cpsr.state.loader import ResumableLoader
from cpsr.state.scalars import DataPosition
from tests.state.test_loader_state import READ, items, saved, seed

datasets: Any = pytest.importorskip("datasets")

BATCH, SHARDS, SHARD = 4, 4, 7


def seen(row: dict[str, Any]) -> dict[str, Any]:
    with READ.get_lock():
        READ.value += 1
    return row


def rows(shards: list[int]) -> Any:
    for shard in shards:
        for item in range(SHARD):
            yield {"item": shard * SHARD + item}


def dataset() -> Any:
    return datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": list(range(SHARDS))})


def shuffled(**more: Any) -> Any:
    return dataset().shuffle(seed=3, **more)


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(dataset().map(seen), BATCH),
    "shuffled shards": lambda: DataLoader(shuffled(buffer_size=1).map(seen), BATCH),
    "unbatched": lambda: dataset().map(seen).with_format("torch"),
    "torchdata": lambda: StatefulDataLoader(dataset().map(seen), BATCH),
    "torchdata, workers": lambda: StatefulDataLoader(dataset().map(seen), BATCH, num_workers=2),
    "torchdata, shuffled shards, worker": lambda: StatefulDataLoader(
        shuffled(buffer_size=1).map(seen), BATCH, num_workers=1
    ),
    "torchdata, persistent workers": lambda: StatefulDataLoader(
        dataset().map(seen), BATCH, num_workers=2, persistent_workers=True
    ),
}
SKIPPED: dict[str, tuple[Callable[[], Any], str]] = {
    "shuffle buffer": (
        lambda: DataLoader(shuffled(buffer_size=9).map(seen), BATCH),
        "leaves out what is in the buffer",
    ),
    "torchdata, shuffle buffer": (
        lambda: StatefulDataLoader(shuffled(buffer_size=9).map(seen), BATCH, num_workers=2),
        "leaves out what is in the buffer",
    ),
    "torchdata, shuffled shards": (
        lambda: StatefulDataLoader(shuffled(buffer_size=1).map(seen), BATCH, num_workers=2),
        "does not take the state of one of several workers",
    ),
    "workers": (lambda: DataLoader(dataset().map(seen), BATCH, num_workers=2), "its copies are in the workers"),
}
EVERY = LOADERS | {name: make for name, (make, _) in SKIPPED.items()}


def numbers(batch: Any) -> list[float]:
    return items(list(batch.values()))


def stream(kind: str, position: DataPosition, epochs: bool) -> ResumableLoader:
    return ResumableLoader(EVERY[kind](), position, until_epoch=None, sets_epoch=epochs)


@pytest.mark.parametrize("epochs", [True, False], ids=["set_epoch", "no set_epoch"])
@pytest.mark.parametrize("steps", [(1, 2, 3), (4, 3, 7), (8, 13, 20)], ids=str)
@pytest.mark.parametrize("kind", EVERY)
def test_three_restarts_in_a_row_lose_and_repeat_nothing(kind: str, steps: tuple[int, ...], epochs: bool) -> None:
    seed(0)
    whole = stream(kind, DataPosition(), epochs)
    expected = [numbers(next(whole)) for _ in range(sum(steps) + 20)]
    seed(0)
    now, done = stream(kind, DataPosition(), epochs), 0
    for more in steps:
        assert [numbers(next(now)) for _ in range(more)] == expected[done : done + more]
        done += more
        position, _ = saved(now)
        next(now)  # lost
        seed(99)
        now = stream(kind, position, epochs)
    assert [numbers(next(now)) for _ in range(20)] == expected[done:]
    if "shuffle" in kind:
        dealt, length = [item for batch in expected for item in batch], SHARDS * SHARD
        passes = [dealt[length * number : length * (number + 1)] for number in range(3)]
        assert (passes[0] == passes[1] == passes[2]) == (not epochs)


@pytest.mark.parametrize("kind", [kind for kind in LOADERS if "worker" not in kind])
def test_what_was_trained_is_not_read_again(kind: str) -> None:
    started = stream(kind, DataPosition(), True)
    for _ in range(5):
        next(started)
    position, _ = saved(started)
    READ.value = 0
    batch = next(stream(kind, position, True))
    assert READ.value == len(numbers(batch))


@pytest.mark.parametrize("kind", SKIPPED)
def test_a_state_that_lacks_something_is_reported_once(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    loader_state.report_once.cache_clear()
    make, why = SKIPPED[kind]
    with caplog.at_level(logging.WARNING, "cpsr"):
        first, second = (ResumableLoader(make(), DataPosition(), until_epoch=1) for _ in range(2))
    assert not [one for one in (first, second) if one.saved_position().loader is not None]
    assert [record.message for record in caplog.records if why in record.message] == [caplog.records[0].message]
    assert caplog.records[0].message.endswith("After a restart its batches are skipped one by one.")
