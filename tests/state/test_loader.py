"""A restarted loader deals exactly the batches that the uninterrupted one would have dealt."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, Sampler, TensorDataset

from cpsr.errors import RecoveryError
from cpsr.state import codec
from cpsr.state.loader import LoaderHooks, ResumableLoader
from cpsr.state.loader_passes import after_failure
from cpsr.state.loader_workers import prepared_workers
from cpsr.state.scalars import DataPosition, capture_rng, restore_rng

ITEMS = 23
DATA = TensorDataset(torch.arange(ITEMS))


class Noisy(TensorDataset):
    """Augments each item from the global generator, as image pipelines do."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return (self.tensors[0][index] + torch.rand(()),)


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


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(ITEMS))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(DATA, batch_size=4),
    "shuffled, own generator": lambda: DataLoader(DATA, batch_size=4, shuffle=True, generator=seeded(1)),
    "shuffled, global generator": lambda: DataLoader(DATA, batch_size=4, shuffle=True),
    "with replacement": lambda: DataLoader(
        DATA, batch_size=4, sampler=RandomSampler(DATA, replacement=True, generator=seeded(2))
    ),
    "distributed": lambda: DataLoader(DATA, batch_size=4, sampler=DistributedSampler(DATA, 2, 1, seed=3)),
    "numpy sampler": lambda: DataLoader(DATA, batch_size=4, sampler=Permuted("numpy")),
    "python sampler": lambda: DataLoader(DATA, batch_size=4, sampler=Permuted("python")),
    "unbatched": lambda: DataLoader(DATA, batch_size=None, shuffle=True, generator=seeded(4)),
    "augmented": lambda: DataLoader(
        Noisy(torch.arange(ITEMS)), batch_size=4, shuffle=True, generator=seeded(5), drop_last=True
    ),
    "iterable": lambda: DataLoader(Stream(), batch_size=4),
    "list": lambda: [torch.tensor([i]) for i in range(6)],
}


def value(batch: Any) -> list[float]:
    tensor = batch[0] if isinstance(batch, list | tuple) else batch
    return [float(item) for item in tensor.reshape(-1)]


def train(stream: ResumableLoader, steps: int) -> list[list[float]]:
    dealt = []
    for _ in range(steps):
        dealt.append(value(next(stream)))
        torch.rand(3)  # training draws too (dropout, augmentation)
        numpy.random.rand(2)
        random.random()
    return dealt


def saved(stream: ResumableLoader) -> tuple[DataPosition, dict[str, Any]]:
    tree, tensors = codec.encode({"data": vars(stream.position), "rng": capture_rng()})
    tree = codec.decode(tree, tensors)
    return DataPosition(**tree["data"]), tree["rng"]


@pytest.mark.parametrize("kind", LOADERS)
@settings(deadline=None, max_examples=12)
@given(steps=st.integers(1, 40))
def test_restart_continues_bitwise(kind: str, steps: int) -> None:
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)
    stream = ResumableLoader(LOADERS[kind](), DataPosition(), until_epoch=None)
    train(stream, steps)
    position, rng = saved(stream)
    expected = train(stream, 15)

    torch.manual_seed(99)
    numpy.random.seed(99)
    random.seed(99)
    restarted = ResumableLoader(
        LOADERS[kind](), position, until_epoch=None, hooks=LoaderHooks(on_positioned=lambda: restore_rng(rng))
    )
    assert train(restarted, 15) == expected
    assert restarted.position.batches == steps + 15


@pytest.mark.parametrize("kind", ["shuffled, own generator", "shuffled, global generator"])
@pytest.mark.parametrize("persistent", [True, False])
def test_workers_are_seeded_alike_after_a_restart(kind: str, persistent: bool) -> None:
    """Persistent workers are seeded once in the life of a process, others in every pass."""

    def stream(position: DataPosition, **more: Any) -> ResumableLoader:
        plain = LOADERS[kind]()
        generator = plain.generator
        loader: DataLoader[Any] = DataLoader(
            DATA, 4, shuffle=True, generator=generator, num_workers=1, persistent_workers=persistent
        )
        return ResumableLoader(loader, position, until_epoch=None, **more)

    with prepared_workers():
        torch.manual_seed(0)
        first = stream(DataPosition())
        train(first, 8)  # of six in a pass
        position, rng = saved(first)
        expected = train(first, 8), torch.rand(3).tolist()

        torch.manual_seed(99)
        restarted = stream(position, hooks=LoaderHooks(on_positioned=lambda: restore_rng(rng)))
        assert (train(restarted, 8), torch.rand(3).tolist()) == expected
        del first, restarted


