import math
from collections.abc import Callable

import numpy
import pytest

from cpsr.predictor.divergence_watch import WATCH_ITERATIONS, Watch, WatchDecision

TOLERANCE = 0.5


def run(
    seed: int, sigma: float, excess: Callable[[int], float], outliers: float = 0.0, baseline: int = 30
) -> WatchDecision:
    """Watch `2.2 + excess(k) + noise`, with a slow descent and now and then a batch that is 1.5 nats off."""
    rng = numpy.random.default_rng(seed)

    def loss(k: int) -> float:
        odd = 1.5 if rng.random() < outliers else 0.0
        return float(2.2 - 0.0005 * k + sigma * rng.normal() + odd)

    watch = Watch([loss(k) for k in range(-baseline, 0)], TOLERANCE)
    for k in range(WATCH_ITERATIONS):
        decision = watch.observe(1000 + k, loss(k) + excess(k))
        if decision.status != "watching":
            return decision
    return decision


def transient(size: float, decay: float) -> Callable[[int], float]:
    return lambda k: size * math.exp(-k / decay)


@pytest.mark.parametrize("sigma", [0.03, 0.1, 0.5])
def test_ordinary_noise_passes(sigma: float) -> None:
    alarms = sum(run(seed, sigma, transient(0.1, 15), outliers=0.03).status == "diverged" for seed in range(300))
    assert alarms <= (0 if sigma < 0.5 else 1)


def test_a_large_transient_that_decays_passes() -> None:
    results = [run(seed, 0.1, transient(1.8, 12)).status for seed in range(100)]
    assert results == ["passed"] * 100


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_ends_it_at_once(loss: float) -> None:
    watch = Watch([2.0] * 20, TOLERANCE)
    decision = watch.observe(1, loss)
    assert decision.status == "diverged"
    assert watch.observe(2, 2.0) is decision  # final


@pytest.mark.parametrize(
    ("excess", "last"),
    [
        (lambda k: 3.5, 1004),
        (lambda k: 0.1 + 0.1 * k, 1000 + WATCH_ITERATIONS // 2),
        (lambda k: 1.0, 1000 + WATCH_ITERATIONS),
    ],
    ids=["explosion", "steady", "level"],
)
def test_a_divergence_is_seen_in_time(excess: Callable[[int], float], last: int) -> None:
    for seed in range(100):
        decision = run(seed, 0.1, excess)
        assert decision.status == "diverged"
        assert decision.iteration <= last
