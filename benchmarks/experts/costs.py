"""What four failures cost a run, against the same run without them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy
import scipy

from cpsr.benchmarks.experts.tasks import FailingTask
from cpsr.benchmarks.harness.intervals import CONFIDENCE, Estimate
from cpsr.errors import CPSRError
from cpsr.fitter.curve import LossCurve
from cpsr.fitter.lag import LagBeyondError, paired_lag

__all__ = ["Cost", "costs", "mean_interval"]


@dataclass(frozen=True)
class Cost:
    """One run with failures.

    Attributes:
        label: of the model.
        seed: of the run.
        policy: which experts were saved.
        mode: what became of those that were stale.
        lags_iterations: lag behind the run without failures, 60 to 160 iterations after each failure's
            checkpoint; all failures so far are in it. None where it cannot be determined.
        standard_errors_iterations: of these, over validation chunks; None where it was counted as a bound.
        obstacles: why a lag is a bound or cannot be determined.
        restored: iterations of the checkpoints that the failures went back to.
        iterations: of the validations since the first failure.
        gaps_nats: loss there over that of the run without failures, in the mean over chunks.
        portion_lost: of tokens (PEC's PLT).
        momentary_total: sum of the layers' fractions (MOETION's MTL); `momentary_mean` is their mean.
        momentary_mean: see above.
        expert_age_iterations: mean age of the experts over the failures, at the checkpoint.
        saved_experts: of all ranks, in each checkpoint up to each failure since the one before.
    """

    label: str
    seed: int
    policy: str
    mode: str
    lags_iterations: tuple[float | None, ...]
    standard_errors_iterations: tuple[float | None, ...]
    obstacles: tuple[str | None, ...]
    restored: tuple[int, ...]
    iterations: tuple[int, ...]
    gaps_nats: tuple[float, ...]
    portion_lost: float
    momentary_total: float
    momentary_mean: float
    expert_age_iterations: float
    saved_experts: tuple[tuple[int, ...], ...]

    @property
    def final_lag_iterations(self) -> float | None:
        """After all failures."""
        return self.lags_iterations[-1]

    @property
    def mean_gap_nats(self) -> float:
        """Over the whole time since the first failure."""
        return float(numpy.mean(self.gaps_nats))

    @property
    def injection_gap_nats(self) -> float:
        """Right after a recovery, in the mean over the failures; the first one's is free of what others left."""
        at_once = [self.gaps_nats[self.iterations.index(restored)] for restored in self.restored]
        return float(numpy.mean(at_once))

    @property
    def experts_per_checkpoint(self) -> float:
        """Of all ranks, over the checkpoints up to the last failure: what is saved later bears on no lag."""
        return float(numpy.mean([count for counts in self.saved_experts for count in counts]))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def costs(task: FailingTask, found: Mapping[str, Any]) -> list[Cost]:
    """The runs of one job.

    Args:
        task: of the job.
        found: what `follow` returned.

    Raises:
        CPSRError: a training diverged; there is nothing to compare with.
    """
    fault_free = _curve(found["fault_free"], f"{task.mixture.label}, seed {task.seed}, without failures")
    return [_cost(task, run, fault_free) for run in found["runs"]]


def mean_interval(values: Sequence[float]) -> Estimate:
    """The mean over runs that differ by their seed, with Student's 95% interval.

    Raises:
        ValueError: fewer than two values.
    """
    if len(values) < 2:
        raise ValueError(f"an interval over runs needs two of them, not {len(values)}")
    mean = float(numpy.mean(values))
    quantile = float(scipy.stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    reach = quantile * float(numpy.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(mean, mean - reach, mean + reach)


def _cost(task: FailingTask, run: Mapping[str, Any], fault_free: LossCurve) -> Cost:
    what = f"{task.mixture.label}, seed {task.seed}, {run['policy']}, {run['mode']}"
    failures: list[dict[str, Any]] = run["failures"]
    curves = [_curve(failure["curve"], what) for failure in failures]
    found = [_lag(curve, fault_free, int(curve.iterations[0])) for curve in curves]
    # What a failure takes back is validated again; the newest holds from its checkpoint on.
    gaps: dict[int, float] = {}
    for curve in curves:
        gaps = {at: gap for at, gap in gaps.items() if at < curve.iterations[0]}
        differences = (curve.losses - fault_free.at(curve.iterations)).mean(axis=1)
        gaps |= dict(zip(curve.iterations.tolist(), differences.tolist(), strict=True))
    account = run["account"]
    return Cost(
        label=task.mixture.label,
        seed=task.seed,
        policy=run["policy"],
        mode=run["mode"],
        lags_iterations=tuple(lag for lag, _, _ in found),
        standard_errors_iterations=tuple(error for _, error, _ in found),
        obstacles=tuple(obstacle for _, _, obstacle in found),
        restored=tuple(int(curve.iterations[0]) for curve in curves),
        iterations=tuple(gaps),
        gaps_nats=tuple(gaps.values()),
        portion_lost=account["portion_lost"],
        momentary_total=account["momentary_total"],
        momentary_mean=account["momentary_mean"],
        expert_age_iterations=float(numpy.mean([failure["ages"] for failure in failures])),
        saved_experts=tuple(tuple(failure["saved_experts"]) for failure in failures),
    )


def _curve(plain: Mapping[str, Any], what: str) -> LossCurve:
    try:
        return LossCurve(numpy.array(plain["iterations"]), numpy.array(plain["losses"]))
    except ValueError as error:
        raise CPSRError(
            f"{what}: {error}: the training diverged, and nothing can be compared with it; no figures are kept"
        ) from error


def _lag(recovered: LossCurve, fault_free: LossCurve, restored: int) -> tuple[float | None, float | None, str | None]:
    """Lag, its standard error, and what stands against it."""
    try:
        lag = paired_lag(recovered, fault_free, restored)
    except LagBeyondError as error:
        return error.bound_iterations, None, f"counted as the bound: {error}"
    except ValueError as error:
        return None, None, f"no lag can be determined: {error}"
    return lag.iterations, lag.standard_error, None
