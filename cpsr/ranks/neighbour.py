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
import weakref
from collections.abc import Callable
from contextlib import suppress

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
RETRY_SECONDS = 5.0  # between rounds over all addresses
ROUNDS_MAX = 5  # over all addresses of a rank that has never answered
CLOSE_SECONDS = 5.0  # the threads end at once, unless they connect
_BACKLOG = 16
_READ_BYTES = 64


class Neighbour:
    """Watches the process of the next rank of the ring, and shows this one to the rank before.

    A process that is only stopped, or whose machine is gone without a word, is not noticed here. One thread lets in who
    watches this process, and says who it is; another one is connected to the next rank.

    Args:
        group: all ranks; opening is a collective.
        lost: the process of a rank has ended; gets the rank and a clause, once, on a thread of its own.
    """

    def __init__(self, group: Group, lost: Callable[[int, str], object]) -> None:
        self._lost = lost
        self._hello = os.urandom(HELLO_BYTES)
        self._listener = _listener() if group.size > 1 else None
        self._visitors: list[socket.socket] = []
        self._connection: socket.socket | None = None
        self._reached = ""  # address of the process that answered
        self._closing, self._ended = threading.Event(), False
        listener = self._listener
        place = None if listener is None else [_addresses(), listener.getsockname()[1], self._hello.hex()]
        following = (group.rank + 1) % group.size
        their = group.gather(place)[following]
        work: list[Callable[[], None]] = []
        if listener is not None:
            work.append(lambda: self._admit(listener))
        if their is not None:
            addresses, port, hello = their
            work.append(lambda: self._watch(following, addresses, port, bytes.fromhex(hello)))
        self._threads = [threading.Thread(target=one, name=THREAD_NAME, daemon=True) for one in work]
        if self._threads:
            self._woken, self._waker = os.pipe()
            _open.add(self)
        for thread in self._threads:
            thread.start()

    def close(self, *, ended: bool) -> None:
        """Watch no more, and be seen no more; a second call has no effect.

        Args:
            ended: in good order; after an error the rank before must notice it.
        """
        if not self._threads:
            return
        self._ended = ended
        self._closing.set()
        os.write(self._waker, b"\0")  # stays in the pipe, for both threads
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)
        if any(thread.is_alive() for thread in self._threads):
            logger.warning("the threads that watch another rank did not end within %g s", CLOSE_SECONDS)
            return
        self._close_pipe()

    def forget_in_child(self) -> None:
        """Close what a forked child shares, so that it does not outlive this process there."""
        if self._threads:
            for one in (self._listener, self._connection, *self._visitors):
                if one is not None:
                    one.close()
            self._close_pipe()

    def _close_pipe(self) -> None:
        self._threads = []
        os.close(self._woken)
        os.close(self._waker)

    def _is_ready(self, watched: socket.socket) -> bool:
        """Wait until something can be read there; False once this is to close."""
        poll = select.poll()  # select() takes no descriptor above 1023
        poll.register(self._woken, select.POLLIN)
        poll.register(watched, select.POLLIN)
        poll.poll()
        return not self._closing.is_set()

    # The rank before watches this process

    def _admit(self, listener: socket.socket) -> None:
        """Let in who comes, and tell all at the end whether this process has ended in good order."""
        try:
            while self._is_ready(listener):
                self._accept(listener)
                self._closing.wait(AGAIN_SECONDS)  # without a descriptor that is free none is let in
            self._accept(listener)  # who has come meanwhile must learn of the end too
        except Exception:
            logger.exception("showing this process to another rank failed; heartbeats still show whether it lives")
        finally:
            listener.close()  # first: who connects again must be refused
            for visitor in self._visitors:
                if self._ended:
                    with suppress(OSError):
                        visitor.send(ENDED)
                visitor.close()

    def _accept(self, listener: socket.socket) -> None:
        for visitor in [one for one in self._visitors if _has_left(one)]:
            self._visitors.remove(visitor)
            visitor.close()
        with suppress(OSError):  # nobody waits any more, or who has come is gone
            while True:
                visitor, _ = listener.accept()
                visitor.setblocking(False)
                self._visitors.append(visitor)
                with suppress(OSError):
                    visitor.send(self._hello)

    # This rank watches the next one

    def _watch(self, rank: int, addresses: list[str], port: int, hello: bytes) -> None:
        """Stay connected to the process of a rank, until it says that it ends, or is gone."""
        known, rounds = False, 0
        try:
            while not self._closing.is_set():
                instead = self._connect(addresses, port, hello)
                if self._connection is not None:
                    known, addresses = True, [self._reached]
                    if self._stays_to_its_end(self._connection):
                        return
                    self._closing.wait(AGAIN_SECONDS)
                    continue
                if known and instead is not None:
                    self._lost(rank, f"the process of rank {rank} has ended (connection closed, a new one {instead})")
                    return
                rounds += 1
                if not known and rounds == ROUNDS_MAX:
                    logger.warning(
                        "rank %d cannot be reached at %s, port %d: should its process end, only heartbeats show it",
                        rank,
                        ", ".join(addresses),
                        port,
                    )
                    return
                self._closing.wait(RETRY_SECONDS)
        except Exception:
            logger.exception("watching the process of another rank failed; heartbeats still show whether it lives")
        finally:
            self._disconnect()

    def _connect(self, addresses: list[str], port: int, hello: bytes) -> str | None:
        """Connect to the process that says `hello`; returns what came instead, if anything did."""
        instead = None
        for address in addresses:
            try:
                self._connection = socket.create_connection((address, port), CONNECT_SECONDS)
                if self._connection.getsockname() == self._connection.getpeername():
                    raise ConnectionRefusedError  # a port on which nothing listens has reached itself
                said = b""
                while len(said) < HELLO_BYTES and (part := self._connection.recv(HELLO_BYTES - len(said))):
                    said += part
                if said == hello:
                    self._reached = self._connection.getpeername()[0]
                    return None
                if not hello.startswith(said):
                    instead = "answered by another process"
            except ConnectionRefusedError:
                instead = "refused"
            except OSError:
                logger.debug("%s does not answer at port %d", address, port)
            self._disconnect()
            if self._closing.is_set():
                return None
        return instead

    def _stays_to_its_end(self, connection: socket.socket) -> bool:
        """Wait for the end of a connection; whether the other rank has said that it ends, or this one is to close."""
        said = b""
        while self._is_ready(connection):
            try:
                said = connection.recv(_READ_BYTES)
            except OSError:
                said = b""
            if said == ENDED:
                return True
            if not said:
                self._disconnect()
                return False
        return True

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


def _has_left(visitor: socket.socket) -> bool:
    try:
        return not visitor.recv(1)
    except BlockingIOError:  # it is there, and never says anything
        return False
    except OSError:
        return True


def _listener() -> socket.socket | None:
    try:
        with suppress(OSError):
            if socket.has_dualstack_ipv6():
                found = socket.create_server(("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
                found.setblocking(False)
                return found
        found = socket.create_server(("", 0), backlog=_BACKLOG)
        found.setblocking(False)
        return found
    except OSError as error:
        logger.warning("this rank cannot listen (%s): should its process end, only heartbeats show it", error)
        return None


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
