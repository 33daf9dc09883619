"""Which buffer a snapshot gets: none that is in use, and never the newest state for a snapshot in memory alone."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cpsr.checkpoint.host_snapshot import Snapshot
from cpsr.checkpoint.memory_states import Left
from cpsr.checkpoint.occupancy import Occupancy


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


def test_a_state_that_is_sent_is_overwritten_last() -> None:
    occupancy = buffers(3)
    for iteration in (1, 2, 3):
        occupancy.release(sealed(occupancy, iteration))
    assert occupancy.begin_sending(name(0))
    assert not occupancy.begin_sending(name(1)), "one at a time, or no buffer is left"
    occupancy.release(sealed(occupancy, 4))
    assert 1 in occupancy.sealed_iterations
    occupancy.end_sending(name(0))
    occupancy.release(sealed(occupancy, 5))
    assert 1 not in occupancy.sealed_iterations


def test_the_state_that_other_machines_have_is_there_until_they_have_the_next() -> None:
    occupancy = buffers(4)
    for iteration in (1, 2, 3, 4):
        occupancy.release(sealed(occupancy, iteration))
    occupancy.replicated(1)
    assert occupancy.begin_sending(name(2))
    for iteration in (5, 6, 7):
        occupancy.release(sealed(occupancy, iteration))
        assert {1, 3, iteration} <= set(occupancy.sealed_iterations)
    occupancy.end_sending(name(2))
    occupancy.replicated(3)
    for iteration in (8, 9, 10):
        occupancy.release(sealed(occupancy, iteration))
    assert 3 in occupancy.sealed_iterations
    assert 1 not in occupancy.sealed_iterations


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
