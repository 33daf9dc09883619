"""The protocol by which all ranks act at the end of the same step, or none does; without threads, clocks or messages.

Every rank counts the steps that it has ended in this life. The count never goes back, where iterations may.

1. Rank 0, the coordinator, proposes number e: from the end of step k on, do this. There is one proposal at a time, and
   a number is used once.
2. A member, each rank, first sets its hold at k. Then it reads its count. Before k it accepts, which it never takes
   back; otherwise it lifts the hold and refuses. The training thread writes its count first and then reads the hold:
   one of the two sees the other, so no accepted step is passed unseen.
3. The training thread waits at the end of step k until its member knows the verdict.
4. The coordinator decides e once every rank has accepted it. If one refuses, or does not answer in time, it withdraws
   e. Each number gets one verdict. It then proposes again, with a later k.
5. A member learns a decided proposal, which its training thread carries out at k. The coordinator proposes nothing
   more before all have learned it. So a member that sees a later number knows that the one before was withdrawn.

Messages are states: the newest proposal of the coordinator, and a report of each rank. Accepted, refused and learned
numbers only rise. The coordinator compares them with its own newest number, so an old report says too little and
nothing wrong; a member ignores a proposal that is not newer. Loss, delay, repetition and reordering therefore cost time
only. Reports of several ranks merge into one, in any order, which is what machines send.

If the coordinator is killed, members that have accepted wait for ever: their driver ends that with an error, and none
acts alone. If a member is killed, nothing more is decided. If it had accepted what was decided, the others act, and
notice as ever that it is gone.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum

from cpsr.ranks.words import Words

__all__ = ["ANSWER_SECONDS", "Act", "Coordinator", "Ended", "Member", "Proposal", "Report", "State", "merged"]

ANSWER_SECONDS = 5.0  # from a proposal to its withdrawal; for as long others may wait, and the silent rank for them
AHEAD_SECONDS = 0.5  # of training, between a proposal and its step: no rank waits where threads answer by then
PATIENCE = 2  # withdrawals in a row, from which on the step moves further ahead each time
AHEAD_MAX_STEPS = 1 << 20
NEVER = 1 << 62


class Act(IntEnum):
    """What is proposed."""

    NOTHING = 0
    LEAVE = 1  # commit the state after this step, and end
    PLAN = 2  # use these intervals between checkpoints and between snapshots in memory


class State(IntEnum):
    """How far a proposal has come."""

    PROPOSED = 0
    DECIDED = 1
    WITHDRAWN = 2


class Ended(IntEnum):
    """Whether a rank takes part in further steps."""

    NO = 0
    BATCHES = 1  # its batches have ended; another pass may follow
    LOOP = 2


@dataclass(frozen=True)
class Proposal(Words):
    """What the coordinator says.

    Attributes:
        number: 0: nothing was proposed yet.
        state: of this number.
        step: at the end of which all ranks act.
        act: what they do.
        first: its first value: the interval of a plan, in iterations.
        second: its second: the interval of snapshots in memory; 0: none.
        ended: the most that a rank has ended; news of the moment, and no part of the proposal.
    """

    number: int = 0
    state: int = State.WITHDRAWN
    step: int = 0
    act: int = Act.NOTHING
    first: int = 0
    second: int = 0
    ended: int = Ended.NO


@dataclass(frozen=True)
class Report(Words):
    """What a rank says, or several together.

    Attributes:
        steps: ended in this life; of several, the most.
        stop: whether one asks to leave.
        accepted: newest proposal that was accepted, by each of them.
        refused: newest that was refused, by one of them.
        learned: newest decided one that each of them will carry out.
        ended: the most that one has ended.
        done: newest order of `sends` that each is done with.
        arrived: newest of which the holders of each have the state.
    """

    steps: int = 0
    stop: int = 0
    accepted: int = 0
    refused: int = 0
    learned: int = 0
    ended: int = Ended.NO
    done: int = 0
    arrived: int = 0


def merged(reports: Iterable[Report]) -> Report:
    """What several ranks say together; at least one."""
    steps, stop, accepted, refused, learned, ended, *sent = zip(*(vars(one).values() for one in reports), strict=True)
    return Report(max(steps), max(stop), min(accepted), max(refused), min(learned), max(ended), *map(min, sent))


class Member:
    """One rank's part. Its training thread ends steps; another thread hears proposals, and reports.

    Both may call at any time; `due` and `hear` exclude one another by a lock of the caller.

    Attributes:
        steps: that have ended in this life. The training thread raises it, and then compares it with `attention_at`.
        attention_at: from this many steps on, the training thread has to ask `due`.
        ended: whether this rank takes part in further steps.
        uneven: whether another rank does not.
    """

    def __init__(self) -> None:
        self.steps, self.attention_at = 0, NEVER
        self.ended, self.uneven = Ended.NO, False
        self._heard = Proposal()
        self._hold: Proposal | None = None  # accepted, without a verdict
        self._decided: list[Proposal] = []  # to be carried out
        self._accepted = self._refused = self._learned = 0

    def due(self) -> list[Proposal] | None:
        """What all ranks do now, at the end of this step; None: wait for the verdict on it."""
        if self._hold is not None and self._hold.step <= self.steps:
            return None
        due = [proposal for proposal in self._decided if proposal.step <= self.steps]
        self._decided = [proposal for proposal in self._decided if proposal.step > self.steps]
        self._look_again()
        return due

    @property
    def carries_nothing(self) -> bool:
        """Whether all that was decided is carried out: its step has been passed."""
        return self._heard.step < self.steps

    def hear(self, proposal: Proposal) -> bool:
        """The coordinator's newest words, or older ones; returns whether they are news."""
        before = self._heard
        self.uneven = proposal.ended != Ended.NO and self.ended == Ended.NO
        is_news = (proposal.number, proposal.state) > (before.number, before.state)
        if is_news:
            self._heard, self._hold = proposal, None  # a later number: the one before was withdrawn
            if proposal.state == State.PROPOSED:
                self._answer(proposal)
            elif proposal.state == State.DECIDED and proposal.number == self._accepted:
                self._decided.append(proposal)
                self._learned = proposal.number
        self._look_again()
        return is_news

    def _answer(self, proposal: Proposal) -> None:
        self._hold, self.attention_at = proposal, min(self.attention_at, proposal.step)
        if self.ended == Ended.LOOP or self.steps >= proposal.step:  # read after the hold is set
            self._hold, self._refused = None, proposal.number
        else:
            self._accepted = proposal.number

    def _look_again(self) -> None:
        waiting = self._decided if self._hold is None else [*self._decided, self._hold]
        self.attention_at = 0 if self.uneven else min((proposal.step for proposal in waiting), default=NEVER)

    def report(self, *, stop: bool, sent: tuple[int, int] = (0, 0)) -> Report:
        """What this rank says now; `sent` is what `Sender.report` gives."""
        return Report(self.steps, stop, self._accepted, self._refused, self._learned, self.ended, *sent)


