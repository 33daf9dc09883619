"""Training losses: kept on the device, averaged over the micro-batches of an iteration, read without a sync."""

from collections import deque
from dataclasses import dataclass, replace

import torch

__all__ = ["LossRecorder", "Step"]

# Losses in a checkpoint for the guard, whose watch compares with their median: enough to average out the noise of a
# batch, few enough that the loss hardly changes over them.
RECENT_LOSSES = 32


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


class LossRecorder:
    """Collects losses as device scalars and returns them as numbers some iterations later.

    Args:
        flush_iterations: iterations per asynchronous copy to the host.
    """

    def __init__(self, flush_iterations: int) -> None:
        self._flush_iterations = flush_iterations
        self._micro: list[torch.Tensor] = []
        self._steps: list[tuple[Step, torch.Tensor | None]] = []
        self._copying: tuple[list[Step], list[bool], torch.Tensor, torch.Event | None] | None = None
        self._latest: torch.Tensor | None = None
        self.recent: deque[float] = deque(maxlen=RECENT_LOSSES)

    def add(self, loss: torch.Tensor) -> None:
        """Add the detached loss of one micro-batch."""
        self._micro.append(loss)

    def end_iteration(self, step: Step) -> list[Step]:
        """Close an iteration; returns finished iterations whose losses have arrived (often none)."""
        micro, self._micro = self._micro, []
        loss = torch.stack(micro).mean() if len(micro) > 1 else (micro[0] if micro else None)
        self._latest = loss
        self._steps.append((step, loss))
        return self.flush() if len(self._steps) >= self._flush_iterations else []

    def latest(self) -> float | None:
        """The loss of the last closed iteration; waits for the device, so only for short watches."""
        return None if self._latest is None else float(self._latest)

    def flush(self, wait: bool = False) -> list[Step]:
        """Start copying the collected losses, and return those copied before.

        Args:
            wait: also return the losses being copied now; only at checkpoints and at the end of a run.
        """
        arrived = self._arrived()
        steps, self._steps = self._steps, []
        if steps:
            losses = [loss.float() for _, loss in steps if loss is not None]
            host, event = _to_host(torch.stack(losses) if losses else torch.empty(0, device="cpu"))
            self._copying = ([step for step, _ in steps], [loss is not None for _, loss in steps], host, event)
            if wait or event is None:
                arrived += self._arrived()
        return arrived

    def restart(self, recent: list[float]) -> None:
        """Drop collected losses; `recent` are those before the state from which training continues."""
        self._micro, self._steps, self._copying, self._latest = [], [], None, None
        self.recent.clear()
        self.recent.extend(recent)

    def _arrived(self) -> list[Step]:
        if self._copying is None:
            return []
        steps, seen, host, event = self._copying
        self._copying = None
        if event is not None:
            event.synchronize()
        values = iter(host.tolist())
        finished = [
            replace(step, loss=next(values) if has_loss else None) for step, has_loss in zip(steps, seen, strict=True)
        ]
        self.recent.extend(step.loss for step in finished if step.loss is not None)
        return finished


def _to_host(values: torch.Tensor) -> tuple[torch.Tensor, torch.Event | None]:
    if not values.is_cuda:
        return values, None
    host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    host.copy_(values, non_blocking=True)
    event = torch.Event(values.device)
    event.record()
    return host, event
