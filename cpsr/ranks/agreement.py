"""All ranks do what changes their work at the end of the same step, without a collective; see `proposals`.

The same thread passes on what ranks hold in memory, and what they send to other machines; see `held` and `sends`.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from cpsr.errors import UnevenRanksError
from cpsr.ranks.board import Board
from cpsr.ranks.exchange import Exchange
from cpsr.ranks.group import ATTENDANCE_SECONDS, Group
from cpsr.ranks.held import NONE, Held
from cpsr.ranks.proposals import NEVER, Act, Coordinator, Ended, Member, Proposal, Report, State
from cpsr.ranks.sends import Orders, Sender

__all__ = ["Agreement"]

logger = logging.getLogger(__name__)

THREAD_NAME = "cpsr-agreement"
IDLE_SECONDS = 0.1  # between two looks
BUSY_SECONDS = 5e-3  # while something is agreed on; for every 16 machines, whose words rank 0 reads
MACHINES_PER_LOOK = 16
NEWS_SECONDS = 1.0  # after news, before looks are rare again
# Long, since the others would also wait for the rank in their next collective. A rank that is gone is noticed before.
VERDICT_SECONDS = 600.0
CLOSE_SECONDS = 10.0  # the thread ends at once, unless the store hangs
PACE_SECONDS = 0.5  # between two counts of steps
PACES = 10
HELD_TIMES = 10  # a snapshot takes about three words: taken, copied, sealed
LOOKS_PER_WORD = 2  # word and answer cross the store in three looks

Intervals = tuple[int, int]  # in iterations, between checkpoints and between snapshots in memory; 0: none of these


class Agreement:
    """One rank's part in what all ranks agree on. A rank alone agrees with itself at once.

    `end_step` belongs to the training thread. A thread of its own answers proposals, whatever the training thread does.
    Opening it is a collective.

    Args:
        group: all ranks.
        board: of this machine.
        stops: whether this rank was asked to leave.
        plan: new intervals, once; None: as they are. Rank 0 asks, on either thread.

    Attributes:
        sender: which snapshots this rank sends, as all do; open it where it sends any.
    """

    def __init__(
        self, group: Group, board: Board, stops: Callable[[], bool], plan: Callable[[], Intervals | None]
    ) -> None:
        self._group, self._stops, self._plan = group, stops, plan
        self._member, self._machines = Member(), len(board.machines)
        self.sender = Sender(lambda: self._member.steps)
        self._attendance = group.attendance
        self._looked_at = 0.0
        self._intervals: Intervals | None = None  # not agreed on yet (rank 0)
        self._heard = threading.Condition()
        self._wake, self._closes = threading.Event(), False
        self._bell, self._rung, self._rang = board.bell, 0, False
        self._held: deque[float] = deque(maxlen=HELD_TIMES)  # when this rank last said what it holds
        self._exchange: Exchange | None = None
        self._thread: threading.Thread | None = None
        if group.size == 1:
            return
        self._exchange = Exchange(group, board)
        self._coordinator, self._orders = Coordinator() if group.rank == 0 else None, Orders()
        self._counts: deque[tuple[float, int]] = deque(maxlen=PACES)
        self._news_at = 0.0
        self._all_hold = Held()
        self._thread = threading.Thread(target=self._run, args=(self._exchange,), name=THREAD_NAME, daemon=True)
        self._thread.start()

    # The training thread

    def end_step(self) -> Sequence[Proposal]:
        """A step has ended; returns what all ranks do now. A rank alone may call it where it was asked something.

        Raises:
            UnevenRanksError: a rank takes part in no further step, or rank 0 does not say what was decided.
        """
        if self._exchange is None:
            return self._alone()
        member = self._member
        member.steps += 1
        if self._bell[0] != self._rung:
            self._rung = self._bell[0]
            self._wake.set()
        return () if member.steps < member.attention_at else self._due()

    def ring(self) -> None:
        """This rank is asked to leave: have the others look at the end of their steps, if that is sooner."""
        if self._exchange is not None and not self._rang:
            self._rang = True
            self._exchange.ring()

    def _due(self) -> Sequence[Proposal]:
        if self._member.uneven:
            self._require_all(waits=False)
        until = time.monotonic() + VERDICT_SECONDS
        while True:
            with self._heard:
                due = self._member.due()
                if due is None:
                    self._heard.wait(ATTENDANCE_SECONDS)
                    due = self._member.due()
            if due is not None:
                return due
            self._require_all(waits=True)
            if time.monotonic() > until:
                raise UnevenRanksError(
                    f"rank 0 has not said for {VERDICT_SECONDS:g} s whether all ranks do at this step what it "
                    f"proposed, and rank {self._group.rank} does not do it alone. The run is as it was last saved. "
                    "Rank 0 is stopped, or the network to it is interrupted: start the job again"
                )

    def _require_all(self, *, waits: bool) -> None:
        """Check, at most once in `ATTENDANCE_SECONDS`, whether the others take part in further steps."""
        now = time.monotonic()
        if self._attendance is not None and now - self._looked_at > ATTENDANCE_SECONDS:
            self._looked_at = now
            self._attendance.require_all(waits=waits)

    def _alone(self) -> Sequence[Proposal]:
        due = []
        if (plan := self._plan()) is not None:
            due.append(Proposal(act=Act.PLAN, first=plan[0], second=plan[1]))
        if self._stops():
            due.append(Proposal(act=Act.LEAVE))
        return due

    def close(self) -> None:
        """Answer nothing more; all ranks have left their loops, or this one leaves a broken group."""
        self._closes = True
        self._wake.set()
        if self._thread is None or self._exchange is None:
            return
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning("the thread of the ranks' agreement did not end within %g s; it is abandoned", CLOSE_SECONDS)
            return

    # What the ranks hold; on any thread, also after the end

    def hold(self, held: Held) -> None:
        """Say what this rank holds, one call at a time."""
        assert self._exchange is not None
        self._exchange.hold(held)
        self._held.append(time.monotonic())

    def held(self, branch: int) -> Held:
        """What all ranks hold of a branch of this life, as far as this one knows."""
        assert self._exchange is not None
        return self._exchange.held(branch)

    def ordered(self, branch: int) -> int:
        """Iteration of the snapshot of a branch that all ranks send; `NONE`: none, as far as this one knows."""
        assert self._exchange is not None
        order = self._exchange.order()
        return NONE if order is None or order.branch != branch else order.at

    # Its own thread

    def _run(self, exchange: Exchange) -> None:
        try:
            busy_seconds = BUSY_SECONDS * max(1, self._machines // MACHINES_PER_LOOK)
            while True:
                if self._wake.wait(busy_seconds if self._is_busy() else self._idle_seconds(busy_seconds)):
                    self._wake.clear()
                    self._news_at = time.monotonic()
                if self._closes:
                    return
                self._look(exchange, busy_seconds)
        except Exception:
            logger.exception("rank %d agrees on nothing more: SIGTERM and new plans have no effect", self._group.rank)

    def _is_busy(self) -> bool:
        asks = self._stops() and self._member.attention_at == NEVER
        return asks or time.monotonic() < self._news_at + NEWS_SECONDS

    def _idle_seconds(self, least: float) -> float:
        """Until the next look; between machines what ranks hold arrives before their next snapshot."""
        if self._machines == 1 or len(self._held) < HELD_TIMES:
            return IDLE_SECONDS
        words_seconds = (self._held[-1] - self._held[0]) / (HELD_TIMES - 1)
        return min(IDLE_SECONDS, max(least, words_seconds / LOOKS_PER_WORD))

    def _look(self, exchange: Exchange, busy_seconds: float) -> None:
        """Hear, answer, report; on rank 0 also order and propose."""
        member = self._member
        if self._attendance is not None:
            member.ended = Ended[self._attendance.ended.upper()]
        exchange.relay()
        self._hear(exchange.hear())
        if (order := exchange.order()) is not None:
            self.sender.hear(order)
        exchange.report(member.report(stop=self._stops(), sent=self.sender.report()))
        if self._coordinator is not None and self._coordinate(exchange, self._coordinator, busy_seconds):
            self._hear(self._coordinator.newest)
            exchange.report(member.report(stop=self._stops(), sent=self.sender.report()))

    def _hear(self, proposal: Proposal | None) -> None:
        if proposal is None:
            return
        with self._heard:
            if self._member.hear(proposal):
                self._news_at = time.monotonic()
                self._heard.notify_all()

    def _coordinate(self, exchange: Exchange, coordinator: Coordinator, busy_seconds: float) -> bool:
        """Whether rank 0 proposes something new."""
        found, proposal, before = exchange.collect(), coordinator.newest, (self._orders.newest, self._all_hold)
        if found is None:
            return False
        report, self._all_hold = found
        self._decide(coordinator, report, busy_seconds)
        is_new = coordinator.newest != proposal
        if is_new or (self._orders.newest, self._all_hold) != before:
            exchange.say(coordinator.newest, self._orders.newest, self._all_hold)
        if is_new:
            exchange.ring()
        return is_new

    def _decide(self, coordinator: Coordinator, report: Report, busy_seconds: float) -> None:
        """What all ranks do, and send, by what they report."""
        now = time.monotonic()
        if not self._counts or now - self._counts[-1][0] > PACE_SECONDS:
            self._counts.append((now, self._member.steps))
        since, steps = self._counts[0]
        pace = (self._member.steps - steps) / max(now - since, PACE_SECONDS)
        if self.sender.links is not None:
            ahead = 1 + math.ceil(pace * LOOKS_PER_WORD * self._idle_seconds(busy_seconds))
            self._orders.look(report, self._all_hold, ahead if self.sender.windows else None)
        if coordinator.look(report, now):
            if report.stop:
                coordinator.propose(Act.LEAVE, report, now, pace)
            elif self._member.carries_nothing:
                self._intervals = self._intervals or self._plan()
                if self._intervals is not None:
                    coordinator.propose(Act.PLAN, report, now, pace, *self._intervals)
        if coordinator.newest.state == State.DECIDED and coordinator.newest.act == Act.PLAN:
            self._intervals = None
