"""The environment in which the product's tests run: no benchmark trains on a GPU unasked."""

from tests.device import DEVICE

__all__ = ["DEVICE"]
