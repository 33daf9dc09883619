"""Pieces of a measurement in processes of their own, the peak of their memory, and the wait for a device."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

import torch

from cpsr.demo.device import CUDA
from cpsr.errors import CPSRError

__all__ = ["MemoryPeak", "Workers", "default_workers", "in_own_process", "own_bytes", "status_bytes", "wait_for"]

DEFAULT_WORKERS = 2
# A piece of 2 MiB takes about 0.1 ms to combine, so that a peak is not one moment but hundreds of pieces long.
SAMPLE_SECONDS = 0.005
KIBIBYTE = 1024

Arguments = ParamSpec("Arguments")
Item = TypeVar("Item")
Result = TypeVar("Result")


def default_workers() -> int:
    """Two, on a machine with as many cores."""
    return min(DEFAULT_WORKERS, len(os.sched_getaffinity(0)))


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

    def __enter__(self) -> Self:
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
            tick: called with the number of finished items, after every item.

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
        try:
            for done, future in enumerate(as_completed(futures), 1):
                future.result()  # the first error ends the call
                tick(done)
        except BrokenProcessPool as error:
            raise CPSRError(
                "a worker was killed or has run out of memory; what was measured before is kept: run again, perhaps "
                "with fewer --workers"
            ) from error
        return [future.result() for future in futures]


def _begin() -> None:
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # a parent that was killed cannot say goodbye; every file is whole or absent


class MemoryPeak:
    """Samples memory in a thread of its own, as a context manager around the work.

    Args:
        bytes_now: `own_bytes`, or another figure.
        seconds: between two samples.

    Attributes:
        before_bytes: when the context was entered.
        peak_bytes: the largest sample.
    """

    def __init__(self, bytes_now: Callable[[], int], seconds: float = SAMPLE_SECONDS) -> None:
        self._bytes_now, self._seconds = bytes_now, seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampling", daemon=True)
        self.before_bytes = self.peak_bytes = 0

    def __enter__(self) -> Self:
        """Start to sample."""
        self.before_bytes = self.peak_bytes = self._bytes_now()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop; the last figure counts too."""
        self._over.set()
        self._thread.join()
        self.peak_bytes = max(self.peak_bytes, self._bytes_now())

    def _run(self) -> None:
        while not self._over.wait(self._seconds):
            self.peak_bytes = max(self.peak_bytes, self._bytes_now())


def own_bytes() -> int:
    """Resident memory of this process that is no mapped file."""
    return status_bytes("RssAnon")


def status_bytes(name: str, pid: int | None = None) -> int:
    """A figure of Linux's `/proc/<pid>/status`, by default of this process."""
    lines = Path(f"/proc/{pid or 'self'}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * KIBIBYTE for line in lines if line.startswith(f"{name}:"))


def wait_for(device: str) -> None:
    """Wait until the work that this thread has given the device is done; copies on other streams go on."""
    if device == CUDA:
        torch.cuda.current_stream().synchronize()
