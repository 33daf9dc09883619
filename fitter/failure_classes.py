"""How often the job fails in each of the classes that leave something different."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cpsr.fitter.failure_rate import FailureRate
from cpsr.journal import FailureScope

__all__ = ["PRIOR_SHARES", "FailureClasses"]

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
class FailureClasses:
    """The job's failure rate, and the share of each class.

    Each class has a Gamma prior with its share of the job's prior rate and of its weight, and the exposure of the job.
    So the rates of the classes add up to that of the job. Failures of unknown class count for each class in proportion
    to the rates by the known ones.

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

    def rate(self, scope: FailureScope) -> FailureRate:
        """Posterior of the failures of one class."""
        total, share = self.total, PRIOR_SHARES[scope]
        unknown = total.failures - sum(self.seen.values())
        return FailureRate(
            total.prior_mtbf_hours / share,
            total.prior_failures * share,
            self.seen.get(scope, 0) + unknown * self.share(scope),
            total.exposure_seconds,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data: that of the whole job, and `classes` with that of each; `seen` are those of known class."""
        classes = {scope: self.rate(scope).to_dict() | {"seen": self.seen.get(scope, 0)} for scope in PRIOR_SHARES}
        return {**self.total.to_dict(), "classes": classes}
