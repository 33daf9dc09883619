"""Seconds and iterations: conversions that stay defined for zero, infinite or unknown inputs."""

import math

__all__ = ["ITERATIONS_MAX", "SECONDS_PER_HOUR", "in_iterations", "plain", "root", "whole_iterations"]

SECONDS_PER_HOUR = 3600.0
# No run has more iterations; a rule that wants no checkpoint at all returns this number, and a bound decides.
ITERATIONS_MAX = 2**31


def root(value: float) -> float:
    """Square root; NaN of a negative number."""
    return math.sqrt(value) if value >= 0 else math.nan


def in_iterations(seconds: float, iteration_seconds: float) -> float:
    """Seconds in iterations, as a limit if one of the two is 0 or infinite; NaN if there is no limit."""
    if not (seconds >= 0 and iteration_seconds >= 0) or seconds == iteration_seconds == 0:
        return math.nan
    if iteration_seconds == 0:
        return math.inf
    # inf / inf is NaN by itself; a quotient too large for a float is infinite.
    return seconds / iteration_seconds


def whole_iterations(iterations: float) -> int:
    """The nearest valid interval, from 1 to ITERATIONS_MAX.

    NaN is 1: until a job is measured, lost work is the larger risk.
    """
    if math.isnan(iterations) or iterations < 1:
        return 1
    return ITERATIONS_MAX if iterations > ITERATIONS_MAX else round(iterations)


def plain(value: float) -> float | str:
    """The number, or its name if JSON has no such number."""
    return float(value) if math.isfinite(value) else str(float(value))
