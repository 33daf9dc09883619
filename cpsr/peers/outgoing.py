"""Sends this rank's newest snapshots to one holder, in a thread of its own."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from cpsr.checkpoint.background import yield_to_training
from cpsr.checkpoint.occupancy import Occupancy
from cpsr.peers.report import Report, brief
from cpsr.peers.transport import Channel, Kind, Message, Sealed, send_state

__all__ = ["Outgoing"]


class Outgoing:
    """Sends one holder the newest state that was offered, whenever it has the one before.

    Args:
        channel: to the holder.
        bytes_per_second: rate limit; None: what the network does.
        report: records an event.
        is_twin: whether a small state is of use to the holder.
        occupancy: of this rank's buffers: one that is sent is overwritten last.

    Attributes:
        on_replica: called with the seconds from the offer of a state until the holder had it.
    """

    def __init__(
        self,
        channel: Channel,
        bytes_per_second: float | None,
        report: Report,
        is_twin: Callable[[], bool],
        occupancy: Occupancy,
    ) -> None:
        self._channel = channel
        self._is_twin = is_twin
        self._occupancy = occupancy
        self.on_replica: Callable[[float], None] = lambda seconds: None
        self._offered_at = 0.0
        self.peer = channel.peer
        self._bytes_per_second = bytes_per_second
        self._report = report
        self._orders: deque[Sealed | Message | None] = deque()
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._overtaken = self._sending = False
        name = f"cpsr-replica-to-{channel.peer}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a state is being sent, or waits; not once the link has failed."""
        # In this order: an order that is taken meanwhile is seen as being sent.
        return (bool(self._orders) or self._sending) and self._thread.is_alive()

    def offer(self, state: Sealed) -> None:
        """Send this state next, in place of one that waits."""
        with self._changed:
            while self._orders and isinstance(self._orders[-1], Sealed):
                self._orders.pop()
            self._orders.append(state)
            self._offered_at = time.monotonic()
            self._changed.notify()

    def forget_after(self, iteration: int) -> None:
        """Send no state of a later iteration, and let the holder drop those that it has."""
        with self._changed:
            self._orders = deque(order for order in self._orders if order is None or order.iteration <= iteration)
            self._orders.append(Message(Kind.FORGET, iteration))
            self._changed.notify()

    def end(self, *, announced: bool) -> None:
        """Send nothing more but what is to be forgotten, or nothing at all."""
        with self._changed:
            self._stop.set()
            kept = [order for order in self._orders if isinstance(order, Message)] if announced else []
            self._orders = deque([*kept, Message(Kind.END) if announced else None])
            self._changed.notify()

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the end; whether it came."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        yield_to_training()
        try:
            while self._follow(self._next()):
                pass
        except (RuntimeError, OSError) as error:
            self._report(
                "replication ended",
                f"rank {self.peer} gets no more replicas of this rank's state in this life ({brief(error)}); "
                "training goes on, other replicas are not affected",
                None,
                logging.WARNING,
            )

    def _send(self, state: Sealed) -> bool:
        """Send a state, which is overwritten last meanwhile; False where it was overwritten."""
        offered_at, name = self._offered_at, state.path.name
        reserved = self._occupancy.begin_sending(name)
        try:
            sent = send_state(self._channel, state, self._stop, self._bytes_per_second, offers=True)
        finally:
            if reserved:
                self._occupancy.end_sending(name)
        if sent:
            self.on_replica(time.monotonic() - offered_at)
        return sent

    def _next(self) -> Sealed | Message | None:
        with self._changed:
            self._sending = False
            while not self._orders:
                self._changed.wait()
            self._sending = True
            return self._orders.popleft()

    def _follow(self, order: Sealed | Message | None) -> bool:
        """Do what was asked for; False after the end."""
        if order is None:
            return False
        if isinstance(order, Message):
            self._channel.send(order)
            return order.kind is not Kind.END
        if order.small and not self._is_twin():
            return True
        sent = self._send(order)
        if not sent and not self._stop.is_set() and not self._overtaken:
            self._overtaken = True
            self._report(
                "replica dropped",
                f"the snapshot of iteration {order.iteration} was overwritten before rank {self.peer} had it: "
                "snapshots come faster than the network takes them, and only some are replicated. Not reported again",
                order.iteration,
                logging.WARNING,
            )
        return True
