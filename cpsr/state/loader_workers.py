"""How a data loader's workers start, so that a run continues exactly: SIGTERM, seeds, and random states.

Launchers send SIGTERM to the process group of a rank (torchrun), or to every process of the job (Slurm). If a worker
dies of it, torch raises in the rank at an arbitrary place: no further step ends, and nothing is committed. Workers that
start here survive it.

Workers load ahead. After each batch a worker notes its random states in memory that it shares with its rank, which
reads them when a checkpoint begins. The batches of a map-style loader go to the workers in turn: a restart skips whole
rounds, gives the workers their states of that round, and loads the few batches after it once more. Workers of
torchdata's StatefulDataLoader send their states with those of the dataset.
"""

import atexit
import copy
import logging
import os
import random
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial, wraps
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any
from weakref import WeakSet

import numpy
import torch
from torch.utils.data import DataLoader, dataloader, get_worker_info
from torch.utils.data._utils import fetch

__all__ = [
    "InTurn",
    "WithState",
    "begin_pass",
    "count_other_loaders",
    "expect_other_loaders",
    "fetching_from_iterable",
    "loaders_began_in_pass",
    "prepared_workers",
]

logger = logging.getLogger(__name__)

THREAD_NAME = "cpsr-orphan"
WATCH_SECONDS = 1.0
ORPHAN_EXIT_STATUS = 1  # never read
_SIGTERM = {signal.SIGTERM}
_PREPARED = "cpsr_prepared"

_PYTHON = struct.Struct("<625I?d")
_NUMPY = struct.Struct("<iid")
_NUMPY_WORDS_BYTES = 624 * 4
_TORCH_BYTES = torch.get_rng_state().numel()
STATE_BYTES = _PYTHON.size + 1 + _NUMPY.size + _NUMPY_WORDS_BYTES + _TORCH_BYTES
# Than a worker loads ahead: the round of the last batch, the next one, one being written, and those drawn ahead.
_MORE_SLOTS = 3 + 8
# What a worker of torchdata sends as the state of its dataset.
_DATASET, _RANDOM = "dataset", "cpsr_random_states"


# For workers that start now: what keeps their random states (None: nothing), and whether they go on for workers of an
# earlier life, and so draw no seed (None: they are of another loader than the run's).
_requested: ContextVar[tuple["InTurn | WithState | None", bool | None]] = ContextVar("_requested", default=(None, None))

# In a fetch from an iterable of the user's, which may begin a loader of its own: whether the pass runs for a second
# time, and that loader drew its seed in the first one.
_fetching: ContextVar[bool | None] = ContextVar("_fetching", default=None)


@contextmanager
def prepared_workers(
    follower: "InTurn | WithState | None" = None, *, seeded_before: bool | None = None
) -> Iterator[None]:
    """Inside, workers of any torch `DataLoader` start so that they survive SIGTERM, with equal seeds after a restart.

    Args:
        follower: keeps the random states of workers that start inside; each worker has a copy.
        seeded_before: whether these go on for workers of an earlier life, and draw no seed; None: they are not of the
            run's loader.

    They ignore SIGTERM with a handler, so that it still ends their own child processes. `terminate()`, with which torch
    and `multiprocessing` end a worker, kills it. A thread in the worker ends it soon after its rank. Nothing else
    changes: a worker that fails otherwise makes torch raise.

    This relies on torch 2.6 to 2.13: every iterator over workers is a `_MultiProcessingDataLoaderIter`, which starts
    them in its `__init__` as `_workers`; each worker calls `worker_init_fn` in its main thread, after torch has set its
    handlers. Until then an inherited mask blocks SIGTERM in the worker. It also relies on `multiprocessing`, whose
    `Process` is ended by `_popen.terminate`. torchdata 0.8 to 0.11 has a copy of that class, which is covered where the
    package was imported before. Not covered: workers started before, and the start method `forkserver`, whose server
    SIGTERM ends.
    """
    outside = _requested.get()
    _requested.set((follower, seeded_before))
    try:
        with ExitStack() as prepared:
            for iterator in _iterators():
                if not hasattr(iterator.__init__, _PREPARED):
                    prepared.enter_context(_prepared(iterator))
            yield
    finally:
        _requested.set(outside)


