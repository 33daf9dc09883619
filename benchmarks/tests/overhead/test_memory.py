"""From memory over time to what the predictor takes."""

from cpsr.benchmarks.overhead.memory import MemoryResult, MemoryRun, summarise_memory
from cpsr.benchmarks.overhead.timeline import MODEL, Timeline, bound_bytes

MB = 1_000_000


def life(peak: int, predicted: bool = False) -> Timeline:
    samples = [(0.0, 10 * MB), (1.0, peak * MB), (4.0, 20 * MB)]
    return Timeline(samples, trained_seconds=0.5, learned_checkpoints=5, predicted=predicted)


def result(*peaks: tuple[int, int]) -> MemoryResult:
    """Of runs whose lives without the predictor take 50 and 55 MB at most."""
    runs = [MemoryRun(life(failing), life(restarted, True), life(50), life(55)) for failing, restarted in peaks]
    return summarise_memory(runs, 100 * MB)


def test_peaks_are_compared_before_the_failure_and_after_the_restart() -> None:
    found = result((60, 90), (70, 80))
    assert found.failing_bytes == [10 * MB, 20 * MB]
    assert found.restarted_bytes == [35 * MB, 25 * MB]
    assert found.peak_bytes == 35 * MB
    assert (found.learned_checkpoints, found.predicted) == ([5, 5], True)
    assert set(found.aims().values()) == {True}


def test_what_takes_more_than_its_arithmetic_or_the_aim_says_is_a_miss() -> None:
    assert list(result((60, 190)).aims().values()) == [True, False]
    assert list(result((60, 90), (300, 90)).aims().values()) == [False, False]


def test_the_arithmetic_of_the_model_that_is_measured_is_below_the_aim() -> None:
    assert 0 < bound_bytes(MODEL) < 200 * MB
