"""Who rests: a rule over what the ranks have left."""

from hypothesis import given
from hypothesis import strategies as st

from cpsr.replay.stages import Kept, choose

LAST = 20
KEPT = st.builds(
    Kept,
    stage=st.integers(0, 3),
    iterations=st.lists(st.integers(18, 24), max_size=2).map(lambda found: tuple(sorted(set(found)))),
    logged=st.integers(17, 25),
    problem=st.sampled_from([None, None, None, "a problem"]),
)


@given(st.lists(KEPT, min_size=1, max_size=8))
def test_a_stage_rests_where_all_its_ranks_have_their_state_and_all_logs(kept: list[Kept]) -> None:
    choice = choose(kept, LAST)
    for until in range(LAST, 25):
        able = {
            stage
            for stage in {rank.stage for rank in kept}
            if all(
                until in rank.iterations and rank.logged >= until and rank.problem is None
                for rank in kept
                if rank.stage == stage
            )
        }
        if choice is None:
            assert not able
        else:
            chosen, stages = choice
            assert len(able) <= len(stages)
            if until == chosen:
                assert set(stages) == able
            if until > chosen:
                assert len(able) < len(stages)
