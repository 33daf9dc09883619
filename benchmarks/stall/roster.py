"""Which methods there are, and which of them this environment can run."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from cpsr.benchmarks.stall.job import Job
from cpsr.benchmarks.stall.methods import Cpsr, Dcp, Method, TorchSave
from cpsr.benchmarks.stall.rivals import DlRover, LmResiliency, TorchSnapshot

__all__ = ["INSTALL", "ROSTER", "Entry", "installed"]

INSTALL = "pip install --no-build-isolation --constraint constraints.txt '.[bench]'"


@dataclass(frozen=True)
class Entry:
    """A method that can be opened.

    Attributes:
        name: as in the tables.
        open: its method on a job, saving below a directory; a context manager.
        modules: what must be importable, beside our own dependencies; first the package itself.
        forced: whether its files are forced to the disk before it calls a checkpoint complete.
    """

    name: str
    open: Callable[[Job, Path], AbstractContextManager[Method]]
    modules: tuple[str, ...] = ()
    forced: bool = True


@contextmanager
def _opened(make: Callable[[Job, Path], Method], job: Job, directory: Path) -> Iterator[Method]:
    """A method that has nothing to close."""
    yield make(job, directory)


ROSTER = (
    Entry("cpsr", Cpsr.open),
    Entry("dcp async_save", partial(_opened, partial(Dcp, reuse_staging=False))),
    Entry("dcp, reused buffers", partial(_opened, partial(Dcp, reuse_staging=True))),
    Entry("dlrover", DlRover.open, ("dlrover", "grpc"), forced=False),  # it imports grpc without requiring it
    Entry("lm-resiliency", partial(LmResiliency.open, checked=False), ("lm_resiliency",)),
    Entry("lm-resiliency, checked", partial(LmResiliency.open, checked=True), ("lm_resiliency",)),
    Entry("torch.save + fsync", partial(_opened, TorchSave)),
    Entry("torchsnapshot", partial(_opened, TorchSnapshot), ("torchsnapshot",), forced=False),
)


def installed(entry: Entry) -> bool:
    """Whether everything it needs can be imported here."""
    return all(find_spec(module) is not None for module in entry.modules)
