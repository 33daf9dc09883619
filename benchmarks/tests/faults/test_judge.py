"""Scenarios of live jobs, and the judge over them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cpsr.benchmarks.faults.judge import Judge, impossible_guard, impossible_sources
from cpsr.benchmarks.faults.life import Life
from cpsr.benchmarks.faults.moments import DEPARTING, REPLAYING
from cpsr.benchmarks.faults.part import RANKS
from cpsr.benchmarks.faults.remains import Remains
from cpsr.benchmarks.faults.scenarios import INTERVAL, MOMENTS, Scenario, chosen, draw
from cpsr.journal import RecoveryRow, RecoverySource


def test_the_same_seed_draws_the_same_and_another_others() -> None:
    assert list(draw(3, 40)) == list(draw(3, 40)) != list(draw(4, 40))
    assert len({scenario.summary for scenario in draw(3, 40)}) > 30


def test_every_moment_is_drawn_where_it_can_come() -> None:
    for scenario in (one for seed in range(20) for one in chosen(seed)):
        assert any(scenario.lives)
        for life in scenario.lives:
            for fault in life:
                assert set(fault.ranks) <= set(range(RANKS))
                assert fault.at < scenario.iterations
                assert not (fault.signal == "SIGSTOP" and len(fault.ranks) == RANKS)


@pytest.mark.parametrize("moment", [*MOMENTS, *DEPARTING, *REPLAYING])
def test_every_moment_is_a_call_of_the_product(moment: str) -> None:
    happening = (MOMENTS | DEPARTING | REPLAYING)[moment]
    assert happening.owner is None or callable(getattr(happening.owner, happening.name))


# What the judge must not let pass: a life of a job whose notes were changed.

ALONE = Scenario("alone", "exact", 1, ())
NOTHING = Remains(frozenset(), None, frozenset())


def life_of(start: int, stop: int, changed: dict[int, str] | None = None) -> Life:
    """A life that began exactly at a checkpoint, and trained the steps after it."""
    began = {"kind": "started", "iteration": start, "method": "exact" if start else "scratch", "reason": ""}
    began |= {"checkpoint_iteration": start or None, "unix_seconds": 1.0, "state": f"state {start}"}
    steps = [
        {"kind": "step", "iteration": at, "batch": [at], "small": "small", "unix_seconds": 2.0}
        | {"state": (changed or {}).get(at, f"state {at}")}
        for at in range(start + 1, stop + 1)
    ]
    return Life([[began, *steps]] * RANKS, [0] * RANKS, [], ["", ""], 0.0)


def judged(tmp_path: Path, life: Life, before: Remains = NOTHING) -> Judge:
    judge = Judge(ALONE, life_of(0, 30), tmp_path)
    judge.see(life_of(0, 14), NOTHING)
    judge.see(life, before)
    return judge


def test_the_judge_finds_nothing_wrong_with_a_good_life(tmp_path: Path) -> None:
    judge = judged(tmp_path, replace(life_of(12, 30), statuses=[1, 1]), Remains(frozenset({8, 12}), 14, frozenset()))
    assert (judge.lost, judge.differs) == ([], [])


def test_the_judge_names_a_step_with_other_bits(tmp_path: Path) -> None:
    judge = judged(tmp_path, life_of(12, 30, {20: "wrong"}))
    assert judge.differs == [f"rank {rank}: another state at 20 than in the job left alone" for rank in range(RANKS)]


def replayed(changed: dict[int, str]) -> Life:
    """A life that repeats the window from 9 to 12, whose state is whole after 12."""
    life = replace(life_of(8, 30, {9: "in part", 10: "in part", **changed}), statuses=[1, 1])
    life.notes[0][0] |= {"replayed_until": 12, "state": "in part"}
    return life


def test_a_state_counts_once_its_window_is_replayed(tmp_path: Path) -> None:
    assert judged(tmp_path, replayed({})).differs == []
    differs = judged(tmp_path, replayed({12: "in part"})).differs
    assert differs == [f"rank {rank}: another state at 12 than in the job left alone" for rank in range(RANKS)]


def test_the_judge_names_a_lost_checkpoint(tmp_path: Path) -> None:
    judge = judged(
        tmp_path, replace(life_of(8, 30), statuses=[1, 1]), Remains(frozenset({8, 8 + INTERVAL}), 14, frozenset())
    )
    assert judge.lost == ["all ranks had iteration 12 whole, and the job began at 8"] * RANKS


def test_the_judge_names_a_step_that_was_left_out(tmp_path: Path) -> None:
    life = replace(life_of(12, 30), statuses=[1, 1])
    for notes in life.notes[:1]:
        del notes[5]  # of both ranks: they share the list
    judge = judged(tmp_path, life)
    assert judge.lost == [f"rank {rank} trained iteration 18 after 16" for rank in range(RANKS)]


def test_the_judge_wants_a_recovery_in_the_journal(tmp_path: Path) -> None:
    judge = judged(tmp_path, life_of(12, 30))
    assert judge.lost == ["the journal holds no recovery of a life that ended well"]


def recovery(method: str, tiers: tuple[str, ...], at: int = 23, **more: Any) -> RecoveryRow:
    sources = tuple(RecoverySource(rank=rank, source=tier, iteration=at) for rank, tier in enumerate(tiers))
    row = RecoveryRow(
        id="",
        life=1,
        failure_iteration=23,
        checkpoint_iteration=20,
        restored_iteration=at,
        method=method,
        requested_mode="predict",
        sources=sources,
    )
    return replace(row, **more)


BEFORE = Remains(frozenset({16, 20}), 23, frozenset({(0, 23)}))
# tiers, iteration, whether a rank's state does for all, and whether that can be.
SOURCES = [
    (("disk", "disk"), 20, False, True),
    (("disk", "disk"), 12, False, False),
    (("departure", "predicted"), 23, False, True),
    (("predicted", "departure"), 23, False, False),
    (("departure", "departure"), 23, False, False),
    (("departure", "departure"), 23, True, True),
    (("memory", "memory"), 20, False, False),
    (("predicted", "predicted"), 23, False, True),
    (("predicted", "predicted"), 22, False, False),
]


@pytest.mark.parametrize(("tiers", "at", "alike", "possible"), SOURCES)
def test_sources_must_have_been_there(tiers: tuple[str, ...], at: int, alike: bool, possible: bool) -> None:
    assert possible == (not list(impossible_sources(recovery("vitp", tiers, at), BEFORE, alike=alike)))


ACCEPTED = {"finite": {"accepted": True}, "loss": {"accepted": True}}
VETOED = {"finite": {"accepted": True}, "loss": {"accepted": False}}
GUARDS = [
    ("exact", {}, "kept", True),
    ("exact", VETOED, "vetoed", True),
    ("exact", VETOED, "kept", False),
    ("exact", ACCEPTED, "vetoed", False),
    ("vitp", ACCEPTED, "kept", True),
    ("vitp", VETOED, "kept", False),
    ("vitp", {}, "kept", False),
    ("vitp", ACCEPTED, "watching", False),
    ("departure", {}, "kept", True),
    ("departure", ACCEPTED, "kept", True),
    ("departure", VETOED, "kept", False),
    ("vitp", {**ACCEPTED, "watch": {"status": "diverged"}}, "rolled_back", True),
    ("vitp", {**ACCEPTED, "watch": {"status": "diverged"}}, "kept", False),
    ("vitp", {**ACCEPTED, "watch": {"status": "passed"}}, "rolled_back", False),
]


@pytest.mark.parametrize(("method", "guard", "outcome", "possible"), GUARDS)
def test_the_guard_must_have_recorded_what_was_done(
    method: str, guard: dict[str, Any], outcome: Any, possible: bool
) -> None:
    row = recovery(method, (), guard=guard, outcome=outcome)
    assert possible == (not list(impossible_guard(row, ended=True)))
