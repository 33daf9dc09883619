"""Keeps a life from writing into a run in which a newer life has begun.

A machine that is cut off, or a job that was taken for dead, may go on beside the job that took its place. Each life
claims its number by making the directory of its heartbeats, which succeeds for one. From then on no earlier life
writes or commits a checkpoint; its ranks leave at their next beat.
"""

import logging
import os
from pathlib import Path

from cpsr.errors import CheckpointError, RunDirectoryError
from cpsr.ranks.group import Group
from cpsr.ranks.heartbeat import HeartbeatFiles, newest_claim
from cpsr.ranks.link import JOB

__all__ = ["SupersededError", "claim_life", "refuse_superseded", "superseded"]

logger = logging.getLogger(__name__)


class SupersededError(CheckpointError):
    """A newer life of the run has begun: this one changes nothing more in its directory."""


def claim_life(run_dir: Path, life: int, group: Group) -> None:
    """Make this life the newest of its run, before it writes anything else; a collective.

    Raises:
        RunDirectoryError: another job has begun under this number at the same time.
    """
    taken = False
    if group.rank == 0:
        try:
            heartbeats = HeartbeatFiles(run_dir, life)
            heartbeats.claim(os.environ.get(JOB, ""))
            heartbeats.remove_earlier()  # by which ranks of earlier lives notice, and leave their host memory
        except FileExistsError:
            taken = True
        except OSError as error:
            logger.error("an earlier life that still runs would not be stopped: %s; training goes on", error)
    if group.broadcast(taken):
        raise RunDirectoryError(
            f"another job has begun life {life} of the run in {run_dir} at the same time, and goes on; this one has "
            "changed nothing. End one of the two, or give this one another run_dir"
        )


def superseded(run_dir: Path, life: int) -> int | None:
    """The newer life that has begun; None while this one is the newest.

    Raises:
        OSError: the directory cannot be read.
    """
    newest = newest_claim(run_dir)
    return newest if newest > life else None


def refuse_superseded(run_dir: Path, life: int) -> None:
    """Raise where a newer life has begun.

    Raises:
        SupersededError: it has.
        OSError: the directory cannot be read.
    """
    newer = superseded(run_dir, life)
    if newer is not None:
        raise SupersededError(
            f"life {newer} of the run in {run_dir} has begun, this process is of life {life}: it writes nothing more "
            "there, and what was committed stays. End one of the two jobs if both still run"
        )