def _iterators() -> list[Any]:
    """The classes of iterators that start workers."""
    torchdata = sys.modules.get("torchdata.stateful_dataloader.stateful_dataloader")
    own = getattr(torchdata, "_StatefulMultiProcessingDataLoaderIter", None)
    return [dataloader._MultiProcessingDataLoaderIter, *([] if own is None else [own])]


@contextmanager
def _prepared(iterator: Any) -> Iterator[None]:
    start = iterator.__init__

    @wraps(start)
    def start_prepared(self: Any, loader: Any, *given: Any) -> None:
        prepared = copy.copy(loader)
        self.follower, before = _requested.get()
        if _others.seeded_before(loader) if before is None else before:
            prepared.generator = _copied_generator(loader)
        method = (loader.multiprocessing_context or torch.multiprocessing).get_start_method()
        if method == "forkserver":
            _warn_of_forkserver()
            prepared.worker_init_fn = _Beginning(loader.worker_init_fn, self.follower, None)
            start(self, prepared, *given)
            return
        if method == "spawn":
            resource_tracker.ensure_running()  # starting it later would unblock SIGTERM
        prepared.worker_init_fn = _Beginning(loader.worker_init_fn, self.follower, os.getpid())
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGTERM)  # which the workers inherit
        try:
            start(self, prepared, *given)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for worker in getattr(self, "_workers", ()):
                worker._popen.terminate = partial(_end, id(self), worker._popen)

    setattr(start_prepared, _PREPARED, True)
    iterator.__init__ = start_prepared
    try:
        yield
    finally:
        iterator.__init__ = start


@dataclass(frozen=True)
class _Beginning:
    """The first actions of a worker: it survives SIGTERM, runs the user's `init`, and keeps its random states.

    Attributes:
        init: the user's `worker_init_fn`.
        follower: keeps the random states.
        rank: the process that it works for; None: SIGTERM ends it.
    """

    init: Callable[[int], object] | None
    follower: "InTurn | WithState | None"
    rank: int | None

    def __call__(self, worker: int) -> None:
        if self.rank is not None:
            threading.Thread(target=_end_after, args=(self.rank,), name=THREAD_NAME, daemon=True).start()
            signal.signal(signal.SIGTERM, _ignore)  # child processes of the worker would inherit SIG_IGN
            atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)  # the interpreter resets handlers at its end
            signal.siginterrupt(signal.SIGTERM, False)  # system calls of the data set continue after it
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGTERM)
        if self.init is not None:
            self.init(worker)
        if self.follower is not None:
            self.follower.follow(worker)


class _OtherLoaders:
    """Loaders with persistent workers beside that of the run, as one of evaluations: each draws one seed in a run.

    Also those that an iterable of the user's begins when a batch is fetched from it. A restart inside a pass runs the
    pass again from its beginning, so that those that began in it draw once more.
    """

    def __init__(self) -> None:
        self._live: WeakSet[Any] = WeakSet()
        self._of_pass: WeakSet[Any] = WeakSet()
        self._expected = 0  # that had begun before this life, and not yet in it

    def expect(self, count: int) -> None:
        """A life begins, before which so many have drawn their seeds."""
        self._live, self._expected = WeakSet(), count

    def seeded_before(self, loader: Any) -> bool:
        """Whether this one, which begins now, has drawn its seed in an earlier life."""
        if not loader.persistent_workers:
            return False
        self._live.add(loader)
        again = _fetching.get()
        if again is not None:
            self._of_pass.add(loader)
        if again:
            return False
        before, self._expected = self._expected > 0, max(0, self._expected - 1)
        return before

    def count(self) -> int:
        """How many have drawn their seeds, and still have their workers; without those that began in this pass."""
        return self._expected + sum(one._iterator is not None for one in self._live if one not in self._of_pass)

    def begin_pass(self) -> None:
        """A pass over the data begins, or has ended."""
        self._of_pass = WeakSet()

    def began_in_pass(self) -> bool:
        """Whether fetching batches has begun some in this pass."""
        return len(self._of_pass) > 0


