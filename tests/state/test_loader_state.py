"""A loader that has a state continues from it: the same batches, the same random numbers, and nothing loaded twice."""

import random
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import Value
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from cpsr.errors import RecoveryError
from cpsr.state import codec, loader_state
from cpsr.state.loader import LoaderHooks, ResumableLoader
from cpsr.state.loader_workers import STATE_BYTES, pack, unpack
from cpsr.state.scalars import DataPosition, capture_rng, restore_rng
from tests.state.test_loader import Permuted

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


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shuffled(make: Any = StatefulDataLoader, **more: Any) -> Any:
    return make(Items(), BATCH, shuffle=True, **more)


# Loaders that go on from their state, reading nothing twice.
AT_ONCE: dict[str, Callable[[], Any]] = {
    "written": Written,
    "one-shot": OneShot,
    "stream": lambda: DataLoader(Stream(), BATCH),
    "stream, unbatched": lambda: DataLoader(Stream(), None),
    "torchdata, in order": lambda: StatefulDataLoader(Items(), BATCH),
    "torchdata, shuffled": shuffled,
    "torchdata, one generator for all": lambda: shuffled(generator=seeded(1)),
    "torchdata, unbatched": lambda: StatefulDataLoader(Items(), None, shuffle=True),
    "torchdata, replacement": lambda: StatefulDataLoader(
        Items(), BATCH, sampler=RandomSampler(range(ITEMS), replacement=True, generator=seeded(2))
    ),
    "torchdata, global generator": lambda: StatefulDataLoader(Items(), BATCH, sampler=RandomSampler(range(ITEMS))),
    "torchdata, distributed": lambda: StatefulDataLoader(
        Items(), BATCH, sampler=DistributedSampler(Items(), 2, 1, seed=3)
    ),
    "torchdata, its own distributed": lambda: StatefulDataLoader(
        Items(), BATCH, sampler=StatefulDistributedSampler(Items(), 2, 1, seed=3)
    ),
    "torchdata, stream": lambda: StatefulDataLoader(Stream(), BATCH),
}
WITH_WORKERS: dict[str, Callable[[], Any]] = {
    "torchdata, workers": lambda: shuffled(num_workers=WORKERS),
    "torchdata, one generator for all, workers": lambda: shuffled(num_workers=WORKERS, generator=seeded(1)),
    "torchdata, persistent workers": lambda: shuffled(num_workers=WORKERS, persistent_workers=True),
    "torchdata, rare snapshots": lambda: shuffled(num_workers=WORKERS, snapshot_every_n_steps=4),
    "torchdata, global generator, workers": lambda: StatefulDataLoader(
        Items(), BATCH, sampler=RandomSampler(range(ITEMS)), num_workers=WORKERS
    ),
    "torchdata, distributed, workers": lambda: StatefulDataLoader(
        Items(), BATCH, sampler=DistributedSampler(Items(), 2, 1, seed=3), num_workers=WORKERS
    ),
    "torchdata, stream, workers": lambda: StatefulDataLoader(Stream(), BATCH, num_workers=WORKERS),
    "torchdata, stream, rare snapshots": lambda: StatefulDataLoader(
        Stream(), BATCH, num_workers=WORKERS, snapshot_every_n_steps=3
    ),
    "torchdata, stream without a state": lambda: StatefulDataLoader(Stateless(), BATCH, num_workers=WORKERS),
    "torchdata, custom sampler": lambda: StatefulDataLoader(
        Items(), BATCH, sampler=Permuted("numpy"), num_workers=WORKERS
    ),
    "shuffled, workers": lambda: shuffled(DataLoader, num_workers=WORKERS, generator=seeded(4)),
    "shuffled, more workers": lambda: shuffled(DataLoader, num_workers=3),
    "shuffled, persistent workers": lambda: shuffled(DataLoader, num_workers=WORKERS, persistent_workers=True),
    "custom sampler, workers": lambda: DataLoader(Items(), BATCH, sampler=Permuted("numpy"), num_workers=WORKERS),
    "stream, workers": lambda: DataLoader(Stream(), BATCH, num_workers=WORKERS),
}
LOADERS = AT_ONCE | WITH_WORKERS
OFTEN = (
    "torchdata, workers",
    "torchdata, persistent workers",
    "torchdata, stream, workers",
    "shuffled, persistent workers",
)


