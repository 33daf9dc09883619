"""How far experts that are older than the checkpoint are moved along their lines, and the loss right after that."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from cpsr.benchmarks.experts.costs import mean_interval
from cpsr.benchmarks.experts.followed import Followed
from cpsr.benchmarks.experts.predicting import predicted
from cpsr.benchmarks.experts.saved import Saved
from cpsr.benchmarks.experts.training import Training
from cpsr.benchmarks.intervals import Estimate
from cpsr.predictor.line import LinePredictor

__all__ = ["GAINS", "Reach", "measure_reaches", "reaches"]

GAINS = (0.0, 0.25, 0.5, 1.0, 2.0)  # of the way to the checkpoint; 0 leaves them as they were saved


@dataclass(frozen=True)
class Reach:
    """One policy at the first failure, over runs that differ by their seed.

    Attributes:
        label: of the model.
        policy: which experts were saved.
        cosine: between where the lines lead and where the experts were, both from their newest snapshots; None where
            fewer than two seeds have one.
        gaps_nats: for each of `GAINS`, loss at the checkpoint over that of all experts as they were there.
    """

    label: str
    policy: str
    cosine: Estimate | None
    gaps_nats: tuple[Estimate, ...]


def measure_reaches(training: Training, policy: Followed, exact: Saved, exact_nats: float) -> dict[str, Any]:
    """The gap of every gain, at the policy's last checkpoint; leaves the training there, without its moments.

    Args:
        training: of this rank; all ranks call this together.
        policy: what it has saved.
        exact: everything as it was at that checkpoint.
        exact_nats: mean loss there with nothing stale.

    Returns:
        Plain data: `policy`, `cosine` over the elements of all predicted experts of all ranks (None where there
        are none), and `gaps_nats` in the order of `GAINS`.
    """
    gaps, cosine = [], None
    for gain in GAINS:
        weights, _ = predicted(LinePredictor(gain=gain, base="checkpoint"), policy.saved)
        policy.saved.put_back(training.adapter.shard(), weights)
        training.adapter.push_down()
        gaps.append(float(training.validate().mean()) - exact_nats)
        if gain == 1.0:
            cosine = _cosine(weights, policy.saved, exact)
    training.forget_routed()
    return {"policy": policy.name, "cosine": cosine, "gaps_nats": gaps}


def _cosine(weights: Mapping[str, torch.Tensor], saved: Saved, exact: Saved) -> float | None:
    """Between the moves from `saved` to the predicted weights and to the exact ones, of what is predicted."""
    sums = torch.zeros(3, dtype=torch.float64)
    for name, values in weights.items():
        foretold = (values - saved.newest_weights(name)).double()
        if foretold.any():
            moved = (exact.newest_weights(name) - saved.newest_weights(name)).double()
            sums += torch.stack([foretold @ moved, foretold @ foretold, moved @ moved])
    torch.distributed.all_reduce(sums)
    product, foretold_squares, moved_squares = sums.tolist()
    lengths = math.sqrt(foretold_squares * moved_squares)
    return float(product / lengths) if lengths else None


def reaches(jobs: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Reach]:
    """Means over seeds.

    Args:
        jobs: label of the model, and what `follow` returned, of every run.
    """
    runs: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for label, found in jobs:
        for one in found["reaches"]:
            runs.setdefault((label, one["policy"]), []).append(one)
    results = []
    for (label, policy), seeds in runs.items():
        cosines = [one["cosine"] for one in seeds if one["cosine"] is not None]
        gaps = numpy.transpose([one["gaps_nats"] for one in seeds]).tolist()
        cosine = mean_interval(cosines) if len(cosines) > 1 else None
        results.append(Reach(label, policy, cosine, tuple(map(mean_interval, gaps))))
    return results
