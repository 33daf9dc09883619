import json
import math

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.fitter.predictor_curve import fit_predictor_curve

COUNTS = numpy.arange(3, 43)


@given(st.floats(-0.2, 0.2), st.floats(-20.0, 2.0), st.permutations(list(range(1, 13))))
def test_an_exact_curve_is_found_in_any_order(tau1: float, tau2: float, counts: list[int]) -> None:
    places = numpy.array(counts)
    curve = fit_predictor_curve(places, numpy.exp(tau2 - tau1 * places))
    assert curve.tau1_per_checkpoint == pytest.approx(tau1, abs=1e-6)
    assert curve.tau2 == pytest.approx(tau2, abs=1e-5)
    assert curve.at(places) == pytest.approx(numpy.exp(tau2 - tau1 * places), rel=1e-4)
    assert (curve.first_count, curve.last_count, curve.points) == (1, 12, 12)


def test_the_covariance_is_the_spread_over_repetitions() -> None:
    found, claimed = [], []
    for seed in range(150):
        noise = 0.3 * numpy.random.default_rng(seed).normal(size=COUNTS.size)
        curve = fit_predictor_curve(COUNTS, numpy.exp(-8 - 0.03 * COUNTS + noise))
        found.append([curve.tau1_per_checkpoint, curve.tau2])
        claimed.append(numpy.sqrt(numpy.diag(curve.covariance)))
    assert numpy.median(claimed, axis=0) == pytest.approx(numpy.std(found, axis=0), rel=0.2)
    assert numpy.mean(found, axis=0) == pytest.approx([0.03, -8], abs=0.05)


def test_a_few_backtests_that_failed_move_it_little() -> None:
    errors = numpy.exp(-8 - 0.03 * COUNTS + 0.1 * numpy.random.default_rng(0).normal(size=COUNTS.size))
    errors[[5, 17, 30]] *= 1000
    curve = fit_predictor_curve(COUNTS, errors)
    assert curve.tau1_per_checkpoint == pytest.approx(0.03, abs=0.01)
    assert curve.rmse_log > 1  # it counts them all


def test_an_error_that_grows_gives_a_negative_tau1_and_a_constant_one_zero() -> None:
    assert fit_predictor_curve(COUNTS, numpy.exp(0.1 * COUNTS)).tau1_per_checkpoint == pytest.approx(-0.1)
    assert fit_predictor_curve(COUNTS, numpy.full(40, 1e-4)).tau1_per_checkpoint == pytest.approx(0.0, abs=1e-9)


def test_its_plain_form_is_json() -> None:
    curve = fit_predictor_curve(COUNTS, numpy.exp(-0.1 * COUNTS))
    content = json.loads(json.dumps(curve.to_dict(), allow_nan=False))
    assert content["tau1_per_checkpoint"] == curve.tau1_per_checkpoint
    assert content["covariance"] == curve.covariance.tolist()
    assert set(content) == set(curve.__dataclass_fields__)


def test_what_is_no_curve_is_refused() -> None:
    with pytest.raises(ValueError, match="there are 3 so far"):
        fit_predictor_curve([1, 2, 3], [1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="one shape"):
        fit_predictor_curve([1, 2, 3, 4], [1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="all 4 checkpoints that were predicted as a check rest on 5"):
        fit_predictor_curve([5, 5, 5, 5], [1.0, 2.0, 1.0, 2.0])
    for wrong in (math.nan, math.inf, 0.0, -1.0):
        with pytest.raises(ValueError, match="backtest 2 has the error"):
            fit_predictor_curve([1, 2, 3, 4], [1.0, 1.0, wrong, 1.0])
