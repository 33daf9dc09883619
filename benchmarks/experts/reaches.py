"""How far experts that are older than the checkpoint are moved along their lines, and the loss right after that."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from cpsr.benchmarks.experts.costs import mean_interval
from cpsr.benchmarks.experts.followed import Followed
from cpsr.benchmarks.experts.predicting import predicted
from cpsr.benchmarks.experts.training import Training
from cpsr.benchmarks.intervals import Estimate
from cpsr.predictor.line import LinePredictor

__all__ = ["GAINS", "Reach", "measure_reaches", "reaches"]

GAINS = (0.0, 0.25, 0.5, 1.0, 2.0)  # of the way to the checkpoint; 0 leaves them as they were saved


@dataclass(frozen=True)
class Reach:
    """One gain, over runs that differ by their seed.

    Attributes:
        label: of the model.
        policy: which experts were saved.
        gain: on the displacement that the line gives.
        gap_nats: loss at the first failure's checkpoint over that of all experts as they were there.
    """

    label: str
    policy: str
    gain: float
    gap_nats: Estimate


def measure_reaches(training: Training, policy: Followed, exact_nats: float) -> dict[str, Any]:
    """The gap of every gain, at the policy's last checkpoint; leaves the training there, without its moments.

    Args:
        training: of this rank; all ranks call this together.
        policy: what it has saved.
        exact_nats: mean loss there with nothing stale.

    Returns:
        Plain data: `policy`, and `gaps_nats` in the order of `GAINS`.
    """
    gaps = []
    for gain in GAINS:
        weights, _ = predicted(LinePredictor(gain=gain, base="checkpoint"), policy.saved)
        policy.saved.put_back(training.adapter.shard(), weights)
        training.adapter.push_down()
        gaps.append(float(training.validate().mean()) - exact_nats)
    training.forget_routed()
    return {"policy": policy.name, "gaps_nats": gaps}


def reaches(jobs: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Reach]:
    """Means over seeds.

    Args:
        jobs: label of the model, and what `follow` returned, of every run.
    """
    gaps: dict[tuple[str, str], list[list[float]]] = {}
    for label, found in jobs:
        for one in found["reaches"]:
            gaps.setdefault((label, one["policy"]), []).append(one["gaps_nats"])
    return [
        Reach(label, policy, gain, mean_interval(of_seeds))
        for (label, policy), runs in gaps.items()
        for gain, of_seeds in zip(GAINS, numpy.transpose(runs).tolist(), strict=True)
    ]
