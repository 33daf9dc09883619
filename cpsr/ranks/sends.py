"""Which snapshots all ranks send to other machines: the same, whatever their links do, and without a vote.

After the loss of a machine a restart needs one iteration of which every rank has a state, in its own memory or on
another machine. Ranks that send whichever is newest when a link is free may have none in common. So rank 0 gives
orders, one at a time:

1. Order e: send the newest snapshot that all ranks hold (see `held`). None overwrites it before it knows a newer one.
2. A rank is done with e once its holders have that state, or it is lost: overwritten, or refused by a holder.
3. Once all are done with e, rank 0 orders the next. If the holders of all ranks have e, rank 0 says that e is complete.
   From then on each rank and each holder keep its state of e, until a later one is complete.

Windows come too fast for it to be known which of them all hold. So order e is about one to come: the first that ends
from step k on. All ranks ask whether they send it, of the same ones. A rank that hears of e before it asks at step k,
or later, marks the first of these. A rank that hears of it later has missed it, and is done.

Messages are states, as those of `proposals`: numbers only rise, and reports merge by their least. So what is late,
lost, repeated or out of order costs time only. Nobody waits for anybody: while a rank is stopped, nothing is ordered.
If a machine is lost, all have the newest complete state or a later one: its ranks at their holders, others themselves.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cpsr.ranks.held import NONE, Held
from cpsr.ranks.proposals import Report
from cpsr.ranks.words import Words

__all__ = ["Link", "Order", "Orders", "Sender"]

MISSES = 4  # of windows in a row, up to which the step of the next order moves further ahead


@dataclass(frozen=True)
class Order(Words):
    """What rank 0 says.

    Attributes:
        number: 0: nothing was ordered yet.
        at: iteration of the snapshot that is sent; or the step from which on the first window is.
        branch: of that iteration: how often the life has gone back; `NONE` of windows.
        complete: newest number of which the holders of all ranks have the state.
    """

    number: int = 0
    at: int = NONE
    branch: int = NONE
    complete: int = 0


class Orders:
    """Rank 0's part.

    Attributes:
        newest: what it says.
    """

    def __init__(self) -> None:
        self.newest = Order()
        self._missed = 0  # windows in a row

    def look(self, report: Report, held: Held, ahead_steps: int | None) -> None:
        """Order the next one, once all are done with the one before.

        Args:
            report: of all ranks.
            held: by all ranks.
            ahead_steps: where windows are sent, how many steps it takes all ranks to hear of an order; None: snapshots
                are sent.
        """
        newest = self.newest
        if report.done < newest.number:
            return
        arrived = report.arrived >= newest.number
        newest = self.newest = replace(newest, complete=newest.number if arrived else newest.complete)
        if ahead_steps is not None:
            self._missed = 0 if arrived else min(self._missed + 1, MISSES)
            self.newest = replace(newest, number=newest.number + 1, at=report.steps + (ahead_steps << self._missed))
        elif held.newest != NONE and (held.branch, held.newest) > (newest.branch, newest.at):
            self.newest = replace(newest, number=newest.number + 1, at=held.newest, branch=held.branch)


class Link(Protocol):
    """To a holder of this rank's states.

    Attributes:
        kept: iteration of the state that the holder keeps, until another one is complete.
    """

    kept: int | None

    @property
    def busy(self) -> bool:
        """Whether a state is being sent, or waits for that."""

    def has_arrived(self, iteration: int) -> bool:
        """Whether the newest state that was to be sent is of this iteration, and the holder has all of it."""


@dataclass
class _Marked:
    """The state that an order is about.

    Attributes:
        number: of the order.
        iteration: None: the window was not taken.
        pending: whether it has still to be sealed and offered.
    """

    number: int
    iteration: int | None = None
    pending: Callable[[], bool] = lambda: False


class Sender:
    """One rank's part. A thread hears orders, and reports; of windows the training thread asks which it sends.

    Args:
        steps: that this rank has ended, alike on all ranks at the same place of their loops.

    Attributes:
        links: to all holders of this rank's states; None: this job sends nothing.
    """

    def __init__(self, steps: Callable[[], int]) -> None:
        self._steps = steps
        self.links: Sequence[Link] | None = None
        self._keep: Callable[[Collection[int]], None] = lambda iterations: None
        self._send: Callable[[int], bool] | None = None
        self._branch = 0
        self._lock = threading.Lock()
        self._order: Order | None = None  # waits for its window
        self._marked: _Marked | None = None
        self._heard = self._done = self._arrived = self._complete = 0
        self._complete_at: int | None = None  # iteration of that state
        self._asked_at = -1

    @property
    def windows(self) -> bool:
        """Whether this job sends windows; otherwise it sends snapshots."""
        return self._send is None

    def open(
        self,
        links: Sequence[Link],
        keep: Callable[[Collection[int]], None],
        iteration: int,
        send: Callable[[int], bool] | None = None,
    ) -> None:
        """Send from here on; on all ranks.

        Args:
            links: to the holders.
            keep: told which states of this rank are to stay: the newest complete one, and the one that may be the next.
            iteration: that this life begins with, of which the holders have the state of the life before.
            send: begins to send the snapshot of an iteration, and returns whether it is there; None: windows are sent.
        """
        with self._lock:
            self._keep, self._send, self.links, self._complete_at = keep, send, links, iteration
            self._stay()

    def _stay(self) -> None:
        for link in self.links or ():
            link.kept = self._complete_at
        marked = self._marked
        is_lost = marked is None or self._arrived < marked.number <= self._done
        sent = None if marked is None or is_lost else marked.iteration
        self._keep({iteration for iteration in (self._complete_at, sent) if iteration is not None})

    # The training thread; of windows

    def may_send(self) -> bool:
        """Whether the window that ends now goes to the peers; all ranks ask for the same ones."""
        with self._lock:
            self._asked_at = step = self._steps()
            if self._marked is not None and self._marked.iteration is None:
                self._done = max(self._done, self._marked.number)  # it was not taken
            order = self._order
            if order is None or step < order.at:
                return False
            self._order, self._marked = None, _Marked(order.number)
            return True

    def sent(self, iteration: int, pending: Callable[[], bool]) -> None:
        """The window that was marked last has ended.

        Args:
            iteration: its first.
            pending: whether it has still to be sealed and offered.
        """
        with self._lock:
            if self._marked is not None:
                self._marked.iteration, self._marked.pending = iteration, pending
                self._stay()

    def restart(self) -> None:
        """The run has gone back: no state that was sent before counts."""
        with self._lock:
            if self._marked is not None:
                self._done, self._marked = max(self._done, self._marked.number), None
            self._branch, self._complete_at = self._branch + 1, None
            self._stay()

    # The thread of the agreement

    def hear(self, said: Order) -> None:
        """Rank 0's newest words, or older ones."""
        with self._lock:
            marked = self._marked
            if said.complete > self._complete and marked is not None and marked.number == said.complete:
                self._complete, self._complete_at = said.complete, marked.iteration
                self._stay()
            if self.links is None or said.number <= self._heard:  # words come again once this rank sends
                return
            self._heard = said.number
            if self._send is None and self._asked_at < said.at:
                self._order = said
            elif self._send is not None and said.branch == self._branch and self._send(said.at):
                self._marked = _Marked(said.number, said.at)
                self._stay()
            else:
                self._done = said.number

    def report(self) -> tuple[int, int]:
        """The newest order that this rank is done with, and the newest whose state its holders have."""
        links = self.links or ()
        with self._lock:
            marked = self._marked
            if marked is None or marked.iteration is None or self._done >= marked.number:
                return self._done, self._arrived
            # In this order: a state that is sealed meanwhile is seen on its link.
            if not marked.pending() and not any(link.busy for link in links):
                self._done = marked.number
                if all(link.has_arrived(marked.iteration) for link in links):
                    self._arrived = marked.number
                self._stay()
            return self._done, self._arrived
