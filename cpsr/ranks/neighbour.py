"""Notices at once that the process of another rank has ended, whatever hangs in this one.

The ranks form a ring. Each listens on a port, and keeps one TCP connection to the next rank. A rank that ends in good
order says so there first. When a process ends otherwise, its kernel closes the connection and the port. Networks break
connections too, so the rank then connects again. If that is refused, the process is gone; if the other rank answers,
nothing has happened; if neither, heartbeats decide.

Sockets and not a gloo group, which can do none of this. To give up a receive, gloo closes all connections of the group;
it cannot tell a broken connection from a dead process; its sockets stay open in forked children, such as data loader
workers, which outlive a rank that is killed.
"""

import ipaddress
import logging
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

from cpsr.ranks.group import Group

__all__ = ["Neighbour"]

logger = logging.getLogger(__name__)

THREAD_NAME = "cpsr-neighbour"
HELLO_BYTES = 16
ENDED = b"E"
LOOPBACK = "127.0.0.1"
CONNECT_SECONDS = 2.0  # for a connection, and again for the answer on it
AGAIN_SECONDS = 0.1  # from the end of a connection to the next one
RETRY_SECONDS, RETRY_SECONDS_MAX = 1.0, 30.0  # between rounds over all addresses
ROUNDS_MAX = 5  # over all addresses of a rank that has never answered
CLOSE_SECONDS = 5.0  # the thread ends at once, unless it connects
_BACKLOG = 16
_READ_BYTES = 64


class Neighbour:
    """Watches the process of the next rank of the ring, and shows this one to the rank before.

    A process that is only stopped, or whose machine is gone without a word, is not noticed here.

    Args:
        group: all ranks; opening is a collective.
        lost: the process of a rank has ended; gets the rank and a clause, once, on a thread of its own.
    """

    def __init__(self, group: Group, lost: Callable[[int, str], object]) -> None:
        self._lost = lost
        self._door = _door() if group.size > 1 else None
        places = group.gather(None if self._door is None else self._door.place)
        following = (group.rank + 1) % group.size
        self._next = None if places[following] is None else _Next(following, *places[following])
        self._closing, self._ended = threading.Event(), False
        self._thread: threading.Thread | None = None
        if self._door is None and self._next is None:
            return
        self._woken, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        _open.add(self)
        self._thread.start()

    def close(self, *, ended: bool) -> None:
        """Watch no more, and be seen no more; a second call has no effect.

        Args:
            ended: in good order; after an error the rank before must notice it.
        """
        if self._thread is None:
            return
        self._ended = ended
        self._closing.set()
        os.write(self._waker, b"\0")
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning("the thread that watches another rank did not end within %g s", CLOSE_SECONDS)
            return
        self._close_pipe()

    def forget_in_child(self) -> None:
        """Close what a forked child shares, so that it does not outlive this process there."""
        if self._thread is not None:
            self._ended = False
            self._close_all()
            self._close_pipe()

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                ready = self._wait()
                if self._door is not None:
                    self._door.attend(ready)
                if self._next is not None and (gone := self._next.attend(ready)) is not None:
                    self._lost(self._next.rank, gone)
            if self._door is not None:
                self._door.attend(set())  # who has come meanwhile must learn of the end too
        except Exception:
            logger.exception("watching the process of another rank failed; heartbeats still show whether it lives")
        finally:
            self._close_all()

    def _wait(self) -> set[int]:
        """Wait for something to happen; at which connections it has."""
        poll = select.poll()  # select() takes no descriptor above 1023
        poll.register(self._woken, select.POLLIN)
        for watched in (self._door, self._next):
            for descriptor in watched.descriptors if watched is not None else []:
                poll.register(descriptor, select.POLLIN)
        wait_seconds = None if self._next is None else self._next.wait_seconds
        return {descriptor for descriptor, _ in poll.poll(None if wait_seconds is None else 1e3 * wait_seconds)}

    def _close_all(self) -> None:
        if self._door is not None:
            self._door.close(ended=self._ended)
        if self._next is not None:
            self._next.close()

    def _close_pipe(self) -> None:
        self._thread = None
        os.close(self._woken)
        os.close(self._waker)


