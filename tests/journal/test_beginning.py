"""How a life began is decided in one place, also for journals of other versions."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.journal import Beginning, RecoveryRow


def recovery(method: str, outcome: Any = "kept", **guard: Any) -> RecoveryRow:
    return RecoveryRow(
        id="one",
        life=1,
        failure_iteration=23,
        checkpoint_iteration=20,
        restored_iteration=23,
        method=method,
        requested_mode="auto",
        outcome=outcome,
        guard=guard,
    )


@pytest.mark.parametrize(
    ("method", "predicted", "labelled"),
    [
        ("scratch", False, False),
        ("exact", False, False),
        ("departure", False, False),
        ("stale", False, True),
        ("line", True, True),
        ("vitp", True, True),
        ("experts", True, True),  # of an older version
    ],
)
def test_the_text_of_the_journal_says_what_the_state_was(method: str, predicted: bool, labelled: bool) -> None:
    beginning = Beginning.of(method)
    assert (beginning.predicted, beginning.watched, beginning.labelled) == (predicted, predicted, labelled)
    assert recovery(method).labelled == labelled


@given(st.text())
def test_a_name_that_is_not_known_is_that_of_a_predictor(method: str) -> None:
    known = {beginning.value for beginning in Beginning}
    assert method in known or Beginning.of(method) is Beginning.PREDICTED


@given(st.sampled_from(Beginning))
def test_what_a_predictor_formed_is_watched_and_labelled(beginning: Beginning) -> None:
    assert beginning.predicted == beginning.watched
    assert beginning.labelled or not beginning.predicted
    assert Beginning.of(beginning.value) is beginning


@pytest.mark.parametrize(
    ("method", "outcome", "given_up", "labelled"),
    [
        ("line", "watching", False, True),
        ("line", "rolled_back", True, False),
        ("line", "vetoed", True, False),  # of an older version
        ("exact", "vetoed", False, False),
        ("stale", "vetoed", False, True),  # a prediction was; what holds older experts is in use
    ],
)
def test_a_state_that_was_given_up_labels_nothing(method: str, outcome: Any, given_up: bool, labelled: bool) -> None:
    row = recovery(method, outcome)
    assert (row.given_up, row.labelled) == (given_up, labelled)


@pytest.mark.parametrize(("to", "labelled"), [("exact", False), ("stale", True)])
def test_a_roll_back_to_older_experts_is_labelled(to: str, labelled: bool) -> None:
    row = recovery("line", "rolled_back", rolled_back_to=to)
    assert (row.given_up, row.labelled) == (True, labelled)
