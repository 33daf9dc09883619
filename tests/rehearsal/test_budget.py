"""What rehearsals may cost, whatever the order of steps and rehearsals."""

from hypothesis import example, given
from hypothesis import strategies as st

from cpsr.config import RehearsalConfig
from cpsr.rehearsal.budget import RehearsalBudget

SECONDS = st.floats(0.0, 1e4)
ROUNDING = 1e-12  # of the sums and products here and in the budget, relative
# Wall times of steps, with a rehearsal wished for after each: its expected and its true time.
LIVES = st.lists(st.tuples(SECONDS, SECONDS, st.floats(0.0, 1.0)), max_size=60)


@given(fraction=st.floats(0.0, 1.0), life=LIVES)
def test_what_was_spent_was_earned_before(fraction: float, life: list[tuple[float, float, float]]) -> None:
    """Where no rehearsal takes longer than expected, their share never exceeds the fraction."""
    budget = RehearsalBudget(fraction)
    trained = spent = 0.0
    for step, expected, used in life:
        budget.train(step)
        trained += step
        if budget.allows(expected):
            budget.spend(used * expected)
            spent += used * expected
        assert spent <= fraction * trained * (1 + 1e-12)
    assert (budget.trained_seconds, budget.spent_seconds) == (trained, spent)


@given(
    fraction=st.floats(1e-6, 1.0),
    spent=SECONDS,
    seconds=st.floats(1e-6, 1e4),
    share=st.floats(0.0, 1 - ROUNDING),
)
@example(fraction=0.6866789569274091, spent=3302.875, seconds=1e-6, share=0.0)
def test_an_overrun_is_earned_back_first(fraction: float, spent: float, seconds: float, share: float) -> None:
    """Allowed once the training has earned all that was spent and the rehearsal itself, and not before."""
    needed = (spent + seconds) / fraction
    budget = RehearsalBudget(fraction, trained_seconds=share * needed, spent_seconds=spent)
    assert not budget.allows(seconds)
    budget.train((1 + ROUNDING - share) * needed)
    assert budget.allows(seconds)


@given(life=LIVES, seconds=st.floats(1e-9, 1e4))
def test_no_fraction_allows_nothing(life: list[tuple[float, float, float]], seconds: float) -> None:
    budget = RehearsalBudget(0.0)
    for step, _, _ in life:
        budget.train(step)
        assert not budget.allows(seconds)


def test_the_pace_is_that_of_this_life() -> None:
    budget = RehearsalBudget(0.005, trained_seconds=1e6, spent_seconds=4000.0)
    assert budget.iteration_seconds == 0.0
    budget.train(1.0)
    budget.train(3.0)
    assert budget.iteration_seconds == 2.0
    assert budget.allows(1000.0)
    budget.spend(1000.0)
    assert not budget.allows(1.0)


def test_by_default_the_first_one_comes_after_12000_iterations() -> None:
    config = RehearsalConfig()
    budget = RehearsalBudget(config.budget_fraction)
    for _ in range(11_999):
        budget.train(0.5)
    assert not budget.allows(config.iterations * budget.iteration_seconds)
    budget.train(0.5)
    assert budget.allows(config.iterations * budget.iteration_seconds)
