"""The user's data loader, positioned after the last trained batch.

Random states at the start of a pass decide the order of a shuffled loader: those of the loader's and the sampler's own
generators, else the global ones of torch, NumPy and Python. They are captured at the start of every pass, and restored
before a pass is continued, so that the sampler yields the same batches again. The sampler skips batches that were
already trained, without loading them. A loader that has a state of its own continues from that instead: see
`cpsr.state.loader_state`.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from cpsr.errors import RecoveryError
from cpsr.state.host_random import capture_host_rng, restore_host_rng
from cpsr.state.loader_generators import (
    data_generators,
    named_together,
    order_generators,
    restore_states,
    states_of,
    without_state,
)
from cpsr.state.loader_kinds import (
    Calls,
    has_persistent_workers,
    index_sampler,
    is_plain,
    is_repeating,
    length_of,
    place_inside,
    set_epochs,
    told_epochs,
    with_epochs,
)
from cpsr.state.loader_passes import (
    Dealing,
    dealt,
    rest_of_pass,
    skipped,
    warn_of_other_length,
)
from cpsr.state.loader_state import LoaderState, has_more
from cpsr.state.loader_workers import (
    InTurn,
    WithState,
    begin_pass,
    fetching_from_iterable,
    loaders_began_in_pass,
    prepared_workers,
)
from cpsr.state.small_state import DataPosition, capture_rng, restore_rng
from cpsr.state.user_objects import Stateful

if TYPE_CHECKING:
    from cpsr.state.loader_around import Around

__all__ = ["Draw", "LoaderHooks", "ResumableLoader"]

logger = logging.getLogger(__name__)


CLOSED = (
    "the recovery that gave these batches is closed: iterate over the loader itself, or open another CPSRRecovery and "
    "call its resume()"
)
FAILED = (
    "the data loader raised {} after batch {}, and a loop that goes on would train on batches that a restart does not "
    "find again: catch the error in the dataset, and return another row"
)
CONTINUED = "cpsr_continued"  # set on a loader, a pass of which was continued with other workers than its own


@dataclass(frozen=True)
class LoaderHooks:
    """Callbacks of a `ResumableLoader`.

    Attributes:
        on_positioned: called after the loader was moved to a saved position, before the next batch is fetched. It
            restores the random states of training, since positioning draws from them.
        on_batch: called with every batch before it is returned.
        on_request: called right before a batch is fetched, with whether there may be one: False at the known end of a
            pass.
        on_end: called when a pass has ended, with whether it was the last.
        waiting: entered while a batch is fetched from a DataLoader's worker processes: the thread then waits. Without
            workers the thread loads the batch itself, and of other iterables it is not known whether they wait.
        loading: entered whenever a pass begins or a batch is fetched.
    """

    on_positioned: Callable[[], object] = lambda: None
    on_batch: Callable[[Any], None] = lambda batch: None
    on_request: Callable[[bool], None] = lambda expected: None
    on_end: Callable[[bool], object] = lambda last: None
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    loading: Callable[[], AbstractContextManager[None]] = nullcontext


class Draw(NamedTuple):
    """One batch that the loop has drawn, or is about to draw.

    Attributes:
        stream: gives it.
        before: the position in the data before it.
        host: random states of the host from which it is drawn.
    """

    stream: "ResumableLoader"
    before: DataPosition
    host: dict[str, Any]


class ResumableLoader(Iterator[Any]):
    """A drop-in replacement of a loader that continues from a given position, and can be moved to another one.

    It is its own iterator, for `next`. Where its end is that of a pass, each `for` loop over it is one pass, as over
    the loader: the first continues the current pass, and a pass that the loop leaves early counts as over. Its length
    and all other attributes are those of the loader.

    Args:
        loader: a `torch.utils.data.DataLoader`, or any iterable that yields the same batches in every process. A
            one-shot iterator works, but cannot be moved back.
        position: the start.
        until_epoch: passes over the data, counted from the start of the run, after which the iteration ends; None
            repeats forever.
        sets_epoch: whether to call `set_epoch` of the samplers at every pass; False if the user's own loop over passes
            does that.
        hooks: callbacks.
        after: the stream that has given a whole pass of this loader before, in this process.
        generators: of its order and of its data, as at the begin; None: those of `after`, or found now.

    Attributes:
        left: whether the `for` loop over the stream has ended, also before the end of the pass.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        position: DataPosition,
        *,
        until_epoch: int | None,
        sets_epoch: bool = True,
        hooks: LoaderHooks | None = None,
        after: "ResumableLoader | None" = None,
        generators: tuple[dict[str, Stateful], dict[str, Stateful]] | None = None,
    ) -> None:
        self.loader = loader
        self._loader = loader = getattr(loader, "loader", loader) if is_repeating(loader) else loader
        given = loader
        self._around: Around | None = None
        if (place := place_inside(loader)) is not None:
            from cpsr.state import loader_around  # here: few loaders are around another one

            self._around = loader_around.Around(loader, place, self._drawn_from, self._draw_from)
            self._loader = loader = vars(loader)[place]
        self._base: Any = getattr(loader, "base", loader)  # whose workers load the batches
        self._length = length_of(loader)
        # Of the first stream of a loader: later ones may have been made by the data set, and after a restart are not.
        if generators is None and after is not None:
            generators = after._generators, after._data_generators
        found = generators or (order_generators(loader), data_generators(loader))
        self._generators: dict[str, Stateful] = found[0]
        self._data_generators: dict[str, Stateful] = found[1]
        self._state: LoaderState = LoaderState(loader) if after is None else after._state
        # Of the iterator, and after a pass of the last one.
        self._workers: InTurn | None = None if after is None else after._workers_after()
        self._follows_a_pass = after is not None
        self._hooks = hooks = LoaderHooks() if hooks is None else hooks
        waits = isinstance(loader, DataLoader) and loader.num_workers > 0 and self._around is None
        self._waiting = hooks.waiting if waits else nullcontext
        self._iterator: Iterator[Any] | None = None
        self._ended: str | None = None  # why it gives no more batches
        self._thread: int | None = None  # that has opened it
        self.left = False
        self._newest: dict[str, Any] | None = None  # state of the loader
        self._iterated = False  # a `for` loop has begun the current pass
        self.position = self._normalised(position)
        self._moved = position.states is not None
        self._until_epoch = until_epoch
        self._is_of_one_pass = until_epoch is not None and not sets_epoch
        self._sets_epoch = sets_epoch
        self._given = given

    @property
    def can_seek(self) -> bool:
        """Whether the loader can be moved back in this process: to its beginning, or to a saved state."""
        again = not isinstance(self._loader, Iterator) or hasattr(self._loader, "__len__")
        return again or self._state.continues(self.position.loader, self.position)

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
        if has_persistent_workers(self._base):
            self._base._iterator = None  # its workers have drawn random numbers since
        self._moved = position.states is not None
        self.position = self._normalised(position)

    def continue_pass(self, position: DataPosition) -> None:
        """Continue the pass of a position now, also after its last batch, where its end was not requested yet."""
        self._iterator, self._moved, self.position = None, True, position
        if self._is_of_one_pass:
            self._until_epoch = position.epoch + 1
        set_epochs(self._loader, (position.states or {}).get("epochs", []))
        self._iterator = self._open()

    def open(self) -> None:
        """Begin or continue the pass now, which draws its order, and not with the first batch."""
        if self._iterator is None and not self._pass_is_over():
            self._iterator = self._open()

    def close(self, why: str = CLOSED) -> None:
        """Give no more batches; the workers of the pass end, unless they are persistent."""
        self._iterator, self._ended = None, why

    def __len__(self) -> int:
        """Batches of a whole pass."""
        return len(self._loader)  # type: ignore[arg-type]  # a loader without a length raises its own TypeError

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._given, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """What the loader has and the stream has not is the loader's."""
        given = self.__dict__.get("_given")
        if name in self.__dict__ or name.startswith("_") or not hasattr(given, name):
            object.__setattr__(self, name, value)
        else:
            setattr(given, name, value)

    def __iter__(self) -> Iterator[Any]:
        if self._is_of_one_pass and (self._iterated or self.position.epoch >= (self._until_epoch or 0)):
            self._leave_pass()
        return self.rest_of_pass()

    def rest_of_pass(self) -> Iterator[Any]:
        """The batches that are left of the current pass; of a stream of several, of all."""
        self._iterated = True
        try:
            with suppress(StopIteration):
                while True:
                    yield next(self)
        finally:
            self.left = True

    def _leave_pass(self) -> None:
        """The next batch is the first of a new pass; what is left of the current one is not given."""
        position = self.position.advanced(0)
        early = position.batch > 0
        if early:
            self._iterator, self._workers, self._state = None, None, LoaderState(self._loader)
        self._follows_a_pass, self._moved = not early, False
        position = replace(position, epoch=position.epoch + early, batch=0, states=None, loader=None, workers=None)
        self.position = self._normalised(position)
        self._until_epoch = self.position.epoch + 1

    def __next__(self) -> Any:
        if self._ended is not None:
            raise RecoveryError(self._ended)
        while True:
            if self._until_epoch is not None and self.position.epoch >= self._until_epoch:
                self.left = True
                raise StopIteration
            self._hooks.on_request(not self._pass_is_over())
            if self._iterator is None:
                with self._hooks.loading():
                    self._iterator = self._open()
            try:
                with self._hooks.loading(), self._waiting(), self._fetching():
                    batch = next(self._iterator)
            except StopIteration:
                self._end_pass()
                self._hooks.on_end(self._until_epoch is not None and self.position.epoch >= self._until_epoch)
                continue
            except Exception as error:
                self._ended = FAILED.format(type(error).__name__, self.position.batches)
                raise
            self.position, self.left = self.position.after_a_batch(), False
            self._hooks.on_batch(batch)
            return batch

    def _workers_after(self) -> InTurn | None:
        """The workers of the next pass; the loop may have asked for no batch after the last one of this."""
        if self._workers is not None and self._iterator is not None and self._pass_is_over():
            self._workers.end_pass(self.position.batch)
        return self._workers

    def _pass_is_over(self) -> bool:
        """Whether the current pass has no batches left; the loader may draw random numbers at its end."""
        length = self.position.batches_per_epoch
        return length is not None and self.position.batch >= length

    @property
    def is_moved(self) -> bool:
        """Whether the next batch is the first at a restored position."""
        return self._moved

    def before_draw(self, host: dict[str, Any] | None) -> "Draw":
        """What a state that will not count the next batch as trained is of.

        Args:
            host: the random states of the host from which that is drawn; None: those of now.
        """
        if host is None:
            host = capture_host_rng()
            if self._data_generators:
                host["data"] = self.data_states()
        return Draw(self, self.saved_position() if self._iterator is None else self.position, host)

    def saved_before(self, position: DataPosition) -> DataPosition:
        """The position for a checkpoint, of an earlier batch of this stream."""
        newest, self._newest = self._newest, self.saved_position().loader
        usable = newest is not None and newest["batches"] <= position.batches
        workers = position.workers
        if self._workers is not None and position.epoch == self.position.epoch and position.batch:
            workers = {"epoch": position.epoch, **self._workers.at(position.batch)}
        newest = newest if usable else position.loader
        return replace(position, loader=newest, workers=workers, fetched=self._fetched_ahead(position))

    def saved_position(self) -> DataPosition:
        """The position for a checkpoint, with the states from which the loader continues there."""
        position, between = self.position, self._iterator is None
        if self._moved or not position.batches:
            return position
        if between and position.states is None:
            position = replace(
                position, states=self._capture(), states_epoch=position.epoch, seeded=self._seeding_pass(position)
            )
        if self._thread not in (None, threading.get_ident()):  # it fetches ahead, maybe in this moment
            return replace(position, loader=None, workers=None)
        loader = self._state.capture(position, between=between) if not between or self._follows_a_pass else None
        if loader is not None:
            loader["generators"] = states_of(self._generators if between else without_state(self._generators))
            self._newest = loader
        fetched = self._fetched_ahead(position)
        return replace(position, loader=loader, workers=self._worker_states(between), fetched=fetched)

    def _fetched_ahead(self, position: DataPosition) -> dict[str, Any] | None:
        """What the loader around the DataLoader has fetched beyond a batch of the current pass."""
        if self._around is None or position.epoch != self.position.epoch:
            return None
        states = self._around.ahead(position.batch)
        return {"epoch": position.epoch, "batch": position.batch, "states": states} if states else None

    def _worker_states(self, between: bool) -> dict[str, Any] | None:
        """Random states of workers that take the batches in turn, at the newest round that is known."""
        if self._workers is None:
            return None
        epoch, batch = self.position.epoch, self.position.batch
        if not between and not self._pass_is_over():
            return {"epoch": epoch, **self._workers.at(batch)}
        if not has_persistent_workers(self._loader):
            return None  # those of the next pass get new seeds
        states = self._workers.between if between else self._workers.at_end(batch)
        if states is None:
            return None
        return {"epoch": epoch + (not between), "batch": 0, "workers": len(states), "states": states}

    def _normalised(self, position: DataPosition) -> DataPosition:
        """A position at the end of a pass becomes the start of the next one; ranks that are there now are dealt to."""
        position = dealt(position, self._loader, self._length)
        if not position.batch or position.batches_per_epoch is None or position.dealing is not None:
            position = replace(position, batches_per_epoch=self._length)
        return position.advanced(0)

    def _end_pass(self) -> None:
        if self.position.batch == 0:
            raise RecoveryError(
                f"the data loader gave no batch in pass {self.position.epoch}: it is empty or already used up"
            )
        if self._workers is not None:
            self._workers.end_pass(self.position.batch)
        begin_pass()
        self._iterator = None
        self.position = replace(self.position, epoch=self.position.epoch + 1, batch=0)
        self.position = dealt(self.position, self._loader, self._length)
        # Where this stream ends, the next one may be of another loader.
        self._follows_a_pass = self._until_epoch is None or self.position.epoch < self._until_epoch

    def _open(self) -> Iterator[Any]:
        position, self._thread = self.position, threading.get_ident()
        moved, self._moved = self._moved, False
        if moved and self._state.continues(position.loader, position):
            return self._open_saved(position)
        if moved and position.states is not None:
            self._restore(position.states)
            if position.states_epoch == position.epoch:
                self._restore_epoch(position.states)
            if position.states_epoch == position.epoch and (position.batch or position.states.get("begun")):
                iterator = self._pass(position.epoch, skip=position.batch, workers=position.workers)
                self._hooks.on_positioned()
                return iterator
            for epoch in range(position.states_epoch, position.epoch):
                self._walk(epoch)
            self._hooks.on_positioned()
        if not moved:
            return self._begin_pass()
        return self._begin_pass(position.batch, position.workers, position.seeded)

    def _begin_pass(
        self, skip: int = 0, workers: dict[str, Any] | None = None, seeded: int | None = None
    ) -> Iterator[Any]:
        position, states = self.position, {**self._capture(), "begun": True}
        seeded = self._seeding_pass(position) if seeded is None else seeded
        self.position = replace(position, states=states, states_epoch=position.epoch, seeded=seeded)
        iterator = self._pass(position.epoch, skip, workers)
        if not self._state.was_loaded:
            return iterator
        self._state.was_loaded = False
        begun = has_more(iterator)
        if begun is not None:
            return begun
        restore_host_rng(states["host"])  # the loaded state was that of the end of the last pass
        beside = without_state(self._generators)
        restore_states(beside, {name: states["generators"][name] for name in beside})
        states["generators"] = states_of(self._generators)
        return self._pass(position.epoch)

    def _open_saved(self, target: DataPosition) -> Iterator[Any]:
        """Continue from the newest state of the loader: it is loaded, and what was trained after it is skipped."""
        saved: Any = target.loader
        skip = target.batches - saved["batches"]
        self.position = replace(target, batches=saved["batches"], epoch=saved["epoch"], batch=saved["batch"])
        if saved["between"]:
            self._iterator = self._open_between(saved)
            trained = capture_host_rng()
            self._skip(skip)
            if skip:
                restore_host_rng(trained)
        else:
            self._iterator = self._open_inside(saved, target)
            self._skip(skip)
            self._hooks.on_positioned()
        return self._iterator

    def _open_inside(self, saved: dict[str, Any], target: DataPosition) -> Iterator[Any]:
        if target.states is not None:
            self._restore(target.states)
        if target.states is not None and target.states_epoch == target.epoch:
            self._restore_epoch(target.states)
        self._set_epoch(saved["epoch"])
        self._state.load(saved)
        with self._starting_workers(saved["epoch"], WithState()):
            iterator = self._state.iterate(saved)
        if self._state.is_torchdata:
            restore_states(without_state(self._generators), saved["generators"])
        return iterator

    def _open_between(self, saved: dict[str, Any]) -> Iterator[Any]:
        self._set_epoch(saved["epoch"])
        self._state.load(saved)
        if self._state.is_torchdata and not has_persistent_workers(self._loader):
            with self._starting_workers(saved["epoch"], WithState()):
                self._state.iterate(saved)  # draws the seeds of the last pass once more, maybe from its generator
        restore_states(self._generators, saved["generators"])
        self._hooks.on_positioned()
        return self._begin_pass(seeded=self.position.seeded)

    def _seeding_pass(self, position: DataPosition) -> int | None:
        """The pass that seeds the workers of the next pass, in a run that nothing disturbs: see `DataPosition`."""
        if not has_persistent_workers(self._base):
            return position.seeded
        if getattr(self._base, "_iterator", None) is None and not getattr(self._base, CONTINUED, False):
            return position.epoch
        return -1 if position.seeded is None else position.seeded  # -1: the script has begun a pass before the run

    def seeding(self, *, continued: bool) -> AbstractContextManager[None]:
        """Inside, the loader of another package begins the current pass, or continues it with workers of its own."""
        if continued and has_persistent_workers(self._base):
            setattr(self._base, CONTINUED, True)
        return self._starting_workers(self.position.epoch)

    def _draws_seed(self, epoch: int) -> bool:
        """Whether a run that nothing disturbs draws a seed for the loader's workers at the beginning of this pass."""
        return not has_persistent_workers(self._base) or self.position.seeded in (None, epoch)

    @contextmanager
    def _fetching(self) -> Iterator[None]:
        """Batches are fetched; an iterable of the user's may begin a loader of its own for that."""
        epoch, seeded = self.position.epoch, self.position.seeded
        if isinstance(self._loader, DataLoader) or self._state.usable:
            yield
            return
        with fetching_from_iterable(again=seeded == epoch):
            yield
        if seeded != epoch and loaders_began_in_pass():
            self.position = replace(self.position, seeded=epoch)

    def _skip(self, batches: int) -> None:
        """Fetch and drop further batches, also across the ends of passes."""
        while batches:
            if self._iterator is None:
                self._iterator = self._begin_pass()
            try:
                next(self._iterator)
            except StopIteration:
                self._end_pass()
                continue
            self.position = self.position.after_a_batch()
            batches -= 1

    def _pass(self, epoch: int, skip: int = 0, workers: dict[str, Any] | None = None) -> Iterator[Any]:
        """Iterate over a pass without its first batches.

        Args:
            epoch: the pass.
            skip: the number of those batches.
            workers: saved random states of workers, of any position.
        """
        self._set_epoch(epoch)
        begin_pass()
        if not is_plain(self._loader):
            with self._starting_workers(epoch, WithState() if self._state.usable else None):
                iterator = iter(self._loader)
            if not isinstance(self._loader, Calls):
                with self._fetching():
                    next(islice(iterator, skip, skip), None)
            return iterator
        iterator = self._rest_of_plain(self._loader, epoch, skip, workers)
        if self._around is None:
            return iterator
        fetched = self.position.fetched or {}
        follows = (fetched.get("epoch"), fetched.get("batch")) == (epoch, skip)
        return self._around.iterate(iterator, skip, fetched["states"] if follows else [])

    def _rest_of_plain(
        self, loader: DataLoader[Any], epoch: int, skip: int, workers: dict[str, Any] | None
    ) -> Iterator[Any]:
        """As `_pass`, of a map-style DataLoader."""
        dealing = Dealing.saved_in(self.position)
        if dealing is not None and dealing.samples and epoch == self.position.epoch:  # begun on other ranks
            self._workers = None
            with self._starting_workers(epoch):
                return skipped(loader, skip - dealing.first_batch, rest_of_pass(loader, dealing.samples))
        first, resumed = skip, None
        if loader.num_workers and workers is not None and workers["epoch"] == epoch:
            ahead = skip - workers["batch"]
            if workers["workers"] == loader.num_workers and 0 <= ahead < loader.num_workers:
                first, resumed = workers["batch"], workers["states"]
        follower = InTurn(loader, first, resumed) if loader.num_workers and getattr(loader, "in_order", True) else None
        goes_on = has_persistent_workers(loader) and loader._iterator is None and not self._draws_seed(epoch)
        with self._starting_workers(epoch, follower):
            iterator = skipped(loader, first, goes_on=goes_on) if first or goes_on else iter(loader)
        self._workers = getattr(iterator, "follower", None)
        if self._workers is not None and self._workers is not follower:
            self._workers.begin_pass()
        next(islice(iterator, skip - first, skip - first), None)
        return iterator

    def _starting_workers(self, epoch: int, follower: InTurn | WithState | None = None) -> AbstractContextManager[None]:
        """Workers that start inside, for this pass, survive SIGTERM; `follower` keeps their random states."""
        return prepared_workers(follower, seeded_before=not self._draws_seed(epoch))

    def _walk(self, epoch: int) -> None:
        """Run through a whole pass without loading it, to bring the generators to their states after it."""
        self._set_epoch(epoch)
        if not is_plain(self._loader):
            for _ in self._loader:
                pass
            return
        sampler, items = index_sampler(self._loader), None
        if self._draws_seed(epoch):  # in the order of DataLoader's own iterators; that over workers asks again
            items = iter(sampler)
            torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
        for _ in iter(sampler) if items is None or self._loader.num_workers else items:
            pass

    def _set_epoch(self, epoch: int) -> None:
        """Tell the pass to the samplers and the data set, which may have another length in each."""
        if self._sets_epoch:
            for holder in with_epochs(self._loader):
                holder.set_epoch(epoch)
        self._length = length_of(self._loader)
        if epoch == self.position.epoch:
            warn_of_other_length(self.position, self._length)
            self.position = replace(self.position, batches_per_epoch=self._length)

    def _capture(self) -> dict[str, Any]:
        return {
            "host": capture_host_rng(),
            "generators": states_of(self._generators),
            "epochs": told_epochs(self._loader),
        }

    def data_states(self) -> dict[str, Any]:
        """States of the generators that the data set keeps, for the next batch; in worker processes they are others."""
        return states_of(self._data_generators) if self._data_generators else {}

    def name_generators_in_workers(self) -> None:
        """Warn of generators that each worker process has a copy of."""
        if isinstance(self._loader, DataLoader) and self._loader.num_workers and self._data_generators:
            logger.warning(
                "the workers of the data loader draw from copies of %s, which CPSR cannot save: after a restart within "
                "a pass they draw other numbers. Draw from torch's, NumPy's or Python's global generator there",
                named_together(self._data_generators),
            )

    def _drawn_from(self) -> dict[str, Any]:
        """What a loader around the DataLoader may draw from: states of the host and a GPU, generators of the data."""
        return {**capture_rng(_gpu()), "data": self.data_states()}

    def _draw_from(self, states: dict[str, Any]) -> None:
        restore_rng(states, _gpu())
        self.restore_data_states(states["data"])

    def restore_data_states(self, states: dict[str, Any]) -> None:
        """Restore what `data_states` returned."""
        restore_states(self._data_generators, states)

    def _restore_epoch(self, states: dict[str, Any]) -> None:
        """Continue a pass in its own order, even if the user's loop has set another epoch."""
        saved = states.get("epochs", [])
        now = told_epochs(self._loader)
        if self._sets_epoch or now == saved or len(set(saved)) != 1:
            return
        logger.warning(
            "the sampler is at epoch %s, but the pass to continue began with set_epoch(%d), which is restored. "
            "Begin your own loop over passes at recovery.epoch: for epoch in range(recovery.epoch, epochs)",
            now[0] if now else None,
            saved[0],
        )
        for holder in with_epochs(self._loader):
            holder.set_epoch(saved[0])

    def _restore(self, states: dict[str, Any]) -> None:
        restore_host_rng(states["host"])
        restore_states(self._generators, states["generators"])


def _gpu() -> torch.device | None:
    """The current one of this process, where it uses any."""
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # untyped in torch
    return torch.device("cuda", torch.cuda.current_device()) if used else None
