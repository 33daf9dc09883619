"""Which buffer a snapshot gets: none that is in use, and never the newest state for a snapshot in memory alone."""

from functools import partial

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cpsr.checkpoint.host_snapshot import Snapshot
from cpsr.checkpoint.memory_states import Left
from cpsr.checkpoint.occupancy import Occupancy
from cpsr.ranks.held import NONE, Held, held_by_all

RANK = st.integers(0, 3)


def name(index: int) -> str:
    return f"file-{index}"


def buffers(count: int, **left: int) -> Occupancy:
    """So many; `left` is what an earlier process has left in some."""
    files = [(name(index), left.get(f"file_{index}")) for index in range(count)]
    return Occupancy((file, None if iteration is None else Left(0, 0, iteration)) for file, iteration in files)


def seal(occupancy: Occupancy, snapshot: Snapshot | None) -> Snapshot:
    assert snapshot is not None
    occupancy.begin_seal(snapshot)
    occupancy.end_seal(snapshot, sealed=True)
    return snapshot


def sealed(occupancy: Occupancy, iteration: int, *, keep_newest: bool = True) -> Snapshot:
    return seal(occupancy, occupancy.take(iteration, keep_newest=keep_newest))


def test_of_what_earlier_lives_have_left_the_oldest_life_goes_first() -> None:
    """A restart takes only states of the newest life: a later iteration of one before it is void."""
    occupancy = Occupancy([(name(0), Left(1, 0, 8)), (name(1), Left(1, 0, 12)), (name(2), Left(0, 0, 12))])
    for place in (2, 0, 1):
        snapshot = occupancy.take(8)
        assert snapshot is not None
        assert snapshot.place == place


def test_the_state_that_other_machines_have_and_the_one_they_get_are_overwritten_last() -> None:
    occupancy = buffers(4)
    for iteration in (1, 2, 3, 4):
        occupancy.release(sealed(occupancy, iteration))
    occupancy.keep([1, 3])
    for iteration in (5, 6, 7):
        occupancy.release(sealed(occupancy, iteration))
        assert {1, 3, iteration} <= set(occupancy.sealed_iterations)
    occupancy.keep([3])
    for iteration in (8, 9, 10):
        occupancy.release(sealed(occupancy, iteration))
    assert 3 in occupancy.sealed_iterations
    assert 1 not in occupancy.sealed_iterations


def test_a_snapshot_is_skipped_while_only_a_state_that_other_machines_have_is_in_its_way() -> None:
    """And while the other ranks have still to seal the newest one: another buffer is free soon after."""
    occupancy, all_hold = buffers(4), [Held.of(0, NONE, [])]
    occupancy.join(lambda held: None, lambda branch: all_hold[0])
    occupancy.release(sealed(occupancy, 10))
    occupancy.keep([10])
    writing = sealed(occupancy, 15)  # its buffer stays in use
    occupancy.release(sealed(occupancy, 20))
    occupancy.release(sealed(occupancy, 30))
    all_hold[0] = Held.of(0, 20, [10, 15, 20])
    assert occupancy.take(40, keep_newest=True) is None
    assert occupancy.sealed_iterations == [10, 15, 20, 30]
    all_hold[0] = Held.of(0, 30, [10, 15, 20, 30])
    occupancy.release(sealed(occupancy, 40))
    assert occupancy.sealed_iterations == [10, 15, 30, 40]
    occupancy.release(writing)


def test_a_state_of_an_earlier_process_is_kept_in_place_of_no_newer_one() -> None:
    """After a restart from iteration 12 the earlier state of 12 is void; a dump that kept it would take the new one."""
    occupancy = buffers(2, file_0=12)
    restored = seal(occupancy, occupancy.take(12, spare=[name(0)]))
    occupancy.release(restored)
    occupancy.forget_earlier()
    dump = occupancy.take(15, keep_newest=True)
    assert dump is not None
    assert (dump.place, restored.place) == (0, 1)
    assert occupancy.sealed_iterations == [12]


class Life(RuleBasedStateMachine):
    """A rank that snapshots every iteration, writes some, and may be killed at any moment."""

    @initialize(count=st.integers(3, 5))
    def begin(self, count: int) -> None:
        self.occupancy = buffers(count)
        self.iteration = 0
        self.newest = 0
        self.writing: list[Snapshot] = []

    @rule()
    def snapshot_in_memory(self) -> None:
        self.iteration += 1
        before = self.occupancy.sealed_iterations
        taken = self.occupancy.take(self.iteration, keep_newest=True)
        if taken is None:
            return
        assert self.occupancy.sealed_iterations[-1:] == before[-1:], "a kill during the copy finds the newest"
        self.occupancy.release(seal(self.occupancy, taken))
        self.newest = self.iteration

    @precondition(lambda self: len(self.writing) < 2)
    @rule()
    def checkpoint(self) -> None:
        self.iteration += 1
        self.writing.append(sealed(self.occupancy, self.iteration, keep_newest=False))
        self.newest = self.iteration

    @precondition(lambda self: self.writing)
    @rule()
    def written(self) -> None:
        self.occupancy.release(self.writing.pop(0))

    @invariant()
    def the_newest_is_there(self) -> None:
        if self.newest:
            assert self.newest in self.occupancy.sealed_iterations


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, deadline=None)


