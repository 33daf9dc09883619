"""A restarted loader gives exactly the batches that the uninterrupted one would have given, or is refused."""

import multiprocessing
import random
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from cpsr.errors import RecoveryError
from cpsr.state import codec, loader_state
from cpsr.state.loader import LoaderHooks, ResumableLoader
from cpsr.state.loader_workers import STATE_BYTES, pack, unpack
from cpsr.state.small_state import DataPosition, capture_rng, restore_rng
from tests.state.loaders import (
    AT_ONCE,
    BATCH,
    ITEMS,
    LOADERS,
    OFTEN,
    OWN_ORDER,
    READ,
    SKIPPED,
    WITH_WORKERS,
    WORKERS,
    Buffered,
    Items,
    OneShot,
    Seeking,
    Stateless,
    Stream,
    Written,
    items,
    noise,
    seed,
    seeded,
    shuffled,
    values,
)

SLOW_WORKERS = [pytest.param(kind, marks=() if kind in OFTEN else pytest.mark.slow) for kind in WITH_WORKERS]


def train(stream: ResumableLoader, steps: int) -> list[list[float]]:
    given = []
    for _ in range(steps):
        given.append(values(next(stream)))
        noise()  # training draws, too
    return given


def begun(make: Callable[[], Any], position: DataPosition | None = None, rng: Any = None) -> ResumableLoader:
    hooks = LoaderHooks(on_positioned=lambda: None if rng is None else restore_rng(rng))
    return ResumableLoader(make(), position or DataPosition(), until_epoch=None, hooks=hooks)


def saved(stream: ResumableLoader) -> tuple[DataPosition, dict[str, Any]]:
    """What a checkpoint keeps, as it comes back from the disk."""
    tree = codec.decode(*codec.encode({"data": stream.saved_position().advanced(0).to_tree(), "rng": capture_rng()}))
    return DataPosition(**tree["data"]), tree["rng"]


def stopped(make: Callable[[], Any], steps: int) -> DataPosition:
    stream = begun(make)
    train(stream, steps)
    return saved(stream)[0]


def check_restarts(make: Callable[[], Any], steps: list[int]) -> None:
    """As many restarts in a row as there are numbers of steps; each life ends after one of them."""
    seed(0)
    whole = begun(make)
    expected = train(whole, sum(steps) + 7)
    del whole
    seed(0)
    stream, done = begun(make), 0
    for life, more in enumerate(steps):
        assert train(stream, more) == expected[done : done + more], f"life {life}"
        done += more
        position, rng = saved(stream)
        train(stream, 2)  # lost
        seed(90 + life)
        stream = begun(make, position, rng)
    assert train(stream, 7) == expected[done:]
    assert stream.position.batches == done + 7


@pytest.mark.parametrize("kind", SKIPPED | AT_ONCE)
@settings(deadline=None, max_examples=8)
@given(steps=st.lists(st.integers(1, 13), min_size=1, max_size=3))
def test_restarts_in_a_row_continue_bitwise(kind: str, steps: list[int]) -> None:
    check_restarts(LOADERS[kind], steps)


