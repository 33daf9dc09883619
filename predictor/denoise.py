"""FFT-based data denoising (FDD), for checkpoints at any times: a baseline, a mid band and a high band.

Source: CPSR, section III-A. It acts across time only, so that each band of all weights is one matrix over the
checkpoints, whatever the model's size; a row of it goes to `combine`.

- The **low band** is the least-squares line through the K checkpoints: the baseline, which can be extrapolated. The
  FFT alone has no such band: it continues a series periodically, so that a trend is a jump from the last checkpoint
  back to the first, and leaks into all bins. What is split into bins is therefore the residual of the line.
- The residual has mean zero, so bin 0 is empty: it belongs to the line. The bins q = 1 ... floor(K/2) remain. A real
  series has conjugate bins q and K - q; here they are one bin with a cosine and a sine. For even K the last is the
  Nyquist bin: on an even grid its sine is zero at all checkpoints, so it has a cosine only; for odd K there is none.
  Together these are K - 1 functions, while residuals span K - 2 dimensions: the line took a second one, which is no
  bin of its own but the ramp, spread over all of them.
- The period of bin 1 is K/(K - 1) times the span of the times: the span and one gap more, as the FFT has it.
- The **mid band** is the least-squares fit of the lowest bins to the residual, the **high band** what is left. On an
  even grid bins are orthogonal, so that the fit is exactly the FFT with all other bins set to zero. On any grid
  the fit of the mid bins alone (and not of all K - 1 functions at once) is an orthogonal projection: it
  never amplifies, however the times are clustered.

A sinusoid is not orthogonal to the line, unless it is symmetric about the middle: the line takes a share of it. To
fit line and sinusoids at once would separate them, but their slopes would trade against each other, and noise in
the slope is what extrapolation suffers from most: bin 1 would raise its variance 3-fold at 7 checkpoints, bins 1 and
2 6-fold at 8. Nor does the continued mid band know what comes: being periodic, one gap after the newest checkpoint it
is back at its value at the oldest.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

__all__ = ["MID_FRACTION", "Bands", "bands"]

# The paper's share of the volume that goes to the network.
MID_FRACTION = 0.4
# Times that are clustered sample some combinations of the mid sinusoids barely. Continuing such a one beyond the
# checkpoints would multiply noise by the inverse of its singular value, so those below this share of the largest are
# left to the high band. Truncation and not a ridge: it leaves well sampled times, and with them the FFT, exact.
SMALLEST_SINGULAR_VALUE = 0.1

Matrix = NDArray[numpy.float64]


@dataclass(frozen=True)
class Bands:
    """The bands of a series of K checkpoints; `low + mid + high` is the identity.

    All matrices are float64 and are applied to the checkpoints: `low[j] @ x` is the low band at checkpoint j. Rows
    of `low` sum to 1, all others to 0.

    Attributes:
        times: of the checkpoints, `(K,)`.
        low: the least-squares line at the checkpoints, `(K, K)`.
        mid: the mid band at the checkpoints, `(K, K)`.
        high: the rest, which is dropped, `(K, K)`.
        spectrum: from the checkpoints to the mid band's amplitudes, `(2 m, K)`: the cosines of bins 1 ... m, then
            their sines (for even K without the Nyquist bin's). On an even grid `2/K Re` and `-2/K Im` of the FFT of
            the line's residual (for the Nyquist bin `1/K Re`).
    """

    times: Matrix
    low: Matrix
    mid: Matrix
    high: Matrix
    spectrum: Matrix

    @property
    def denoised(self) -> Matrix:
        """Low and mid band at the checkpoints, `(K, K)`: row j forms the denoised state of checkpoint j."""
        return self.low + self.mid

    def baseline_at(self, time: float) -> Matrix:
        """The low band extrapolated to `time`: a row `(K,)` that sums to 1."""
        row: Matrix = _baseline(self.times, numpy.array([time]))[0]
        return row


def bands(times: Sequence[float], mid_fraction: float = MID_FRACTION) -> Bands:
    """Split a series of checkpoints at `times` into bands.

    Args:
        times: strictly ascending (cumulative learning rate), at least 2.
        mid_fraction: share of the floor(K/2) bins above bin 0 that form the mid band, from the lowest, rounded to
            whole bins (half a bin up): 0.4 is no bin for 3 checkpoints, 1 for 4 to 7, 2 for 8 to 13.

    Raises:
        ValueError: fewer than 2 times, times that are not finite or repeat or descend, or a fraction outside [0, 1].

    >>> bands([0.0, 1.0, 2.0]).baseline_at(3.0).round(6).tolist()
    [-0.666667, 0.333333, 1.333333]
    """
    if len(times) < 2:
        raise ValueError(f"{len(times)} times: a series needs 2 or more")
    if not all(math.isfinite(time) for time in times):
        raise ValueError(f"times must be finite: {list(times)}")
    for older, newer in itertools.pairwise(times):
        if not newer > older:
            raise ValueError(f"times must ascend without repeats, {newer:g} follows {older:g}")
    if not 0.0 <= mid_fraction <= 1.0:
        raise ValueError(f"mid_fraction = {mid_fraction}: expected a number in [0, 1]")
    grid = numpy.asarray(times, dtype=numpy.float64)
    bins = math.floor(mid_fraction * (len(times) // 2) + 0.5)
    low = _baseline(grid, grid)
    residual = numpy.eye(len(times)) - low
    sinusoids = _sinusoids(grid, grid, bins)
    spectrum: Matrix = numpy.linalg.pinv(sinusoids, rcond=SMALLEST_SINGULAR_VALUE) @ residual
    mid: Matrix = sinusoids @ spectrum
    return Bands(grid, low, mid, residual - mid, spectrum)


def _baseline(grid: Matrix, where: Matrix) -> Matrix:
    """The least-squares line through values at `grid`, evaluated at `where`: `(len(where), len(grid))`."""
    span = grid[-1] - grid[0]
    position = (grid - grid[0]) / span
    centred = position - position.mean()
    reach = (where - grid[0]) / span - position.mean()
    rows: Matrix = 1.0 / len(grid) + numpy.outer(reach, centred / (centred @ centred))
    return rows


def _sinusoids(grid: Matrix, where: Matrix, bins: int) -> Matrix:
    """Cosines of bins 1 ... `bins` of `grid`, then their sines, at `where`."""
    count = len(grid)
    fundamental = (where - grid[0]) / (grid[-1] - grid[0]) * (count - 1) / count
    numbers = numpy.arange(1, bins + 1)
    with_sine = numbers[2 * numbers < count]
    phases, sine_phases = (2.0 * math.pi * numpy.outer(fundamental, chosen) for chosen in (numbers, with_sine))
    return numpy.hstack([numpy.cos(phases), numpy.sin(sine_phases)])
