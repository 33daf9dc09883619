"""Carries heartbeats: within a machine over its board, between machines through a file of each.

Any rank of a machine may carry, and normally one does: a rank whose beat comes without that another one has carried
since its last beat. So if that one is stopped, hangs or ends, the next takes its place within two beats. It writes
what all ranks of the machine say, and puts on the board what the ranks of rank 0's machine say. Rank 0 reads the files
of all machines.
"""

import logging
import os
from collections.abc import Callable, Collection

from cpsr.ranks.board import HEARTBEAT_AT, Board
from cpsr.ranks.heartbeat import HEARTBEAT_BYTES, Heartbeat, HeartbeatFiles

__all__ = ["Courier"]

logger = logging.getLogger(__name__)


class Courier:
    """One rank's ways to be seen by the others, and to see them.

    Args:
        files: of this life.
        board: of this machine.
        report: gets what went wrong: its kind, and one clause.

    Attributes:
        watched: the ranks that this one has to see. Rank 0 sees all, the others those of its machine and of rank 0's.
        unknown: those of which nothing may have arrived last time, because storage failed.
    """

    def __init__(self, files: HeartbeatFiles, board: Board, report: Callable[[str, str], None]) -> None:
        self._files, self._board, self._report = files, board, report
        rank, machines = board.rank, board.machines
        shown = machines.values() if rank == 0 else (board.ranks, machines[0])
        self.watched = sorted({other for ranks in shown for other in ranks} - {rank})
        self.unknown: set[int] = set()
        self._machines = {other: machine for machine, ranks in machines.items() for other in ranks}
        self._carried = board.carried[0]
        self._held: int | None = None

    def start(self, heartbeat: Heartbeat) -> None:
        """The first beat: OSError if the file system refuses, and then no other rank awaits one of this rank."""
        self._files.write(self._board.machine, self._machine(heartbeat), first=True)
        self.beat(heartbeat)

    def hold(self) -> None:
        """Show the others that this process lives, whatever it says, until it ends or closes this."""
        try:
            self._board.hold()
            if len(self._board.machines) > 1:
                self._held = self._files.hold(self._board.machine)
        except OSError as error:
            logger.warning("should this process end, only its heartbeat shows it: %s", error)

    def is_held(self, process: int) -> bool | None:
        """Whether a process lives, or one at least of another machine; see `process_of`. None if that is unknown."""
        try:
            of_machine = process in self._board.ranks
            return self._board.is_held(process) if of_machine else self._files.is_held(process)
        except OSError:
            return None

    def process_of(self, rank: int) -> int:
        """What is known of the process of a rank: itself on this machine; else the machine, by its first rank."""
        return rank if rank in self._board.ranks else self._machines[rank]

    def beat(self, heartbeat: Heartbeat) -> None:
        """Say this to the ranks of this machine, and to the others with what is carried next."""
        self._board.write(1 + self._board.rank, heartbeat.to_bytes(), HEARTBEAT_AT)

    def announce(self, heartbeat: Heartbeat) -> None:
        """Say this to all at once: it is the last word of this rank."""
        self.beat(heartbeat)
        self._board.alarm[0] += 1
        found = b""
        for _ in self._board.ranks:  # of several that announce at once the last must write the newest
            if found == (found := self._machine()) or not self._write(found):
                break

    def heard(self, rank: int) -> Heartbeat | None:
        """The newest heartbeat of a rank that has arrived whole; None if there is none, or look again."""
        return Heartbeat.of_bytes(self._read(rank))

    def carry(self, awaited: Collection[int]) -> bool:
        """Exchange heartbeats with other machines, if it is this rank's turn.

        Args:
            awaited: ranks that may still beat.

        Returns:
            Whether this machine can be seen, as far as this rank knows.
        """
        board = self._board
        has_turn = board.carried[0] == self._carried
        written = not has_turn or self._write(self._machine())  # once: others beat meanwhile
        self.unknown = set()
        others = board.machines.keys() - {board.machine} if board.rank == 0 else {0} - {board.machine}
        for machine in sorted(others) if board.rank == 0 or has_turn else ():
            ranks = set(board.machines[machine])
            if not (ranks.isdisjoint(awaited) or (self._fetch(machine) and written)):
                self.unknown |= ranks
        if has_turn and written and not self.unknown:
            board.carried[0] += 1
        self._carried = board.carried[0]
        return written

    def close(self) -> None:
        """Show the others that this process takes no further part."""
        self._board.release()
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _machine(self, own: Heartbeat | None = None) -> bytes:
        said = {} if own is None else {self._board.rank: own.to_bytes()}
        return b"".join(said.get(rank) or self._read(rank) for rank in self._board.ranks)

    def _read(self, rank: int) -> bytes:
        return self._board.read(1 + rank, HEARTBEAT_BYTES, HEARTBEAT_AT)

    def _write(self, data: bytes) -> bool:
        try:
            self._files.write(self._board.machine, data)
        except OSError as error:
            ranks = ", ".join(map(str, self._board.ranks))
            self._report("not heard", f"heartbeats of rank {ranks} cannot be written: {error}")
            return False
        return True

    def _fetch(self, machine: int) -> bool:
        ranks = self._board.machines[machine]
        try:
            data = self._files.read(machine, len(ranks) * HEARTBEAT_BYTES)
        except OSError as error:
            self._report("not watched", f"rank {self._board.rank} cannot read heartbeats of other machines: {error}")
            return False
        for place, rank in enumerate(ranks[: len(data) // HEARTBEAT_BYTES]):
            self._board.write(1 + rank, data[place * HEARTBEAT_BYTES : (place + 1) * HEARTBEAT_BYTES], HEARTBEAT_AT)
        return bool(data)