class Coordinator:
    """Rank 0's part: one proposal after the other.

    Attributes:
        newest: what it says.
    """

    def __init__(self) -> None:
        self.newest = Proposal()
        self._at_seconds = 0.0
        self._withdrawn = 0  # in a row
        self._leaves = False

    @property
    def is_open(self) -> bool:
        """Whether ranks have still to answer, or to learn the verdict."""
        return self.newest.state == State.PROPOSED

    def look(self, report: Report, now_seconds: float) -> bool:
        """Decide or withdraw by what all ranks report; returns whether something new may be proposed."""
        newest = self.newest
        if newest.state == State.PROPOSED:
            if report.accepted >= newest.number:
                self.newest, self._withdrawn = replace(newest, state=State.DECIDED), 0
                self._leaves = newest.act == Act.LEAVE
            elif report.refused >= newest.number or now_seconds - self._at_seconds > ANSWER_SECONDS:
                self.newest, self._withdrawn = replace(newest, state=State.WITHDRAWN), self._withdrawn + 1
        self.newest = replace(self.newest, ended=report.ended)
        if self._leaves or report.ended == Ended.LOOP or self.is_open:
            return False
        return self.newest.state == State.WITHDRAWN or report.learned >= self.newest.number

    def propose(
        self, act: Act, report: Report, now_seconds: float, steps_per_second: float, first: int = 0, second: int = 0
    ) -> None:
        """Propose something, once `look` allows it.

        Args:
            act: to leave waits for the end of the running step, anything else lies further ahead.
            report: of all ranks.
            now_seconds: on a monotonic clock.
            steps_per_second: of training.
            first: see `Proposal`.
            second: see `Proposal`.
        """
        ahead = 1 if act == Act.LEAVE else max(1, math.ceil(AHEAD_SECONDS * steps_per_second))
        ahead = min(ahead << max(0, self._withdrawn - PATIENCE), AHEAD_MAX_STEPS)
        self._at_seconds, number, step = now_seconds, self.newest.number + 1, report.steps + ahead
        self.newest = Proposal(number, State.PROPOSED, step, act, first, second, self.newest.ended)
