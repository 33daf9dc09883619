"""The user's data loader, positioned after the last trained batch.

Random states at the start of a pass decide the order of a shuffled loader: those of the loader's and the sampler's own
generators, else the global ones of torch, NumPy and Python. They are captured at the start of every pass, and restored
before a pass is continued, so that the sampler yields the same batches again. The sampler skips batches that were
already trained, without loading them.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeGuard

import torch
from torch.utils.data import DataLoader, IterableDataset

from cpsr.errors import RecoveryError
from cpsr.state.codec import same
from cpsr.state.loader_workers import seeding_generator
from cpsr.state.scalars import DataPosition, capture_host_rng, restore_host_rng

__all__ = ["LoaderHooks", "ResumableLoader", "is_repeating"]

logger = logging.getLogger(__name__)


_DRAWN = ("host", "generators")  # of what is captured at the start of a pass: random states


@dataclass(frozen=True)
class LoaderHooks:
    """Callbacks of a `ResumableLoader`.

    Attributes:
        on_positioned: called after the loader was moved to a saved position, before the next batch is fetched. It
            restores the random states of training, since positioning draws from them.
        on_batch: called with every batch before it is returned.
        on_request: called before a batch is fetched; not at the known end of the last pass.
        waiting: entered while a batch is fetched from a DataLoader's worker processes: the thread then waits. Without
            workers the thread loads the batch itself, and of other iterables it is not known whether they wait.
    """

    on_positioned: Callable[[], object] = lambda: None
    on_batch: Callable[[Any], None] = lambda batch: None
    on_request: Callable[[], None] = lambda: None
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext


NO_HOOKS = LoaderHooks()


class ResumableLoader(Iterator[Any]):
    """Iterates over a loader from a given position, and can be moved to another one.

    Args:
        loader: a `torch.utils.data.DataLoader`, or any iterable that yields the same batches in every process. A
            one-shot iterator works, but cannot be moved back.
        position: the start.
        until_epoch: passes over the data, counted from the start of the run, after which the iteration ends; None
            repeats forever.
        sets_epoch: whether to call `set_epoch` of the samplers at every pass; False if the user's own loop over passes
            does that.
        hooks: callbacks.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        position: DataPosition,
        *,
        until_epoch: int | None,
        sets_epoch: bool = True,
        hooks: LoaderHooks = NO_HOOKS,
    ) -> None:
        given = loader
        if is_repeating(loader):
            repeating: Any = loader
            loader = repeating.loader
        self.loader = given
        self._loader = loader
        self._length = _length(loader)
        self._generators = _generators(loader)
        self._hooks = hooks
        self._waiting = hooks.waiting if isinstance(loader, DataLoader) and loader.num_workers > 0 else nullcontext
        self._iterator: Iterator[Any] | None = None
        self.position = self._normalised(position)
        self._moved = position.states is not None
        self._until_epoch = until_epoch
        self._sets_epoch = sets_epoch

    @property
    def can_seek(self) -> bool:
        """Whether the loader can be restarted from its beginning in this process."""
        return not isinstance(self._loader, Iterator) or hasattr(self._loader, "__len__")

    def seek(self, position: DataPosition) -> None:
        """Continue from `position`: the next batch is the one after it.

        Raises:
            RecoveryError: the loader is a one-shot iterator, which cannot be restarted.
        """
        if not self.can_seek:
            raise RecoveryError(
                f"the data iterator cannot go back to batch {position.batches}: it is a one-shot iterator; "
                "give resume() the DataLoader itself"
            )
        self._iterator = None
        self._moved = position.states is not None
        self.position = self._normalised(position)

    def __iter__(self) -> "ResumableLoader":
        return self

    def __next__(self) -> Any:
        while True:
            if self._until_epoch is not None and self.position.epoch >= self._until_epoch:
                raise StopIteration
            if not self._pass_is_over():
                self._hooks.on_request()
            if self._iterator is None:
                self._iterator = self._open()
            try:
                with self._waiting():
                    batch = next(self._iterator)
            except StopIteration:
                self._end_pass()
                continue
            position = self.position
            self.position = position.after_a_batch()
            self._hooks.on_batch(batch)
            return batch

    def _pass_is_over(self) -> bool:
        """Whether the current pass has no batches left; the loader may draw random numbers at its end."""
        return self._length is not None and self.position.batch >= self._length

    def saved_position(self) -> DataPosition:
        """The position for a checkpoint: before the first batch of a pass, with the random states that decide it."""
        if self._iterator is None and self.position.states is None and self.position.batches:
            return replace(self.position, states=self._capture(), states_epoch=self.position.epoch)
        return self.position

    def _normalised(self, position: DataPosition) -> DataPosition:
        """A position at the end of a pass becomes the start of the next one."""
        return replace(position, batches_per_epoch=self._length).advanced(0)

    def _end_pass(self) -> None:
        if self.position.batch == 0:
            raise RecoveryError(
                f"the data loader gave no batch in pass {self.position.epoch}: it is empty or already used up"
            )
        self._iterator = None
        self.position = replace(self.position, epoch=self.position.epoch + 1, batch=0)

    def _open(self) -> Iterator[Any]:
        position = self.position
        moved, self._moved = self._moved, False
        if moved and position.lacks_random_states:
            return self._open_without_states(position)
        if moved and position.states is not None:
            self._restore(position.states)
            if position.states_epoch == position.epoch:
                self._restore_epoch(position.states.get("epochs", []))
            if position.states_epoch == position.epoch and position.batch:
                iterator = self._pass(position.epoch, skip=position.batch)
                self._hooks.on_positioned()
                return iterator
            for epoch in range(position.states_epoch, position.epoch):
                self._walk(epoch)
            self._hooks.on_positioned()
        self.position = replace(position, states=self._capture(), states_epoch=position.epoch)
        return self._pass(position.epoch, skip=position.batch if moved else 0)

    def _open_without_states(self, position: DataPosition) -> Iterator[Any]:
        """Continue where the random states of the pass are lost."""
        states = self._capture()
        iterator = self._undrawn_rest(position, states) if position.batch else self._pass(position.epoch, skip=0)
        self._hooks.on_positioned()
        self.position = replace(position, states=states, states_epoch=position.epoch)
        return iterator

    def _undrawn_rest(self, position: DataPosition, states: dict[str, Any]) -> Iterator[Any]:
        """The rest of a pass, if the batches before it are not drawn from random states.

        Raises:
            RecoveryError: they are, or that cannot be seen: some data would be repeated, and other left out.
        """
        if position.states is not None and position.states_epoch == position.epoch:
            self._restore_epoch(position.states["epochs"])
        plain, iterator = _is_plain(self._loader), None
        if _is_plain(self._loader):
            self._set_epoch(position.epoch)
            next(islice(_index_sampler(self._loader), position.batch - 1, None), None)
        elif not isinstance(self._loader, DataLoader):
            iterator = self._pass(position.epoch, position.batch)
        drawn = not same([states[name] for name in _DRAWN], [self._capture()[name] for name in _DRAWN])
        # Other DataLoaders draw a seed for each pass, which their data may depend on.
        if drawn or (iterator is None and not plain):
            raise RecoveryError(
                f"the order of pass {position.epoch} is lost: the data loader draws it from random states, and the "
                f"checkpoint that training would go on from keeps the weights alone. After {position.batch} batches of "
                "that pass, some data would be repeated and other left out, so nothing was trained. Give resume() a "
                "loader whose order is its own, as that of a DistributedSampler; or start a new run from the weights, "
                "which 'cpsr export --format safetensors' writes"
            )
        return self._pass(position.epoch, position.batch) if iterator is None else iterator

    def _pass(self, epoch: int, skip: int) -> Iterator[Any]:
        self._set_epoch(epoch)
        if skip == 0:
            return iter(self._loader)
        if _is_plain(self._loader):
            return _skipped(self._loader, skip)
        iterator = iter(self._loader)
        next(islice(iterator, skip - 1, skip), None)
        return iterator

    def _walk(self, epoch: int) -> None:
        """Run through a whole pass without loading it, to bring the generators to their states after it."""
        self._set_epoch(epoch)
        if not _is_plain(self._loader):
            for _ in self._loader:
                pass
            return
        # The first draw is the base seed of the loader's workers, as in DataLoader's own iterator.
        torch.empty((), dtype=torch.int64).random_(generator=seeding_generator(self._loader))
        for _ in _index_sampler(self._loader):
            pass

    def _set_epoch(self, epoch: int) -> None:
        if not self._sets_epoch:
            return
        for sampler in _samplers(self._loader):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def _capture(self) -> dict[str, Any]:
        generators = [item.get_state() for item in self._generators]
        return {"host": capture_host_rng(), "generators": generators, "epochs": self._epochs()}

    def _epochs(self) -> list[int]:
        """The epochs last set with `set_epoch`, for samplers that expose them."""
        samplers = [sampler for sampler in _samplers(self._loader) if hasattr(sampler, "set_epoch")]
        return [sampler.epoch for sampler in samplers if isinstance(getattr(sampler, "epoch", None), int)]

    def _restore_epoch(self, saved: list[int]) -> None:
        """Continue a pass in its own order, even if the user's loop has set another epoch."""
        now = self._epochs()
        if self._sets_epoch or now == saved or len(set(saved)) != 1:
            return
        logger.warning(
            "the sampler is at epoch %s, but the pass to continue began with set_epoch(%d), which is restored. "
            "Begin your own loop over passes at recovery.epoch: for epoch in range(recovery.epoch, epochs)",
            now[0] if now else None,
            saved[0],
        )
        for sampler in _samplers(self._loader):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(saved[0])

    def _restore(self, states: dict[str, Any]) -> None:
        if len(states["generators"]) != len(self._generators):
            raise RecoveryError(
                f"the data loader has {len(self._generators)} random generators, the saved position "
                f"{len(states['generators'])}: shuffle with the same sampler and generator as the run did"
            )
        restore_host_rng(states["host"])
        for generator, state in zip(self._generators, states["generators"], strict=True):
            generator.set_state(state)


