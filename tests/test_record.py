"""What rehearsals have cost is known to the next life."""

from pathlib import Path

from cpsr.group import Group
from cpsr.journal import RehearsalRow
from cpsr.losses import Step
from cpsr.record import Recorder, RehearsalAccount


def test_the_next_life_knows_what_rehearsals_have_cost(tmp_path: Path) -> None:
    first = Recorder(tmp_path, Group(), "auto")
    assert first.rehearsal_account() == RehearsalAccount()
    first.steps([Step(iteration, 1e-3, 0.5, True, 2.0) for iteration in range(1, 101)])
    ended = RehearsalRow(
        id="a", life=0, iteration=90, failure_iteration=30, checkpoint_iteration=20, outcome="running", cost_seconds=9.0
    )
    first.rehearsal(ended)
    killed = RehearsalRow(
        id="b", life=0, iteration=99, failure_iteration=39, checkpoint_iteration=30, outcome="running", cost_seconds=4.0
    )
    first.rehearsal(killed)
    first.rehearsal(
        RehearsalRow(
            id="a",
            life=0,
            iteration=90,
            failure_iteration=30,
            checkpoint_iteration=20,
            outcome="measured",
            cost_seconds=3.0,
        )
    )
    first.close("error")
    second = Recorder(tmp_path, Group(), "auto")
    # What was killed is charged with what it was expected to cost.
    assert second.rehearsal_account() == RehearsalAccount(50.0, 7.0, 2, killed=1)
    second.close("clean")


def test_a_damaged_journal_starts_the_account_anew(tmp_path: Path) -> None:
    (tmp_path / "journal.db").write_bytes(b"not a journal" * 100)
    recorder = Recorder(tmp_path, Group(), "auto")
    assert recorder.rehearsal_account() == RehearsalAccount()
    recorder.close("clean")