def seed(number: int) -> None:
    torch.manual_seed(number)
    numpy.random.seed(number)
    random.seed(number)


def values(batch: Any) -> list[float]:
    if isinstance(batch, torch.Tensor):
        return [float(item) for item in batch.reshape(-1)]
    return [one for part in batch for one in values(part)] if isinstance(batch, list | tuple) else [float(batch)]


def train(stream: ResumableLoader, steps: int) -> list[list[float]]:
    dealt = []
    for _ in range(steps):
        dealt.append(values(next(stream)))
        noise()  # training draws, too
    return dealt


def saved(stream: ResumableLoader) -> tuple[DataPosition, dict[str, Any]]:
    """What a checkpoint keeps, as it comes back from the disk."""
    tree = codec.decode(*codec.encode({"data": stream.saved_position().advanced(0).to_tree(), "rng": capture_rng()}))
    return DataPosition(**tree["data"]), tree["rng"]


def restarted(kind: str, position: DataPosition, rng: dict[str, Any], number: int) -> ResumableLoader:
    """The stream of the next life."""
    seed(number)
    hooks = LoaderHooks(on_positioned=lambda: restore_rng(rng))
    return ResumableLoader(LOADERS[kind](), position, until_epoch=None, hooks=hooks)


def check_restarts(kind: str, steps: tuple[int, ...]) -> None:
    """As many restarts in a row as there are numbers of steps; each life ends after one of them."""
    seed(0)
    whole = ResumableLoader(LOADERS[kind](), DataPosition(), until_epoch=None)
    expected = train(whole, sum(steps) + 7)
    del whole
    seed(0)
    stream, done = ResumableLoader(LOADERS[kind](), DataPosition(), until_epoch=None), 0
    for life, more in enumerate(steps):
        assert train(stream, more) == expected[done : done + more], f"life {life}"
        done += more
        position, rng = saved(stream)
        train(stream, 2)  # lost
        stream = restarted(kind, position, rng, 90 + life)
    assert train(stream, 7) == expected[done:]
    assert stream.position.batches == done + 7


STEPS = [(1, 2, 3), (4, 3, 6), (6, 6, 1), (5, 1, 11)]


@pytest.mark.parametrize("steps", STEPS, ids=str)
@pytest.mark.parametrize("kind", AT_ONCE)
def test_three_restarts_in_a_row_continue_bitwise(kind: str, steps: tuple[int, ...]) -> None:
    check_restarts(kind, steps)


@pytest.mark.parametrize("steps", [*STEPS[:2], *(pytest.param(steps, marks=pytest.mark.slow) for steps in STEPS[2:])])
@pytest.mark.parametrize("kind", WITH_WORKERS)
def test_three_restarts_in_a_row_continue_bitwise_with_workers(kind: str, steps: tuple[int, ...]) -> None:
    check_restarts(kind, steps)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("make", [DataLoader, StatefulDataLoader])
def test_workers_of_other_start_methods_draw_the_same_numbers_again(method: str, make: Any) -> None:
    """Read by a dataset of this module, which they import."""
    LOADERS["other"] = lambda: shuffled(make, num_workers=WORKERS, multiprocessing_context=method)
    try:
        check_restarts("other", (3,))
    finally:
        del LOADERS["other"]


@pytest.mark.parametrize("ahead", [1, 4])
@pytest.mark.parametrize(
    "kind",
    # Where the global generator decides the order of the next pass, it is not the one of the failed life.
    [*(kind for kind in AT_ONCE if "global" not in kind), "torchdata, workers", "torchdata, stream, workers"],
)
def test_a_position_after_the_checkpoint_is_reached_from_its_state(kind: str, ahead: int) -> None:
    """A predicted restart, or one from an emergency dump, goes on after a batch that no checkpoint has seen."""
    seed(0)
    stream = ResumableLoader(LOADERS[kind](), DataPosition(), until_epoch=None)
    train(stream, 4)
    position, rng = saved(stream)
    for _ in range(ahead):
        next(stream)
    expected = [items(next(stream)) for _ in range(5)]
    again = restarted(kind, position.advanced(ahead), rng, 99)
    assert [items(next(again)) for _ in range(5)] == expected
    assert again.position.batches == stream.position.batches


