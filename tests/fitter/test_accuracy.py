import json
import math

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.fitter.accuracy import fit_accuracy

COUNTS = numpy.arange(3, 43)


@given(st.floats(-0.2, 0.2), st.floats(-20.0, 2.0), st.permutations(list(range(1, 13))))
def test_an_exact_curve_is_found_in_any_order(tau1: float, tau2: float, counts: list[int]) -> None:
    places = numpy.array(counts)
    curve = fit_accuracy(places, numpy.exp(tau2 - tau1 * places))
    assert curve.tau1_per_checkpoint == pytest.approx(tau1, abs=1e-6)
    assert curve.tau2 == pytest.approx(tau2, abs=1e-5)
    assert json.loads(json.dumps(curve.to_dict(), allow_nan=False))["points"] == 12


def test_a_few_predictions_that_failed_move_it_little() -> None:
    errors = numpy.exp(-8 - 0.03 * COUNTS + 0.1 * numpy.random.default_rng(0).normal(size=COUNTS.size))
    errors[[5, 17, 30]] *= 1000
    curve = fit_accuracy(COUNTS, errors)
    assert curve.tau1_per_checkpoint == pytest.approx(0.03, abs=0.01)
    assert curve.rmse_log > 1  # it counts them all


def test_what_is_no_curve_is_refused() -> None:
    with pytest.raises(ValueError, match="there are 3 so far"):
        fit_accuracy([1, 2, 3], [1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="one shape"):
        fit_accuracy([1, 2, 3, 4], [1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="all 4 checkpoints"):
        fit_accuracy([5, 5, 5, 5], [1.0, 2.0, 1.0, 2.0])
    for wrong in (math.nan, math.inf, 0.0, -1.0):
        with pytest.raises(ValueError, match="only finite, positive"):
            fit_accuracy([1, 2, 3, 4], [1.0, 1.0, wrong, 1.0])
