"""Verdicts from the differences of executions, and the time that verifications may take."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpsr.engines.recorded_step import Evidence
from cpsr.verification.account import Account
from cpsr.verification.evidence import Differences, Fingerprints, differences, judge, judge_memory, judge_neighbors

EQUAL: Differences = {}
WRONG: Differences = {"gradients": ["up.weight"], "state": ["up.weight"]}
SHARED: Differences = {"state": ["up.weight"]}

ranks = st.integers(1, 6)


def third_of(first: Differences, second: Differences, size: int, rank: int):  # type: ignore[no-untyped-def]
    def third() -> tuple[Sequence[Differences], Sequence[Differences]]:
        return [first if one == rank else EQUAL for one in range(size)], [
            second if one == rank else EQUAL for one in range(size)
        ]

    return third


@given(ranks, st.data())
def test_a_wrong_execution_is_told_from_a_right_one(size: int, data: st.DataObject) -> None:
    """Of three executions two are equal; the rank is that where the difference begins, also if all ranks share it."""
    rank = data.draw(st.integers(0, size - 1))
    found = [WRONG if one == rank else SHARED for one in range(size)]
    first = judge(found, third_of(WRONG, EQUAL, size, rank), repeatable=True)
    assert (first.kind, first.ranks, first.execution) == ("wrong", (rank,), "first")
    second = judge(found, third_of(EQUAL, WRONG, size, rank), repeatable=True)
    assert (second.kind, second.ranks, second.execution) == ("wrong", (rank,), "repeated")
    assert "up.weight" in first.where


@given(st.integers(2, 6))
def test_what_all_ranks_do_is_the_loop(size: int) -> None:
    found = [WRONG] * size
    assert judge(found, lambda: (found, [EQUAL] * size), repeatable=True).kind == "unrepeatable"
    assert judge_memory([["up.weight"]] * size, repeatable=True).kind == "unrepeatable"
    assert judge_memory([["up.weight"], *[[]] * (size - 1)], repeatable=True).kind == "wrong"


@given(ranks)
def test_before_a_step_was_repeated_nothing_is_called_wrong(size: int) -> None:
    found = [WRONG, *[EQUAL] * (size - 1)]
    assert judge(found, third_of(WRONG, EQUAL, size, 0), repeatable=False).kind == "unrepeatable"
    assert judge(found, third_of(EQUAL, WRONG, size, 0), repeatable=False).kind == "nondeterministic"
    assert judge(found, third_of(WRONG, WRONG, size, 0), repeatable=False).kind == "nondeterministic"
    assert judge_memory([["up.weight"], *[[]] * (size - 1)], repeatable=False).kind == "unrepeatable"
    assert judge([EQUAL] * size, third_of(WRONG, WRONG, size, 0), repeatable=False).kind == "verified"


def test_one_rank_that_differs_each_time_is_wrong_where_the_others_do_not() -> None:
    flaky = judge([EQUAL, WRONG, EQUAL], third_of(WRONG, WRONG, 3, 1), repeatable=True)
    assert (flaky.kind, flaky.ranks, flaky.execution) == ("wrong", (1,), "each")
    alone = judge([WRONG], third_of(WRONG, WRONG, 1, 0), repeatable=True)
    assert alone.kind == "nondeterministic"


@given(st.integers(3, 6), st.data())
def test_a_third_rank_decides_which_of_two_neighbors_is_wrong(size: int, data: st.DataObject) -> None:
    """Also where the fault shows with one of the two batches alone."""
    wrong = data.draw(st.integers(0, size - 1))
    shows_own, shows_next = data.draw(st.sampled_from([(True, True), (True, False), (False, True)]))
    agreed = data.draw(st.booleans())  # else the program may do something else on that rank

    def differs(rank: int, owner: int) -> bool:
        return {rank: shows_next, owner: shows_own}.get(wrong, False)

    def found(distance: int) -> list[Differences]:
        return [WRONG if differs(rank, (rank + distance) % size) else EQUAL for rank in range(size)]

    verdict = judge_neighbors(found(1), lambda: found(2), agreed=agreed)
    assert (verdict.kind, verdict.ranks) == ("wrong" if agreed else "nondeterministic", (wrong,))


def test_two_neighbors_cannot_be_told_apart() -> None:
    verdict = judge_neighbors([WRONG, WRONG], list, agreed=True)
    assert (verdict.kind, verdict.ranks, verdict.execution) == ("nondeterministic", (0, 1), "each")
    assert judge_neighbors([EQUAL, EQUAL], list, agreed=True).kind == "verified"


@given(st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64]), st.data())
def test_each_bit_changes_the_fingerprint(dtype: torch.dtype, data: st.DataObject) -> None:
    values = torch.arange(24).to(dtype).view(4, 6)
    fingerprint = Fingerprints(values.device)
    before = fingerprint(values)
    flat = values.view(-1).view(torch.uint8)
    place, bit = data.draw(st.integers(0, len(flat) - 1)), data.draw(st.integers(0, 7))
    flat[place] ^= 1 << bit
    assert fingerprint(values) != before
    flat[place] ^= 1 << bit
    assert fingerprint(values) == before


def test_differences_are_named_by_level() -> None:
    one = Evidence(outputs={"a": "1"}, state={"w": "1", "v": "2"})
    assert differences(one, one) == {}
    assert differences(one, Evidence(outputs={"a": "1"}, state={"w": "1"})) == {"state": ["v"]}


@given(st.lists(st.floats(0.01, 5.0), min_size=1, max_size=30), st.floats(0.001, 0.5))
def test_verifications_stay_within_their_share(costs: list[float], fraction: float) -> None:
    account = Account()
    for cost in costs:
        if account.affords(cost, fraction):
            account.spend(cost)
            account.trained_seconds += cost  # the time has passed
        account.trained_seconds += 1.0
        assert account.spent_seconds <= fraction * account.trained_seconds


def test_an_account_outlives_its_process_and_a_damaged_one_begins_anew(tmp_path: Path) -> None:
    Account(trained_seconds=5.0, verified=[4, 8], wrong={"node/cuda:1": 1}).save(tmp_path)
    assert Account.of_run(tmp_path) == Account(5.0, 0.0, [4, 8], {"node/cuda:1": 1})
    (tmp_path / "verification.json").write_text("{")
    assert Account.of_run(tmp_path) == Account()


def test_the_newest_committed_checkpoint_stays_verified() -> None:
    account = Account(verified=[4, 8, 12])
    account.note_committed(8)
    assert account.verified == [8, 12]
    account.note_committed(10)
    assert account.verified == [8, 12]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_tensor_of_one_element_that_was_expanded_has_a_fingerprint(dtype: torch.dtype) -> None:
    """As moments that torch has not made yet."""
    fingerprint, zero = Fingerprints(torch.device("cpu")), torch.zeros(1, dtype=dtype)
    assert fingerprint(zero.expand(1)) == fingerprint(zero)
