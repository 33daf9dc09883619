"""All ranks send the same snapshots, whatever their links do."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from cpsr.life.memory_snapshots import Turns
from cpsr.ranks.group import Ballot

ITERATIONS = 60


@dataclass
class Rank:
    """One whose replicas take so many iterations each."""

    transfer_iterations: int
    seal_iterations: int = 0
    deferred: bool = True
    iteration: int = 0
    until: int = 0
    sealed_at: int = 0
    sent: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    complete: int | None = None
    refused: set[int] = field(default_factory=set)  # by the holder

    def __post_init__(self) -> None:
        link = lambda: self.sealed_at <= self.iteration < self.until  # noqa: E731
        self.turns = Turns(link, self.has_arrived, self.replicated, iteration=-1)

    def replicated(self, iteration: int | None) -> None:
        self.complete = iteration

    def has_arrived(self, iteration: int) -> bool:
        return iteration == self.sent[-1] not in self.refused

    def is_pending(self) -> bool:
        return self.iteration < self.sealed_at

    def decide(self) -> None:
        """Right after the step."""
        if self.turns.may_send(self.iteration):
            assert self.iteration >= self.until, "the link has not sent the one before"
            self.sent.append(self.iteration)
            self.waiting.append(self.iteration)
            if not self.deferred:
                self.begin()

    def begin(self) -> None:
        """At once, or when the loop requests its next batch."""
        if self.waiting:
            self.turns.sent(self.waiting.pop(), self.is_pending)
            self.sealed_at = self.iteration + self.seal_iterations
            self.until = self.sealed_at + self.transfer_iterations


@settings(max_examples=300, deadline=None)
@given(
    transfers=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    vote_every=st.integers(1, 4),
    snapshot_every=st.integers(1, 5),
    data=st.data(),
)
def test_every_rank_sends_the_same_snapshots_to_their_end(
    transfers: list[int], vote_every: int, snapshot_every: int, data: st.DataObject
) -> None:
    ranks = [Rank(one, data.draw(st.integers(0, 3)), data.draw(st.booleans())) for one in transfers]
    before = Ballot()
    for iteration in range(ITERATIONS):
        for rank in ranks:
            rank.iteration = iteration
            if iteration % snapshot_every == 0:
                rank.decide()
        if iteration % vote_every == 0:
            cast_now = [rank.turns.ballot() for rank in ranks]
            for rank in ranks:
                rank.turns.read(iteration, before.busy, before.missing)
            busy, missing = (any(votes) for votes in zip(*cast_now, strict=True))
            before = Ballot(busy, missing)
        for rank in ranks:
            rank.begin()
        assert len({tuple(rank.sent) for rank in ranks}) == 1
        assert len({rank.complete for rank in ranks}) == 1
        sent = ranks[0].sent
        if len(sent) > 1:  # the next one is sent once the one before is complete, and that one is kept from then on
            assert ranks[0].complete in sent[-2:]
        if sent and ranks[0].complete == sent[-1]:
            assert all(rank.until <= iteration for rank in ranks)


def live_alone(rank: Rank) -> None:
    """Twenty iterations of a job of this rank."""
    before = Ballot()
    for iteration in range(20):
        rank.iteration = iteration
        now = rank.turns.ballot()
        rank.turns.read(iteration, before.busy, before.missing)
        before = Ballot(*now)
        rank.decide()
        rank.begin()


def test_the_next_one_is_sent_soon_after_all_links_are_free() -> None:
    rank = Rank(3)
    live_alone(rank)
    assert rank.sent == [0, 4, 8, 12, 16]
    assert rank.complete == 12  # what is sent last has not arrived


def test_what_a_holder_refused_does_not_take_the_place_of_what_it_has() -> None:
    rank = Rank(3, refused={8, 12, 16})
    live_alone(rank)
    assert rank.sent == [0, 4, 8, 12, 16]
    assert rank.complete == 4


def test_a_state_that_is_taken_later_than_it_was_due_is_kept_under_its_own_iteration() -> None:
    """As where the loop repeats a batch: the snapshot begins once all steps on that batch are done."""
    kept: list[int | None] = []
    turns = Turns(lambda: False, {3: True}.__contains__, kept.append)
    assert turns.may_send(1)
    for iteration in (1, 2, 3):
        turns.read(iteration, *turns.ballot())
    assert kept == [0]  # it has not even begun
    turns.sent(1, lambda: False, 3)
    turns.read(4, *turns.ballot())
    assert kept == [0, 3]


def test_after_a_roll_back_iterations_that_come_again_are_sent_again() -> None:
    rank = Rank(1)
    rank.iteration = 30
    rank.decide()
    rank.begin()
    rank.turns.restart()
    assert rank.complete is None
    rank.iteration, rank.until, rank.sealed_at = 10, 0, 0
    rank.decide()
    assert rank.sent == [30, 10]
