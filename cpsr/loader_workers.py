"""Workers of data loaders, which a SIGTERM to the job does not end: the rank has yet to commit its state.

Launchers send SIGTERM to the process group of a rank (torchrun), or to every process of the job (Slurm). A worker that
dies of it makes torch raise in the rank, wherever its training is: no step ends any more, and nothing is committed.
"""

import atexit
import copy
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial, wraps
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any

import torch
from torch.utils.data import dataloader

__all__ = ["prepared_workers", "seeding_generator"]

logger = logging.getLogger(__name__)

THREAD_NAME = "cpsr-orphan"
WATCH_SECONDS = 1.0
ORPHAN_EXIT_STATUS = 1  # which nobody reads
_SIGTERM = {signal.SIGTERM}


@contextmanager
def prepared_workers() -> Iterator[None]:
    """Workers that any `DataLoader` of torch starts inside live through SIGTERM, and are seeded alike after a restart.

    They ignore SIGTERM by a handler, so that it still ends what they start themselves. `terminate()`, by which torch
    and `multiprocessing` end a worker, kills it, and a thread in it ends it soon after its rank, whatever it loads.
    Nothing else changes: a worker that fails otherwise makes torch raise.

    This relies on what torch does in 2.6 to 2.13: every iterator over workers is a `_MultiProcessingDataLoaderIter`,
    which starts them in its `__init__` as `_workers`; and each of them calls `worker_init_fn` in its main thread, after
    torch has set its handlers. Until then the worker inherits a mask that holds SIGTERM back. It relies further on
    `multiprocessing`, whose `Process` is ended by `_popen.terminate`. Not covered are workers that were started before,
    and those of the start method `forkserver`, whose server SIGTERM ends.
    """
    iterator: Any = dataloader._MultiProcessingDataLoaderIter
    start = iterator.__init__

    @wraps(start)
    def start_prepared(self: Any, loader: Any) -> None:
        prepared = copy.copy(loader)
        prepared.generator = seeding_generator(loader)
        method = (loader.multiprocessing_context or torch.multiprocessing).get_start_method()
        if method == "forkserver":
            _warn_of_forkserver()
            start(self, prepared)
            return
        if method == "spawn":
            resource_tracker.ensure_running()  # starting it lets SIGTERM through again
        prepared.worker_init_fn = _Shield(loader.worker_init_fn, os.getpid())
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGTERM)  # which the workers inherit
        try:
            start(self, prepared)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for worker in getattr(self, "_workers", ()):
                worker._popen.terminate = partial(_end, id(self), worker._popen)

    iterator.__init__ = start_prepared
    try:
        yield
    finally:
        iterator.__init__ = start


def seeding_generator(loader: Any) -> torch.Generator | None:
    """What the seed of a loader's workers is drawn from: the loader's own generator, None for torch's global one.

    Persistent workers are seeded once in the life of a process. After a restart that would be one more draw than in a
    run that was never interrupted, and so it is made from a copy.
    """
    own: torch.Generator | None = loader.generator
    if not loader.persistent_workers:
        return own
    drawn = torch.Generator()
    drawn.set_state(torch.get_rng_state() if own is None else own.get_state())
    return drawn


@dataclass(frozen=True)
class _Shield:
    """What a worker does first; `init` is the user's `worker_init_fn`, `rank` the process that it works for."""

    init: Callable[[int], object] | None
    rank: int

    def __call__(self, worker: int) -> None:
        threading.Thread(target=_end_after, args=(self.rank,), name=THREAD_NAME, daemon=True).start()
        signal.signal(signal.SIGTERM, _ignore)  # SIG_IGN would be inherited by what the worker starts
        atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)  # the interpreter takes handlers back at its end
        signal.siginterrupt(signal.SIGTERM, False)  # what the data set reads need not know of it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGTERM)
        if self.init is not None:
            self.init(worker)


@cache
def _warn_of_forkserver() -> None:
    logger.warning(
        "DataLoader workers of the start method 'forkserver' end when the whole process group gets SIGTERM, and then "
        "nothing may be committed: give the loader multiprocessing_context='fork' or 'spawn'"
    )


def _ignore(number: int, frame: FrameType | None) -> None:
    pass


def _end_after(rank: int) -> None:
    """Torch looks for the rank between two batches only."""
    while os.getppid() == rank:
        time.sleep(WATCH_SECONDS)
    os._exit(ORPHAN_EXIT_STATUS)


def _end(iterator: int, process: Any) -> None:
    """End a worker on purpose, which torch then does not take for a failure."""
    with suppress(ValueError):  # torch has forgotten them already, as it does before it ends them
        torch._C._remove_worker_pids(iterator)
        torch._C._set_worker_pids(iterator, ())  # it will want to forget them once more
    process.kill()
