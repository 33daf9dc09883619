"""How often the job fails: what was expected, corrected by what was seen."""

import math
from dataclasses import dataclass
from typing import Any

import scipy  # its parts are loaded at their first use: a restart does not wait for them

__all__ = ["FailureRate"]

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class FailureRate:
    """Posterior of lambda, the failures per second of a job whose failures are independent of each other.

    A Gamma prior with its mean at one failure per prior MTBF, and the weight of `prior_failures` failures seen over
    as many of these times; failures that come as a Poisson process leave a Gamma again.

    Attributes:
        prior_mtbf_hours: mean time between failures that was expected, positive.
        prior_failures: weight of it, positive: as if so many failures had been seen before.
        failures: seen during the exposure; not whole where some count for this class in part.
        exposure_seconds: how long failures could have been seen; zero while nothing is known.

    Raises:
        ValueError: a number is not finite, negative, or zero where it must be positive.
    """

    prior_mtbf_hours: float
    prior_failures: float = 1.0
    failures: float = 0
    exposure_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("prior_mtbf_hours", "prior_failures"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, not {getattr(self, name)}")
        for name in ("failures", "exposure_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and not negative, not {getattr(self, name)}")

    @property
    def shape(self) -> float:
        """Of the posterior: failures, those of the prior included."""
        return self.prior_failures + self.failures

    @property
    def seconds(self) -> float:
        """Rate parameter of the posterior: exposure, that of the prior included."""
        return self.prior_failures * self.prior_mtbf_hours * SECONDS_PER_HOUR + self.exposure_seconds

    @property
    def mean_per_second(self) -> float:
        """Expected failures per second; positive."""
        return self.shape / self.seconds

    @property
    def mtbf_hours(self) -> float:
        """Mean time between failures at that rate."""
        return 1 / (self.mean_per_second * SECONDS_PER_HOUR)

    def interval_per_second(self, confidence: float = 0.95) -> tuple[float, float]:
        """Central credible interval of lambda.

        Raises:
            ValueError: `confidence` does not lie between 0 and 1.
        """
        if not 0 < confidence < 1:
            raise ValueError(f"confidence must lie between 0 and 1, not be {confidence}")
        low, high = (1 - confidence) / 2, (1 + confidence) / 2
        at = scipy.special.gammaincinv(self.shape, (low, high)) / self.seconds
        return float(at[0]), float(at[1])

    def to_dict(self) -> dict[str, Any]:
        """Plain data without NaN; the interval is that of 95%."""
        low, high = self.interval_per_second()
        return {
            "prior_mtbf_hours": self.prior_mtbf_hours,
            "prior_failures": self.prior_failures,
            "failures": self.failures,
            "exposure_seconds": self.exposure_seconds,
            "mean_per_second": self.mean_per_second,
            "low_per_second": low,
            "high_per_second": high,
            "mtbf_hours": self.mtbf_hours,
        }
