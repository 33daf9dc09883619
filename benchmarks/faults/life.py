"""Starts the ranks of one life and waits for its end, as a launcher does that restarts jobs.

Once one rank has ended with an error the others get SIGTERM, and a while later SIGKILL.
"""

import importlib
import json
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cpsr.benchmarks.faults.part import RANKS, Part, notes_path
from cpsr.benchmarks.harness.ranks import become_rank, start_ranks

__all__ = ["Launched", "Life"]

LIFE_SECONDS = 120.0  # many times what a life takes; whoever is still there then hangs
MONITOR_SECONDS = 0.1  # torchrun's; so long the other ranks are alone with a dead one
KILL_SECONDS = 30.0  # after SIGTERM, as torchrun
ASKED_SECONDS = 8.0  # the same where the job hangs and cannot follow: enough for the dump that is awaited
LEAVE_SECONDS = 30.0  # for a rank that goes on late, to find out that it is alone
POLL_SECONDS = 0.02
_TRAINING = "cpsr.benchmarks.faults.training"


@dataclass(frozen=True)
class Life:
    """One life as it was seen from outside.

    Attributes:
        notes: of each rank, see `training`.
        statuses: exit status of each rank, None where it was left stopped.
        hung: ranks that had not ended when the time was out.
        output: of each rank.
        begun_unix_seconds: when its ranks were started.
    """

    notes: list[list[dict[str, Any]]]
    statuses: list[int | None]
    hung: list[int]
    output: list[str]
    begun_unix_seconds: float

    def noted(self, rank: int, kind: str) -> list[dict[str, Any]]:
        """A rank's notes of one kind."""
        return [note for note in self.notes[rank] if note["kind"] == kind]

    @property
    def good(self) -> bool:
        """Whether every rank came to the end of the run."""
        return self.statuses == [0] * len(self.statuses)


class Launched:
    """The processes of a life; `wait` for its end.

    Args:
        part: what the job does.
    """

    def __init__(self, part: Part) -> None:
        self._part = part
        self._begun = time.time()
        self._processes = start_ranks(_rank, part, RANKS)

    def await_begin(self) -> None:
        """Wait until some rank trains, or none can any more."""
        deadline = time.monotonic() + LIFE_SECONDS
        while self._left() and not self._noted("started", range(RANKS)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def wait(self, *, ask: bool = False, keep_stopped: bool = False) -> Life:
        """Wait for the end of all ranks but those that are stopped.

        Args:
            ask: send SIGTERM to all once something was injected, and SIGKILL a while later to whoever hangs.
            keep_stopped: leave a stopped rank alone; else it is killed.
        """
        deadline, terminated = time.monotonic() + LIFE_SECONDS, False
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            failed = any(process.exitcode for process in self._processes)
            if not terminated and (failed or (ask and self._noted("injected", range(RANKS)))):
                terminated = True
                time.sleep(MONITOR_SECONDS)
                self._send(signal.SIGTERM, self._left())
                deadline = min(deadline, time.monotonic() + (ASKED_SECONDS if ask else KILL_SECONDS))
        if not keep_stopped or left:
            self.end()
        return self._life([] if ask else left)

    def go_on(self) -> list[str]:
        """Let a stopped rank go on; what is wrong with what it does then: it is to leave by itself."""
        ranks = self._stopped()
        self._send(signal.SIGCONT, ranks)
        deadline = time.monotonic() + LEAVE_SECONDS
        while (left := self._there(ranks)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        self.end()
        if left:
            return [f"rank {left[0]}, which was stopped and went on, had not ended {LEAVE_SECONDS:g} s later"]
        unaware = [rank for rank in ranks if self._processes[rank].exitcode == 0]
        return [f"rank {rank}, which was stopped and went on, ended as if all were well" for rank in unaware]

    def end(self) -> None:
        """Kill what is left."""
        for process in self._processes:
            process.kill()
            process.join()

    def _left(self) -> list[int]:
        """Ranks that still run."""
        stopped = self._stopped()
        return self._there(rank for rank in range(RANKS) if rank not in stopped)

    def _there(self, ranks: Iterable[int]) -> list[int]:
        return [rank for rank in ranks if self._processes[rank].exitcode is None]

    def _stopped(self) -> list[int]:
        ranks = {rank for fault in self._part.faults if fault.signal == "SIGSTOP" for rank in fault.ranks}
        return [rank for rank in sorted(ranks) if self._noted("injected", [rank])]

    def _send(self, number: int, ranks: Iterable[int]) -> None:
        for rank in self._there(ranks):
            os.kill(self._processes[rank].pid or 0, number)

    def _noted(self, kind: str, ranks: Iterable[int]) -> bool:
        return any(note["kind"] == kind for rank in ranks for note in self._notes(rank))

    def _notes(self, rank: int) -> list[dict[str, Any]]:
        try:
            text = notes_path(self._part.result, rank).read_text()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]  # one may be half written

    def _life(self, hung: list[int]) -> Life:
        return Life(
            notes=[self._notes(rank) for rank in range(RANKS)],
            statuses=[process.exitcode for process in self._processes],
            hung=hung,
            output=[self._output(rank) for rank in range(RANKS)],
            begun_unix_seconds=self._begun,
        )

    def _output(self, rank: int) -> str:
        path = self._part.result.with_suffix(f".{rank}.log")
        return path.read_text(errors="replace") if path.exists() else ""


def _rank(part: Part, rank: int, ranks: int) -> None:
    """What a rank's process runs."""
    become_rank(part.result.with_suffix(f".{rank}.log"), rank, ranks, part.nodes[rank] if part.nodes else None)
    # Imports DeepSpeed, which the process that launches does without.
    importlib.import_module(_TRAINING).main(part, rank, ranks)
