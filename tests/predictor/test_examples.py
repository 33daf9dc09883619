import json
from collections.abc import Generator, Mapping
from typing import Any

import pytest
import torch

from cpsr.predictor import examples as module
from cpsr.predictor.examples import LATER_ITERATIONS, MAX_EXAMPLES, OPERATORS_PER_CHECKPOINT, Examples, Windows
from cpsr.predictor.protocol import HistoryEntry
from cpsr.predictor.statistics import MAX_SNAPSHOTS, OperatorMotion, merged
from cpsr.predictor.vitp_network import MIN_SNAPSHOTS
from cpsr.state import codec


def returned(work: Generator[None, None, Any]) -> Any:
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def windows(operators: Mapping[str, OperatorMotion]) -> list[Windows]:
    found: list[Windows] = returned(module.windows(operators))
    return found


def motion(count: int, interval: int = 50, seed: int = 0, size: float = 1.0, rate: float = 1.0) -> OperatorMotion:
    generator = torch.Generator().manual_seed(seed)
    steps = size * torch.randn(count - 1, 40, generator=generator, dtype=torch.float64) + size
    points = tuple(HistoryEntry(interval * k, interval * k * rate, rate) for k in range(count))
    return OperatorMotion(40, points, steps @ steps.T)


def test_a_window_needs_enough_before_and_after() -> None:
    assert windows({"w": motion(5)}) == []
    assert [len(taken.points) for taken in windows({"w": motion(6)})] == [6]
    assert windows({"w": motion(8, interval=20)}) == []  # 100 iterations after the fourth are not yet there
    assert [len(taken.points) for taken in windows({"w": motion(9, interval=20)})] == [9]


def test_what_never_moved_or_stood_still_is_no_example() -> None:
    still = motion(9)
    zero = OperatorMotion(40, still.points, torch.zeros(8, 8, dtype=torch.float64))
    broken = OperatorMotion(40, still.points, still.products * float("nan"))
    assert windows({"zero": zero, "broken": broken, "paused": motion(9, rate=0.0)}) == []


def test_operators_with_the_same_snapshots_are_one_window_weighted_by_distance() -> None:
    found = windows({"a": motion(9, size=1.0), "b": motion(9, size=3.0), "expert": motion(9, interval=70)})
    assert [len(taken) for taken in found] == [2, 1]
    torch.testing.assert_close(found[0].weights[0] / found[0].weights[1], torch.tensor(3.0))  # b comes first
    assert float(sum(taken.weights.sum() for taken in found)) == pytest.approx(1.0)
    assert torch.allclose(found[0].products.diagonal(dim1=1, dim2=2).sum(dim=1), torch.ones(2))


def test_only_those_that_move_farthest_are_taken() -> None:
    many = {f"w{k}": motion(7, size=1.0 + k) for k in range(OPERATORS_PER_CHECKPOINT + 20)}
    (found,) = windows(many)
    distances = torch.arange(OPERATORS_PER_CHECKPOINT + 20.0, 20.0, -1.0)
    torch.testing.assert_close(found.weights, distances / distances.sum())


@pytest.mark.parametrize(("count", "interval"), [(6, 50), (9, 50), (20, 20), (7, 100)])
def test_questions_keep_past_and_future_apart(count: int, interval: int) -> None:
    (taken,) = windows({"w": motion(count, interval)})
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        question = taken.draw(generator)
        seen = question.seen.tolist()
        later = question.later.nonzero().flatten().tolist()
        assert len(seen) >= MIN_SNAPSHOTS
        assert seen == sorted(set(seen))
        assert min(later) > seen[-1]
        assert abs(float(question.later.sum())) < 1e-6
        reached = taken.points[max(later)].iteration - taken.points[seen[-1]].iteration
        assert LATER_ITERATIONS[0] <= reached <= max(LATER_ITERATIONS[1], 2 * interval)
        assert question.geometry.query > 0.0
        torch.testing.assert_close(question.seen_products, merged(taken.products, seen))


def test_the_newest_question_is_the_newest_difference() -> None:
    (taken,) = windows({"w": motion(9)})
    question = taken.newest_question()
    assert question.seen.tolist() == list(range(7))
    assert question.later.tolist() == [0.0] * 7 + [-1.0, 1.0]


def test_rows_are_put_where_their_snapshots_are() -> None:
    (taken,) = windows({"w": motion(9)})
    question = taken.newest_question()
    rows = torch.arange(7.0).unsqueeze(0)
    assert question.over_window(rows).tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0, 0.0]]


def filled(checkpoints: int) -> Examples:
    examples = Examples()
    for checkpoint in range(checkpoints):
        operators = {f"w{k}": motion(MAX_SNAPSHOTS, 20, seed=100 * checkpoint + k) for k in range(40)}
        for taken in windows(operators):
            examples.add(taken)
    return examples


def test_examples_are_bounded_small_and_survive() -> None:
    examples = filled(MAX_EXAMPLES // 40 + 3)
    assert len(examples) <= MAX_EXAMPLES
    data, tensors = codec.encode(examples.state_dict())
    assert len(json.dumps(data)) + sum(tensor.nbytes for tensor in tensors.values()) < 0.35 * 2**20
    later = Examples()
    later.load_state_dict(codec.decode(json.loads(json.dumps(data)), tensors))
    questions = [kept.draw(torch.Generator().manual_seed(3)) for kept in (examples, later)]
    assert torch.equal(questions[0].products, questions[1].products)
    assert torch.equal(questions[0].later, questions[1].later)
    assert torch.equal(questions[0].weights, questions[1].weights)


def test_a_copy_is_another() -> None:
    examples = filled(1)
    other = examples.copy()
    other.add(windows({"w": motion(9)})[0])
    assert (len(examples), len(other)) == (40, 41)


def test_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="version 2; this is version 1"):
        Examples().load_state_dict({"version": 2})
