"""The checkpoints of a resumable function, in a run directory as of a training, of one rank without operators."""

import hashlib
import json
import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cpsr.checkpoint.catalogue import remove_unlisted, scan
from cpsr.checkpoint.commit import SupersededError
from cpsr.checkpoint.files import make_directory, remove_tree, write_bytes
from cpsr.checkpoint.host_snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore
from cpsr.errors import CheckpointCorruptError, CheckpointError, RunDirectoryError, RunMismatchError
from cpsr.ranks.heartbeat import HeartbeatFiles, newest_claim
from cpsr.state.shard import Shard

__all__ = ["KeptCheckpoints"]

_NAME = "resumable.json"
_KEPT = 2  # the newest, and the one before for where that is damaged
_WRITES = 6  # a checkpoint forces some 12 names and files to the disk, a small file 2
_TRIALS = 3  # the quickest of them: a disk that others use too can take ten times as long now and then
_COMMIT_SECONDS = 60.0  # this process is the only rank, so that nothing is waited for

_log = logging.getLogger(__name__)


class KeptCheckpoints:
    """Opens a run directory for one call, which is then the only one that writes there.

    Args:
        run_dir: the directory; made if it is not there.
        name: of the function.
        identity: what must be the same for a call to go on from a checkpoint; keys are words of a message.

    Attributes:
        first_seconds: what the first checkpoint may take, from the time for a small file.

    Raises:
        RunMismatchError: it is of another function, of a training, or of another call; nothing was changed.
        RunDirectoryError: it cannot be written, or another call has begun at the same time.
        CheckpointError: the file system cannot read a checkpoint now.
    """

    def __init__(self, run_dir: Path, name: str, identity: Mapping[str, Any]) -> None:
        self._identity = dict(identity)
        try:
            # Before another call, which may still run, is told that this one has begun.
            self._require_same_call(run_dir)
            make_directory(run_dir)
            life = newest_claim(run_dir) + 1
            claims = HeartbeatFiles(run_dir, life)
            claims.claim()
            claims.remove_earlier()
            self.first_seconds = _WRITES * min(_seconds_to_write(run_dir / _NAME, name) for _ in range(_TRIALS))
            run_id = hashlib.sha256(name.encode()).hexdigest()[:32]
            self._store = CheckpointStore(run_dir, 0, 1, run_id, life)
            self._store.prepare()
        except FileExistsError as error:
            raise RunDirectoryError(
                f"another call of {name} has begun in {run_dir} at the same time, and goes on; this one has changed "
                "nothing. Give each its own run_dir"
            ) from error
        except OSError as error:
            raise RunDirectoryError(
                f"the run directory {run_dir} of {name} cannot be used ({error}); no checkpoint in it was changed. "
                "Make it writeable, or use another run_dir"
            ) from error
        self._next = 1

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
            return info.iteration, content
        if found:
            _log.error("no checkpoint of %s is whole; the function begins anew", self._store.directory)
        return None

    def save(self, content: Mapping[str, Any]) -> None:
        """Commit one more checkpoint; where that fails a line says so, and the earlier ones stay.

        Args:
            content: plain data and arrays, for the codec.

        Raises:
            SupersededError: a newer call has begun in this directory.
        """
        number = self._next
        self._next += 1
        try:
            self._store.write(Snapshot(number, Shard({}), {**content, "identity": self._identity}))
            result = self._store.commit(number, _COMMIT_SECONDS, threading.Event())
            if result.committed:
                self._remove(_KEPT)
            else:
                _log.warning("checkpoint %d was not committed (%s); the function goes on", number, result.reason)
        except SupersededError:
            raise
        except (OSError, CheckpointError) as error:
            _log.warning("checkpoint %d failed (%s); the ones before it stay, and the function goes on", number, error)

    def clear(self) -> None:
        """Remove all checkpoints, the newest last: the function has returned, and its next call begins anew."""
        try:
            self._store.refuse_superseded()
            for aside in scan(self._store.directory).asides:
                remove_tree(aside.directory)
            self._remove(0)
        except (OSError, CheckpointError) as error:
            _log.warning(
                "%s stays (%s): the next call would go on from there. Remove it for a new one",
                self._store.directory,
                error,
            )

    def _remove(self, kept: int) -> None:
        self._store.refuse_superseded()
        found = self._store.catalogue()
        for info in found[: len(found) - kept]:
            remove_tree(info.directory)
        remove_unlisted(self._store.directory)


def _seconds_to_write(path: Path, name: str) -> float:
    started = time.perf_counter()
    write_bytes(path, json.dumps({"function": name}).encode())
    return time.perf_counter() - started
