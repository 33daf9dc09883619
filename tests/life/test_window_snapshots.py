"""All ranks send the same windows to their peers, to the end, whatever their links do."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from cpsr.life.memory_snapshots import Turns, WindowSnapshots
from cpsr.ranks.group import Ballot

ITERATIONS = 60


@dataclass
class Rank:
    """One with windows of so many iterations, whose seals and transfers take as many as are given.

    Attributes:
        sent: first iterations of the windows that went to its peers.
        kept: those of them that it has kept, one after the other, since the peers have them in full.
    """

    window_iterations: int
    seal_iterations: int
    transfer_iterations: int
    iterations: int = 1
    iteration: int = 0
    sealed_at: int = 0
    until: int = 0
    sent: list[int] = field(default_factory=list)
    kept: list[int | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        free = cast(Any, SimpleNamespace(is_free=True))
        link = lambda: self.sealed_at <= self.iteration < self.until  # noqa: E731
        self.turns = Turns(free, link, self.kept.append, iteration=-1)
        self.snapshots = WindowSnapshots(cast(Any, self), self.turns, lambda iterations: None)

    def ends_after(self, iteration: int) -> bool:
        return iteration % self.window_iterations == 0

    def agree(self, iteration: int) -> None:
        """The number is given."""

    def is_pending(self) -> bool:
        return self.iteration < self.sealed_at

    def capture(self, iteration: int, small_state: Callable[[], Any], *, send: bool) -> Any:
        if not send:
            return None
        assert self.iteration >= self.until, "the link has not sent the one before"
        assert self.ends_after(iteration)
        self.sealed_at = self.iteration + self.seal_iterations
        self.until = self.sealed_at + self.transfer_iterations
        self.sent.append(iteration - self.window_iterations + 1)
        return SimpleNamespace(first=self.sent[-1], is_pending=self.is_pending)


@settings(max_examples=200, deadline=None)
@given(
    window=st.integers(1, 6),
    links=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), min_size=1, max_size=4),
    vote_every=st.integers(1, 4),
)
def test_every_rank_sends_the_same_windows_to_their_end(
    window: int, links: list[tuple[int, int]], vote_every: int
) -> None:
    ranks = [Rank(window, seal, transfer) for seal, transfer in links]
    before = Ballot()
    for iteration in range(1, ITERATIONS):
        ends = []
        for rank in ranks:
            rank.iteration = iteration
            end = rank.snapshots.end_of(iteration, dict)
            assert end is not None
            ends.append(end)
        if iteration % vote_every == 0:
            busy = any(rank.turns.ballot()[1] for rank in ranks)
            for rank in ranks:
                rank.turns.read(iteration, before.blocked, before.busy)
            before = Ballot(busy=busy)
        for end in ends:
            end()
        assert len({tuple(rank.sent) for rank in ranks}) == 1
        assert len({tuple(rank.kept) for rank in ranks}) == 1
        sent, kept = ranks[0].sent, ranks[0].kept[-1]
        assert kept == -1 if len(sent) < 2 and kept not in sent else kept in sent[-2:]
        if sent and kept == sent[-1]:  # the ranks keep it in the place of the one before once all peers have it
            assert all(rank.until <= iteration for rank in ranks)
    assert len(ranks[0].sent) > 1
