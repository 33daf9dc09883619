"""The ranks of a job as `cpsr doctor` meets them: they wait a minute for each other, and then name who is missing."""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from cpsr.doctor.finding import named
from cpsr.ranks.group import Group, this_node

__all__ = ["WAIT_SECONDS", "Meeting", "MissingRankError", "Roll", "meet"]

WAIT_SECONDS = 60.0  # what a rank does between two collectives takes less
_PAUSE_SECONDS = 0.1
_PORTS = 1 << 16
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_REASON_CHARACTERS = 200


class MissingRankError(Exception):
    """The ranks do not come together.

    Args:
        ranks: those that are missing, as far as they are known.
        message: who is missing, and what was seen of it.
    """

    def __init__(self, ranks: Sequence[int], message: str) -> None:
        super().__init__(message)
        self.ranks = ranks


class Roll:
    """What each rank has come to, in the store that all of them reach.

    Args:
        store: of the job's ranks.
        rank: this one.
        ranks: number of them.
        wait_seconds: for a rank that does not come.
    """

    def __init__(self, store: Store, rank: int, ranks: int, wait_seconds: float) -> None:
        self._store, self._rank, self._ranks, self._wait_seconds = store, rank, ranks, wait_seconds
        self._entered, self._doing, self._since = 0, "the start", time.monotonic()

    def doing(self, what: str) -> None:
        """Note what this rank does next."""
        self._doing = what
        self._note()

    def enter(self) -> None:
        """Note that this rank takes part in the next collective."""
        self._entered, self._since = self._entered + 1, time.monotonic()
        self._note()

    def await_all(self) -> None:
        """Wait until every rank has noted something.

        Raises:
            MissingRankError: the ranks that have not, in time.
        """
        keys = [_key(rank) for rank in range(self._ranks)]
        try:
            self._store.wait(keys, timedelta(seconds=self._wait_seconds))
        except RuntimeError:
            absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            came = self._ranks - len(absent)
            message = f"{_ranks(absent)} did not come within {self._wait_seconds:g} s; {came} of {self._ranks} came"
            raise MissingRankError(absent, message) from None

    def missing(self, problem: Exception) -> MissingRankError:
        """Who did not take part in a collective that failed on this rank; waits until it is clear, or the time is over.

        Args:
            problem: that the collective ended with.
        """
        with suppress(RuntimeError):  # of the store
            until = self._since + self._wait_seconds
            # A rank that works on comes to the collective, too. One that is gone does not.
            while len(late := self._late()) > 1 and time.monotonic() < until:
                time.sleep(_PAUSE_SECONDS)
            failed = [rank for rank, note in enumerate(self._noted()) if note["problem"]]
            self._note(brief(problem))
            if not (ranks := late or failed):
                return MissingRankError([], f"all came, and a connection between them failed ({brief(problem)})")
            return MissingRankError(ranks, f"{_ranks([self._text(rank) for rank in ranks])} did not come any further")
        return MissingRankError([0], "rank 0 has ended, or its machine is gone: the ranks' store does not answer")

    def _late(self) -> list[int]:
        """Those that have come to fewer collectives than this one."""
        return [rank for rank, note in enumerate(self._noted()) if note["entered"] < self._entered]

    def _text(self, rank: int) -> str:
        note = self._noted()[rank]
        return f"{rank} ({note['machine']}, {note['problem'] or 'at ' + note['doing']})"

    def _noted(self) -> list[dict[str, Any]]:
        return [json.loads(self._store.get(_key(rank))) for rank in range(self._ranks)]

    def _note(self, problem: str = "") -> None:
        note = {"entered": self._entered, "machine": this_node(), "doing": self._doing, "problem": problem}
        self._store.set(_key(self._rank), json.dumps(note))


class Meeting(Group):
    """The ranks' group for the checks, or this process alone.

    Args:
        roll: of the ranks; None: this process is alone.

    Raises:
        MissingRankError: a rank did not come in time; so does every collective.
    """

    def __init__(self, roll: Roll | None = None) -> None:
        self._roll = roll
        with self._entered():
            super().__init__(WAIT_SECONDS)

    def doing(self, what: str) -> None:
        """Let the others know what this rank does next."""
        if self._roll is not None:
            self._roll.doing(what)

    def barrier(self) -> None:
        """Wait for every rank."""
        with self._entered():
            super().barrier()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order, on every rank."""
        with self._entered():
            return super().gather(value)

    @contextmanager
    def _entered(self) -> Iterator[None]:
        if self._roll is None:
            yield
            return
        try:
            self._roll.enter()
            yield
        except RuntimeError as problem:  # of gloo, or of the store
            raise self._roll.missing(problem) from problem


def meet(environment: Mapping[str, str] = os.environ) -> Meeting:
    """The ranks that a launcher has started, as `torch.distributed` over gloo; a collective of all of them.

    Args:
        environment: of this process, as torchrun makes it.

    Raises:
        MissingRankError: some did not come in a minute, or cannot connect.
    """
    try:
        rank, ranks = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        if not 0 < port < _PORTS:
            raise ValueError(f"there is no port {port}")
    except (KeyError, ValueError) as problem:
        message = f"the launcher's variables do not say where the ranks meet ({type(problem).__name__}: {problem})"
        raise MissingRankError([], message) from problem
    wait = timedelta(seconds=WAIT_SECONDS)
    serves = rank == 0 and environment.get(_AGENT_STORE) != "True"  # else torchrun does
    try:
        store = dist.TCPStore(host, port, None, serves, wait, wait_for_workers=False)  # type: ignore[attr-defined]
        roll = Roll(PrefixStore("cpsr-doctor/", store), rank, ranks, WAIT_SECONDS)
        roll.enter()
    except RuntimeError as problem:
        what = "cannot listen" if serves else "cannot connect to the ranks' store"
        raise MissingRankError(
            [] if serves else [0], f"rank {rank} on {this_node()} {what}: {brief(problem)}"
        ) from problem
    roll.await_all()
    roll.enter()
    try:
        roll.doing("the connections between the ranks")
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=wait)
    except RuntimeError as problem:
        raise roll.missing(problem) from problem
    return Meeting(roll)


def _ranks(ranks: Sequence[int | str]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {named(ranks)}"


def brief(problem: Exception) -> str:
    """The message of another package in one line."""
    return " ".join(str(problem).split())[:_REASON_CHARACTERS]


def _key(rank: int) -> str:
    return f"rank-{rank}"
