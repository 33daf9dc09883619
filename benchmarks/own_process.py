"""One piece of a measurement in a process of its own, whose memory nothing else has touched."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import ParamSpec, TypeVar

from cpsr.errors import CPSRError

__all__ = ["in_own_process"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


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
