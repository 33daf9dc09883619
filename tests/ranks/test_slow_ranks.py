"""Who is slow, by what all ranks say: figures in, reports out."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from cpsr.ranks.heartbeat import Heartbeat
from cpsr.ranks.slow_ranks import (
    COMPARISONS,
    SLOW_RATIO,
    Comparisons,
    Pace,
    Place,
    SlowRanks,
    device_name,
    read_paces,
)

STEPS = 10  # between two comparisons
Taken = tuple[float, float]  # compute and data seconds of a step


def places(*stages: int) -> list[Place]:
    return [Place(f"host-{rank}", "cpu", stage) for rank, stage in enumerate(stages)]


class Ranks:
    """Ranks that train: running sums, as their heartbeats have them."""

    def __init__(self, *stages: int) -> None:
        self.comparisons = Comparisons(places(*stages))
        self.said = {rank: Heartbeat(steps=1) for rank in range(len(stages))}
        assert self.comparisons.compare(self.said) == []

    def train(self, taken: Sequence[Taken], steps: int = STEPS) -> list[Pace] | None:
        """Train so many steps, and compare; returns who has turned."""
        for rank, (compute, data) in enumerate(taken):
            before = self.said[rank]
            self.said[rank] = dataclasses.replace(
                before,
                steps=before.steps + steps,
                compute_microseconds=before.compute_microseconds + round(compute * steps * 1e6),
                data_microseconds=before.data_microseconds + round(data * steps * 1e6),
            )
        return self.comparisons.compare(self.said)

    def minute(self, *taken: Taken) -> list[tuple[int, bool, str]]:
        """Rank, whether it is slow, and the cause, of those that turned in as many comparisons as turn a rank."""
        turned = [one for _ in range(COMPARISONS) for one in self.train(taken) or ()]
        return [(one.rank, one.slow, one.cause) for one in turned]


seconds = st.floats(1e-3, 10.0)


@given(st.lists(st.lists(st.tuples(seconds, st.floats(0.0, 10.0)), min_size=5, max_size=5), min_size=1, max_size=40))
def test_only_who_exceeds_the_median_in_each_comparison_is_reported_and_once(history: list[list[Taken]]) -> None:
    ranks = Ranks(0, 0, 0, 0, 0)
    reported, exceeded = [False] * 5, [[False] * COMPARISONS for _ in range(5)]
    for taken in history:
        turned = ranks.train(taken)
        assert turned is not None
        own = [pace.own_seconds for pace in ranks.comparisons.paces]
        for rank in range(5):
            exceeded[rank].append(own[rank] > SLOW_RATIO * sorted(own)[2])
        for pace in turned:
            assert exceeded[pace.rank][-COMPARISONS:] == [pace.slow] * COMPARISONS
            assert reported[pace.rank] is not pace.slow
            reported[pace.rank] = pace.slow
        for rank in range(5):  # who should have turned has
            assert exceeded[rank][-COMPARISONS:] != [not reported[rank]] * COMPARISONS or len(exceeded[rank]) < 12


@given(st.lists(st.lists(st.floats(1.0, 1.149), min_size=4, max_size=4), min_size=1, max_size=30))
def test_nobody_is_reported_below_15_percent(history: list[list[float]]) -> None:
    ranks = Ranks(0, 0, 0, 0)
    assert not any(ranks.train([(own, 0.0) for own in taken]) for taken in history)


def test_a_rank_turns_slow_once_and_recovers_once() -> None:
    ranks = Ranks(0, 0, 0)
    even, slow = (0.1, 0.01), (0.13, 0.01)
    assert ranks.minute(even, even, even) == []
    assert ranks.minute(even, slow, even) == [(1, True, "compute")]
    assert ranks.minute(even, slow, even) == []
    for _ in range(COMPARISONS):  # now and then below is no recovery
        assert ranks.train([even, even, even]) == []
        assert ranks.train([even, slow, even]) == []
    assert ranks.minute(even, even, even) == [(1, False, "compute")]
    assert ranks.minute(even, even, even) == []


def test_the_report_says_whether_data_or_compute_takes_longer() -> None:
    assert Ranks(0, 0, 0).minute((0.1, 0.0), (0.1, 0.0), (0.1, 0.03)) == [(2, True, "data")]
    ranks = Ranks(0, 0)  # of two the other one is the median
    assert ranks.minute((0.25, 0.01), (0.3, 0.01)) == [(1, True, "compute")]
    pace = ranks.comparisons.paces[1]
    assert pace.message == (
        "rank 1 (host host-1, cpu) takes 0.31 s a step of its own, the median is 0.26 s: compute 0.3 s (median "
        "0.25 s), waiting for data 0.01 s (median 0.01 s). All ranks wait for it, about 0.05 s at each step. It "
        "computes longer: look there for other processes, too few cores and lowered clocks, or replace it"
    )


def test_stages_of_a_pipeline_differ() -> None:
    ranks = Ranks(0, 0, 1, 1)
    assert ranks.minute((0.1, 0.02), (0.1, 0.02), (0.3, 0.0), (0.3, 0.0)) == []
    assert ranks.minute((0.1, 0.02), (0.1, 0.02), (0.3, 0.0), (0.36, 0.0)) == [(3, True, "compute")]


def test_a_rank_alone_in_its_stage_is_compared_with_its_first_minute() -> None:
    first, second, longer = (0.1, 0.02), (0.3, 0.0), (0.15, 0.02)
    ranks = Ranks(0, 1)
    assert ranks.minute(first, second) == []
    assert ranks.minute((0.2, 0.04), (0.6, 0.0)) == []  # longer batches for all
    assert ranks.minute(longer, second) == [(0, True, "compute")]
    assert ranks.minute(first, second) == [(0, False, "compute")]
    assert ranks.minute((0.1, 0.05), second) == [(0, True, "data")]


def test_nothing_is_compared_before_each_rank_has_ended_a_step() -> None:
    ranks = Ranks(0, 0)
    ranks.said[0] = dataclasses.replace(ranks.said[0], steps=5, compute_microseconds=10)
    assert ranks.comparisons.compare(ranks.said) is None
    assert ranks.comparisons.compare({0: ranks.said[0]}) is None  # rank 1 has ended
    assert ranks.comparisons.paces == []


def test_paces_are_left_for_the_service(tmp_path: Path) -> None:
    (tmp_path / "progress").mkdir()
    events: list[tuple[str, int | None]] = []
    watch = SlowRanks(tmp_path, 3, places(0, 0), lambda kind, message, at, level: events.append((kind, at)), 10.0, 1)
    watch.look(0.0, {0: Heartbeat(), 1: Heartbeat()})
    said = {
        0: Heartbeat(9, 7, steps=4, compute_microseconds=4_000_000),
        1: Heartbeat(9, 7, 0, 0, -1, 4, 4_000_000, 10**6),
    }
    watch.look(9.0, said)
    assert (read_paces(tmp_path, 3), events) == ([], [])
    watch.look(10.0, said)
    assert events == [("slow rank", 7)]
    assert [(one.own_seconds, one.data_seconds, one.slow) for one in read_paces(tmp_path, 3)] == [
        (1.0, 0.0, False),
        (1.25, 0.25, True),
    ]
    assert read_paces(tmp_path, 4) == []
    (tmp_path / "progress" / "own_times.json").write_text(json.dumps({"life": 3, "paces": [{"rank": 0}]}))
    assert read_paces(tmp_path, 3) == []  # of another version


def test_a_device_is_named_by_the_number_of_its_machine() -> None:
    assert device_name("cuda:0", "5,7") == "cuda:5"
    assert device_name("cuda:1", "") == "cuda:1"
    assert device_name("cpu", "5") == "cpu"
