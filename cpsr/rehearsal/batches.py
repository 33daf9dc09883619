"""The batches trained on while a rehearsal is prepared, kept to train on them again."""

import time
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["MicroBatch", "TrainedBatches"]


@dataclass(frozen=True)
class MicroBatch:
    """The arguments of one training forward, or of the user's loss function; copies on the host.

    Attributes:
        args: positional arguments; tensors as `_Kept`.
        kwargs: keyword arguments, likewise.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The original arguments, each tensor on its original device."""
        return _given_back(self.args), _given_back(self.kwargs)


class TrainedBatches:
    """Micro-batches of consecutive iterations with their losses, as this rank trained on them.

    Inputs are copied to the host at once: a loop may reuse the same tensor for the next batch, and the inputs of so
    many iterations could exhaust GPU memory. From a GPU they come in the order of the stream that trains, and nothing
    waits for them: what a rehearsal queues there follows. Losses stay on their device.

    Args:
        micro_batches_per_iteration: of the engine.
        device: the engine's.
        limit_bytes: of host memory for the copies.

    Attributes:
        iterations: the micro-batches of each finished iteration.
        problem: why these batches cannot be trained on again; None while they can.
        hopeless: whether later ones would meet the same problem.
        seconds: spent on the copies, and on the comparison with the user's loss function.
    """

    def __init__(self, micro_batches_per_iteration: int, device: torch.device, limit_bytes: int) -> None:
        self._per_iteration = micro_batches_per_iteration
        self._device_type = device.type
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self.iterations: list[list[MicroBatch]] = []
        self.problem: str | None = None
        self.hopeless = False
        self.seconds = 0.0
        self._losses: list[list[torch.Tensor]] = []
        self._batches: list[MicroBatch] = []
        self._seen: list[torch.Tensor] = []

    def add(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A micro-batch of the iteration in progress."""
        if self.problem is not None:
            return
        started = time.perf_counter()
        self._bytes += _size_bytes((args, kwargs))
        if self._bytes > self._limit_bytes:
            self.give_up(
                f"the inputs of {len(self.iterations)} iterations and part of the next take {self._bytes} bytes "
                f"of host memory on a rank, more than rehearsal.batches_limit_bytes = {self._limit_bytes}"
            )
            return
        if torch.is_autocast_enabled(self._device_type):
            self.give_up("the loop calls the module under autocast, which is not known at a step boundary")
            return
        try:
            self._batches.append(MicroBatch(_kept(args), _kept(kwargs)))
        except TypeError as error:
            self.give_up(f"the inputs hold {error}, which is not plain data")
        except RuntimeError as error:  # no more pinned memory, say
            self.give_up(f"the inputs could not be copied to the host ({error})")
        self.seconds += time.perf_counter() - started

    def add_loss(self, loss: torch.Tensor) -> None:
        """A micro-batch's detached training loss."""
        self._seen.append(loss.clone())

    def end_iteration(self, applied: bool) -> None:
        """The iteration in progress is complete.

        Args:
            applied: False when its update was skipped (overflow).
        """
        batches, losses = self._batches, self._seen
        self._batches, self._seen = [], []
        if self.problem is None and not len(batches) == len(losses) == self._per_iteration:
            self.give_up(
                f"an iteration had {len(batches)} forwards and {len(losses)} losses where {self._per_iteration} of "
                "each were expected"
            )
        if self.problem is None and not applied:
            self.problem = "an update was skipped (overflow), so that the iterations cannot be compared"
        if self.problem is None:
            self.iterations.append(batches)
            self._losses.append(losses)

    def give_up(self, problem: str) -> None:
        """Drop all batches and keep no more: later ones would meet the same problem.

        Args:
            problem: one clause for messages.
        """
        self.problem, self.hopeless = problem, True
        self.iterations.clear()
        self._batches.clear()

    def losses(self) -> torch.Tensor:
        """Training losses on the host, `(iterations, micro-batches)`, float64."""
        rows = [torch.stack([loss.reshape(()).float() for loss in losses]) for losses in self._losses]
        return torch.stack(rows).cpu().double()


@dataclass(frozen=True)
class _Kept:
    values: torch.Tensor
    device: torch.device
    requires_grad: bool


def _kept(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Kept(_host_copy(value.detach()), value.device, value.requires_grad)
    if type(value) is dict:
        return {key: _kept(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_kept(item) for item in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__}")


def _host_copy(values: torch.Tensor) -> torch.Tensor:
    if not values.is_cuda or values.layout != torch.strided:
        return values.to("cpu", copy=True)
    return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)


def _size_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict | list | tuple):
        return sum(_size_bytes(item) for item in (value.values() if isinstance(value, dict) else value))
    return 0


def _given_back(value: Any) -> Any:
    if isinstance(value, _Kept):
        values = value.values
        if values.device != value.device:  # else no other reference to the copy exists, and it is used once
            values = torch.empty_like(values, device=value.device).copy_(values, non_blocking=True)
        return values.requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: _given_back(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_given_back(item) for item in value)
    return value