def is_repeating(loader: Any) -> bool:
    """Whether this is DeepSpeed's RepeatingLoader, which hides the end of a pass."""
    return type(loader).__name__ == "RepeatingLoader" and hasattr(loader, "loader")


def _length(loader: Iterable[Any]) -> int | None:
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        return None  # its len() is only a guess
    return len(loader) if isinstance(loader, Sized) else None


def _is_plain(loader: Iterable[Any]) -> TypeGuard[DataLoader[Any]]:
    """Whether this is a map-style DataLoader with torch's own iteration: its sampler alone decides the order."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and not isinstance(loader.dataset, IterableDataset)
    )


def _index_sampler(loader: DataLoader[Any]) -> Iterable[Any]:
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _samplers(loader: Iterable[Any]) -> list[Any]:
    if not isinstance(loader, DataLoader):
        return [loader]
    inner = getattr(loader.batch_sampler, "sampler", None)
    return [item for item in (loader.sampler, loader.batch_sampler, inner) if item is not None]


def _generators(loader: Iterable[Any]) -> list[torch.Generator]:
    found: list[torch.Generator] = []
    for holder in (loader, *_samplers(loader)):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not other for other in found):
            found.append(generator)
    return found


class _Skipping:
    """A sampler without its first items: it draws and drops them, so that its generators advance."""

    def __init__(self, sampler: Iterable[Any], skip: int) -> None:
        self._sampler = sampler
        self._skip = skip
        self._rest: Iterator[Any] | None = None

    def deal(self) -> Iterator[Any]:
        """Draw and drop the skipped items, once; the sampler draws its random numbers here."""
        if self._rest is None:
            self._rest = iter(self._sampler)
            next(islice(self._rest, self._skip - 1, self._skip), None)
        return self._rest

    def __iter__(self) -> Iterator[Any]:
        yield from self.deal()  # a generator: torch's loader draws its base seed before it asks the sampler


def _skipped(loader: DataLoader[Any], skip: int) -> Iterator[Any]:
    """Iterate over a plain loader without its first `skip` batches, every random draw in the loader's own order."""
    skipping: Any = _Skipping(_index_sampler(loader), skip)
    sampling: dict[str, Any] = (
        {"sampler": skipping, "batch_size": None} if loader.batch_sampler is None else {"batch_sampler": skipping}
    )
    iterator = iter(
        DataLoader(
            loader.dataset,
            **sampling,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=seeding_generator(loader),
            prefetch_factor=loader.prefetch_factor,
        )
    )
    skipping.deal()
    return iterator
