"""Work in a fork of this process: torch is imported once, and a fork that is killed takes nothing with it."""

import json
import mmap
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

__all__ = ["POLL_SECONDS", "Gate", "fork", "wait_for"]

NOTES_BYTES = 1 << 16
HEADER_BYTES = 16  # the length of the notes in the first 8, then the three flags
ARRIVED, RELEASED, OVER = 8, 9, 10
POLL_SECONDS = 0.002
FAILED = 97  # exit status of a fork whose work raised


class Gate:
    """Where a fork waits until it is being traced, and where it leaves notes.

    Both through shared memory: a pipe or a file would need the very calls that are counted and made to fail.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, NOTES_BYTES)

    def wait(self) -> None:
        """In the fork: go on once it is released."""
        self._memory[ARRIVED] = 1
        while not self._memory[RELEASED]:
            time.sleep(POLL_SECONDS)

    def await_arrival(self, timeout_seconds: float = 60.0) -> None:
        """In the parent: wait until the fork is there, so that nothing that it did before is traced.

        Raises:
            TimeoutError: it did not come.
        """
        deadline = time.monotonic() + timeout_seconds
        while not self._memory[ARRIVED]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"a process that is to meet a fault was not ready within {timeout_seconds:g} s")
            time.sleep(POLL_SECONDS)

    def release(self) -> None:
        """In the parent: let the fork go on."""
        self._memory[RELEASED] = 1

    def end(self) -> None:
        """In the parent: signal to a process that works beside the fork that the fork has ended."""
        self._memory[OVER] = 1

    def await_end(self) -> None:
        """In the process beside: wait until the fork has ended."""
        while not self._memory[OVER]:
            time.sleep(POLL_SECONDS)

    def note(self, **values: Any) -> None:
        """In the fork: add plain values to what was noted before."""
        data = json.dumps(self.notes() | values).encode()
        if len(data) + HEADER_BYTES > NOTES_BYTES:
            raise ValueError(f"notes of {len(data)} bytes do not fit into {NOTES_BYTES}")
        self._memory[HEADER_BYTES : HEADER_BYTES + len(data)] = data
        self._memory[:8] = len(data).to_bytes(8, "little")  # last: a kill in between leaves the notes before

    def notes(self) -> dict[str, Any]:
        """What was noted so far."""
        size = int.from_bytes(self._memory[:8], "little")
        found: dict[str, Any] = json.loads(self._memory[HEADER_BYTES : HEADER_BYTES + size]) if size else {}
        return found

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()


def fork(work: Callable[[], object]) -> int:
    """Start the work in a fork; returns its process id."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - whatever it is, the fork must not run on in its parent's place
            traceback.print_exc()
        finally:
            os._exit(FAILED)
    return child


def wait_for(child: int, timeout_seconds: float = 60.0) -> int:
    """The wait status of a fork; one that takes longer is killed, and raises TimeoutError."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise TimeoutError(f"a process under a fault did not end within {timeout_seconds:g} s")
        time.sleep(POLL_SECONDS)