class _Door:
    """Where the rank before watches this process; it says who it is, and that it ends in good order.

    Attributes:
        place: its addresses, its port, and what it says; JSON.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._listener.setblocking(False)
        self._hello = os.urandom(HELLO_BYTES)
        self._visitors: list[socket.socket] = []
        self.place: list[Any] = [_addresses(), listener.getsockname()[1], self._hello.hex()]

    @property
    def descriptors(self) -> list[int]:
        """At which something may happen."""
        return [self._listener.fileno(), *(visitor.fileno() for visitor in self._visitors)]

    def attend(self, ready: set[int]) -> None:
        """Let in who waits, and close the connections of those who have left: none of them ever says anything."""
        for visitor in [visitor for visitor in self._visitors if visitor.fileno() in ready]:
            self._visitors.remove(visitor)
            visitor.close()
        with suppress(BlockingIOError):
            while True:
                visitor, _ = self._listener.accept()
                visitor.setblocking(False)
                self._visitors.append(visitor)
                with suppress(OSError):
                    visitor.send(self._hello)

    def close(self, *, ended: bool) -> None:
        """Close the port and all connections."""
        self._listener.close()  # first: who connects again must be refused
        for visitor in self._visitors:
            if ended:
                with suppress(OSError):
                    visitor.send(ENDED)
            visitor.close()


class _Next:
    """The connection to the rank that this one watches.

    Args:
        rank: its number.
        addresses: of its machine, of which some may not be reachable.
        port: its own.
        hello: what it says first, in hexadecimal digits; anybody else says something else.
    """

    def __init__(self, rank: int, addresses: list[str], port: int, hello: str) -> None:
        self.rank = rank
        self._addresses, self._port, self._hello = addresses, port, bytes.fromhex(hello)
        self._connection: socket.socket | None = None
        self._said = b""  # on this connection
        self._known = False  # it has said who it is, now or earlier
        self._over = False
        self._place = self._rounds = 0  # of the next try: in the addresses, and how often all were tried
        self._due = time.monotonic()  # of the next try, or of the answer to this one

    @property
    def descriptors(self) -> list[int]:
        """At which something may happen."""
        return [] if self._connection is None else [self._connection.fileno()]

    @property
    def wait_seconds(self) -> float | None:
        """Until `attend` is due although nothing happens; None: not before."""
        waiting = not self._over and (self._connection is None or not self._has_answered)
        return max(self._due - time.monotonic(), 0.0) if waiting else None

    @property
    def _has_answered(self) -> bool:
        return self._said.startswith(self._hello)

    def attend(self, ready: set[int]) -> str | None:
        """Read what has arrived, and connect if it is time to; why the process has ended, as a clause, if it has."""
        if self._connection is not None and self._connection.fileno() in ready:
            return self._read(self._connection)
        if self.wait_seconds == 0.0:
            return self._connect() if self._connection is None else self._unanswered(None)
        return None

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
        self._connection, self._said = None, b""

    def _connect(self) -> str | None:
        try:
            connection = socket.create_connection((self._addresses[self._place], self._port), CONNECT_SECONDS)
            if connection.getsockname() == connection.getpeername():
                connection.close()
                raise ConnectionRefusedError  # a port on which nothing listens has reached itself
        except ConnectionRefusedError:
            return self._unanswered("refused")
        except OSError:
            return self._unanswered(None)
        self._connection, self._due = connection, time.monotonic() + CONNECT_SECONDS
        return None

    def _read(self, connection: socket.socket) -> str | None:
        try:
            part = connection.recv(_READ_BYTES)
        except OSError:
            part = b""
        if not part and self._has_answered:
            self._disconnect(AGAIN_SECONDS)
            return None
        if not part:
            return self._unanswered(None)
        self._said += part
        if self._has_answered:
            # From now on only this address: others may be those of other machines too.
            self._known, self._addresses, self._place, self._rounds = True, [self._addresses[self._place]], 0, 0
            if self._said.endswith(ENDED, HELLO_BYTES):
                self._over = True
                self.close()
            return None
        if self._hello.startswith(self._said):  # a part of it
            return None
        return self._unanswered("answered by another process")

    def _unanswered(self, instead: str | None) -> str | None:
        """Try later, unless what came instead shows that a process which has answered earlier has ended."""
        if instead is None or not self._known:
            self._try_later()
            return None
        self._over = True
        self.close()
        return f"the process of rank {self.rank} has ended (connection closed, a new one {instead})"

    def _disconnect(self, retry_seconds: float) -> None:
        self.close()
        self._due = time.monotonic() + retry_seconds

    def _try_later(self) -> None:
        """At the next address; after the last one, in a while."""
        self._place = (self._place + 1) % len(self._addresses)
        self._disconnect(0.0 if self._place else min(RETRY_SECONDS * 2.0**self._rounds, RETRY_SECONDS_MAX))
        self._rounds += not self._place
        if not self._known and self._rounds == ROUNDS_MAX:
            self._over = True
            logger.warning(
                "rank %d cannot be reached at %s, port %d: should its process end, only heartbeats show it",
                self.rank,
                ", ".join(self._addresses),
                self._port,
            )


def _door() -> _Door | None:
    try:
        return _Door(_listener())
    except OSError as error:
        logger.warning("this rank cannot listen (%s): should its process end, only heartbeats show it", error)
        return None


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=_BACKLOG)


def _addresses() -> list[str]:
    """Of this machine, as other machines may reach it; last the one by which only its own processes do."""
    found = []
    with suppress(OSError):
        found = [address.address for addresses in psutil.net_if_addrs().values() for address in addresses]
    usable = []
    for address in found:
        with suppress(ValueError):  # of another family
            parsed = ipaddress.ip_address(address)
            if not (parsed.is_loopback or parsed.is_link_local):
                usable.append(parsed)
    return [str(address) for address in sorted(usable, key=lambda address: address.version)] + [LOOPBACK]


_open: weakref.WeakSet[Neighbour] = weakref.WeakSet()


def _forget_in_child() -> None:
    for neighbour in list(_open):
        neighbour.forget_in_child()


os.register_at_fork(after_in_child=_forget_in_child)
