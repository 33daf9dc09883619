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
    """The bands of a series of K checkpoints, float64 matrices `(K, K)`; `low + mid + high` is the identity.

    They are applied to the checkpoints: `low[j] @ x` is the low band at checkpoint j. Rows of `low` sum to 1, all
    others to 0.

    Attributes:
        low: the least-squares line at the checkpoints.
        mid: the mid band at the checkpoints.
        high: the rest, which is dropped.
    """

    low: Matrix
    mid: Matrix
    high: Matrix

    @property
    def denoised(self) -> Matrix:
        """Low and mid band at the checkpoints, `(K, K)`: row j forms the denoised state of checkpoint j."""
        return self.low + self.mid


def bands(times: Sequence[float], mid_fraction: float = MID_FRACTION) -> Bands:
    """Split a series of checkpoints at `times` into bands.

    Args:
        times: finite and strictly ascending (cumulative learning rate), at least 2.
        mid_fraction: share of the floor(K/2) bins above bin 0 that form the mid band, in [0, 1], from the lowest,
            rounded to whole bins (half a bin up): 0.4 is no bin for 3 checkpoints, 1 for 4 to 7, 2 for 8 to 13.

    >>> bands([0.0, 1.0, 2.0]).low[2].round(6).tolist()
    [-0.166667, 0.333333, 0.833333]
    """
    count = len(times)
    # Of the span, so that the distance from 0 costs no precision.
    position = (numpy.asarray(times, dtype=numpy.float64) - times[0]) / (times[-1] - times[0])
    centred = position - position.mean()
    low: Matrix = 1.0 / count + numpy.outer(centred, centred / (centred @ centred))
    residual = numpy.eye(count) - low
    bins = numpy.arange(1, math.floor(mid_fraction * (count // 2) + 0.5) + 1)
    phases = 2.0 * math.pi * (count - 1) / count * position[:, None]
    # The Nyquist bin has no sine.
    sinusoids = numpy.hstack([numpy.cos(phases * bins), numpy.sin(phases * bins[2 * bins < count])])
    mid: Matrix = sinusoids @ numpy.linalg.pinv(sinusoids, rcond=SMALLEST_SINGULAR_VALUE) @ residual
    return Bands(low, mid, residual - mid)
