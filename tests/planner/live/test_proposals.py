from cpsr.planner.live.proposals import Proposals
from cpsr.planner.plan import fixed_plan


def test_the_newest_plan_is_taken_once() -> None:
    proposals = Proposals()
    assert (proposals.take(), proposals.newest) == (None, None)
    proposals.offer(fixed_plan(10))
    proposals.offer(fixed_plan(20))
    assert proposals.take() == proposals.newest == fixed_plan(20)
    assert (proposals.take(), proposals.newest) == (None, fixed_plan(20))
