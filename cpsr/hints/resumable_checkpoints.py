"""The checkpoints of a resumable function, in a run directory as of a training, of one rank without operators.

What a checkpoint holds is copied while the function waits. A thread writes it while the function goes on; at most one
is under way, and the ones before it stay until it is committed.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch

from cpsr.checkpoint.catalogue import remove_unlisted, scan
from cpsr.checkpoint.commit import SupersededError
from cpsr.checkpoint.files import make_directory, remove_tree
from cpsr.checkpoint.host_snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore
from cpsr.errors import CheckpointCorruptError, CheckpointError, RunDirectoryError, RunMismatchError
from cpsr.ranks.heartbeat import HeartbeatFiles, newest_claim
from cpsr.state.codec import SCALARS, encode
from cpsr.state.shard import Shard

__all__ = ["KeptCheckpoints", "Written"]

_KEPT = 2  # the newest, and the one before for where that is damaged
_OPENINGS = 5  # a checkpoint takes so many times the processor that opening its directory does
_COMMIT_SECONDS = 60.0  # this process is the only rank, so that nothing is waited for

_log = logging.getLogger(__name__)


class Written(NamedTuple):
    """What it took to write a checkpoint.

    Attributes:
        processor_seconds: of the thread, which may have kept the function from the interpreter for so long.
        seconds: until it was committed, and older ones removed.
    """

    processor_seconds: float
    seconds: float


class KeptCheckpoints:
    """Opens a run directory for one call, which is then the only one that writes there; `with` waits for the writer.

    Args:
        run_dir: the directory; made if it is not there.
        name: of the function.
        identity: what must be the same for a call to go on from a checkpoint; keys are words of a message.

    Attributes:
        first_seconds: processor time that the first checkpoint may take, without its bytes.

    Raises:
        RunMismatchError: it is of another function, of a training, or of another call; nothing was changed.
        RunDirectoryError: it cannot be written, or another call has begun at the same time.
        CheckpointError: the file system cannot read a checkpoint now.
    """

    def __init__(self, run_dir: Path, name: str, identity: Mapping[str, Any]) -> None:
        self._identity = dict(identity)
        began = time.thread_time()
        try:
            # Before another call, which may still run, is told that this one has begun.
            self._require_same_call(run_dir)
            make_directory(run_dir)
            life = _claimed(run_dir, name)
            run_id = hashlib.sha256(name.encode()).hexdigest()[:32]
            self._store = CheckpointStore(run_dir, 0, 1, run_id, life)
            self._store.prepare()
        except OSError as error:
            raise RunDirectoryError(
                f"the run directory {run_dir} of {name} cannot be used ({error}); no checkpoint in it was changed. "
                "Make it a directory that can be written, or use another run_dir"
            ) from error
        self.first_seconds = _OPENINGS * (time.thread_time() - began)
        self._next = 1
        self._committed: list[int] = []
        self._writing: Future[Written] | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "KeptCheckpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._wait()

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _require_same_call(self, run_dir: Path) -> None:
        """Compare the call with that of the newest checkpoint that can be read; all of a directory are of one."""
        if (run_dir / "run.json").exists():
            raise RunMismatchError(
                f"{run_dir} is the run directory of a training; nothing was changed: use another one"
            )
        for info in reversed(scan(run_dir / "checkpoints").checkpoints):
            try:
                saved = info.for_one_reader().small_state(0, ["identity"])
            except CheckpointCorruptError:
                continue  # `newest` says so
            differing = [key for key, value in self._identity.items() if saved.get(key) != value]
            if differing:
                raise RunMismatchError(
                    f"{run_dir} holds a checkpoint of {saved['function']}, but this differs: {', '.join(differing)}. "
                    "No checkpoint was changed. Call it as before to go on, or remove the directory or use another "
                    "run_dir to begin anew"
                )
            return

    def newest(self) -> tuple[int, Any] | None:
        """Number and content of the newest checkpoint that is whole; damaged ones are set aside.

        Raises:
            CheckpointError: the file system cannot read one now.
        """
        found = self._store.catalogue()
        for info in reversed(found):
            try:
                content = self._store.load(info.iteration, Shard({}))
            except CheckpointCorruptError as error:
                _log.warning("checkpoint %d is skipped, and the one before it is used: %s", info.iteration, error)
                self._store.quarantine(info.iteration, str(error))
                continue
            self._next = info.iteration + 1
            self._committed = [one.iteration for one in found if one.iteration <= info.iteration]
            return info.iteration, content
        if found:
            _log.error("no checkpoint of %s is whole; the function begins anew", self._store.directory)
        return None

    def save(self, content: Mapping[str, Any]) -> "Future[Written]":
        """Copy one more checkpoint, once the one before is written, and begin to write it.

        Where that fails a line says so, and the earlier ones stay.

        Args:
            content: plain data and arrays, for the codec.

        Returns:
            What it took. Raises SupersededError: a newer call has begun in this directory.

        Raises:
            SupersededError: the same, before this one was begun.
        """
        if self._writing is not None:
            self._writing.result()
        encoded = encode({**content, "identity": self._identity}, prefix=SCALARS)
        writing: Future[Written] = Future()
        # No executor: it takes no more work once the main thread has ended, while a function in another goes on.
        thread = threading.Thread(target=self._fulfil, args=(writing, self._next, encoded), name="cpsr-resumable")
        thread.start()
        self._writing, self._thread = writing, thread
        self._next += 1
        return writing

    def _fulfil(self, writing: Future[Written], number: int, encoded: tuple[Any, dict[str, torch.Tensor]]) -> None:
        try:
            writing.set_result(self._write(number, encoded))
        except BaseException as error:  # noqa: BLE001 - raised where the function waits, or asks
            writing.set_exception(error)

    def _write(self, number: int, encoded: tuple[Any, dict[str, torch.Tensor]]) -> Written:
        began, processor = time.perf_counter(), time.thread_time()
        try:
            self._store.write(Snapshot(number, Shard({}), encoded=encoded))
            result = self._store.commit(number, _COMMIT_SECONDS, threading.Event())
            if result.committed:
                self._committed.append(number)
                self._remove(self._committed[:-_KEPT])
            else:
                _log.warning("checkpoint %d was not committed (%s); the function goes on", number, result.reason)
        except SupersededError:
            raise
        except (OSError, CheckpointError) as error:
            _log.warning("checkpoint %d failed (%s); the ones before it stay, and the function goes on", number, error)
        return Written(time.thread_time() - processor, time.perf_counter() - began)

    def clear(self) -> None:
        """Remove all checkpoints, the newest last: the function has returned, and its next call begins anew."""
        self._wait()
        try:
            self._store.refuse_superseded()
            for aside in scan(self._store.directory).asides:
                remove_tree(aside.directory)
            self._remove([info.iteration for info in self._store.catalogue()])
        except (OSError, CheckpointError) as error:
            _log.warning(
                "%s stays (%s): the next call would go on from there. Remove it for a new one",
                self._store.directory,
                error,
            )

    def _remove(self, numbers: Sequence[int]) -> None:
        """Remove checkpoints, the oldest first, and what none of the others lists."""
        self._store.refuse_superseded()
        for number in numbers:
            with suppress(FileNotFoundError):  # it is gone already
                remove_tree(self._store.directory_of(number))
        del self._committed[: len(numbers)]
        remove_unlisted(self._store.directory)


def _claimed(run_dir: Path, name: str) -> int:
    """Number of the life that this call begins, and no other one."""
    life = newest_claim(run_dir) + 1
    claims = HeartbeatFiles(run_dir, life)
    try:
        claims.claim()
    except FileExistsError as error:
        if newest_claim(run_dir) < life:
            raise  # something else has the name of a directory
        raise RunDirectoryError(
            f"another call of {name} has begun in {run_dir} at the same time, and goes on; this one has changed "
            "nothing. Give each its own run_dir"
        ) from error
    claims.remove_earlier()
    return life
