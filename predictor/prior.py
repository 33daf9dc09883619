"""The prior: window, gain and base of the line before any recovery of this run has been measured.

Element-wise errors and curvature along the slope do not find these settings; they come from the persistent lag of
recoveries measured beforehand (shift of the validation curve over 60 to 160 iterations after resuming, against the
paired run that never failed). Workload of all figures quoted here: a 0.9M-parameter byte-level GPT, AdamW, learning
rate 1e-3 cosine over 3000 iterations; "T" is the checkpoint interval, "u" the iterations from checkpoint to failure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from cpsr.predictor.protocol import HistoryEntry, Target

__all__ = ["MIN_CHECKPOINTS", "Prior", "choose", "expected_lag_fraction", "gain"]

# Useful windows were 200 to 400 iterations at T = 20, 50 and 100 alike: 12 checkpoints at T=20 (lag 1 to 6), 6 to 8
# at T=50, 4 to 6 at T=100; 120 iterations (6 checkpoints at T=20) gave 8 to 25, 700 (8 at T=100) gave 67 of 76.
WINDOW_ITERATIONS = 300
# A young run turns faster: 300 iterations were still good at iteration 750, 700 no longer at iteration 1500.
WINDOW_SHARE_OF_AGE = 0.4
WINDOW_SHARE_USELESS = 0.5
# Two checkpoints leave no residual to average: the secant amplified noise (0.12 to 0.30 nats up at injection).
MIN_CHECKPOINTS = 3

# Learning rate over its peak. From x_c with gain 2 was best down to 0.2: -3.4 +- 1.9 of 42 at 0.5; on a second, 0.4M
# model of its own runs +5 +- 2 of 40 at 0.37 (line's value, gain 1.5: +36) and -17 +- 5 at 0.2 (+4 +- 8). At 0.15 the
# first model had both level (+11 +- 5 and +15 of 42), x_c with the far longer transient, while the second still did
# better from x_c (-11 +- 5 against +57); single failure points each, so the move to the line is put late.
DECAY_STARTS = 0.2
MOSTLY_DECAYED = 0.05
GAIN = 2.0
GAIN_DECAYED = 1.5

# Horizon over age, u/f -> largest gain. 2 was right up to 0.055 (T=100 at 50%, T=50 at 25%); at 0.096 (T=100 at 25%)
# 1.5 was the most that helped. Further points continue that slope and then fade: not measured, so cautious.
YOUTH = (0.055, 0.10, 0.19, 0.50)
YOUTH_GAIN = (2.0, 1.5, 0.5, 0.0)
# Horizon over window -> largest gain. 2 was right up to 0.27 (T=100, u=80, 300 iterations); at 1 the line reaches
# as far ahead as it was fitted over, and only its plain value is trusted.
REACH = (1.0 / 3.0, 1.0)
REACH_GAIN = (2.0, 1.0)

# Lag over u: 0.18 is the mean of five cells with u/f <= 0.096 (-0.08, 0.16, 0.26, 0.15, 0.41), 0.41 the cell at 0.096;
# the rest continues to 1, where recomputing costs the same and is exact.
LAG_FRACTION = 0.18
LAG_BY_YOUTH = ((0.055, 0.10, 0.21), (LAG_FRACTION, 0.41, 1.0))
LAG_BY_REACH = ((1.0 / 3.0, 1.0), (LAG_FRACTION, 1.0))
# 67 of 76 iterations were lost with a window of 0.47 of the run's age.
LAG_BY_WINDOW_SHARE = ((WINDOW_SHARE_OF_AGE, WINDOW_SHARE_USELESS), (LAG_FRACTION, 1.0))


@dataclass(frozen=True)
class Prior:
    """Settings of the line for one recovery.

    Attributes:
        window_iterations: the line is fitted over the checkpoints at most this far before the newest.
        gain: factor on the fitted displacement, in [0, 2].
        base: where the displacement starts: 0 the checkpoint's weights, 1 the fitted line's value there.
        expected_lag_fraction: expected persistent lag over u, in [0.18, 1]. Rough: it orders sources of recovery, it
            does not promise.
    """

    window_iterations: int
    gain: float
    base: float
    expected_lag_fraction: float


def choose(target: Target, entries: Sequence[HistoryEntry]) -> Prior:
    """Settings for predicting `target` from `entries`.

    Args:
        target: where to predict; not before the newest entry.
        entries: usable checkpoints, strictly ascending.

    Raises:
        ValueError: fewer than three entries.
    """
    if len(entries) < MIN_CHECKPOINTS:
        raise ValueError(f"{len(entries)} checkpoints, the line needs {MIN_CHECKPOINTS}")
    newest = entries[-1]
    horizon = target.iteration - newest.iteration
    # At least three checkpoints, however far apart they are: their distance then lowers gain and expectation.
    three = newest.iteration - entries[-MIN_CHECKPOINTS].iteration
    window = max(min(WINDOW_ITERATIONS, int(WINDOW_SHARE_OF_AGE * newest.iteration)), three)
    decayed = _decayed(newest.learning_rate, target.peak_learning_rate)
    youth, reach = horizon / max(target.iteration, 1), horizon / window
    return Prior(
        window_iterations=window,
        gain=gain(youth, reach, decayed),
        base=decayed,
        expected_lag_fraction=expected_lag_fraction(youth, reach, window / max(newest.iteration, 1)),
    )


def gain(youth: float, reach: float, decayed: float) -> float:
    """Factor on the displacement, in [0, 2]; never larger for a larger argument.

    Args:
        youth: u/f, the horizon over the age of the run at the failure.
        reach: u over the window.
        decayed: 0 while the learning rate is high, 1 once it has mostly decayed.
    """
    schedule = GAIN + (GAIN_DECAYED - GAIN) * decayed
    return float(min(schedule, numpy.interp(youth, YOUTH, YOUTH_GAIN), numpy.interp(reach, REACH, REACH_GAIN)))


def expected_lag_fraction(youth: float, reach: float, window_share: float) -> float:
    """Expected persistent lag over u, in [0.18, 1]; never smaller for a larger argument.

    Args:
        youth: u/f, the horizon over the age of the run at the failure.
        reach: u over the window.
        window_share: the window over the age of the newest checkpoint.
    """
    return float(
        max(
            numpy.interp(youth, *LAG_BY_YOUTH),
            numpy.interp(reach, *LAG_BY_REACH),
            numpy.interp(window_share, *LAG_BY_WINDOW_SHARE),
        )
    )


def _decayed(learning_rate: float, peak: float) -> float:
    """0 at 20% of the peak learning rate and above, 1 at 5% and below; 0 where the run had no learning rate yet."""
    ratio = learning_rate / peak if peak > 0 else 1.0
    return float(numpy.interp(ratio, (MOSTLY_DECAYED, DECAY_STARTS), (1.0, 0.0)))