def items(batch: Any) -> list[float]:
    """Without what was drawn."""
    flat = values(batch)
    return [one for one in flat if one == int(one)]


@pytest.mark.parametrize("kind", [*AT_ONCE, "torchdata, workers", "torchdata, persistent workers"])
def test_a_roll_back_goes_back_by_the_state(kind: str) -> None:
    seed(0)
    stream = ResumableLoader(
        LOADERS[kind](), DataPosition(), until_epoch=None, hooks=LoaderHooks(on_positioned=lambda: restore_rng(rng[0]))
    )
    train(stream, 4)
    position, captured = saved(stream)
    rng = [captured]
    expected = train(stream, 9)
    stream.position = replace(stream.position, loader=position.loader)  # as after a restart from it
    assert stream.can_seek
    stream.seek(position)
    assert train(stream, 9) == expected


def test_a_one_shot_iterator_without_a_saved_state_cannot_go_back() -> None:
    stream = ResumableLoader(OneShot(), DataPosition(), until_epoch=None)
    next(stream)
    assert not stream.can_seek
    with pytest.raises(RecoveryError, match="one-shot"):
        stream.seek(DataPosition())


@pytest.mark.parametrize("kind", AT_ONCE)
def test_what_was_trained_is_not_read_again(kind: str) -> None:
    seed(0)
    stream = ResumableLoader(LOADERS[kind](), DataPosition(), until_epoch=None)
    train(stream, 5)
    position, rng = saved(stream)
    again = restarted(kind, position, rng, 99)
    READ.value = 0
    batch = next(again)
    assert READ.value == len(items(batch))


