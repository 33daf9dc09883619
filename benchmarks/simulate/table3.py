"""What MoEvement's paper states of its Table 3: configurations and results, read from the paper.

Iteration times are not stated. Each overhead is given both in seconds and in per cent of an iteration, rounded. The
intervals that the pairs of one model allow have a common part, whose middle is taken.
"""

from dataclasses import dataclass

__all__ = ["MODELS", "MTBF_MINUTES", "Model", "Overhead"]

MTBF_MINUTES = (120, 60, 30, 20, 10)
# The global batch of 512 in micro-batches of 32 (section 5.1); MoE-LLaVa's is not stated and taken as the others'.
MICRO_BATCHES = 16
HALF_CENTISECOND = 0.005
HALF_PERCENT = 0.005


@dataclass(frozen=True)
class Overhead:
    """Mean checkpoint overhead of an iteration, as printed."""

    seconds: float
    fraction: float

    @property
    def iteration_seconds(self) -> tuple[float, float]:
        """Least and greatest iteration time that both rounded figures allow."""
        low = (self.seconds - HALF_CENTISECOND) / (self.fraction + HALF_PERCENT)
        return low, (self.seconds + HALF_CENTISECOND) / (self.fraction - HALF_PERCENT)


@dataclass(frozen=True)
class Model:
    """One model's rows; results by MTBF in the order of MTBF_MINUTES.

    Attributes:
        name: of the model.
        stages: of its pipeline, S.
        pipelines: data-parallel.
        checkfreq_interval: in iterations.
        window: W_sparse.
        gemini_interval_range: at an MTBF of 2 h; 46 to 92 over the four models (section 5.2), 92 for DeepSeek (5.3).
        overheads: CheckFreq's, Gemini's at 2 h, MoC's at 2 h, MoEvement's.
        checkfreq_recovery_seconds: in all, over the 12 hours; likewise the following.
    """

    name: str
    stages: int
    pipelines: int
    checkfreq_interval: int
    window: int
    gemini_interval_range: tuple[int, int]
    overheads: tuple[Overhead, Overhead, Overhead, Overhead]
    checkfreq_recovery_seconds: tuple[float, ...]
    gemini_recovery_seconds: tuple[float, ...]
    moevement_recovery_seconds: tuple[float, ...]
    checkfreq_ettr: tuple[float, ...]
    gemini_ettr: tuple[float, ...]
    moevement_ettr: tuple[float, ...]

    @property
    def iteration_seconds_range(self) -> tuple[float, float]:
        """Common part of what the printed overheads allow."""
        ranges = [overhead.iteration_seconds for overhead in self.overheads]
        return max(low for low, _ in ranges), min(high for _, high in ranges)

    @property
    def iteration_seconds(self) -> float:
        """The middle of the range."""
        return sum(self.iteration_seconds_range) / 2

    @property
    def bubble_free_fraction(self) -> float:
        """Time of an iteration without pipeline bubbles over that of a whole one, `M / (M + S - 1)`."""
        micro_batches = MICRO_BATCHES / self.pipelines
        return micro_batches / (micro_batches + self.stages - 1)


MODELS = (
    Model(
        name="MoE-LLaVa",
        stages=6,
        pipelines=2,
        checkfreq_interval=57,
        window=3,
        gemini_interval_range=(46, 92),
        overheads=(Overhead(0.03, 0.02), Overhead(0.02, 0.01), Overhead(0.14, 0.08), Overhead(0.01, 0.01)),
        checkfreq_recovery_seconds=(1265, 2530, 5059, 7589, 11178),
        gemini_recovery_seconds=(938, 1551, 2203, 2570, 4161),
        moevement_recovery_seconds=(11, 24, 57, 74, 117),
        checkfreq_ettr=(0.945, 0.914, 0.853, 0.792, 0.712),
        gemini_ettr=(0.959, 0.939, 0.897, 0.852, 0.764),
        moevement_ettr=(0.981, 0.979, 0.975, 0.971, 0.964),
    ),
    Model(
        name="GPT-MoE",
        stages=3,
        pipelines=4,
        checkfreq_interval=78,
        window=3,
        gemini_interval_range=(46, 92),
        overheads=(Overhead(0.03, 0.01), Overhead(0.03, 0.01), Overhead(0.18, 0.09), Overhead(0.03, 0.01)),
        checkfreq_recovery_seconds=(1424, 2848, 4486, 8543, 13086),
        gemini_recovery_seconds=(1121, 1718, 2160, 3259, 4627),
        moevement_recovery_seconds=(18, 28, 78, 105, 161),
        checkfreq_ettr=(0.937, 0.903, 0.834, 0.765, 0.687),
        gemini_ettr=(0.947, 0.923, 0.868, 0.815, 0.722),
        moevement_ettr=(0.979, 0.976, 0.971, 0.966, 0.959),
    ),
    Model(
        name="QWen-MoE",
        stages=6,
        pipelines=2,
        checkfreq_interval=113,
        window=5,
        gemini_interval_range=(46, 92),
        overheads=(Overhead(0.05, 0.02), Overhead(0.04, 0.02), Overhead(0.19, 0.09), Overhead(0.04, 0.02)),
        checkfreq_recovery_seconds=(1170, 2340, 4680, 7020, 10040),
        gemini_recovery_seconds=(961, 1402, 2114, 2331, 3495),
        moevement_recovery_seconds=(17, 33, 83, 140, 207),
        checkfreq_ettr=(0.927, 0.898, 0.841, 0.783, 0.703),
        gemini_ettr=(0.934, 0.915, 0.868, 0.819, 0.717),
        moevement_ettr=(0.981, 0.977, 0.970, 0.963, 0.957),
    ),
    Model(
        name="DeepSeek-MoE",
        stages=12,
        pipelines=1,
        checkfreq_interval=124,
        window=6,
        gemini_interval_range=(92, 92),
        overheads=(Overhead(0.08, 0.03), Overhead(0.07, 0.02), Overhead(0.22, 0.08), Overhead(0.06, 0.02)),
        checkfreq_recovery_seconds=(992, 1984, 3967, 5951, 9402),
        gemini_recovery_seconds=(800, 1218, 1879, 1983, 3236),
        moevement_recovery_seconds=(22, 43, 104, 167, 241),
        checkfreq_ettr=(0.902, 0.877, 0.827, 0.777, 0.672),
        gemini_ettr=(0.910, 0.894, 0.853, 0.814, 0.728),
        moevement_ettr=(0.975, 0.970, 0.965, 0.956, 0.951),
    ),
)
