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
from dataclasses import dataclass
from functools import cache, partial, wraps
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any

import torch
from torch.utils.data import dataloader

from cpsr.state.worker_random_states import Follower, requested_follower

__all__ = ["prepared_workers", "seeding_generator"]

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
        prepared.generator = seeding_generator(loader)
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


def seeding_generator(loader: Any) -> torch.Generator | None:
    """The generator that seeds a loader's workers: the loader's own, None for torch's global one.

    Persistent workers are seeded once in the life of a process. After a restart that would be one draw more than in an
    uninterrupted run, so they are seeded from a copy.
    """
    own: torch.Generator | None = loader.generator
    if not loader.persistent_workers:
        return own
    copied = _default_generator() if own is None else own
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
