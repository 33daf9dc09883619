"""Makes data loader workers survive a SIGTERM to the job, because the rank still has to commit its state.

Launchers send SIGTERM to the process group of a rank (torchrun), or to every process of the job (Slurm). If a worker
dies of it, torch raises in the rank at an arbitrary place: no further step ends, and nothing is committed.
"""

import atexit
import copy
import logging
import os
import signal
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

import torch
from torch.utils.data import dataloader

from cpsr.state.worker_random_states import Follower, requested_follower

__all__ = ["count_other_loaders", "expect_other_loaders", "prepared_workers", "seeded_before"]

logger = logging.getLogger(__name__)

THREAD_NAME = "cpsr-orphan"
WATCH_SECONDS = 1.0
ORPHAN_EXIT_STATUS = 1  # never read
_SIGTERM = {signal.SIGTERM}
_PREPARED = "cpsr_prepared"


@contextmanager
def prepared_workers() -> Iterator[None]:
    """Inside, workers of any torch `DataLoader` start so that they survive SIGTERM, with equal seeds after a restart.

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
    with ExitStack() as prepared:
        for iterator in _iterators():
            if not hasattr(iterator.__init__, _PREPARED):
                prepared.enter_context(_prepared(iterator))
        yield


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
        before = _seeded_before.get()
        if _others.seeded_before(loader) if before is None else before:
            prepared.generator = _copied_generator(loader)
        method = (loader.multiprocessing_context or torch.multiprocessing).get_start_method()
        self.follower = requested_follower()
        beginning = _Beginning(loader.worker_init_fn, self.follower)
        if method == "forkserver":
            _warn_of_forkserver()
            prepared.worker_init_fn = beginning
            start(self, prepared, *given)
            return
        if method == "spawn":
            resource_tracker.ensure_running()  # starting it later would unblock SIGTERM
        prepared.worker_init_fn = _Shield(beginning, os.getpid())
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


class _OtherLoaders:
    """Loaders with persistent workers beside that of the run, as one of evaluations: each draws one seed in a run."""

    def __init__(self) -> None:
        self._live: WeakSet[Any] = WeakSet()
        self._expected = 0  # that had begun before this life, and not yet in it

    def expect(self, count: int) -> None:
        """A life begins, before which so many have drawn their seeds."""
        self._live, self._expected = WeakSet(), count

    def seeded_before(self, loader: Any) -> bool:
        """Whether this one, which begins now, has drawn its seed in an earlier life."""
        if not loader.persistent_workers:
            return False
        self._live.add(loader)
        before, self._expected = self._expected > 0, max(0, self._expected - 1)
        return before

    def count(self) -> int:
        """How many have drawn their seeds, and still have their workers."""
        return self._expected + sum(one._iterator is not None for one in self._live)


_others = _OtherLoaders()
expect_other_loaders, count_other_loaders = _others.expect, _others.count

_seeded_before: ContextVar[bool | None] = ContextVar("_seeded_before", default=None)  # None: of no stream


@contextmanager
def seeded_before(before: bool) -> Iterator[None]:
    """Inside, workers of the run's loader start; they draw no seed if they go on for those of an earlier life."""
    token = _seeded_before.set(before)
    try:
        yield
    finally:
        _seeded_before.reset(token)


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


@dataclass(frozen=True)
class _Beginning:
    """The user's `worker_init_fn`, and then what keeps the random states of a worker."""

    init: Callable[[int], object] | None
    follower: Follower | None

    def __call__(self, worker: int) -> None:
        if self.init is not None:
            self.init(worker)
        if self.follower is not None:
            self.follower.follow(worker)


@dataclass(frozen=True)
class _Shield:
    """The first actions of a worker; `rank` is the process that it works for."""

    beginning: _Beginning
    rank: int

    def __call__(self, worker: int) -> None:
        threading.Thread(target=_end_after, args=(self.rank,), name=THREAD_NAME, daemon=True).start()
        signal.signal(signal.SIGTERM, _ignore)  # child processes of the worker would inherit SIG_IGN
        atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)  # the interpreter resets handlers at its end
        signal.siginterrupt(signal.SIGTERM, False)  # system calls of the data set continue after it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGTERM)
        self.beginning(worker)


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
