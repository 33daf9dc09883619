"""Histories in memory, as the tests of the product's predictors build them."""

from tests.predictor.conftest import make_history

__all__ = ["make_history"]
