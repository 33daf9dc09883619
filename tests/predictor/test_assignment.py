"""What ranks that share have learned, put together."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpsr.predictor.assignment import Learned, OwnOperators, Together, learned_together, shared_state
from cpsr.predictor.line import line_coefficients
from cpsr.predictor.protocol import HistoryEntry, Target
from cpsr.predictor.ranks import Ranks
from cpsr.predictor.statistics import MotionStatistics, OperatorMotion
from cpsr.predictor.vitp import VITPPredictor
from tests.predictor.conftest import MakeHistory

ORDER = ("a", "b", "c", "d")


def motion(iterations: tuple[int, ...], seed: int = 0) -> OperatorMotion:
    """Of one weight that takes a random way, the same at the same iterations."""
    generator = torch.Generator().manual_seed(seed)
    way = torch.randn(1000, generator=generator, dtype=torch.float64).cumsum(0)
    steps = torch.tensor([float(way[new] - way[old]) for old, new in itertools.pairwise(iterations)]).double()
    points = tuple(HistoryEntry(iteration, float(iteration), 1.0) for iteration in iterations)
    return OperatorMotion(1, points, torch.outer(steps, steps))


def learned(names: str, seen: tuple[int, ...], left_out: tuple[int, ...] = ()) -> Learned:
    return Learned(seen, left_out, {name: motion(seen, ORDER.index(name)) for name in names})


def together(parts: list[Learned], after: int) -> Together | None:
    work = learned_together(parts, after, ORDER)
    while True:
        try:
            next(work)
        except StopIteration as end:
            found: Together | None = end.value
            return found


def test_all_at_one_checkpoint() -> None:
    found = together([learned("ca", (10, 20, 30)), learned("b", (10, 20, 30))], 20)
    assert found is not None
    assert found.iteration == 30
    assert list(found.operators) == ["a", "b", "c"]
    assert found.operators["b"].points[-1].iteration == 30


def test_who_is_ahead_is_taken_back_to_where_the_others_are() -> None:
    found = together([learned("a", (10, 20, 30, 40)), learned("b", (10, 20, 30))], 20)
    assert found is not None
    assert found.iteration == 30
    expected = motion((10, 20, 30), ORDER.index("a"))
    assert found.operators["a"].points == expected.points
    torch.testing.assert_close(found.operators["a"].products, expected.products, rtol=1e-6, atol=1e-9)


def test_who_stays_behind_is_left_behind() -> None:
    parts = [learned("ab", (10, 20, 30)), learned("c", (10, 20))]
    at_20 = together(parts, 10)
    assert at_20 is not None
    assert (at_20.iteration, list(at_20.operators)) == (20, ["a", "b", "c"])
    at_30 = together(parts, 20)
    assert at_30 is not None
    assert (at_30.iteration, list(at_30.operators)) == (30, ["a", "b"])
    assert together(parts, 30) is None


def test_what_is_not_finite_on_one_rank_is_left_out_for_all() -> None:
    parts = [learned("a", (10, 20, 30, 40)), learned("b", (10, 20, 40), left_out=(30,))]
    found = together(parts, 10)
    assert found is not None
    assert found.iteration == 40
    for one in found.operators.values():
        assert [point.iteration for point in one.points] == [10, 20, 40]
    newest = [learned("a", (10, 20, 30)), learned("b", (10, 20), left_out=(30,))]
    assert together(newest, 20) is None


def test_of_nobody_there_is_nothing() -> None:
    assert together([], -1) is None
    assert together([learned("", ())], -1) is None


@given(
    st.lists(st.lists(st.integers(0, 9), unique=True).map(sorted).map(tuple), min_size=1, max_size=4),
    st.integers(-1, 9),
)
def test_no_checkpoint_has_more(seen: list[tuple[int, ...]], after: int) -> None:
    parts = [learned(name, one) for name, one in zip(ORDER, seen, strict=False)]
    found = together(parts, after)
    counts = {iteration: sum(iteration in one for one in seen) for iteration in range(after + 1, 10)}
    most = max(counts.values(), default=0)
    if most == 0:
        assert found is None
        return
    assert found is not None
    assert len(found.operators) == most
    assert found.iteration == max(iteration for iteration, count in counts.items() if count == most)
    for one in found.operators.values():
        assert one.points[-1].iteration == found.iteration
        assert one.products.shape == (len(one.points) - 1,) * 2


class Half:
    """Takes the first two of four."""

    is_shared = True

    def is_mine(self, operator: str) -> bool:
        return operator in ORDER[:2]

    def learned(self, iteration: int) -> Iterator[Learned | None]:
        raise AssertionError


def test_own_operators_are_all_that_is_seen(make_history: MakeHistory) -> None:
    steps = [{name: torch.full((3,), float(place)) for name in ORDER} for place in range(3)]
    history = make_history([10, 20, 30], steps, taken={"b": [10, 10, 30]})
    own = OwnOperators(history, Half())
    assert own.entries == history.entries
    assert list(own.operators) == ["a", "b"]
    assert own.numel("a") == 3
    assert own.taken_at("b", 1) == 10
    assert own.read("a", 2, 1, 3).tolist() == [2.0, 2.0]


def test_operators_that_no_rank_reports_follow_the_line(make_history: MakeHistory) -> None:
    settings: dict[str, Any] = {"window_iterations": 300, "gain": 1.0}
    generator = torch.Generator().manual_seed(0)
    steps = [{name: torch.randn(9, generator=generator) for name in ORDER} for _ in range(8)]
    history = make_history([50 * place for place in range(8)], steps)
    target = Target(390, 390.0, 1.0)
    asked: list[set[str]] = []

    def reduce(products: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        asked.append(set(products))
        return products

    predictor = VITPPredictor(**settings, direction="vitp", ranks=Ranks(list, reduce, share=Half()))
    forecast = predictor.forecast(history, target)
    assert asked == [{"a", "b"}, {"a", "b"}]
    assert forecast.settings["line_names"] == ["c", "d"]
    row = line_coefficients([50.0 * place for place in range(1, 8)], 390.0, gain=1.0, base=0.0)  # of the whole model
    assert {name: forecast.coefficients[name] for name in "cd"} == dict.fromkeys("cd", pytest.approx((0.0, *row)))


class WithOneLeftOut(Half):
    """Its operators are all that is shared; another rank has left the only checkpoint out in which "b" was taken."""

    def learned(self, iteration: int) -> Iterator[Learned | None]:
        known = {"a": motion((10, 20, 30)), "b": motion((10,))}
        yield Learned((10, 20, 30), (), known)
        yield Learned((20, 30), (10,), {"c": motion((20, 30))})


def test_an_operator_of_which_no_snapshot_is_left_ends_nothing(make_history: MakeHistory) -> None:
    steps = [{name: torch.full((3,), float(place * place)) for name in ORDER} for place in range(3)]
    history = make_history([10, 20, 30], steps, taken={"b": [10, 10, 10]})
    predictor = VITPPredictor(ranks=Ranks(list, dict, share=WithOneLeftOut()))
    for _ in predictor.learn(history):
        pass
    assert predictor.state_dict()["vitp"]["trained_iteration"] == 30


def test_who_shares_must_hear_of_the_others() -> None:
    with pytest.raises(ValueError, match="give both"):
        Ranks(list, share=Half())


def test_what_was_altered_is_refused(make_history: MakeHistory) -> None:
    statistics = MotionStatistics()
    steps = [{"a": torch.randn(5)} for _ in range(4)]
    for _ in statistics.update(make_history([10, 20, 30, 40], steps)):
        pass
    state = shared_state(statistics)
    assert Learned.from_state(state).operators.keys() == {"a"}
    assert Learned.from_state(state).seen == (10, 20, 30, 40)
    state["products"] = state["products"].clone()
    state["products"][1] += 1e-9
    with pytest.raises(ValueError, match="not those that were saved"):
        Learned.from_state(state)
    with pytest.raises(ValueError, match="not those that were saved"):
        Learned.from_state(statistics.state_dict())  # of a rank that did not share
