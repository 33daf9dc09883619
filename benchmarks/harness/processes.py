"""Pieces of a measurement in processes of their own: one at a time, or many over the machine's cores."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch

from cpsr.errors import CPSRError

__all__ = ["Workers", "default_workers", "in_own_process"]

POLL_SECONDS = 1.0  # how often a progress bar is looked after
DEFAULT_WORKERS = 2

Arguments = ParamSpec("Arguments")
Item = TypeVar("Item")
Result = TypeVar("Result")


def default_workers() -> int:
    """Two, on a machine with as many cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(DEFAULT_WORKERS, cores)


def in_own_process(
    work: Callable[Arguments, Result], *arguments: Arguments.args, **keywords: Arguments.kwargs
) -> Result:
    """What `work` returns in a new process, which has ended by then; its exceptions are raised here.

    Raises:
        CPSRError: the process was ended from outside.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(work, *arguments, **keywords).result()
        except BrokenProcessPool as error:
            raise CPSRError(
                f"the process of {work.__name__} was ended from outside, perhaps for lack of memory: choose something "
                "smaller"
            ) from error


class Workers:
    """Processes that compute with one thread each, so that what they measure does not depend on how many there are.

    Args:
        count: how many; 1 starts none.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Workers":
        # A run's directory is named after its threads: the caller must compute like its workers.
        torch.set_num_threads(1)
        if self.count > 1:
            # Not forked: torch's threads and the console's do not survive that.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.count, context, _begin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def each(
        self, function: Callable[[Item], Result], items: Sequence[Item], tick: Callable[[int], None] = lambda done: None
    ) -> list[Result]:
        """Results of `function` in the order of the items.

        Args:
            function: of a module's own, so that a process can import it.
            items: plain enough to be sent to a process.
            tick: called with the number of finished items, after every item or about once a second.

        Raises:
            CPSRError: as of the function, or a process has ended.
        """
        if self._pool is None:
            results = []
            for item in items:
                results.append(function(item))
                tick(len(results))
            return results
        futures = [self._pool.submit(function, item) for item in items]
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, POLL_SECONDS, FIRST_COMPLETED)
            for future in done:
                _check(future)  # the first error ends the call
            tick(len(items) - len(waiting))
        return [future.result() for future in futures]


def _check(future: Future[Any]) -> None:
    try:
        future.result()
    except BrokenProcessPool as error:
        raise CPSRError(
            "a worker was killed or has run out of memory; what was measured before is kept: run again, perhaps with "
            "fewer --workers"
        ) from error


def _begin() -> None:
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # a parent that was killed cannot say goodbye; every file is whole or absent
