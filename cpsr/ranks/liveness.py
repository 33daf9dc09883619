"""The watch of a rank over the others: who sends no heartbeats, hangs, or has ended.

Rank 0 watches all ranks, the others watch those of their own machine and of rank 0's. On a machine they share memory;
between machines each beat costs a small write and a small read for each machine, and rank 0 one read for each; see
`cpsr.ranks.courier`. A rank that gives another one up marks that in its own heartbeat, and all leave within two beats.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cpsr.config import RanksConfig
from cpsr.ranks.board import Board
from cpsr.ranks.courier import Courier
from cpsr.ranks.heartbeat import NONE, Heartbeat, HeartbeatFiles, Phase, newer_life
from cpsr.ranks.link import report

__all__ = ["GivenUp", "Liveness"]

logger = logging.getLogger(__name__)

THREAD_NAME = "cpsr-liveness"
BEAT_SECONDS = 1.0
LOOK_SECONDS = 0.05  # for locks, before the first beat
ALARM_SECONDS = 0.2  # between two looks whether a rank of this machine leaves
# The time between two checks counts for a quarter of a timeout at most: after a pause of this process, its machine or
# its file system, a single check says nothing about the others.
CHECKS_MIN = 4
BEATS_MIN = 2 * CHECKS_MIN  # in the shortest timeout: two between two checks that count in full
# How long a training thread has to notice by itself that another process has ended: gloo raises at once, NCCL hangs.
NOTICE_SECONDS = 3.0
SILENT_SECONDS = 5.0  # of a rank that cannot save its state any more, where another one has failed
CLOSE_SECONDS = 5.0  # the thread ends at once, unless the file system hangs


class _Stillness:
    """How long a value has not changed, over repeated checks; without a timeout it may stay so forever."""

    def __init__(self, timeout_seconds: float | None) -> None:
        self._timeout_seconds = math.inf if timeout_seconds is None else timeout_seconds
        self._seen: object = None
        self._seconds = 0.0

    def check(self, value: object, elapsed_seconds: float) -> bool:
        """Whether it has not changed for too long, `elapsed_seconds` after the last check; None is an unknown value."""
        if value is not None and value != self._seen:
            self._seen, self._seconds = value, 0.0
        elif value is not None:
            self._seconds += min(elapsed_seconds, self._timeout_seconds / CHECKS_MIN)
        return self._seconds >= self._timeout_seconds

    def lasts(self, seconds: float) -> bool:
        """Whether it has not changed for so long."""
        return self._seconds >= min(seconds, self._timeout_seconds)


@dataclass(frozen=True)
class GivenUp:
    """Why this process must leave, and because of which rank; `NONE` if unknown."""

    reason: str
    lost_rank: int = NONE


class Liveness:
    """One rank's heartbeat, and its watch over the others from their first beat on.

    `signs`, `step` and `busy` belong to the training thread.

    Args:
        run_dir: on storage that every rank shares.
        life: of the run; no two have the same number.
        board: of this rank's machine.
        leave: ends this process, with the reason; the watching thread calls it once.
        report: records an event: its kind, one sentence, the iteration and the logging level.
        hear: gets a monotonic time and the newest heartbeat of each rank that trains, at every beat of rank 0.

    Attributes:
        signs: of progress in the step under way: forwards, losses, an update.
    """

    def __init__(
        self,
        run_dir: Path,
        life: int,
        board: Board,
        config: RanksConfig,
        leave: Callable[["GivenUp"], object],
        report: Callable[[str, str, int | None, int], None],
        hear: Callable[[float, Mapping[int, Heartbeat]], None] = lambda now, said: None,
    ) -> None:
        self._run_dir, self._life, self._board, self._rank = run_dir, life, board, board.rank
        self._courier = Courier(HeartbeatFiles(run_dir, life), board, self._report_once)
        self._heartbeat_seconds, self._step_seconds = config.heartbeat_timeout_seconds, config.step_timeout_seconds
        timeouts = [seconds for seconds in (self._heartbeat_seconds, self._step_seconds) if seconds is not None]
        self._beat_seconds = min([BEAT_SECONDS, *(seconds / BEATS_MIN for seconds in timeouts)])
        self._leave, self._report, self._hear = leave, report, hear
        self._silence = {other: _Stillness(self._heartbeat_seconds) for other in self._courier.watched}
        self._hang = _Stillness(self._step_seconds)
        self._known: dict[int, Heartbeat] = {}  # the newest of each watched rank
        self._locked: set[int] = set()  # processes (see `Courier.process_of`) whose lock was seen
        self._ended: dict[int, float] = {}  # those that are gone, and since when that is known
        self._reported: set[str] = set()
        self._beats = self.signs = self._busy = 0
        self._iteration, self._own = NONE, (0, 0, 0)
        self._alarm = board.alarm[0]
        self._checked = time.monotonic()
        self._paused = self._settled = False
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to beat and to watch; if the file system refuses, report it and train on unwatched."""
        try:
            self._courier.start(self._heartbeat(Phase.TRAINING))
        except OSError as error:
            self._report_once(
                "not watched", f"rank {self._rank} cannot write its heartbeat and watches no ranks: {error}"
            )
            return
        if self._silence and self._heartbeat_seconds is not None:
            self._courier.hold()
        if self._heartbeat_seconds is not None or self._step_seconds is not None:
            self._checked = time.monotonic()
            self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
            self._thread.start()

    # Called by the training thread

    def step(self, iteration: int, own: tuple[int, int, int] = (0, 0, 0)) -> None:
        """This iteration is finished.

        Args:
            iteration: which.
            own: steps so far, and the microseconds of their compute and data.
        """
        self._iteration, self._own = iteration, own
        self.signs = 0

    @contextmanager
    def busy(self) -> Iterator[None]:
        """No step ends inside, on purpose: a blocking save, a roll-back."""
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1

    def finish(self) -> None:
        """All ranks are done, or have agreed to leave: no further step is expected."""
        self._busy += 1
        self._settled = True

    def settle(self) -> None:
        """The training thread has noticed a failure by itself, and ends this process."""
        self._settled = True

    def silent_rank(self) -> int | None:
        """A rank that has sent no heartbeat for some seconds; on any thread. After an error it is not waited for."""
        return next((rank for rank, silence in list(self._silence.items()) if silence.lasts(SILENT_SECONDS)), None)

    def obstacle(self) -> str | None:
        """Why this process must not dump for the next life; None if it may; on any thread."""
        newer = self._newer_life()  # if the directory cannot be read, the next life cannot have begun there either
        if newer is not None:
            return f"this process is of life {self._life}, and life {newer} has begun"
        checking = self._thread is not None and not self._closing.is_set()
        if self._paused or (checking and self._is_pause(time.monotonic() - self._checked)):
            return "this process was stopped for a while, and the others may have gone on without it"
        return None

    def close(self, *, ended: bool) -> None:
        """Stop watching; a second call has no effect.

        Args:
            ended: in good order: no rank waits for this one. After an error the others must notice.
        """
        self._settled = True
        self._closing.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                logger.warning("the heartbeat's thread did not end within %g s; it is abandoned", CLOSE_SECONDS)
                return
            if ended:
                self._announce(Phase.ENDED)
        self._courier.close()

    # The thread

    def _run(self) -> None:
        try:
            until = time.monotonic() + self._beat_seconds
            while not self._sees_locks() and time.monotonic() < until and not self._closing.wait(LOOK_SECONDS):
                pass  # a rank may end before the first beat
            while not self._waits():
                now = time.monotonic()
                elapsed_seconds = now - self._checked
                self._paused = self._paused or self._is_pause(elapsed_seconds)
                self._checked = now  # after the line before: `obstacle` may run between the two
                given_up = self.check(elapsed_seconds)
                if given_up is not None:
                    self._announce(Phase.LEAVING, given_up.lost_rank)
                    self._leave(given_up)
                    return
        except Exception as error:
            logger.exception("watching the other ranks failed")
            self._report_once("not watched", f"rank {self._rank} no longer watches ({type(error).__name__}: {error})")
            self._announce(Phase.ENDED)  # or a defect here would end a healthy job

    def _waits(self) -> bool:
        """Wait for the next beat, or the last one of a rank of this machine. Whether this rank has none any more."""
        until = time.monotonic() + self._beat_seconds
        while self._board.alarm[0] == self._alarm and (left_seconds := until - time.monotonic()) > 0:
            if self._closing.wait(min(ALARM_SECONDS, left_seconds)):
                break
        self._alarm = self._board.alarm[0]
        return self._closing.is_set()

    def check(self, elapsed_seconds: float) -> GivenUp | None:
        """Beat once, and check the others once; by its own thread."""
        self._beats += 1
        self._courier.beat(self._heartbeat(Phase.BUSY if self._busy else Phase.TRAINING))
        written = self._courier.carry(self._silence.keys())
        paused = self._is_pause(elapsed_seconds)
        newer = self._newer_life() if paused or not written else None
        if newer is not None:
            return GivenUp(f"this process is of life {self._life}, and life {newer} has begun")
        launcher = report()
        if (lost := None if launcher is None else launcher.lost()) is not None:
            return GivenUp(f"the launcher has lost {lost}")
        heard = {rank: self._newest(rank) for rank in self._silence}
        self._sees_locks()
        changed = {rank for rank, heartbeat in heard.items() if heartbeat != self._known.get(rank)}
        self._see_ends({self._courier.process_of(rank) for rank in changed})
        for rank, heartbeat in heard.items():
            given_up = self._check_rank(rank, heartbeat, elapsed_seconds)
            if given_up is not None:
                return given_up
        if not paused and not changed.isdisjoint(heard.keys() - set(self._board.ranks) or changed):
            self._paused = False  # the others, on other machines if there are any, have not left without this process
        if self._rank != 0:
            return None
        self._hear(time.monotonic(), {0: self._heartbeat(Phase.TRAINING), **self._known})
        return self._hanging(elapsed_seconds)

    def _newest(self, rank: int) -> Heartbeat | None:
        """Its newest heartbeat that has arrived; what a process carried that was stopped amid that may be older."""
        heard, known = self._courier.heard(rank), self._known.get(rank)
        return known if heard is None or (known is not None and heard.beats < known.beats) else heard

    def _check_rank(self, rank: int, heartbeat: Heartbeat | None, elapsed_seconds: float) -> GivenUp | None:
        if heartbeat is not None and heartbeat.phase == Phase.LEAVING:
            lost = heartbeat.lost_rank
            whom = "the training" if lost == NONE else "this rank" if lost == self._rank else f"rank {lost}"
            return GivenUp(f"rank {rank} has given up {whom}, and leaves", lost)
        if heartbeat is not None and heartbeat.phase == Phase.ENDED:
            del self._silence[rank]
            self._known.pop(rank, None)
            return None
        if heartbeat is not None:
            self._known[rank] = heartbeat
        ended = self._ended.get(self._courier.process_of(rank))
        if ended is not None and not self._settled and time.monotonic() - ended >= NOTICE_SECONDS:
            return GivenUp(f"the process of rank {rank} has ended, and the training thread has not noticed", rank)
        # If this machine's own beats fail too, the file system may be the cause, and not the other rank.
        beats = heartbeat.beats if heartbeat is not None and rank not in self._courier.unknown else None
        if not self._silence[rank].check(beats, elapsed_seconds):
            return None
        return GivenUp(
            f"rank {rank} sent no heartbeat for {self._heartbeat_seconds:g} s: it is stopped, or its machine is gone",
            rank,
        )

    def _sees_locks(self) -> bool:
        """Look which watched processes hold their locks. True once all were seen to, or where no locks are held."""
        if self._heartbeat_seconds is None:
            return True
        watched = {self._courier.process_of(rank) for rank in self._silence}
        self._locked &= watched
        self._locked |= {process for process in watched - self._locked if self._courier.is_held(process)}
        return watched == self._locked

    def _see_ends(self, changed: set[int]) -> None:
        """Look which processes have ended; the training thread has time to notice by itself. Those changed beat."""
        for process in sorted(self._locked):
            if process in changed:
                if self._ended.pop(process, None) is not None:
                    self._locked.discard(process)  # without: a process that closes a file loses its locks on that
            elif self._courier.is_held(process) is not False:
                self._ended.pop(process, None)
            else:
                self._ended.setdefault(process, time.monotonic())

    def _hanging(self, elapsed_seconds: float) -> GivenUp | None:
        """Whether no rank makes progress although it should (rank 0)."""
        known = {self._rank: self._heartbeat(Phase.BUSY if self._busy else Phase.TRAINING), **self._known}
        begun = any(heartbeat.iteration != NONE for heartbeat in known.values())
        if not begun or any(heartbeat.phase == Phase.BUSY for heartbeat in known.values()):
            self._hang = _Stillness(self._step_seconds)
            return None
        places = {rank: heartbeat.place for rank, heartbeat in known.items()}
        if not self._hang.check(places, elapsed_seconds):
            return None
        last = min(places.values())
        behind = [rank for rank in sorted(places) if places[rank] == last]
        step = "its first step" if last[0] < 0 else f"the step after iteration {last[0]}"
        if len(behind) == len(places):
            where, lost = f"all ranks are at one place of {step}", NONE
        else:
            where, lost = f"rank {', '.join(map(str, behind))} is behind the others, in {step}", behind[0]
        return GivenUp(f"no rank has made progress for {self._step_seconds:g} s: {where}", lost)

    def _heartbeat(self, phase: Phase, lost_rank: int = NONE) -> Heartbeat:
        return Heartbeat(self._beats, self._iteration, self.signs, phase, lost_rank, *self._own)

    def _announce(self, phase: Phase, lost_rank: int = NONE) -> None:
        self._beats += 1
        self._courier.announce(self._heartbeat(phase, lost_rank))

    def _newer_life(self) -> int | None:
        try:
            return newer_life(self._run_dir, self._life)
        except OSError as error:
            self._report_once("not watched", f"rank {self._rank} cannot see whether the next life has begun: {error}")
            return None

    def _is_pause(self, elapsed_seconds: float) -> bool:
        """Whether the others may have given up this process meanwhile."""
        return bool(self._silence) and elapsed_seconds > (self._heartbeat_seconds or math.inf)

    def _report_once(self, kind: str, message: str) -> None:
        """Report each kind once: a broken file system fails at every beat."""
        if kind not in self._reported:
            self._reported.add(kind)
            self._report(kind, f"{message}; training goes on", None, logging.ERROR)
