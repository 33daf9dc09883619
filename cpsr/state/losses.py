"""Training losses: kept on the device, averaged over the micro-batches of an iteration, read without a sync."""

from collections import deque
from typing import Any, NamedTuple

import torch

from cpsr.errors import SaveError
from cpsr.state.codec import SmallState
from cpsr.state.device_values import Deadline, DeviceNumber, number

__all__ = ["LossRecorder", "Step"]

# Losses in a checkpoint for the guard, whose watch compares with their median: enough to average out the noise of a
# batch, few enough that the loss hardly changes over them.
RECENT_LOSSES = 32
FLUSH_ITERATIONS = 20  # iterations per copy of their losses to the host, which nothing waits for
# For the device to finish what is queued at the end of a run; a device that hangs must not delay a restart.
ARRIVAL_SECONDS = 10.0

_Loss = torch.Tensor | float  # on a device, or on the host


class Step(NamedTuple):
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


class LossRecorder:
    """Collects losses, those on a device as its scalars, and returns them as numbers some iterations later.

    Args:
        flush_iterations: iterations per asynchronous copy to the host.

    Attributes:
        open: whether the next iteration has begun, to which what the script logs then belongs; the loop's forward
            sets it.
        newest: the loss of the last closed iteration, on its device; None: there is none.
        recent: the last losses that are on the host, oldest first.
    """

    def __init__(self, flush_iterations: int = FLUSH_ITERATIONS) -> None:
        self._flush_iterations = flush_iterations
        self._micro: list[_Loss] = []
        self._steps: list[tuple[Step, _Loss | None]] = []
        # Steps whose losses are on their way to the host, oldest first, with the losses and their copy.
        self._copying: deque[tuple[list[Step], list[Any], SmallState | None]] = deque()  # None: they are there
        self.newest: _Loss | None = None
        self._logged: list[_Loss] = []  # by the script, of the open iteration
        self._logged_before: list[_Loss] = []  # of the newest that is closed
        self.open = False
        self._logs_late = False  # whether the script logs losses of closed iterations
        self.recent: deque[float] = deque(maxlen=RECENT_LOSSES)

    def add(self, loss: torch.Tensor) -> None:
        """Add the detached loss of one micro-batch."""
        self._micro.append(_kept(loss))

    def log(self, loss: torch.Tensor) -> None:
        """Add a loss that the script reports; of one iteration, these replace the losses that the engine reports.

        Between two iterations it belongs to the one that has just been closed.
        """
        kept = _kept(loss.detach().reshape(()))
        if self.open:
            self._logged.append(kept)
            return
        self._logs_late = True
        self._logged_before.append(kept)
        if self._steps:
            self.newest = _mean(self._logged_before)
            self._steps[-1] = self._steps[-1][0], self.newest

    def end_iteration(self, step: Step | None) -> list[Step]:
        """Close an iteration: the micro-batches so far are all of it, and `newest` is their mean.

        Args:
            step: None: it does not count.

        Returns:
            Finished iterations whose losses have arrived (often none).
        """
        self.newest = _mean(self._logged or self._micro)
        self._logged_before, self._logged, self._micro, self.open = self._logged, [], [], False
        if step is None:
            return []
        self._steps.append((step, self.newest))
        newest = int(self._logs_late)  # stays: its loss is still to come
        return self.flush(newest=newest) if len(self._steps) - newest >= self._flush_iterations else []

    def latest(self) -> float | None:
        """The loss of the last closed iteration; waits for the device, so only for short watches."""
        return None if self.newest is None else float(self.newest)

    def flush(self, wait: bool = False, newest: int = 0) -> list[Step]:
        """Start copying the collected losses, and return those that have arrived.

        Args:
            wait: wait for all of them, at most `ARRIVAL_SECONDS`; only at the end of a run.
            newest: so many iterations stay.
        """
        end = len(self._steps) - newest
        steps, self._steps = self._steps[:end], self._steps[end:]
        if steps:
            losses = [_number(loss) for _, loss in steps]
            copied = SmallState(losses) if any(isinstance(loss, DeviceNumber) for loss in losses) else None
            self._copying.append(([step for step, _ in steps], losses, copied))
        return self._arrived(Deadline(ARRIVAL_SECONDS) if wait else None)

    def recent_so_far(self) -> list[Any]:
        """`recent` and the losses that have not arrived yet, for a checkpoint; those as `DeviceNumber`s."""
        copying = [loss for _, losses, _ in self._copying for loss in losses]
        waiting = [_number(loss) for _, loss in self._steps]
        return [*self.recent, *(loss for loss in (*copying, *waiting) if loss is not None)][-RECENT_LOSSES:]

    def restart(self, recent: list[float]) -> None:
        """Drop collected losses; `recent` are those before the state from which training continues."""
        self._micro, self._steps, self._copying, self.newest = [], [], deque(), None
        self._logged, self._logged_before, self.open = [], [], False
        self.recent.clear()
        self.recent.extend(recent)

    def _arrived(self, deadline: Deadline | None) -> list[Step]:
        finished: list[Step] = []
        while self._copying and _is_here(self._copying[0][2], deadline):
            steps, losses, copied = self._copying.popleft()
            arrived = losses if copied is None else copied.tree()
            finished += [step._replace(loss=loss) for step, loss in zip(steps, arrived, strict=True)]
        self.recent.extend(step.loss for step in finished if step.loss is not None)
        return finished


def _is_here(copied: SmallState | None, deadline: Deadline | None) -> bool:
    """Whether it is complete; waits until the deadline, without one not at all."""
    if copied is None:
        return True
    if deadline is None or copied.here:
        return copied.here
    try:
        copied.wait(deadline)
    except SaveError:
        return False
    return True


def _kept(loss: torch.Tensor) -> _Loss:
    """A loss as it is now: a loop may change its own in place, and a CUDA graph writes the next there."""
    return loss.clone() if loss.is_cuda else loss.item()


def _number(loss: _Loss | None) -> Any:
    """As a checkpoint has it; a device is not waited for."""
    return number(loss, on_device=True) if isinstance(loss, torch.Tensor) else loss


def _mean(losses: list[_Loss]) -> _Loss | None:
    """In float32, on the device of those that are on one: a script may log a number beside them."""
    if len(losses) < 2:
        return losses[0] if losses else None
    device = next((loss.device for loss in losses if isinstance(loss, torch.Tensor)), torch.device("cpu"))
    own = [
        loss.float() if isinstance(loss, torch.Tensor) else torch.full((), loss, dtype=torch.float32, device=device)
        for loss in losses
    ]
    mean = torch.stack(own).mean()
    return mean if mean.is_cuda else mean.item()
