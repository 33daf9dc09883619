"""What experts have missed over restarts, and made up for."""

import json

from hypothesis import given
from hypothesis import strategies as st

from cpsr.experts.missed_iterations import MissedIterations


def test_what_is_missed_is_made_up_by_longer_steps() -> None:
    missed = MissedIterations(step_factor=1.5)
    missed.restarted({"old": 80, "older": 60}, 100)
    assert missed.at(100) == {"old": 20.0, "older": 40.0}
    assert missed.at(130) == {"old": 5.0, "older": 25.0}
    assert [missed.made_up_at(iteration) for iteration in (100, 130, 180)] == [180, 180, None]
    assert missed.at(140) == {"older": 20.0}
    assert missed.at(180) == {}


def test_an_expert_that_was_saved_while_it_caught_up_still_misses_what_it_did_then() -> None:
    missed = MissedIterations(step_factor=2.0)
    missed.restarted({"one": 60, "other": 80}, 100)
    missed.restarted({"one": 110}, 130)  # had made up for 10 of 40 when it was saved; the other for all
    assert missed.at(130) == {"one": 20.0 + 30.0}


def test_an_expert_that_was_not_saved_since_has_lost_what_it_made_up_for() -> None:
    missed = MissedIterations(step_factor=2.0)
    missed.restarted({"one": 60}, 100)
    missed.restarted({"one": 60, "new": 90}, 120)
    assert missed.at(120) == {"one": 60.0, "new": 30.0}


def test_it_goes_on_from_what_a_checkpoint_holds_at_the_factor_of_that_time() -> None:
    missed = MissedIterations(step_factor=2.0)
    missed.restarted({"one": 60}, 100)
    state = json.loads(json.dumps(missed.state_dict()))
    later = MissedIterations(step_factor=3.0)
    later.load_state_dict(state, 110)
    assert later.step_factor == 2.0
    assert later.at(110) == {"one": 30.0}
    later.restarted({}, 110)
    assert later.step_factor == 3.0
    assert later.at(120) == {"one": 10.0}
    later.load_state_dict({}, 200)
    assert later.at(200) == {}
    assert later.step_factor == 3.0


def test_what_is_forgotten_is_not_missing() -> None:
    missed = MissedIterations(step_factor=2.0)
    missed.restarted({"one": 60}, 100)
    missed.forget()
    assert missed.at(100) == {}


@given(
    st.floats(1.1, 4.0),
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 200)), min_size=1, max_size=6),
)
def test_nothing_is_missed_that_was_trained_nor_more_than_there_was(
    factor: float, restarts: list[tuple[int, int]]
) -> None:
    missed, now, total = MissedIterations(factor), 0, 0.0
    for trained, age in restarts:
        now += trained
        before = missed.at(now).get("one", 0.0)
        taken = max(0, now - age)
        missed.restarted({"one": taken} if taken < now else {}, now)
        total += now - taken
        assert missed.at(now).get("one", 0.0) >= before or taken < now
        assert missed.at(now).get("one", 0.0) >= now - taken
        assert missed.at(now).get("one", 0.0) <= total + now + 1e-6
    assert missed.at(now + 100_000) == {}
