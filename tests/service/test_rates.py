from hypothesis import given
from hypothesis import strategies as st

from cpsr.service.rates import ADDRESSES_MAX, Rates

waits = st.lists(st.floats(0, 10), min_size=1, max_size=200)


@given(waits, st.floats(0.5, 50), st.integers(1, 20))
def test_never_more_than_the_burst_and_the_rate(pauses: list[float], per_second: float, burst: int) -> None:
    rates, now, allowed = Rates(per_second, burst), 0.0, []
    for pause in pauses:
        now += pause
        if rates.wait_seconds("a", now) == 0:
            allowed.append(now)
    for first, begin in enumerate(allowed):
        for last in range(first, len(allowed)):
            assert last - first + 1 <= burst + (allowed[last] - begin) * per_second + 1e-6


@given(waits, st.floats(0.5, 50), st.integers(1, 20))
def test_who_waits_that_long_is_answered(pauses: list[float], per_second: float, burst: int) -> None:
    rates, now = Rates(per_second, burst), 0.0
    for pause in pauses:
        now += pause
        wait = rates.wait_seconds("a", now)
        if wait:
            now += wait * (1 + 1e-9) + 1e-9
            assert rates.wait_seconds("a", now) == 0


def test_addresses_do_not_count_for_each_other_and_are_forgotten() -> None:
    rates = Rates(0.001, 1)
    assert rates.wait_seconds("a", 0.0) == 0
    assert rates.wait_seconds("a", 0.0) > 0
    assert rates.wait_seconds("b", 0.0) == 0
    for number in range(ADDRESSES_MAX):
        rates.wait_seconds(str(number), 0.0)
    assert [rates.wait_seconds(one, 0.0) for one in ("a", "b")] == [0, 0]
