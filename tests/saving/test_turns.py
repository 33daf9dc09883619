"""All ranks take the same snapshots and send the same ones, whatever their buffers and links do."""

from dataclasses import dataclass, field
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from cpsr.ranks.group import Ballot
from cpsr.saving.turns import Turns

ITERATIONS = 60


@dataclass
class Rank:
    """One whose replicas take so many iterations each, and whose buffers are free as drawn."""

    transfer_iterations: int
    frees: list[bool]
    iteration: int = 0
    until: int = 0
    sent: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.turns = Turns(cast(Any, self), lambda: self.iteration < self.until)

    @property
    def ready(self) -> bool:
        return self.frees[self.iteration]

    def snapshot(self) -> None:
        if self.turns.may_send(self.iteration):
            assert self.iteration >= self.until, "the link has not sent the one before"
            self.sent.append(self.iteration)
            self.until = self.iteration + self.transfer_iterations


@settings(max_examples=200, deadline=None)
@given(
    transfers=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    vote_every=st.integers(1, 4),
    snapshot_every=st.integers(1, 5),
    deferred=st.booleans(),
    data=st.data(),
)
def test_every_rank_sends_the_same_snapshots_to_their_end(
    transfers: list[int], vote_every: int, snapshot_every: int, deferred: bool, data: st.DataObject
) -> None:
    frees = st.lists(st.booleans(), min_size=ITERATIONS, max_size=ITERATIONS)
    ranks = [Rank(transfer, data.draw(frees)) for transfer in transfers]
    before = Ballot()
    for iteration in range(ITERATIONS):
        due = iteration % snapshot_every == 0
        for rank in ranks:
            rank.iteration = iteration
            if due and not deferred and rank.turns.may_take:
                rank.snapshot()
        if iteration % vote_every == 0:
            cast_now = [rank.turns.ballot() for rank in ranks]
            for rank in ranks:
                rank.turns.read(iteration, before.blocked, before.busy)
            blocked, busy = (any(votes) for votes in zip(*cast_now, strict=True))
            before = Ballot(blocked=blocked, busy=busy)
        for rank in ranks:
            if due and deferred and rank.turns.may_take:
                rank.snapshot()
        assert len({tuple(rank.sent) for rank in ranks}) == 1
        assert len({rank.turns.may_take for rank in ranks}) == 1


def test_the_next_one_is_sent_soon_after_all_links_are_free() -> None:
    rank = Rank(3, [True] * ITERATIONS)
    before = Ballot()
    for iteration in range(20):
        rank.iteration = iteration
        now = rank.turns.ballot()
        rank.turns.read(iteration, before.blocked, before.busy)
        before = Ballot(blocked=now[0], busy=now[1])
        rank.snapshot()
    assert rank.sent == [0, 4, 8, 12, 16]


def test_after_a_roll_back_iterations_that_come_again_are_sent_again() -> None:
    rank = Rank(1, [True] * ITERATIONS)
    rank.iteration = 30
    rank.snapshot()
    rank.turns.restart()
    rank.iteration, rank.until = 10, 0
    rank.snapshot()
    assert rank.sent == [30, 10]
