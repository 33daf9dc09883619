"""How often the job fails, in all and in each class of failures: what was expected, corrected by what was seen."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import scipy  # its parts are loaded at their first use: a restart does not wait for them

from cpsr.journal import FailureScope

__all__ = ["PRIOR_SHARES", "FailureClasses", "FailureRate"]

SECONDS_PER_HOUR = 3600.0
# Of the 419 unexpected interruptions of a job on 16,384 GPUs (Llama Team, "The Llama 3 Herd of Models", 2024, Table 5),
# these 98 leave the machines and their memory: software bugs 54, network switches and cables 35, NCCL timeouts 7,
# dependencies 2.
_PROCESS_SHARE = 98 / 419
# In the spot trace of Bamboo (NSDI 2023) 1.3% of the 79 incidents would take some machine and both holders of its
# replicas, if these are any two of the others. Power cuts and restarts on other machines are not in it: hence more.
_EVERYTHING_SHARE = 0.05
# Before any failure is seen; the others take a machine, or the job moves away from it.
PRIOR_SHARES: Mapping[FailureScope, float] = {
    "process": _PROCESS_SHARE,
    "machine": 1 - _PROCESS_SHARE - _EVERYTHING_SHARE,
    "everything": _EVERYTHING_SHARE,
}


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
    """

    prior_mtbf_hours: float
    prior_failures: float = 1.0
    failures: float = 0
    exposure_seconds: float = 0.0

    @property
    def shape(self) -> float:
        """Shape of the posterior: failures, those of the prior included."""
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

    def interval_per_second(self) -> tuple[float, float]:
        """Central interval of lambda that has it with a probability of 95%."""
        low, high = scipy.special.gammaincinv(self.shape, (0.025, 0.975)) / self.seconds
        return float(low), float(high)

    def to_dict(self) -> dict[str, Any]:
        """Plain data without NaN; the interval is that of 95%."""
        low, high = self.interval_per_second()
        rates = {"mean_per_second": self.mean_per_second, "low_per_second": low, "high_per_second": high}
        return {**vars(self), **rates, "mtbf_hours": self.mtbf_hours}


@dataclass(frozen=True)
class FailureClasses:
    """The job's failure rate, and the share of each class.

    Each class has a prior with its share of the weight. Failures of unknown class count for each class in proportion to
    the shares by the known ones.

    Attributes:
        total: of the whole job, with all failures.
        seen: failures whose class is known; at most as many as `total` has.
    """

    total: FailureRate
    seen: Mapping[FailureScope, int]

    def share(self, scope: FailureScope) -> float:
        """Expected share of the failures that are of this class; the shares add up to 1."""
        weight = self.total.prior_failures
        return (weight * PRIOR_SHARES[scope] + self.seen.get(scope, 0)) / (weight + sum(self.seen.values()))

    def to_dict(self) -> dict[str, Any]:
        """Plain data: that of the whole job, and of each class its share and the failures seen."""
        classes = {scope: {"share": self.share(scope), "seen": self.seen.get(scope, 0)} for scope in PRIOR_SHARES}
        return {**self.total.to_dict(), "classes": classes}
