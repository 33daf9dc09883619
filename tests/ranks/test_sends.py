"""What all ranks send, on paper: any order and loss of words, links of any speed, skips, and runs that go back."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cpsr.ranks.held import NONE, Held, held_by_all
from cpsr.ranks.proposals import Report, merged
from cpsr.ranks.sends import Order, Orders, Sender

RANK, PICK = st.integers(0, 3), st.integers(0, 1000)
State = tuple[int, int]  # branch and iteration


@dataclass
class HolderLink:
    """To a holder that has room for two states, and overwrites the one that it need not keep.

    Attributes:
        holds: what the holder has.
        newest: of what was to be sent.
    """

    kept: int | None = None
    branch: int = 0
    offered: State | None = None
    newest: State | None = None
    holds: list[State] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        return self.offered is not None

    def has_arrived(self, iteration: int) -> bool:
        return self.newest == (self.branch, iteration) in self.holds

    def offer(self, state: State) -> None:
        self.offered = self.newest = state

    def ends(self, *, works: bool) -> None:
        """What is sent arrives, or the holder refuses it; either way one place is overwritten."""
        if self.offered is not None:
            self.holds = [state for state in self.holds if state == (self.branch, self.kept)]
            self.holds += [self.offered] if works else []
            self.offered = None


class Rank:
    """One that takes snapshots, or windows, after the same steps as the others."""

    def __init__(self, *, windows: bool) -> None:
        self.steps, self.iteration = 0, 0
        self.link = HolderLink()
        self.sender = Sender(lambda: self.steps)
        self.kept: set[State] = set()
        self.heard = 0
        self.marked: dict[int, int] = {}  # order -> step
        self.sent: dict[int, State] = {}  # order -> state
        self.copying: State | None = None
        self.windows = windows
        self.memory: set[State] = {(0, 0)}
        self.sender.open([self.link], self.keep, 0, None if windows else self.sends)

    def keep(self, iterations: object) -> None:
        assert isinstance(iterations, set)
        self.kept = {(self.link.branch, iteration) for iteration in iterations}

    def sends(self, iteration: int) -> bool:
        state = self.link.branch, iteration
        if state in self.memory:
            self.sent[self.heard] = state
            self.link.offer(state)
        return state in self.memory

    def hears(self, said: Order) -> None:
        self.heard = max(self.heard, said.number)
        self.sender.hear(said)

    def ends_a_step(self, *, due: bool, skips: bool) -> None:
        self.seals(works=True)
        self.steps, self.iteration = self.steps + 1, self.iteration + 1
        if due and not self.windows and not skips:
            self.memory.add((self.link.branch, self.iteration))
        if due and self.windows and self.sender.may_send():
            self.marked[self.heard] = self.steps
            if not skips:
                state = self.copying = self.sent[self.heard] = self.link.branch, self.iteration
                self.memory.add(state)
                self.sender.sent(self.iteration, lambda: self.copying == state)

    def seals(self, *, works: bool) -> None:
        if self.copying is not None:
            if works:
                self.link.offer(self.copying)
            self.copying = None

    def goes_back(self, iteration: int) -> None:
        self.seals(works=True)
        self.link.offered = self.link.newest = None
        self.link.branch, self.iteration = self.link.branch + 1, iteration
        self.sender.restart()


class Sends(RuleBasedStateMachine):
    @initialize(ranks=st.integers(1, 4), every=st.integers(1, 4), ahead=st.sampled_from([None, 1, 2, 4]))
    def begin(self, ranks: int, every: int, ahead: int | None) -> None:
        self.ranks = [Rank(windows=ahead is not None) for _ in range(ranks)]
        self.every, self.ahead = every, ahead
        self.held = [[Held()] for _ in self.ranks]
        self.orders = Orders()
        self.said = [self.orders.newest]
        self.reports = [[Report()] for _ in self.ranks]

    def rank(self, index: int) -> Rank:
        return self.ranks[index % len(self.ranks)]

    @rule(index=RANK, skips=st.sampled_from([False, False, False, True]))
    def ends_a_step(self, index: int, skips: bool) -> None:
        """No rank is two steps ahead: they train together."""
        rank = self.rank(index)
        if rank.steps == min(one.steps for one in self.ranks):
            rank.ends_a_step(due=(rank.steps + 1) % self.every == 0, skips=skips)

    @rule(steps=st.integers(1, 6), skips=st.sampled_from([False, False, True]))
    def all_train(self, steps: int, skips: bool) -> None:
        """The last rank may have no memory free."""
        for _ in range(steps):
            for index in range(len(self.ranks)):
                self.ends_a_step(index, skips and index == len(self.ranks) - 1)

    @rule(index=RANK, works=st.sampled_from([True, True, False]))
    def seals(self, index: int, works: bool) -> None:
        self.rank(index).seals(works=works)

    @rule(index=RANK, works=st.sampled_from([True, True, True, False]))
    def arrives(self, index: int, works: bool) -> None:
        self.rank(index).link.ends(works=works)

    @rule(index=RANK, back=PICK)
    def hears(self, index: int, back: int) -> None:
        said = self.said[-1 - back % min(len(self.said), 4)]
        assert Order.of_bytes(said.to_bytes()) == said
        self.rank(index).hears(said)

    @rule(index=RANK)
    def reports_itself(self, index: int) -> None:
        rank = self.rank(index)
        self.reports[index % len(self.ranks)].append(Report(rank.steps, 0, 0, 0, 0, 0, *rank.sender.report()))
        branch = rank.link.branch
        held = Held.of(branch, NONE, [iteration for at, iteration in rank.memory if at == branch])
        self.held[index % len(self.ranks)].append(held)

    @rule(index=RANK)
    def overwrites(self, index: int) -> None:
        """All that it may."""
        rank = self.rank(index)
        assert rank.kept <= rank.memory
        rank.memory &= rank.kept

    @rule(back=st.lists(PICK, min_size=4, max_size=4))
    def coordinates(self, back: list[int]) -> None:
        """By reports of which some are old."""
        picked = [said[-1 - at % min(len(said), 4)] for said, at in zip(self.reports, back, strict=False)]
        groups = [picked[:2], picked[2:]]  # two machines
        held = [said[-1 - at % min(len(said), 4)] for said, at in zip(self.held, back, strict=False)]
        all_hold = held_by_all(held, max(one.branch for one in held))
        self.orders.look(merged(merged(group) for group in groups if group), all_hold, self.ahead)
        self.said.append(self.orders.newest)

    @rule()
    def words_flow(self) -> None:
        """None is late."""
        for index, rank in enumerate(self.ranks):
            rank.hears(self.said[-1])
            self.reports_itself(index)
        self.coordinates([0] * 4)

    @rule(works=st.lists(st.sampled_from([True, True, True, False]), min_size=4, max_size=4))
    def all_send(self, works: list[bool]) -> None:
        """What is due next, to its end."""
        self.words_flow()
        self.all_train(self.every + (self.ahead or 0), False)
        for rank, one in zip(self.ranks, works, strict=False):
            rank.seals(works=True)
            rank.link.ends(works=one)
        self.words_flow()

    @rule(iterations=st.integers(0, 5))
    def all_go_back(self, iterations: int) -> None:
        last = min(rank.iteration for rank in self.ranks)
        while len({rank.steps for rank in self.ranks}) > 1:
            self.ends_a_step(min(range(len(self.ranks)), key=lambda index: self.ranks[index].steps), False)
        for rank in self.ranks:
            rank.goes_back(max(0, last - iterations))

    @invariant()
    def all_send_the_same(self) -> None:
        for number in range(self.orders.newest.number + 1):
            assert len({rank.marked[number] for rank in self.ranks if number in rank.marked}) <= 1

    @invariant()
    def what_is_said_to_be_complete_all_have(self) -> None:
        """Each rank keeps its own, and its holder has it: any machine may be lost."""
        for rank in self.ranks:  # nothing of another branch
            assert rank.kept <= {(0, 0), *rank.sent.values()}
        state = self.ranks[0].sent.get(self.orders.newest.complete, (0, 0))
        for rank in self.ranks:
            if state[0] == rank.link.branch:
                assert state in rank.kept
                assert state == (0, 0) or state in rank.link.holds

    def teardown(self) -> None:
        """Nothing starves: once all hear, and links work, replicas come to be complete again and again."""
        if not hasattr(self, "ranks"):
            return
        before = self.orders.newest.complete
        for _ in range(60):
            self.words_flow()
            self.all_train(4, False)
            for rank in self.ranks:
                rank.seals(works=True)
                rank.link.ends(works=True)
        assert self.orders.newest.complete >= before + 3


TestSends = Sends.TestCase
TestSends.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)


def test_an_order_that_comes_before_this_rank_sends_anything_is_carried_out_then() -> None:
    sender, link, order = Sender(lambda: 0), HolderLink(), Order(1, 10, 0)
    sender.hear(order)

    def send(iteration: int) -> bool:
        link.offer((0, iteration))
        return True

    sender.open([link], lambda iterations: None, 10, send)
    sender.hear(order)
    link.ends(works=True)
    assert sender.report() == (1, 1)
