"""Receives the snapshots of one owner into this machine's memory, in a thread of its own."""

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from cpsr.checkpoint.background import yield_to_training
from cpsr.checkpoint.memory_states import memory_state, memory_states
from cpsr.errors import CheckpointError
from cpsr.peers.report import Report, brief
from cpsr.peers.transport import Channel, Kind, Message, erase, problem_of, receive_state

__all__ = ["Incoming"]


class Incoming:
    """Receives the states of one owner into two files in turn, and verifies each after arrival.

    Args:
        channel: from the owner.
        run_id: identity of the run.
        paths: the two files.
        report: records an event.
    """

    def __init__(self, channel: Channel, run_id: str, paths: Sequence[Path], report: Report) -> None:
        self._channel = channel
        self.peer = channel.peer
        self._run_id = run_id
        self._report = report
        ages = {
            state.path: (state.life, state.branch, state.iteration) for state in memory_states(run_id, paths[0].parent)
        }
        self._paths = sorted(paths, key=lambda path: ages.get(path, (-1, -1, -1)))  # the next to be overwritten first
        self._stop = threading.Event()
        name = f"cpsr-replica-from-{channel.peer}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the end; whether it came."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Take nothing more; what is arriving may still end."""
        self._stop.set()

    def _run(self) -> None:
        yield_to_training()
        try:
            while (message := self._channel.receive_unless(self._stop)) is not None and message.kind is not Kind.END:
                if message.kind is Kind.FORGET:
                    self._forget_after(message.iteration)
                elif message.kind in (Kind.PIECE, Kind.OFFER):
                    self._take(message)
        except (RuntimeError, OSError, ValueError, CheckpointError) as error:
            self._report(
                "replication ended",
                f"this rank takes no more replicas of rank {self.peer}'s state in this life ({brief(error)}); "
                "those that it holds stay, training goes on, other replicas are not affected",
                None,
                logging.WARNING,
            )

    def _take(self, first: Message) -> None:
        path, newest = self._paths
        if not receive_state(self._channel, first, path, newest):
            return
        problem = problem_of(path, self.peer, first.iteration)
        if problem is None:
            self._paths = [newest, path]
            return
        erase(path)
        message = f"a replica of rank {self.peer} is not kept, it did not arrive whole: {problem}"
        self._report("replica damaged", message, first.iteration, logging.WARNING)

    def _forget_after(self, iteration: int) -> None:
        for path in self._paths:
            state = memory_state(path)
            if state is not None and state.iteration > iteration:
                erase(path)
