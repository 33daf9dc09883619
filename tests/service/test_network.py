"""How far the predictor's network keeps pace, as the journal has it."""

from fastapi.testclient import TestClient

from cpsr.journal import CheckpointRow, Journal, LearningRow
from tests.service.journals import flushed, plan_row


def network(client: TestClient) -> object:
    return client.get("/plan").json()["network"]


def test_a_run_that_learns_nothing_has_no_network(client: TestClient, journal: Journal) -> None:
    journal.record(plan_row())
    journal.record(CheckpointRow(life=0, iteration=50, status="committed"))
    flushed(journal)
    assert network(client) is None


def test_what_was_committed_since_waits_and_counts_once(client: TestClient, journal: Journal) -> None:
    journal.record(plan_row())
    for iteration in (50, 100, 150, 150):  # the last one again, after a restart
        journal.record(CheckpointRow(life=0, iteration=iteration, status="committed"))
    journal.record(LearningRow(life=0, iteration=100, first_iteration=0, checkpoints=2, updates=16))
    flushed(journal)
    assert network(client) == {"checkpoints_taken_in": 2, "checkpoints_waiting": 1, "updates": 16}
    journal.record(LearningRow(life=0, iteration=None, first_iteration=120, checkpoints=2, updates=16))
    flushed(journal)
    assert network(client) == {"checkpoints_taken_in": 2, "checkpoints_waiting": 1, "updates": 16}


def test_checkpoints_of_a_branch_that_was_given_up_do_not_wait(client: TestClient, journal: Journal) -> None:
    journal.record(plan_row())
    for iteration in (50, 100, 150):
        journal.record(CheckpointRow(life=0, iteration=iteration, status="committed"))
    journal.record(LearningRow(life=0, iteration=None, first_iteration=60, checkpoints=0, updates=0))
    journal.record(CheckpointRow(life=0, iteration=70, status="committed"))
    flushed(journal)
    assert network(client) == {"checkpoints_taken_in": 0, "checkpoints_waiting": 1, "updates": 0}


def test_a_life_that_does_not_learn_has_no_network(client: TestClient, journal: Journal) -> None:
    journal.record(LearningRow(life=0, iteration=100, first_iteration=0, checkpoints=2, updates=16))
    journal.record(plan_row(life=1))
    flushed(journal)
    assert network(client) is None
