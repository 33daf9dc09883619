"""Ranks that are stopped, or hang, are noticed, and all leave together.

Rank 0 watches all, the others watch rank 0: a beat costs each of them a small write and a small read, and rank 0 one
read a rank. Whoever gives a rank up says so in its own heartbeat, and all follow within a beat. No times are compared
between machines: a watcher asks only whether a heartbeat still changes, by its own clock.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cpsr.config import LivenessConfig
from cpsr.heartbeat import Heartbeat, HeartbeatFiles, Phase

__all__ = ["Liveness"]

logger = logging.getLogger(__name__)

THREAD_NAME = "cpsr-liveness"
BEAT_SECONDS = 1.0
# What passes between two looks counts for a quarter of a timeout at most: where this process, its machine or its file
# system stood still, one look afterwards says nothing of the others.
LOOKS_MIN = 4
BEATS_MIN = 2 * LOOKS_MIN  # in the shortest timeout: two between two looks that count in full
CLOSE_SECONDS = 5.0  # the thread ends at once, unless the file system hangs


class _Stillness:
    """How long something has not changed, by whoever looks at it again and again; None: it may stay so for ever."""

    def __init__(self, timeout_seconds: float | None) -> None:
        self._timeout_seconds = math.inf if timeout_seconds is None else timeout_seconds
        self._seen: object = None
        self._seconds = 0.0

    def look(self, value: object, elapsed_seconds: float) -> bool:
        """Whether it has been still for too long, `elapsed_seconds` after the last look; of None nothing is known."""
        if value is not None and value != self._seen:
            self._seen, self._seconds = value, 0.0
        elif value is not None:
            self._seconds += min(elapsed_seconds, self._timeout_seconds / LOOKS_MIN)
        return self._seconds >= self._timeout_seconds

    def reset(self) -> None:
        """Count anew."""
        self._seconds = 0.0


@dataclass(frozen=True)
class _GivenUp:
    """Why this process must leave, and because of whom, where that is known."""

    reason: str
    lost_rank: int | None = None


class Liveness:
    """One rank's heartbeat and its watch over the others; a rank is watched from its first beat on.

    `sign`, `step` and `busy` belong to the training thread.

    Args:
        run_dir: on storage that every rank shares.
        life: of the run; no two have the same number.
        rank: this process.
        size: number of ranks.
        config: the timeouts.
        leave: ends this process, for a reason given as a clause; called by the watching thread, once.
        tell: records an event: its kind, one sentence, the iteration and the level of logging.
    """

    def __init__(
        self,
        run_dir: Path,
        life: int,
        rank: int,
        size: int,
        config: LivenessConfig,
        leave: Callable[[str], object],
        tell: Callable[[str, str, int | None, int], None],
    ) -> None:
        self._files = HeartbeatFiles(run_dir, life)
        self._life, self._rank = life, rank
        self._heartbeat_seconds, self._step_seconds = config.heartbeat_timeout_seconds, config.step_timeout_seconds
        timeouts = [seconds for seconds in (self._heartbeat_seconds, self._step_seconds) if seconds is not None]
        self._watching = bool(timeouts)
        self._beat_seconds = min([BEAT_SECONDS, *(seconds / BEATS_MIN for seconds in timeouts)])
        self._leave, self._tell = leave, tell
        watched = range(1, size) if rank == 0 else range(1)
        self._silence = {other: _Stillness(self._heartbeat_seconds) for other in watched}
        self._hang = _Stillness(self._step_seconds)
        self._known: dict[int, Heartbeat] = {}  # the newest of each watched rank
        self._told: set[str] = set()
        self._beats = self._signs = self._busy = 0
        self._iteration: int | None = None
        self._looked = time.monotonic()
        self._paused = False
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to beat and to watch; where the file system refuses, that is told, and training goes on unwatched."""
        try:
            self._files.create(self._rank, self._heartbeat(Phase.TRAINING))
        except OSError as error:
            self._say("not watched", f"rank {self._rank} cannot keep a heartbeat, ranks are not watched by it: {error}")
            return
        if self._rank == 0:
            try:
                self._files.remove_earlier()
            except OSError as error:
                logger.warning("heartbeats of earlier lives cannot be removed, which harms nothing: %s", error)
        if self._watching:
            self._looked = time.monotonic()
            self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
            self._thread.start()

    # What the training thread says

    def sign(self) -> None:
        """A forward, a loss or an update: the training moves."""
        self._signs += 1

    def step(self, iteration: int) -> None:
        """This iteration is finished."""
        self._iteration = iteration
        self._signs = 0

    @contextmanager
    def busy(self) -> Iterator[None]:
        """No step ends inside, on purpose: a save that is waited for, a rehearsal, a roll-back."""
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1

    def finish(self) -> None:
        """All ranks are at their end, or have agreed to leave: no step is awaited any more."""
        self._busy += 1

    def obstacle(self) -> str | None:
        """Why this process must leave nothing for a next life, None where it may; from any thread."""
        newer = self._newer_life()  # where that cannot be seen, the next life cannot have begun there either
        if newer is not None:
            return f"this process is of life {self._life}, and life {newer} has begun"
        looking = self._thread is not None and not self._closing.is_set()
        if self._paused or (looking and self._is_pause(time.monotonic() - self._looked)):
            return "this process was stopped for a while, and the others may have gone on without it"
        return None

    def close(self, *, ended: bool) -> None:
        """Watch no longer.

        Args:
            ended: in good order, so that nobody is to wait for this rank; after an error the others will miss it.
        """
        self._closing.set()
        if self._thread is None:
            return
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning("the heartbeat's thread did not end within %g s; it is left behind", CLOSE_SECONDS)
        elif ended:
            self._beat(Phase.ENDED)

    # The thread

    def _run(self) -> None:
        try:
            while not self._closing.wait(self._beat_seconds):
                now = time.monotonic()
                elapsed_seconds = now - self._looked
                self._paused = self._paused or self._is_pause(elapsed_seconds)
                self._looked = now  # after the line before: `obstacle` may be asked between the two
                given_up = self._look(elapsed_seconds)
                if given_up is not None:
                    self._beat(Phase.LEAVING, given_up.lost_rank)
                    self._leave(given_up.reason)
                    return
        except Exception as error:
            logger.exception("watching the other ranks failed")
            self._say("not watched", f"rank {self._rank} watches no longer ({type(error).__name__}: {error})")
            self._beat(Phase.ENDED)  # or a defect here would end a healthy job

    def _look(self, elapsed_seconds: float) -> _GivenUp | None:
        """One beat, and one look at the others."""
        beaten = self._beat(Phase.BUSY if self._busy else Phase.TRAINING)
        paused = self._is_pause(elapsed_seconds)
        newer = self._newer_life() if paused or not beaten else None
        if newer is not None:
            return _GivenUp(f"this process is of life {self._life}, and life {newer} has begun")
        before = dict(self._known)
        for rank in list(self._silence):
            given_up = self._look_at(rank, elapsed_seconds, beaten)
            if given_up is not None:
                return given_up
        if not paused and self._known != before:
            self._paused = False  # the others are heard to beat: they have not left without this process
        return self._hanging(elapsed_seconds) if self._rank == 0 else None

    def _look_at(self, rank: int, elapsed_seconds: float, beaten: bool) -> _GivenUp | None:
        heartbeat = self._read(rank)
        if heartbeat is not None and heartbeat.phase is Phase.LEAVING:
            lost = heartbeat.lost_rank
            whom = "the training" if lost is None else "this rank" if lost == self._rank else f"rank {lost}"
            return _GivenUp(f"rank {rank} has given up {whom}, and leaves", lost)
        if heartbeat is not None and heartbeat.phase is Phase.ENDED:
            del self._silence[rank]
            self._known.pop(rank, None)
            return None
        if heartbeat is not None:
            self._known[rank] = heartbeat
        # Where this rank's own beats fail it may be the file system, and says nothing of the other.
        beats = heartbeat.beats if heartbeat is not None and beaten else None
        if not self._silence[rank].look(beats, elapsed_seconds):
            return None
        return _GivenUp(
            f"rank {rank} was not heard for {self._heartbeat_seconds:g} s: it is stopped, or its machine is gone", rank
        )

    def _hanging(self, elapsed_seconds: float) -> _GivenUp | None:
        """Whether nobody's training moves although it should (rank 0)."""
        known = {self._rank: self._heartbeat(Phase.BUSY if self._busy else Phase.TRAINING), **self._known}
        begun = any(heartbeat.iteration is not None for heartbeat in known.values())
        if not begun or any(heartbeat.phase is Phase.BUSY for heartbeat in known.values()):
            self._hang.reset()
            return None
        places = {rank: heartbeat.place for rank, heartbeat in known.items()}
        if not self._hang.look(places, elapsed_seconds):
            return None
        last = min(places.values())
        behind = [rank for rank in sorted(places) if places[rank] == last]
        step = "its first step" if last[0] < 0 else f"the step after iteration {last[0]}"
        if len(behind) == len(places):
            where, lost = f"all ranks stand at one place of {step}", None
        else:
            where, lost = f"rank {', '.join(map(str, behind))} is behind the others, in {step}", behind[0]
        return _GivenUp(f"no rank's training has moved for {self._step_seconds:g} s: {where}", lost)

    # The files

    def _heartbeat(self, phase: Phase, lost_rank: int | None = None) -> Heartbeat:
        return Heartbeat(self._beats, self._iteration, self._signs, phase, lost_rank)

    def _beat(self, phase: Phase, lost_rank: int | None = None) -> bool:
        """Whether it could be written."""
        self._beats += 1
        try:
            self._files.write(self._rank, self._heartbeat(phase, lost_rank))
        except OSError as error:
            self._say("not heard", f"the heartbeat of rank {self._rank} cannot be written: {error}")
            return False
        return True

    def _read(self, rank: int) -> Heartbeat | None:
        try:
            return self._files.read(rank)
        except OSError as error:
            self._say("not watched", f"the heartbeat of rank {rank} cannot be read by rank {self._rank}: {error}")
            return None

    def _newer_life(self) -> int | None:
        try:
            return self._files.newer_life()
        except OSError as error:
            self._say("not watched", f"whether the next life has begun cannot be seen by rank {self._rank}: {error}")
            return None

    def _is_pause(self, elapsed_seconds: float) -> bool:
        """Whether the others may have given this process up meanwhile."""
        return bool(self._silence) and elapsed_seconds > (self._heartbeat_seconds or math.inf)

    def _say(self, kind: str, message: str) -> None:
        """Once each: what is wrong with a file system is so at every beat."""
        if kind not in self._told:
            self._told.add(kind)
            self._tell(kind, f"{message}; training goes on", None, logging.ERROR)
