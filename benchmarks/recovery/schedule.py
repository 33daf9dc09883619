"""Schedules of the learning rate: a warm-up, and what follows it."""

import math
from typing import Literal, get_args

__all__ = ["SCHEDULES", "WARM_UP_ITERATIONS", "Schedule", "scheduled_rate"]

# `cosine` falls to 0 as half a cosine, `cosine10` to a tenth of the peak. `wsd` (warm-up, stable, decay) stays at the
# peak, and falls linearly to 0 over the last fifth. `constant` stays.
Schedule = Literal["constant", "cosine", "cosine10", "wsd"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
WARM_UP_ITERATIONS = 50
FLOOR_SHARE = 0.1
DECAY_SHARE = 0.2


def scheduled_rate(schedule: Schedule, peak: float, iteration: int, iterations: int) -> float:
    """Learning rate of the update that takes a training from `iteration` to the next.

    Args:
        schedule: its name.
        peak: reached after the warm-up.
        iteration: 0 or later; after the end the rate stays as at the end.
        iterations: length of the training.
    """
    warmed = peak * min(1.0, (iteration + 1) / WARM_UP_ITERATIONS)
    done = min(1.0, iteration / iterations)
    if schedule == "constant":
        return warmed
    if schedule == "wsd":
        return warmed * min(1.0, (1.0 - done) / DECAY_SHARE)
    falling = 0.5 * (1.0 + math.cos(math.pi * done))
    floor = FLOOR_SHARE if schedule == "cosine10" else 0.0
    return warmed * (floor + (1.0 - floor) * falling)
