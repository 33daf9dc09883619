"""Training losses: kept on the device, averaged over the micro-batches of an iteration, read without a sync."""

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch

from cpsr.errors import SaveError
from cpsr.state.arrival import Arrival, Deadline
from cpsr.state.device_values import number

__all__ = ["LossRecorder", "Step"]

# Losses in a checkpoint for the guard, whose watch compares with their median: enough to average out the noise of a
# batch, few enough that the loss hardly changes over them.
RECENT_LOSSES = 32
# For the device to finish what is queued at the end of a run; a device that hangs must not delay a restart.
ARRIVAL_SECONDS = 10.0


@dataclass(frozen=True)
class Step:
    """One finished iteration.

    Attributes:
        iteration: its number.
        learning_rate: the learning rate it used.
        seconds: wall time since the end of the iteration before.
        applied: False when the update was skipped (overflow).
        loss: mean over this rank's micro-batches in nats; None if no loss was seen.
    """

    iteration: int
    learning_rate: float
    seconds: float
    applied: bool
    loss: float | None = None


@dataclass(frozen=True)
class _Copy:
    """Losses on their way to the host.

    Attributes:
        steps: theirs, and those of steps without a loss.
        losses: on their device, None where a step has none.
        host: the copy of those that are there.
        arrival: of the copy; None for losses on the host.
    """

    steps: list[Step]
    losses: list[torch.Tensor | None]
    host: torch.Tensor
    arrival: Arrival | None

    def is_here(self, deadline: Deadline | None) -> bool:
        """Whether it is complete; waits until the deadline, without one not at all."""
        if self.arrival is None or self.arrival.here:
            return True
        if deadline is None:
            return False
        try:
            self.arrival.wait("the copy of the losses", deadline)
        except SaveError:
            return False
        return True

    def finished(self) -> list[Step]:
        """The steps with their losses, once the copy is here."""
        values = iter(self.host.tolist())
        return [
            replace(step, loss=None if loss is None else next(values))
            for step, loss in zip(self.steps, self.losses, strict=True)
        ]


class LossRecorder:
    """Collects losses as device scalars and returns them as numbers some iterations later.

    Args:
        flush_iterations: iterations per asynchronous copy to the host.

    Attributes:
        recent: the last losses that are on the host, oldest first.
    """

    def __init__(self, flush_iterations: int) -> None:
        self._flush_iterations = flush_iterations
        self._micro: list[torch.Tensor] = []
        self._steps: list[tuple[Step, torch.Tensor | None]] = []
        self._copying: deque[_Copy] = deque()  # oldest first
        self._latest: torch.Tensor | None = None
        self.recent: deque[float] = deque(maxlen=RECENT_LOSSES)

    def add(self, loss: torch.Tensor) -> None:
        """Add the detached loss of one micro-batch."""
        self._micro.append(loss.clone())  # a loop may change its own in place, and a CUDA graph writes the next there

    def end_iteration(self, step: Step) -> list[Step]:
        """Close an iteration; returns finished iterations whose losses have arrived (often none)."""
        micro, self._micro = self._micro, []
        loss = torch.stack(micro).mean() if len(micro) > 1 else (micro[0] if micro else None)
        self._latest = loss
        self._steps.append((step, loss))
        return self.flush() if len(self._steps) >= self._flush_iterations else []

    @property
    def newest(self) -> torch.Tensor | None:
        """The loss of the last closed iteration, on its device."""
        return self._latest

    def latest(self) -> float | None:
        """The loss of the last closed iteration; waits for the device, so only for short watches."""
        return None if self._latest is None else float(self._latest)

    def flush(self, wait: bool = False) -> list[Step]:
        """Start copying the collected losses, and return those that have arrived.

        Args:
            wait: wait for all of them, at most `ARRIVAL_SECONDS`; only at the end of a run.
        """
        steps, self._steps = self._steps, []
        if steps:
            losses = [None if loss is None else loss.float() for _, loss in steps]
            seen = [loss for loss in losses if loss is not None]
            host, arrival = _to_host(torch.stack(seen) if seen else torch.empty(0, device="cpu"))
            self._copying.append(_Copy([step for step, _ in steps], losses, host, arrival))
        return self._arrived(Deadline(ARRIVAL_SECONDS) if wait else None)

    def recent_so_far(self) -> list[Any]:
        """`recent` and the losses that have not arrived yet, for a checkpoint; those as `DeviceNumber`s."""
        copying = [loss for copy in self._copying for loss in copy.losses]
        pending = [loss.float() for loss in (*copying, *(loss for _, loss in self._steps)) if loss is not None]
        return [*self.recent, *(number(loss, on_device=True) for loss in pending)][-RECENT_LOSSES:]

    def restart(self, recent: list[float]) -> None:
        """Drop collected losses; `recent` are those before the state from which training continues."""
        self._micro, self._steps, self._copying, self._latest = [], [], deque(), None
        self.recent.clear()
        self.recent.extend(recent)

    def _arrived(self, deadline: Deadline | None) -> list[Step]:
        finished: list[Step] = []
        while self._copying and self._copying[0].is_here(deadline):
            finished += self._copying.popleft().finished()
        self.recent.extend(step.loss for step in finished if step.loss is not None)
        return finished


def _to_host(values: torch.Tensor) -> tuple[torch.Tensor, Arrival | None]:
    if not values.is_cuda:
        return values, None
    host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    host.copy_(values, non_blocking=True)
    return host, Arrival(values.device)
