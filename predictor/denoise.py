"""FFT-based data denoising (FDD) for checkpoints at any times: the low and mid band of a series, without the high band.

Source: CPSR, section III-A. It acts across time only, so that a band of all weights is one matrix over the checkpoints,
whatever the model's size.

- The **low band** is the least-squares line: it can be extrapolated. The FFT alone continues a series periodically, so
  that a trend is a jump from the last checkpoint back to the first, and leaks into all bins.
- The **mid band** is the least-squares fit of the lowest bins to the line's residual, on an even grid exactly the FFT
  with all other bins set to zero. Conjugate bins q and K - q are one bin with a cosine and a sine; the Nyquist bin of
  an even K has no sine. The period of bin 1 is the span of the times and one gap more, as the FFT has it. The fit of
  the mid bins alone is an orthogonal projection: it never amplifies, however the times are clustered.
- The **high band** is what is left.

To fit line and sinusoids at once would trade their slopes against each other: bin 1 would raise the variance of the
slope 3-fold at 7 checkpoints, bins 1 and 2 6-fold at 8.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

__all__ = ["MID_FRACTION", "bands"]

# The paper's share of the volume that goes to the network: of the floor(K/2) bins above bin 0, from the lowest, rounded
# to whole bins (half a bin up). It is no bin for 3 checkpoints, 1 for 4 to 7, 2 for 8 to 13.
MID_FRACTION = 0.4
# Times that are clustered sample some combinations of the mid sinusoids barely. Continuing such a one beyond the
# checkpoints would multiply noise by the inverse of its singular value, so those below this share of the largest are
# left to the high band. Truncation and not a ridge: it leaves well sampled times, and with them the FFT, exact.
SMALLEST_SINGULAR_VALUE = 0.1


class Bands(NamedTuple):
    """Bands of a series of K checkpoints, `(K, K)` each, to be applied to the checkpoints; the rest is the high band.

    Attributes:
        low: the least-squares line at the checkpoints; rows sum to 1.
        mid: the mid band there; rows sum to 0.
    """

    low: NDArray[numpy.float64]
    mid: NDArray[numpy.float64]


def bands(times: Sequence[float]) -> Bands:
    """The low and the mid band of checkpoints at `times`, finite and strictly ascending, at least 2."""
    count = len(times)
    # Of the span, so that the distance from 0 costs no precision.
    position = (numpy.asarray(times, dtype=numpy.float64) - times[0]) / (times[-1] - times[0])
    centred = position - position.mean()
    low = 1.0 / count + numpy.outer(centred, centred / (centred @ centred))
    bins = numpy.arange(1, math.floor(MID_FRACTION * (count // 2) + 0.5) + 1)
    phases = 2.0 * math.pi * (count - 1) / count * position[:, None]
    # The Nyquist bin has no sine.
    sinusoids = numpy.hstack([numpy.cos(phases * bins), numpy.sin(phases * bins[2 * bins < count])])
    mid = sinusoids @ numpy.linalg.pinv(sinusoids, rcond=SMALLEST_SINGULAR_VALUE) @ (numpy.eye(count) - low)
    return Bands(low, mid)