class Ranks(RuleBasedStateMachine):
    """Ranks that seal, skip and hear of each other as they can, and may be killed together at any moment."""

    @initialize(ranks=st.integers(1, 4), count=st.integers(3, 5))
    def begin(self, ranks: int, count: int) -> None:
        self.ranks = [buffers(count) for _ in range(ranks)]
        self.said: list[list[Held]] = [[] for _ in self.ranks]
        self.late = [[0] * ranks for _ in self.ranks]  # how much of what another says a rank has not heard
        self.iterations = [0] * ranks
        self.copying: list[Snapshot | None] = [None] * ranks
        self.sealing: list[list[Snapshot]] = [[] for _ in self.ranks]
        self.seen = NONE
        self.branch = 0
        for rank, occupancy in enumerate(self.ranks):
            occupancy.join(self.said[rank].append, partial(self.held, rank))

    def held(self, rank: int, branch: int) -> Held:
        heard = [said[-1 - min(late, len(said) - 1)] for said, late in zip(self.said, self.late[rank], strict=True)]
        held = held_by_all(heard, branch)
        self.seen = max(self.seen, held.newest)
        return held

    @rule(rank=RANK, pause=st.booleans())
    def begins(self, rank: int, pause: bool) -> None:
        """A snapshot is due; another one has been copied before."""
        rank %= len(self.ranks)
        self.copies(rank, fails=False)
        self.iterations[rank] += 1
        if pause:  # its adapter has failed
            self.ranks[rank].skip(self.iterations[rank])
        else:
            self.copying[rank] = self.ranks[rank].take(self.iterations[rank], keep_newest=True, due=True)

    @rule(rank=RANK, fails=st.booleans())
    def copies(self, rank: int, fails: bool) -> None:
        rank %= len(self.ranks)
        occupancy, snapshot = self.ranks[rank], self.copying[rank]
        if snapshot is None:
            return
        self.copying[rank] = None
        if fails:
            occupancy.release(snapshot)
            return
        occupancy.copied(snapshot)
        occupancy.begin_seal(snapshot)
        occupancy.release(snapshot)
        self.sealing[rank].append(snapshot)

    @rule(rank=RANK, works=st.sampled_from([True, True, True, False]))
    def seals(self, rank: int, works: bool) -> None:
        rank %= len(self.ranks)
        if self.sealing[rank]:
            self.ranks[rank].end_seal(self.sealing[rank].pop(0), sealed=works)

    @rule(rank=RANK, snapshots=st.integers(1, 4))
    def goes_on(self, rank: int, snapshots: int) -> None:
        rank %= len(self.ranks)
        for _ in range(snapshots):
            self.begins(rank, pause=False)
            self.copies(rank, fails=False)
            while self.sealing[rank]:
                self.seals(rank, works=True)

    @rule(snapshots=st.integers(1, 2))
    def all_go_on(self, snapshots: int) -> None:
        for rank in range(len(self.ranks)):
            while self.iterations[rank] < max(self.iterations):
                self.goes_on(rank, 1)
        for _ in range(snapshots):
            for rank in range(len(self.ranks)):
                self.goes_on(rank, 1)

    @rule(rank=RANK, other=RANK, late=st.integers(0, 15))
    def hears_late(self, rank: int, other: int, late: int) -> None:
        self.late[rank % len(self.ranks)][other % len(self.ranks)] = late

    @rule()
    def hears_all(self) -> None:
        for rank in range(len(self.ranks)):
            self.late[rank] = [0] * len(self.ranks)
            self.held(rank, self.branch)

    @rule()
    def go_back(self) -> None:
        """All together, once what is under way has ended."""
        for rank, occupancy in enumerate(self.ranks):
            self.copies(rank, fails=True)
            while self.sealing[rank]:
                self.seals(rank, works=True)
            self.iterations[rank] = min(self.iterations)
            occupancy.rewind(self.iterations[rank])
        self.branch, self.seen = self.branch + 1, NONE

    @invariant()
    def a_kill_leaves_what_any_rank_has_seen_on_all(self) -> None:
        if self.seen >= 0:
            for occupancy in self.ranks:
                assert self.seen in occupancy.sealed_iterations

    def teardown(self) -> None:
        """Nothing starves: once all seal and hear again, each takes what is due, and it becomes common."""
        if not hasattr(self, "ranks"):
            return
        last = max(self.iterations) + 1
        self.hears_all()
        for iteration in range(last, last + 6):
            for rank, occupancy in enumerate(self.ranks):
                self.copies(rank, fails=False)
                while self.sealing[rank]:
                    self.seals(rank, works=True)
                self.iterations[rank] = iteration
                self.copying[rank] = occupancy.take(iteration, keep_newest=True, due=True)
            self.hears_all()
        for rank in range(len(self.ranks)):
            self.copies(rank, fails=False)
            while self.sealing[rank]:
                self.seals(rank, works=True)
        assert [occupancy.common for occupancy in self.ranks] == [last + 5] * len(self.ranks)


TestRanks = Ranks.TestCase
TestRanks.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