@pytest.mark.parametrize("steps", [(4, 3, 6), pytest.param((5, 1, 11), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("kind", SLOW_WORKERS)
def test_restarts_in_a_row_continue_bitwise_with_workers(kind: str, steps: tuple[int, ...]) -> None:
    check_restarts(LOADERS[kind], list(steps))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("make", [DataLoader, StatefulDataLoader])
def test_workers_of_other_start_methods_draw_the_same_numbers_again(method: str, make: Any) -> None:
    check_restarts(lambda: shuffled(make, num_workers=WORKERS, multiprocessing_context=method), [3])


# Where the global generator decides the order of the next pass, it is not the one of the failed life.
@pytest.mark.parametrize(
    "kind",
    [
        *OWN_ORDER,
        "shuffled, own generator",
        *(kind for kind in AT_ONCE if "global" not in kind),
        "torchdata, workers",
        "torchdata, stream, workers",
    ],
)
@pytest.mark.parametrize("ahead", [1, 4])
def test_a_position_after_the_checkpoint_is_reached(kind: str, ahead: int) -> None:
    """A predicted restart, or one from an emergency dump, goes on after a batch that no checkpoint has seen."""
    seed(0)
    stream = begun(LOADERS[kind])
    train(stream, 4)
    position, rng = saved(stream)
    for _ in range(ahead):
        next(stream)
    expected = [items(next(stream)) for _ in range(5)]
    seed(99)
    again = begun(LOADERS[kind], position.advanced(ahead), rng)
    assert [items(next(again)) for _ in range(5)] == expected
    assert again.position.batches == stream.position.batches


@pytest.mark.parametrize("kind", [*SKIPPED, *AT_ONCE, "torchdata, workers"])
def test_a_roll_back_gives_the_same_batches_again(kind: str) -> None:
    seed(0)
    rng: list[Any] = []
    hooks = LoaderHooks(on_positioned=lambda: restore_rng(rng[0]))
    stream = ResumableLoader(LOADERS[kind](), DataPosition(), until_epoch=None, hooks=hooks)
    train(stream, 4)
    position, captured = saved(stream)
    rng.append(captured)
    expected = train(stream, 9)
    stream.position = replace(stream.position, loader=position.loader)  # as after a restart from it
    assert stream.can_seek
    stream.seek(position)
    assert train(stream, 9) == expected


def test_a_one_shot_iterator_without_a_saved_state_cannot_go_back() -> None:
    for stream in begun(OneShot), begun(lambda: iter([1, 2, 3])):
        next(stream)
        assert not stream.can_seek
        with pytest.raises(RecoveryError, match="one-shot"):
            stream.seek(DataPosition())


@pytest.mark.parametrize("kind", AT_ONCE)
def test_what_was_trained_is_not_read_again(kind: str) -> None:
    again = begun(LOADERS[kind], stopped(LOADERS[kind], 5))
    READ.value = 0
    batch = next(again)
    assert READ.value == len(items(batch))


@pytest.mark.parametrize("kind", ["torchdata, packed state of a stream", "torchdata, packed state"])
def test_no_pickle_of_a_loader_is_saved(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    loader_state.report_once.cache_clear()
    position = stopped(LOADERS[kind], 5)
    assert position.loader is not None
    assert "_iterator_finished" in position.loader["state"]
    assert not caplog.records


def test_a_state_that_changes_as_the_loader_goes_on_is_kept_as_it_was() -> None:
    stream = begun(lambda: StatefulDataLoader(Buffered(), BATCH))
    train(stream, 2)
    kept = stream.saved_position()
    expected = [items(next(stream)) for _ in range(3)]
    position = DataPosition(**codec.decode(*codec.encode(kept.advanced(0).to_tree())))
    again = begun(lambda: StatefulDataLoader(Buffered(), BATCH), position)
    assert [items(next(again)) for _ in range(3)] == expected


def test_a_loader_with_a_state_stays_the_users_own() -> None:
    """It is what the stream iterates over and shows: its state is of the batches taken, its workers stay."""
    loader = shuffled(num_workers=1, persistent_workers=True)
    before: ResumableLoader | None = None
    others, workers = {child.pid for child in multiprocessing.active_children()}, set[int | None]()
    for epoch in range(3):
        position = DataPosition(epoch=epoch, batches=2 * epoch)
        before = stream = ResumableLoader(loader, position, until_epoch=epoch + 1, sets_epoch=False, after=before)
        assert (stream.batch_size, stream.sampler) == (BATCH, loader.sampler)
        train(stream, 2)  # and leaves the pass
        drawn = torch.get_rng_state()
        assert loader.state_dict()["_snapshot"]["_snapshot_step"] == 2
        assert torch.equal(torch.get_rng_state(), drawn)
        workers |= {child.pid for child in multiprocessing.active_children()} - others
    assert len(workers) == 1


def test_a_million_batches_in_a_restart_reads_a_few_items() -> None:
    million = 1_000_000

    def loader() -> Any:
        return StatefulDataLoader(Stream(8 * million), BATCH, num_workers=WORKERS)

    position = stopped(loader, 1)
    assert position.loader is not None
    for worker in position.loader["state"]["_snapshot"]["_worker_snapshots"].values():
        worker["dataset_state"]["dataset"] = {"at": million // WORKERS * BATCH}
    position.loader["batches"] = position.loader["batch"] = million
    READ.value = 0
    again = begun(loader, replace(position, batches=million, batch=million))
    assert items(next(again))[0] > million
    assert again.position.batches == million + 1
    prefetched = 2 * WORKERS * BATCH
    assert READ.value <= prefetched + WORKERS * BATCH


# Passes


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
    loader, given, before = LOADERS[kind](), [], None
    hooks = LoaderHooks(on_positioned=lambda: None if rng is None else restore_rng(rng))
    for epoch in range(position.advanced(0).epoch, passes):
        stream = ResumableLoader(loader, position, until_epoch=epoch + 1, sets_epoch=False, hooks=hooks, after=before)
        for batch in stream:
            given.append(values(batch))
            noise()
            if len(given) == stop:
                return given, saved(stream)
        if draws:
            noise()
        before = stream
        position = replace(stream.position.advanced(0), states=None, loader=None, workers=None)
        if len(given) == stop - 0.5:
            stream = ResumableLoader(loader, position, until_epoch=passes, sets_epoch=False, after=before)
            return given, saved(stream)
    return given, None


@pytest.mark.parametrize("kind", [*SKIPPED, *(kind for kind in AT_ONCE if kind != "one-shot"), *SLOW_WORKERS])
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
    given, (position, rng) = in_passes(kind, DataPosition(), 4, stop, draws=draws)
    seed(99)
    rest, _ = in_passes(kind, position, 4, -1, rng, draws=draws)
    assert given + rest == expected


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
    assert train(begun(lambda: shuffled(generator=seeded(1)), position, rng), 6) == expected


def test_passes_count_from_the_start_of_the_run() -> None:
    """A restart in the second of three passes ends after the third."""
    make = LOADERS["shuffled, own generator"]
    stream = ResumableLoader(make(), DataPosition(), until_epoch=3)
    train(stream, 8)
    position, rng = saved(stream)
    rest = [values(batch) for batch in stream]
    assert len(rest) == 10
    hooks = LoaderHooks(on_positioned=lambda: restore_rng(rng))
    again = ResumableLoader(make(), position, until_epoch=3, hooks=hooks)
    assert [values(batch) for batch in again] == rest
    assert list(ResumableLoader(make(), again.position, until_epoch=3)) == []


def test_a_pass_goes_on_in_its_own_order_whatever_the_sampler_was_set_to(caplog: pytest.LogCaptureFixture) -> None:
    def stream(position: DataPosition, epoch: int) -> ResumableLoader:
        loader: Any = DataLoader(Items(), BATCH, sampler=DistributedSampler(Items(), 2, 1, seed=3))
        loader.sampler.set_epoch(epoch)
        return ResumableLoader(loader, position, until_epoch=3, sets_epoch=False)

    started = stream(DataPosition(batches=6, epoch=2), 2)
    next(started)
    position = started.position
    rest = [items(batch) for batch in started]
    assert [items(batch) for batch in stream(position, 2)] == rest
    assert caplog.records == []
    assert [items(batch) for batch in stream(position, 0)] == rest
    assert "for epoch in range(recovery.epoch, epochs)" in caplog.text


class Reshuffled(Stream):
    """Depends on the pass, as `set_epoch` tells it."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return ((item + 100 * self.epoch, drawn) for item, drawn in super().__iter__())


def test_set_epoch_reaches_the_dataset() -> None:
    def make() -> Any:
        return DataLoader(Reshuffled(), BATCH)

    stream = ResumableLoader(make(), DataPosition(), until_epoch=2)
    train(stream, 8)
    position, _ = saved(stream)
    expected = [items(batch) for batch in stream]
    assert expected[-1] == [120, 121, 122]
    assert [items(batch) for batch in ResumableLoader(make(), position, until_epoch=2)] == expected


def test_repeating_loader_is_unwrapped() -> None:
    class RepeatingLoader:
        def __init__(self, loader: Any) -> None:
            self.loader = loader

        def __iter__(self) -> Iterator[Any]:
            raise AssertionError("the inner loader is to be used")

    stream = begun(lambda: RepeatingLoader([1, 2]))
    assert [next(stream) for _ in range(5)] == [1, 2, 1, 2, 1]
    assert stream.position.epoch == 2


# States that cannot be saved, or are not taken


def test_of_a_loader_that_another_thread_reads_ahead_no_state_is_taken() -> None:
    """It may be in the middle of a batch."""
    stream = begun(Written)
    with ThreadPoolExecutor(1) as ahead:
        ahead.submit(next, stream).result()
    assert stream.saved_position().loader is None
    assert stream.saved_position().batches == 1


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
    ("make", "why"), [(Clumsy, "builtins.set is not plain data"), (Failing, "ValueError"), (Asking, "TypeError")]
)
@pytest.mark.parametrize("steps", [3, 8])
def test_a_loader_whose_state_cannot_be_saved_is_named_once_and_skipped(
    make: Any, why: str, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    loader_state.report_once.cache_clear()
    stream = begun(make)
    train(stream, steps)
    position, rng = saved(stream)
    saved(stream)
    assert position.loader is None
    (message,) = [record.message for record in caplog.records]
    assert re.search(why, message)
    expected = train(stream, 5)
    assert train(begun(make, position, rng), 5) == expected


def test_the_state_of_a_hugging_face_dataset_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    loader_state.report_once.cache_clear()
    kind = type("IterableDataset", (Stream,), {"__module__": "datasets.iterable_dataset"})
    stream = begun(lambda: DataLoader(kind(), BATCH))
    train(stream, 3)
    position, rng = saved(stream)
    assert position.loader is None
    assert "leaves out what is in a shuffle buffer" in caplog.text
    expected = train(stream, 5)
    assert train(begun(lambda: DataLoader(kind(), BATCH), position, rng), 5) == expected


def test_a_loader_that_does_not_take_its_state_is_an_error_that_says_what_to_do() -> None:
    position = stopped(lambda: StatefulDataLoader(Stream(), BATCH), 2)
    assert position.loader is not None
    del position.loader["state"]["_num_yielded"]
    with pytest.raises(RecoveryError, match=r"does not take .* after batch 2 .*_num_yielded.*give resume"):
        next(begun(lambda: StatefulDataLoader(Stream(), BATCH), position))


def test_other_workers_may_load_a_map_style_dataset_and_no_stream() -> None:
    def loader(workers: int) -> Any:
        return StatefulDataLoader(Items(), 1, sampler=DistributedSampler(Items(), 2, 1, seed=3), num_workers=workers)

    stream = begun(lambda: loader(2))
    train(stream, 3)
    position, _ = saved(stream)
    expected = [items(next(stream)) for _ in range(5)]
    again = begun(lambda: loader(1), position)
    assert [items(next(again)) for _ in range(5)] == expected
    position = stopped(LOADERS["torchdata, stream, workers"], 3)
    with pytest.raises(RecoveryError, match=r"0 workers, and had 2 when its state .* start the job with num_workers=2"):
        next(begun(lambda: StatefulDataLoader(Stream(), BATCH), position))


def test_other_workers_deal_again_by_a_sampler_whose_state_is_not_used() -> None:
    def loader(workers: int) -> Any:
        return StatefulDataLoader(Items(), BATCH, sampler=Seeking(), num_workers=workers)

    stream = begun(lambda: loader(2))
    train(stream, 8)
    position, _ = saved(stream)
    expected = [items(next(stream)) for _ in range(7)]
    again = begun(lambda: loader(1), position)
    assert [items(next(again)) for _ in range(7)] == expected


def test_a_loader_without_a_state_is_skipped_to_the_place_of_a_saved_one() -> None:
    position = stopped(lambda: StatefulDataLoader(Stream(), BATCH), 3)
    assert items(next(begun(lambda: DataLoader(Items(), BATCH), position))) == list(range(3 * BATCH, 4 * BATCH))


def test_another_shuffling_and_an_empty_loader_are_refused() -> None:
    stream = begun(LOADERS["shuffled, own generator"])
    next(stream)
    with pytest.raises(RecoveryError, match="same sampler"):
        next(begun(LOADERS["in order"], stream.position))
    with pytest.raises(RecoveryError, match="no batch"):
        next(begun(list))


# Errors, other lengths, and what is called back


def test_a_stream_whose_loader_has_raised_gives_no_more_batches() -> None:
    class Stops(Stateless):
        def __iter__(self) -> Iterator[int]:
            yield 0
            raise OSError("gone")

    stream = begun(lambda: DataLoader(Stops()))
    next(stream)
    with pytest.raises(OSError, match="gone"):
        next(stream)
    with pytest.raises(RecoveryError, match=r"raised OSError after batch 1.* catch the error in the dataset"):
        next(stream)


def test_a_pass_that_goes_on_with_other_batches_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    def make(batch_size: int) -> Callable[[], Any]:
        return lambda: DataLoader(Items(), batch_size)

    middle = stopped(make(4), 3)
    next(begun(make(4), middle))
    next(begun(make(2), stopped(make(4), 6)))  # a pass that begins may be of others
    assert caplog.text == ""
    next(begun(make(2), middle))
    assert "has 12 batches now, and had 6" in caplog.text


@pytest.mark.parametrize("workers", [0, 1])
def test_only_batches_of_other_processes_are_waited_for_and_each_is_asked_for(workers: int) -> None:
    seen: list[str] = []

    @contextmanager
    def waiting() -> Iterator[None]:
        seen.append("begins")
        yield
        seen.append("ends")

    hooks = LoaderHooks(
        on_request=lambda expected: seen.extend(["request"] * expected),
        on_batch=lambda batch: seen.append("given"),
        waiting=waiting,
    )
    loader = DataLoader(Items(), ITEMS, num_workers=workers)
    assert len(list(ResumableLoader(loader, DataPosition(), until_epoch=1, hooks=hooks))) == 1
    waited = ["request", "begins", "ends", "given"] if workers else ["request", "given"]
    assert seen[: len(waited)] == waited
    assert seen.count("request") == 1  # not at the end of the last pass, after which a loop has more to do


def test_the_bytes_of_random_states_are_all_of_them() -> None:
    seed(3)
    random.gauss(0, 1)  # keeps a second number
    packed = pack()
    expected = [noise() for _ in range(3)]
    unpack(packed)
    assert [noise() for _ in range(3)] == expected
    assert len(packed) == STATE_BYTES
    torch.manual_seed(0)