_others = _OtherLoaders()
expect_other_loaders, count_other_loaders = _others.expect, _others.count
begin_pass, loaders_began_in_pass = _others.begin_pass, _others.began_in_pass


@contextmanager
def fetching_from_iterable(*, again: bool) -> Iterator[None]:
    """Inside, a batch is fetched from an iterable of the user's, whose loaders begin now.

    Args:
        again: whether they had begun in this pass before the restart.
    """
    outside = _fetching.set(again)
    try:
        yield
    finally:
        _fetching.reset(outside)


def _copied_generator(loader: Any) -> torch.Generator:
    """A copy of the generator that a loader's workers are seeded from, which therefore stays as it is."""
    copied = _default_generator() if loader.generator is None else loader.generator
    drawn = torch.Generator(copied.device)
    drawn.set_state(copied.get_state())
    return drawn


def _default_generator() -> torch.Generator:
    """The one that torch draws from where none is given: that of the default device."""
    device = torch.get_default_device()
    if device.type != "cuda":
        return torch.default_generator
    current = torch.cuda.current_device()  # before that there are no generators
    return torch.cuda.default_generators[current if device.index is None else device.index]


@cache
def _warn_of_forkserver() -> None:
    logger.warning(
        "DataLoader workers of the start method 'forkserver' end when the whole process group gets SIGTERM, and then "
        "nothing may be committed: give the loader multiprocessing_context='fork' or 'spawn'"
    )


def _ignore(number: int, frame: FrameType | None) -> None:
    pass


def _end_after(rank: int) -> None:
    """End the worker after its rank: torch checks for the rank only between two batches."""
    while os.getppid() == rank:
        time.sleep(WATCH_SECONDS)
    os._exit(ORPHAN_EXIT_STATUS)


def _end(iterator: int, process: Any) -> None:
    """End a worker on purpose, without torch treating that as a failure."""
    with suppress(ValueError):  # torch has removed them already, as it does before it ends them
        torch._C._remove_worker_pids(iterator)
        torch._C._set_worker_pids(iterator, ())  # torch will remove them once more
    process.kill()


# Random states


def pack() -> bytes:
    """This process's random states of Python, NumPy and torch on the CPU, in `STATE_BYTES` bytes."""
    _, words, gauss = random.getstate()
    drawn: Any = numpy.random.get_state()
    ours = isinstance(drawn, tuple) and drawn[0] == "MT19937"  # not if the user has set another bit generator
    return b"".join(
        (
            _PYTHON.pack(*words, gauss is not None, gauss or 0.0),
            bytes([ours]),
            _NUMPY.pack(*drawn[2:]) if ours else bytes(_NUMPY.size),
            drawn[1].tobytes() if ours else bytes(_NUMPY_WORDS_BYTES),
            torch.get_rng_state().numpy().tobytes(),
        )
    )


def unpack(packed: bytes) -> None:
    """Restore what `pack` returned."""
    *words, has_gauss, gauss = _PYTHON.unpack_from(packed)
    random.setstate((3, tuple(words), gauss if has_gauss else None))
    at = _PYTHON.size
    if packed[at]:
        keys = numpy.frombuffer(packed, numpy.uint32, 624, at + 1 + _NUMPY.size)
        numpy.random.set_state(("MT19937", keys, *_NUMPY.unpack_from(packed, at + 1)))
    torch.set_rng_state(torch.frombuffer(bytearray(packed[-_TORCH_BYTES:]), dtype=torch.uint8))


