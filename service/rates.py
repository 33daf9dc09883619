"""Rate limit of one address."""

import math
from collections import OrderedDict

__all__ = ["Rates"]

# Beyond this number the address that was idle longest is forgotten, which only restores its full burst.
ADDRESSES_MAX = 4096


class Rates:
    """A bucket for each address, filled at a steady rate; every request takes one from it.

    Args:
        per_second: requests that may go on for good.
        burst: requests that may come at once.
    """

    def __init__(self, per_second: float, burst: int) -> None:
        self._per_second = per_second
        self._burst = burst
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # what is left, and when that was

    def wait_seconds(self, address: str, now_seconds: float) -> float:
        """0 where the request may be answered; else how long until the next one may.

        Args:
            address: of the client.
            now_seconds: of a clock that never goes back.
        """
        left, then = self._buckets.pop(address, (float(self._burst), now_seconds))
        left = min(float(self._burst), left + (now_seconds - then) * self._per_second)
        allowed = left >= 1.0
        self._buckets[address] = (left - 1.0 if allowed else left, now_seconds)
        if len(self._buckets) > ADDRESSES_MAX:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else math.nextafter((1.0 - left) / self._per_second, math.inf)
