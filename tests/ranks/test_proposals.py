"""The protocol of agreement on paper: any order, loss and repetition of messages, ranks stopped, killed and ended."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cpsr.ranks.proposals import ANSWER_SECONDS, Act, Coordinator, Ended, Member, Proposal, Report, State, merged

RANK, PICK = st.integers(0, 3), st.integers(0, 1000)


class Rank(Member):
    """A member with its training thread, which may be between any two lines of its own and of the other thread."""

    def __init__(self) -> None:
        self.races = ""  # the training thread ends a step between two lines of `hear`
        self.alive = True
        self.asks = False  # the training thread has counted a step, and not passed it
        self.waits = False
        self.acts: list[tuple[int, ...]] = []  # numbers of what it did at the end of each step
        super().__init__()

    def __setattr__(self, name: str, value: Any) -> None:
        raced = self.races if name == "attention_at" else ""
        if raced:
            self.races = ""
        if raced == "before":  # `due` is not called inside `hear`, so this thread passes only what it sees no hold at
            self.count()
            if self.steps < self.attention_at:
                self.check()
        super().__setattr__(name, value)
        if raced == "after":
            self.count()

    @property
    def trains(self) -> bool:
        return self.alive and self.ended == Ended.NO

    def count(self) -> None:
        """The first half of the end of a step."""
        if self.trains and not self.asks:
            self.steps += 1
            self.asks = True

    def check(self) -> None:
        """The second half."""
        if not (self.trains and self.asks):
            return
        due: list[Proposal] | None = []
        if self.waits or self.steps >= self.attention_at:
            due = self.due()
        self.waits = due is None
        if due is not None:
            self.acts.append(tuple(proposal.number for proposal in due))
            self.asks = False


class Agreement(RuleBasedStateMachine):
    @initialize(ranks=st.integers(1, 4), pace=st.sampled_from([0.0, 5.0]))
    def start(self, ranks: int, pace: float) -> None:
        self.pace = pace
        self.ranks = [Rank() for _ in range(ranks)]
        self.coordinator = Coordinator()
        self.said = [self.coordinator.newest]
        self.reports = [[Report()] for _ in self.ranks]
        self.now = 0.0
        self.stop = False

    def rank(self, index: int) -> Rank:
        return self.ranks[index % len(self.ranks)]

    @rule(index=RANK)
    def ends_a_step(self, index: int) -> None:
        self.rank(index).count()

    @rule(index=RANK)
    def passes_its_end(self, index: int) -> None:
        self.rank(index).check()

    @rule(index=RANK, steps=st.integers(1, 5))
    def trains(self, index: int, steps: int) -> None:
        for _ in range(steps):
            self.rank(index).count()
            self.rank(index).check()

    @rule(index=RANK, back=PICK, races=st.sampled_from(["", "before", "after"]))
    def hears(self, index: int, back: int, races: str) -> None:
        rank = self.rank(index)
        if rank.alive:
            rank.races = races
            rank.hear(self.said[-1 - back % min(len(self.said), 4)])
            rank.races = ""

    @rule(index=RANK)
    def reports_itself(self, index: int) -> None:
        rank = self.rank(index)
        if rank.alive:
            self.reports[index % len(self.ranks)].append(rank.report(stop=self.stop))

    @precondition(lambda self: self.ranks[0].alive)
    @rule(back=st.lists(PICK, min_size=4, max_size=4), seconds=st.sampled_from([0.0, 0.0, 2 * ANSWER_SECONDS]))
    def coordinates(self, back: list[int], seconds: float) -> None:
        """By reports of which some are old."""
        picked = [said[-1 - at % min(len(said), 4)] for said, at in zip(self.reports, back, strict=False)]
        self.now += seconds
        self.look(picked, Act.PLAN)

    def look(self, reports: list[Report], otherwise: Act) -> None:
        groups = [reports[:2], reports[2:]]  # two machines
        report = merged(merged(group) for group in groups if group)
        assert Report.of_bytes(report.to_bytes()) == report
        if self.coordinator.look(report, self.now):
            self.said.append(self.coordinator.newest)
            self.coordinator.propose(Act.LEAVE if report.stop else otherwise, report, self.now, self.pace)
        self.said.append(self.coordinator.newest)

    @rule(races=st.lists(st.sampled_from(["", "before", "after"]), min_size=4, max_size=4))
    def messages_flow(self, races: list[str]) -> None:
        """None is lost or late."""
        for at, race in enumerate(races[: len(self.ranks)]):
            self.hears(at, 0, race)
            self.reports_itself(at)
        if self.ranks[0].alive:
            self.look([said[-1] for said in self.reports], Act.PLAN)

    @rule()
    def is_asked_to_stop(self) -> None:
        self.stop = True

    @rule(index=RANK)
    def is_killed(self, index: int) -> None:
        self.rank(index).alive = False

    @rule(index=RANK, how=st.sampled_from([Ended.BATCHES, Ended.LOOP]))
    def leaves_its_loop(self, index: int, how: Ended) -> None:
        if not self.rank(index).asks:
            self.rank(index).ended = how

    @invariant()
    def all_do_the_same_at_each_step(self) -> None:
        for at in range(max(len(rank.acts) for rank in self.ranks)):
            assert len({rank.acts[at] for rank in self.ranks if at < len(rank.acts)}) == 1

    @invariant()
    def who_passes_its_step_carries_a_decision_out(self) -> None:
        for proposal in self.said:
            acts = [rank.acts[proposal.step - 1] for rank in self.ranks if len(rank.acts) >= proposal.step > 0]
            if proposal.state == State.DECIDED:
                assert all(proposal.number in numbers for numbers in acts)
            elif proposal.state == State.WITHDRAWN:
                assert all(proposal.number not in numbers for numbers in acts)

    @invariant()
    def a_number_has_one_verdict(self) -> None:
        verdicts = [(said.number, said.state) for said in self.said if said.state != State.PROPOSED]
        assert len({number for number, _ in verdicts}) == len(set(verdicts))

    def teardown(self) -> None:
        """Messages flow again: nobody waits for ever, and where all still train, they leave together."""
        if not hasattr(self, "ranks") or not self.ranks[0].alive:
            return
        self.stop, left = True, False
        for _ in range(100):
            self.now += 0.6 * ANSWER_SECONDS
            for at, rank in enumerate(self.ranks):
                if rank.alive:
                    rank.hear(self.said[-1])
                    self.reports[at].append(rank.report(stop=True))
                    for _ in range(1 + at):
                        rank.check()
                        rank.count()
            self.look([said[-1] for said in self.reports], Act.LEAVE)
        leaves = {said.number for said in self.said if said.act == Act.LEAVE and said.state == State.DECIDED}
        for rank in self.ranks:
            assert not rank.waits or not rank.trains
            left = left or any(leaves & set(numbers) for numbers in rank.acts)
        assert left or not all(rank.trains for rank in self.ranks)


TestAgreement = Agreement.TestCase
TestAgreement.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
