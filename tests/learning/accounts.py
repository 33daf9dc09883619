"""Bubbles that add up where slices ran."""

from time import perf_counter

from cpsr.learning.bubbles import Bubbles
from cpsr.learning.pace import Pace

__all__ = ["Account", "account_of"]


class Account:
    """Of the slices of a pace.

    Attributes:
        slices: how many there were.
        inside: seconds of them in waits of the training.
        outside: seconds of them beside waits.
    """

    def __init__(self) -> None:
        self.slices, self.inside, self.outside = 0, 0.0, 0.0


def account_of(pace: Pace, bubbles: Bubbles) -> Account:
    """Follow the slices of a pace from now on."""
    account, original = Account(), pace.after_slice

    def after_slice(used_seconds: float, processor_seconds: float) -> None:
        ended = perf_counter()
        beside = bubbles.beside(ended - used_seconds, ended)
        account.slices += 1
        account.outside += beside
        account.inside += used_seconds - beside
        original(used_seconds, processor_seconds)

    pace.after_slice = after_slice  # type: ignore[method-assign]
    return account
