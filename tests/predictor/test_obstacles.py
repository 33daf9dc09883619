import pytest

from cpsr.predictor.line import LinePredictor
from cpsr.predictor.obstacles import too_far, too_few, window_start
from cpsr.predictor.protocol import HistoryEntry, Target


def at(iterations: list[int], pace: float = 1.0) -> list[HistoryEntry]:
    return [HistoryEntry(i, pace * i, pace) for i in iterations]


def to(failure: int) -> Target:
    return Target(failure, float(failure), 1.0)


@pytest.mark.parametrize(
    ("count", "words"), [(0, "no usable"), (1, "there is one"), (2, "needs 3 usable checkpoints, and there are 2")]
)
def test_too_few_says_how_many(count: int, words: str) -> None:
    reason = too_few(at([10, 20])[:count], 3)
    assert reason is not None
    assert words in reason
    assert too_few(at([10, 20])[:count], count) is None


def test_further_than_the_span_is_too_far_for_what_extrapolates() -> None:
    assert too_far(to(1100), at([900, 950, 1000])) is None
    reason = too_far(to(1101), at([900, 950, 1000]))
    assert reason is not None
    assert "further than the 100" in reason
    assert too_far(to(1101), at([900, 950, 1000]), extrapolates=False) is None


def test_beyond_ten_intervals_is_too_far_for_all() -> None:
    entries = at(list(range(1000, 1601, 10)))
    for extrapolates in (True, False):
        assert too_far(to(1700), entries, extrapolates) is None
        reason = too_far(to(1701), entries, extrapolates)
        assert reason is not None
        assert "more than 10 intervals of 10" in reason


def test_more_learning_rate_ahead_than_in_the_window_is_too_far() -> None:
    entries = at([900, 950, 1000], pace=0.1)
    assert too_far(Target(1010, 110.0, 1.0), entries) is None
    reason = too_far(Target(1010, 110.1, 1.0), entries)
    assert reason is not None
    assert "more than the 10 over the whole window" in reason
    assert too_far(Target(1010, 110.1, 1.0), entries, extrapolates=False) is None


def test_a_single_checkpoint_has_no_limit() -> None:
    assert too_far(to(10**6), at([1])) is None


def test_the_window_counts_iterations_before_the_newest() -> None:
    assert window_start(at([100, 200, 290, 300]), 100) == 1
    assert window_start(at([100, 200, 290, 300]), 99) == 2
    assert window_start(at([100]), 0) == 0


def test_a_window_given_by_the_user_must_hold_three_checkpoints() -> None:
    reason = LinePredictor(window_iterations=150).expected(at([800, 900, 1000]), to(1010))
    assert isinstance(reason, str)
    assert "3 usable checkpoints within 150 iterations, and there are 2" in reason
