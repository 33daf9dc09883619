"""The watch over the first iterations after a predicted restart: a transient decays, a divergence does not."""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["WATCH_ITERATIONS", "Watch", "WatchDecision"]

WATCH_ITERATIONS = 60  # after a predicted restart; meanwhile no checkpoint begins

# The level now is a median of this many losses: four odd batches among them move nothing, five bad losses do. With 5
# instead of 9, one watch in 150 gave a false alarm where 3% of the batches were 1.5 nats off.
MEDIAN_LOSSES = 9
# Fewer losses than this never end a watch, unless one is not finite: early ones hold the transient at its largest.
MIN_LOSSES = 3
# Injection may raise the loss by much more than what is tolerated later (gain 3: gone after 40 iterations only).
START_FACTOR = 4.0
# Ordinary noise is allowed for on top: standard errors of the difference of two medians. 4 makes a false alarm over
# 60 looks a matter of 1 in some hundred runs where noise, not the tolerance, dominates, and far rarer elsewhere.
NOISE_STANDARD_ERRORS = 4.0
# Standard deviation of a normal distribution over its median absolute deviation, and of its median over its mean.
MAD_TO_SIGMA = 1.4826
MEDIAN_EFFICIENCY = 1.2533


@dataclass(frozen=True)
class WatchDecision:
    """The watch's verdict on the losses so far.

    Attributes:
        status: `diverged` asks for a roll-back to exact recompute; it and `passed` are final.
        iteration: iteration of the loss that led to it.
        loss: that loss, in nats.
        level: median of the newest losses.
        reason: one sentence for the user.
    """

    status: Literal["watching", "passed", "diverged"]
    iteration: int
    loss: float
    level: float
    reason: str


class Watch:
    """Compares training losses after a predicted restart with their level before the failure.

    The excess of a short median over the baseline must stay under an envelope, plus what ordinary noise explains. The
    envelope starts at 4 times the tolerance and falls linearly to it at the end of the watch.

    Args:
        baseline_losses: mean training losses (over all ranks) just before the checkpoint or the failure, in nats;
            20 or more make a good baseline, and one must be finite; those that are not are left out.
        tolerance_nats: excess allowed at its end.
    """

    def __init__(self, baseline_losses: Sequence[float], tolerance_nats: float) -> None:
        finite = [loss for loss in baseline_losses if math.isfinite(loss)]
        self._baseline = statistics.median(finite)
        deviation = statistics.median(abs(loss - self._baseline) for loss in finite)
        self._sigma = MAD_TO_SIGMA * deviation
        self._baseline_count = len(finite)
        self._tolerance_nats = tolerance_nats
        self._first_iteration: int | None = None
        self._recent: deque[float] = deque(maxlen=MEDIAN_LOSSES)
        self._decision: WatchDecision | None = None  # the newest

    def observe(self, iteration: int, loss: float) -> WatchDecision:
        """Take the next mean training loss; the first call sets where the watch begins.

        Args:
            iteration: ascending; iterations may be missing.
            loss: mean over all ranks, in nats; every rank must pass the same number to decide alike.
        """
        if self._first_iteration is None:
            self._first_iteration = iteration
        if self._decision is None or self._decision.status == "watching":
            self._recent.append(loss)
            self._decision = self._decide(iteration, iteration - self._first_iteration + 1, loss)
        return self._decision

    def _decide(self, iteration: int, elapsed: int, loss: float) -> WatchDecision:
        allowed = self._allowed(elapsed)
        if not math.isfinite(loss):
            reason = f"diverged: the training loss is {loss} at iteration {iteration}"
            return WatchDecision("diverged", iteration, loss, loss, reason)
        level = statistics.median(self._recent)
        excess = level - self._baseline
        compared = (
            f"at iteration {iteration} the training loss is {excess:+.3f} nats from its level before the failure, "
            f"and {allowed:+.3f} is the limit"
        )
        status: Literal["watching", "passed", "diverged"] = "watching"
        over = elapsed >= WATCH_ITERATIONS
        if excess > allowed and (len(self._recent) >= MIN_LOSSES or over):
            status = "diverged"
        elif over:
            status = "passed"
        return WatchDecision(status, iteration, loss, level, f"{status}: {compared}")

    def _allowed(self, elapsed: int) -> float:
        remaining = max(0.0, 1.0 - elapsed / WATCH_ITERATIONS)
        envelope = self._tolerance_nats * (1.0 + (START_FACTOR - 1.0) * remaining)
        per_median = 1.0 / len(self._recent) + 1.0 / self._baseline_count
        return envelope + NOISE_STANDARD_ERRORS * MEDIAN_EFFICIENCY * self._sigma * math.sqrt(per_median)