@pytest.mark.parametrize("kind", ["shuffled, own generator", "distributed", "in order"])
@settings(deadline=None, max_examples=12)
@given(steps=st.integers(1, 20), ahead=st.integers(1, 20))
def test_position_ahead_of_the_checkpoint(kind: str, steps: int, ahead: int) -> None:
    """A predicted restart continues after the batch of the failure step, which no checkpoint has seen."""
    stream = ResumableLoader(LOADERS[kind](), DataPosition(), until_epoch=None)
    train(stream, steps)
    position, _ = saved(stream)
    train(stream, ahead)
    expected = train(stream, 10)

    restarted = ResumableLoader(LOADERS[kind](), position.advanced(ahead), until_epoch=None)
    assert train(restarted, 10) == expected


def test_roll_back_deals_the_same_batches_again() -> None:
    stream = ResumableLoader(LOADERS["shuffled, own generator"](), DataPosition(), until_epoch=None)
    train(stream, 8)
    position, _ = saved(stream)
    expected = train(stream, 9)
    stream.seek(position)
    assert train(stream, 9) == expected


def test_one_pass_a_call() -> None:
    loader = LOADERS["shuffled, own generator"]()
    first = ResumableLoader(loader, DataPosition(), until_epoch=1)
    dealt = list(first)
    assert len(dealt) == 6
    assert (first.position.epoch, first.position.batch, first.position.batches) == (1, 0, 6)


def test_passes_count_from_the_start_of_the_run() -> None:
    """A restart in the second of three passes ends after the third."""
    loader = LOADERS["shuffled, own generator"]()
    stream = ResumableLoader(loader, DataPosition(), until_epoch=3)
    train(stream, 8)
    position, _ = saved(stream)
    rest = list(stream)
    assert len(rest) == 10
    again = ResumableLoader(LOADERS["shuffled, own generator"](), position, until_epoch=3)
    assert [value(batch) for batch in again] == [value(batch) for batch in rest]
    assert list(ResumableLoader(loader, again.position, until_epoch=3)) == []


def test_repeating_loader_is_unwrapped() -> None:
    class RepeatingLoader:
        def __init__(self, loader: Any) -> None:
            self.loader = loader

        def __iter__(self) -> Iterator[Any]:
            raise AssertionError("the inner loader is to be used")

    stream = ResumableLoader(RepeatingLoader([1, 2]), DataPosition(), until_epoch=None)
    assert [next(stream) for _ in range(5)] == [1, 2, 1, 2, 1]
    assert stream.position.epoch == 2


def test_one_shot_iterators_cannot_go_back() -> None:
    stream = ResumableLoader(iter([1, 2, 3]), DataPosition(), until_epoch=None)
    assert next(stream) == 1
    with pytest.raises(RecoveryError, match="one-shot"):
        stream.seek(DataPosition())
    assert not stream.can_seek


def test_an_empty_loader_is_not_an_endless_loop() -> None:
    with pytest.raises(RecoveryError, match="no batch"):
        next(ResumableLoader([], DataPosition(), until_epoch=None))


def test_another_shuffling_is_refused() -> None:
    stream = ResumableLoader(LOADERS["shuffled, own generator"](), DataPosition(), until_epoch=1)
    next(stream)
    with pytest.raises(RecoveryError, match="same sampler"):
        next(ResumableLoader(LOADERS["in order"](), stream.position, until_epoch=1))


@pytest.mark.parametrize("workers", [0, 1])
def test_only_batches_of_other_processes_are_waited_for(workers: int) -> None:
    waits: list[str] = []

    @contextmanager
    def waiting() -> Iterator[None]:
        waits.append("begins")
        yield
        waits.append("ends")

    loader = DataLoader(DATA, batch_size=ITEMS, num_workers=workers)
    stream = ResumableLoader(
        loader,
        DataPosition(),
        until_epoch=1,
        hooks=LoaderHooks(on_batch=lambda batch: waits.append("dealt"), waiting=waiting),
    )
    assert next(stream)[0].tolist() == list(range(ITEMS))
    assert waits == (["begins", "ends", "dealt"] if workers else ["dealt"])


def test_a_request_is_reported_for_every_batch_that_there_is() -> None:
    """Not of the end of the last pass, after which a loop still has to do what it does between two passes."""
    requested: list[int] = []
    stream = ResumableLoader(
        LOADERS["shuffled, own generator"](),
        DataPosition(),
        until_epoch=2,
        hooks=LoaderHooks(on_request=lambda: requested.append(stream.position.batches)),
    )
    assert len(list(stream)) == 12
    assert requested == [*range(6), *range(6, 12)]


