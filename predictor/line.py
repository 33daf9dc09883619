"""The line: every weight follows its least-squares slope over the recent checkpoints, further by a gain."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from cpsr.predictor import prior
from cpsr.predictor.obstacles import too_far, too_few, window_start
from cpsr.predictor.protocol import HistoryEntry, Target
from cpsr.predictor.series_predictor import CHUNK_ELEMENTS, Fit, SeriesPredictor

__all__ = ["LinePredictor", "line_coefficients"]


class LinePredictor(SeriesPredictor):
    """Least-squares line of each operator on the cumulative-learning-rate axis (a `StatePredictor`).

    Predicts `x_c + base * (line(c) - x_c) + gain * slope * (time_f - time_c)`. It needs three usable checkpoints
    within the window, and goes no further ahead than the line is fitted over, nor 10 intervals.

    Args:
        window_iterations: span of history the line is fitted over; None: the prior's.
        gain: factor on the fitted displacement; None: the prior's.
        base: start from the checkpoint's weights or from the line's value there; None: the prior's blend.
        chunk_elements: elements per piece; memory is about four such pieces of float32.
        agree: as in `SeriesPredictor`.
        name: as in `SeriesPredictor`.

    Raises:
        ValueError: a window below 2, a gain below 0 or not finite, or fewer than 1 element a piece.
    """

    name = "line"

    def __init__(
        self,
        window_iterations: int | None = None,
        gain: float | None = None,
        base: Literal["checkpoint", "line"] | None = None,
        chunk_elements: int = CHUNK_ELEMENTS,
        agree: Callable[[Sequence[int]], Sequence[int]] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(chunk_elements, agree, name)
        if window_iterations is not None and window_iterations < 2:
            raise ValueError(f"window_iterations = {window_iterations}: a line needs a window of 2 or more")
        if gain is not None and not 0 <= gain < math.inf:
            raise ValueError(f"gain = {gain}: expected a finite number, 0 or larger")
        self._window_iterations = window_iterations
        self._gain = gain
        self._base = None if base is None else float(base == "line")

    def _obstacle(self, points: Sequence[HistoryEntry], target: Target) -> str | None:
        few = too_few(points, prior.MIN_CHECKPOINTS)
        if few is not None:
            return few
        window = self._window(points, target)
        fitted = points[window_start(points, window) :]
        if len(fitted) < prior.MIN_CHECKPOINTS:
            return f"{len(fitted)} usable checkpoints within {window} iterations; {prior.MIN_CHECKPOINTS} are needed"
        return too_far(target, fitted)

    def _fit(self, points: Sequence[HistoryEntry], target: Target) -> Fit:
        chosen = prior.choose(target, points)
        window = self._window(points, target)
        gain = chosen.gain if self._gain is None else self._gain
        base = chosen.base if self._base is None else self._base
        start = window_start(points, window)
        row = line_coefficients([point.time for point in points[start:]], target.time, gain, base)
        settings = {
            "window_iterations": window,
            "gain": gain,
            "base": base,
            "expected_lag_fraction": chosen.expected_lag_fraction,
        }
        return Fit((0.0,) * start + row, settings=settings)

    def _window(self, points: Sequence[HistoryEntry], target: Target) -> int:
        if self._window_iterations is not None:
            return self._window_iterations
        return prior.choose(target, points).window_iterations

    def _sentence(self, settings: Mapping[str, Any]) -> str:
        return (
            f"line over {len(settings['used_iterations'])} checkpoints ({settings['window_iterations']} iterations), "
            f"gain {settings['gain']:.2f}, base {settings['base']:.2f}, {settings['horizon_iterations']} iterations "
            "ahead"
        )


def line_coefficients(times: Sequence[float], target_time: float, gain: float, base: float) -> tuple[float, ...]:
    """Coefficients of `x_n + base * (line(n) - x_n) + gain * slope * (target_time - t_n)` over the snapshots.

    With the mean time m, `S = sum (t_k - m)^2` and n the newest: the slope is `sum_k (t_k - m)/S * x_k` and the
    line's value at n is `sum_k (1/K + (t_n - m)(t_k - m)/S) * x_k`. The newest coefficient is positive.

    Args:
        times: ascending, not all equal; at least 2.
        target_time: not before the newest.
        gain: factor on the displacement, 0 or larger.
        base: 0 for the newest snapshot, 1 for the line's value there.

    Returns:
        One float per time; they sum to 1 to rounding.

    >>> line_coefficients([0.0, 1.0], 2.0, gain=1.0, base=0.0)
    (-1.0, 2.0)
    """
    count = len(times)
    mean = math.fsum(times) / count
    scatter = math.fsum((time - mean) ** 2 for time in times)
    reach = base * (times[-1] - mean) + gain * (target_time - times[-1])
    row = [base / count + reach * ((time - mean) / scatter) for time in times[:-1]]
    return (*row, 1.0 - math.fsum(row))
