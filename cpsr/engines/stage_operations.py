"""One thing that a pipeline's stage does in a step, and who takes or gives a step as a sequence of these."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

__all__ = ["SAMPLED_ELEMENTS", "Operation", "Repeats", "TrafficLog", "Verb"]

# Of what a stage receives: so many elements show whether it is what came the first time.
SAMPLED_ELEMENTS = 256

Verb = Literal["load", "send", "receive", "all_reduce", "broadcast", "step", "result"]


@dataclass(frozen=True)
class Operation:
    """One thing that a stage did in a step.

    Attributes:
        verb: `load`: a micro-batch is drawn; `send`, `receive`: to and from another stage; `all_reduce`, `broadcast`:
            with ranks of several stages; `step`: the optimizer's; `result`: of `train_batch`.
        where: the other rank; of a collective the name of its group.
        detail: of an `all_reduce` its operator, of a `broadcast` the rank that has the value.
        shape: of the tensor that was moved.
        dtype: its type, without `torch.`.
    """

    verb: Verb
    where: str = ""
    detail: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""


class TrafficLog(Protocol):
    """Takes what a stage does in a step; on the training thread."""

    def begin(self, iteration: int) -> None:
        """A step begins."""

    def add(self, operation: Operation, values: torch.Tensor | None, plain: Any = None) -> None:
        """It did this; what it sent nobody changes until it is freed. All else may change once this has returned.

        On a device that is in the order of the current stream.
        """

    def end(self, applied: bool, form: Any) -> None:
        """It is complete.

        Args:
            applied: whether the optimizer stepped.
            form: shapes of what is sent to the next stage, which DeepSpeed sends once in a life; None: nothing is.
        """

    def drop(self, reason: str | None) -> None:
        """This step cannot be repeated from a log; None: it was not completed."""


class Repeats(Protocol):
    """Steps as they were logged."""

    @property
    def resting(self) -> Collection[int]:
        """Ranks that repeat only what crosses the boundaries; the others compute."""

    @property
    def form(self) -> Any:
        """As `TrafficLog.end` got it."""

    def operations(self, iteration: int) -> Iterator[tuple[Operation, torch.Tensor | None, Any]]:
        """What this stage did in the step after which this iteration is complete; the last one is `result`."""

    def applied(self, iteration: int) -> bool:
        """Whether the optimizer stepped."""

    def void(self) -> None:
        """No start may repeat from the logs again."""