@pytest.mark.parametrize("kind", ["shuffled, own generator", "shuffled, global generator", "augmented", "iterable"])
def test_a_checkpoint_before_a_pass_continues_bitwise(kind: str) -> None:
    """A loop over passes of the user's own: saved after what lies between two of them, before the next one begins."""
    torch.manual_seed(0)
    loader = LOADERS[kind]()
    first = ResumableLoader(loader, DataPosition(), until_epoch=1)
    list(first)
    torch.rand(2)
    between = replace(first.position.advanced(0), states=None)
    second = ResumableLoader(loader, between, until_epoch=2, sets_epoch=False)
    saved, states = second.saved_position(), capture_rng()
    expected = [value(batch) for batch in second]
    torch.manual_seed(1)
    again = ResumableLoader(
        LOADERS[kind](),
        saved,
        until_epoch=2,
        sets_epoch=False,
        hooks=LoaderHooks(on_positioned=lambda: restore_rng(states)),
    )
    assert [value(batch) for batch in again] == expected


def test_a_pass_goes_on_in_its_own_order_whatever_the_sampler_was_set_to(caplog: pytest.LogCaptureFixture) -> None:
    def stream(position: DataPosition, epoch: int) -> ResumableLoader:
        loader = DataLoader(DATA, batch_size=4, sampler=DistributedSampler(DATA, 2, 1, seed=3))
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        return ResumableLoader(loader, position, until_epoch=3, sets_epoch=False)

    started = stream(DataPosition(batches=6, epoch=2), 2)
    next(started)
    position = started.position
    rest = [value(batch) for batch in started]
    assert [value(batch) for batch in stream(position, 2)] == rest
    assert caplog.records == []
    assert [value(batch) for batch in stream(position, 0)] == rest
    assert "for epoch in range(recovery.epoch, epochs)" in caplog.text


class Corrupt(TensorDataset):
    """Augments each item, and cannot read those of two batches."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        if index in (5, 13):
            raise OSError(f"item {index} is corrupt")
        return (self.tensors[0][index] + torch.rand(()),)


def take(stream: ResumableLoader, batches: int) -> list[Any]:
    """As a loop that goes on without the batches that raise."""
    taken: list[Any] = []
    while len(taken) < batches:
        try:
            taken.append(next(stream))
        except OSError:
            taken.append("corrupt")
    return taken


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 9])
def test_a_batch_that_raises_counts_as_taken(workers: int, steps: int) -> None:
    def stream(position: DataPosition) -> ResumableLoader:
        dataset = Corrupt(torch.arange(ITEMS))
        return ResumableLoader(DataLoader(dataset, 4, num_workers=workers), position, until_epoch=None)

    torch.manual_seed(4)
    whole = stream(DataPosition())
    expected = take(whole, 15)
    assert [place for place, batch in enumerate(expected) if batch == "corrupt"] == [1, 3, 7, 9, 13]
    torch.manual_seed(4)
    first = stream(DataPosition())
    assert codec.same(take(first, steps), expected[:steps])
    saved, trained = first.saved_position(), torch.get_rng_state()
    torch.manual_seed(5)
    back = ResumableLoader(
        DataLoader(Corrupt(torch.arange(ITEMS)), 4, num_workers=workers),
        saved,
        until_epoch=None,
        hooks=LoaderHooks(on_positioned=lambda: torch.set_rng_state(trained)),
    )
    assert codec.same(take(back, 15 - steps), expected[steps:])


def test_it_is_said_where_nobody_knows_whether_a_batch_counts(caplog: pytest.LogCaptureFixture) -> None:
    class Stops(Stream):
        def __iter__(self) -> Iterator[int]:
            yield 0
            raise OSError("gone")

    stream = ResumableLoader(DataLoader(Stops()), DataPosition(), until_epoch=None)
    next(stream)
    with pytest.raises(OSError, match="gone"):
        next(stream)
    assert "raised OSError after batch 1. If your loop goes on without that batch" in caplog.text


def test_a_worker_that_is_waited_for_in_vain_gives_no_batch() -> None:
    error = RuntimeError("DataLoader timed out after 5 seconds")
    assert after_failure(DataLoader(DATA), DataPosition(), error).batches == 0


def test_a_pass_that_goes_on_with_other_batches_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    def stream(position: DataPosition, batch_size: int) -> ResumableLoader:
        return ResumableLoader(DataLoader(DATA, batch_size), position, until_epoch=None)

    first = stream(DataPosition(), 4)
    for _ in range(3):
        next(first)
    middle = first.saved_position()
    next(stream(middle, 4))
    for _ in range(3):
        next(first)
    next(stream(first.saved_position().advanced(0), 2))  # a pass that begins may be of others
    assert caplog.text == ""
    next(stream(middle, 2))
    assert "has 12 batches now, and had 6" in caplog.text