class InTurn:
    """The random states of workers that take the batches of a pass in turn: those of a map-style loader.

    Args:
        loader: has workers.
        first: batches of the pass that its first iteration leaves out.
        resumed: what the workers begin with, one row of `STATE_BYTES` bytes for each; None: with what their seeds give.
    """

    def __init__(self, loader: DataLoader[Any], first: int, resumed: torch.Tensor | None) -> None:
        self._workers = loader.num_workers
        self._first = first
        self._resumed = resumed  # at the beginning of the pass
        self._ended = False
        slots = (loader.prefetch_factor or 0) + _MORE_SLOTS
        self._noted = torch.zeros((self._workers, slots, STATE_BYTES), dtype=torch.uint8)
        self._noted.share_memory_()  # type: ignore[no-untyped-call]  # untyped in torch

    def at(self, batch: int) -> dict[str, Any]:
        """The states at the beginning of the round of this batch, the last that was yielded.

        Args:
            batch: batches of the pass, with those left out.

        Returns:
            The batches of the pass at that beginning, the number of workers, and the states; None: those of the seeds.
        """
        rounds = (batch - self._first) // self._workers
        states = self._noted[:, rounds % self._noted.shape[1]].clone() if rounds else self._resumed
        return {"batch": self._first + rounds * self._workers, "workers": self._workers, "states": states}

    def at_end(self, batch: int) -> torch.Tensor:
        """The states after a whole pass of so many batches."""
        dealt, slots = batch - self._first, self._noted.shape[1]
        loaded = [(dealt + self._workers - 1 - worker) // self._workers for worker in range(self._workers)]
        return torch.stack([self._noted[worker, count % slots] for worker, count in enumerate(loaded)])

    def end_pass(self, batch: int) -> None:
        """A whole pass of so many batches is over."""
        self._resumed, self._ended = self.at_end(batch), True

    def begin_pass(self) -> None:
        """The same workers, which are persistent, begin a further pass."""
        if not self._ended:  # the loop left the pass early, and they have loaded ahead
            self._resumed = None
        self._first, self._ended = 0, False

    @property
    def between(self) -> torch.Tensor | None:
        """The states between two passes; None: they are not known."""
        return self._resumed if self._ended else None

    def follow(self, worker: int) -> None:
        """Begin with the resumed states, and note them after every batch that this worker loads."""
        slots = self._noted[worker].numpy()
        resumed = [] if self._resumed is None else [self._resumed[worker].numpy().tobytes()]
        kind: Any = fetch._MapDatasetFetcher
        begin, load, loaded = kind.__init__, kind.fetch, 0

        def note(fetcher: Any) -> None:
            nonlocal loaded
            if fetcher.dataset is not _dataset():  # that of a loader inside the dataset
                return
            loaded += 1
            slots[loaded % len(slots)] = numpy.frombuffer(pack(), numpy.uint8)

        def begin_pass(fetcher: Any, *given: Any, **named: Any) -> None:
            nonlocal loaded
            begin(fetcher, *given, **named)
            if fetcher.dataset is _dataset():
                loaded = 0
                if resumed:
                    unpack(resumed.pop())

        def load_batch(fetcher: Any, index: Any) -> Any:
            batch = load(fetcher, index)
            note(fetcher)
            return batch

        kind.__init__, kind.fetch = begin_pass, load_batch


class WithState:
    """Random states of torchdata's workers, which go to the rank and come back with the state of the dataset.

    This relies on torchdata 0.8 to 0.11: a worker makes its state with `_make_state_dict`, for the first time when a
    state has been loaded and nothing has been fetched; it loads the state of its dataset with `try_to_deserialize`.
    """

    def follow(self, worker: int) -> None:
        """Add the random states to this worker's state."""
        module: Any = sys.modules.get("torchdata.stateful_dataloader.worker")
        if module is None:  # the loader that has a state starts these workers for something else
            return
        make, load = module._make_state_dict, module.try_to_deserialize
        loaded: list[bytes] = []

        def make_state(worker: int, kind: int, fetcher: Any, dataset: Any) -> dict[str, Any]:
            if loaded:
                unpack(loaded.pop())
            state: dict[str, Any] = make(worker, kind, fetcher, dataset)
            own, fetched = state["dataset_state"], state["fetcher_state"]
            if fetched is not None and own is None and fetched["dataset_iter_state"] is None:
                return state  # torchdata loads all batches again, from the seeds on
            return {**state, "dataset_state": {_DATASET: own, _RANDOM: pack()}}

        def load_state(given: Any, state: Any) -> Any:
            if isinstance(state, dict) and _RANDOM in state:
                loaded.append(state[_RANDOM])
                state = state[_DATASET]
            return given if state is None else load(given, state)

        module._make_state_dict, module.try_to_deserialize = make_state, load_state


def _dataset() -> Any:
    info = get_worker_info()
    return None if info is None else info.dataset