def test_a_million_batches_in_a_restart_reads_a_few_items() -> None:
    million = 1_000_000

    def loader() -> Any:
        return StatefulDataLoader(Stream(8 * million), BATCH, num_workers=WORKERS)

    stream = ResumableLoader(loader(), DataPosition(), until_epoch=None)
    next(stream)
    position, _ = saved(stream)
    assert position.loader is not None
    for worker in position.loader["state"]["_snapshot"]["_worker_snapshots"].values():
        worker["dataset_state"]["dataset"] = {"at": million // WORKERS * BATCH}
    position.loader["batches"] = position.loader["batch"] = million
    position = replace(position, batches=million, batch=million)
    READ.value = 0
    again = ResumableLoader(loader(), position, until_epoch=None)
    assert items(next(again))[0] > million
    assert again.position.batches == million + 1
    prefetched = 2 * WORKERS * BATCH
    assert READ.value <= prefetched + WORKERS * BATCH


def in_passes(
    kind: str, position: DataPosition, passes: int, stop: float, rng: dict[str, Any] | None = None, draws: bool = True
) -> Any:
    """A loop over passes of the user's own: every pass is a stream of its own.

    Args:
        kind: of the loader.
        position: where to begin.
        passes: of the whole run.
        stop: after so many batches; with a half, after what follows on a pass.
        rng: saved random states.
        draws: random numbers are drawn between two passes, as in an evaluation.
    """
    loader, dealt, before = LOADERS[kind](), [], None
    hooks = LoaderHooks(on_positioned=lambda: None if rng is None else restore_rng(rng))
    for epoch in range(position.advanced(0).epoch, passes):
        stream = ResumableLoader(loader, position, until_epoch=epoch + 1, sets_epoch=False, hooks=hooks, after=before)
        for batch in stream:
            dealt.append(values(batch))
            noise()
            if len(dealt) == stop:
                return dealt, saved(stream)
        if draws:
            noise()
        before = stream
        position = replace(stream.position.advanced(0), states=None, loader=None, workers=None)
        if len(dealt) == stop - 0.5:
            stream = ResumableLoader(loader, position, until_epoch=passes, sets_epoch=False, after=before)
            return dealt, saved(stream)
    return dealt, None


@pytest.mark.parametrize(
    "kind",
    [
        *(kind for kind in AT_ONCE if kind != "one-shot"),
        *(pytest.param(kind, marks=() if kind in OFTEN else pytest.mark.slow) for kind in WITH_WORKERS),
    ],
)
@pytest.mark.parametrize("where", ["inside", "between", "last batch"])
def test_passes_of_a_loop_of_the_users_own(kind: str, where: str) -> None:
    """Stopped in the second of four passes."""
    draws = where != "last batch"  # SIGTERM came there: what follows a pass is not repeated
    seed(0)
    expected, _ = in_passes(kind, DataPosition(), 4, -1, draws=draws)
    length = len(expected) // 4
    assert len(expected) == 4 * length
    seed(0)
    stop = {"inside": length + 2, "between": 2 * length + 0.5, "last batch": 2 * length}[where]
    dealt, (position, rng) = in_passes(kind, DataPosition(), 4, stop, draws=draws)
    seed(99)
    rest, _ = in_passes(kind, position, 4, -1, rng, draws=draws)
    assert dealt + rest == expected


def test_a_pass_that_the_loop_left_early_is_over_after_a_restart_too() -> None:
    """The loader was not at its end: its state is not that of the next pass."""
    loader = shuffled(generator=seeded(1))
    first = ResumableLoader(loader, DataPosition(), until_epoch=1, sets_epoch=False)
    train(first, 2)
    left = replace(first.position, epoch=1, batch=0, states=None)
    second = ResumableLoader(loader, left, until_epoch=2, sets_epoch=False)
    position, rng = saved(second)
    assert position.loader is None
    expected = train(second, 6)
    hooks = LoaderHooks(on_positioned=lambda: restore_rng(rng))
    again = ResumableLoader(shuffled(generator=seeded(1)), position, until_epoch=2, sets_epoch=False, hooks=hooks)
    assert train(again, 6) == expected


def test_of_a_loader_that_another_thread_reads_ahead_no_state_is_taken() -> None:
    """It may be in the middle of a batch."""
    stream = ResumableLoader(Written(), DataPosition(), until_epoch=None)
    with ThreadPoolExecutor(1) as ahead:
        ahead.submit(next, stream).result()
    assert stream.saved_position().loader is None
    assert stream.saved_position().batches == 1


class Kept(Written):
    """Changes the state that was loaded."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        state.clear()


def test_a_state_can_be_loaded_twice() -> None:
    stream = ResumableLoader(Kept(), DataPosition(), until_epoch=None)
    next(stream)
    position, _ = saved(stream)
    again = ResumableLoader(Kept(), position, until_epoch=None)
    expected = [items(next(again)) for _ in range(3)]
    again.seek(position)
    assert [items(next(again)) for _ in range(3)] == expected


class Clumsy(Written):
    """Its state is no plain data."""

    def state_dict(self) -> dict[str, Any]:
        return {"where": {"passes": self.passes, "at": {self.at}}}


class Failing(Written):
    def state_dict(self) -> dict[str, Any]:
        raise ValueError("not now")


class Asking(Written):
    """Its `state_dict` needs to be told something, as those of some streaming datasets."""

    def state_dict(self, num_samples: int) -> dict[str, Any]:  # type: ignore[override]
        raise AssertionError(num_samples)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            Clumsy,
            r"state of the Clumsy is not saved: cannot save state_dict\(\).where.at: builtins.set is not plain data",
        ),
        (Failing, r"state_dict\(\) of the Failing raised ValueError: not now"),
        (Asking, None),
    ],
)
def test_a_loader_whose_state_cannot_be_saved_is_named_once_and_skipped(
    make: Any, why: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    loader_state.report_once.cache_clear()
    stream = ResumableLoader(make(), DataPosition(), until_epoch=None)
    train(stream, 3)
    position, rng = saved(stream)
    saved(stream)
    assert position.loader is None
    messages = [record.message for record in caplog.records]
    assert len(messages) == (why is not None)
    assert why is None or re.search(why, messages[0])
    expected = train(stream, 5)
    hooks = LoaderHooks(on_positioned=lambda: restore_rng(rng))
    assert train(ResumableLoader(make(), position, until_epoch=None, hooks=hooks), 5) == expected


def stopped(make: Callable[[], Any], steps: int) -> DataPosition:
    stream = ResumableLoader(make(), DataPosition(), until_epoch=None)
    train(stream, steps)
    return saved(stream)[0]


def test_a_loader_that_does_not_take_its_state_is_an_error_that_says_what_to_do() -> None:
    position = stopped(lambda: StatefulDataLoader(Items(), BATCH), 2)
    assert position.loader is not None
    del position.loader["state"]["_num_yielded"]
    with pytest.raises(RecoveryError, match=r"does not take .* after batch 2 .*_num_yielded.*give resume"):
        next(ResumableLoader(StatefulDataLoader(Items(), BATCH), position, until_epoch=None))


def test_other_workers_may_load_a_map_style_dataset(caplog: pytest.LogCaptureFixture) -> None:
    loader_state.report_once.cache_clear()
    order: Any = DistributedSampler(Items(), 2, 1, seed=3)
    make: Any = lambda workers: StatefulDataLoader(Items(), 1, sampler=order, num_workers=workers)  # noqa: E731
    stream = ResumableLoader(make(2), DataPosition(), until_epoch=None)
    train(stream, 3)
    position, _ = saved(stream)
    expected = [items(next(stream)) for _ in range(5)]
    again = ResumableLoader(make(1), position, until_epoch=None)
    assert [items(next(again)) for _ in range(5)] == expected
    assert "another num_workers" in caplog.text


def test_other_workers_cannot_divide_a_stream_anew() -> None:
    position = stopped(WITH_WORKERS["torchdata, stream, workers"], 3)
    with pytest.raises(RecoveryError, match=r"0 workers, and had 2 when its state .* start the job with num_workers=2"):
        next(ResumableLoader(StatefulDataLoader(Stream(), BATCH), position, until_epoch=None))


def test_a_loader_without_a_state_is_skipped_to_the_place_of_a_saved_one(caplog: pytest.LogCaptureFixture) -> None:
    loader_state.report_once.cache_clear()
    position = stopped(lambda: StatefulDataLoader(Items(), BATCH), 3)
    again = ResumableLoader(DataLoader(Items(), BATCH), position, until_epoch=None)
    assert items(next(again)) == list(range(3 * BATCH, 4 * BATCH))
    assert "the checkpoint has a state of the data loader, this DataLoader takes none" in caplog.text


@pytest.mark.parametrize("kind", ["written", "stream", "torchdata, stream"])
def test_a_state_without_tensors_outlives_a_checkpoint_of_weights_alone(kind: str) -> None:
    position = stopped(LOADERS[kind], 4)
    stream = ResumableLoader(LOADERS[kind](), DataPosition(), until_epoch=None)
    expected = [items(next(stream)) for _ in range(9)][4:]
    data, _ = codec.encode(position.to_tree())
    left = DataPosition(**codec.decode_without_tensors(data)).without_random_states()
    again = ResumableLoader(LOADERS[kind](), left, until_epoch=None)
    assert [items(next(again)) for _ in range(5)] == expected


def test_a_state_with_tensors_does_not() -> None:
    data, _ = codec.encode(stopped(shuffled, 4).to_tree())
    left = DataPosition(**codec.decode_without_tensors(data)).without_random_states()
    with pytest.raises(RecoveryError, match=r"the order of pass 0 is lost"):
        next(ResumableLoader(shuffled(), left, until_epoch=None))


class Reshuffled(Stream):
    """Depends on the pass, as `set_epoch` tells it."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return ((item + 100 * self.epoch, drawn) for item, drawn in super().__iter__())


def test_set_epoch_reaches_the_dataset() -> None:
    stream = ResumableLoader(DataLoader(Reshuffled(), BATCH), DataPosition(), until_epoch=2)
    train(stream, 8)
    position, _ = saved(stream)
    expected = [items(batch) for batch in stream]
    assert expected[-1] == [120, 121, 122]
    again = ResumableLoader(DataLoader(Reshuffled(), BATCH), position, until_epoch=2)
    assert [items(batch) for batch in again] == expected


def test_the_bytes_of_random_states_are_all_of_them() -> None:
    seed(3)
    random.gauss(0, 1)  # keeps a second number
    packed = pack()
    expected = [noise() for _ in range(3)]
    unpack(packed)
    assert [noise() for _ in range(3)] == expected
    assert len(packed) == STATE_BYTES
