"""Carries words between ranks, of what they do, hold and send: over shared memory, and torch's store.

The first rank of each machine tells rank 0 what its machine says, and writes on its board what rank 0 says.
"""

import logging
from dataclasses import replace
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from cpsr.ranks.board import HELD_AT, ORDER_AT, Board
from cpsr.ranks.group import Group, group_name
from cpsr.ranks.held import Held, held_by_all
from cpsr.ranks.proposals import Proposal, Report, merged
from cpsr.ranks.sends import Order
from cpsr.ranks.words import Words

__all__ = ["Exchange"]

logger = logging.getLogger(__name__)

STORE_SECONDS = 5.0  # for an answer
_HEAD = "rank 0"
_HEAD_BYTES, _REPORT_BYTES = len(Proposal().to_bytes()), len(Report().to_bytes())
_HELD_BYTES, _ORDER_BYTES = len(Held().to_bytes()), len(Order().to_bytes())


class Exchange:
    """One rank's ways to hear rank 0 and to report to it; opening it is a collective.

    All but opening, `hold` and `held` belongs to one thread. A message that is late or lost is no error: the next one
    says as much.

    Args:
        group: of all ranks.
        board: of this machine.
    """

    def __init__(self, group: Group, board: Board) -> None:
        self._rank, self._board = group.rank, board
        self._store = PrefixStore(f"{group_name()}/", _get_default_store())
        if hasattr(self._store, "clone"):  # a connection of its own, since others may wait in theirs; before 2.8 shared
            self._store = self._store.clone()
            self._store.set_timeout(timedelta(seconds=STORE_SECONDS))
        self._told: tuple[Report, Held] | None = None
        self._said: tuple[bytes, Proposal | None] = b"", None
        self._leads = board.machine == group.rank
        self._others = [str(machine) for machine in board.machines if machine != 0]
        self.report(Report())
        if self._leads:
            self._board.write(0, Proposal().to_bytes() + Order().to_bytes())
            self._set(str(board.machine), Report(), Held())
        if self._rank == 0:
            self._set(_HEAD, Proposal(), Order(), Held())
        group.barrier()  # from here on all words are there

    def report(self, report: Report) -> None:
        """Say what this rank says."""
        self._board.write(1 + self._rank, report.to_bytes())

    def hear(self) -> Proposal | None:
        """The newest words of rank 0 that have arrived; None: look again."""
        data = self._board.read(0, _HEAD_BYTES)
        if data != self._said[0]:
            self._said = data, Proposal.of_bytes(data)
        return self._said[1]

    def order(self) -> Order | None:
        """The newest order of rank 0 that has arrived; None: look again. On any thread."""
        return Order.of_bytes(self._board.read(0, _ORDER_BYTES, ORDER_AT))

    def ring(self) -> None:
        """Have the ranks of this machine look soon: at the end of their steps; on any thread."""
        self._board.bell[0] = (self._board.bell[0] + 1) & 0xFFFFFFFF

    def hold(self, held: Held) -> None:
        """Say what this rank holds; on any thread, one at a time."""
        self._board.write(1 + self._rank, held.to_bytes(), HELD_AT)

    def held(self, branch: int) -> Held:
        """What all ranks hold of a branch, as far as that has arrived; on any thread."""
        others = [self._held_at(0)] if self._others else []
        return held_by_all([*(self._held_at(1 + rank) for rank in self._board.ranks), *others], branch)

    def _held_at(self, slot: int) -> Held | None:
        return Held.of_bytes(self._board.read(slot, _HELD_BYTES, HELD_AT))

    def _machine(self) -> tuple[Report, Held] | None:
        """What the ranks of this machine say together."""
        found = [Report.of_bytes(self._board.read(1 + rank, _REPORT_BYTES)) for rank in self._board.ranks]
        reports = [one for one in found if one is not None]
        held = [self._held_at(1 + rank) for rank in self._board.ranks]
        branch = max((one.branch for one in held if one is not None), default=0)
        return (merged(reports), held_by_all(held, branch)) if len(reports) == len(found) else None

    def relay(self) -> None:
        """Exchange words between this machine and rank 0, where this rank is the leader of another one."""
        if not self._leads or self._rank == 0:
            return
        machine = self._machine()
        try:
            if machine is not None and self._is_news(machine):
                self._set(str(self._rank), *machine)
                self._told = machine
            data = self._store.get(_HEAD)
        except RuntimeError as error:  # its host is gone, or late
            logger.debug("rank 0 is not heard: %s", error)
            return
        is_new = data[:_HEAD_BYTES] != self._said[0]
        self._board.write(0, data[:HELD_AT])  # who sees what all hold then sees the order
        self._board.write(0, data[HELD_AT:], HELD_AT)
        if is_new:
            self.ring()

    def _is_news(self, machine: tuple[Report, Held]) -> bool:
        # The count alone is none: a rank that refuses because of it says so.
        told = self._told
        return told is None or (replace(machine[0], steps=told[0].steps), machine[1]) != told

    def collect(self) -> tuple[Report, Held] | None:
        """What all ranks have said, as far as it has arrived; None: look again (rank 0)."""
        machine = self._machine()
        if machine is None or not self._others:
            return machine
        try:
            found = self._store.multi_get(self._others)
        except RuntimeError as error:
            logger.debug("other machines are not heard: %s", error)
            return None
        reports = [Report.of_bytes(data[:_REPORT_BYTES]) for data in found]
        held = [machine[1], *(Held.of_bytes(data[_REPORT_BYTES:]) for data in found)]
        heard = [one for one in reports if one is not None]
        if len(heard) < len(reports):
            return None
        return merged([machine[0], *heard]), held_by_all(held, machine[1].branch)

    def say(self, proposal: Proposal, order: Order, held: Held) -> None:
        """Say this to all ranks (rank 0)."""
        if self._others:
            try:
                self._set(_HEAD, proposal, order, held)
            except RuntimeError as error:
                logger.debug("other machines do not hear: %s", error)
        self._board.write(0, proposal.to_bytes() + order.to_bytes())  # as in `relay`
        self._board.write(0, held.to_bytes(), HELD_AT)

    def _set(self, key: str, *words: Words) -> None:
        self._store.set(key, b"".join(one.to_bytes() for one in words))  # type: ignore[arg-type]  # it takes bytes too
